"""The documents say what the code does: reference pages are its own, and no key or metric is without a word."""

from pathlib import Path

from services.cli import metrics_reference
from services.cli.reference import page

DOCS = Path(__file__).parent.parent / "docs"


def test_the_configuration_page_is_up_to_date():
    assert (DOCS / "configuration.md").read_text() == page(), "run `make docs`"


def test_every_setting_has_a_meaning():
    empty = [line for line in page().splitlines() if line.startswith("| `") and line.rstrip(" |").count("|") < 3]
    assert not empty


def test_the_metrics_page_is_up_to_date_and_complete():
    page = metrics_reference.page()
    assert (DOCS / "metrics.md").read_text() == page, "run `make docs`"
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 25
    assert all(len(cells[4].strip()) > 10 for cells in rows)
