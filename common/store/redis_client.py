"""A redis.asyncio client from a URL: one server, the master that sentinels know, or a cluster.

    redis://[user:password@]host:port[/db]      rediss://… is TLS
    unix:///path/to/socket[?db=0]
    redis+sentinel://[user:password@]host:port,host:port/master[/db]      or rediss+sentinel://…
    redis+cluster://[user:password@]host:port,host:port                   or rediss+cluster://…

redis-py's own options may follow as a query, such as `?ssl_ca_certs=/etc/ca.pem`. User and password are those of the
servers; `sentinel_password` in the query is the sentinels' own. TLS is spoken with both or with neither.

By default redis-py tries a command ten times over, waits 5 s for a reply and opens each connection with a handshake.
Here it does none of this: the store decides what to try again, and for how long.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Final, Protocol
from urllib.parse import unquote, urlsplit

import redis.asyncio
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from common.errors import ConfigError

SENTINEL_PORT: Final = 26379
SERVER_PORT: Final = 6379

_aio: Any = redis.asyncio  # its keyword arguments are only known at run time here


class Client(Protocol):
    """The part of redis-py's clients that is used."""

    def execute_command(self, *args: Any) -> Awaitable[Any]:
        """Send one command; its reply. Raises RedisError."""

    async def aclose(self) -> None:
        """Close all connections."""


def connect(url: str, *, max_connections: int, timeout_s: float) -> Client:
    """The client for a URL, not yet connected. `timeout_s` bounds connecting. Raises ConfigError for a bad URL."""
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    options: dict[str, Any] = {
        "max_connections": max_connections,
        "socket_timeout": None,  # the whole command has one; redis-py would make a task of each write for its own
        "socket_connect_timeout": timeout_s,
        "protocol": 2,  # RESP3 adds round trips to each connection, for nothing that is used
    }
    try:
        if not kind:
            client: Client = _aio.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **options)
            return client
        if scheme not in ("redis", "rediss") or kind not in ("sentinel", "cluster"):
            raise ValueError(f"unknown scheme {parts.scheme}")
        options |= _credentials(parts.username, parts.password) | _query(parts.query)
        if scheme == "rediss":
            options["ssl"] = True
        if kind == "sentinel":
            return _sentinel(_hosts(parts.netloc, SENTINEL_PORT), parts.path.strip("/"), options)
        return _cluster(_hosts(parts.netloc, SERVER_PORT), parts.path.strip("/"), options)
    except (ValueError, TypeError, RedisError) as error:
        raise ConfigError(f"redis: no usable URL, as in redis://127.0.0.1:6379/0: {error}") from None


def server_name(url: str) -> str:
    """What a log may say of a URL: hosts, or the path of a socket; no user, no password."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or parts.path


async def disconnect_idle(client: Client) -> None:
    """Close the connections that are not in use, so that the next ones find whoever is the master by then."""
    pool = getattr(client, "connection_pool", None)  # a cluster's client has none, and follows its masters by itself
    if pool is not None:
        await pool.disconnect(inuse_connections=False)


def _sentinel(hosts: list[tuple[str, int]], path: str, options: dict[str, Any]) -> Client:
    master, _, db = path.partition("/")
    if not master:
        raise ValueError("redis+sentinel://HOST:PORT/MASTER names no master")
    retry = Retry(NoBackoff(), 0)
    timeout_s = options["socket_connect_timeout"]
    own = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "retry": retry, "protocol": 2}
    own |= {name: value for name, value in options.items() if name.startswith("ssl")}
    password = options.pop("sentinel_password", None)
    if password:
        own["password"] = password
    client: Client = _aio.Sentinel(hosts, sentinel_kwargs=own).master_for(
        master, db=int(db or 0), retry=retry, **options
    )
    return client


def _cluster(hosts: list[tuple[str, int]], path: str, options: dict[str, Any]) -> Client:
    if path:
        raise ValueError("a cluster has no databases")
    nodes = [_aio.cluster.ClusterNode(host, port) for host, port in hosts]
    # One more try: a slot that has moved is asked for at its new node.
    client: Client = _aio.RedisCluster(startup_nodes=nodes, retry=Retry(NoBackoff(), 1), **options)
    return client


def _hosts(netloc: str, default_port: int) -> list[tuple[str, int]]:
    hosts = []
    for part in netloc.rpartition("@")[2].split(","):
        host = urlsplit(f"//{part}")
        if not host.hostname:
            raise ValueError(f"no host in {part!r}")
        hosts.append((host.hostname, host.port or default_port))
    return hosts


def _credentials(user: str | None, password: str | None) -> dict[str, str]:
    given = {"username": user, "password": password}
    return {name: unquote(value) for name, value in given.items() if value}


def _query(query: str) -> dict[str, Any]:
    """redis-py's reading of the options, with their types."""
    options: dict[str, Any] = dict(parse_url(f"redis://host?{query}"))
    del options["host"]
    return options
