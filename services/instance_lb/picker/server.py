"""Listens for gateways: Envoy's ext_proc, and gRPC's health checks. One stream is one request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
import structlog

from common.errors import ConfigError
from common.relay.exchange import ClientLimits, Exchange
from common.reporting import Tls
from common.types import Path
from services.instance_lb.picker.addresses import Addresses
from services.instance_lb.picker.config import Picker
from services.instance_lb.picker.proto.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from services.instance_lb.picker.proto.health_pb2 import HealthCheckRequest, HealthCheckResponse
from services.instance_lb.picker.stream import Stream

log = structlog.get_logger()

EXT_PROC: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH: Final = "grpc.health.v1.Health"
LIVENESS: Final = "liveness"
SERVICES: Final = ("", LIVENESS, "readiness", EXT_PROC)
OVERHEAD_BYTES: Final = 1 << 20  # of a message, beside the body in it

Context = grpc.aio.ServicerContext[Any, Any]


class PickerServer:
    """The endpoint picker of one process."""

    def __init__(
        self,
        config: Picker,
        limits: ClientLimits,
        node: Path,
        serve: Callable[[Exchange], Awaitable[None]],
        instances: Callable[[], list[tuple[Path, str]]],
        ready: Callable[[], bool],
    ) -> None:
        self.port = 0
        self.open = 0  # streams
        self._config = config
        self._limits = limits
        self._node = node
        self._serve = serve
        self._instances = instances
        self._ready = ready
        self._addresses = Addresses()
        self._server: grpc.aio.Server | None = None

    async def start(self, listen: str) -> None:
        """Listen on `host:port` (port 0: any free one). Raises ConfigError if that cannot be."""
        config = self._config
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # a taken port is an error and not a second listener that gets half the calls
                ("grpc.max_receive_message_length", self._limits.max_body_bytes + OVERHEAD_BYTES),
                ("grpc.max_send_message_length", self._limits.max_body_bytes + OVERHEAD_BYTES),
            ],
            maximum_concurrent_rpcs=config.max_streams,
        )
        process = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=ProcessingRequest.FromString,
            response_serializer=ProcessingResponse.SerializeToString,
        )
        check = grpc.unary_unary_rpc_method_handler(
            self._check,
            request_deserializer=HealthCheckRequest.FromString,
            response_serializer=HealthCheckResponse.SerializeToString,
        )
        handlers = (
            grpc.method_handlers_generic_handler(EXT_PROC, {"Process": process}),
            grpc.method_handlers_generic_handler(HEALTH, {"Check": check}),
        )
        server.add_generic_rpc_handlers(handlers)
        try:
            if config.cert_file:
                tls = Tls(config.cert_file, config.key_file, config.ca_file)
                self.port = server.add_secure_port(listen, tls.server_credentials())
            else:
                self.port = server.add_insecure_port(listen)
        except RuntimeError as error:
            await server.stop(None)
            raise ConfigError(f"picker.listen: cannot listen on {listen}: {error}") from error
        await server.start()
        self._server = server
        log.info("picking_for_gateways", listen=listen, port=self.port)

    async def close(self, grace_s: float) -> None:
        """Take no more requests, and wait at most so long for the answers under way."""
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _process(self, _: object, context: Context) -> None:
        stream = Stream(
            self._serve, self._node, self._instances, self._addresses, self._limits, context.write, context.peer()
        )
        self.open += 1
        try:
            while not stream.over:
                message = await context.read()
                if message is grpc.aio.EOF or message.observability_mode:  # which takes no answers
                    break
                await stream.on(message)
        except grpc.aio.InternalError:
            pass  # the gateway left while it was being told; what was under way is given up below
        finally:
            self.open -= 1
            await stream.end()

    async def _check(self, request: HealthCheckRequest, _: Context) -> HealthCheckResponse:
        if request.service not in SERVICES:
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        serving = request.service == LIVENESS or self._ready()
        status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse(status=status)
