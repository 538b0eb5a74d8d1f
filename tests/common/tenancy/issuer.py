"""An OpenID Connect provider on a loopback port: its documents, its keys, its tokens."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any, Self

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

AUDIENCE = "headwater"


def rsa_key(bits: int = 2048) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, bits)


@dataclass
class Settings:
    """As `tenants.oidc` has one."""

    issuer: str
    audience: tuple[str, ...] = (AUDIENCE,)
    jwks_url: str = ""
    algorithms: tuple[str, ...] = ("RS256", "ES256", "EdDSA")
    tenant_claim: str = "tenant"
    tenant: str = ""
    leeway_s: float = 0.0
    refresh_s: float = 300.0
    ca_file: str = ""


class Provider:
    """Serves what it is given; `keys` are private keys by their ids."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {"one": ec.generate_private_key(ec.SECP256R1())}
        self.status = 200
        self.extra: list[dict[str, Any]] = []
        self.padding = 0
        self.asked = 0
        self.claimed_issuer = ""
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    def jwks(self) -> dict[str, Any]:
        kinds = {
            rsa.RSAPrivateKey: jwt.algorithms.RSAAlgorithm,
            ec.EllipticCurvePrivateKey: jwt.algorithms.ECAlgorithm,
            ed25519.Ed25519PrivateKey: jwt.algorithms.OKPAlgorithm,
        }
        keys = list(self.extra)
        for id_, key in self.keys.items():
            kind = next(algorithm for base, algorithm in kinds.items() if isinstance(key, base))
            keys.append({**kind.to_jwk(key.public_key(), as_dict=True), "kid": id_, "use": "sig"})
        return {"keys": keys, "padding": "x" * self.padding}

    def token(self, key_id: str = "one", algorithm: str = "ES256", *, key: Any = None, **claims: Any) -> str:
        now = time.time()
        values = {"iss": self.url, "aud": AUDIENCE, "sub": "someone@example.com", "exp": now + 600, "tenant": "acme"}
        values = {name: value for name, value in (values | claims).items() if value is not None}
        return jwt.encode(values, key or self.keys[key_id], algorithm=algorithm, headers={"kid": key_id})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        page: dict[str, Any] = self.jwks()
        if b"openid-configuration" in head:
            page = {"issuer": self.claimed_issuer or self.url, "jwks_uri": f"{self.url}/keys"}
        body = json.dumps(page).encode()
        location = b"location: /elsewhere\r\n" if self.status == 302 else b""
        head = b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n" % (
            self.status,
            len(body),
            location,
        )
        writer.write(head + body)
        writer.close()
