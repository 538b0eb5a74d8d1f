"""Explains requests: those that were, one that could come now, and those that were under other policies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from common import clock
from common.admin.peers import Peers, decoded
from common.admin.shapes import Everywhere, TraceId, answers, json
from common.balancing import Balancing
from common.config import Whole
from common.explain.decisions import Decision, decision_of
from common.explain.whatif import MOST_REQUESTS, Counterfactual, DryRun, cases_of, counterfactual, dry_run
from common.policy.stages import POLICIES
from common.telemetry import Telemetry
from common.types import InferenceRequest, Path, Priority, Slo

KINDS = (Decision, DryRun, Counterfactual)  # what is answered with
EXPECTED_OUTPUT_TOKENS = 200.0  # of a question that does not say: a usual answer of a chat
Tokens = Annotated[int, Field(ge=0, le=10_000_000), Whole]


def _policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name[:100]!r}; known: {', '.join(POLICIES)}")
    return name


PolicyName = Annotated[str, AfterValidator(_policy), WithJsonSchema({"type": "string", "enum": list(POLICIES)})]


class Question(BaseModel):
    """A request that could come, as far as the stages look at it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(max_length=512)] = ""
    """Name of the model; none: any endpoint."""
    input_tokens: Annotated[int, Field(ge=1, le=10_000_000), Whole] = 500
    """Tokens of the prompt."""
    output_tokens: Annotated[float, Field(ge=0.0, le=10_000_000.0, allow_inf_nan=False)] = EXPECTED_OUTPUT_TOKENS
    """Tokens expected back; 0 for what generates none."""
    max_output_tokens: Tokens | None = None
    """The request's own bound."""
    stream: bool = True
    """Whether it would be streamed."""
    warm: Annotated[str, Field(max_length=200, pattern=r"^([\w.-]+(/[\w.-]+){0,2})?$")] = ""
    """region/cluster/instance that served its session last."""
    warm_tokens: Tokens = 0
    """Tokens of the session that may be cached there."""
    priority: Annotated[str, Field(pattern="^(critical|standard|batch)$")] = "standard"
    """critical, standard or batch."""
    slo_ttft_s: Annotated[float, Field(ge=1e-6, le=86_400.0)] | None = None
    """Seconds within which its first token is wanted."""
    slo_tpot_s: Annotated[float, Field(ge=1e-6, le=3600.0)] | None = None
    """Seconds within which each further token is wanted."""
    node: Annotated[str, Field(max_length=200, pattern=r"^([\w.-]+(/[\w.-]+)?)?$")] = ""
    """Where to begin: "" at the top, else region or region/cluster."""

    def request(self) -> InferenceRequest:
        """As the stages see it."""
        return InferenceRequest(
            "0" * 32,
            self.model,
            stream=self.stream,
            input_tokens=self.input_tokens,
            max_output_tokens=self.max_output_tokens,
            output_tokens=self.output_tokens,
            warm=_path(self.warm),
            warm_tokens=self.warm_tokens,
            priority=Priority[self.priority.upper()],
            slo=Slo(self.slo_ttft_s, self.slo_tpot_s),
        )


