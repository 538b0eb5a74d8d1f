"""A small HTTP server of the tests: notes what it is sent, and answers as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self


class Seen(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: Any


class Stub:
    def __init__(self, answer: Callable[[Seen], tuple[int, Any]] = lambda seen: (200, {})) -> None:
        self.seen: list[Seen] = []
        self.answer = answer
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {key.lower(): value for key, value in self.headers.items()}
                seen = Seen(self.command, self.path, headers, json.loads(body) if body else None)
                stub.seen.append(seen)
                status, answer = stub.answer(seen)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PATCH = do_PUT = _any  # noqa: N815

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
