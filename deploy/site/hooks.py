"""Hooks of the documents' site: links to files of the repository, and pages that the navigation does not name.

The documents are written to be read in the repository as well, so they link to its files by relative paths. On the site
these become links to the repository, after a look whether the file is there; `mkdocs build --strict` does the rest.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[2]
OUTSIDE = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Pages that the navigation does not name stand at its end, lest one be forgotten."""
    named = set(re.findall(r"[\w.-]+\.md", str(config.nav)))
    more = sorted(page.name for page in Path(config.docs_dir).glob("*.md") if page.name not in named)
    if more:
        config.nav.append({"More": more})
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links that lead out of docs/ lead to the repository; a file that is not there ends the build."""

    def elsewhere(match: re.Match[str]) -> str:
        target = (ROOT / "docs" / match[1]).resolve()
        if not target.exists():
            raise PluginError(f"{page.file.src_path}: {match[1]} is not there")
        kind = "tree" if target.is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{target.relative_to(ROOT)}{match[2] or ''})"

    return OUTSIDE.sub(elsewhere, markdown)
