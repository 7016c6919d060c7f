# Everything a fresh clone needs, with only Python and make.
#
#   PYTHON       the interpreter                         make test PYTHON=python3.13
#   VENV         the folder of the virtual environment   make test VENV=/tmp/veneer
#   JAX          the version of JAX                      make test JAX=jax==0.10.2
#   CONSTRAINTS  a file with versions of packages        make test CONSTRAINTS=.ci/constraints-oldest.txt
#   ARGS         arguments for the command that is run   make test ARGS='-k quant'
#   TAG          the tag of a release                    make release-notes TAG=v0.1.0
#   QWIX         a checkout of Qwix's main branch        make test-peers QWIX=../qwix

PYTHON ?= python3
VENV ?= .venv
JAX ?= jax
ARGS ?=
CONSTRAINTS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
comma := ,

# An environment is good for one interpreter, one choice of versions and one place: the stamps carry
# a checksum of these in their names, so that a change of any is a stamp not yet made.
BUILT_ON := $(shell { $(PYTHON) -c 'import sys; print(sys.base_prefix, sys.version)'; \
	echo '$(JAX)' '$(CONSTRAINTS)' '$(CURDIR)'; } 2>/dev/null | cksum | cut -d ' ' -f 1)
CREATED := $(VENV)/.created-$(BUILT_ON)
DEMO := $(VENV)/.demo-$(BUILT_ON)
TEST := $(VENV)/.test-$(BUILT_ON)
DEV := $(VENV)/.dev-$(BUILT_ON)
BENCH := $(VENV)/.bench-$(BUILT_ON)
PEERS := $(VENV)/.peers-$(BUILT_ON)
DOCS := $(VENV)/.docs-$(BUILT_ON)
BUILD := $(VENV)/.build-$(BUILT_ON)
WORKFLOWS := $(VENV)/.workflows-$(BUILT_ON)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all test-nightly durations test-peers test-wheel dist release-notes docs docs-look docs-serve fuzz bench setup lint lint-workflows lock format clean
.NOTPARALLEL: # one pip at a time in an environment

help: ## list the targets and the variables
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile
	@echo; echo Variables:
	@sed -n 's/^#   \([A-Z]\)/  \1/p' Makefile

demo: $(DEMO) ## quantize a real model, and show its size, error and speed in a table and a picture
	$(BIN)/veneer demo $(ARGS)

test: $(TEST) ## run some cases of each test, in minutes, without other libraries
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(DEV) ## install all libraries, and run the slow tests, in minutes
	$(BIN)/python -m pytest -n auto --dist worksteal --slow $(ARGS)

test-all: $(DEV) ## install all libraries, and run every case, in an hour
	$(BIN)/python -m pytest -n auto --dist worksteal --all --jaxtyping-packages=veneer,beartype.beartype $(ARGS)

test-nightly: ## run the tests on the nightly build of JAX, in a separate environment
	$(MAKE) setup VENV=$(VENV)-nightly
	$(VENV)-nightly/bin/python -m pip install --quiet --upgrade --pre jax jaxlib \
		--index-url https://us-python.pkg.dev/ml-oss-artifacts-published/jax/simple/
	$(VENV)-nightly/bin/python -c 'import jax; jax.print_environment_info()'
	$(VENV)-nightly/bin/python -m pytest $(ARGS)

durations: $(DEV) ## run the quick and the slow tests, and write tests/support/durations.json
	rm -rf .pytest_cache/programs
	$(BIN)/python -m pytest -n 2 --dist worksteal --record-durations $(ARGS)
	$(BIN)/python -m pytest -n 2 --dist worksteal --record-durations --slow $(ARGS)

test-peers: $(PEERS) ## run the tests of Quax, quaxed, unxt, Qwix, eformer and PyTensor on Veneer
	$(BIN)/python tests/peers/run.py -n auto --dist worksteal $(ARGS)

test-wheel: $(BUILD) ## install the wheel with each extra in an empty environment, and try it
	$(BIN)/python tests/wheel/run.py --jax '$(JAX)' $(ARGS)

