"""Presence and watches against a real etcd: paused, killed, emptied, cut off and compacted (CASES C26, C41, C42)."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from common.errors import ConfigError, StoreUnavailable
from common.store.base import Snapshot
from common.store.etcd import EtcdMembershipStore, EtcdTls
from common.store.etcd.lease import renew_at
from tests.servers import EtcdServer, Relay, eventually, free_port

TTL_S = 1.0
LATE_S = 0.4  # what a busy machine may add to a time
P = "/headwater/regions/eu/clusters/a/instances/"


@asynccontextmanager
async def opened(
    *urls: str, timeout_s: float = 0.5, check_interval_s: float = 0.2, **kwargs: object
) -> AsyncIterator[EtcdMembershipStore]:
    store = EtcdMembershipStore(urls, timeout_s=timeout_s, check_interval_s=check_interval_s, **kwargs)  # type: ignore[arg-type]
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
async def store(etcd: EtcdServer) -> AsyncIterator[EtcdMembershipStore]:
    async with opened(etcd.url) as store:
        yield store


class Follower:
    """A watch under way: the last snapshot, and all of them."""

    def __init__(self, store: EtcdMembershipStore, prefix: str = "/headwater/") -> None:
        self.all: list[Snapshot] = []
        self._task = asyncio.create_task(self._follow(store, prefix))

    async def _follow(self, store: EtcdMembershipStore, prefix: str) -> None:
        async with aclosing(store.watch(prefix)) as snapshots:
            async for snapshot in snapshots:
                self.all.append(snapshot)

    @property
    def last(self) -> Snapshot:
        return self.all[-1]

    @property
    def keys(self) -> set[str]:
        return set(self.last.values) if self.all else set()

    async def until(self, *ids: str, stale: bool = False, within_s: float = 5.0) -> float:
        expected = {P + i for i in ids}
        return await eventually(
            lambda: bool(self.all) and self.keys == expected and self.last.stale is stale, within_s, step_s=0.005
        )

    async def __aenter__(self) -> Follower:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


async def never_missing(etcd: EtcdServer, key: str, for_s: float) -> None:
    """Poll with etcdctl, straight at the server."""
    deadline = asyncio.get_running_loop().time() + for_s
    while asyncio.get_running_loop().time() < deadline:
        assert key in await etcd.keys(key)
        await asyncio.sleep(0.05)


# -- presence (C41)


async def test_a_deleted_key_returns_under_the_same_lease(etcd: EtcdServer, store: EtcdMembershipStore) -> None:
    lease = await store.lease(TTL_S)
    await lease.put(P + "i1", b"1")
    held_by = await etcd.lease_of(P + "i1")
    await etcd.ctl("del", P + "i1")
    await eventually(lambda: etcd.keys(P), TTL_S / 2 + LATE_S)
    assert await etcd.lease_of(P + "i1") == held_by != "0"
    assert await etcd.ctl("get", P + "i1", "--print-value-only") == "1\n"
    await lease.close()


async def test_a_revoked_lease_is_replaced(etcd: EtcdServer, store: EtcdMembershipStore) -> None:
    lease = await store.lease(TTL_S)
    await lease.put(P + "i1", b"1")
    await lease.put(P + "i2", b"2")
    await etcd.ctl("lease", "revoke", await etcd.lease_of(P + "i1"))
    assert await etcd.keys(P) == set()

    async def back() -> bool:
        return await etcd.keys(P) == {P + "i1", P + "i2"}

    await eventually(back, TTL_S / 2 + LATE_S)
    assert await etcd.lease_of(P + "i1") == await etcd.lease_of(P + "i2") != "0"
    await lease.close()


async def test_a_key_overwritten_by_hand_is_taken_back(etcd: EtcdServer, store: EtcdMembershipStore) -> None:
    lease = await store.lease(TTL_S)
    await lease.put(P + "i1", b"ours")
    await etcd.ctl("put", P + "i1", "a ghost under no lease")

    async def ours() -> bool:
        return await store.get(P + "i1") == b"ours"

    await eventually(ours, TTL_S / 2 + LATE_S)
    await lease.close()
    assert await etcd.keys(P) == set()


async def test_an_emptied_etcd_is_filled_again(etcd: EtcdServer, store: EtcdMembershipStore) -> None:
    lease = await store.lease(TTL_S)
    await lease.put(P + "i1", b"1")
    await etcd.restart(empty=True)

    async def back() -> bool:
        return await etcd.keys(P) == {P + "i1"}

    await eventually(back, TTL_S + LATE_S)
    await lease.close()


async def test_closing_removes_keys_at_once(etcd: EtcdServer, store: EtcdMembershipStore) -> None:
    lease = await store.lease(60.0)
    await lease.put(P + "i1", b"1")
    await lease.close()
    assert await etcd.keys(P) == set()
    assert "found 0 leases" in await etcd.ctl("lease", "list")


async def test_closing_without_etcd_ends_within_the_time_out(etcd: EtcdServer, store: EtcdMembershipStore) -> None:
    lease = await store.lease(TTL_S)
    await lease.put(P + "i1", b"1")
    etcd.pause()
    async with asyncio.timeout(0.5 + LATE_S):
        await lease.close()
    etcd.resume()
    await eventually(lambda: _gone(etcd), 10 * TTL_S)


async def _gone(etcd: EtcdServer) -> bool:
    return await etcd.keys(P) == set()


async def test_cuts_between_renewals_are_not_noticed(etcd: EtcdServer) -> None:
    async with Relay(etcd.port) as relay, opened(relay.url) as store:
        lease = await store.lease(2.0)
        await lease.put(P + "i1", b"1")
        watcher = asyncio.create_task(never_missing(etcd, P + "i1", 2.8))
        for wait, away in ((0.9, 0.2), (0.5, 0.3)):  # 45 to 55 % and 80 to 95 % of the time to live
            await asyncio.sleep(wait)
            relay.refuse()
            await asyncio.sleep(away)
            await relay.start()
        await watcher
        await lease.close()


async def test_a_connection_that_swallows_everything_is_replaced_in_time(etcd: EtcdServer) -> None:
    async with Relay(etcd.port) as relay, opened(relay.url) as store:
        lease = await store.lease(2.0)
        await lease.put(P + "i1", b"1")
        watcher = asyncio.create_task(never_missing(etcd, P + "i1", 2.6))
        relay.stall(existing_only=True)
        await watcher
        assert relay.accepted >= 2
        await lease.close()


def test_a_late_renewal_is_due_before_the_expiry() -> None:
    assert renew_at(100.0, 9.0) == 103.0
    # The answer came 8 s after it was asked for: due at once, not in another third of the time to live.
    assert renew_at(100.0, 9.0) < 108.0


@asynccontextmanager
async def process(etcd: EtcdServer, body: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Another process with a store, running `body`."""
    program = f"""
import asyncio, json, os
from common.store.etcd import EtcdMembershipStore

async def main():
    store = EtcdMembershipStore(["{etcd.url}"], timeout_s=0.5, check_interval_s=0.2)
{textwrap.indent(textwrap.dedent(body), "    ")}
    await asyncio.sleep(60)

asyncio.run(main())
"""
    child = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": os.getcwd()})
    try:
        yield child
    finally:
        child.kill()
        child.wait()


