from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.apis import bodies, match, understand
from common.apis.bodies import MODEL_CHARS, PREFIX_BLOCK_BYTES, PREFIX_BLOCKS, Ask
from common.errors import BadRequest

NO_HEADER = {}.get


def refused(body: bytes) -> BadRequest:
    """Why this body is refused, by reading or for its model."""
    with pytest.raises(BadRequest) as caught:
        bodies.model_of(bodies.read_fields(body))
    assert caught.value.status == 400
    return caught.value


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
    monkeypatch.setattr(bodies, "UTF8_CHUNK", 7)
    body = '{"model":"m","messages":"€uro 你好 \U0001f600"}'.encode()
    assert bodies.read_fields(body).model == "m"
    with pytest.raises(BadRequest):
        bodies.read_fields(body[:-2] + b"\xf0\x9f" + body[-2:])


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
    assert bodies.model_of(bodies.read_fields(json.dumps({"model": longest}).encode())) == longest
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
    assert bodies.model_of(bodies.read_fields(b'{"\\u006dodel":"m"}')) == "m"


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
    assert bodies.read_fields(body).model in ("m", "model")


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
    read = bodies.read_fields(body)
    assert read.model == fields.get("model")
    assert read.stream == fields.get("stream")
    assert (json.loads(bytes(read.user)) if read.user else None) == fields.get("user")


@given(st.binary(max_size=60))
def test_garbage_is_never_more_than_a_bad_request(body: bytes) -> None:
    with suppress(BadRequest):
        bodies.model_of(bodies.read_fields(body))


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
    fields = bodies.read_fields(b'{"zeta":1,"model":"m",' + field + b',"alpha":2}')
    assert bodies.model_of(fields) == "m"
    assert not bodies.wants_stream(fields)
    assert bodies.token_cap(fields) is None
    assert bodies.session_key(fields, NO_HEADER) == ""


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
    assert bodies.wants_stream(bodies.read_fields(f'{{"model":"m","stream":{value}}}'.encode())) is wanted


def test_stream_is_off_when_it_is_not_mentioned() -> None:
    assert bodies.wants_stream(bodies.read_fields(b'{"model":"m"}')) is False


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
    assert bodies.token_cap(bodies.read_fields(json.dumps({"model": "m"} | fields).encode())) == cap


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
    assert bodies.read_fields(json.dumps({"model": "m"} | fields).encode()).text == text.encode()


BLOB = "iVBORw0KGgo" + "A/+b" * 4000 + "=="


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BLOB}"}},
        {"type": "input_image", "image_url": f"data:image/png;base64,{BLOB}"},
        {"type": "input_audio", "input_audio": {"data": BLOB, "format": "wav"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BLOB}},
    ],
    ids=["chat", "responses", "audio", "anthropic"],
)
def test_an_image_inside_a_prompt_is_an_item_and_no_text(part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part, part]}]
    ask = asked("POST", "/v1/chat/completions", json.dumps({"model": "m", "messages": messages}).encode())
    assert ask.items == 2
    assert len("What is this?") < ask.size < 1000


def test_ollama_has_its_images_beside_the_text() -> None:
    ask = asked(
        "POST", "/api/chat", json.dumps({"model": "m", "messages": [{"content": "x", "images": [BLOB]}]}).encode()
    )
    assert (ask.items, ask.size < 100) == (1, True)


def test_an_image_by_its_address_is_an_item_too() -> None:
    part = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    ask = asked("POST", "/v1/chat/completions", json.dumps({"model": "m", "messages": [{"content": [part]}]}).encode())
    assert ask.items == 1


@pytest.mark.parametrize(
    "text", ["word " * 2000, "汉字" * 3000, "a\n" * 3000, "x" * (bodies.MEDIA_BYTES - 1), "key: value, " * 900]
)
def test_prose_is_text_however_long(text: str) -> None:
    body = json.dumps({"model": "m", "messages": [{"content": text}]}, ensure_ascii=False).encode()
    ask = asked("POST", "/v1/chat/completions", body)
    assert (ask.items, ask.size > len(text)) == (0, True)


# -- sessions --------------------------------------------------------------------------------------------------------

SOURCES = ("header", "prompt_cache_key", "previous_response_id", "conversation", "user", "cookie")


def key_of(present: dict[str, Any]) -> str:
    in_body = {key: value for key, value in present.items() if key in SOURCES[1:5]}
    fields = bodies.read_fields(json.dumps({"model": "m"} | in_body).encode())
    cookie = f"a=b; headwater-session={present['cookie']}" if "cookie" in present else None
    headers = {b"x-session-id": present.get("header"), b"cookie": cookie}
    return bodies.session_key(fields, headers.get)


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
    assert bodies.prefix_hashes(b"") == ()
    assert bodies.prefix_hashes(b"a" * (PREFIX_BLOCK_BYTES - 1)) == ()
    assert len(bodies.prefix_hashes(b"a" * PREFIX_BLOCK_BYTES)) == 1
    assert len(bodies.prefix_hashes(b"a" * (2 * PREFIX_BLOCK_BYTES - 1))) == 1
    assert len(bodies.prefix_hashes(b"a" * (2 * PREFIX_BLOCK_BYTES))) == 2


