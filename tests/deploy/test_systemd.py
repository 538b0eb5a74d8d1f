"""The systemd units, as systemd itself reads them."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import TierConfig
from services.cli.__main__ import app
from tests import tools

HERE = tools.ROOT / "deploy" / "systemd"
PROCESSES = ("global", "region", "instance", "agent", "up")
EXPOSED = 20  # of 100, where a unit that says nothing has 96


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """A copy that runs the `headwater` of this environment, since a program that is not there is a mistake as well."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    shutil.copytree(HERE, tmp_path / "units")
    unit = tmp_path / "units" / "headwater@.service"
    here = Path(sys.executable).with_name("headwater")
    unit.write_text(unit.read_text().replace("/opt/headwater/bin/headwater", str(here)))
    return tmp_path / "units"


def analyze(*arguments: str, cwd: Path) -> tuple[int, str]:
    done = subprocess.run(["systemd-analyze", *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_systemd_takes_each_unit_without_a_word(units: Path) -> None:
    for process in PROCESSES:
        name = f"headwater@{process}.service"
        (units / name).write_text((units / "headwater@.service").read_text())  # `verify` wants the name it is run under
        said = analyze("verify", "--man=no", f"./{name}", cwd=units)
        mine = [line for line in said[1].splitlines() if "headwater" in line]
        assert mine == [], said
    bad = units / "headwater@bad.service"
    bad.write_text((units / "headwater@.service").read_text().replace("ProtectHome=yes", "ProtectHomes=yes"))
    assert "ProtectHomes" in analyze("verify", "--man=no", "./headwater@bad.service", cwd=units)[1]


def test_little_of_the_machine_is_exposed(units: Path) -> None:
    for unit in ("headwater@up.service", "headwater@agent.service"):
        (units / unit).write_text((units / "headwater@.service").read_text())
        code, said = analyze(
            "security", "--offline=yes", f"--threshold={EXPOSED}", "--no-pager", f"./{unit}", cwd=units
        )
        assert code == 0, said


def test_each_is_a_command_and_has_the_time_to_end_that_its_drain_takes() -> None:
    commands = {c.name or getattr(c.callback, "__name__", "") for c in app.registered_commands}
    assert set(PROCESSES) <= {command.rstrip("_") for command in commands}
    unit = configparser.RawConfigParser(strict=False)
    unit.read(HERE / "headwater@.service")
    assert float(unit["Service"]["TimeoutStopSec"]) >= TierConfig().drain.grace_s + 5