async def test_a_stopped_process_returns_by_itself(etcd: EtcdServer) -> None:
    body = f"""
        lease = await store.lease({TTL_S})
        await lease.put("{P}i1", b"1")
    """
    async with process(etcd, body) as holder:
        await eventually(lambda: etcd.keys(P), 30.0)
        os.kill(holder.pid, signal.SIGSTOP)
        await eventually(lambda: _gone(etcd), 10 * TTL_S)
        await asyncio.sleep(TTL_S / 2)
        os.kill(holder.pid, signal.SIGCONT)
        await eventually(lambda: etcd.keys(P), TTL_S / 2 + LATE_S)
        holder.kill()
        await eventually(lambda: _gone(etcd), 10 * TTL_S)  # by expiry


async def test_etcd_absent_at_the_start(etcd: EtcdServer) -> None:
    await etcd.stop()
    async with opened(etcd.url) as store:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        with pytest.raises(StoreUnavailable):
            await store.ping(0.3)
        assert loop.time() - begin < 0.3 + LATE_S
        lease = await store.lease(TTL_S)
        async with asyncio.timeout(0.5 + LATE_S):
            await lease.put(P + "i1", b"1")
        async with Follower(store) as follower:
            await follower.until(stale=True)
            await etcd.start()
            await follower.until("i1", within_s=10.0)
            assert [s.stale for s in follower.all].count(True) == 1
        await lease.close()


# -- watches (C26, C42)


async def test_a_burst_shares_snapshots(etcd: EtcdServer, store: EtcdMembershipStore) -> None:
    async with Follower(store) as follower:
        await follower.until()
        lease = await store.lease(TTL_S * 10)
        ids = [f"i{n}" for n in range(500)]
        await asyncio.gather(*(lease.put(P + i, b"1") for i in ids))
        await follower.until(*ids)
        assert len(follower.all) < 100
        await lease.close()
        await follower.until()
        before = len(follower.all)
        single = await store.lease(TTL_S)
        await single.put(P + "one", b"1")
        assert await follower.until("one") < 0.05 + LATE_S
        assert len(follower.all) == before + 1
        await single.close()


