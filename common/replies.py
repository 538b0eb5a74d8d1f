"""What this process says itself: errors in the shape of the API called, preflights, and servers' refusals handed on.

A tier below says in `x-headwater-…` headers what the tier above has to know; no client ever sees those.
"""

from __future__ import annotations

from contextlib import suppress
from math import ceil

import msgspec

from common import apis
from common.errors import AccessError, LBError, UpstreamError
from common.records import Ending, RequestRecord
from common.relay import cors, heads
from common.relay.exchange import Exchange
from common.relay.sending import Answer

STRUCK = b"x-headwater-struck"  # servers that the request took down
REJECTED = b"x-headwater-rejected"  # a peer dispatched nothing: the tier above may try a sibling
SERVED_BY = b"x-headwater-served-by"
DECISION = b"x-headwater-decision"
CONTINUATION = b"x-headwater-continuation"  # "on": should the stream break, another server carries it on
ATTEMPTS = b"x-headwater-attempts"
JSON = (b"content-type", b"application/json")
SSE = "text/event-stream"
OVERLOAD = (429, 503, 529)
SAID_CHARS = 2000  # of a server's error that is told in an event


class Replies:
    """Answers of one process to its clients, of which some are browsers on other origins."""

    def __init__(self, allowed_origins: tuple[str, ...]) -> None:
        self.cors = cors.Cors(allowed_origins)

    def preflight(self, exchange: Exchange) -> bool:
        """Answer what a browser asks before it calls from another origin; whether it was such a question."""
        if heads.find(exchange.headers, b"origin") is None:
            return False
        if heads.find(exchange.headers, b"access-control-request-method") is None:
            return False
        fields = self.cors.preflight(exchange.headers)
        if fields is not None:
            exchange.client.respond(204, fields, b"")
            return True
        family = apis.family_of(exchange.path)
        body = apis.error_body(family, (403, "this origin may not call here; see cors.allowed_origins"))
        exchange.client.respond(403, [JSON], body)
        return True

    def error(self, exchange: Exchange, api: apis.Api, record: RequestRecord, error: LBError) -> None:
        """Tell of an error, unless the relay has ended the answer in the open already."""
        record.error = error.code
        if exchange.committed:
            return
        record.status = error.status
        record.ending = Ending.BROKE_BEFORE if isinstance(error, UpstreamError) else Ending.REFUSED
        if exchange.status:
            exchange.client.cut(apis.error_event(api.family, SSE, str(error), error.code))
            return
        headers = [JSON, *self.cors.answer(exchange.headers), *_said_with(error)]
        added = [(DECISION, record.id.encode())]
        if record.from_peer:
            added += _counts(record)
            if error.elsewhere:
                added.append((REJECTED, error.code.encode()))
        exchange.client.respond(error.status, headers, apis.error_body(api.family, error), heads.lines(added))

    def denial(self, exchange: Exchange, error: AccessError) -> None:
        """Tell whoever asks for something that is not relayed that he may not."""
        body = apis.error_body(apis.family_of(exchange.path), error)
        fields = [JSON, *self.cors.answer(exchange.headers), *_said_with(error)]
        exchange.client.respond(error.status, fields, body)

    def refusal(
        self, exchange: Exchange, api: apis.Api, record: RequestRecord, answer: Answer, *, final: bool = False
    ) -> None:
        """Hand on what a server said instead of an answer: the client gets its own words.

        `final`: it is the server's answer to this request, and no reason to ask another one.
        """
        record.status, record.ending, record.error = answer.status, Ending.REFUSED, _code(answer)
        if final and not exchange.status:
            record.ending, record.error = Ending.COMPLETE, ""
        if exchange.status:
            exchange.client.cut(_event(answer, api))
            return
        added = [(DECISION, record.id.encode())]
        if final and record.served_by:
            added.append((SERVED_BY, record.served_by.encode()))
        if record.from_peer:
            # By those that were tried, which says nothing of this node: its other endpoints may be free.
            added += _counts(record)
            added += [] if final else [(REJECTED, b"refused")]
        kept, body = _whole(answer, api)
        if self.cors:
            kept = [(k, v) for k, v in kept if not k.startswith(cors.PREFIX)] + self.cors.answer(exchange.headers)
        exchange.client.respond(answer.status, kept, body, heads.lines(added))


def _said_with(error: LBError) -> heads.Headers:
    """Headers that belong to an error."""
    fields = list(error.headers) if isinstance(error, AccessError) else []
    if error.retry_after_s is not None:
        fields.append((b"retry-after", b"%d" % max(1, ceil(error.retry_after_s))))
    return fields


def _counts(record: RequestRecord) -> list[tuple[bytes, bytes]]:
    """What the tier above has to go on with."""
    counts = [(ATTEMPTS, b"%d" % record.executions)]
    return [*counts, (STRUCK, b"%d" % record.struck)] if record.struck else counts


def _whole(answer: Answer, api: apis.Api) -> tuple[heads.Headers, bytes]:
    """Headers and body of a collected answer; of one that was cut, which nobody could read, our own words."""
    if answer.cut:
        kept = [(k, v) for k, v in answer.headers if k == b"retry-after"]
        said = (answer.status, f"the server refused the request with status {answer.status}")
        return [JSON, *kept], apis.error_body(api.family, said)
    return answer.headers, answer.body


def _code(answer: Answer) -> str:
    """A short name for what was refused: a tier's own, or overload, which is what servers refuse for."""
    code = heads.find(answer.headers, REJECTED)
    if code is not None and code != b"refused":
        return code.decode("latin-1")
    return "overloaded" if answer.status in OVERLOAD else "server_failed"


def _event(answer: Answer, api: apis.Api) -> bytes:
    """What a server said, in an event: its own error object, or its words in one of ours."""
    coded = answer.cut or heads.find(answer.headers, b"content-encoding") is not None
    text = b"" if coded else answer.body
    with suppress(msgspec.DecodeError):
        said = msgspec.json.decode(text)
        if isinstance(said, dict) and said.get("error"):
            before = b"event: error\ndata: " if api.family is apis.Family.ANTHROPIC else b"data: "
            return before + msgspec.json.encode(said) + b"\n\n"
    words = f": {text.decode('utf-8', 'replace')[:SAID_CHARS]}" if text else ""
    return apis.error_event(api.family, SSE, f"the server answered {answer.status}{words}", _code(answer))
