"""The admin listener: what an operator, Prometheus and the console ask of a process.

`app` puts it together; `decisions` explains requests, `picture` is the live state of everything, `console` the page in
the browser and what it asks for, `peers` asks the other tiers, `shapes` has what the OpenAPI document says of answers.
"""

from common.admin.app import admin_app

__all__ = ["admin_app"]