async def test_compaction_and_a_gap_end_in_the_true_set(etcd: EtcdServer) -> None:
    async with Relay(etcd.port) as relay, opened(relay.url) as store:
        for name, value in (("A", "1"), ("B", "port 1")):
            await etcd.ctl("put", P + name, value)
        async with Follower(store) as follower:
            await follower.until("A", "B")
            relay.refuse()
            await follower.until("A", "B", stale=True)
            await etcd.ctl("del", P + "A")
            await etcd.ctl("put", P + "B", "port 2")
            await etcd.ctl("put", P + "C", "1")
            revision = (await etcd.ctl("get", "x", "-w", "fields")).split('"Revision" : ')[1].split()[0]
            await etcd.ctl("compact", revision)
            await relay.start()
            assert await follower.until("B", "C", within_s=10.0) < 5.0
            assert follower.last.values[P + "B"] == b"port 2"


async def test_a_process_stopped_over_a_compaction_catches_up(etcd: EtcdServer, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    body = f"""
        async for snapshot in store.watch("{P}"):
            with open("{seen}.new", "w") as out:
                json.dump({{k: v.decode() for k, v in snapshot.values.items()}}, out)
            os.replace("{seen}.new", "{seen}")
    """

    async def agrees() -> bool:
        flat = (await etcd.ctl("get", "--prefix", P)).split("\n")[:-1]
        return seen.exists() and json.loads(seen.read_text()) == dict(zip(flat[::2], flat[1::2], strict=True))

    for name in ("A", "B"):
        await etcd.ctl("put", P + name, "1")
    async with process(etcd, body) as gateway, opened(etcd.url) as other:
        await eventually(agrees, 30.0)
        os.kill(gateway.pid, signal.SIGSTOP)
        await etcd.ctl("del", P + "A")
        await etcd.ctl("put", P + "B", "another port")
        await etcd.ctl("put", P + "C", "1")
        for n in range(0, 1000, 50):  # not all at once: a busy machine has two seconds for each
            await asyncio.gather(*(other.put_if_absent(f"/elsewhere/{n + i}", b"x" * 1000) for i in range(50)))
        revision = (await etcd.ctl("get", "x", "-w", "fields")).split('"Revision" : ')[1].split()[0]
        await etcd.ctl("compact", revision)
        await etcd.ctl("defrag")
        os.kill(gateway.pid, signal.SIGCONT)
        await eventually(agrees, 5.0)


async def test_a_watch_below_the_compacted_revision_lists_again(etcd: EtcdServer, store: EtcdMembershipStore) -> None:
    """etcd ends a watch that lags behind a compaction; that is played here by the stream of a view that is too old."""
    from common.store.etcd.client import Refused
    from common.store.etcd.watch import Stream, View

    for n in range(5):
        await etcd.ctl("put", P + "A", str(n))
    await etcd.ctl("compact", "5")
    view = View("/headwater/")
    view.revision = 1
    stream = Stream(await store._client.link(1.0), view, 0.5)
    await stream.open()
    responses = [*await stream.batch(), *await stream.batch()]
    assert [r.created for r in responses] == [True, False]
    with pytest.raises(Refused, match="compacted"):
        view.apply(responses[-1])
    stream.close()


async def test_a_stalled_stream_is_noticed_and_rebuilt(etcd: EtcdServer) -> None:
    async with Relay(etcd.port) as relay, opened(relay.url) as store:
        await etcd.ctl("put", P + "A", "1")
        async with Follower(store) as follower:
            await follower.until("A")
            relay.stall(existing_only=True)  # no FIN, and a new connection works
            await etcd.ctl("del", P + "A")
            assert await follower.until() < 1.0 + LATE_S
            assert not any(s.stale for s in follower.all)


async def test_an_idle_watch_stays_up(etcd: EtcdServer) -> None:
    async with Relay(etcd.port) as relay, opened(relay.url, check_interval_s=0.1) as store, Follower(store) as follower:
        await follower.until()
        await asyncio.sleep(0.6)
        assert relay.accepted == 1
        assert len(follower.all) == 1


async def test_what_broke_leaves_nothing_behind(etcd: EtcdServer) -> None:
    """gRPC keeps the connection of a call that is merely cancelled, and forgets tasks of streams that never began."""
    async with Relay(etcd.port) as relay, opened(relay.url) as store:
        before = len(asyncio.all_tasks())
        lease = await store.lease(TTL_S)
        await lease.put(P + "i1", b"1")
        gc.disable()  # nothing is to be left to it
        try:
            async with Follower(store) as follower:
                await follower.until("i1")
                for _ in range(3):
                    accepted = relay.accepted
                    relay.stall(existing_only=True)
                    await eventually(lambda n=accepted: relay.accepted > n, 5.0)
                    await asyncio.sleep(0.3)
                    relay.resume()
                await eventually(lambda: relay.open == 1, 5.0)
        finally:
            gc.enable()
        await lease.close()
        await store.close()
        gc.collect()
        await eventually(lambda: relay.open == 0, 5.0)
        await eventually(lambda: len(asyncio.all_tasks()) <= before, 5.0)


async def test_a_paused_etcd_is_known_before_leases_expire(etcd: EtcdServer, store: EtcdMembershipStore) -> None:
    async with Follower(store) as follower:
        lease = await store.lease(1.0)
        await lease.put(P + "i1", b"1")
        await follower.until("i1")
        etcd.pause()
        assert await follower.until("i1", stale=True) < 3 * 0.2 + LATE_S
        await asyncio.sleep(1.2)
        assert follower.last.values == {P + "i1": b"1"}
        etcd.resume()
        await eventually(lambda: not follower.last.stale, 5.0)
        await follower.until("i1", within_s=5.0)
        await lease.close()


async def test_a_restarted_etcd_gives_a_fresh_snapshot(etcd: EtcdServer, store: EtcdMembershipStore) -> None:
    await etcd.ctl("put", P + "A", "1")
    async with Follower(store) as follower:
        await follower.until("A")
        etcd.kill()
        await follower.until("A", stale=True)
        await etcd.start()
        await follower.until("A", within_s=10.0)
        await etcd.ctl("del", P + "A")
        await follower.until()


async def test_a_silently_emptied_etcd_counts_as_an_outage() -> None:
    from types import SimpleNamespace

    from common.store.etcd.watch import View

    def listing(revision: int, **values: bytes) -> SimpleNamespace:
        kvs = [SimpleNamespace(key=k.encode(), value=v) for k, v in values.items()]
        return SimpleNamespace(header=SimpleNamespace(revision=revision), kvs=kvs)

    view = View("/headwater/")
    assert [s.stale for s in view.replace(listing(40, a=b"1"))] == [False]
    assert view.replace(listing(41, a=b"1")) == []
    snapshots = view.replace(listing(3))
    assert [(s.stale, dict(s.values)) for s in snapshots] == [(True, {"a": b"1"}), (False, {})]


async def test_events_lost_by_etcd_are_found_by_the_next_listing(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from common.store.etcd.watch import View

    monkeypatch.setattr(View, "apply", lambda view, response: False)
    async with opened(etcd.url, relist_interval_s=0.3) as store, Follower(store) as follower:
        await follower.until()
        await etcd.ctl("put", P + "A", "1")
        await follower.until("A")


async def test_ten_thousand_events_leave_two_watchers_agreed(etcd: EtcdServer) -> None:
    async with (
        opened(etcd.url) as store,
        opened(etcd.url) as other,
        opened(etcd.url) as writer,
        Follower(store) as one,
        Follower(other) as two,
    ):
        await one.until()
        lease = await writer.lease(60.0)
        from aetcd import rpc

        async def burst(n: int) -> None:
            for step in range(20):
                put = rpc.RequestOp(request_put=rpc.PutRequest(key=f"{P}i{n}".encode(), value=str(step).encode()))
                gone = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=f"{P}i{n}".encode()))
                ops = [gone] if n % 2 and step == 19 else [put]
                await writer._client.call(lambda link: link.kv.Txn, rpc.TxnRequest(success=ops), 5.0)

        await asyncio.gather(*(burst(n) for n in range(200)))
        ids = [f"i{n}" for n in range(0, 200, 2)]
        await one.until(*ids)
        await two.until(*ids)
        assert one.last.values == two.last.values
        assert set(one.last.values.values()) == {b"19"}
        await lease.close()


