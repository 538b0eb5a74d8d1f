"""Each threat in docs/security.md names tests, and those exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "security.md").read_text()


def test_every_threat_names_tests_that_exist() -> None:
    rows = [line.split("|") for line in PAGE.splitlines() if re.match(r"\| (?!threat|---)", line)]
    assert len(rows) >= 20
    there = {name for file in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}
    for _, threat, _, shown, _ in rows:
        named = re.findall(r"`(test_\w+)`", shown)
        assert named, threat
        assert not set(named) - there, threat
