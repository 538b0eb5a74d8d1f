"""What is learned from an answer's bytes as they pass: how many tokens, and whether an event is cut in half.

Nothing is parsed on the way: events are counted by their `data:` mark and the last bytes are kept for the usage block,
so a chunk costs well under a microsecond and passes on unchanged.
"""

from __future__ import annotations

import re

TAIL_BYTES = 2048  # a usage block is a few hundred bytes and comes last
_COMPLETION = re.compile(rb'"(?:completion_tokens|output_tokens|eval_count)"\s*:\s*(\d{1,9})')
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens|prompt_eval_count)"\s*:\s*(\d{1,9})')
_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d{1,9})')
_ERROR_EVENTS = (b'data: {"error":', b'data:{"error":', b"event: error", b'{"error":')
NDJSON = ("application/x-ndjson", "application/jsonl")


class Observer:
    """Sees every body chunk of one answer."""

    __slots__ = ("_mark", "bytes", "content_type", "events", "tail")

    def __init__(self, content_type: str = "") -> None:
        self.content_type = content_type
        # What each event of a stream has once; None: it is no stream of events.
        self._mark: bytes | None = None
        if content_type.startswith("text/event-stream"):
            self._mark = b"data:"
        elif content_type.startswith(NDJSON):
            self._mark = b"\n"
        self.bytes = 0
        self.events = 0
        self.tail = b""

    def saw(self, data: bytes) -> None:
        """One chunk passed."""
        self.bytes += len(data)
        if self._mark is not None:
            self.events += data.count(self._mark)
        self.tail = data if len(data) >= TAIL_BYTES else (self.tail + data)[-TAIL_BYTES:]

    @property
    def between_events(self) -> bool:
        """Whether the bytes so far end with a finished event (a blank line, a line of JSON), so another may follow."""
        ends = (b"\n",) if self._mark == b"\n" else (b"\n\n", b"\r\n\r\n", b"\r\r")
        return not self.bytes or self.tail.endswith(ends)

    @property
    def event_end(self) -> bytes:
        """What ends an event that is cut in half, so that the next one is read as one of its own."""
        return b"" if self.between_events else b"\n" if self._mark == b"\n" else b"\n\n"

    @property
    def told_of_error(self) -> bool:
        """Whether the last event tells of an error: the server's own, or that of a tier below."""
        between = b"\n" if self._mark == b"\n" else b"\n\n"
        return self.between_events and self.tail.rstrip().rpartition(between)[2].startswith(_ERROR_EVENTS)

    def output_tokens(self) -> float | None:
        """Tokens of the answer: the server's own count if it gave one, else the number of events, else None."""
        found = _COMPLETION.findall(self.tail)
        if found:
            return float(found[-1])
        # A stream has one event a token, give or take a role event and [DONE].
        return float(max(0, self.events - 2)) if self._mark is not None else None

    def input_tokens(self) -> int | None:
        """Prompt tokens by the server's own count, None where it gave none."""
        found = _PROMPT.findall(self.tail)
        return int(found[-1]) if found else None

    def cached_tokens(self) -> int | None:
        """Prompt tokens the server had in its prefix cache, None where it does not say."""
        found = _CACHED.findall(self.tail)
        return int(found[-1]) if found else None
