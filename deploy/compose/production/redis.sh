#!/bin/sh
# Runs one member of the Redis that compose.yaml describes: `redis.sh server NAME` or `redis.sh sentinel NAME`.
# A server that comes back asks the sentinels who is the master by now, instead of taking itself for it.
set -eu
kind=$1 name=$2 master=redis-1
export REDISCLI_AUTH="$REDIS_PASSWORD"

tls() { # PORT
  printf 'port 0\ntls-port %s\ntls-ca-cert-file /tls/ca.pem\ntls-cert-file /tls/cert.pem\ntls-key-file /tls/key.pem\n' "$1"
  printf 'tls-replication yes\nrequirepass %s\n' "$REDIS_PASSWORD"
}

known_master() {
  for sentinel in sentinel-1 sentinel-2 sentinel-3; do
    found=$(timeout 2 redis-cli -h "$sentinel" -p 26379 --tls --cacert /tls/ca.pem --cert /tls/cert.pem \
      --key /tls/key.pem sentinel get-master-addr-by-name sessions 2>/dev/null | head -n 1) || continue
    case $found in redis-*) echo "$found" && return ;; esac
  done
  echo redis-1
}

if [ "$kind" = server ]; then
  master=$(known_master)
  {
    tls 6379
    printf 'masterauth %s\nreplica-announce-ip %s\nreplica-announce-port 6379\nsave ""\nappendonly no\n' \
      "$REDIS_PASSWORD" "$name"
    printf 'dir /data\nmaxmemory 256mb\nmaxmemory-policy allkeys-lru\n'
    [ "$master" = "$name" ] || printf 'replicaof %s 6379\n' "$master"
  } >/data/redis.conf
  exec redis-server /data/redis.conf
fi
{
  tls 26379
  printf 'dir /data\nsentinel resolve-hostnames yes\nsentinel announce-hostnames yes\nsentinel announce-ip %s\n' "$name"
  printf 'sentinel monitor sessions redis-1 6379 2\nsentinel auth-pass sessions %s\n' "$REDIS_PASSWORD"
  printf 'sentinel sentinel-pass %s\nsentinel down-after-milliseconds sessions 5000\n' "$REDIS_PASSWORD"
  printf 'sentinel failover-timeout sessions 20000\n'
} >/data/sentinel.conf
exec redis-server /data/sentinel.conf --sentinel
