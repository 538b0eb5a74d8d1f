"""What is learned from an answer's bytes as they pass: how many tokens, and where its events begin and end.

Nothing is parsed on the way: events are counted by their mark and the last bytes are kept for the usage block, so a
chunk costs well under a microsecond and passes on unchanged. The begin of an event whose end has not come yet is held
back: no client can use it, and should the server break now, nobody is left with half an event.
Source: the HTML standard, section 9.2 (server-sent events): an event ends with a blank line.
"""

from __future__ import annotations

import re
from collections import deque

TAIL_BYTES = 2048  # a usage block is a few hundred bytes and comes last
HELD_EVENT_BYTES = 65_536  # a longer event is passed on piece by piece
TAIL_PIECES = 16
SSE_ENDS = (b"\n\n", b"\n\r\n", b"\r\r")
LINE_ENDS = (b"\n",)
LONGEST_END = 3
_COMPLETION = re.compile(rb'"(?:completion_tokens|output_tokens|eval_count)"\s*:\s*(\d{1,9})')
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens|prompt_eval_count)"\s*:\s*(\d{1,9})')
_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d{1,9})')
_ERROR_EVENTS = (b'data: {"error":', b'data:{"error":', b"event: error", b'{"error":')
SSE = "text/event-stream"
NDJSON = ("application/x-ndjson", "application/jsonl")


class Observer:
    """Sees every body chunk of one answer. `coded`: it has a content coding, so nothing can be read in it."""

    __slots__ = ("_line", "_mark", "_pieces", "bytes", "content_type", "events")

    def __init__(self, content_type: str = "", *, coded: bool = False) -> None:
        self.content_type = "" if coded else content_type
        # What begins each event of a stream, at the begin of a line; None: it is no stream of events.
        self._mark: bytes | None = None
        if self.content_type.startswith(SSE):
            self._mark = b"data:"
        elif self.content_type.startswith(NDJSON):
            self._mark = b"{"
        self._line = b"\n" + self._mark if self._mark is not None else b""
        self.bytes = 0
        self.events = 0
        self._pieces: deque[bytes] = deque(maxlen=TAIL_PIECES + 1)  # the last ones, which no chunk is copied for

    def saw(self, data: bytes) -> None:
        """One chunk passed; of a stream of events it begins with one, unless that is a very long one."""
        self.bytes += len(data)
        mark = self._mark
        if mark is not None:
            self.events += data.count(self._line) + data.startswith(mark)
        pieces = self._pieces
        if len(data) >= TAIL_BYTES:
            pieces.clear()
            pieces.append(data[-TAIL_BYTES:])
        elif pieces and len(pieces[-1]) < TAIL_BYTES // TAIL_PIECES:
            pieces[-1] += data
        else:
            pieces.append(data)

    @property
    def tail(self) -> bytes:
        """The last bytes, TAIL_BYTES of them at least once there were so many."""
        return b"".join(self._pieces)

    @property
    def ends(self) -> tuple[bytes, ...] | None:
        """What ends an event of this answer; None where there are none."""
        if self._mark is None:
            return None
        return LINE_ENDS if self._mark == b"{" else SSE_ENDS

    @property
    def between_events(self) -> bool:
        """Whether the bytes so far end with a finished event, so another may follow."""
        return not self.bytes or self.tail.endswith(self.ends or SSE_ENDS)

    @property
    def event_end(self) -> bytes:
        """What ends an event that is cut in half, so that the next one is read as one of its own."""
        return b"" if self.between_events else b"\n" if self._mark == b"{" else b"\n\n"

    @property
    def told_of_error(self) -> bool:
        """Whether the last event tells of an error: the server's own, or that of a tier below."""
        between = b"\n" if self._mark == b"{" else b"\n\n"
        return self.between_events and self.tail.rstrip().rpartition(between)[2].startswith(_ERROR_EVENTS)

    def suspect(self) -> bytes:
        """What may be an error under a status of success: a short answer, or a stream's last event that tells of one.

        "" where there is none; costs next to nothing then.
        """
        if self._mark is None:
            return self.tail if b'"error"' in self.tail or self.content_type.startswith("text/html") else b""
        if b"error" not in self.tail:
            return b""
        between = b"\n" if self._mark == b"{" else b"\n\n"
        told = [e for e in self.tail.replace(b"\r\n", b"\n").split(between) if e.lstrip().startswith(_ERROR_EVENTS)]
        return told[-1].lstrip() if told else b""

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


class EventHold:
    """Holds the begin of an event back until its end has come. Servers write whole events, so it rarely holds any."""

    __slots__ = ("_ends", "_through", "held")

    def __init__(self, ends: tuple[bytes, ...]) -> None:
        self._ends = ends
        self._through = False  # in the middle of an event that is too long to be held
        self.held = bytearray()

    def whole(self, data: bytes) -> bytes:
        """What may be passed on now that `data` has come: all up to the end of an event, or nothing yet."""
        if not self.held and data.endswith(self._ends):
            self._through = False
            return data
        return self._joined(data)

    def _joined(self, data: bytes) -> bytes:
        held = self.held
        begin = max(0, len(held) - LONGEST_END + 1)
        held += data
        end = max(held.rfind(mark, begin) + len(mark) if mark in held[begin:] else 0 for mark in self._ends)
        if end:
            self._through = False
        elif self._through or len(held) > HELD_EVENT_BYTES:
            self._through = True
            end = len(held)
        out = bytes(held[:end])
        del held[:end]
        return out

    def rest(self) -> bytes:
        """What is left when the answer ends: an event that nobody ended."""
        out = bytes(self.held)
        self.held.clear()
        return out
