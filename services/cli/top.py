"""`headwater top`: the live picture of everything in a terminal, from any tier's admin API."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from time import sleep
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from common import clock
from common.admin.picture import EndpointView, Picture
from common.explain.causes import seconds
from common.history import STEP_S, TPOT_BOUNDS_S, TTFT_BOUNDS_S, Step, quantile
from services.cli.admin_api import ADMIN_URL, Admin
from services.cli.ask import asked

EVERY_S = 1.0
MINUTE = 12  # steps of the history
BAR = 10  # characters
SMOOTH = 0.3  # weight of the latest rate
Steps = list[tuple[int, Step]]


def top(
    admin: Admin = ADMIN_URL,
    once: Annotated[bool, typer.Option("--once", help="one picture, as without a terminal")] = False,
) -> None:
    """The live picture of all regions, clusters and instances, once a second. Ends with Ctrl-C."""
    console, rates = Console(), Rates()
    frame = _frame(admin, rates)
    if once or not sys.stdout.isatty():
        sleep(EVERY_S)  # rates are from one picture to the next
        console.print(_frame(admin, rates))
        return
    try:
        with Live(frame, console=console, screen=True, auto_refresh=False) as live:
            while True:
                sleep(EVERY_S)
                try:
                    frame = _frame(admin, rates)
                except typer.Exit:
                    frame = Group(Text(f"{admin} does not answer; trying again"), frame)
                live.update(frame, refresh=True)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _frame(admin: str, rates: Rates) -> Group:
    everywhere = {"everywhere": True}
    picture, _ = asked("GET", admin, "/admin/v1/picture", Picture, params=everywhere)
    steps, _ = asked("GET", admin, "/admin/v1/history", Steps, params=everywhere)
    rates.see(picture, clock.now())
    return Group(headline(picture, steps), tree(picture, rates))


class Rates:
    """Picks a second of each endpoint, from one picture to the next."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._picks: dict[str, float] = {}
        self.per_s: dict[str, float] = {}

    def see(self, picture: Picture, now: float) -> None:
        """Take the next picture in."""
        picks = {f"{path}/{id_}": e.picks for path, pool in picture.pools.items() for id_, e in pool.endpoints.items()}
        if self._at is not None and now > self._at:
            for key, count in picks.items():
                fresh = max(0.0, count - self._picks.get(key, count)) / (now - self._at)
                self.per_s[key] = SMOOTH * fresh + (1.0 - SMOOTH) * self.per_s.get(key, fresh)
        self._at, self._picks = now, picks


def headline(picture: Picture, steps: Steps) -> Text:
    """The last minute in two lines of 80 characters."""
    minute = Step()
    for age, step in steps:
        if 1 <= age <= MINUTE:
            minute.add(step)
    ended = minute.ok + minute.failed + minute.refused + minute.left
    first = [quantile(minute.ttft, TTFT_BOUNDS_S, q) for q in (0.5, 0.95)]
    token = quantile(minute.tpot, TPOT_BOUNDS_S, 0.5)
    line = Text()
    line.append("Headwater", "bold")
    line.append(f"  {len(picture.processes)} process{'es' if len(picture.processes) > 1 else ''}")
    if picture.unheard:
        line.append(f", {picture.unheard} silent", "red")
    waiting = sum(p.queued for p in picture.processes)
    line.append(f"  {ended / (MINUTE * STEP_S):.1f} requests/s, {minute.failed} failed, {minute.refused} refused")
    line.append(f", {waiting:.0f} waiting\n")
    line.append(f"first token p50 {_s(first[0])}, p95 {_s(first[1])}, per token p50 {_s(token)}")
    line.append(f", {minute.output_tokens / (MINUTE * STEP_S):,.0f} tokens/s")
    return line


def tree(picture: Picture, rates: Rates) -> Table:
    """Regions, clusters, instances."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("node", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("load", no_wrap=True, min_width=BAR)
    for name in ("under way", "req/s", "ms/token"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("GPU", no_wrap=True)
    for path, id_, e in _walk(picture):
        node = f"{path}/{id_}".strip("/")
        depth = node.count("/")
        used = e.under_way / e.slots if e.slots else None
        table.add_row(
            Text("  " * depth + id_, "bold" if depth < 2 else ""),
            _state(picture, node, e),
            _bar(used),
            f"{e.under_way:.0f}/{e.slots:.0f}" if depth == 2 else "",
            f"{rates.per_s[f'{path}/{id_}']:.1f}" if f"{path}/{id_}" in rates.per_s else "–",
            f"{1e3 * e.seconds_per_token:.1f}" if e.seconds_per_token is not None else "",
            e.gpu,
        )
    return table


def _walk(picture: Picture, path: str = "") -> Iterator[tuple[str, str, EndpointView]]:
    pool = picture.pools.get(path)
    for id_, endpoint in pool.endpoints.items() if pool is not None else ():
        yield path, id_, endpoint
        yield from _walk(picture, f"{path}/{id_}".strip("/"))


def _state(picture: Picture, node: str, e: EndpointView) -> Text:
    by = [t.by for t in picture.takeovers if t.node == node]
    if by:
        return Text(f"run by {', '.join(by)}", "red")
    if e.breaker != "closed":
        return Text("left alone" if e.breaker == "open" else "on trial", "red")
    if e.phase != "serving":
        return Text(e.phase, "yellow")
    if node.count("/") < 2 and not e.balancers and any(p.node for p in picture.processes):
        return Text("no balancer", "red")
    return Text("serving", "green")


def _bar(used: float | None) -> Text:
    if used is None:
        return Text("")
    full = min(BAR, round(BAR * used))
    return Text("█" * full + "░" * (BAR - full), "red" if used >= 0.95 else "yellow" if used >= 0.75 else "green")


def _s(value: float | None) -> str:
    return "–" if value is None else seconds(value)
