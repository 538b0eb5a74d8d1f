"""Decision records on their way to a Redis stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from common.outbox import Outbox, Writer
from common.records import RequestRecord

MAX_PENDING = 1000  # records of up to some 10 KB each, while Redis does not answer


class DecisionStream(Outbox):
    """Made into what `view` has of a record, as JSON."""

    def __init__(self, writer: Writer, view: Callable[[RequestRecord], Any]) -> None:
        super().__init__(writer, what="decisions", max_pending=MAX_PENDING)
        self._view = view

    def write(self, record: RequestRecord) -> None:
        """See DecisionSink."""
        self.add(msgspec.json.encode(self._view(record)))

    def flush(self) -> None:
        """See DecisionSink; what is left is written by `close`."""
