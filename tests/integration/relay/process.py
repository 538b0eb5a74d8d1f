"""`headwater up` as a process of its own in front of fake engines: for what is measured of a process, or done to it."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.fake_engine import MODEL, FakeEngine
from tests.integration.clients import Response, ask, chat, get, metrics, total
from tests.integration.relay.cases import PATH, resident_kb
from tests.integration.system import PORTS, Addresses, Process, headwater


@dataclass
class Alone:
    """One running process that runs all stages."""

    process: Process
    addresses: Addresses

    @property
    def url(self) -> str:
        """Where clients call."""
        return self.addresses.url

    @property
    def admin_url(self) -> str:
        """Its admin listener."""
        return self.addresses.admin_url

    @property
    def resident_kb(self) -> int:
        """Its memory."""
        return resident_kb(self.process.pid)

    @property
    def open_files(self) -> int:
        """Its file descriptors."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def cpu_s(self) -> float:
        """Processor time it has used."""
        with open(f"/proc/{self.process.pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def chat(self, *headers: str, **fields: Any) -> Response:
        """A chat with the fake model."""
        return await ask(self.url, PATH, chat(MODEL, **fields), *headers)

    async def idle(self) -> bool:
        """Whether nothing is under way."""
        if total(await metrics(self.admin_url), "headwater_in_flight_requests"):
            return False
        pools = (await get(f"{self.admin_url}/admin/v1/pools")).json()["pools"]
        return not any(p["in_flight"] or any(e["in_flight"] for e in p["endpoints"].values()) for p in pools.values())


@asynccontextmanager
async def alone(*engines: FakeEngine, files: int = 0, workers: int = 0, **settings: Any) -> AsyncIterator[Alone]:
    """Starts and ends the engines as well. `files`: how many it may open at most; `workers`: processes on its port."""
    addresses = Addresses(PORTS.take(), PORTS.take())
    for _ in range(workers):
        PORTS.take()  # admin ports that follow
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        values = {
            "listen": f"127.0.0.1:{addresses.data}",
            "admin": f"127.0.0.1:{addresses.admin}",
            "instances": [{"url": e.url, "id": e.name, "engine": "openai"} for e in engines],
            "log": {"access": False, "format": "json"},
            **settings,
        }
        argv = headwater("up", *(["--workers", str(workers)] if workers else []))
        process = Process("alone", argv, f"{addresses.admin_url}/readyz")
        config = process.directory / "up.yaml"
        config.write_text(json.dumps(values))
        process.argv += ["--config", str(config)]
        if files:
            process.argv = ["prlimit", f"--nofile={files}:{files}", *process.argv]
        await stack.enter_async_context(process)
        yield Alone(process, addresses)
