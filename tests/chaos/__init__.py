"""Chaos: mixed traffic through the whole system while a seeded schedule breaks it. `python -m tests.chaos --help`."""
