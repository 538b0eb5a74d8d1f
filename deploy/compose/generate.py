"""Writes compose.yaml from the demo's layout: `make compose`. A test fails while the two differ.

What every process has in common stands once, in the head below, as YAML anchors; the rest is one short block a process.
"""

from __future__ import annotations

from pathlib import Path

from services.demo.layout import (
    KILLED_INSTANCE,
    MODEL,
    PRICE_USD_PER_HOUR,
    REGIONS,
    RTT_S,
    SPEED,
    Cluster,
    Region,
    instance_name,
)

FILE = Path(__file__).with_name("compose.yaml")
FIRST_PORT = 8001  # of the simulated servers in one container

HEAD = """\
# The demo with official images: three regions, six clusters, eighteen simulated servers, and traffic.
# From the root of the repository:  docker compose -f deploy/compose/compose.yaml up --build
# docs/compose.md says what to look at and how to see one tier stand in for another.
# Written by `make compose` from services/demo/layout.py: change it there, or in deploy/compose/generate.py.

name: headwater

x-process: &process # what all processes of ours have in common
  image: headwater:local
  pull_policy: never # it is built here, by the service that has `build`
  read_only: true
  cap_drop: [ALL]
  security_opt: ["no-new-privileges:true"]
  restart: unless-stopped
  stop_grace_period: 35s # more than the 30 s that a tier gives to requests under way (drain.grace_s)
  logging: &logging
    driver: json-file
    options: {max-size: 10m, max-file: "2"}
  healthcheck: &health # each look costs some 0.1 s of a core, and there are two dozen containers
    test: [CMD, healthcheck]
    interval: 10s
    timeout: 10s
    retries: 5
    start_period: 60s

x-tier: &tier # a balancer; data on 8080, admin on 9080 and load reports on 9090, within this network alone
  <<: *process
  depends_on: &stores
    etcd: {condition: service_healthy}
    redis: {condition: service_healthy}

x-tier-environment: &tier-environment
  HEADWATER_LISTEN: 0.0.0.0:8080
  HEADWATER_ADMIN: 0.0.0.0:9080
  HEADWATER_AUTH__ADMIN_OPEN: "true" # nobody but this network and this machine reaches it; else auth.admin_tokens
  HEADWATER_REPORTS__LISTEN: 0.0.0.0:9090
  HEADWATER_ETCD__URLS: '["http://etcd:2379"]'
  HEADWATER_REDIS__URL: redis://redis:6379/0
  HEADWATER_TRACING__OTLP_ENDPOINT: ${OTLP_ENDPOINT:-} # http://jaeger:4318, with the profile below

x-agent-environment: &agent-environment
  HEADWATER_LISTEN: 0.0.0.0:9090
  HEADWATER_ETCD__URLS: '["http://etcd:2379"]'
  HEADWATER_SCRAPE_INTERVAL_S: "0.5"

services:
  # -- stores: etcd has who exists, Redis which session is served where ------------------------------------------------

  etcd:
    image: quay.io/coreos/etcd:v3.5.16
    command:
      - /usr/local/bin/etcd
      - --data-dir=/etcd-data
      - --listen-client-urls=http://0.0.0.0:2379
      - --advertise-client-urls=http://etcd:2379
      - --log-level=warn
    volumes: ["etcd:/etcd-data"]
    restart: unless-stopped
    logging: *logging
    healthcheck: # by its own client, since the image has no shell
      test: [CMD, /usr/local/bin/etcdctl, endpoint, health]
      interval: 3s
      timeout: 10s
      retries: 5
      start_period: 60s

  redis:
    image: redis:8
    command: [redis-server, --save, "", --appendonly, "no", --protected-mode, "no"]
    tmpfs: [/data] # instead of the volume that the image would make; sessions need not outlive it
    restart: unless-stopped
    logging: *logging
    healthcheck:
      test: [CMD, redis-cli, ping]
      interval: 3s
      timeout: 10s
      retries: 5
      start_period: 60s
"""


