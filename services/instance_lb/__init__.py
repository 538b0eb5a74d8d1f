"""The instance tier: picks one inference server of its cluster by predicted completion."""
