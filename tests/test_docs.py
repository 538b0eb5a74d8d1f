"""The documents say what the code does: what is generated is up to date, configurations are valid, commands work."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from common.config import load
from services.agent.config import AgentConfig
from services.cli import metrics_reference
from services.cli.reference import page
from services.global_lb.config import GlobalConfig
from services.instance_lb.config import InstanceConfig
from services.region_lb.config import RegionConfig
from services.up.config import UpConfig
from tests import tools
from tests.servers import free_port

DOCS = tools.ROOT / "docs"
CONFIGS: dict[str, type[Any]] = {
    "global": GlobalConfig,
    "region": RegionConfig,
    "instance": InstanceConfig,
    "agent": AgentConfig,
    "up": UpConfig,
}
CONFIGURED = re.compile(r"```yaml\n(# \S+\.yaml, for `headwater (\w+)`\n.*?)```", re.DOTALL)
COMMANDS = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def configurations() -> list[Any]:
    """(command, text) of each whole configuration in a document."""
    return [
        pytest.param(command, text, id=f"{file.stem}-{at}")
        for file in sorted(DOCS.glob("*.md"))
        for at, (text, command) in enumerate(CONFIGURED.findall(file.read_text()))
    ]


def test_the_configuration_page_is_up_to_date() -> None:
    assert (DOCS / "configuration.md").read_text() == page(), "run `make docs`"


def test_every_setting_has_a_meaning() -> None:
    empty = [line for line in page().splitlines() if line.startswith("| `") and line.rstrip(" |").count("|") < 3]
    assert not empty


def test_the_metrics_page_is_up_to_date_and_complete():
    page = metrics_reference.page()
    assert (DOCS / "metrics.md").read_text() == page, "run `make docs`"
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 25
    assert all(len(cells[4].strip()) > 10 for cells in rows)


@pytest.mark.parametrize(("command", "text"), configurations())
def test_configurations_in_the_documents_are_valid(
    command: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("HEADWATER_")]:
        monkeypatch.delenv(name)
    file = tmp_path / "config.yaml"
    file.write_text(text)
    load(CONFIGS[command], file)


def mkdocs(root: Path, into: Path) -> tuple[int, str]:
    build = [tools.python(), "-m", "mkdocs", "build", "--strict", "--site-dir", str(into)]
    done = subprocess.run(build, cwd=root, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_site_builds_and_every_link_in_it_leads_somewhere(tmp_path: Path) -> None:
    code, said = mkdocs(tools.ROOT, tmp_path / "site")
    assert code == 0, said
    pages = {p.stem for p in (tmp_path / "site").glob("*.html")} - {"404"}
    assert pages == {p.stem for p in DOCS.glob("*.md")}


@pytest.mark.parametrize("link", ["nowhere.md", "index.md#nowhere", "../nowhere.py"])
def test_the_site_does_not_build_with_a_link_that_leads_nowhere(tmp_path: Path, link: str) -> None:
    shutil.copytree(tools.ROOT / "deploy" / "site", tmp_path / "deploy" / "site")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Here\n\n[there]({link})\n")
    config = (tools.ROOT / "mkdocs.yml").read_text()
    (tmp_path / "mkdocs.yml").write_text(config[: config.index("nav:\n")] + "nav: [index.md]\n")
    code, said = mkdocs(tmp_path, tmp_path / "site")
    assert code != 0
    assert "nowhere" in said


def test_the_first_page_has_the_same_commands_in_chinese() -> None:
    commands = [
        re.findall(r"```(?:ba)?sh\n(.*?)```", (DOCS / name).read_text(), re.DOTALL) for name in ("index.md", "zh.md")
    ]
    assert commands[0] == commands[1] != []


def test_the_first_page_works_as_it_is_written(tmp_path: Path) -> None:
    """Its commands, one after the other in one shell, on other ports than those that may be taken here."""
    if not (tools.ROOT / ".venv").exists():
        pytest.skip("the page's commands use .venv")
    script = "".join(COMMANDS.findall((DOCS / "index.md").read_text()))
    first, listen, admin = free_port(), free_port(), free_port()
    for old, new in {"8000": first, "8001": first + 1, "8080": listen, "9080": admin}.items():
        assert old in script
        script = script.replace(old, str(new))
    environment = {"HEADWATER_LISTEN": f"127.0.0.1:{listen}", "HEADWATER_ADMIN": f"127.0.0.1:{admin}"}
    with (tmp_path / "out").open("wb") as out:  # no pipe, whose end those in the background would keep open
        process = subprocess.Popen(
            ["bash", "-e", "-o", "pipefail", "-c", script],
            cwd=tools.ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(300)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    said = (tmp_path / "out").read_text()
    assert code == 0, said
    for word in ('"llama-8b"', "x-headwater-served-by: local/local/", "[DONE]", "global", "headwater_requests_total{"):
        assert word in said, said
