"""Settings of the endpoint picker."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from common.config import Count, HostPort, Section


class Picker(Section):
    """Picks servers for gateways that carry the bytes themselves (Envoy's ext_proc); see docs/gateway.md."""

    listen: HostPort | None = None
    """Where gateways ask, as in 0.0.0.0:9002; none: they do not."""
    cert_file: str = ""
    """Certificate chain shown to gateways (PEM), read when the process starts; none: without TLS."""
    key_file: str = ""
    """Its key."""
    ca_file: str = ""
    """Authority whose certificate a gateway has to show; none: any gateway may ask."""
    max_streams: Count = 10_000
    """Requests at once, of all gateways together; more are refused."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if bool(self.cert_file) != bool(self.key_file) or (self.ca_file and not self.cert_file):
            raise ValueError("cert_file and key_file go together, and ca_file with them")
        return self
