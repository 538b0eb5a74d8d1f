from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import apis, errors
from common.apis import MODEL_CHARS, PREFIX_BLOCK_BYTES, PREFIX_BLOCKS
from common.errors import BadRequest, LBError, ModelNotFound


def refused(body: bytes) -> BadRequest:
    """Why this body is refused, by reading or for its model."""
    with pytest.raises(BadRequest) as caught:
        apis.model_of(apis.read_body(body))
    assert caught.value.status == 400
    return caught.value


# -- which API -------------------------------------------------------------------------------------------------------


def test_relayed_routes() -> None:
    found = {key: (api.operation, api.generates) for key, api in apis.ROUTES.items()}
    assert found == {
        ("POST", "/v1/chat/completions"): ("chat", True),
        ("POST", "/v1/completions"): ("text_completion", True),
        ("POST", "/v1/embeddings"): ("embeddings", False),
    }
    assert apis.route("POST", "/v1/completions") is apis.ROUTES["POST", "/v1/completions"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/chat/completions"),
        ("post", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions/"),
        ("POST", "/v1/chat/completions?x=1"),
        ("POST", "//v1/chat/completions"),
        ("GET", "/v1/models"),
        ("FOO", "/"),
    ],
)
def test_anything_else_is_not_relayed(method: str, path: str) -> None:
    assert apis.route(method, path) is None


# -- bodies that are refused (C07) -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"[]",
        b'"hi"',
        b"null",
        b"7",
        b'{"model":"m"',
        b'{"model":"m"}}',
        b'{"model":"m"} {"model":"n"}',
        b"{'model':'m'}",
        b'{"model":"m",}',
        b'{"model":"m","x":NaN}',
        b'{"model":"m","x":01}',
        b'{"model":"m","x":"line\nbreak"}',
        b'{"model":"m","x":"\\q"}',
        b'{"model":"m","messages":[}',
        b'\xef\xbb\xbf{"model":"m"}',
        '{"model":"m"}'.encode("utf-16"),
        '{"model":"m"}'.encode("utf-16-le"),
        b'{"model":"m","x":' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"model":"m","messages":' + b'[{"a":' * 100_000,
        b"\x80\x02}q\x00.",
    ],
)
def test_what_is_no_json_object_is_a_bad_request(body: bytes) -> None:
    assert "JSON object" in str(refused(body))


@pytest.mark.parametrize("where", ["model", "messages", "prompt", "input", "user", "x"])
@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf"])
def test_invalid_utf_8_is_a_bad_request_wherever_it_stands(where: str, bad: bytes) -> None:
    body = b'{"model":"m","%s":[{"content":"a%sb"}]}' % (where.encode(), bad)
    if where == "model":
        body = b'{"model":"a%sb"}' % bad
    assert "JSON object" in str(refused(body))


def test_utf_8_is_checked_across_the_pieces_it_is_checked_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apis, "UTF8_CHUNK", 7)
    body = '{"model":"m","messages":"€uro 你好 \U0001f600"}'.encode()
    assert apis.read_body(body).model == "m"
    with pytest.raises(BadRequest):
        apis.read_body(body[:-2] + b"\xf0\x9f" + body[-2:])


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"model":null}',
        b'{"model":7}',
        b'{"model":""}',
        b'{"model":["m"]}',
        b'{"model":true}',
        b'{"Model":"m"}',
    ],
)
def test_a_body_without_a_model_says_so(body: bytes) -> None:
    error = refused(body)
    assert (error.param, error.code) == ("model", "missing_model")


def test_a_model_name_is_bounded() -> None:
    longest = "é" * MODEL_CHARS
    assert apis.model_of(apis.read_body(json.dumps({"model": longest}).encode())) == longest
    assert refused(json.dumps({"model": longest + "é"}).encode()).param == "model"


def test_a_lone_surrogate_is_no_name() -> None:
    refused(b'{"model":"\\ud800"}')


