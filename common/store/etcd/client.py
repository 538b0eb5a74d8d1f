"""Calls to whichever etcd member answers, each with a deadline, its errors mapped to ours.

gRPC would hide outages: it tries a lost connection again after up to two minutes, hands one broken TCP connection to
every channel of a process, ends the calls on a closed channel with a CancelledError that nobody asked for, and lets a
first write on such a call wait for ever, whatever its deadline. So a link that failed once is thrown away with its
channel, the next address is tried, and each wait has a bound that is not gRPC's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as FilePath
from random import Random
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import grpc
import grpc.aio
import structlog
from aetcd import rpc

from common.clock import now
from common.errors import ConfigError, LeaseLost, StoreUnavailable

log = structlog.get_logger()

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

RETRY_S: Final = (0.05, 1.0)  # first and longest pause between attempts while etcd is out of reach
SLACK_S: Final = 0.1
LOGIN_TIMEOUT_S: Final = 3.0  # etcd hashes the password, which takes it 0.1 s of CPU time
MESSAGE_BYTES: Final = 256 << 20  # a listing of 500,000 instances; gRPC's own bound of 4 MiB is met at 10,000

# Nothing is to be served by a member that has lost its cluster: with this etcd says so at once, and ends watches.
_REQUIRE_LEADER: Final = (("hasleader", "true"),)

_NO_ANSWER: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
# What etcd says when a token has expired, was issued before a restart, or before roles changed.
_TOKEN_REFUSED: Final = ("invalid auth token", "auth store is old", "user name is empty")
_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new TCP connection
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),  # etcd refuses pings more often than every 5 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
)


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """Files in PEM, read at each connection, so that renewed certificates are taken up. "": none."""

    ca_file: str = ""  # "": gRPC's own list of authorities
    cert_file: str = ""
    key_file: str = ""


class Unreachable(StoreUnavailable):
    """The member did not answer, or cannot: the next one is tried."""


class Refused(StoreUnavailable):
    """The member answered, with a refusal that another try would not change."""


class _TokenRefused(StoreUnavailable):
    """The token is not accepted: authenticate again."""


class _LoginPending(StoreUnavailable):
    """Authentication took more than the time there was, and goes on."""


class Link:
    """One connection to one member, with the token it was given."""

    def __init__(self, url: str, tls: EtcdTls) -> None:
        self.token = ""
        self.login: asyncio.Task[None] | None = None
        self.channel = _channel(url, tls)
        self.kv = rpc.KVStub(self.channel)
        self.lease = rpc.LeaseStub(self.channel)
        self.watch = rpc.WatchStub(self.channel)
        self.auth = rpc.AuthStub(self.channel)
        # A stream by its definition. Called as what it is used for, one request and one reply, it is the same on the
        # wire, has a deadline that holds, and leaves none of the tasks behind that gRPC forgets with broken streams.
        self.keep_alive = self.channel.unary_unary(
            "/etcdserverpb.Lease/LeaseKeepAlive",
            request_serializer=rpc.LeaseKeepAliveRequest.SerializeToString,
            response_deserializer=rpc.LeaseKeepAliveResponse.FromString,
        )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """To be sent with every call."""
        return (*_REQUIRE_LEADER, ("token", self.token)) if self.token else _REQUIRE_LEADER


Method = Callable[[Link], Any]
"""Which unary call, as in `lambda link: link.kv.Range`."""


class Client:
    """A cluster by its addresses. A link that did not answer is never used again.

    Raises ConfigError for a URL that is none, for no URL, and for a user without a password.
    """

    def __init__(self, urls: Sequence[str], user: str, password: str, tls: EtcdTls) -> None:
        if not urls:
            raise ConfigError("etcd: no URL given")
        if bool(user) != bool(password):
            raise ConfigError("etcd: a user needs a password, and a password a user")
        self.closed = False
        self._urls = tuple(_checked(url) for url in urls)
        self._user, self._password = user, password
        self._tls = tls
        self._turn = 0
        self._current: Link | None = None
        self._answers: bool | None = None  # None: not tried yet
        self._refusal = ""  # the last one that was logged
        self._closing: set[asyncio.Task[None]] = set()

    async def call(self, method: Method, request: Any, timeout_s: float) -> Any:
        """One unary call within `timeout_s`, at the next member if one does not answer.

        It may be carried out twice, so ask only what may be. Raises StoreUnavailable or LeaseLost.
        """

        async def attempt(link: Link, left_s: float) -> Any:
            return await _unary(method(link), link, request, left_s)

        return await self._attempts(attempt, timeout_s)

    async def link(self, timeout_s: float) -> Link:
        """The link in use, authenticated. Raises StoreUnavailable."""
        if self.closed:
            raise Refused("etcd store is closed")
        if self._current is None:
            self._current = Link(self._urls[self._turn % len(self._urls)], self._tls)
        link = self._current
        if self._user and not link.token:
            # One for all who wait: it costs etcd a password hash, and may take longer than some of them have.
            if link.login is None or link.login.done():
                link.login = asyncio.create_task(self._login(link))
                link.login.add_done_callback(retrieve)
            await asyncio.wait({link.login}, timeout=timeout_s)
            if not link.login.done():
                raise _LoginPending("etcd: authentication is under way")
            link.login.result()
        return link

    async def _login(self, link: Link) -> None:
        request = rpc.AuthenticateRequest(name=self._user, password=self._password)
        answer = await _unary(link.auth.Authenticate, link, request, LOGIN_TIMEOUT_S)
        link.token = str(answer.token)

    def drop(self, link: Link | None) -> None:
        """Never use a link again; what is under way on it fails, and is tried on the next."""
        if link is None or link is not self._current:
            return
        self._current = None
        self._turn += 1
        task = asyncio.create_task(link.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self, timeout_s: float) -> None:
        """Close the connection; what is under way fails."""
        self.closed = True
        self.drop(self._current)
        if self._closing:
            await asyncio.wait(self._closing, timeout=timeout_s)

    async def _attempts(self, attempt: Callable[[Link, float], Awaitable[T]], timeout_s: float) -> T:
        deadline = now() + timeout_s
        error: StoreUnavailable = Unreachable("etcd: no time left")
        for _ in range(len(self._urls) + 1):  # one more, for a token renewed or a link that another call dropped
            if now() >= deadline:
                break
            link: Link | None = None
            try:
                # gRPC's own deadline comes first, and would do if each of its waits ended with the call.
                async with asyncio.timeout(deadline - now() + SLACK_S):
                    link = await self.link(deadline - now())
                    answer = await attempt(link, max(deadline - now(), 0.001))
            except _LoginPending as pending:
                error = bare(pending)
            except _TokenRefused as refused:
                error = bare(refused) if self._user else Refused(str(refused))
                if link is not None:
                    link.token = ""
            except (Unreachable, TimeoutError) as unreachable:
                late = Unreachable("etcd: no answer in time")
                error = bare(unreachable) if isinstance(unreachable, Unreachable) else late
                self.drop(link or self._current)
            except Refused as refused:
                self._note_refusal(refused)
                raise
            else:
                self._note(None)
                return answer
        if isinstance(error, Refused):
            self._note_refusal(error)
        else:
            self._note(error)
        raise error

    def _note(self, error: StoreUnavailable | None) -> None:
        """One line for each change between reachable and not."""
        answers = error is None
        if answers is self._answers or self.closed:
            return
        if error is not None:
            log.warning("etcd out of reach", urls=self._urls, reason=str(error))
        elif self._answers is False:
            log.info("etcd answers again", urls=self._urls)
        self._answers = answers

    def _note_refusal(self, error: Refused) -> None:
        if str(error) != self._refusal and not self.closed:
            self._refusal = str(error)
            log.warning("etcd refuses", urls=self._urls, reason=self._refusal)


class Pauses:
    """Growing pauses between attempts, each of them cut by up to half so that processes do not march in step."""

    def __init__(self, longest_s: float = RETRY_S[1]) -> None:
        self._longest_s = longest_s
        self._rng = Random()
        self.reset()

    def reset(self) -> None:
        """The next pause is the first again."""
        self._next_s = min(RETRY_S[0], self._longest_s)

    async def next(self, deadline: float = math.inf) -> None:
        """Sleep; not beyond `deadline` (monotonic seconds)."""
        pause_s = self._next_s * self._rng.uniform(0.5, 1.0)
        self._next_s = min(2.0 * self._next_s, self._longest_s)
        await asyncio.sleep(max(0.0, min(pause_s, deadline - now())))


@contextmanager
def mapped() -> Iterator[None]:
    """Maps gRPC's exceptions to ours: Unreachable, Refused, LeaseLost."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _translated(error.code(), error.details() or "") from None
    except (grpc.aio.UsageError, asyncio.InvalidStateError):
        raise Unreachable("etcd: the connection was closed") from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Unreachable("etcd: the connection was closed") from None


