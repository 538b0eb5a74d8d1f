"""Credentials of the report streams, from PEM files."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files; "" where there is none.

    A server needs `cert` and `key`, and with `ca` accepts only clients whose certificate that signed. A client checks
    the server against `ca` (the system's authorities without one) and shows `cert` and `key` if it has them.
    """

    cert: str = ""
    key: str = ""
    ca: str = ""
    server_name: str = ""  # what a client expects in the server's certificate instead of the address it called

    def server_credentials(self) -> grpc.ServerCredentials:
        """What a server listens with. Raises ConfigError for a missing or unreadable file."""
        key, cert = _read(self.key), _read(self.cert)
        if not (key and cert):
            raise ConfigError("TLS: a server needs both a certificate and a key")
        return grpc.ssl_server_credentials([(key, cert)], _read(self.ca), require_client_auth=bool(self.ca))

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """What a client calls with; read anew at each connection, so renewed files count. Raises ConfigError."""
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))


def _read(path: str) -> bytes | None:
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"TLS: cannot read {path}: {error.strerror}") from error