@pytest.mark.parametrize("key", ["model", "stream"])
@pytest.mark.parametrize(
    "body",
    [
        '{"model":"m","KEY":1,"KEY":2}',
        '{"KEY":1,"model":"m","a":[1,2,3],"KEY":1}',
        '{"model":"m","KEY":1,"ESCAPED":2}',
        '{"model":"m","ESCAPED":1,"KEY":2}',
        '{"model":"m","ESCAPED":1,"ESCAPED":2}',
        '{"model":"m","KEY" :1, "KEY"\n:2}',
    ],
)
@pytest.mark.parametrize("letter", [0, 2, 4])
def test_a_key_that_routing_depends_on_may_stand_there_once(key: str, body: str, letter: int) -> None:
    escaped = key[:letter] + f"\\u{ord(key[letter]):04x}" + key[letter + 1 :]
    text = body.replace("ESCAPED", escaped).replace("KEY", key).replace('"model":"m",', "", key == "model")
    error = refused(text.encode())
    assert error.param == key
    assert "more than once" in str(error)


def test_every_letter_of_a_routed_key_may_be_hidden_and_is_found() -> None:
    for key in ("model", "stream"):
        for letter in range(len(key)):
            for form in ("\\u{:04x}", "\\u{:04X}"):
                escaped = key[:letter] + form.format(ord(key[letter])) + key[letter + 1 :]
                assert refused(f'{{"{key}":"a","{escaped}":"b"}}'.encode()).param == key


def test_an_escaped_key_alone_counts_as_what_it_spells() -> None:
    assert apis.model_of(apis.read_body(b'{"\\u006dodel":"m"}')) == "m"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","metadata":{"model":"n"}}',
        b'{"model":"m","messages":[{"content":"\\"model\\" is \\"model\\""}]}',
        b'{"model":"m","messages":[{"content":"model"},{"content":"model"}],"x":"model"}',
        b'{"model":"m","tools":[{"function":{"parameters":{"properties":{"stream":{},"model":{}}}}}],"stream":true}',
        b'{"model":"model"}',
        b'{"model":"m","models":1,"xmodel":2,"MODEL":3}',
        b'{"model":"m","a":1,"a":2,"messages":1,"messages":2}',
        b'{"model":"m","x":"\\u006dodel \\u0041"}',
    ],
)
def test_the_same_word_elsewhere_is_no_duplicate(body: bytes) -> None:
    assert apis.read_body(body).model in ("m", "model")


@given(
    st.dictionaries(
        st.text(max_size=8) | st.sampled_from(["model", "stream", "messages", "user"]), st.text(max_size=20)
    ),
    st.booleans(),
)
def test_any_object_is_read_as_json_reads_it(fields: dict[str, str], ascii_only: bool) -> None:
    try:
        body = json.dumps(fields, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:  # a lone surrogate is no UTF-8
        return
    read = apis.read_body(body)
    assert read.model == fields.get("model")
    assert read.stream == fields.get("stream")
    assert read.user == fields.get("user")


@given(st.binary(max_size=60))
def test_garbage_is_never_more_than_a_bad_request(body: bytes) -> None:
    with suppress(BadRequest):
        apis.model_of(apis.read_body(body))


# -- bodies that pass (C34) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [
        b'"seed":9007199254740993',
        b'"seed":1e400',
        b'"temperature":0.1000000000000000055',
        b'"x":-0',
        b'"x":[1.0,1]',
        b'"x":"\\u0000"',
        b'"x":"a\\/b"',
        b'"messages":[{"role":"x_new","content":null,"extra":{"deep":[1,{"er":true}]}}]',
        b'"n":3',
        b'"n":"three"',
        b'"max_tokens":"many"',
        b'"max_tokens":-5',
        b'"top_k":99999999999999999999999999999999',
        b'"x":"\xe2\x82\xac"',
        b'"messages":17',
        b'"stream":null',
        b'"stream":{"odd":1}',
        b'"user":{"id":1}',
    ],
)
def test_what_routing_does_not_need_is_neither_checked_nor_refused(field: bytes) -> None:
    fields = apis.read_body(b'{"zeta":1,"model":"m",' + field + b',"alpha":2}')
    assert apis.model_of(fields) == "m"
    assert not apis.wants_stream(fields)
    assert apis.token_cap(fields) is None
    assert apis.session_key(fields, None, None) == ""


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("true", True),
        ("1", True),
        ('"true"', True),
        ('"True"', True),
        ("false", False),
        ("null", False),
        ("0", False),
        ('"false"', False),
        ('""', False),
        ("2", False),
        ("[]", False),
        ("{}", False),
        ("[true]", False),
    ],
)
def test_stream_is_read_as_servers_read_it(value: str, wanted: bool) -> None:
    assert apis.wants_stream(apis.read_body(f'{{"model":"m","stream":{value}}}'.encode())) is wanted


