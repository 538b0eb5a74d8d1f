"""A group of replicas that somebody makes more or fewer when told by a POST."""

from __future__ import annotations

from pathlib import Path as File

import httpx

from common.scaling.config import WebhookTarget
from common.scaling.telling import Telling
from common.types import Path


class Webhook:
    """One URL."""

    def __init__(self, config: WebhookTarget, cluster: Path, model: str, group: str) -> None:
        self.name = f"webhook of {model}, {group}"
        self._config = config
        self._body = {"model": model, "group": group, "node": "/".join(cluster)}

    async def tell(self, client: httpx.AsyncClient, replicas: int, reason: str, *, at_least: bool) -> None:
        """See Target."""
        headers = {"authorization": f"Bearer {self._token()}"} if self._config.token_file else {}
        body = {**self._body, "replicas": replicas, "reason": reason, "at_least": at_least}
        (await client.post(self._config.url, json=body, headers=headers)).raise_for_status()

    def _token(self) -> str:
        return File(self._config.token_file).read_text(encoding="utf-8").strip()


def webhook(config: WebhookTarget, cluster: Path, model: str, group: str) -> Telling:
    """The provider."""
    return Telling(
        Webhook(config, cluster, model, group),
        httpx.AsyncClient(timeout=config.timeout_s, trust_env=False),
        attempts=config.attempts,
        retry_s=config.retry_s,
        repeat_s=config.repeat_s,
    )