def text() -> str:
    """The whole file."""
    parts = [HEAD, _title("clients"), _traffic()]
    parts += [_title("global tier: picks a region; one balancer in each, as clients have one near")]
    parts += [_global(region, published=region is REGIONS[0]) for region in REGIONS]
    for region in REGIONS:
        parts += [_title(f"{region.name}: its balancer picks a cluster"), _region(region)]
        for cluster in region.clusters:
            parts += [_title(f"{cluster.name}: its balancer picks a server, its agent registers and watches them")]
            parts += [_instance(region, cluster), _agent(region, cluster)]
        parts += [_title(f"{region.name}: simulated servers, as one process"), _engines(region)]
        parts += [_one_engine(region)] if region.name == KILLED_INSTANCE[0] else []
    parts += [_title("with --profile observability: metrics, dashboards, traces"), _observability()]
    return "\n".join([*parts, "configs:\n" + _scrape(), "volumes:\n  etcd:\n"])


def _title(title: str) -> str:
    return f"  # -- {title} {'-' * (112 - len(title))}\n"


# -- tiers -------------------------------------------------------------------------------------------------------------


def _global(region: Region, published: bool) -> str:
    ports = """
    ports: # on loopback only
      - "127.0.0.1:${HTTP_PORT:-8080}:8080"
      - "127.0.0.1:${ADMIN_PORT:-9080}:9080"
"""
    return _tier("global", f"global-{region.name}", region, {}).rstrip("\n") + (ports if published else "\n")


def _region(region: Region) -> str:
    return _tier("region", f"region-{region.name}", region, {"REGION": region.name})


def _instance(region: Region, cluster: Cluster) -> str:
    return _tier("instance", f"instance-{cluster.name}", region, {"REGION": region.name, "CLUSTER": cluster.name})


def _tier(command: str, name: str, home: Region, node: dict[str, str]) -> str:
    away = ", ".join(f"{other}: {rtt_s:g}" for other, rtt_s in RTT_S[home.name].items() if other != home.name)
    lines = "".join(f"      HEADWATER_{key}: {value}\n" for key, value in node.items())
    return f"""\
  {name}:
    <<: *tier
    command: [{command}]
    environment:
      <<: *tier-environment
      HEADWATER_ID: {name}
      HEADWATER_ADVERTISE: {name}
{lines}      HEADWATER_NETWORK__EMULATED_RTT_S: "{{{away}}}"
"""


# -- agents and servers ------------------------------------------------------------------------------------------------


def _agent(region: Region, cluster: Cluster) -> str:
    name = f"agent-{cluster.name}"
    servers = "".join(
        f"        - {{id: {instance_name(cluster, i)}, url: '{_url(region, cluster, i)}', gpu: {gpu},"
        f" price_usd_per_hour: {PRICE_USD_PER_HOUR[gpu] * region.price_factor:.4g}}}\n"
        for i, gpu in enumerate(cluster.gpus)
    )
    return f"""\
  {name}:
    <<: *process
    command: [agent]
    depends_on: # and not on the servers: it registers each when it answers
      etcd: {{condition: service_healthy}}
    healthcheck: {{<<: *health, test: [CMD, healthcheck, "tcp://127.0.0.1:9090"]}}
    environment:
      <<: *agent-environment
      HEADWATER_ID: {name}
      HEADWATER_ADVERTISE: {name}
      HEADWATER_REGION: {region.name}
      HEADWATER_CLUSTER: {cluster.name}
      HEADWATER_INSTANCES: |
{servers}"""


def _places(region: Region) -> dict[str, tuple[str, int]]:
    """Where each server of a region listens: its container and port. The one to be killed has its own container."""
    places, port = {}, FIRST_PORT
    for cluster in region.clusters:
        for index in range(len(cluster.gpus)):
            name = instance_name(cluster, index)
            if name == KILLED_INSTANCE[2]:
                places[name] = (f"engine-{name}", FIRST_PORT)
            else:
                places[name] = (f"engines-{region.name}", port)
                port += 1
    return places


def _url(region: Region, cluster: Cluster, index: int) -> str:
    host, port = _places(region)[instance_name(cluster, index)]
    return f"http://{host}:{port}"


def _engines(region: Region) -> str:
    return _engine_service(region, f"engines-{region.name}")


def _one_engine(region: Region) -> str:
    return (
        _title("and one by itself, so that it can be killed")
        + "\n"
        + _engine_service(region, f"engine-{KILLED_INSTANCE[2]}")
    )


