"""Every command is there, and a process that is started by the dozen imports its own and no other."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("services.demo", "services.bench", "services.engine_sim", "services.sim")


def run(*arguments: str, after: str = "") -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.argv[1:] = {list(arguments)!r}\nfrom services.cli.__main__ import main\n"
    code += f"try: main()\nfinally: {after or 'pass'}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_help_lists_all_commands():
    shown = run("--help").stdout
    assert all(
        f" {name} " in shown
        for name in (
            "up",
            "global",
            "region",
            "instance",
            "agent",
            "trace",
            "bench",
            "check",
            "demo",
            "drain",
            "undrain",
            "engine",
            "sim",
        )
    )


@pytest.mark.parametrize("command", ["bench", "demo", "engine", "global", "sim"])
def test_each_command_explains_itself(command):
    done = run(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{command} [OPTIONS]" in done.stdout


def test_a_slip_is_told():
    done = run("glob")
    assert done.returncode == 2
    assert "No such command 'glob'" in done.stderr


def test_a_tier_does_not_import_the_demo():
    after = f"print([m for m in sys.modules if m.startswith({HEAVY!r})])"
    done = run("global", "--listen", "nowhere", after=after)
    assert done.returncode == 1
    assert done.stdout.strip() == "[]"
