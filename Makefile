# Two commands need nothing but Python 3.11+ and make:  make demo  ·  make test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: docs demo test check lock proto clean

# The stamp's name has the lock file's checksum, so an unchanged lock costs nothing and a changed one is installed.
STAMP := $(VENV)/.installed-$(shell cksum requirements.lock pyproject.toml | cksum | cut -d' ' -f1)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Headwater needs Python 3.11 or newer: make PYTHON=python3.x"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { echo "this Python has no venv module (on Debian: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: $(STAMP)
	@$(BIN)/headwater demo $(ARGS)

test: $(STAMP)
	@$(BIN)/pytest -q $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lock:  # needs uv
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --all-extras pyproject.toml -o requirements.lock

proto: $(STAMP)
	cd common/proto && ../../$(BIN)/python -m grpc_tools.protoc -I../.. --python_out=../.. --pyi_out=../.. --grpc_python_out=../.. ../../common/proto/load.proto

docs: $(STAMP)
	$(BIN)/python -m services.cli.reference > docs/configuration.md

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache
