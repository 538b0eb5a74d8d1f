"""Reads the few fields of a request's body that routing needs, once, at the first tier that gets it.

Unknown fields, their order and their numbers are nobody's business here and pass on untouched. A key that routing
depends on may stand in the body once only: two readers could disagree on which one counts.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import xxhash

from common.apis.routes import Kind, Match
from common.errors import BadRequest

PREFIX_BLOCK_BYTES = 2048  # about 512 tokens
PREFIX_BLOCKS = 64  # hashed of one prompt at most: about 32,000 tokens
MODEL_CHARS = 512  # in a model's name; the route header has to hold it however it is escaped
UTF8_CHUNK = 1 << 20  # bytes checked at once, so that no second copy of a large body is made
MOST_TOKENS = 10_000_000  # a cap above this is no cap
MEDIA_BYTES = 2048  # a string of so many characters without a space is no prose
LOOKED_BYTES = 1 << 20


@dataclass(slots=True)
class Ask:
    """What routing knows of a request.

    `size` is the prompt's text in bytes, `items` the images and clips beside it, `cap` its own bound on output tokens.
    """

    model: str
    stream: bool = False
    size: int = 0
    items: int = 0
    cap: int | None = None
    session: str = ""  # hashed; "" none
    held: tuple[str, ...] = ()  # ids of what one server holds in memory, and this request builds on
    prefix_hashes: tuple[int, ...] = ()
    fingerprint: int = 0  # of the prompt and what it is for


Header = Callable[[bytes], str | None]
"""Name of a header in lower case -> its first value, or None."""


def understand(matched: Match, header: Header, body: bytes) -> Ask:
    """What routing needs of a request. Raises BadRequest for a body that its API cannot mean."""
    api = matched.api
    if api.kind is Kind.PATH:
        model = _named(matched.model) if matched.model else ""
        held = (matched.held[:ID_CHARS],) if matched.held else ()
        fingerprint = fingerprint_of(model, api.operation, body)
        session = session_key(Fields(), header)
        return Ask(model, api.streams, len(body), session=session, held=held, fingerprint=fingerprint)
    if api.kind is Kind.FORM:
        model = form_field(body, header(b"content-type") or "", "model")
        items = max(1, len(body) // CLIP_BYTES)
        session, fingerprint = session_key(Fields(), header), fingerprint_of(model, api.operation, body)
        return Ask(model_of(Fields(model=model)), False, 0, items, session=session, fingerprint=fingerprint)
    fields = read_fields(body)
    text = fields.text
    media_bytes, items = media(text)
    return Ask(
        model_of(fields),
        wants_stream(fields, default=api.streams),
        len(text) - media_bytes,
        items,
        token_cap(fields),
        session_key(fields, header),
        held_ids(fields) if api.creates else (),
        prefix_hashes(text) if len(text) >= PREFIX_BLOCK_BYTES else (),
        fingerprint_of(str(fields.model), api.operation, text),
    )


def prose(body: bytes) -> str:
    """The text of a JSON body's prompt: all strings in it that are no names of parts and no inline images.

    "" where there is none, or the body is none of its kind.
    """
    try:
        text = _decode(body).text
        found = msgspec.json.decode(text) if text else ""
    except (msgspec.DecodeError, RecursionError):
        return ""
    return "\n".join(_strings(found))


WORDED = ("content", "text", "arguments", "name")  # of a message and its parts


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)
    elif isinstance(value, dict):
        for key, part in value.items():
            if key in WORDED or isinstance(part, list | dict):
                yield from _strings(part) if key != "image_url" else ()


def renamed(body: bytes, old: str, new: str, kind: Kind) -> bytes:
    """A JSON body with another model's name in the place of its own, and every other byte as it was.

    Raises BadRequest where the model does not stand in a JSON body.
    """
    if kind is Kind.JSON:
        name = msgspec.json.encode(new)
        for found in islice(_MODEL.finditer(body), MODEL_KEYS):
            changed = body[: found.start(1)] + name + body[found.end(1) :]
            if _decode(changed).model == new:  # else it is the key of an object within
                return changed
    raise BadRequest(f"the alias `{old[:200]}` can be used in JSON bodies only; name the model", param="model")


_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')
MODEL_KEYS = 16  # of a body are looked at, most of which stand in objects within


def fingerprint_of(model: str, operation: str, prompt: bytes) -> int:
    """A number by which the same prompt for the same model is known again; 63 bits, never 0."""
    seed = xxhash.xxh3_64_intdigest(f"{model}\n{operation}".encode())
    return xxhash.xxh3_64_intdigest(prompt, seed) >> 1 or 1


CLIP_BYTES = 512 * 1024  # of an uploaded file count as one item: half a minute of compressed speech

_BASE64 = re.compile(rb"(?:data:[^,]{0,200},)?[A-Za-z0-9+/=_-]{%d}" % (MEDIA_BYTES - 256))
_MENTIONED = re.compile(
    rb'"type"\s*:\s*"(?:image_url|input_image|image|input_audio|audio_url|video_url|input_file|file)"'
)


def media(text: bytes) -> tuple[int, int]:
    """(bytes that are no text, items) of a prompt: images and clips inline in base64, or by their URLs.

    A clip of twenty megabytes is skipped over rather than read: from one quote to the next nothing else can begin.
    """
    if len(text) < MEDIA_BYTES:
        return 0, len(_MENTIONED.findall(text)) if b'"type"' in text else 0
    inline = list(_inline(text))
    mentioned = at = 0
    for begin, end in (*inline, (len(text), 0)):
        for start in range(at, begin, LOOKED_BYTES):  # in pieces, since other threads wait while one is looked through
            mentioned += len(_MENTIONED.findall(text, start, min(start + LOOKED_BYTES, begin)))
        at = end
    return sum(end - begin for begin, end in inline), max(mentioned, len(inline))


def _inline(text: bytes) -> Iterator[tuple[int, int]]:
    """Where the strings begin and end that are no prose, with their quotes."""
    at = 0
    while at + MEDIA_BYTES < len(text):
        quote = text.rfind(b'"', at, at + MEDIA_BYTES)
        if quote >= at:
            at = quote + 1  # no string of that length begins before it
            continue
        end = text.find(b'"', at + MEDIA_BYTES)
        if end < 0:
            return
        if _BASE64.match(text, at):
            yield at - 1, end + 1
        at = end + 1


class Fields(msgspec.Struct):
    """The fields of a JSON body that routing reads; all others are skipped without being decoded.

    All but two are looked into when they are asked for, and what they hold is a server's to accept or refuse.
    """

    model: Any = None
    stream: Any = None
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    text_1: msgspec.Raw = msgspec.Raw()
    text_2: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()
    max_output_tokens: msgspec.Raw = msgspec.Raw()
    options: msgspec.Raw = msgspec.Raw()
    user: msgspec.Raw = msgspec.Raw()
    metadata: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    conversation: msgspec.Raw = msgspec.Raw()

    @property
    def text(self) -> bytes:
        """The prompt as it stands in the body; of a comparison both sides."""
        one = bytes(self.messages) or bytes(self.prompt) or bytes(self.input)
        if one:
            return one
        return b"".join(map(bytes, (self.query, self.documents, self.text_1, self.text_2)))


class Inner(msgspec.Struct):
    """What is read of the objects within a body: Ollama's options, Anthropic's metadata, OpenAI's conversation."""

    num_predict: msgspec.Raw = msgspec.Raw()
    user_id: msgspec.Raw = msgspec.Raw()
    id: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(Fields).decode
_inner = msgspec.json.Decoder(Inner).decode
_string = msgspec.json.Decoder(str).decode
# A key that stands twice may hide the second one behind \u escapes of its letters.
_ESCAPED = re.compile(rb"\\u00[46-7]")
ROUTED_KEYS = ("model", "stream")
_QUOTED = tuple(f'"{key}"'.encode() for key in ROUTED_KEYS)
LARGE_BYTES = 65_536  # of a body whose prompt is left out when keys are looked for


def read_fields(body: bytes) -> Fields:
    """Decode what routing needs. Raises BadRequest (400) for what is no JSON object or names a routed key twice."""
    if not body:
        raise BadRequest("the request body is empty; a JSON object is expected")
    try:
        fields = _decode(body)
        if not body.isascii():
            _check_utf8(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the request body is not a valid JSON object: {error}") from None
    outside = body if len(body) < LARGE_BYTES else _without_prompt(body, fields)
    if outside.count(_QUOTED[0]) > 1 or outside.count(_QUOTED[1]) > 1 or _ESCAPED.search(outside):
        _refuse_duplicates(body)
    return fields


def _without_prompt(body: bytes, fields: Fields) -> bytes:
    """A large body without its prompt, in which no key of the body itself can stand: it need not be searched.

    Should the same bytes stand before the prompt as well, those are left out instead, and what is left is the same.
    """
    prompt = bytes(fields.messages) or bytes(fields.prompt) or bytes(fields.input)
    at = body.find(prompt[:256])
    if not prompt or body[at : at + len(prompt)] != prompt:
        return body
    return body[:at] + body[at + len(prompt) :]


def _check_utf8(body: bytes) -> None:
    """Raise UnicodeDecodeError for what is no UTF-8: the decoder does not look into what it skips."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(body), UTF8_CHUNK):
        decoder.decode(body[at : at + UTF8_CHUNK])
    decoder.decode(b"", final=True)


class _Pairs(list[tuple[str, Any]]):
    """An object's keys and values as they stand, twice where they stand twice."""


def _refuse_duplicates(body: bytes) -> None:
    """The slow, exact check, made only when a routed key may stand there twice (it may also be in a nested object)."""
    try:
        top = json.loads(body, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request body is not a valid JSON object: {error}") from None
    names = [key for key, _ in top]
    for key in ROUTED_KEYS:
        if names.count(key) > 1:
            raise BadRequest(f"the key '{key}' is given more than once", param=key)


def form_field(body: bytes, content_type: str, name: str) -> str:
    """The value of one part of a multipart/form-data body (RFC 7578); "" without it. Raises BadRequest.

    The boundary cannot stand in a part's content, so what follows one is a part's head and nothing else is.
    """
    kind, _, parameters = content_type.partition(";")
    boundary = _BOUNDARY.search(parameters)
    if kind.strip().lower() != "multipart/form-data" or not boundary:
        raise BadRequest("a multipart/form-data body with a boundary is expected", code="invalid_content_type")
    mark = b"--" + (boundary[1] or boundary[2]).encode("latin-1")
    values = []
    at = body.find(mark)
    while at >= 0:
        start = at + len(mark)
        end_of_head = body.find(b"\r\n\r\n", start, start + PART_HEAD_BYTES)
        at = body.find(b"\r\n" + mark, start)
        if end_of_head >= 0 and at >= end_of_head and _names(body[start:end_of_head], name):
            values.append(body[end_of_head + 4 : at])
        at = at + 2 if at >= 0 else -1
    if len(values) > 1:
        raise BadRequest(f"the field '{name}' is given more than once", param=name)
    try:
        return values[0][: 4 * MODEL_CHARS + 1].decode() if values else ""
    except UnicodeDecodeError:
        raise BadRequest(f"the field '{name}' is not UTF-8", param=name) from None


_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_PART_NAME = re.compile(
    rb'^content-disposition:\s*form-data\s*;(?:.*;)?\s*name=(?:"([^"]*)"|([^\s;"]+))', re.IGNORECASE | re.MULTILINE
)
PART_HEAD_BYTES = 8192


def _names(head: bytes, name: str) -> bool:
    found = _PART_NAME.search(head)
    return found is not None and (found[1] or found[2] or b"").decode("latin-1") == name


def model_of(fields: Fields) -> str:
    """The model asked for. Raises BadRequest when there is none, or it is not a name."""
    if not isinstance(fields.model, str) or not fields.model:
        raise BadRequest("you must provide a model parameter (a string)", param="model", code="missing_model")
    return _named(fields.model)


def _named(model: str) -> str:
    if len(model) > MODEL_CHARS:
        raise BadRequest(f"the model's name is longer than {MODEL_CHARS} characters", param="model")
    return model


def wants_stream(fields: Fields, *, default: bool = False) -> bool:
    """Whether the answer is to be streamed; null means the API's default, and servers take 1 and "true" for yes."""
    if fields.stream is None:
        return default
    return fields.stream is True or fields.stream == 1 or fields.stream in ("true", "True")


def token_cap(fields: Fields) -> int | None:
    """The request's own bound on output tokens, if it has one that makes sense."""
    options = fields.options and _within(fields.options).num_predict
    for raw in (fields.max_completion_tokens, fields.max_output_tokens, fields.max_tokens, options):
        if not raw:
            continue
        text = bytes(raw)
        if text.isdigit() and len(text) <= len(str(MOST_TOKENS)) and 0 < int(text) < MOST_TOKENS:
            return int(text)
    return None


def _within(raw: msgspec.Raw) -> Inner:
    """What is read of an inner object; nothing of what is none."""
    try:
        return _inner(raw)
    except (msgspec.DecodeError, RecursionError):
        return Inner()


def _text_of(raw: msgspec.Raw) -> str:
    """A string; "" for what is none."""
    if not bytes(raw).startswith(b'"'):
        return ""
    try:
        return _string(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def session_key(fields: Fields, header: Header) -> str:
    """What names the session, hashed and of bounded length; "" without one.

    Looked for in order: the `x-session-id` header, `prompt_cache_key`, `previous_response_id`, `conversation`, `user`
    (Anthropic: `metadata.user_id`), a cookie `headwater-session`.
    """
    named = header(b"x-session-id")
    if named:
        return _hashed(named)
    for raw in (fields.prompt_cache_key, fields.previous_response_id):
        if raw and (value := _text_of(raw)):
            return _hashed(value)
    talk = fields.conversation
    if talk and (value := _text_of(talk) or _text_of(_within(talk).id)):
        return _hashed(value)
    if fields.user and (value := _text_of(fields.user)):
        return _hashed(value)
    if fields.metadata and (value := _text_of(_within(fields.metadata).user_id)):
        return _hashed(value)
    cookies = header(b"cookie")
    return _hashed(_session_cookie(cookies)) if cookies else ""


ID_CHARS = 256  # of an id that a server gave; a longer one is none of theirs
_FIRST_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,256})"')
ID_WITHIN_BYTES = 4096  # of an answer's beginning


def held_ids(fields: Fields) -> tuple[str, ...]:
    """What a request builds on and one server holds: the response before it, the conversation it belongs to."""
    before = _text_of(fields.previous_response_id) if fields.previous_response_id else ""
    talk = fields.conversation
    talk_id = (_text_of(talk) or _text_of(_within(talk).id)) if talk else ""
    return tuple(value[:ID_CHARS] for value in (before, talk_id) if value)


def held_key(id_: str) -> str:
    """Under what name it is remembered who holds it: apart from all sessions, and of bounded length."""
    return "held-" + _hashed(id_)


class FirstId:
    """Finds the id in the beginning of an answer as it passes, whole or in events; `found` is told once."""

    __slots__ = ("_begin", "_found")

    def __init__(self, found: Callable[[str], None]) -> None:
        self._begin = b""
        self._found: Callable[[str], None] | None = found

    def saw(self, data: bytes) -> None:
        """One piece of the answer."""
        if self._found is None:
            return
        self._begin += data[: ID_WITHIN_BYTES - len(self._begin)]
        match = _FIRST_ID.search(self._begin)
        if match is not None or len(self._begin) >= ID_WITHIN_BYTES:
            found, self._found, self._begin = self._found, None, b""
            if match is not None:
                found(match[1].decode("utf-8", "replace"))


def _session_cookie(cookies: str) -> str:
    for part in cookies.split(";"):
        name, _, value = part.strip().partition("=")
        if name == "headwater-session":
            return value
    return ""


def _hashed(value: str) -> str:
    return str(xxhash.xxh3_128_hexdigest(value.encode("utf-8", "surrogatepass"))) if value else ""


def prefix_hashes(text: bytes) -> tuple[int, ...]:
    """Chained hashes of the prompt's leading blocks: equal up to where two prompts are equal. At most PREFIX_BLOCKS."""
    hashes: list[int] = []
    seed = 0
    for at in range(0, min(len(text) - PREFIX_BLOCK_BYTES + 1, PREFIX_BLOCKS * PREFIX_BLOCK_BYTES), PREFIX_BLOCK_BYTES):
        seed = xxhash.xxh3_64_intdigest(text[at : at + PREFIX_BLOCK_BYTES], seed)
        hashes.append(seed)
    return tuple(hashes)
