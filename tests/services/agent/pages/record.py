"""Records what a live server answers, as a fixture: `python record.py DIR SOURCE main=URL [metrics=URL …] [PATH …]`.

Asks for every path that an adapter asks for, whatever the server is, so that no adapter takes it for its own kind.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

EVERY = (
    *("/", "/health", "/v1/models", "/metrics", "/info", "/api/version", "/api/tags", "/api/ps", "/v2"),
    *("/v2/health/ready", "/v2/models/stats", "/api-description", "/ping", "/props", "/v1/loads", "/model_info"),
    "/prometheus/metrics",
)
INLINE_BYTES = 4000  # a longer body is a file of its own


def record(out: Path, source: str, bases: dict[str, str], more: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    asked = [("main", path) for path in EVERY] + [("metrics", "/metrics")] * ("metrics" in bases)
    asked += [("main" if path.startswith("/") else path.partition("/")[0], path[path.index("/") :]) for path in more]
    answers = {}
    for listener, path in asked:
        status, body = _get(bases[listener] + path)
        key = f"{listener} {path}"
        if len(body) > INLINE_BYTES:
            name = f"{listener}{path}".replace("/", "_").replace("?", "_") + ".txt"
            (out / name).write_bytes(body)
            answers[key] = {"status": status, "file": name}
        else:
            answers[key] = {"status": status, "text": body.decode()}
    page = {"source": source, "answers": answers}
    (out / "answers.json").write_text(json.dumps(page, indent=1, ensure_ascii=False) + "\n")


def _get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


if __name__ == "__main__":
    out, source, *rest = sys.argv[1:]
    bases = dict(word.split("=", 1) for word in rest if "=" in word.split("/")[0])
    record(Path(out), source, bases, [word for word in rest if "=" not in word.split("/")[0]])
