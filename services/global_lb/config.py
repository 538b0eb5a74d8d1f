"""Settings of the global tier: those that every tier has."""

from __future__ import annotations

from common.config import TierConfig
from common.types import Path


class GlobalConfig(TierConfig):
    """See `common.config.TierConfig`."""

    @property
    def node(self) -> Path:
        """The root of the tree."""
        return ()
