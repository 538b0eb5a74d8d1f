"""Settings of an instance tier: those that every tier has, its region and its cluster."""

from __future__ import annotations

from common.config import Name, TierConfig
from common.scaling.config import Scaling
from common.types import Path
from services.instance_lb.picker.config import Picker


class InstanceConfig(TierConfig):
    """See `common.config.TierConfig`."""

    region: Name
    """The region its cluster is in."""
    cluster: Name
    """The cluster it balances."""
    picker: Picker = Picker()
    scaling: Scaling = Scaling()

    @property
    def node(self) -> Path:
        """Its cluster."""
        return (self.region, self.cluster)
