"""Settings of `headwater up`: those of a tier, and the servers it stands in front of."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from common.config import TierConfig
from common.scaling.config import Scaling
from services.agent.config import InstanceConfig, default_id


class UpConfig(TierConfig):
    """See `common.config.TierConfig`."""

    instances: tuple[InstanceConfig, ...] = ()
    """The servers; the keys of one are the agent's (below)."""
    scrape_interval_s: Annotated[float, Field(ge=0.2, le=60.0)] = 1.0
    """A server is looked at this often."""
    scrape_timeout_s: Annotated[float, Field(ge=0.05, le=60.0)] = 2.0
    """It must answer a look within this."""
    scaling: Scaling = Scaling()

    @model_validator(mode="after")
    def _instances(self) -> UpConfig:
        if not self.instances and not self._starts_some:
            raise ValueError("no instances: give --instance URL, or `instances:` in the configuration")
        if self.workers > 1 and self._starts_some:
            raise ValueError("scaling: servers are started by one process, so workers must be 1")
        if len(self.by_id) < len(self.instances):
            raise ValueError("instances: two of them have the same id or URL")
        return self

    @property
    def _starts_some(self) -> bool:
        return any(g.process.command for model in self.scaling.models.values() for g in model.groups.values())

    @property
    def by_id(self) -> dict[str, InstanceConfig]:
        """The servers by their names in the cluster."""
        return {i.id or default_id(i.url, "local"): i for i in self.instances}
