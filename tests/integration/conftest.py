"""What the integration tests share: uvloop as in production, one system of processes, and an eye on every log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop

from tests.integration.system import System, complaints


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name == "test_console.py":
        # The browser is started as a subprocess, for which uvloop forks, and gRPC's threads do not take that well.
        return {"asyncio": asyncio.new_event_loop}
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def nothing_crashes(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """No process, nor a tier in this one, may write a traceback during a test."""
    yield
    out, err = capfd.readouterr()
    print(out)  # for the report of a failed test
    found = complaints()
    assert not found, "\n".join(found)
    assert "Traceback" not in out + err, out + err
    assert "never retrieved" not in out + err, out + err


@pytest.fixture(scope="session")
def processes() -> Iterator[System]:
    """The three tiers, started once; engines are quick, so that streams are short."""
    system = System("--speed", "2", "--tick", "0.02")
    try:
        took = asyncio.run(system.start())
        print(f"seventeen processes ready after {took:.1f} s")
        yield system
    finally:
        system.discard()


@pytest.fixture
async def system(processes: System) -> System:
    """All of it up and well at the begin of a test, whatever the last one did."""
    await processes.heal()
    return processes
