#!/bin/sh
# Builds what is released, the source distribution and out of it the wheel, into dist/, and tries the wheel in an
# environment of its own with each Python named: deploy/release.sh python3.11 python3.13
# Each has to serve a request within START_S seconds of its start. Needs `make setup`, and the package index.
set -eu
cd "$(dirname "$0")/.."
START_S=60 # of a busy machine, where Python compiles all of it first

rm -rf dist
.venv/bin/python -m hatchling build --target sdist
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
tar -xzf dist/*.tar.gz -C "$source" --strip-components 1
(here=$PWD && cd "$source" && "$here/.venv/bin/python" -m hatchling build --target wheel --directory "$here/dist")

for python in "$@"; do
  "$python" -m venv "$source/env"
  "$source/env/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r requirements-run.lock
  "$source/env/bin/pip" install --quiet --disable-pip-version-check --no-deps dist/*.whl
  "$source/env/bin/python" - "$START_S" <<'PYTHON'
import json, os, socket, subprocess, sys, time, urllib.request

def free():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]

def post(url, value):
    request = urllib.request.Request(url, json.dumps(value).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=10))

os.chdir("/")  # where no source is that could be imported in place of what was installed
headwater = os.path.join(os.path.dirname(sys.executable), "headwater")
said = subprocess.check_output([headwater, "--version"], text=True).strip()
engine, port, admin = free(), free(), free()
processes = [
    subprocess.Popen([headwater, "engine", "--port", str(engine)]),
    subprocess.Popen([headwater, "up", "--instance", f"http://127.0.0.1:{engine}", "--listen", f"127.0.0.1:{port}",
                      "--admin", f"127.0.0.1:{admin}"]),
]
began = time.monotonic()
try:
    while True:
        try:
            chat = {"model": "llama-8b", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
            answer = post(f"http://127.0.0.1:{port}/v1/chat/completions", chat)
            break
        except OSError:
            if time.monotonic() - began > float(sys.argv[1]):
                raise
            time.sleep(0.05)
    assert answer["usage"]["completion_tokens"] == 2, answer
    print(f"{said} with Python {sys.version.split()[0]}: a request served {time.monotonic() - began:.1f} s after the start")
finally:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(20)
PYTHON
  rm -rf "$source/env"
done
ls -l dist
