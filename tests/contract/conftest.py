"""Servers for the contract suites."""

from tests.servers import etcd, redis_server

__all__ = ["etcd", "redis_server"]
