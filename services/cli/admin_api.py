"""What commands that ask an admin listener share: its token, which never stands on a command line."""

from __future__ import annotations

import os
from pathlib import Path

TOKEN = "HEADWATER_ADMIN_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_FILE = "HEADWATER_ADMIN_TOKEN_FILE"  # noqa: S105


def token_headers() -> dict[str, str]:
    """Headers that show the token in the environment, or in the file that it names; none without one.

    Raises OSError or UnicodeDecodeError for a file that cannot be read.
    """
    file = os.environ.get(TOKEN_FILE, "")
    token = Path(file).read_text(encoding="utf-8").strip() if file else os.environ.get(TOKEN, "")
    return {"authorization": f"Bearer {token}"} if token else {}
