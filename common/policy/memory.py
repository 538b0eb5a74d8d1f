"""What ran out of memory: the size of a request that an instance could not hold, and requests that killed two of them.

An instance is passed over for requests as large as the one that it could not hold, as long as there is another; what is
true of a memory that others fill as well is not true for long, so it is forgotten. A request that ran two instances out
of memory is refused for a while, since the next one would fare no better.
"""

from __future__ import annotations

from common.types import Path

SIZE_MEMORY_S = 300.0  # how long a size is remembered
QUARANTINE_S = 60.0  # how long a request is refused
MOST = 1024  # of either kind remembered; the oldest gives way


class OutOfMemory:
    """Sizes are tokens, prompt and expected output; a fingerprint is any hash that is equal for equal requests."""

    def __init__(self) -> None:
        self._sizes: dict[Path, tuple[float, float]] = {}  # instance -> (least size it could not hold, when)
        self._requests: dict[bytes, tuple[int, float]] = {}  # fingerprint -> (instances, when)

    def ran_out(self, instance: Path, size: float, fingerprint: bytes, now: float) -> None:
        """An instance ran out of memory with a request."""
        known, at = self._sizes.pop(instance, (size, now))
        self._sizes[instance] = (min(known, size) if now - at < SIZE_MEMORY_S else size, now)
        times, at = self._requests.pop(fingerprint, (0, now))
        self._requests[fingerprint] = (times + 1 if now - at < QUARANTINE_S else 1, now)
        if len(self._sizes) > MOST:
            del self._sizes[next(iter(self._sizes))]
        if len(self._requests) > MOST:
            del self._requests[next(iter(self._requests))]

    def too_small(self, size: float, now: float) -> frozenset[Path]:
        """Instances that could not hold a request of that size, or of less."""
        return frozenset(i for i, (held, at) in self._sizes.items() if size >= held and now - at < SIZE_MEMORY_S)

    @property
    def suspects(self) -> bool:
        """Whether some request may be in quarantine, so that fingerprints have to be taken."""
        return bool(self._requests)

    def quarantined(self, fingerprint: bytes, now: float) -> bool:
        """Whether a request has run two instances out of memory of late."""
        times, at = self._requests.get(fingerprint, (0, now))
        return times >= 2 and now - at < QUARANTINE_S
