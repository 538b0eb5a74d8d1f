"""Each case at one tier and through three."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[1, 3], ids=["one tier", "three tiers"])
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)
