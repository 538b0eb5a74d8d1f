"""KEDA's external scaler: KEDA asks how many replicas a workload should have, and has Kubernetes make it so.

A trigger names `model` and `group` in its metadata. The metric is the number of replicas, with a target of one each.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import grpc.aio
import structlog

from common.errors import ConfigError
from common.scaling.proto.externalscaler_pb2 import (
    GetMetricSpecResponse,
    GetMetricsRequest,
    GetMetricsResponse,
    IsActiveResponse,
    MetricSpec,
    MetricValue,
    ScaledObjectRef,
)
from common.scaling.scaler import Scaler

log = structlog.get_logger()

SERVICE: Final = "externalscaler.ExternalScaler"
METRIC: Final = "headwater_desired_replicas"
MOST_CALLS: Final = 256  # at a time; a stream of KEDA's is one for each workload

Context = grpc.aio.ServicerContext[Any, Any]


class KedaScaler:
    """Answers for one scaler."""

    def __init__(self, scaler: Scaler) -> None:
        self.port = 0
        self._scaler = scaler
        self._server: grpc.aio.Server | None = None

    async def start(self, listen: str) -> None:
        """Listen on `host:port` (port 0: any free one). Raises ConfigError if that cannot be."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)], maximum_concurrent_rpcs=MOST_CALLS)
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        ref = ScaledObjectRef.FromString
        active = IsActiveResponse.SerializeToString
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "IsActive": unary(self._is_active, ref, active),
            "StreamIsActive": stream(self._stream_is_active, ref, active),
            "GetMetricSpec": unary(self._spec, ref, GetMetricSpecResponse.SerializeToString),
            "GetMetrics": unary(self._metrics, GetMetricsRequest.FromString, GetMetricsResponse.SerializeToString),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            self.port = server.add_insecure_port(listen)
        except RuntimeError as error:
            await server.stop(None)
            raise ConfigError(f"scaling.keda.listen: cannot listen on {listen}: {error}") from error
        await server.start()
        self._server = server
        log.info("scaling_for_keda", listen=listen, port=self.port)

    async def close(self, grace_s: float) -> None:
        """Take no more calls. KEDA's streams have no end of their own, so they are not waited for."""
        if self._server is not None:
            await self._server.stop(min(grace_s, 0.1))

    async def _desired(self, ref: ScaledObjectRef, context: Context) -> int:
        """Ends the call where there is nothing to say."""
        model, group = ref.scalerMetadata["model"], ref.scalerMetadata["group"]
        known = self._scaler.models.get(model)
        if known is None or (group and group not in known.config.groups):
            what = f"model {model[:200]!r}" if known is None else f"group {group[:200]!r} of {model[:200]!r}"
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no scaled {what}")
        if known is None or known.decision is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "nothing has been decided yet")
            raise AssertionError  # abort has raised
        return known.decision.desired[group] if group else known.decision.replicas

    async def _is_active(self, ref: ScaledObjectRef, context: Context) -> IsActiveResponse:
        return IsActiveResponse(result=await self._desired(ref, context) > 0)

    async def _stream_is_active(self, ref: ScaledObjectRef, context: Context) -> AsyncIterator[IsActiveResponse]:
        told: bool | None = None
        while True:
            decided = self._scaler.decided
            active = await self._desired(ref, context) > 0
            if active is not told:
                told = active
                yield IsActiveResponse(result=active)
            await decided.wait()

    async def _spec(self, ref: ScaledObjectRef, context: Context) -> GetMetricSpecResponse:
        await self._desired(ref, context)
        return GetMetricSpecResponse(metricSpecs=[MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)])

    async def _metrics(self, request: GetMetricsRequest, context: Context) -> GetMetricsResponse:
        desired = await self._desired(request.scaledObjectRef, context)
        value = MetricValue(metricName=request.metricName or METRIC, metricValue=desired, metricValueFloat=desired)
        return GetMetricsResponse(metricValues=[value])
