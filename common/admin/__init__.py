"""The admin listener: what an operator, Prometheus and the console ask of a process.

`app` puts it together; `decisions` explains requests, `peers` asks the other tiers, `shapes` has what the OpenAPI
document says of answers.
"""

from common.admin.app import admin_app

__all__ = ["admin_app"]