def test_stream_is_off_when_it_is_not_mentioned() -> None:
    assert apis.wants_stream(apis.read_body(b'{"model":"m"}')) is False


@pytest.mark.parametrize(
    ("fields", "cap"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": 5, "max_completion_tokens": -1}, 5),
        ({"max_tokens": 0}, None),
        ({"max_tokens": -5}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": 5.0}, None),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": 2**60}, None),
        ({"max_tokens": [5]}, None),
    ],
)
def test_token_cap_is_the_requests_own_where_it_makes_sense(fields: dict[str, Any], cap: int | None) -> None:
    assert apis.token_cap(apis.read_body(json.dumps({"model": "m"} | fields).encode())) == cap


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": [{"role": "user", "content": "hé"}]}, '[{"role": "user", "content": "h\\u00e9"}]'),
        ({"prompt": ["a", "b"]}, '["a", "b"]'),
        ({"input": "abc"}, '"abc"'),
        ({"messages": [1], "prompt": "p", "input": "i"}, "[1]"),
        ({}, ""),
    ],
)
def test_the_prompt_is_its_bytes_in_the_body(fields: dict[str, Any], text: str) -> None:
    assert apis.read_body(json.dumps({"model": "m"} | fields).encode()).text == text.encode()


# -- sessions --------------------------------------------------------------------------------------------------------

SOURCES = ("header", "prompt_cache_key", "previous_response_id", "conversation", "user", "cookie")


def key_of(present: dict[str, Any]) -> str:
    in_body = {key: value for key, value in present.items() if key in SOURCES[1:5]}
    fields = apis.read_body(json.dumps({"model": "m"} | in_body).encode())
    return apis.session_key(fields, present.get("header"), present.get("cookie"))


@pytest.mark.parametrize("first", range(len(SOURCES)))
def test_the_first_source_that_is_there_names_the_session(first: int) -> None:
    everything = {source: f"value of {source}" for source in SOURCES[first:]}
    alone = {SOURCES[first]: f"value of {SOURCES[first]}"}
    assert key_of(everything) == key_of(alone) != ""


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_names_a_session_and_different_values_different_ones(source: str) -> None:
    assert key_of({source: "a"}) != key_of({source: "b"})
    assert key_of({source: "a"}) == key_of({"header": "a"})


@pytest.mark.parametrize("nothing", ["", None, 7, True, [], {}, ["a"]])
def test_what_is_no_name_is_passed_over(nothing: Any) -> None:
    assert key_of(dict.fromkeys(SOURCES[1:5], nothing)) == ""
    assert key_of(dict.fromkeys(SOURCES[1:4], nothing) | {"user": "u"}) == key_of({"user": "u"})


def test_a_conversation_may_be_named_or_an_object_with_an_id() -> None:
    assert key_of({"conversation": {"id": "c1"}}) == key_of({"conversation": "c1"}) != ""
    assert key_of({"conversation": {"id": 7}}) == key_of({"conversation": {}}) == ""


def test_a_session_key_is_hashed_and_of_one_length() -> None:
    keys = [key_of({"header": value}) for value in ("a", "b" * 10_000, "ü\udcff")]
    assert all(len(key) == 32 and int(key, 16) for key in keys)


# -- prefixes --------------------------------------------------------------------------------------------------------


