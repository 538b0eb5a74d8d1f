"""What an inference server's answer means for the balancer: overload, out of memory, loading, the client's mistake, …

A pure function of the engine, the status, the headers and the beginning of the body, by tables: first the rows of the
engine, in its own words, then those for all, which are also what an unknown engine is read by. Rows are tried in order
and the first that fits counts. The words are those the servers were seen to say, or have in their source; a status
between 400 and 499 is hardly ever read further, because servers repeat there what the client sent them.

What to do about a meaning is the caller's: whether to try elsewhere, whom to blame, what to learn.

Source: vLLM 0.32, Triton 2.51, TorchServe 0.12 and llama.cpp of October 2026 as seen live (`docs/engines.md`); SGLang,
TGI and Ollama as their source has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Final, NamedTuple

Headers = Sequence[tuple[bytes, bytes]]
"""(name in lower case, value), in the order received."""

MAX_READ_BYTES: Final = 8192  # of a body; an error's words stand at its beginning
MAX_RETRY_AFTER_S: Final = 60.0  # a server may ask for no longer a pause
MAX_DATE: Final = 64  # characters of a date; HTTP's own form has 29


class Meaning(Enum):
    """What an answer says."""

    FINE = "fine"  # nothing in it says that something is wrong
    OVERLOAD = "overload"  # it has too much to do: elsewhere, now; no failure
    OOM = "oom"  # out of memory: where it fits, once; the size is to be learned
    LOADING = "loading"  # not ready yet, or asleep: wait, or elsewhere; no failure
    NO_MODEL = "no_model"  # it does not serve that model: where it is listed, and look again what this one lists
    CLIENT = "client"  # the request is at fault: never again, and it says nothing of the server
    DEAD = "dead"  # its engine is gone, though something still answers for it
    OK_ERROR = "ok_error"  # an error under a status of success
    FAILED = "failed"  # it failed, and does not say why


class Reading(NamedTuple):
    """What was read. `cause` is the meaning itself, or for OK_ERROR what its error would have meant as a status.

    `retry_after_s`: the pause the server asks for, 0…60 s; None if it does not say, or makes no sense.
    """

    meaning: Meaning
    cause: Meaning
    retry_after_s: float | None = None


class _Row(NamedTuple):
    meaning: Meaning
    statuses: Container[int]
    phrases: tuple[tuple[bytes, ...], ...]  # any of these in the body; none: whatever the body says


def _row(meaning: Meaning, statuses: Container[int], *phrases: bytes) -> _Row:
    """Phrases are in lower case; an asterisk stands for anything between."""
    return _Row(meaning, statuses, tuple(tuple(p.split(b"*")) for p in phrases))


def _says(text: bytes, phrase: tuple[bytes, ...]) -> bool:
    """Whether the parts of a phrase are in the text, in this order.

    Searching for plain words, one by one, takes a twentieth of what a regular expression of all of them would.
    """
    at = 0
    for part in phrase:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


_ERRORS: Final = range(400, 600)
_SERVER_ERRORS: Final = range(500, 600)

_OUT_OF_MEMORY: Final = (
    b"out of memory",
    b"outofmemory",
    b"cudamalloc failed",
    b"failed to allocate",
    b"unable to allocate",
    b"cannot allocate",
    b"could not allocate",
    b"bad_alloc",
    b"alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED
    b"not enough memory",
    b"not enough gpu memory",
    b"insufficient memory",
    b"insufficient gpu memory",
    b"requires more system memory",
)
_OVERLOADED: Final = (
    b"queue is full",
    b"queue full",
    b"maximum queue size",
    b"max queue size",
    b"server busy",
    b"server is busy",
    b"overloaded",
    b"too many requests",
    b"too many concurrent requests",
    b"maximum pending requests",
    b"at capacity",
    b"rate limit",
    b"try again",
    b"no slot available",
)
_LOADING: Final = (
    b"loading model",
    b"loading the model",
    b"is loading",
    b"still loading",
    b"currently loading",
    b"being loaded",
    b"not ready",
    b"not yet ready",
    b"not at ready state",
    b"warming up",
    b"is starting",
    b"still starting",
    b"is asleep",
    b"is sleeping",
)
_DEAD: Final = (
    b"enginecore encountered an issue",
    b"enginedead",
    b"engine is dead",
    b"engine loop has died",
    b"engine loop is not running",
    b"engine process has died",
    b"background loop has errored",
    b"background loop is not running",
)
_TOO_LONG: Final = (
    b"maximum context length",
    b"exceeds the context",
    b"exceeds the available context",
    b"exceeds the maximum context",
    b"exceeds the model's context",
    b"context length exceeded",
    b"context window exceeded",
    b"prompt is too long",
    b"prompt too long",
    b"input is too long",
    b"input too long",
)
_NAMES_A_MODEL: Final = (b"model", b"adapter", b"lora")

_ROWS: Final[dict[str, tuple[_Row, ...]]] = {
    # After its engine's death the process answers so until it ends; out of memory on the GPU looks no different.
    "vllm": (_row(Meaning.DEAD, _SERVER_ERRORS, b"enginecore encountered an issue", b"enginedeaderror"),),
    "sglang": (
        _row(
            Meaning.OVERLOAD,
            (503,),
            b"the request queue is full",
            b"aborted by a higher priority request",
            b"request waiting timeout reached",
        ),
        _row(Meaning.FAILED, (503,), b"request running timeout reached"),
    ),
    # What its backend says of a failure comes with 424, out of memory or not.
    "tgi": (
        _row(Meaning.OVERLOAD, (429,)),
        _row(Meaning.OOM, (424,), *_OUT_OF_MEMORY),
        _row(Meaning.FAILED, (424,)),
    ),
    "llamacpp": (
        _row(Meaning.LOADING, (503,), b"loading model"),
        # Slots that share one cache have filled it together; a prompt that alone is too long is a 400.
        _row(Meaning.OOM, (500,), b"context size has been exceeded", b"failed to find*in the kv cache"),
    ),
    "ollama": (
        _row(Meaning.OVERLOAD, (503,), b"server busy, please try again", b"maximum pending requests exceeded"),
        _row(Meaning.OOM, (500,), *_OUT_OF_MEMORY),
    ),
    "triton": (
        # Its Python backend does not start a process anew that was lost, while the server goes on saying it is ready.
        _row(Meaning.DEAD, _ERRORS, b"stub process*is not healthy"),
        _row(Meaning.OVERLOAD, (503,), b"exceeds maximum queue size"),
        _row(Meaning.LOADING, (400, 503), b"not ready", b"not at ready state"),
        _row(Meaning.CLIENT, (500,), b"failed to parse the request json"),
    ),
    "torchserve": (
        _row(Meaning.OOM, (507,)),
        _row(Meaning.OVERLOAD, (503,), b"has no worker to serve inference request"),
    ),
}
_ROWS["sim"] = _ROWS["vllm"]

_FOR_ALL: Final = (
    _row(Meaning.OVERLOAD, (429, 529)),
    _row(Meaning.NO_MODEL, (404,), *_NAMES_A_MODEL),
    _row(Meaning.CLIENT, (*range(400, 500), 501)),  # 501: the server was started without what the request needs
    _row(Meaning.OOM, (507,)),
    _row(Meaning.OOM, _SERVER_ERRORS, *_OUT_OF_MEMORY),
    _row(Meaning.DEAD, _SERVER_ERRORS, *_DEAD),
    _row(Meaning.CLIENT, _SERVER_ERRORS, *_TOO_LONG),
    _row(Meaning.LOADING, (503,), *_LOADING),
    _row(Meaning.OVERLOAD, (503,), *_OVERLOADED),
    _row(Meaning.FAILED, _SERVER_ERRORS),
)

_ANY_ANSWER: Final = frozenset({"torchserve"})  # engines whose models may answer what they like, an "error" included
_ERROR_FIRST: Final = re.compile(
    rb'\s*(?:event:[^\n]{0,64}\n)?(?:data:\s*)?\{\s*"(?:error"\s*:\s*(?:\{|"[^"])|object"\s*:\s*"error")', re.IGNORECASE
)
_RESULTS: Final = ("choices", "data", "output", "outputs", "response", "results", "content")
_STATUS_WITHIN: Final = re.compile(rb'"code"\s*:\s*"?([45]\d\d)\b|\[([45]\d\d)\]')


_ELSEWHERE: Final = {"tgi": (404, 424, 429), "triton": (400, 404, 429)}


TELLS_BUSY: Final = frozenset({"torchserve", "sglang"})
"""Engines whose 503 says so when they are full; of others one without a known word may mean that as well."""


def may_move(engine: str, status: int) -> bool:
    """Whether an answer of that status may be a reason to try elsewhere, so that it has to be read."""
    return status >= 500 or (status >= 400 and status in _ELSEWHERE.get(engine, (404, 429)))


def classify(engine: str, status: int, headers: Headers, body: bytes) -> Reading:
    """What an answer means. `body`: its beginning is enough. For a stream: one event of it, under its status of 200.

    `engine` as in `Endpoint.engine`; one that is not known is read by the rows for all. Takes 4 to 20 us for what
    servers say, 20 us for 8 KB of an answer without an error, 0.4 ms for 8 KB of words that fit nothing.
    """
    body = body[:MAX_READ_BYTES]
    if status < 400:
        return _under_success(engine, status, headers, body)
    retry_after_s = retry_after(headers)
    meaning = _meaning(engine, status, body)
    if meaning is Meaning.FAILED and status == 503 and retry_after_s is not None:
        meaning = Meaning.OVERLOAD  # it has no words for it, and knows when it will be better
    return Reading(meaning, meaning, retry_after_s)


def _meaning(engine: str, status: int, body: bytes) -> Meaning:
    text = body.lower()
    for row in (*_ROWS.get(engine, ()), *_FOR_ALL):
        if status in row.statuses and (not row.phrases or any(_says(text, p) for p in row.phrases)):
            return row.meaning
    return Meaning.FAILED  # no status that HTTP knows


def _under_success(engine: str, status: int, headers: Headers, body: bytes) -> Reading:
    if not 200 <= status < 300 or engine in _ANY_ANSWER or not _is_error(headers, body):
        return Reading(Meaning.FINE, Meaning.FINE)
    within = _STATUS_WITHIN.search(body)
    meant = int(within[1] or within[2]) if within is not None else 500
    return Reading(Meaning.OK_ERROR, _meaning(engine, meant, body), retry_after(headers))


def _is_error(headers: Headers, body: bytes) -> bool:
    """An error's JSON, an event of one, or the HTML page of something that stands before the server."""
    if any(k == b"content-type" and v.strip().lower().startswith(b"text/html") for k, v in headers):
        return True
    if b'"error"' not in body:
        return False
    if _ERROR_FIRST.match(body):
        return True
    if len(body) == MAX_READ_BYTES:
        return False
    try:
        page = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(page, dict) and bool(page.get("error")) and not any(page.get(k) for k in _RESULTS)