def bare(error: E) -> E:
    """The error without its frames, which would keep gRPC's call and its TCP connection until garbage is collected."""
    error.__context__ = None
    return error.with_traceback(None)


def retrieve(task: asyncio.Task[Any]) -> None:
    """For tasks that nobody may wait for any more: their failure is no news then."""
    if not task.cancelled():
        task.exception()


def _translated(code: grpc.StatusCode, details: str) -> LeaseLost | StoreUnavailable:
    if code is grpc.StatusCode.NOT_FOUND and "lease" in details:
        return LeaseLost(f"etcd: {details}")
    if any(text in details for text in _TOKEN_REFUSED):
        return _TokenRefused(f"etcd: {details}")
    kind = Unreachable if code in _NO_ANSWER else Refused
    return kind(f"etcd: {code.name.lower()}: {details[:200]}")


async def _unary(method: Any, link: Link, request: Any, timeout_s: float) -> Any:
    with mapped():
        return await method(request, timeout=timeout_s, metadata=link.metadata)


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"etcd: {url!r} is no URL, as in http://127.0.0.1:2379")
    return url


def _channel(url: str, tls: EtcdTls) -> Any:
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    target = f"dns:///{host}:{parts.port or 2379}"
    if parts.scheme == "http":
        return grpc.aio.insecure_channel(target, options=_OPTIONS)
    try:
        files = [FilePath(file).read_bytes() if file else None for file in (tls.ca_file, tls.key_file, tls.cert_file)]
    except OSError as error:  # while a certificate is being replaced: tried again with the next call
        raise Unreachable(f"etcd: cannot read {error.filename}: {error.strerror}") from None
    return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(*files), options=_OPTIONS)
