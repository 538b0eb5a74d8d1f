"""The agent beside the inference servers: registers them, samples their load and their GPUs, and reports it."""