# -- addresses, users, TLS


async def test_a_dead_address_is_passed_over(etcd: EtcdServer) -> None:
    async with opened(f"http://127.0.0.1:{free_port()}", etcd.url) as store:
        await store.ping(1.0)
        assert await store.get("/x") is None


async def test_another_member_takes_over_from_one_that_hangs(etcd: EtcdServer) -> None:
    async with Relay(etcd.port) as first, Relay(etcd.port) as second, opened(first.url, second.url) as store:
        lease = await store.lease(2.0)
        await lease.put(P + "A", b"1")
        async with Follower(store) as follower:
            await follower.until("A")
            watcher = asyncio.create_task(never_missing(etcd, P + "A", 2.5))
            first.stall()
            await etcd.ctl("put", P + "B", "1")
            await follower.until("A", "B")
            await watcher
        await lease.close()
        first.resume()


async def test_of_three_members_any_one_may_die() -> None:
    """Each is killed in turn, the leader among them; presence and watch go on."""
    members = [EtcdServer() for _ in range(3)]
    peers = ",".join(f"m{i}=http://127.0.0.1:{m._peer_port}" for i, m in enumerate(members))
    for i, member in enumerate(members):
        member._flags = ("--name", f"m{i}", "--initial-cluster", peers, "--election-timeout", "500")
    try:
        await asyncio.gather(*(member.start() for member in members))
        async with opened(*(member.url for member in members), timeout_s=3.0, check_interval_s=1.0) as store:
            lease = await store.lease(10.0)
            await lease.put(P + "A", b"1")
            async with Follower(store) as follower:
                await follower.until("A", within_s=20.0)
                for n, member in enumerate(members):
                    member.kill()
                    other = members[(n + 1) % 3]
                    await eventually(other.ready, 20.0)  # the two that are left have a leader
                    await other.ctl("put", P + f"B{n}", "1")
                    await follower.until("A", *(f"B{i}" for i in range(n + 1)), within_s=20.0)
                    await member.start()
                assert all(P + "A" in snapshot.values for snapshot in follower.all)
            await lease.close()
            await eventually(lambda: _gone(members[0]), 20.0)
    finally:
        for member in members:
            member.discard()


