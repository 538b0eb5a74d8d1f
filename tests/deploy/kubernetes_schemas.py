"""Checks resources against Kubernetes' schemas, and those of KEDA and the Prometheus operator. Run by .tools' Python:

kubernetes_schemas.py VERSION < resources.yaml          prints each mistake, and how many resources were checked
"""

from __future__ import annotations

import sys
from typing import Any

import kubernetes_validate
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import ServiceMonitor
from pydantic import BaseModel, ValidationError

CUSTOM: dict[str, type[BaseModel]] = {
    "keda.sh/v1alpha1/ScaledObject": ScaledObject,
    "monitoring.coreos.com/v1/ServiceMonitor": ServiceMonitor,
}


def mistakes(resource: dict[str, Any], version: str) -> list[str]:
    """What is wrong with one; unknown keys count."""
    model = CUSTOM.get(f"{resource['apiVersion']}/{resource['kind']}")
    if model is None:
        try:
            kubernetes_validate.validate(resource, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            return [f"{'.'.join(map(str, error.path))}: {error.message}"]
        return []
    try:
        read = model.model_validate(resource)
    except ValidationError as error:
        return [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
    return _lost(resource, read.model_dump(by_alias=True, exclude_none=True, mode="json"), "")


def _lost(given: Any, kept: Any, at: str) -> list[str]:
    """Keys that a model has not, which it leaves out in silence."""
    if isinstance(given, dict) and isinstance(kept, dict):
        missing = [f"{at}{key}: unknown" for key in given.keys() - kept.keys()]
        return missing + [m for key in given.keys() & kept.keys() for m in _lost(given[key], kept[key], f"{at}{key}.")]
    if isinstance(given, list) and isinstance(kept, list):
        return [m for i, pair in enumerate(zip(given, kept, strict=True)) for m in _lost(*pair, f"{at}{i}.")]
    return []


def main() -> int:
    """Check all of them; the exit code."""
    found = 0
    resources = [r for r in yaml.safe_load_all(sys.stdin) if r]
    for resource in resources:
        for mistake in {m for version in sys.argv[1:] for m in mistakes(resource, version)}:
            found += 1
            sys.stdout.write(f"{resource['kind']} {resource['metadata']['name']}: {mistake}\n")
    sys.stdout.write(f"{len(resources)} checked\n")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
