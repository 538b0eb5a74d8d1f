"""One file for each kind of inference server, and the question which kind one is."""

from __future__ import annotations

from typing import Final

from services.agent.engines.base import Adapter, Answer, Ask, EngineState, Unreachable
from services.agent.engines.http import Scraper, remembered
from services.agent.engines.openai import OpenAI, reason, unreachable
from services.agent.engines.vllm import Vllm

__all__ = ["ADAPTERS", "Adapter", "Answer", "Ask", "EngineState", "Scraper", "Unreachable", "adapter_for", "detect"]

ADAPTERS: Final[tuple[Adapter, ...]] = (Vllm(), OpenAI())
"""In the order in which they are tried: the one that knows a server best comes first, the generic one last."""


def adapter_for(engine: str) -> Adapter | None:
    """The adapter of a configured engine name; a simulated server is vLLM to its neighbours."""
    name = "vllm" if engine == "sim" else engine
    return next((a for a in ADAPTERS if a.engine == name), None)


async def detect(ask: Ask) -> Adapter | Unreachable:
    """Find out what a server is by asking it. Unreachable if it does not answer, or nothing that anyone recognises."""
    once = remembered(ask)
    for adapter in ADAPTERS:
        if await adapter.recognise(once):
            return adapter
    listing = await once("/v1/models")
    if not listing.status:
        return unreachable(listing)
    return Unreachable(refused=False, why=f"not recognised (/v1/models: {reason(listing)}); name its engine")
