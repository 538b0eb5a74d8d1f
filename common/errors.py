"""The exceptions of Headwater, and what each one promises.

    LBError
    ├── RejectedError          never dispatched: safe to try elsewhere
    │   ├── Saturated          429  every endpoint is full
    │   ├── NoEndpoints        503  nothing that could serve this is alive
    │   ├── Loading            503  whoever could serve this has not loaded the model yet
    │   ├── Draining           503  this balancer is leaving
    │   └── DeadlineExceeded   504  it cannot be answered in time
    ├── UpstreamError          dispatched to an endpoint, which failed
    │   ├── ConnectFailed      502  no connection: the endpoint never saw the request
    │   ├── ResetBeforeByte    502  the connection ended before the first byte of an answer
    │   ├── FirstByteTimeout   504  no first byte in time
    │   └── StreamBroken       502  broke after the first byte: never tried again
    ├── BadRequest             400  the client's mistake
    │   ├── ModelNotFound      404  no endpoint serves this model
    │   └── Unowned            404  the server that held what the request builds on is gone; 409 while it may be back
    ├── AccessError            this caller may not, or not now; nothing was dispatched
    │   ├── Unauthenticated    401  no credential, or none that is good
    │   ├── Forbidden          403  a good one, for something else
    │   └── QuotaExceeded      429  enough for now
    ├── StoreError             fails no request
    │   ├── StoreUnavailable
    │   └── LeaseLost
    └── ConfigError            ends start-up

Foreign exceptions are mapped to these where they enter (`store/`, `relay/`); these are mapped to HTTP in one place
(`apis.error_body`). A bug is an assertion and crashes; it is none of these.
"""

from __future__ import annotations


class LBError(Exception):
    """Base of all errors raised here. `status` is the HTTP status a client would see, `code` a stable short name.

    `elsewhere`: another endpoint or tier may be tried for all that was done here.
    """

    status = 500
    code = "internal_error"
    elsewhere = False

    def __init__(self, message: str = "", *, retry_after_s: float | None = None) -> None:
        super().__init__(message or (self.__doc__ or self.code).split(".")[0])
        self.retry_after_s = retry_after_s


class RejectedError(LBError):
    """Refused before anything was dispatched, so another endpoint or tier may be tried."""

    status = 503
    code = "rejected"
    elsewhere = True


class Saturated(RejectedError):  # noqa: N818 - the tree names conditions
    """Every endpoint that could serve the request is full."""

    status = 429
    code = "saturated"


class NoEndpoints(RejectedError):  # noqa: N818
    """No endpoint that could serve the request is alive."""

    code = "no_endpoints"


class Loading(RejectedError):  # noqa: N818
    """The model is being loaded."""

    code = "loading"


class Draining(RejectedError):  # noqa: N818
    """This balancer is draining and takes no new work."""

    code = "draining"


class DeadlineExceeded(RejectedError):  # noqa: N818
    """The request cannot be answered before its deadline."""

    status = 504
    code = "deadline_exceeded"


class UpstreamError(LBError):
    """An endpoint failed while it had the request."""

    status = 502
    code = "upstream_error"


class ConnectFailed(UpstreamError):  # noqa: N818
    """No connection could be made, so the endpoint never saw the request."""

    code = "connect_failed"


class ResetBeforeByte(UpstreamError):  # noqa: N818
    """The connection ended before the first byte of an answer; whether the request was executed is unknown."""

    code = "upstream_reset"


class FirstByteTimeout(UpstreamError):  # noqa: N818
    """The endpoint did not begin to answer in time."""

    status = 504
    code = "first_byte_timeout"


class StreamBroken(UpstreamError):  # noqa: N818
    """The answer broke after its first byte."""

    code = "stream_broken"


class BadRequest(LBError):  # noqa: N818
    """The client's request cannot be understood. `param` names the field at fault, if one is."""

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, status: int | None = None, code: str = "") -> None:
        super().__init__(message)
        self.param = param
        self.status = status or self.status
        self.code = code or self.code


class ModelNotFound(BadRequest):
    """No endpoint, alive or not, serves the model."""

    status = 404
    code = "model_not_found"


class Unowned(BadRequest):
    """What the request builds on was held in the memory of one server, which is gone or cannot be reached."""

    def __init__(self, owner: str, *, gone: bool) -> None:
        if gone:
            super().__init__(f"it was held in memory by {owner}, which is gone", status=404, code="owner_gone")
        else:
            message = f"it is held in memory by {owner} alone, which takes no requests at present"
            super().__init__(message, status=409, code="owner_unavailable")
            self.retry_after_s = 1.0


class AccessError(LBError):
    """The caller may not do this. `headers` go with the answer."""

    status = 403
    code = "forbidden"

    def __init__(
        self,
        message: str = "",
        *,
        code: str = "",
        retry_after_s: float | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.code = code or self.code
        self.headers = headers


class Unauthenticated(AccessError):  # noqa: N818
    """The request has no credential, or none that is known here."""

    status = 401
    code = "invalid_api_key"


class Forbidden(AccessError):  # noqa: N818
    """The credential is good, and does not allow this."""


class QuotaExceeded(AccessError):  # noqa: N818
    """A limit of the caller is used up for now."""

    status = 429
    code = "rate_limit_exceeded"


class StoreError(LBError):
    """A store did not do what was asked. Never fails a request."""

    code = "store_error"


class StoreUnavailable(StoreError):  # noqa: N818
    """The store did not answer in time, or at all."""


class LeaseLost(StoreError):  # noqa: N818
    """The lease, and with it every key under it, is gone."""


class ConfigError(LBError):
    """The configuration is wrong; the message names the file, the line and the key."""

    code = "config_error"
