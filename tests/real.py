"""A real inference server behind three tiers, with mixed traffic: no errors, and the same counts on both sides.

    python -m tests.real --url http://127.0.0.1:18300 --model tiny --minutes 10 --rps 1

etcd, Redis, one tier of each kind and an agent are started here; the server is not. Most of each minute has chats and
completions, whole and streamed; the rest has clients that leave, before the answer or within it, and requests that the
server refuses. The tiers' requests and tokens are held against the clients'; so are the server's, if it has vLLM's
metrics (without those of clients that left: what a server made for them, it alone knows). Once those have left, it has
to have nothing running: that they did has reached it. Ends with 1 when anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import uvloop

from tests.integration.clients import Raw, body_of, chat, events, get, metrics, post, total
from tests.integration.system import PORTS, Addresses, Process, headwater
from tests.servers import EtcdServer, RedisServer, eventually

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LEAVING_S = 10.0  # of each minute
ANSWER_S = 120.0
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "hello", "world"]
CLOSE = "connection: close"


@asynccontextmanager
async def three_tiers(url: str, engine: str) -> AsyncIterator[dict[str, Addresses]]:
    """Addresses by tier, once a request can go all the way."""
    async with AsyncExitStack() as stack:
        etcd = await stack.enter_async_context(EtcdServer())
        redis = await stack.enter_async_context(RedisServer())
        base = {"etcd": {"urls": [etcd.url]}, "redis": {"url": redis.url}, "log": {"access": False}}
        cluster = {"region": "eu", "cluster": "eu-a"}
        found = {}
        for name, node in (("global", {}), ("region", {"region": "eu"}), ("instance", cluster)):
            at = found[name] = Addresses(PORTS.take(), PORTS.take())
            listen = {"listen": f"127.0.0.1:{at.data}", "admin": f"127.0.0.1:{at.admin}"}
            await stack.enter_async_context(_process(name, {**base, **node, **listen}, f"{at.admin_url}/livez"))
        server = {"url": url, "gpu": "cpu", **({"engine": engine} if engine else {})}
        agent = {"etcd": base["etcd"], **cluster, "listen": f"127.0.0.1:{PORTS.take()}", "instances": [server]}
        await stack.enter_async_context(_process("agent", agent, "", "instance_found"))
        for at in found.values():
            await eventually(lambda at=at: _ready(at), 90.0)
        yield found


def _process(command: str, values: dict[str, Any], url: str, line: str = "") -> Process:
    process = Process(command, headwater(command), url, line)
    file = process.directory / "config.yaml"
    file.write_text(json.dumps(values))
    process.argv += ["--config", str(file)]
    return process


async def _ready(at: Addresses) -> bool:
    return b'"id"' in (await get(f"{at.url}/v1/models")).body


class Clients:
    """Sends requests and adds up what came of them."""

    def __init__(self, url: str, model: str, rng: Random) -> None:
        self.url = url
        self.model = model
        self.rng = rng
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def answered(self) -> None:
        """One request of those that are answered."""
        text = " ".join(self.rng.choices(WORDS, k=self.rng.randrange(1, 60)))
        more: dict[str, Any] = {"max_tokens": self.rng.randrange(1, 40)}
        stream, path = self.rng.random() < 0.5, self.rng.choice((CHAT, COMPLETIONS))
        if stream:
            more |= {"stream": True, "stream_options": {"include_usage": True}}
        body = chat(self.model, text=text, **more) if path == CHAT else self._completion(text, more)
        async with await Raw.connect(self.url) as raw:
            raw.send(post(path, body, CLOSE))
            got = await raw.to_end(ANSWER_S)
        payload = body_of(got) if b"transfer-encoding: chunked" in got else got.partition(b"\r\n\r\n")[2]
        if not got.startswith(b"HTTP/1.1 200"):
            self.wrong.append(f"{path}: {got[:300]!r}")
            return
        parts = [p for p in events(payload) if p != b"[DONE]"] if stream else [json.loads(payload)]
        usage = next((p["usage"] for p in reversed(parts) if p.get("usage")), None)
        if usage is None or any("error" in p for p in parts):
            self.wrong.append(f"{path}: {payload[-300:]!r}")
            return
        self.counts["answered"] += 1
        self.counts["prompt tokens"] += usage["prompt_tokens"]
        self.counts["output tokens"] += usage["completion_tokens"]

    async def leaving(self) -> None:
        """One request whose client does not stay, or that is refused."""
        kind = self.rng.choice(("left before", "left within", "refused"))
        async with await Raw.connect(self.url) as raw:
            if kind == "refused":
                raw.send(post(CHAT, chat(self.model, temperature="hot"), CLOSE))
                status = (await raw.to_end(ANSWER_S))[9:12]
                if not status >= b"400":
                    self.wrong.append(f"a bad field: {status!r}")
            elif kind == "left before":
                raw.send(post(CHAT, chat(self.model, max_tokens=500), CLOSE))
                await asyncio.sleep(0.3)
            else:
                raw.send(post(CHAT, chat(self.model, max_tokens=500, stream=True), CLOSE))
                await raw.until(b"data:", 3, ANSWER_S)
        self.counts[kind] += 1

    def _completion(self, text: str, more: dict[str, Any]) -> bytes:
        return json.dumps({"model": self.model, "prompt": text, **more}).encode()


async def at_rate(send: Any, rps: float, seconds: float) -> None:
    """So many a second, and then until all have ended."""
    end, tasks = time.monotonic() + seconds, set[asyncio.Task[None]]()
    while time.monotonic() < end:
        tasks.add(asyncio.create_task(send()))
        await asyncio.sleep(1.0 / rps)
    await asyncio.gather(*tasks)


async def server_counts(url: str) -> Counter[str]:
    """What vLLM has counted; empty where the server has no such metrics."""
    found = await metrics(url)
    names = {
        "answered": "vllm:request_success_total",
        "prompt tokens": "vllm:prompt_tokens_total",
        "output tokens": "vllm:generation_tokens_total",
    }
    if not any(name.startswith("vllm:") for name in found):
        return Counter()
    return Counter({ours: int(total(found, theirs)) for ours, theirs in names.items()})


async def tier_counts(at: Addresses) -> Counter[str]:
    """What a tier has counted of requests that went well."""
    found = await metrics(at.admin_url)
    tokens = "gen_ai_client_token_usage_sum"
    return Counter(
        {
            "answered": int(total(found, "headwater_requests_total", status="200", ending="complete")),
            "output tokens": int(total(found, tokens, gen_ai_token_type="output")),
        }
    )


async def run(url: str, model: str, engine: str, minutes: float, rps: float) -> int:
    """The whole of it; the exit status."""
    clients = Clients("", model, Random(1))
    differs: list[str] = []
    async with three_tiers(url, engine) as tiers:
        clients.url = tiers["global"].url
        end = time.monotonic() + 60.0 * minutes
        while time.monotonic() < end:
            part_s = min(60.0 - LEAVING_S, end - time.monotonic())
            before = await server_counts(url), {n: await tier_counts(at) for n, at in tiers.items()}
            had = Counter(clients.counts)
            await at_rate(clients.answered, rps, part_s)
            sent = clients.counts - had
            await asyncio.sleep(1.0)  # counters are written a moment after the answer
            if before[0] and (made := (await server_counts(url)) - before[0]) != sent:
                differs.append(f"server {dict(made)}, clients {dict(sent)}")
            sent.pop("prompt tokens", None)
            for name, at in tiers.items():
                if (made := (await tier_counts(at)) - before[1][name]) != sent:
                    differs.append(f"{name} {dict(made)}, clients {dict(sent)}")
            await at_rate(clients.leaving, rps, LEAVING_S)
            if before[0]:
                await eventually(lambda: _rests(url), 20.0)
            print(time.strftime("%H:%M:%S"), dict(clients.counts), f"{len(clients.wrong)} wrong", *differs, flush=True)
    for wrong in clients.wrong[:20]:
        print(wrong)
    return int(bool(clients.wrong or differs))


async def _rests(url: str) -> bool:
    found = await metrics(url)
    return not any(total(found, f"vllm:num_requests_{state}") for state in ("running", "waiting"))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="a real server behind three tiers, counted on both sides")
    parser.add_argument("--url", required=True, help="of the server")
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", default="", help="its kind, where it is not to be found out")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rps", type=float, default=1.0)
    given = parser.parse_args()
    work = run(given.url, given.model, given.engine, given.minutes, given.rps)
    sys.exit(uvloop.run(work))


if __name__ == "__main__":
    main()
