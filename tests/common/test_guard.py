"""The guard of the admin listener, as an ASGI application over httpx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from common.guard import Guard, peer_token

TOKEN = "t" * 20
KEY = b"k" * 32
OPEN = ("/livez", "/readyz")


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"in"})


async def status(
    path: str = "/admin/v1/pools",
    *,
    host: str = "127.0.0.1",
    asked: str = "http://127.0.0.1:9080",
    tokens: tuple[str, ...] = (),
    headers: Mapping[str, str] | None = None,
    open_metrics: bool = True,
    auth: tuple[str, str] | None = None,
    open_admin: bool = False,
) -> int:
    guard = Guard(app, host, tokens, lambda: (KEY,), open_metrics=open_metrics, open_admin=open_admin)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guard)) as client:
        reply = await client.get(asked + path, headers=headers, auth=auth)
    assert (reply.status_code == 200) == (reply.text == "in")
    return reply.status_code


@pytest.mark.parametrize("asked", ["http://127.0.0.1:9080", "http://localhost:1", "http://[::1]:9080"])
async def test_on_loopback_whoever_is_there_may_ask(asked: str) -> None:
    assert await status(asked=asked) == 200


@pytest.mark.parametrize(
    ("asked", "headers"),
    [
        ("http://127.0.0.1:9080", {"origin": "https://evil.example"}),
        ("http://127.0.0.1:9080", {"origin": "null"}),
        ("http://127.0.0.1:9080", {"origin": "http://127.0.0.1:3000"}),
        ("http://127.0.0.1:9080", {"sec-fetch-site": "cross-site"}),
        ("http://rebound.example:9080", {}),
        ("http://127.0.0.1.evil.example:9080", {}),
    ],
)
async def test_a_web_page_in_an_operators_browser_may_not(asked: str, headers: dict[str, str]) -> None:
    assert await status(asked=asked, headers=headers) == 403


async def test_our_own_page_may() -> None:
    assert await status(headers={"origin": "http://127.0.0.1:9080", "sec-fetch-site": "same-origin"}) == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "gpu7.example"])
async def test_off_loopback_without_a_token_only_health_and_metrics_are_told(host: str) -> None:
    asked = "http://gpu7.example:9080"
    assert [await status(path, host=host, asked=asked) for path in (*OPEN, "/metrics")] == [200, 200, 200]
    assert await status("/metrics", host=host, asked=asked, open_metrics=False) == 403
    for path in ("/admin/v1/pools", "/console", "/openapi.json", "/docs", "/livez/", "//livez", "/livez/../admin"):
        assert await status(path, host=host, asked=asked) == 403, path


async def test_a_network_of_operators_alone_may_be_said_to_be_one() -> None:
    asked = "http://global-1:9080"
    assert await status(host="0.0.0.0", asked=asked, open_admin=True) == 200
    assert await status(host="0.0.0.0", asked=asked, open_admin=True, headers={"origin": "https://evil.example"}) == 403
    assert await status(host="0.0.0.0", asked=asked, open_admin=True, tokens=(TOKEN,)) == 401


async def test_with_tokens_everybody_needs_one() -> None:
    tokens = ("s" * 20, TOKEN)
    for host in ("127.0.0.1", "0.0.0.0"):
        assert await status(host=host, tokens=tokens) == 401
        assert await status(host=host, tokens=tokens, headers={"authorization": f"Bearer {TOKEN}"}) == 200
        assert await status(host=host, tokens=tokens, auth=("anybody", TOKEN)) == 200
        for wrong in (f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer ", "Basic eDp5", "Basic !", TOKEN, "Bearer"):
            assert await status(host=host, tokens=tokens, headers={"authorization": wrong}) == 401, wrong
        assert await status("/metrics", host=host, tokens=tokens, open_metrics=False) == 401
        assert await status("/readyz", host=host, tokens=tokens, open_metrics=False) == 200


async def test_balancers_know_each_other_by_the_keys_they_share() -> None:
    for tokens in ((), (TOKEN,)):
        assert await status(host="0.0.0.0", tokens=tokens, auth=("peer", peer_token(KEY))) == 200
        assert await status(host="0.0.0.0", tokens=tokens, auth=("peer", peer_token(b"other" * 8))) in (401, 403)
    assert KEY.decode() not in peer_token(KEY)
