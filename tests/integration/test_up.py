"""`headwater up` as people start it, and how each command says that it cannot start."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from tests.fake_engine import MODEL as FAKE_MODEL
from tests.fake_engine import FakeEngine, Script
from tests.integration.clients import Raw, ask, chat, events, get, metrics, post, total
from tests.integration.system import MODEL, PORTS, Addresses, Process, engine_process, headwater, run
from tests.servers import eventually, free_port

PATH = "/v1/chat/completions"
READY_S = 20.0  # the goal is two seconds, on a machine that does nothing else


@dataclass
class Up:
    """A running `headwater up`."""

    process: Process
    addresses: Addresses
    ready_s: float  # from its start

    @property
    def url(self) -> str:
        return self.addresses.url

    @property
    def admin_url(self) -> str:
        return self.addresses.admin_url


@asynccontextmanager
async def up(*arguments: str, flags: bool = True, addresses: Addresses | None = None) -> AsyncIterator[Up]:
    addresses = addresses or Addresses(PORTS.take(), PORTS.take())
    listen = ["--listen", f"127.0.0.1:{addresses.data}", "--admin", f"127.0.0.1:{addresses.admin}"] if flags else []
    process = Process("up", headwater("up", *arguments, *listen), f"{addresses.admin_url}/readyz")
    began = time.monotonic()
    async with process:
        yield Up(process, addresses, time.monotonic() - began)


@asynccontextmanager
async def engines(*flags: str) -> AsyncIterator[dict[str, str]]:
    """Two simulated servers, as name -> URL."""
    ports = {"one": PORTS.take(), "two": PORTS.take()}
    async with engine_process("engines", ports, "--speed", "5", *flags):
        yield {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}


def instances(urls: dict[str, str]) -> list[str]:
    return [argument for url in urls.values() for argument in ("--instance", url)]


async def pool(world: Up) -> dict[str, dict[str, object]]:
    reply = (await get(f"{world.admin_url}/admin/v1/pools")).json()
    return dict(reply["pools"].get("local/local", {"endpoints": {}})["endpoints"])


async def test_it_is_ready_in_two_seconds_and_serves_at_once() -> None:
    async with engines() as urls, up(*instances(urls)) as world:
        print(f"ready after {world.ready_s:.2f} s")
        assert world.ready_s < READY_S
        first = await ask(world.url, PATH, chat(MODEL, max_tokens=3))  # ready means that it knows its servers
        assert first.status == 200, first
        async with AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client:
            assert [m.id async for m in client.models.list()] == [MODEL]
            stream = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=20, stream=True
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in chunks)
            assert chunks[-1].choices[0].finish_reason in ("stop", "length")
            with pytest.raises(NotFoundError) as unknown:
                await client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "Hi"}])
            assert unknown.value.code == "model_not_found"
            with pytest.raises(BadRequestError):
                await client.post("/chat/completions", cast_to=object, body={"messages": []})
        endpoints = await pool(world)
        assert {e["url"] for e in endpoints.values()} == set(urls.values())
        assert {e["engine"] for e in endpoints.values()} == {"vllm"}  # found by asking
        assert {tuple(e["models"]) for e in endpoints.values()} == {(MODEL,)}
        assert (await get(f"{world.admin_url}/livez")).status == 200
        response = await ask(world.url, PATH, b"{")
        assert (response.status, response.json()["error"]["type"]) == (400, "invalid_request_error")
        await eventually(lambda: _nothing_in_flight(world), 5.0)


async def _nothing_in_flight(world: Up) -> bool:
    return total(await metrics(world.admin_url), "headwater_in_flight_requests") == 0.0


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
async def test_curl_streams() -> None:
    async with engines() as urls, up(*instances(urls)) as world:
        body = chat(MODEL, stream=True, max_tokens=6, ignore_eos=True).decode()
        code, out, err = await run("curl", "-sSN", "--fail", "-d", body, f"{world.url}{PATH}")
        assert (code, err) == (0, "")
        assert events(out.encode())[-1] == b"[DONE]"
        code, out, _ = await run("curl", "-sS", f"{world.url}/v1/models")
        assert [m["id"] for m in json.loads(out)["data"]] == [MODEL]


async def test_servers_of_other_kinds_that_come_later_and_that_go(tmp_path: Path) -> None:
    """From a configuration file; one server is up later, and one leaves and comes back."""
    late = FakeEngine("late", model="late-model", port=PORTS.take())
    async with FakeEngine("plain") as plain:
        addresses = Addresses(PORTS.take(), PORTS.take())
        config = tmp_path / "up.yaml"
        config.write_text(
            f"listen: 127.0.0.1:{addresses.data}\n"
            f"admin: 127.0.0.1:{addresses.admin}\n"
            "scrape_interval_s: 0.2\n"
            "log: {format: json}\n"
            "instances:\n"
            f"  - {{url: '{plain.url}', id: plain, gpu: h100}}\n"
            f"  - {{url: '{late.url}', id: late}}\n"
        )
        async with up("--config", str(config), flags=False, addresses=addresses) as world:
            assert (await ask(world.url, PATH, chat(FAKE_MODEL))).status == 200
            assert (await pool(world))["plain"]["engine"] == "openai"
            assert (await ask(world.url, PATH, chat("late-model"))).status == 404
            async with late:
                await eventually(lambda: _status(world, "late-model", 200), 10.0)
                assert [m["id"] for m in (await get(f"{world.url}/v1/models")).json()["data"]] == [
                    FAKE_MODEL,
                    "late-model",
                ]
            await eventually(lambda: _status(world, "late-model", 503), 10.0)  # known, and not there
            await eventually(lambda: _gone(world, "late"), 10.0)
            assert await _status(world, "late-model", 503)
            await late.start()
            await eventually(lambda: _status(world, "late-model", 200), 20.0)
            late.kill()


async def _status(world: Up, model: str, status: int) -> bool:
    return (await ask(world.url, PATH, chat(model))).status == status


async def _gone(world: Up, name: str) -> bool:
    return name not in await pool(world)


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_streams_end_and_takes_nothing_new(number: signal.Signals) -> None:
    async with (
        FakeEngine("a", Script.stream(*"abcdefghij", gap_s=0.2)) as engine,
        up("--instance", engine.url) as world,
    ):
        streaming, idle = await Raw.connect(world.url), await Raw.connect(world.url)
        idle.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await idle.response()).status == 200
        streaming.send(post(PATH, chat(FAKE_MODEL, stream=True)))
        await streaming.until(b"data:", 2)
        assert world.process.process is not None
        began = time.monotonic()
        world.process.process.send_signal(number)
        await idle.to_end()
        assert time.monotonic() - began < 2.0
        received = await streaming.to_end()
        assert received.endswith(b"0\r\n\r\n")
        assert b"[DONE]" in received
        ended = time.monotonic()
        await eventually(lambda: world.process.process.poll() is not None, 10.0)
        print(f"gone {time.monotonic() - ended:.2f} s after its last stream")
        assert world.process.process.returncode == 0
        with pytest.raises(OSError, match=r".*"):
            await Raw.connect(world.url)


async def test_streams_that_outlive_the_grace_end_in_the_open(tmp_path: Path) -> None:
    config = tmp_path / "up.yaml"
    config.write_text("drain: {grace_s: 0.5}\n")
    async with (
        FakeEngine("a", Script.stream(*"abcdefghij" * 10, gap_s=0.2)) as engine,
        up("--config", str(config), "--instance", engine.url) as world,
    ):
        raw = await Raw.connect(world.url)
        raw.send(post(PATH, chat(FAKE_MODEL, stream=True)))
        await raw.until(b"data:", 2)
        assert world.process.process is not None
        began = time.monotonic()
        world.process.process.send_signal(signal.SIGTERM)
        received = await raw.to_end()
        assert not received.endswith(b"0\r\n\r\n")
        assert b"[DONE]" not in received
        assert b'"error"' in received
        await eventually(lambda: world.process.process.poll() is not None, 10.0)
        print(f"gone {time.monotonic() - began:.2f} s after the signal, with a grace of 0.5 s")
        await eventually(lambda: engine.ended("aborted"), 5.0)


async def test_a_second_signal_ends_it_at_once() -> None:
    async with (
        FakeEngine("a", Script.stream(*"abcdefghij" * 10, gap_s=0.2)) as engine,
        up("--instance", engine.url) as world,
    ):
        raw = await Raw.connect(world.url)
        raw.send(post(PATH, chat(FAKE_MODEL, stream=True)))
        await raw.until(b"data:", 2)
        process = world.process.process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        assert process.poll() is None
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        await eventually(lambda: process.poll() is not None, 10.0)
        print(f"gone {time.monotonic() - began:.2f} s after the second signal")
        assert time.monotonic() - began < 5.0
        assert process.returncode == 1


# -- what cannot start -------------------------------------------------------------------------------------------------


async def refused(*arguments: str, **environment: str) -> str:
    """The one line with which a command that cannot start ends."""
    began = time.monotonic()
    code, out, err = await run(*headwater(*arguments), env={**os.environ, **environment})
    print(f"{' '.join(arguments)}: {err.strip()} ({time.monotonic() - began:.1f} s)")
    assert code == 1
    assert len(err.strip().splitlines()) == 1, err
    assert err.startswith("headwater: ")
    assert "Traceback" not in out + err
    return err


GOOD = "http://127.0.0.1:1"  # nobody listens there, which is no mistake: a server may come up later


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("limits:\n  header_timeout: 3\n", ["up.yaml:2", "unknown key 'limits.header_timeout'"]),
        ("listen: 127.0.0.1:8080\nlisen: x\n", ["up.yaml:2", "unknown key 'lisen'"]),
        ("limits:\n  header_timeout_s: soon\n", ["up.yaml:2", "limits.header_timeout_s", "'soon'"]),
        ("retry: {attempts: 0}\n", ["up.yaml:1", "retry.attempts"]),
        ("listen: [\n", ["up.yaml:", "not valid YAML"]),
        ("- a\n- b\n", ["up.yaml:1", "expected keys and values"]),
        ("policy: {name: magic}\n", ["policy", "magic", "round_robin"]),
        ("listen: nowhere\n", ["up.yaml:1", "HOST:PORT"]),
        ("instances:\n  - {url: 'ftp://x'}\n", ["up.yaml:2", "URL"]),
    ],
)
async def test_a_bad_configuration_is_named_with_its_line(tmp_path: Path, text: str, said: list[str]) -> None:
    config = tmp_path / "up.yaml"
    config.write_text(text)
    instance = [] if "instances" in text else ["--instance", GOOD]
    err = await refused("up", "--config", str(config), *instance)
    for words in said:
        assert words in err


async def test_a_bad_environment_variable_and_a_missing_file_are_named(tmp_path: Path) -> None:
    err = await refused("up", "--instance", GOOD, HEADWATER_RETRY__ATTEMPTS="many")
    assert "HEADWATER_RETRY__ATTEMPTS" in err
    assert "nothing.yaml" in await refused("up", "--config", str(tmp_path / "nothing.yaml"))


async def test_without_an_instance_it_says_how_to_name_one() -> None:
    assert "--instance" in await refused("up")


@pytest.mark.parametrize("which", ["--listen", "--admin"])
async def test_a_port_in_use_is_named(which: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", PORTS.take()))
        taken.listen()
        port = taken.getsockname()[1]
        others = {"--listen": f"127.0.0.1:{PORTS.take()}", "--admin": f"127.0.0.1:{PORTS.take()}"}
        flags = [x for pair in (others | {which: f"127.0.0.1:{port}"}).items() for x in pair]
        err = await refused("up", "--instance", GOOD, *flags)
        assert f"127.0.0.1:{port}" in err
        assert "in use" in err.lower()


PAGES = {
    "html": Script(content_type="text/html", chunks=(b"<html><body>It works!</body></html>",)),
    "json": Script(chunks=(b'{"hello": "world"}',)),
    "not found": Script.error(404),
    "no http": Script(chunks=(b"",)),
}


@pytest.mark.parametrize("kind", list(PAGES))
async def test_an_instance_that_answers_nonsense_is_named(kind: str) -> None:
    async with FakeEngine("web", models_script=PAGES[kind]) as web:
        flags = ["--listen", f"127.0.0.1:{PORTS.take()}", "--admin", f"127.0.0.1:{PORTS.take()}"]
        assert web.url in await refused("up", "--instance", GOOD, "--instance", web.url, *flags)


async def test_a_server_of_another_protocol_is_named() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"-ERR unknown command 'GET'\r\n")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        flags = ["--listen", f"127.0.0.1:{PORTS.take()}", "--admin", f"127.0.0.1:{PORTS.take()}"]
        assert url in await refused("up", "--instance", url, *flags)


async def test_an_etcd_out_of_reach_is_named_within_seconds(tmp_path: Path) -> None:
    places = {"global": {}, "region": {"region": "r"}, "instance": {"region": "r", "cluster": "c"}}
    url = f"http://127.0.0.1:{free_port()}"

    async def start(command: str, place: dict[str, str]) -> None:
        config = tmp_path / f"{command}.yaml"
        config.write_text(json.dumps({**place, "etcd": {"urls": [url]}, "listen": "127.0.0.1:0"}))
        assert url in await refused(command, "--config", str(config))

    began = time.monotonic()
    await asyncio.gather(*(start(command, place) for command, place in places.items()))
    assert time.monotonic() - began < 60.0  # five seconds for etcd, the rest for a busy machine


async def test_a_tier_without_its_place_is_told_which() -> None:
    assert "region" in await refused("region")
    assert "cluster" in await refused("instance", HEADWATER_REGION="r")
