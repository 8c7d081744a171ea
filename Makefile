# One command per job; each sets itself up. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 3
RUNS ?= 3
# Spark starts a third quicker with an archive of its classes, and without it all the same.
CLASSES := $(VENV)/.classes

.PHONY: help setup compiled test check lint types contracts bench chaos flakes pythons up demo lock docs pictures clean

help: ## what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY) $(CLASSES) compiled ## virtual environment with the locked dependencies

$(READY): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Purveyor needs Python 3.11 or newer; set PYTHON=/path/to/it"; exit 1; }
	@echo "== set-up: virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== set-up: locked dependencies (hashes checked)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(READY)

$(CLASSES): $(READY)
	@echo "== set-up: an archive of Spark's classes, once per machine"
	-@$(BIN)/python -m purveyor.spark.class_archive && touch $@

# Spark starts many Python processes: where Python may not keep what it compiles, each would compile all of it anew.
compiled: $(READY)
	@$(BIN)/python -m compileall -q src

test: setup ## all tests, in parallel, against real servers
	@$(BIN)/python -m scripts.browser
	@$(BIN)/python -m scripts.slapd
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 25

check: lint ## everything that must hold before a change lands
	@$(MAKE) --no-print-directory --jobs 2 types $(CLASSES)
	@$(MAKE) --no-print-directory contracts test
	@$(BIN)/python -m scripts.pythons --newest --workers $(WORKERS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

contracts: $(READY)
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.check_source

bench: setup ## the benchmarks; writes benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks

chaos: setup ## the long versions of the crash and property tests
	PURVEYOR_CHAOS=1 $(BIN)/python -m pytest -m chaos -n 1 -s --timeout 3600

flakes: setup ## the suite RUNS times in random order beside a load; says which tests failed, with their seeds
	$(BIN)/python -m scripts.flakes --runs $(RUNS) --workers $(WORKERS) -- $(ARGS)

pythons: setup ## the part of the suite without Spark on each supported Python of this machine
	$(BIN)/python -m scripts.pythons --workers $(WORKERS) $(ARGS)

up: setup ## everything on this machine: NATS server, pipeline and API, until Ctrl-C
	$(BIN)/purveyor up

demo: setup ## the main job end to end, on sample data
	$(BIN)/purveyor demo

pictures: setup ## the picture of the console in the docs, taken by the test of a healthy, busy system
	PURVEYOR_PICTURES=true $(BIN)/python -m pytest tests/app/console/test_healthy_system.py
	cp artifacts/console/healthy.png docs/images/console.png

docs: $(READY) ## the generated pages
	$(BIN)/python -m scripts.generate_docs

lock: ## resolve the dependencies anew
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
	  --quiet --upgrade --all-extras --group dev pyproject.toml --output-file requirements/dev.txt
	$(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
	  --quiet --all-extras --constraint requirements/dev.txt pyproject.toml --output-file requirements/image.txt

clean: ## remove what was built
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build artifacts .venv-*
