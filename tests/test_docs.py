"""The documents say what the code does: the configuration page is its own, and no key is without a word."""

from pathlib import Path

from services.cli.reference import page

DOCS = Path(__file__).parent.parent / "docs"


def test_the_configuration_page_is_up_to_date():
    assert (DOCS / "configuration.md").read_text() == page(), "run `make docs`"


def test_every_setting_has_a_meaning():
    empty = [line for line in page().splitlines() if line.startswith("| `") and line.rstrip(" |").count("|") < 3]
    assert not empty