class DecisionRoutes:
    """The routes, over one process's pools and records."""

    def __init__(self, balancing: Balancing, telemetry: Telemetry, peers: Peers) -> None:
        self._balancing = balancing
        self._telemetry = telemetry
        self._peers = peers
        self._replaying = asyncio.Lock()  # one replay at a time: it is seconds of a core

    def router(self) -> APIRouter:
        """To be included in the admin application."""
        router = APIRouter(prefix="/admin/v1")

        @router.get("/decisions", tags=["decisions"], responses=answers(list[Decision]))
        async def decisions(
            limit: Annotated[int, Query(ge=1, le=200, description="at most so many, the newest first")] = 20,
            model: Annotated[str | None, Query(max_length=512)] = None,
            served_by: Annotated[str | None, Query(max_length=200, description="beginning of region/cluster/…")] = None,
            slow: Annotated[bool, Query(description="only what missed its service level")] = False,
            failed: Annotated[bool, Query(description="only what did not end well")] = False,
        ) -> Response:
            """Decision records of the latest requests of this process, newest first."""
            return json(self._latest(limit, model, served_by, slow=slow, failed=failed))

        @router.get(
            "/decisions/{trace_id}",
            tags=["decisions"],
            responses=answers(list[Decision], missing="no tier that was asked remembers it"),
        )
        async def decision(trace_id: TraceId, everywhere: Everywhere = False) -> Response:
            """The decision records of one trace: what was decided, why, and what came of it."""
            found = self.of(trace_id)
            if everywhere:
                for content in await self._peers.get(f"/admin/v1/decisions/{trace_id}"):
                    found += decoded(content, list[Decision]) or []
            if not found:
                raise HTTPException(404, "no tier that was asked remembers this request")
            return json(found)

        @router.post("/route/dry-run", tags=["decisions"], responses=answers(DryRun))
        async def dry_run_of(question: Question) -> Response:
            """Where such a request would go now, and why. Nothing is sent, reserved or counted."""
            return json(await self._dry_run(question))

        @router.get("/counterfactual", tags=["decisions"], responses=answers(list[Counterfactual]))
        async def what_others_would_have_done(
            requests: Annotated[int, Query(ge=1, le=MOST_REQUESTS, description="of each cluster, the latest")] = 300,
            policy: Annotated[list[PolicyName] | None, Query(description="policies to compare; none: all")] = None,
            node: Annotated[str, Query(max_length=200, description="region/cluster; none: all decided here")] = "",
            everywhere: Everywhere = False,
        ) -> Response:
            """What each policy would have done with the latest requests, in predicted seconds; a value a cluster."""
            names = tuple(dict.fromkeys(policy or POLICIES))
            found = await self._replayed(requests, names, _path(node))
            if everywhere:
                asked: dict[str, Any] = {"requests": requests, "policy": names, "node": node}
                for content in await self._peers.get("/admin/v1/counterfactual", asked):
                    found += decoded(content, list[Counterfactual]) or []
            return json(found)

        return router

    def of(self, trace_id: str) -> list[Decision]:
        """The decision records of one trace that this process keeps."""
        balancers = self._balancing.balancers
        return [decision_of(record, balancers) for record in self._telemetry.recent.find(trace_id)]

    def _latest(
        self, limit: int, model: str | None, served_by: str | None, *, slow: bool, failed: bool
    ) -> list[Decision]:
        found: list[Decision] = []
        for record in self._telemetry.recent.latest(len(self._telemetry.recent)):
            if model is not None and record.model != model:
                continue
            if served_by is not None and not record.served_by.startswith(served_by):
                continue
            if (slow and not self._telemetry.slow(record)) or (failed and record.went_well):
                continue
            found.append(decision_of(record, self._balancing.balancers))
            if len(found) >= limit:
                break
        return found

    async def _dry_run(self, question: Question) -> DryRun:
        balancing = self._balancing
        answer, peer = dry_run(
            question.request(),
            _path(question.node),
            balancing.balancers,
            balancing.serves,
            balancing.peers_of,
            clock.now(),
        )
        if peer is None:
            return answer
        below = None
        if peer.admin:
            asked = question.model_dump() | {"node": answer.target}
            below = decoded(await self._peers.post(peer.admin, "/admin/v1/route/dry-run", asked), DryRun)
        if below is None:  # it does not say: as seen from here
            below = dry_run(
                question.request(),
                _path(answer.target),
                balancing.balancers,
                lambda path: True,
                lambda path, endpoint: (),
                clock.now(),
            )[0]
        answer.stages += below.stages
        answer.target, answer.handed_to, answer.shed = below.target or answer.target, below.handed_to, below.shed
        return answer

    async def _replayed(self, requests: int, policies: tuple[str, ...], only: Path) -> list[Counterfactual]:
        found = []
        async with self._replaying:
            for node, balancer in sorted(self._balancing.balancers.items()):
                if len(node) != 2 or (only and node != only):
                    continue
                cases = cases_of(reversed(self._telemetry.recent.latest(len(self._telemetry.recent))), node)[-requests:]
                if not cases:
                    continue
                weights = {term: weight for term, weight, _ in balancer.policy.scorers}
                found.append(await _in_slices(counterfactual(balancer, cases, policies, weights.get("price_usd", 0.0))))
        return found


async def _in_slices(steps: Iterator[Counterfactual | None]) -> Counterfactual:
    """Run a replay to its end, letting requests through between its steps."""
    for answer in steps:
        if answer is not None:
            return answer
        await asyncio.sleep(0)
    raise AssertionError("a replay ends with an answer")


def _path(node: str) -> Path:
    return tuple(node.split("/")) if node else ()
