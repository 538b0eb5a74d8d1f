"""What the body of an answer says: when tokens came, how many, and whether it ended as it should.

A stream is measured without parsing it. An event is read as JSON until the first token has come, and after that only
where a few byte strings announce something else than a token: usage, an error, the end. All times are clock.now().
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

_MAX_LINE = 1 << 20  # bytes of one event, or of one whole answer that is kept for reading; more is not an LLM's
_DONE = b"[DONE]"
_SAYS_MORE = (b'"usage":{', b'"usage": {', b'"error":', _DONE, b'"finish_reason":"', b'"finish_reason": "')
"""Byte strings that events of plain tokens lack; inside text their quotes would be escaped."""

_CONTENT = ("content", "reasoning_content", "reasoning", "text", "tool_calls")


class Meter(Protocol):
    """Takes in a body piece by piece. Known at the end: whether it was whole, its tokens, the error it told of."""

    first_s: float | None  # when the first token came; None: not yet, or the answer does not stream
    last_s: float  # when the last token came
    max_gap_s: float  # longest silence between two tokens
    done: bool
    error: str

    @property
    def tokens(self) -> int:
        """Output tokens."""

    def feed(self, piece: bytes, now: float) -> None:
        """Take in `piece` that came at `now`."""

    def close(self) -> None:
        """There is no more."""


class StreamMeter:
    """Server-sent events of an OpenAI-compatible stream; `done` when [DONE] was seen.

    `tokens` is the usage if the server reports it, else the number of events with content.
    """

    __slots__ = ("_events", "_rest", "_usage", "done", "error", "first_s", "last_s", "max_gap_s")

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s = 0.0
        self.max_gap_s = 0.0
        self.done = False
        self.error = ""
        self._events = 0  # with content
        self._usage = 0
        self._rest = b""

    @property
    def tokens(self) -> int:
        """Output tokens so far."""
        return self._usage or self._events

    def feed(self, piece: bytes, now: float) -> None:
        """Count the lines that are complete; keep the beginning of one that is not."""
        if self._rest:
            piece = self._rest + piece
            self._rest = b""
        if piece[-1:] != b"\n":
            cut = piece.rfind(b"\n") + 1
            piece, self._rest = piece[:cut], piece[cut:]
            if len(self._rest) > _MAX_LINE:
                self.error, self._rest = "bad_response", b""
        if self.first_s is None:
            self._read(piece, now)
            return
        for mark in _SAYS_MORE:
            if mark in piece:
                self._read(piece, now)
                return
        if events := piece.count(b"\ndata:") + piece.startswith(b"data:"):
            self._came(events, now)

    def close(self) -> None:
        """A stream ends with [DONE], not with its last byte, so there is nothing to conclude here."""

    def _came(self, events: int, now: float) -> None:
        """Events with content came; a comment that only keeps the connection does not end a silence."""
        self._events += events
        if self.first_s is None:
            self.first_s = now
        else:
            self.max_gap_s = max(self.max_gap_s, now - self.last_s)
        self.last_s = now

    def _read(self, piece: bytes, now: float) -> None:
        for line in piece.split(b"\n"):
            if not line.startswith(b"data:"):
                continue  # a comment (a balancer keeps the connection with those), another field, or nothing
            value = line[5:].strip()
            if value == _DONE:
                self.done = True
                continue
            event = _object(value)
            if event.get("error"):
                self.error = f"stream_error {error_code(event)}".strip()
            self._usage = _completion_tokens(event) or self._usage
            if _has_content(event):
                self._came(1, now)


class BodyMeter:
    """An answer in one piece: JSON of a completion, or of an error; `done` when it was a completion."""

    __slots__ = ("_body", "done", "error", "first_s", "last_s", "max_gap_s", "tokens")

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s = 0.0
        self.max_gap_s = 0.0
        self.tokens = 0
        self.done = False
        self.error = ""
        self._body = bytearray()

    def feed(self, piece: bytes, now: float) -> None:
        """Keep it; an answer over a megabyte is cut there, and so cannot be read."""
        if len(self._body) <= _MAX_LINE:
            self._body += piece

    def close(self) -> None:
        """Read what came."""
        answer = _object(bytes(self._body))
        self.tokens = _completion_tokens(answer)
        self.error = error_code(answer)
        self.done = bool(answer) and not self.error


def error_code(answer: dict[str, Any]) -> str:
    """The short name of the error in an answer's body: OpenAI's code or type, whichever is text; "" if none."""
    error = answer.get("error")
    if isinstance(error, dict):
        names = [error.get("code"), error.get("type"), "error"]
    else:
        names = [answer.get("code") if answer.get("object") == "error" else None, "error" if error else None]
    name = next((name for name in names if isinstance(name, str) and name), "")
    return "".join(char for char in name if char.isalnum() or char in "_-.")[:40]


def _object(text: bytes) -> dict[str, Any]:
    """The JSON object in `text`; empty where it is something else."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _completion_tokens(answer: dict[str, Any]) -> int:
    """Output tokens by the server's own count; 0 where it gives none."""
    usage = answer.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else 0


def _has_content(event: dict[str, Any]) -> bool:
    """Whether a chat or completion chunk carries output, and not only a role, a finish reason or usage."""
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return False
    delta = choices[0].get("delta")
    part = delta if isinstance(delta, dict) else choices[0]
    return any(part.get(name) for name in _CONTENT)
