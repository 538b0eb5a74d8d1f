"""What inference servers of all kinds answered, or would: see the README beside this file."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

from services.agent.engines import Answer, Listener

HERE = Path(__file__).parent
NAMES = sorted(p.parent.name for p in HERE.glob("*/answers.json"))


class Recorded:
    """One fixture as what adapters ask: a path that it has not is 404, a listener that it has not refuses."""

    def __init__(self, name: str, changed: Mapping[str, Answer] | None = None) -> None:
        self.name = name
        self.answers = {key: _answer(HERE / name, told) for key, told in _page(name)["answers"].items()}
        self.answers.update(changed or {})
        self.asked: list[str] = []

    def __call__(self, path: str, listener: Listener = Listener.MAIN, ports_up: int = 0) -> Awaitable[Answer]:
        return self._answer(path, listener if ports_up else Listener.MAIN)

    async def _answer(self, path: str, listener: Listener) -> Answer:
        key = f"{listener.value} {path}"
        self.asked.append(key)
        if listener is not Listener.MAIN and not any(k.startswith(listener.value) for k in self.answers):
            return Answer(0, problem="no connection", refused=True)
        return self.answers.get(key, Answer(404, b'{"error":"Not Found"}'))


def engine_of(name: str) -> str:
    """The kind of server a fixture is of: what its name begins with."""
    return name.partition("-")[0]


def errors() -> list[dict[str, Any]]:
    """Every answer of `errors.json`: of which engine, what it says, and what it is."""
    found: list[dict[str, Any]] = json.loads((HERE / "errors.json").read_text())
    return found


def _page(name: str) -> dict[str, Any]:
    page: dict[str, Any] = json.loads((HERE / name / "answers.json").read_text())
    return page


def _answer(folder: Path, told: dict[str, Any]) -> Answer:
    body = (folder / told["file"]).read_bytes() if "file" in told else told["text"].encode()
    return Answer(told["status"], body)
