"""Servers for the tests of tenants."""

from tests.servers import etcd, redis_server

__all__ = ["etcd", "redis_server"]