def test_hashes_of_a_prefix_are_bounded() -> None:
    assert len(bodies.prefix_hashes(bytes(PREFIX_BLOCK_BYTES * (PREFIX_BLOCKS + 10)))) == PREFIX_BLOCKS


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_prefix_hashes_agree_up_to_where_the_prompts_do(a: bytes, b: bytes) -> None:
    stretch = PREFIX_BLOCK_BYTES // 32  # so that a few bytes make several blocks
    left, right = (b"".join(bytes([x]) * stretch for x in text) for text in (a, b))
    one, other = bodies.prefix_hashes(left), bodies.prefix_hashes(right)
    for n, (x, y) in enumerate(zip(one, other, strict=False), 1):
        same = left[: n * PREFIX_BLOCK_BYTES] == right[: n * PREFIX_BLOCK_BYTES]
        assert (x == y) is same


def test_equal_blocks_after_different_ones_differ() -> None:
    a, b, same = b"a" * PREFIX_BLOCK_BYTES, b"b" * PREFIX_BLOCK_BYTES, b"s" * PREFIX_BLOCK_BYTES
    assert bodies.prefix_hashes(a + same)[1] != bodies.prefix_hashes(b + same)[1]
    repeated = bodies.prefix_hashes(same * 5)
    assert len(set(repeated)) == 5


def test_prefix_hashes_are_the_same_in_every_process() -> None:
    # XXH3 with seed 0: tiers compare each other's hashes, so neither salt nor version may come in.
    assert bodies.prefix_hashes(b"a" * PREFIX_BLOCK_BYTES) == (5635166812439391674,)


# -- every API -------------------------------------------------------------------------------------------------------


def asked(method: str, path: str, body: bytes, **headers: str) -> Ask:
    matched = match(method, path)
    assert matched is not None
    return understand(matched, {k.replace("_", "-").encode(): v for k, v in headers.items()}.get, body)


@pytest.mark.parametrize(
    ("path", "fields", "wanted"),
    [
        ("/v1/responses", {"input": "abc", "max_output_tokens": 9}, {"size": 5, "cap": 9}),
        ("/v1/messages", {"messages": [1], "max_tokens": 7, "stream": True}, {"size": 3, "cap": 7, "stream": True}),
        ("/v1/rerank", {"query": "q", "documents": ["a", "b"]}, {"size": len('"q"["a", "b"]')}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, {"size": 6}),
        ("/api/chat", {"messages": [1], "options": {"num_predict": 5}}, {"size": 3, "cap": 5, "stream": True}),
        ("/api/generate", {"prompt": "p", "stream": False}, {"size": 3, "stream": False}),
    ],
)
def test_each_api_names_its_prompt_and_its_bounds_its_own_way(
    path: str, fields: dict[str, Any], wanted: dict[str, Any]
) -> None:
    ask = asked("POST", path, json.dumps({"model": "m"} | fields).encode())
    assert ask.model == "m"
    assert {name: getattr(ask, name) for name in wanted} == wanted


def test_a_model_in_the_path_needs_nothing_of_the_body() -> None:
    ask = asked("POST", "/v2/models/a%2Fb/versions/3/infer", b"\x00\x01 not JSON")
    assert (ask.model, ask.size, ask.stream) == ("a/b", 11, False)
    assert asked("POST", "/v2/models/m/generate_stream", b"{}").stream
    assert asked("POST", "/predictions/echo/1.0", b"").model == "echo"
    assert asked("GET", "/v2/models/m/ready", b"", x_session_id="s").session != ""


def test_an_uploaded_file_is_items_and_no_text() -> None:
    audio = FILE[0], b"\x00" * 3 * bodies.CLIP_BYTES
    ask = asked("POST", "/v1/audio/transcriptions", form(MODEL, audio), content_type=FORM)
    assert (ask.model, ask.size, ask.items) == ("whisper", 0, 3)


# -- forms -----------------------------------------------------------------------------------------------------------

FORM = "multipart/form-data; boundary=xyz"


def form(*parts: tuple[str, bytes]) -> bytes:
    made = b"".join(b"--xyz\r\n%b\r\n\r\n%b\r\n" % (head.encode(), content) for head, content in parts)
    return made + b"--xyz--\r\n"


FILE = ('Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav', b"RIFF\x00\r\n--xy")
MODEL = ('Content-Disposition: form-data; name="model"', b"whisper")


@pytest.mark.parametrize("parts", [(MODEL, FILE), (FILE, MODEL), (MODEL,)])
def test_a_form_names_its_model_wherever_it_stands(parts: tuple[tuple[str, bytes], ...]) -> None:
    assert asked("POST", "/v1/audio/transcriptions", form(*parts), content_type=FORM).model == "whisper"


def test_what_looks_like_a_part_inside_a_file_is_none() -> None:
    inside = b'\r\nContent-Disposition: form-data; name="model"\r\n\r\nother\r\n'
    body = form((FILE[0], inside), MODEL)
    assert asked("POST", "/v1/audio/transcriptions", body, content_type=FORM).model == "whisper"


def test_a_form_with_two_models_is_refused() -> None:
    with pytest.raises(BadRequest, match="more than once"):
        asked("POST", "/v1/images/edits", form(MODEL, MODEL), content_type=FORM)


@pytest.mark.parametrize(
    "content_type", ["application/json", "multipart/form-data", "multipart/form-data; boundary=", ""]
)
def test_a_form_without_its_boundary_is_refused(content_type: str) -> None:
    with pytest.raises(BadRequest, match="boundary"):
        asked("POST", "/v1/images/edits", form(MODEL), content_type=content_type)


@given(st.binary(max_size=300), st.sampled_from([FORM, 'Multipart/Form-Data; Boundary="xyz"']))
def test_whatever_a_form_holds_it_is_read_or_refused(body: bytes, content_type: str) -> None:
    with suppress(BadRequest):
        assert isinstance(bodies.form_field(b"--xyz" + body, content_type, "model"), str)
