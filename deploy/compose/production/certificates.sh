#!/bin/sh
# Makes what compose.yaml needs of secrets, beside itself in secrets/: an authority, a certificate for each service, and
# passwords, and the token of whoever operates it (admin.token). What is there already is kept, so that it can be run again for a service that is new. Needs openssl.
set -eu
umask 022 # containers read these as users of their own; secrets/ itself is closed to other users of this host
cd "$(dirname "$0")"
mkdir -p secrets && chmod 700 secrets && cd secrets

DAYS=825
SERVICES="etcd-1 etcd-2 etcd-3 redis-1 redis-2 sentinel-1 sentinel-2 sentinel-3
  global-1 global-2 region-1 region-2 instance-1 instance-2 agent prometheus grafana"
TIERS="global-1 global-2 region-1 region-2 instance-1 instance-2"

if [ ! -f ca-key.pem ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days $DAYS -subj "/CN=Headwater" \
    -addext "keyUsage=critical,keyCertSign,cRLSign" -keyout ca-key.pem -out ca.pem 2>/dev/null
  chmod 600 ca-key.pem
fi

for service in $SERVICES; do
  [ -f "$service/cert.pem" ] && continue
  mkdir -p "$service"
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$service" \
    -keyout "$service/key.pem" -out request.pem 2>/dev/null
  chmod 644 "$service/key.pem"
  printf 'subjectAltName=DNS:%s,DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n' "$service" >extensions
  openssl x509 -req -in request.pem -days $DAYS -CA ca.pem -CAkey ca-key.pem -CAcreateserial -extfile extensions \
    -out "$service/cert.pem" 2>/dev/null
  rm request.pem extensions
  cp ca.pem "$service/ca.pem"
done

if [ ! -f admin.token ]; then
  openssl rand -hex 24 >admin.token
  chmod 600 admin.token
fi
for tier in $TIERS; do
  [ -f "$tier/admin.token" ] && continue
  cp admin.token "$tier/admin.token"
  chmod 644 "$tier/admin.token"
done

if [ ! -f grafana.env ]; then
  echo "GF_SECURITY_ADMIN_PASSWORD=$(openssl rand -hex 12)" >grafana.env
  chmod 600 grafana.env
fi

if [ ! -f redis.env ]; then
  password=$(openssl rand -hex 24)
  sentinels=sentinel-1:26379,sentinel-2:26379,sentinel-3:26379
  tls='ssl_ca_certs=/tls/ca.pem&ssl_certfile=/tls/cert.pem&ssl_keyfile=/tls/key.pem'
  {
    echo "REDIS_PASSWORD=$password"
    echo "HEADWATER_REDIS__URL=rediss+sentinel://:$password@$sentinels/sessions?$tls&sentinel_password=$password"
  } >redis.env
  chmod 600 redis.env # read by compose, on this host
fi
