"""Proxies in front of Headwater, each as a process with one of our configuration files and the ports of a test."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from tests import tools
from tests.servers import Server

BEHIND = tools.ROOT / "deploy" / "behind"


class Proxy(Server):
    """`file` of deploy/behind; `changes` are made to its text: ports, and what a test has otherwise."""

    def __init__(self, file: str, changes: Mapping[str, str]) -> None:
        super().__init__()
        text = (BEHIND / file).read_text()
        for old, new in changes.items():
            assert old in text, f"{file} has no {old!r}"
            text = text.replace(old, new.replace("PORT", str(self.port)).replace("HERE", str(self.directory)))
        self.config = self.directory / Path(file).name
        self.config.write_text(text)

    @property
    def url(self) -> str:
        """Where clients call."""
        return f"http://127.0.0.1:{self.port}"

    async def ready(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


class Envoy(Proxy):
    """From the wheel."""

    def command(self) -> list[str]:
        run = [tools.program("envoy"), "-c", str(self.config), "--use-dynamic-base-id", "--log-level", "warn"]
        return [*run, "--concurrency", "1", "--drain-time-s", "1", "--disable-hot-restart"]


def unprivileged() -> bool:
    """Whether this is not root, who has to tell some proxies so."""
    return os.getuid() != 0
