"""Messages of the protocol, made and read: header fields, and what a gateway is told to do.

Sources: envoy/service/ext_proc/v3/external_processor.proto; the Gateway API Inference Extension's endpoint picker
protocol (proposal 004), which names the header and the metadata.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from google.protobuf.struct_pb2 import Struct

from common.relay.heads import Headers
from services.instance_lb.picker.proto.core_pb2 import HeaderMap, HeaderValue, HeaderValueOption, Metadata
from services.instance_lb.picker.proto.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from services.instance_lb.picker.proto.http_status_pb2 import HttpStatus

DESTINATION: Final = "x-gateway-destination-endpoint"
NAMESPACE: Final = "envoy.lb"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
ATTRIBUTES: Final = "envoy.filters.http.ext_proc"
CODE_DETAILS: Final = "response.code_details"
FROM_SERVER: Final = "via_upstream"  # and not the gateway's own, for want of an answer
PIECE_BYTES: Final = 62_000  # of a body, a message: well under what HTTP/2 takes in one frame by default, four of them


def read(sent: HeaderMap) -> tuple[dict[str, bytes], Headers]:
    """Pseudo-headers by their names without the colon, and the fields; names in lower case."""
    pseudo: dict[str, bytes] = {}
    fields: Headers = []
    for header in sent.headers:
        value = header.raw_value or header.value.encode()
        if header.key.startswith(":"):
            pseudo[header.key[1:]] = value
        else:
            fields.append((header.key.lower().encode(), value))
    return pseudo, fields


def subset(metadata: Metadata) -> frozenset[str] | None:
    """The addresses a gateway wants one of; None: any."""
    hint = metadata.filter_metadata.get(SUBSET_NAMESPACE)
    if hint is None or SUBSET not in hint.fields:
        return None
    value = hint.fields[SUBSET]
    listed = [v.string_value for v in value.list_value.values] or value.string_value.split(",")
    return frozenset(address.strip() for address in listed if address.strip())


def details(message: ProcessingRequest) -> str:
    """How an answer came to be, as far as the gateway says (`response_attributes: [response.code_details]`)."""
    told = message.attributes.get(ATTRIBUTES)
    return str(told.fields[CODE_DETAILS].string_value) if told is not None and CODE_DETAILS in told.fields else ""


def changes(added: Headers, removed: Iterable[str] = ()) -> HeaderMutation:
    """Fields that replace what there is of their names, and fields that go."""
    options = [
        HeaderValueOption(
            header=HeaderValue(key=key.decode("latin-1"), raw_value=value),
            append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for key, value in added
    ]
    return HeaderMutation(set_headers=options, remove_headers=sorted(removed))


def destination(address: str) -> Struct:
    """The dynamic metadata that names a server."""
    metadata = Struct()
    metadata.update({NAMESPACE: {DESTINATION: address}})
    return metadata


def pieces(body: bytes, *, ends: bool) -> list[StreamedBodyResponse]:
    """A body as a gateway takes it in its full-duplex mode; `ends`: no trailers come after it."""
    cut = [body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)] or [b""]
    return [StreamedBodyResponse(body=piece, end_of_stream=ends and at == len(cut) - 1) for at, piece in enumerate(cut)]


def streamed(piece: StreamedBodyResponse) -> BodyResponse:
    """One piece of a body, in the full-duplex mode."""
    return BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=piece)))


def immediate(status: int, headers: Headers, body: bytes, details: str) -> ProcessingResponse:
    """An answer that the gateway gives itself, instead of asking any server."""
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=status),  # type: ignore[arg-type]  # an open enumeration: any number will do
            headers=changes(headers),
            body=body,
            details=details,
        )
    )


GO_ON: Final = CommonResponse()
REQUEST_HEADERS: Final = ProcessingResponse(request_headers=HeadersResponse(response=GO_ON))
REQUEST_TRAILERS: Final = ProcessingResponse(request_trailers=TrailersResponse())
RESPONSE_BODY: Final = ProcessingResponse(response_body=BodyResponse(response=GO_ON))
RESPONSE_TRAILERS: Final = ProcessingResponse(response_trailers=TrailersResponse())
