"""How commands ask an admin listener: with its token, which never stands on a command line, and its authority."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

ADMIN_URL = "http://127.0.0.1:9080"
Admin = Annotated[
    str, typer.Option("--admin", metavar="URL", envvar="HEADWATER_ADMIN_URL", help="admin listener of any tier")
]

TOKEN = "HEADWATER_ADMIN_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_FILE = "HEADWATER_ADMIN_TOKEN_FILE"  # noqa: S105
CA_FILE = "HEADWATER_ADMIN_CA_FILE"  # of the authority that signed the listener's certificate; none: the system's


def request(method: str, url: str, *, timeout_s: float, **options: Any) -> httpx.Response:
    """An admin listener's answer. Raises httpx.HTTPError, httpx.InvalidURL, OSError, or UnicodeDecodeError."""
    if url.startswith("https:"):
        tls = ssl.create_default_context(cafile=os.environ.get(CA_FILE) or None)
    else:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which no certificate is read for
    headers = token_headers()
    return httpx.request(method, url, headers=headers, timeout=timeout_s, trust_env=False, verify=tls, **options)


def token_headers() -> dict[str, str]:
    """Headers that show the token in the environment, or in the file that it names; none without one.

    Raises OSError or UnicodeDecodeError for a file that cannot be read.
    """
    file = os.environ.get(TOKEN_FILE, "")
    token = Path(file).read_text(encoding="utf-8").strip() if file else os.environ.get(TOKEN, "")
    return {"authorization": f"Bearer {token}"} if token else {}
