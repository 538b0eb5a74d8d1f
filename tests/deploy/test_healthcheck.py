"""The image's health check against a server that is well, one that is not, and none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "compose" / "healthcheck.py"


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 503)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def check(*arguments: str, admin: str = "") -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-IS", SCRIPT, *arguments],
        env={**os.environ, "HEADWATER_ADMIN": admin},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_what_answers_is_well(port):
    assert check(f"http://127.0.0.1:{port}/readyz") == (0, "")
    assert check(f"tcp://127.0.0.1:{port}") == (0, "")


def test_without_arguments_the_admin_listener_is_asked(port):
    assert check(admin=f"0.0.0.0:{port}") == (0, "")


def test_what_answers_otherwise_is_not_well(port):
    code, said = check(f"http://127.0.0.1:{port}/readyz", f"http://127.0.0.1:{port}/draining")
    assert (code, said.strip()) == (1, f"http://127.0.0.1:{port}/draining: HTTP/1.0 503")


def test_what_is_not_there_is_not_well():
    code, said = check("tcp://127.0.0.1:1")
    assert code == 1
    assert "refused" in said


def test_it_can_be_run_as_it_is():
    assert os.access(SCRIPT, os.X_OK)
    assert SCRIPT.read_text().startswith("#!/usr/bin/env -S python3 -IS\n")
