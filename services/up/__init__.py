"""All three tiers in one process: `headwater up`."""