def test_a_prompt_shorter_than_a_block_has_no_prefix_and_a_whole_block_has_one() -> None:
    assert apis.prefix_hashes(b"") == ()
    assert apis.prefix_hashes(b"a" * (PREFIX_BLOCK_BYTES - 1)) == ()
    assert len(apis.prefix_hashes(b"a" * PREFIX_BLOCK_BYTES)) == 1
    assert len(apis.prefix_hashes(b"a" * (2 * PREFIX_BLOCK_BYTES - 1))) == 1
    assert len(apis.prefix_hashes(b"a" * (2 * PREFIX_BLOCK_BYTES))) == 2


def test_hashes_of_a_prefix_are_bounded() -> None:
    assert len(apis.prefix_hashes(bytes(PREFIX_BLOCK_BYTES * (PREFIX_BLOCKS + 10)))) == PREFIX_BLOCKS


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_prefix_hashes_agree_up_to_where_the_prompts_do(a: bytes, b: bytes) -> None:
    stretch = PREFIX_BLOCK_BYTES // 32  # so that a few bytes make several blocks
    left, right = (b"".join(bytes([x]) * stretch for x in text) for text in (a, b))
    one, other = apis.prefix_hashes(left), apis.prefix_hashes(right)
    for n, (x, y) in enumerate(zip(one, other, strict=False), 1):
        same = left[: n * PREFIX_BLOCK_BYTES] == right[: n * PREFIX_BLOCK_BYTES]
        assert (x == y) is same


def test_equal_blocks_after_different_ones_differ() -> None:
    a, b, same = b"a" * PREFIX_BLOCK_BYTES, b"b" * PREFIX_BLOCK_BYTES, b"s" * PREFIX_BLOCK_BYTES
    assert apis.prefix_hashes(a + same)[1] != apis.prefix_hashes(b + same)[1]
    repeated = apis.prefix_hashes(same * 5)
    assert len(set(repeated)) == 5


def test_prefix_hashes_are_the_same_in_every_process() -> None:
    # XXH3 with seed 0: tiers compare each other's hashes, so neither salt nor version may come in.
    assert apis.prefix_hashes(b"a" * PREFIX_BLOCK_BYTES) == (5635166812439391674,)


# -- errors ----------------------------------------------------------------------------------------------------------


def shape(body: bytes) -> dict[str, Any]:
    content = json.loads(body)
    assert set(content) == {"error"}
    assert set(content["error"]) == {"message", "type", "param", "code"}
    return content["error"]


@pytest.mark.parametrize(
    ("error", "type_"),
    [
        (BadRequest("no", param="model"), "invalid_request_error"),
        (ModelNotFound("no", param="model"), "not_found_error"),
        (BadRequest("no", status=413, code="too_large"), "invalid_request_error"),
        (BadRequest("no", status=401), "authentication_error"),
        (BadRequest("no", status=403), "permission_error"),
        (BadRequest("no", status=408), "timeout_error"),
        (BadRequest("no", status=422), "invalid_request_error"),
        (errors.Saturated("no"), "rate_limit_error"),
        (errors.NoEndpoints("no"), "server_error"),
        (errors.StreamBroken("no"), "server_error"),
        (errors.FirstByteTimeout("no"), "server_error"),
        (LBError("no"), "server_error"),
    ],
)
def test_errors_have_the_shape_of_the_api(error: LBError, type_: str) -> None:
    assert shape(apis.error_body("openai", error)) == {
        "message": "no",
        "type": type_,
        "param": getattr(error, "param", None),
        "code": error.code,
    }


def test_an_error_without_a_code_of_ours_has_none() -> None:
    error = shape(apis.error_body("openai", (405, "not like this")))
    assert error == {"message": "not like this", "type": "invalid_request_error", "param": None, "code": None}


def test_a_message_is_escaped_whatever_a_client_put_into_it() -> None:
    message = 'the "model"\n\x00 </script> é'
    assert shape(apis.error_body("openai", BadRequest(message)))["message"] == message


def test_a_stream_is_told_of_its_end_by_one_event() -> None:
    event = apis.error_event("openai", 'it "broke"\n\n')
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2  # a message cannot end the event early
    assert shape(event.removeprefix(b"data: "))["code"] == "stream_broken"
    assert shape(apis.error_event("openai", "x", "evicted").removeprefix(b"data: "))["code"] == "evicted"