# -- how long to stay away -------------------------------------------------------------------------------------------

_SECONDS: Final = re.compile(rb"\s*\d{1,15}(?:\.\d{0,9})?\s*")


def retry_after(headers: Headers) -> float | None:
    """Seconds that a server asks to be left alone, at most MAX_RETRY_AFTER_S; of several the longest.

    A date is compared with the answer's own `date`, so that only the server's clock counts; without that it says
    nothing. Neither does a negative number, one that is none, or a date that is past.
    """
    told = [v for k, v in headers if k == b"retry-after"]
    if not told:
        return None
    sent = next((when for k, v in headers if k == b"date" and (when := _date(v)) is not None), None)
    pauses = [pause for value in told for pause in _pauses(value, sent)]
    return min(max(pauses), MAX_RETRY_AFTER_S) if pauses else None


def _pauses(value: bytes, sent: datetime | None) -> Iterable[float]:
    """What one header asks for: seconds, some lists of them (headers that were joined), or a date."""
    when = _date(value)
    if when is not None:
        left_s = (when - sent).total_seconds() if sent is not None else -1.0
        return [left_s] if left_s >= 0.0 else []
    return [float(part) for part in value[:MAX_DATE].split(b",") if _SECONDS.fullmatch(part)]


def _date(value: bytes) -> datetime | None:
    if len(value) > MAX_DATE or b":" not in value:
        return None
    try:
        when = parsedate_to_datetime(value.decode("ascii").strip())
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)