def _engine_service(region: Region, container: str) -> str:
    servers = {name: port for name, (host, port) in _places(region).items() if host == container}
    arguments = "".join(f"      - --engine={name.rsplit('-', 1)[1]}:{port}:{name}\n" for name, port in servers.items())
    last = max(servers.values())  # they answer when all of them listen
    return f"""\
  {container}:
    <<: *process
    command:
      - engine
      - --host=0.0.0.0
      - --model={MODEL}
      - --speed={SPEED:g}
{arguments}    healthcheck: {{<<: *health, test: [CMD, healthcheck, "http://127.0.0.1:{last}/health"]}}
"""


# -- clients -----------------------------------------------------------------------------------------------------------


def _traffic() -> str:
    tiers = _tiers()
    agents = [f"agent-{c.name}" for r in REGIONS for c in r.clusters]
    targets = "".join(f"      - --target=http://global-{region.name}:8080\n" for region in REGIONS)
    admins = "".join(f"      - --admin=http://{name}:9080\n" for name in tiers)
    waits = "".join(f"      {name}: {{condition: service_healthy}}\n" for name in [*tiers, *agents])
    return f"""\
  traffic:
    <<: *process
    build: # the one image that all processes of ours run from
      context: ../..
      dockerfile: deploy/compose/Dockerfile
    entrypoint: [python, -m, services.demo.traffic]
    command:
{targets}{admins}      - --state=/tmp/traffic.json
    tmpfs: [/tmp]
    restart: "no"
    depends_on:
{waits}    healthcheck: # it goes on sending and counting
      <<: *health
      test: [CMD-SHELL, 'test -n "$$(find /tmp/traffic.json -mmin -1)"']
"""


# -- to look at it -----------------------------------------------------------------------------------------------------


def _tiers() -> list[str]:
    tiers = [f"global-{r.name}" for r in REGIONS] + [f"region-{r.name}" for r in REGIONS]
    return tiers + [f"instance-{c.name}" for r in REGIONS for c in r.clusters]


def _observability() -> str:
    return """\
  prometheus:
    image: prom/prometheus:v2.53.3
    profiles: [observability]
    command: [--config.file=/etc/prometheus/prometheus.yml, --storage.tsdb.retention.time=6h]
    configs: [{source: prometheus, target: /etc/prometheus/prometheus.yml}]
    volumes: ["../prometheus/rules.yaml:/etc/prometheus/rules.yaml:ro"]
    tmpfs: [/prometheus:mode=1777] # gone with the container
    ports: ["127.0.0.1:${PROMETHEUS_PORT:-9090}:9090"]
    restart: unless-stopped
    logging: *logging
    healthcheck: {<<: *health, test: [CMD, promtool, check, ready, "--url=http://127.0.0.1:9090"]}

  grafana:
    image: grafana/grafana:12.1.0
    profiles: [observability]
    environment: # whoever reaches the port may look, and no more; on loopback only
      GF_AUTH_ANONYMOUS_ENABLED: "true"
      GF_AUTH_BASIC_ENABLED: "false"
      GF_ANALYTICS_REPORTING_ENABLED: "false"
      GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH: /var/lib/grafana/dashboards/headwater.json
    volumes:
      - "../grafana/provisioning:/etc/grafana/provisioning:ro"
      - "../grafana/headwater.json:/var/lib/grafana/dashboards/headwater.json:ro"
    ports: ["127.0.0.1:${GRAFANA_PORT:-3000}:3000"]
    restart: unless-stopped
    logging: *logging
    healthcheck: {<<: *health, test: [CMD-SHELL, "wget -q -O /dev/null http://127.0.0.1:3000/api/health"]}

  jaeger:
    image: jaegertracing/all-in-one:1.62.0
    profiles: [observability]
    command: [--memory.max-traces=20000]
    ports: ["127.0.0.1:${JAEGER_PORT:-16686}:16686"]
    restart: unless-stopped
    logging: *logging
    healthcheck: {<<: *health, test: [CMD-SHELL, "wget -q -O /dev/null http://127.0.0.1:14269/"]}
"""


def _scrape() -> str:
    targets = ", ".join(f"'{name}:9080'" for name in _tiers())
    return f"""\
  prometheus:
    content: |
      global: {{scrape_interval: 5s, evaluation_interval: 15s}}
      rule_files: [/etc/prometheus/rules.yaml]
      scrape_configs:
        - job_name: headwater
          static_configs:
            - targets: [{targets}]
"""


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
