"""Whether a process is gone, asked of its address: alive, gone, and on its way out."""

from __future__ import annotations

import asyncio

import pytest

from common.config import Limits, Upstream
from common.relay.relay import Relay


@pytest.fixture
async def relay():
    relay = Relay(lambda exchange: None, lambda *args: (b"", b""), Limits(), Upstream())
    yield relay
    await relay.close(0.0)


async def server() -> tuple[asyncio.Server, str]:
    listener = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    return listener, f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


async def test_who_listens_does_not_refuse(relay):
    listener, url = await server()
    assert not await relay.refuses(url)
    listener.close()


async def test_who_is_gone_refuses(relay):
    listener, url = await server()
    listener.close()
    assert await relay.refuses(url)


async def test_who_is_being_killed_refuses_although_its_listener_is_closed_last(relay):
    listener, url = await server()
    asyncio.get_running_loop().call_later(0.01, listener.close)
    assert await relay.refuses(url)
