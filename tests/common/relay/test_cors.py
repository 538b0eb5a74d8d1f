from __future__ import annotations

from common.relay.cors import Cors

APP = b"https://app.example.com"


def preflight(
    origin: bytes, *, method: bytes = b"POST", headers: bytes = b"authorization, content-type"
) -> list[tuple[bytes, bytes]]:
    return [
        (b"origin", origin),
        (b"access-control-request-method", method),
        (b"access-control-request-headers", headers),
    ]


def test_nothing_is_allowed_unless_it_is_configured() -> None:
    cors = Cors(())
    assert not cors
    assert cors.preflight(preflight(APP)) is None
    assert cors.answer([(b"origin", APP)]) == []


def test_an_allowed_origin_is_answered_and_no_other_is_reflected() -> None:
    cors = Cors(("https://app.example.com/", "https://b.example"))
    fields = dict(cors.preflight(preflight(APP)) or [])
    assert fields[b"access-control-allow-origin"] == APP
    assert fields[b"access-control-allow-headers"] == b"authorization, content-type"
    assert cors.preflight(preflight(b"https://evil.example")) is None
    assert cors.preflight(preflight(b"https://app.example.com.evil.example")) is None
    assert cors.answer([(b"origin", b"https://evil.example")]) == []
    assert dict(cors.answer([(b"origin", APP)]))[b"access-control-allow-origin"] == APP


def test_all_origins_are_allowed_without_being_named() -> None:
    assert dict(Cors(("*",)).answer([(b"origin", APP)]))[b"access-control-allow-origin"] == b"*"


def test_a_request_that_is_no_preflight_gets_no_answer_to_one() -> None:
    cors = Cors(("*",))
    assert cors.preflight([(b"origin", APP)]) is None
    assert cors.preflight([(b"access-control-request-method", b"POST")]) is None
    assert cors.answer([]) == []
