"""The other half of `headwater sim`: one policy, and a fleet that follows the traffic in one way or another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Column, Table

from common.policy.scaling.desired import Rules
from common.policy.stages import policy_named
from common.sim.faults import Burst
from common.sim.fleet import Machine
from common.sim.scaling import Scalable
from common.sim.scenarios.scaling import Day, days, run, scaler_named
from common.sim.traces import TraceRow
from common.types import Slo, Tier


@dataclass(frozen=True, slots=True)
class ScalingStudy:
    """Everything but the traffic. Times are seconds; each class of `fleet` is a group that is made more or fewer."""

    scalers: tuple[str, ...]
    fleet: tuple[Machine, ...]
    policy: str
    slo: Slo
    season_s: float
    days: int = 3
    cold_start_s: float = 20.0
    most: int = 100  # replicas of one class
    bursts: tuple[Burst, ...] = ()
    seed: int = 0

    @property
    def rules(self) -> Rules:
        """Those of the production decision: its defaults, shortened to the season where that is no day."""
        shorter = min(1.0, self.season_s / 3600.0)
        return Rules(
            self.slo,
            least=1,
            seasons_s=(self.season_s,),
            bucket_s=max(1.0, self.season_s / round(self.season_s / min(10.0, self.season_s / 30.0))),
            panic_s=max(10.0, 60.0 * shorter),
            cool_down_s=max(30.0, 300.0 * shorter),
            idle_s=max(30.0, 300.0 * shorter),
        )


def run_scaling(study: ScalingStudy, rows: Sequence[TraceRow]) -> dict[str, list[Day]]:
    """Each scaler's days. Raises ValueError for a scaler there is not, or for no traffic within a season."""
    traffic = days(rows, study.season_s, study.days, study.bursts)
    if len(traffic) < study.days * 2:
        raise ValueError("--season: hardly a request comes within one")
    found = {}
    for name in study.scalers:
        groups = [
            Scalable(m.gpu, m, study.cold_start_s, least=0, most=study.most, start=m.count if name == "fixed" else 1)
            for m in study.fleet
        ]
        found[name] = run(
            lambda path: policy_named(study.policy, tier=Tier.of(path)),
            traffic,
            groups,
            scaler_named(name, study.rules),
            study.season_s,
            study.seed,
            study.slo,
        )
    return found


def render(found: dict[str, list[Day]]) -> Table:
    """A line for each scaler and day."""
    table = Table(Column("scaler", no_wrap=True), "day", box=box.SIMPLE)
    for name in ("requests", "goodput %", "TTFT p99 s", "GPU hours", "USD", "most replicas"):
        table.add_column(name, justify="right")
    for scaler, line in found.items():
        for number, day in enumerate(line, start=1):
            table.add_row(
                scaler,
                str(number),
                str(day.requests),
                f"{100.0 * day.goodput:.1f}",
                f"{day.ttft_p99_s:.2f}",
                f"{day.gpu_hours:.2f}",
                f"{day.cost_usd:.2f}",
                str(day.most),
            )
    return table


def write_json(path: Path, found: dict[str, list[Day]], settings: dict[str, Any]) -> None:
    """All of it. Raises OSError."""
    told = {"settings": settings, "days": {name: [asdict(day) for day in line] for name, line in found.items()}}
    path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
