"""The containers of compose.yaml under a project name and ports of their own, so that a running demo is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROJECT = "headwater-test"
WAIT_S = 60.0  # for something to be seen in the traffic's counts, which are written every five seconds


class Stack:
    """`run` a compose command; `state` is what the traffic counted so far."""

    def __init__(
        self, file: Path, port: int, other_port: int, variables: tuple[str, str] = ("HTTP_PORT", "ADMIN_PORT")
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.admin_url = f"http://127.0.0.1:{other_port}"
        self._compose = ["docker", "compose", "--file", str(file), "--project-name", PROJECT]
        self._env = {**os.environ, variables[0]: str(port), variables[1]: str(other_port)}

    def run(self, *arguments: str, timeout_s: float = 120.0) -> str:
        """Run it and return its output; when it fails, say why."""
        done = subprocess.run(
            [*self._compose, *arguments],
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"compose {' '.join(arguments)}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    def follow(self, script: str, timeout_s: float) -> str:
        """Carry out a document's commands from the root of the repository; what they print."""
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script],
            cwd=Path(__file__).parents[2],
            env={**self._env, "COMPOSE_PROJECT_NAME": PROJECT},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    def state(self) -> dict[str, Any]:
        """The traffic's counts."""
        found: dict[str, Any] = json.loads(self.run("exec", "-T", "traffic", "cat", "/tmp/traffic.json"))
        return found

    def wait_for(self, seen: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first counts for which `seen` holds."""
        deadline = time.monotonic() + WAIT_S
        while not seen(state := self.state()):
            assert time.monotonic() < deadline, f"not seen within {WAIT_S:g} s: {state}\n{self.run('logs', '-n', '5')}"
            time.sleep(1.0)
        return state

    def metric(self, service: str, name: str) -> float:
        """A metric of one of our processes, summed over its labels."""
        look = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9080/metrics').read().decode())"
        lines = self.run("exec", "-T", service, "python", "-c", look).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))

    def exit_code(self, service: str) -> int:
        """Of a container that ended."""
        container = self.run("ps", "--all", "--quiet", service).strip()
        shown = subprocess.check_output(["docker", "inspect", "--format", "{{.State.ExitCode}}", container], text=True)
        return int(shown)

    def down(self) -> None:
        """Remove all of it."""
        self.run("--profile", "observability", "down", "--volumes", "--remove-orphans", "--timeout", "10")

    def left_behind(self) -> list[str]:
        """Containers, volumes and networks of this project that still exist."""
        mine = f"label=com.docker.compose.project={PROJECT}"
        found = []
        for kind in (["ps", "--all"], ["volume", "ls"], ["network", "ls"]):
            found += subprocess.check_output(["docker", *kind, "--quiet", "--filter", mine], text=True).split()
        return found
