"""Servers for the tests of the stores."""

from tests.servers import etcd, redis_server

__all__ = ["etcd", "redis_server"]
