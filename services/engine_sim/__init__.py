"""A simulated inference server: vLLM's HTTP API and metrics in front of the engine model, in real time."""
