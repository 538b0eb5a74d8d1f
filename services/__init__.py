"""The processes: three tiers, the agent beside the servers, the simulated server, and what composes them."""
