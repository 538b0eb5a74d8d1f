"""Names looked up at a name server on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from services.agent.config import InstanceConfig
from services.agent.sources.base import SourceUnavailable
from services.agent.sources.config import DnsSource
from services.agent.sources.dns import DnsName
from tests import servers

eventually = partial(servers.eventually, timeout_s=20.0)


class NameServer(asyncio.DatagramProtocol):
    """Answers from `records`: (name, type) -> texts; a name it has not does not exist, and one that is None fails."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str] | None] = {}
        self.port = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, address: Any) -> None:
        query = dns.message.from_wire(data)
        response = dns.message.make_response(query)
        response.flags |= dns.flags.RA
        question = query.question[0]
        name, kind = str(question.name).rstrip("."), question.rdtype.name
        texts = self.records.get((name, kind), [])
        if texts is None:
            response.set_rcode(dns.rcode.SERVFAIL)
        elif texts:
            response.answer.append(dns.rrset.from_text(question.name, 0, "IN", kind, *texts))
        elif all(known != name for known, _ in self.records):
            response.set_rcode(dns.rcode.NXDOMAIN)
        self.transport.sendto(response.to_wire(), address)  # type: ignore[attr-defined]

    def source(self, **values: Any) -> DnsName:
        settings = {"nameservers": [f"127.0.0.1:{self.port}"], "refresh_s": 0.2, **values}
        return DnsName(DnsSource.model_validate(settings))


@pytest.fixture
async def server() -> AsyncIterator[NameServer]:
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        NameServer, local_addr=("127.0.0.1", 0)
    )
    yield server
    transport.close()


@asynccontextmanager
async def followed(source: DnsName) -> AsyncIterator[list[list[str]]]:
    told: list[list[str]] = []

    def tell(instances: Sequence[InstanceConfig]) -> None:
        told.append([i.url for i in instances])

    task = asyncio.create_task(source.follow(tell))
    yield told
    if task.done():
        await task
    task.cancel()


async def test_addresses_of_both_families_as_they_change(server: NameServer) -> None:
    server.records["vllm.test", "A"] = ["10.0.0.1", "10.0.0.2"]
    server.records["vllm.test", "AAAA"] = ["fd00::1"]
    async with followed(server.source(name="vllm.test", port=8000, forget_after_s=1.0)) as told:
        first = ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"]
        await eventually(lambda: told and told[-1] == first)
        server.records["vllm.test", "A"] = ["10.0.0.2", "10.0.0.3"]
        await eventually(lambda: "http://10.0.0.3:8000" in told[-1])
        assert "http://10.0.0.1:8000" in told[-1]  # an answer may be a part of what there is
        await eventually(lambda: "http://10.0.0.1:8000" not in told[-1])
        server.records.clear()
        await eventually(lambda: told[-1] == [])


async def test_srv_records_have_their_ports(server: NameServer) -> None:
    server.records["_http._tcp.vllm.test", "SRV"] = ["0 5 8001 gpu1.test.", "0 5 8002 gpu1.test."]
    async with followed(server.source(name="_http._tcp.vllm.test", type="srv", scheme="https")) as told:
        await eventually(lambda: told and told[-1] == ["https://gpu1.test:8001", "https://gpu1.test:8002"])


async def test_a_resolver_that_fails_is_no_empty_answer(server: NameServer) -> None:
    server.records["vllm.test", "A"] = None
    with pytest.raises(SourceUnavailable, match=r"A vllm\.test"):
        await server.source(name="vllm.test", port=8000).follow(lambda _: None)


def test_an_address_needs_a_port() -> None:
    with pytest.raises(ValueError, match="port is needed"):
        DnsSource(name="vllm.test")
