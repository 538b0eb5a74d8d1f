"""What is sent to a server on one attempt, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from common.relay import heads
from common.relay.body import Observer
from common.relay.exchange import Exchange


class UpstreamLimits(Protocol):
    """The bounds towards servers, from the configuration (`upstream:`); seconds and counts."""

    connect_timeout_s: float
    first_byte_timeout_s: float
    stall_timeout_s: float
    total_timeout_s: float
    idle_timeout_s: float
    max_connections: int


class Verdict(Enum):
    """What to do with an answer, judged by its head."""

    RELAY = "relay"  # pass it on to the client
    COLLECT = "collect"  # read it and decide: it may be tried elsewhere


@dataclass(slots=True)
class Answer:
    """How a request to a server ended. `body` has what was collected; a relayed answer is at the client already."""

    status: int
    headers: heads.Headers
    relayed: bool
    observer: Observer
    body: bytes = b""  # of one that was collected, or of an error that was relayed whole
    cut: bool = False  # the body was collected in part


@dataclass(slots=True)
class Sending:
    """What is sent on one attempt, and who is told of its progress."""

    exchange: Exchange
    head: bytes
    body: bytes
    judge: Callable[[Sending, int, heads.Headers], Verdict]  # told the sending: a closure over it would be a cycle
    first_byte: Callable[[], None]
    added: bytes = b""  # header lines added to a relayed answer's head
    replaced: tuple[bytes, ...] = ()  # prefixes of the server's header names that are left out of that head
    saw: Callable[[bytes], None] | None = None  # told each piece of a relayed body
    edit: Callable[[bytes], bytes] | None = None  # what the client is to see of whole events of a relayed body
    break_words: Callable[[Observer, str], bytes] = lambda observer, message: b""
    goes_on: Callable[[], bool] = lambda: False  # asked when it breaks after its first byte: another one carries it on
    patient: bool = False  # nothing is to be heard before the answer is whole
    tries: int = 1  # servers that may be tried behind the address, one after the other
    slack_s: float = 0.0  # by how much every time-out is longer, so that a peer's own comes first
    observer: Observer | None = None  # of the latest answer, from its head on
