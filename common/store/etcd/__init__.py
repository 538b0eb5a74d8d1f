"""Membership in etcd: what must be right, over gRPC, with a bound on every wait.

`client` calls whichever member answers, `lease` presents keys and keeps them presented, `watch` follows a prefix.

`aetcd` brings etcd's messages and stubs, which are all that is used of it. Its client would hide what has to be seen
here: it waits for ever unless told otherwise, knows one address and no TLS, never authenticates again, loses errors of
a watch that is being created, and its leases do not renew themselves.
"""

from common.store.etcd.client import EtcdTls
from common.store.etcd.lease import EtcdLease
from common.store.etcd.store import EtcdMembershipStore

__all__ = ["EtcdLease", "EtcdMembershipStore", "EtcdTls"]
