"""What all tests share: property tests have no deadline, for on a busy machine time says nothing of the code."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("headwater", deadline=None)
settings.load_profile("headwater")
