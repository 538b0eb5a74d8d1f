"""Tells whether another process answers where one answered before."""

from __future__ import annotations

from services.agent.engines import EngineState


class Boot:
    """The mark of the process behind an address: its own start time where it tells one, else a count of restarts seen.

    A restart without a start time shows in counters that go back. If there are no counters either, one that was gone
    and is there again is taken for another: starting to learn anew costs less than trusting a stranger's record.
    """

    def __init__(self) -> None:
        self.mark = ""
        self._restarts = 0
        self._counters: list[float | None] = [None, None]
        self._timed = False
        self._was_gone = False

    def left(self) -> None:
        """It is not there any more."""
        self._was_gone = True

    def changed(self, state: EngineState) -> bool:
        """Take a look's answer in; whether it is of another process than the one before (the first is none)."""
        seen = (state.generated_tokens, state.steps)
        pairs = [(o, n) for o, n in zip(self._counters, seen, strict=True) if o is not None and n is not None]
        before, gone = self.mark, self._was_gone
        self._was_gone = False
        if state.started_s is not None:
            self._timed = True
            self.mark = f"{state.started_s:.2f}"
        elif not self._timed:  # else its page could not be read this time, which says nothing
            if any(n < o for o, n in pairs) or (gone and not pairs):
                self._restarts += 1
            self.mark = str(self._restarts)
        changed = before not in {"", self.mark}
        for i, figure in enumerate(seen):
            if figure is not None or changed:
                self._counters[i] = figure
        return changed
