"""An etcd of three members with TLS both ways and a user, through all tiers; one of them dies under load (C41, C42)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.common.store.test_etcd import authority
from tests.integration.clients import get
from tests.integration.system import TTL_S, System, headwater, run
from tests.integration.test_stores import BACK_S, load, none_failed
from tests.servers import EtcdServer, eventually

USER = ("--user", "root:secret")


class Guarded(System):
    """Nobody is let in without a certificate and a password."""

    members = 3

    def __init__(self, certificates: Path) -> None:
        self._files = [str(certificates / name) for name in ("ca.pem", "node.pem", "node.key")]
        super().__init__("--speed", "2", "--tick", "0.02")

    def add_engines(self, *flags: str) -> None:
        """See System."""
        ca, cert, key = self._files
        for member in self.etcds:
            member._tls = (cert, key, ca)
        super().add_engines(*flags)

    def settings(self, name: str) -> dict[str, Any]:
        """See System."""
        ca, cert, key = self._files
        files = {"ca_file": ca, "cert_file": cert, "key_file": key}
        who = {"user": "root", "password": "secret"}
        return {"etcd": {"urls": [m.url for m in self.etcds], "ttl_s": TTL_S, **files, **who}}

    async def start(self) -> float:
        """See System."""
        await asyncio.gather(*(self.processes[name].start() for name in self.stores))
        for command in ("user add root:secret", "user grant-role root root", "auth enable"):
            await self.etcd.ctl(*command.split())
        for member in self.etcds:
            member.ready = lambda member=member: _answers(member)  # type: ignore[method-assign]
        rest = [process for name, process in self.processes.items() if name not in self.stores]
        await asyncio.gather(*(process.start() for process in rest))
        return await self.settled()


async def _answers(member: EtcdServer) -> bool:
    return (await member._ctl(*USER, "get", "x"))[0] == 0


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    authority(tmp_path)
    system = Guarded(tmp_path)
    try:
        await system.start()
        yield system
    finally:
        system.discard()


async def test_of_three_members_behind_tls_and_a_password_one_may_die(guarded: Guarded) -> None:
    assert (await guarded.etcds[0]._ctl("get", "x"))[0] != 0  # a certificate alone opens nothing
    none_failed(await load(guarded, lambda: asyncio.sleep(0.0, guarded.kill("etcd")), 3.0))
    drained = "east/east-a/east-a-1"
    command = headwater("drain", drained, "--reason", "test", "--admin", guarded.admin_url)

    async def marked() -> bool:  # the two that are left may be electing a leader
        return (await run(*command))[0] == 0

    await eventually(marked, BACK_S, step_s=0.2)

    async def seen() -> bool:
        replies = await asyncio.gather(*(get(f"{t.admin_url}/admin/v1/pools") for t in guarded.tiers.values()))
        found = (reply.json()["pools"]["east/east-a"]["endpoints"]["east-a-1"] for reply in replies)
        return all(endpoint["phase"] == "draining" for endpoint in found)

    await eventually(seen, BACK_S)
    await guarded.heal()
