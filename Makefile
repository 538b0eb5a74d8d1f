# Two commands need nothing but Python 3.11+ and make:  make demo  ·  make test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup compile interpret tools sbom audit docs site compose charts demo chaos sim test check lock proto clean

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

setup: $(STAMP)

# Programs for some tests and for the documents' site; without them those tests are skipped. Some 150 MB.
TOOLS := .tools/.installed-$(shell cksum requirements-tools.lock | cut -d' ' -f1)

$(TOOLS):
	rm -rf .tools
	$(PYTHON) -m venv .tools
	.tools/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements-tools.lock
	.tools/bin/python tests/tools.py
	@touch $@

tools: $(TOOLS)

demo: $(STAMP)
	@$(BIN)/headwater demo $(ARGS)

chaos: $(STAMP)  # twenty minutes of traffic while everything is broken in turn; ARGS="--minutes 2 --seed 3"
	@$(BIN)/python -m tests.chaos $(ARGS)

test: $(STAMP)
	@$(BIN)/pytest -q $(ARGS)

FUZZER := $(VENV)/fuzzer
FUZZ_SECONDS ?= 45
fuzz: $(STAMP)  # the head parser's glue, by coverage; the tool has wheels for CPython 3.11 on Linux
	@[ -d $(FUZZER)/atheris ] || $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target $(FUZZER) -r tests/fuzz/requirements.txt
	cd $(FUZZER) && PYTHONPATH=.:../.. ../bin/python ../../tests/fuzz/fuzz_heads.py -max_total_time=$(FUZZ_SECONDS) -max_len=3000 -print_final_stats=1 $(ARGS)

sim: $(STAMP)  # the goals of scheduling on the public traces; puts the table into docs/scheduling.md
	@$(BIN)/python -m bench.scheduling --write docs/scheduling.md $(ARGS)

# Optional: compiles deciding and carrying with mypyc (needs gcc; a minute). Python files that were changed since count
# again after another `make compile`, or `make interpret`, which takes the compiled ones away.
COMPILED := common/policy/*.py common/records.py common/balancing.py common/intake.py common/serving.py \
  common/telemetry.py common/metrics.py common/tracecontext.py \
  $(addprefix common/relay/,body.py client.py exchange.py framing.py heads.py pool.py relay.py sending.py sweeper.py upstream.py)

define COMPILE
import sys
from mypyc.build import mypycify
from setuptools import setup
modules = mypycify(sys.argv[1:], opt_level="2")
setup(name="headwater", packages=[], py_modules=[], ext_modules=modules, script_args=["build_ext", "--inplace"])
endef
export COMPILE

compile: interpret $(STAMP)
	@command -v gcc >/dev/null || { echo "gcc is needed"; exit 1; }
	$(BIN)/python -c "$$COMPILE" $(wildcard $(COMPILED)) >build-mypyc.log 2>&1 || { tail -5 build-mypyc.log; exit 1; }
	@rm -rf build build-mypyc.log

interpret:
	@find common -name '*.cpython-*.so' -delete
	@rm -f *__mypyc.cpython-*.so

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two locks: of everything, and of what the image is built from, which has no use for test tools and servers as wheels.
# The second is held to the first, so that what was tested is what runs.
UV_COMPILE := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header pyproject.toml
lock:  # needs uv
	$(UV_COMPILE) --all-extras -o requirements.lock
	$(UV_COMPILE) --extra build --extra discovery --extra security -c requirements.lock -o requirements-run.lock
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	  $(patsubst %,--no-emit-package %,aws-cdk-lib aws-cdk-asset-awscli-v1 aws-cdk-asset-node-proxy-agent-v6 \
	  aws-cdk-cloud-assembly-schema jsii constructs publication typeguard) requirements-tools.in -o requirements-tools.lock

sbom: $(TOOLS)  # the bill of materials of what the image is built from: CycloneDX, with the hashes of the lock
	@mkdir -p dist
	.tools/bin/cyclonedx-py requirements requirements-run.lock --pyproject pyproject.toml \
	  --output-reproducible --output-format JSON --output-file dist/headwater.cdx.json

audit: $(TOOLS)  # known vulnerabilities of the same; fails where no advisories can be had, unless AUDIT=--where-possible
	.tools/bin/python deploy/audit.py .tools/bin/pip-audit $(AUDIT)

proto: $(STAMP)
	cd common/proto && ../../$(BIN)/python -m grpc_tools.protoc -I../.. --python_out=../.. --pyi_out=../.. --grpc_python_out=../.. ../../common/proto/load.proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. services/instance_lb/picker/proto/*.proto common/scaling/proto/*.proto

docs: $(STAMP)
	$(BIN)/python -m services.cli.reference > docs/configuration.md
	$(BIN)/python -m services.cli.metrics_reference > docs/metrics.md

site: $(TOOLS)  # the documents as a site, every link in it checked
	.tools/bin/mkdocs build --strict

compose: $(STAMP)
	$(BIN)/python deploy/compose/generate.py

console-vendor:  # the chart library of the console, from npm
	common/admin/page/vendor/fetch.sh

dashboards: $(STAMP)
	$(BIN)/python deploy/grafana/generate.py

charts: $(STAMP)
	$(BIN)/python deploy/kubernetes/schemas.py

clean: interpret
	rm -rf $(VENV) .tools dist build .mypy_cache .ruff_cache .pytest_cache
