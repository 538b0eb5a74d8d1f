"""What `make audit` says of an auditor's findings; the auditor itself has advisories to ask in few places."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tools import ROOT

FINE: dict[str, Any] = {"name": "a", "version": "1.0", "vulns": []}
BAD: dict[str, Any] = {"name": "b", "version": "2.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
UNKNOWN: dict[str, Any] = {"name": "c", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("found", "options", "code", "said"),
    [
        ([FINE], [], 0, "1 packages, no known vulnerabilities"),
        ([FINE, BAD], ["--where-possible"], 1, "b 2.0: PYSEC-1, fixed in 2.1"),
        ([FINE, UNKNOWN], [], 1, "NOT AUDITED, no advisories can be had here: 1 of 2 packages"),
        ([FINE, UNKNOWN], ["--where-possible"], 0, "NOT AUDITED"),
        ([BAD, UNKNOWN], ["--where-possible"], 1, "PYSEC-1"),
        (None, [], 1, "NOT AUDITED"),
    ],
)
def test_vulnerabilities_and_questions_without_answers(
    tmp_path: Path, found: list[dict[str, Any]] | None, options: list[str], code: int, said: str
) -> None:
    auditor = tmp_path / "auditor"
    answer = "" if found is None else json.dumps({"dependencies": found})
    auditor.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    auditor.chmod(0o755)
    asked = subprocess.run(
        [sys.executable, str(ROOT / "deploy" / "audit.py"), str(auditor), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (asked.returncode, asked.stderr) == (code, "")
    assert said in asked.stdout
