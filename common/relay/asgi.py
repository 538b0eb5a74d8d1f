"""Hands a request that is not relayed to an ASGI application (FastAPI): models, health, documentation.

These answers are small and whole, so they are collected and written at once; what streams is relayed and never here.
Source: ASGI specification 3.0, HTTP connection scope.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import unquote

from common.relay.exchange import Exchange
from common.relay.heads import INTERNAL_PREFIX, Headers

Message = MutableMapping[str, Any]
AsgiApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


async def answer_with(app: AsgiApp, exchange: Exchange, added: Headers, state: Mapping[str, Any]) -> None:
    """Run the application on one request and write its answer, with some header fields more.

    `state`: what is known of the caller; the application finds it in `request.state`.
    """
    path, _, query = exchange.target.partition(b"?")
    scope: Message = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.0" if exchange.old else "1.1",
        "method": "GET" if exchange.method == b"HEAD" else exchange.method.decode(),
        "scheme": "http",
        "path": unquote(path.decode("latin-1")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": [(k, v) for k, v in exchange.headers if not k.startswith(INTERNAL_PREFIX)],
        "client": (exchange.client.peername, 0),
        "server": None,
        "state": dict(state),
    }
    received = False
    status, headers, body = 500, [], bytearray()

    async def receive() -> Message:
        nonlocal received
        if received:
            return {"type": "http.disconnect"}
        received = True
        return {"type": "http.request", "body": exchange.body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            body.extend(message.get("body", b""))

    await app(scope, receive, send)
    exchange.client.respond(status, [*headers, *added], bytes(body))
