"""`headwater sim --regions` with what only a study of the policies asks for: how old quotes are, and single rows.

python -m bench.regions azure2023_conv.csv.gz                              at load 0.75
python -m bench.regions TRACE --load 0.9 --requests 14000 --quote-s 1.0
"""

from __future__ import annotations

import argparse
from pathlib import Path as File

from rich.console import Console

from common.sim.traces import read_trace
from services.sim.regions import CHOICES, RegionsStudy, compare, render


def main() -> None:
    """Run what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=File)
    parser.add_argument("--load", type=float, default=0.75, help="of all capacity")
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--quote-s", type=float, default=0.2, help="how often regions and clusters quote")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--outage", action="store_true", help="us-east is lost for the middle third")
    parser.add_argument("--only", action="append", choices=list(CHOICES), help="some rows")
    given = parser.parse_args()
    study = RegionsStudy(tuple(given.only or CHOICES), given.load, given.seed, given.quote_s, given.outage)
    err = Console(stderr=True)

    def on_done(done: int, of: int) -> None:
        err.print(f"{study.choices[done - 1]}: {done} of {of}")

    rows = compare(study, read_trace(given.trace)[: given.requests], on_done)
    Console(width=150).print(render(rows))


if __name__ == "__main__":
    main()
