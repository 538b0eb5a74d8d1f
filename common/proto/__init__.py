"""The wire format of load reports: `load.proto` and what `make proto` generates from it.

Only `common.reporting` reads these modules; everything else deals in `common.types`.
"""
