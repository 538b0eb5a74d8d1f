"""What is released: the source distribution has all that the tests need, and the wheel made of it runs by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

from tests import tools


def build(target: str, root: Path, into: Path) -> Path:
    run = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(into)]
    subprocess.run(run, cwd=root, check=True, capture_output=True)
    [made] = into.glob("*.tar.gz" if target == "sdist" else "*.whl")
    return made


def test_the_wheel_made_of_the_source_distribution_has_all_that_runs(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tools.ROOT, tmp_path)) as archive:
        archive.extractall(tmp_path)
    [source] = [folder for folder in tmp_path.iterdir() if folder.is_dir()]
    for name in (
        "tests/test_docs.py",
        "docs/index.md",
        "mkdocs.yml",
        "requirements-tools.lock",
        "deploy/behind/nginx.conf",
    ):
        assert (source / name).exists(), name
    assert not list(source.rglob("*.pem")), "secrets that somebody made here"
    with zipfile.ZipFile(build("wheel", source, tmp_path)) as wheel:
        packed = set(wheel.namelist())
        wheel.extractall(tmp_path / "installed")
    wanted = {
        str(file.relative_to(tools.ROOT))
        for package in ("common", "services")
        for file in (tools.ROOT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert wanted <= packed
    assert {name.split("/")[0] for name in packed} == {
        "common",
        "services",
        f"headwater-{version('headwater')}.dist-info",
    }
    run = [sys.executable, "-P", "-m", "services.cli", "--version"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    said = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert said == f"headwater {version('headwater')}\n"


def test_the_changelog_speaks_of_this_version() -> None:
    assert f"\n## {version('headwater')}" in (tools.ROOT / "CHANGELOG.md").read_text()
