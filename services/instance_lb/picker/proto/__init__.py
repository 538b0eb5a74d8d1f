"""What is used of Envoy's API for external processing, and of gRPC's for health.

Names and numbers are those of the published protocols, so that any gateway understands them; what is not used here is
left out, and is skipped when it comes. `make proto` generates the modules.
"""
