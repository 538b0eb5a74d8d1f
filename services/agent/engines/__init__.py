"""One file for each kind of inference server, and the question which kind one is."""

from __future__ import annotations

from typing import Final

from services.agent.engines.base import Adapter, Answer, Ask, EngineState, Listener, Unreachable
from services.agent.engines.http import Scraper, remembered
from services.agent.engines.llamacpp import LlamaCpp
from services.agent.engines.ollama import Ollama
from services.agent.engines.openai import OpenAI
from services.agent.engines.sglang import Sglang
from services.agent.engines.tgi import Tgi
from services.agent.engines.torchserve import TorchServe
from services.agent.engines.triton import Triton
from services.agent.engines.trouble import reason, unreachable
from services.agent.engines.trtllm import TrtLlm
from services.agent.engines.vllm import Vllm

__all__ = [
    "ADAPTERS",
    "Adapter",
    "Answer",
    "Ask",
    "EngineState",
    "Listener",
    "Scraper",
    "Unreachable",
    "adapter_for",
    "detect",
]

ADAPTERS: Final[tuple[Adapter, ...]] = (
    TrtLlm(),  # first, as reading its /metrics empties it: its list of models is enough
    Vllm(),
    Sglang(),  # before Ollama, whose API it imitates
    LlamaCpp(),
    Tgi(),
    Ollama(),
    Triton(),
    TorchServe(),
    OpenAI(),
)
"""In the order in which they are tried: those that their list of models gives away first, the generic one last."""


def adapter_for(engine: str) -> Adapter | None:
    """The adapter of a configured engine name; a simulated server is vLLM to its neighbours."""
    name = "vllm" if engine == "sim" else engine
    return next((a for a in ADAPTERS if a.engine == name), None)


async def detect(ask: Ask) -> Adapter | Unreachable:
    """Find out what a server is by asking it, with GETs alone.

    Unreachable if it does not answer, or nothing that anyone recognises.
    """
    once = remembered(ask)
    listing = await once("/v1/models")
    if not listing.status:
        metrics = await once("/metrics")
        if not metrics.status:  # one that hangs is not asked for whatever else an adapter might know it by
            return unreachable(listing, metrics)
    for adapter in ADAPTERS:
        if await adapter.recognise(once):
            return adapter
    return Unreachable(refused=False, why=f"not recognised (/v1/models: {reason(listing)}); name its engine")
