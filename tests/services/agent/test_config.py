from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.config import load
from common.errors import ConfigError
from services.agent.config import AgentConfig, InstanceConfig, default_id


def config(**values: Any) -> AgentConfig:
    return AgentConfig.model_validate({"region": "eu", "cluster": "c1", "id": "gpu7", **values})


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(
        """
region: eu-west
cluster: h100s
listen: 10.0.0.5:7000
etcd: {urls: ["http://etcd:2379"], ttl_s: 10}
scrape_interval_s: 0.5
instances:
  - url: http://127.0.0.1:8000
    devices: [0, GPU-1234]
    price_usd_per_hour: 2.5
  - url: https://10.0.0.5:8001/
    id: other
    engine: sim
    models: [a, b]
"""
    )
    read = load(AgentConfig, file)
    first, second = read.instances
    assert first.devices == (0, "GPU-1234")
    assert second.url == "https://10.0.0.5:8001"
    assert read.instance_id(second) == "other"
    assert read.instance_id(first) == f"{read.id}-8000"
    assert read.advertised_host == "10.0.0.5"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://10.0.0.5:8000", "10.0.0.5-8000"),
        ("http://localhost:8000", "gpu7-8000"),
        ("http://[::1]:8000", "gpu7-8000"),
        ("http://[fd00::1]", "fd00..1-80"),
        ("https://vllm.example", "vllm.example-443"),
    ],
)
def test_default_ids(url: str, expected: str) -> None:
    assert default_id(url, "gpu7") == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"instances": [{"url": "ftp://x"}]}, "URL"),
        (
            {"instances": [{"url": "http://x:1", "engine": "vlm"}]},
            "engine 'vlm' is not known; there are llamacpp, ollama, openai, sglang, sim, tgi,",
        ),
        ({"instances": [{"url": "http://x:1", "wieght": 1}]}, "unknown key 'instances.0.wieght'"),
        ({"instances": [{"url": "http://x:1"}, {"url": "http://x:1"}]}, "two instances are called x-1"),
        ({"instances": [{"url": "http://x:1", "metrics_url": "x:1"}]}, "instances.0.metrics_url"),
        ({"instances": [{"url": "http://x:1", "management_url": "http://u:p@x:2"}]}, "credentials"),
        ({"listen": "0.0.0.0:7000"}, "advertise is needed"),
        ({"scrape_interval_s": 0.1}, "scrape_interval_s"),
        ({"region": "a/b"}, "region"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(AgentConfig, None, {"region": "eu", "cluster": "c1", **values})
    assert message in str(error.value)


def test_it_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config().region = "us"
    assert InstanceConfig(url="http://h:1").host == "h"
