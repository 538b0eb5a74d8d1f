"""Where tiers meet: membership that must be right (etcd), affinity that must be fresh (Redis), and both in memory."""