docs: $(DOCS) ## make the site in build/html, and check its links
	$(BIN)/python docs/site/stage.py
	NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mkdocs build --quiet
	$(BIN)/python docs/site/check.py build/html

docs-look: docs ## make the site, and check every page in a headless Chromium
	$(BIN)/python docs/site/check.py build/html --look

docs-serve: docs ## show the site at http://localhost:8000
	$(BIN)/python -m http.server --directory build/html 8000

dist: $(BUILD) ## build the wheel and the source distribution in dist
	$(BIN)/python -m build

release-notes: ## check TAG, and write its release notes to build/release-notes.md
	@mkdir -p build
	$(PYTHON) .ci/release.py '$(TAG)' build/release-notes.md

fuzz: $(DEV) ## compare random programs with dense arrays for two minutes, with a new seed each day
	cd tests && XLA_FLAGS=--xla_backend_optimization_level=0 "$(abspath $(BIN))/python" -W ignore \
		-m fuzz --programs 1000000 --seconds 120 --seed $$(date +%Y%m%d) $(ARGS)

bench: $(BENCH) ## run the benchmarks, and write the tables of docs/benchmarks.md, performance.md and numba.md
	$(BIN)/python benchmarks/report.py $(ARGS)

setup: $(DEV) ## install everything that a developer needs

lint: $(DEV) ## check style, types, and that the workflows are secure
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/zizmor --offline --quiet .github

lint-workflows: $(WORKFLOWS) ## check the syntax of the workflows (downloads actionlint from GitHub)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/actionlint .github/workflows/*.yml

lock: | $(CREATED) ## update .ci/constraints-oldest.txt (PYTHON must be the oldest that we support)
	$(BIN)/python .ci/lock.py

format: $(DEV) ## format the code, and fix what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the virtual environment, and everything that was built or cached
	rm -rf $(VENV) build dist demo-output .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo >&2 \
		"veneer needs Python 3.11 or newer, and '$(PYTHON)' is not one: make $(MAKECMDGOALS) PYTHON=..."; \
		exit 1; }
	@echo "Creating the virtual environment $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install 'pip>=25.1' # the first version with --group
	@touch $@

# The extras $(1) of veneer, with the options $(2).
define INSTALL
@echo "Installing veneer$(1) $(2) into $(VENV); a minute or two the first time"
@$(PIP) install $(addprefix --constraint ,$(CONSTRAINTS)) --editable '.$(1)' $(2) '$(JAX)'
endef

$(DEMO): pyproject.toml $(CONSTRAINTS) | $(CREATED)
	$(call INSTALL,[demo])
	@touch $@

$(TEST): pyproject.toml $(CONSTRAINTS) | $(CREATED)
	$(call INSTALL,[cli$(comma)numba],--group test)
	@touch $@

$(DEV): pyproject.toml $(CONSTRAINTS) | $(CREATED)
	$(call INSTALL,[demo],--group dev)
	@touch $(DEMO) $(TEST) $@ # what the demo needs is part of dev

$(BENCH): pyproject.toml $(CONSTRAINTS) | $(CREATED)
	$(call INSTALL,[demo],--group bench)
	@touch $(DEMO) $(TEST) $(DEV) $@ # what the demo and the tests need is part of it

$(DOCS): pyproject.toml $(CONSTRAINTS) | $(CREATED)
	$(call INSTALL,,--group docs)
	@touch $@

$(PEERS): pyproject.toml $(CONSTRAINTS) | $(CREATED)
	$(call INSTALL,[demo],--group peers)
	@touch $(DEMO) $(TEST) $(DEV) $@ # what the demo and the tests need is part of it

# The tools below do not import veneer.
$(BUILD): pyproject.toml $(CONSTRAINTS) | $(CREATED)
	@$(PIP) install $(addprefix --constraint ,$(CONSTRAINTS)) --group build
	@touch $@

$(WORKFLOWS): pyproject.toml $(CONSTRAINTS) | $(CREATED)
	@$(PIP) install $(addprefix --constraint ,$(CONSTRAINTS)) --group workflows
	@touch $@
