# Written by hand: protoc makes no types for the gRPC classes. It covers what common.reporting uses, grpc.aio only.
from collections.abc import Awaitable

import grpc.aio

from common.proto import load_pb2

class LoadReportingStub:
    Watch: grpc.aio.UnaryStreamMultiCallable[load_pb2.WatchRequest, load_pb2.LoadReport]
    Ping: grpc.aio.UnaryUnaryMultiCallable[load_pb2.PingRequest, load_pb2.PingReply]
    def __init__(self, channel: grpc.aio.Channel) -> None: ...

class LoadReportingServicer:
    def Watch(
        self,
        request: load_pb2.WatchRequest,
        context: grpc.aio.ServicerContext[load_pb2.WatchRequest, load_pb2.LoadReport],
    ) -> Awaitable[None]: ...
    def Ping(
        self,
        request: load_pb2.PingRequest,
        context: grpc.aio.ServicerContext[load_pb2.PingRequest, load_pb2.PingReply],
    ) -> Awaitable[load_pb2.PingReply]: ...

def add_LoadReportingServicer_to_server(servicer: LoadReportingServicer, server: grpc.aio.Server) -> None: ...
