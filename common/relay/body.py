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
_ERROR_EVENTS = (b'data: {"error":', b'data:{"error":')


class Observer:
    """Sees every body chunk of one answer."""

    __slots__ = ("bytes", "events", "sse", "tail")

    def __init__(self) -> None:
        self.sse = False
        self.bytes = 0
        self.events = 0
        self.tail = b""

    def saw(self, data: bytes) -> None:
        """One chunk passed."""
        self.bytes += len(data)
        if self.sse:
            self.events += data.count(b"data:")
        self.tail = data if len(data) >= TAIL_BYTES else (self.tail + data)[-TAIL_BYTES:]

    @property
    def between_events(self) -> bool:
        """Whether the bytes so far end with a finished event (a blank line), so that another may follow."""
        return not self.bytes or self.tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))

    @property
    def told_of_error(self) -> bool:
        """Whether the last event tells of an error: the server's own, or that of a tier below."""
        return self.between_events and self.tail.rstrip().rpartition(b"\n\n")[2].startswith(_ERROR_EVENTS)

    def output_tokens(self) -> float | None:
        """Tokens of the answer: the server's own count if it gave one, else the number of events, else None."""
        found = _COMPLETION.findall(self.tail)
        if found:
            return float(found[-1])
        # A stream has one event a token, give or take a role event and [DONE].
        return float(max(0, self.events - 2)) if self.sse else None

    def input_tokens(self) -> int | None:
        """Prompt tokens by the server's own count, None where it gave none."""
        found = _PROMPT.findall(self.tail)
        return int(found[-1]) if found else None

    def cached_tokens(self) -> int | None:
        """Prompt tokens the server had in its prefix cache, None where it does not say."""
        found = _CACHED.findall(self.tail)
        return int(found[-1]) if found else None