async def _gone(etcd: EtcdServer) -> bool:
    return P + "A" not in await etcd.keys(P)


async def test_a_user_authenticates_again_when_etcd_forgot_the_token(etcd: EtcdServer) -> None:
    for command in ("user add root:secret", "user grant-role root root", "auth enable"):
        await etcd.ctl(*command.split())
    with pytest.raises(ConfigError):
        EtcdMembershipStore([etcd.url], user="root")
    async with opened(etcd.url, user="root", password="wrong") as wrong:
        with pytest.raises(StoreUnavailable, match="authentication failed"):
            await wrong.get("/x")
    async with opened(etcd.url) as nobody:
        with pytest.raises(StoreUnavailable):
            await nobody.get("/x")
    async with opened(etcd.url, user="root", password="secret") as store:
        lease = await store.lease(TTL_S)
        await lease.put(P + "i1", b"1")
        async with Follower(store) as follower:
            await follower.until("i1")
            etcd.kill()  # a simple token lives in etcd's memory
            etcd.ready = lambda: _up(etcd)  # type: ignore[method-assign]
            await etcd.start()
            await eventually(lambda: _held(store), 10.0)
            await follower.until("i1", within_s=10.0)
        await lease.close()


async def _up(etcd: EtcdServer) -> bool:
    return (await etcd._ctl("--user", "root:secret", "get", "x"))[0] == 0


async def _held(store: EtcdMembershipStore) -> bool:
    try:
        return await store.get(P + "i1") == b"1"
    except StoreUnavailable:
        return False


async def test_tls_both_ways(tmp_path: Path) -> None:
    authority(tmp_path)
    cert, key, ca = (str(tmp_path / name) for name in ("node.pem", "node.key", "ca.pem"))
    async with EtcdServer(tls=(cert, key, ca)) as server:
        async with opened(server.url, tls=EtcdTls(ca, cert, key)) as store:
            await store.ping(2.0)
            assert await store.put_if_absent("/x", b"1") == b"1"
        for tls in (EtcdTls(ca), EtcdTls("", cert, key), EtcdTls(str(tmp_path / "none.pem"))):
            async with opened(server.url, tls=tls) as store:
                with pytest.raises(StoreUnavailable):
                    await store.ping(0.3)


def authority(directory: Path) -> None:
    """A CA, and a certificate of it for 127.0.0.1."""

    def openssl(*args: str) -> None:
        try:
            subprocess.run(["openssl", *args], cwd=directory, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("no openssl here")

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test")
    openssl("req", *curve, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
    (directory / "ext").write_text(
        "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    openssl(
        *("x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-out", "node.pem", "-days", "2", "-extfile", "ext"),
    )


@pytest.mark.parametrize("url", ["", "127.0.0.1:2379", "ftp://x", "http://"])
def test_a_bad_url_ends_the_start(url: str) -> None:
    with pytest.raises(ConfigError):
        EtcdMembershipStore([url])
    with pytest.raises(ConfigError):
        EtcdMembershipStore([])
