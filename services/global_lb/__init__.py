"""The global tier: picks a region by round trip, expected wait and price."""
