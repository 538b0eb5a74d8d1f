"""Load reports between processes, over gRPC: child to whoever subscribes, one stream a pair.

`server.py` offers reports, `client.py` follows them, `wire.py` turns them into messages and back, `tls.py` says who may
talk to whom. A report is load, never membership: losing one changes no one's existence, and nothing here waits on a
store. Ages are kept by each side's own monotonic clock; clocks of two hosts are never compared.
"""

from common.reporting.client import ReportClient
from common.reporting.server import ReportServer
from common.reporting.tls import Tls
from common.reporting.wire import from_wire, to_wire

__all__ = ["ReportClient", "ReportServer", "Tls", "from_wire", "to_wire"]
