"""As KEDA asks: a gRPC client over a real socket, with the messages of the public proto."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from common.errors import ConfigError
from common.scaling.keda import METRIC, SERVICE, KedaScaler
from common.scaling.proto import externalscaler_pb2 as pb
from common.scaling.scaler import Scaler
from tests.common.scaling.build import MODEL, config, request, scaler


@asynccontextmanager
async def asked(one: Scaler) -> AsyncIterator[grpc.aio.Channel]:
    keda = KedaScaler(one)
    await keda.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{keda.port}") as channel:
        yield channel
    await keda.close(0.0)


def call(channel: grpc.aio.Channel, method: str, answer: Any) -> Any:
    return channel.unary_unary(
        f"/{SERVICE}/{method}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=answer.FromString,
    )


def ref(model: str = MODEL, **more: str) -> pb.ScaledObjectRef:
    return pb.ScaledObjectRef(name="llama", namespace="llm", scalerMetadata={"model": model, **more})


def wanting(count: int) -> Scaler:
    one = scaler(scaling=config(groups={"l4": {"min_replicas": count}}))
    one.decide({})
    return one


async def test_the_metric_is_the_number_of_replicas_with_one_a_replica() -> None:
    async with asked(wanting(3)) as channel:
        assert (await call(channel, "IsActive", pb.IsActiveResponse)(ref())).result
        spec = await call(channel, "GetMetricSpec", pb.GetMetricSpecResponse)(ref(group="l4"))
        assert [(m.metricName, m.targetSize) for m in spec.metricSpecs] == [(METRIC, 1)]
        told = await call(channel, "GetMetrics", pb.GetMetricsResponse)(
            pb.GetMetricsRequest(scaledObjectRef=ref(group="l4"), metricName=METRIC)
        )
        assert [(m.metricName, m.metricValue, m.metricValueFloat) for m in told.metricValues] == [(METRIC, 3, 3.0)]


async def test_a_model_that_nobody_asks_for_is_inactive_until_somebody_does() -> None:
    one = scaler()
    one.decide({})
    async with asked(one) as channel:
        assert not (await call(channel, "IsActive", pb.IsActiveResponse)(ref())).result
        stream = channel.unary_stream(
            f"/{SERVICE}/StreamIsActive",
            request_serializer=pb.ScaledObjectRef.SerializeToString,
            response_deserializer=pb.IsActiveResponse.FromString,
        )(ref())
        async with asyncio.timeout(20.0):
            assert not (await stream.read()).result
            one.arrived(request(1))
            one.decide({})
            assert (await stream.read()).result
        stream.cancel()


@pytest.mark.parametrize("what", [ref("another"), ref(group="t4"), pb.ScaledObjectRef(name="no-metadata")])
async def test_what_is_not_scaled_is_said_so(what: pb.ScaledObjectRef) -> None:
    async with asked(wanting(1)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(channel, "IsActive", pb.IsActiveResponse)(what)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_before_the_first_decision_keda_keeps_what_there_is() -> None:
    async with asked(scaler()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(channel, "IsActive", pb.IsActiveResponse)(ref())
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_port_that_is_taken_ends_the_start() -> None:
    keda = KedaScaler(scaler())
    await keda.start("127.0.0.1:0")
    with pytest.raises(ConfigError, match="cannot listen"):
        await KedaScaler(scaler()).start(f"127.0.0.1:{keda.port}")
    await keda.close(0.0)
