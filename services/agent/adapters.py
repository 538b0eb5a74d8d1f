"""Has a server load the LoRA adapters it is configured to have, whenever it lists one less: at its start, and again
after a restart. One at a time, and after a failure not again for a while: a load takes memory and GPU time.

Source: vLLM's `entrypoints/serve/lora` (`VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` makes it take these), SGLang's
`entrypoints/http_server.py` (`--enable-lora`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import httpx
import structlog

from common import clock

log = structlog.get_logger()

LOADS: Final = {  # engine: where it is asked
    "vllm": "/v1/load_lora_adapter",
    "sim": "/v1/load_lora_adapter",
    "sglang": "/load_lora_adapter",
}
LOAD_TIMEOUT_S: Final = 60.0  # of one adapter, from a slow disk
RETRY_S: Final = (5.0, 300.0)  # first and longest pause after a failure; it doubles
SAID: Final = 300  # characters of a server's refusal that are logged


class AdapterLoader:
    """For one server. `wants` is told of each look; what is missing is loaded in the background."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._task: asyncio.Task[None] | None = None
        self._pauses: dict[str, tuple[float, float]] = {}  # adapter -> not before (monotonic s), pause after that
        self._unable = ""

    def wants(self, engine: str, url: str, wanted: Mapping[str, str], listed: frozenset[str] | None) -> None:
        """Load one of `wanted` (name -> where the server finds it) that is not listed, unless one is being loaded."""
        if not wanted or listed is None or (self._task is not None and not self._task.done()):
            return
        now = clock.now()
        missing = [name for name in wanted if name not in listed and self._pauses.get(name, (0.0, 0.0))[0] <= now]
        if not missing:
            return
        path = LOADS.get(engine)
        if path is None:
            if self._unable != engine:
                self._unable = engine
                log.error("adapters_not_loadable", instance=self._instance, engine=engine, known=sorted(LOADS))
            return
        self._task = asyncio.create_task(self._load(url + path, missing[0], wanted[missing[0]]), name="adapter load")

    def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()

    async def _load(self, url: str, name: str, path: str) -> None:
        began = clock.now()
        try:
            async with httpx.AsyncClient(timeout=LOAD_TIMEOUT_S, trust_env=False) as client:
                reply = await client.post(url, json={"lora_name": name, "lora_path": path})
            problem = "" if reply.is_success else f"{reply.status_code}: {reply.text[:SAID]}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem = f"{type(error).__name__}: {error}"
        now = clock.now()
        if not problem:
            self._pauses.pop(name, None)
            log.info("adapter_loaded", instance=self._instance, adapter=name, took_s=round(now - began, 3))
            return
        pause = min(2.0 * self._pauses.get(name, (0.0, RETRY_S[0] / 2.0))[1], RETRY_S[1])
        self._pauses[name] = (now + pause, pause)
        log.warning("adapter_not_loaded", instance=self._instance, adapter=name, problem=problem, again_in_s=pause)
