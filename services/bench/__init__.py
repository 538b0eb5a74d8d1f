"""`headwater bench`: replays traffic against a live URL, open loop, and says what its users would have felt."""
