"""Settings of a regional tier: those that every tier has, and its region."""

from __future__ import annotations

from common.config import Name, TierConfig
from common.types import Path


class RegionConfig(TierConfig):
    """See `common.config.TierConfig`."""

    region: Name
    """The region it balances."""

    @property
    def node(self) -> Path:
        """Its region."""
        return (self.region,)
