# Everything a fresh clone needs, with only Python and make.
#
#   PYTHON   the interpreter to build on             make test PYTHON=python3.13
#   VENV     where the virtual environment goes      make test VENV=/tmp/veneer
#   JAX      the JAX to install                      make test JAX=jax==0.10.2
#   ARGS     passed on to the command that is run    make test ARGS='-k quant'
#   QWIX     a checkout of Qwix's main branch        make test-peers QWIX=../qwix

PYTHON ?= python3
VENV ?= .venv
JAX ?= jax
ARGS ?=

BIN := $(VENV)/bin

# An environment is good for one interpreter, one choice of JAX and one place: the stamps carry a
# checksum of the three in their names, so that a change of any is a stamp not yet made.
BUILT_ON := $(shell { $(PYTHON) -c 'import sys; print(sys.base_prefix, sys.version)'; \
	echo '$(JAX)' '$(CURDIR)'; } 2>/dev/null | cksum | cut -d ' ' -f 1)
CREATED := $(VENV)/.created-$(BUILT_ON)
DEMO := $(VENV)/.demo-$(BUILT_ON)
TEST := $(VENV)/.test-$(BUILT_ON)
DEV := $(VENV)/.dev-$(BUILT_ON)
BENCH := $(VENV)/.bench-$(BUILT_ON)
PEERS := $(VENV)/.peers-$(BUILT_ON)
DOCS := $(VENV)/.docs-$(BUILT_ON)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all durations test-peers test-wheel dist docs docs-look docs-serve fuzz bench setup lint format clean
.NOTPARALLEL: # one pip at a time in an environment

help: ## list the targets and the variables
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo; echo Variables:
	@sed -n 's/^#   \([A-Z]\)/  \1/p' Makefile

demo: $(DEMO) ## quantise a real model, and print a table and draw a picture of what it costs
	$(BIN)/veneer demo $(ARGS)

test: $(TEST) ## run some cases of each test, in minutes, without other libraries
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(DEV) ## install all libraries, and run the slow tests, in minutes
	$(BIN)/python -m pytest -n auto --dist worksteal --slow $(ARGS)

test-all: $(DEV) ## install all libraries, and run every case, in an hour
	$(BIN)/python -m pytest -n auto --dist worksteal --all --jaxtyping-packages=veneer,beartype.beartype $(ARGS)

durations: $(DEV) ## run the quick and the slow tests, and write tests/support/durations.json
	rm -rf .pytest_cache/programs
	$(BIN)/python -m pytest -n 2 --dist worksteal --record-durations $(ARGS)
	$(BIN)/python -m pytest -n 2 --dist worksteal --record-durations --slow $(ARGS)

test-peers: $(PEERS) ## run the suites of Quax, quaxed, unxt, Qwix's core, eformer and PyTensor on ours
	$(BIN)/python tests/peers/run.py -n auto --dist worksteal $(ARGS)

test-wheel: | $(CREATED) ## install the wheel with each extra in an empty environment, and run it there
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	$(BIN)/python tests/wheel/run.py --jax '$(JAX)' $(ARGS)

docs: $(DOCS) ## make the site, in build/html, with no warning and no link that leads nowhere
	$(BIN)/python docs/site/stage.py
	NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mkdocs build --quiet
	$(BIN)/python docs/site/check.py build/html

docs-look: docs ## make the site, and look at every page in a headless Chromium
	$(BIN)/python docs/site/check.py build/html --look

docs-serve: docs ## show the site at http://localhost:8000
	$(BIN)/python -m http.server --directory build/html 8000

dist: $(DEV) ## make the wheel and the source distribution of a release, in dist
	$(BIN)/python -m build

fuzz: $(DEV) ## compare random programs with dense arrays for two minutes, new ones each day
	cd tests && XLA_FLAGS=--xla_backend_optimization_level=0 $(abspath $(BIN))/python -W ignore \
		-m fuzz --programs 1000000 --seconds 120 --seed $$(date +%Y%m%d) $(ARGS)

bench: $(BENCH) ## time the benchmarks, and write the tables of docs/benchmarks.md, performance.md and numba.md
	$(BIN)/python benchmarks/report.py $(ARGS)

setup: $(DEV) ## make the environment to develop in

lint: $(DEV) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(DEV) ## format the code, and fix what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv and everything built or cached
	rm -rf $(VENV) build dist demo-output .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo >&2 \
		"veneer needs Python 3.11 or newer, and '$(PYTHON)' is not one: make $(MAKECMDGOALS) PYTHON=..."; \
		exit 1; }
	@echo "Creating the virtual environment $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(DEMO): pyproject.toml | $(CREATED)
	@echo "Installing veneer[demo] into $(VENV); a minute or two the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo]' '$(JAX)'
	@touch $@

$(TEST): pyproject.toml | $(CREATED)
	@echo "Installing veneer[test] into $(VENV); a minute the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]' '$(JAX)'
	@touch $@

$(DEV): pyproject.toml | $(CREATED)
	@echo "Installing veneer[dev] into $(VENV); a minute or two the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' '$(JAX)'
	@touch $(DEMO) $(TEST) $@ # what the demo needs is part of dev

$(BENCH): pyproject.toml | $(CREATED)
	@echo "Installing veneer[bench] into $(VENV); a minute or two the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]' '$(JAX)'
	@touch $(DEMO) $(TEST) $(DEV) $@ # what the demo and the tests need is part of it

$(DOCS): pyproject.toml | $(CREATED)
	@echo "Installing veneer[docs] into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]' '$(JAX)'
	@touch $@

$(PEERS): pyproject.toml | $(CREATED)
	@echo "Installing veneer[peers] into $(VENV); a minute or two the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[peers]' '$(JAX)'
	@touch $(DEMO) $(TEST) $(DEV) $@ # what the demo and the tests need is part of it
