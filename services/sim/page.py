"""The picture of a comparison: one HTML file that needs nothing else, with its charts as inline SVG.

Two charts of latency (every policy a line; the share of requests is stretched towards the tail, so that p99 has room),
and the load over time, one panel a policy, every instance a thin line in the colour of its class. Light or dark as the
reader's system is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from math import ceil, floor, log10

from common.sim.measures import Measures
from common.sim.records import LoadSeries
from services.sim.study import CURVE_SHARES, Case, Result, Study, means

WIDTH, HEIGHT = 560, 320  # of a chart, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 40  # margins round its plot
PANEL_HEIGHT = 200
EVENT_ROWS = 4  # labels of faults are written in so many rows, so that neighbours do not cover each other
MOST_POINTS = 200  # of a line over time
SHARES = (0.0, 0.5, 0.9, 0.95, 0.99)  # marked on the axis of shares
MOST_OCCUPANCY = 1.5  # what a load panel shows at most; a policy that diverges runs along its upper edge
TOP_SHARE = 0.998  # what lies beyond are single requests

Scale = Callable[[float], float]
"""From a value to where it is drawn."""

STYLE = """
:root { color-scheme: light dark;
  --ground:#fbfbfa; --card:#ffffff; --ink:#1c2329; --soft:#5c6873; --rule:#e3e6e8; --mark:#eef3f8;
  --c0:#0b63c5; --c1:#c2410c; --c2:#0a7d55; --c3:#7c3fb5; --c4:#a16207; --c5:#be2f7d; --c6:#00798a; --c7:#56626d; }
@media (prefers-color-scheme: dark) { :root {
  --ground:#12161a; --card:#1a2026; --ink:#e6eaed; --soft:#9aa6b1; --rule:#2c343b; --mark:#202a33;
  --c0:#6cb0ff; --c1:#ff9361; --c2:#54d3a0; --c3:#c9a0f5; --c4:#e9bd52; --c5:#ff8ec4; --c6:#4fd0e0; --c7:#a8b4bf; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--ground); color:var(--ink);
  font:15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width:1200px; margin:0 auto; padding:32px 20px 64px; }
h1 { font-size:22px; margin:0 0 4px; letter-spacing:-.01em; } h2 { font-size:16px; margin:36px 0 10px; }
p { margin:0 0 8px; color:var(--soft); max-width:78ch; }
.cards { display:grid; grid-template-columns:repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap:16px; }
figure { margin:0; padding:14px 14px 6px; background:var(--card); border:1px solid var(--rule); border-radius:10px; }
figcaption { font-weight:600; font-size:14px; margin-bottom:6px; }
figcaption small { font-weight:400; color:var(--soft); }
svg { display:block; width:100%; height:auto; overflow:visible; }
svg text { fill:var(--soft); font-size:11px; font-family:inherit; }
.grid { stroke:var(--rule); stroke-width:1; } .level { stroke:var(--soft); stroke-width:1; stroke-dasharray:3 3; }
.line { fill:none; stroke-width:2; stroke-linejoin:round; } .thin { fill:none; stroke-width:1.1; opacity:.75; }
.base { stroke-dasharray:6 4; }
.legend { display:flex; flex-wrap:wrap; gap:4px 18px; margin:4px 0 12px; font-size:13px; }
.legend span::before { content:""; display:inline-block; width:18px; height:3px; border-radius:2px;
  background:var(--k); margin-right:7px; vertical-align:middle; }
.scroll { overflow-x:auto; background:var(--card); border:1px solid var(--rule); border-radius:10px; }
table { border-collapse:collapse; width:100%; font-size:13.5px; font-variant-numeric:tabular-nums; }
th, td { padding:7px 8px; text-align:right; white-space:nowrap; border-bottom:1px solid var(--rule); }
th:first-child, td:first-child { text-align:left; } th { font-weight:600; color:var(--soft); }
tr:last-child td { border-bottom:0; } td.best { background:var(--mark); font-weight:600; }
td small { color:var(--soft); }
"""


def render(results: Sequence[Result], baseline: Case, study: Study) -> str:
    """The page."""
    found = means(results)
    cases = list(found)
    drawn = {run.case: run for run in results if run.curves is not None}
    colours = {case: f"var(--c{number % 8})" for number, case in enumerate(cases)}
    lines = [(case, colours[case]) for case in cases]
    slo = study.slo
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>headwater sim</title><style>{STYLE}</style><main>",
        "<h1>Which policy would have served you better</h1>",
        f"<p>{escape(_setting(results, study))}</p>",
        "<h2>In figures</h2>",
        _table(found, baseline),
        "<h2>How long requests took</h2>",
        f"<p>One line a policy; further left is faster. {escape(baseline.label)} is dashed.</p>",
        _legend([(case.label, colour) for case, colour in lines]),
        "<div class=cards>",
        _curve("Time to first token", "ttft_s", drawn, lines, baseline, slo.ttft_s),
        _curve("End to end", "e2e_s", drawn, lines, baseline, None),
        "</div><h2>Load over time</h2>",
        "<p>Every line is an instance: requests on it ÷ its batch slots; above 100 % some wait for a slot.</p>",
        _loads(drawn, cases, found, _events(study)),
        "</main></html>\n",
    ]
    return "\n".join(parts)


def _setting(results: Sequence[Result], study: Study) -> str:
    servers = " + ".join(f"{kind.count} {kind.gpu}" for kind in study.fleet)
    run = results[0]
    windows = len({one.window for one in results})
    shown = "; the curves are of the first" if windows * study.seeds > 1 else ""
    return (
        f"{servers}; {run.rate:.2f} requests/s, {100.0 * run.rate / run.capacity:.0f} % of what they can bear; "
        f"{study.replicas} balancer{'s' if study.replicas > 1 else ''}; lengths {study.lengths}; "
        f"{windows * study.seeds} run{'s' if windows * study.seeds > 1 else ''} a policy{shown}."
    )


# -- table -------------------------------------------------------------------------------------------------------------

Column = tuple[str, str, bool]
"""(heading, format, whether less is better)"""

COLUMNS: tuple[Column, ...] = (
    ("TTFT mean", "{:.2f} s", True),
    ("TTFT p99", "{:.2f} s", True),
    ("E2E mean", "{:.2f} s", True),
    ("E2E p99", "{:.2f} s", True),
    ("per token", "{:.0f} ms", True),
    ("goodput", "{:.1f} %", False),
    ("L slots", "{:.3f}", True),
    ("L work", "{:.2f} s", True),
    ("rejected", "{:.0f}", True),
    ("broken", "{:.0f}", True),
)


def _values(m: Measures) -> tuple[float | None, ...]:
    return (
        m.ttft_s.mean,
        m.ttft_s.p99,
        m.e2e_s.mean,
        m.e2e_s.p99,
        None if m.s_per_token.mean is None else 1e3 * m.s_per_token.mean,
        100.0 * m.goodput,
        m.occupancy_l,
        m.work_l_s,
        m.rejected,
        m.broken,
    )


def _table(found: dict[Case, Measures], baseline: Case) -> str:
    values = {case: _values(m) for case, m in found.items()}
    head = "".join(f"<th>{name}</th>" for name, _, _ in COLUMNS)
    rows = []
    for case in found:
        cells = []
        for number, (_, form, less) in enumerate(COLUMNS):
            mine = values[case][number]
            known = [value for v in values.values() if (value := v[number]) is not None]
            best = mine is not None and len(set(known)) > 1 and mine == (min(known) if less else max(known))
            cells.append(f"<td{' class=best' if best else ''}>{'-' if mine is None else form.format(mine)}</td>")
        note = " <small>compared with</small>" if case == baseline and len(found) > 1 else ""
        rows.append(f"<tr><td>{escape(case.label)}{note}</td>{''.join(cells)}</tr>")
    return f"<div class=scroll><table><tr><th>policy</th>{head}</tr>{''.join(rows)}</table></div>"


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    spans = "".join(f"<span style='--k:{colour}'>{escape(name)}</span>" for name, colour in entries)
    return f"<div class=legend>{spans}</div>"


# -- curves ------------------------------------------------------------------------------------------------------------


def _curve(
    title: str,
    name: str,
    drawn: dict[Case, Result],
    lines: Sequence[tuple[Case, str]],
    baseline: Case,
    level: float | None,
) -> str:
    curves = {case: tuple(getattr(run.curves, name)) for case, run in drawn.items()}
    seconds = [x for curve in curves.values() for x in curve if x > 0.0]
    if not seconds:
        return ""
    least, most = floor(log10(_middle_low(curves.values()))), ceil(log10(max(seconds)) * 3.0) / 3.0
    plot_x, plot_y = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(value: float) -> float:
        at = (log10(max(value, 10.0**least)) - least) / (most - least)
        return LEFT + plot_x * min(max(at, 0.0), 1.0)

    def y(share: float) -> float:
        return TOP + plot_y * (1.0 - log10(1.0 - min(share, TOP_SHARE)) / log10(1.0 - TOP_SHARE))

    svg = [_grid_x(x, least, most), *(_grid_y(y(share), f"{100.0 * share:.0f} %") for share in SHARES)]
    if level is not None:
        svg.append(f"<line class=level x1={x(level):.1f} x2={x(level):.1f} y1={TOP} y2={HEIGHT - BOTTOM} />")
        svg.append(f"<text x={x(level) + 4:.1f} y={HEIGHT - BOTTOM - 5}>service level</text>")
    for case, colour in lines:
        points = [
            f"{x(v):.1f},{y(share):.1f}"
            for share, v in zip(CURVE_SHARES, curves.get(case, ()), strict=False)
            if share <= TOP_SHARE
        ]
        kind = "line base" if case == baseline else "line"
        svg.append(
            f"<polyline class='{kind}' stroke='{colour}' points='{' '.join(points)}'>{_title(case.label)}</polyline>"
        )
    return _figure(title, "share of requests that took at most so long", svg, HEIGHT)


def _middle_low(curves: Iterable[Sequence[float]]) -> float:
    """The fastest tenth, which is where the picture begins: what single requests took needs no room."""
    lows = [curve[10] for curve in curves if len(curve) > 10 and curve[10] > 0.0]
    return min(lows, default=0.01)


def _figure(title: str, note: str, svg: Sequence[str], height: int) -> str:
    return (
        f"<figure><figcaption>{escape(title)} <small>{escape(note)}</small></figcaption>"
        f"<svg viewBox='0 0 {WIDTH} {height}' role=img aria-label='{escape(title)}'>{''.join(svg)}</svg></figure>"
    )


def _grid_x(x: Scale, least: int, most: float) -> str:
    made = []
    digits = (1, 2, 5) if most - least < 2.5 else (1,)
    for value in (digit * 10.0**power for power in range(least, ceil(most) + 1) for digit in digits):
        if log10(value) <= most + 1e-9:
            at = x(value)
            made.append(f"<line class=grid x1={at:.1f} x2={at:.1f} y1={TOP} y2={HEIGHT - BOTTOM} />")
            made.append(f"<text x={at:.1f} y={HEIGHT - BOTTOM + 16} text-anchor=middle>{_seconds(value)}</text>")
    return "".join(made)


def _seconds(value: float) -> str:
    return f"{1e3 * value:g} ms" if value < 0.999 else f"{value:g} s"


def _grid_y(at: float, label: str) -> str:
    return (
        f"<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={at:.1f} y2={at:.1f} />"
        f"<text x={LEFT - 8} y={at + 4:.1f} text-anchor=end>{label}</text>"
    )


# -- load --------------------------------------------------------------------------------------------------------------


def _events(study: Study) -> list[tuple[float, str]]:
    """What is done to the fleet and its traffic, by time."""
    faults = [(fault.at_s, f"{fault.kind} {fault.target}") for fault in study.faults]
    return sorted(faults + [(burst.at_s, f"burst x {burst.factor:g}") for burst in study.bursts])


def _loads(
    drawn: dict[Case, Result], cases: Sequence[Case], found: dict[Case, Measures], events: Sequence[tuple[float, str]]
) -> str:
    series = {case: curves.load for case in cases if case in drawn and (curves := drawn[case].curves) is not None}
    gpus = list(dict.fromkeys(_gpu(name) for load in series.values() for name in load.instances))
    colours = {gpu: f"var(--c{number % 8})" for number, gpu in enumerate(gpus)}
    highest = min(max([0.1, *(_most(load) for load in series.values())]), MOST_OCCUPANCY)
    panels = "".join(_panel(case, load, colours, highest, found[case], events) for case, load in series.items())
    return _legend(list(colours.items())) + f"<div class=cards>{panels}</div>"


def _gpu(instance: str) -> str:
    return instance.rpartition("-")[0]


def _most(load: LoadSeries) -> float:
    return max((x for row in load.occupancy for x in row if x is not None), default=1.0)


def _panel(
    case: Case,
    load: LoadSeries,
    colours: dict[str, str],
    highest: float,
    m: Measures,
    events: Sequence[tuple[float, str]],
) -> str:
    plot_x, plot_y = WIDTH - LEFT - RIGHT, PANEL_HEIGHT - TOP - BOTTOM
    end_s = load.times_s[-1] if load.times_s else 1.0
    step = max(1, ceil(len(load.times_s) / MOST_POINTS))

    def y(value: float) -> float:
        return TOP + plot_y * (1.0 - min(value / highest, 1.0))

    svg = [_grid_y(y(mark), f"{100.0 * mark:.0f} %") for mark in _marks(highest)]
    for part in range(5):
        at = LEFT + plot_x * part / 4
        label = f"{end_s * part / 4:.0f} s"
        svg.append(f"<text x={at:.1f} y={PANEL_HEIGHT - BOTTOM + 16} text-anchor=middle>{label}</text>")
    for number, (at_s, what) in enumerate((at_s, what) for at_s, what in events if at_s <= end_s):
        at, low = LEFT + plot_x * at_s / end_s, TOP + 9 + 11 * (number % EVENT_ROWS)
        side, anchor = (-3, "end") if at > LEFT + 0.8 * plot_x else (3, "start")
        svg.append(f"<line class=level x1={at:.1f} x2={at:.1f} y1={TOP} y2={PANEL_HEIGHT - BOTTOM} />")
        svg.append(f"<text x={at + side:.1f} y={low} text-anchor={anchor}>{escape(what)}</text>")
    for number, name in enumerate(load.instances):
        pieces = _pieces(load, number, step, lambda at_s: LEFT + plot_x * at_s / end_s, y)
        svg += [f"<polyline {_thin(colours, name)} points='{points}'>{_title(name)}</polyline>" for points in pieces]
    note = f"goodput {100.0 * m.goodput:.1f} %, L {m.occupancy_l:.3f}"
    return _figure(case.label, note, svg, PANEL_HEIGHT)


def _thin(colours: dict[str, str], name: str) -> str:
    return f"class=thin stroke='{colours[_gpu(name)]}'"


def _title(name: str) -> str:
    return f"<title>{escape(name)}</title>"


def _marks(highest: float) -> Sequence[float]:
    step = next(s for s in (0.1, 0.25, 0.5, 1.0) if highest / s <= 5.0 or s == 1.0)
    return [step * i for i in range(int(highest / step) + 1)]


def _pieces(load: LoadSeries, column: int, step: int, x: Scale, y: Scale) -> list[str]:
    """The line of one instance: the mean of every `step` samples, in pieces where it was gone."""
    pieces: list[list[str]] = [[]]
    for begin in range(0, len(load.times_s), step):
        rows = load.occupancy[begin : begin + step]
        values = [value for row in rows if column < len(row) and (value := row[column]) is not None]
        if not values:
            pieces.append([])
            continue
        pieces[-1].append(f"{x(load.times_s[begin]):.1f},{y(sum(values) / len(values)):.1f}")
    return [" ".join(piece) for piece in pieces if len(piece) > 1]
