# Two commands do everything on a fresh machine: `make demo` and `make test`. Every target may be repeated.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
# extras of pyproject.toml that `make test` installs; `test,browser` adds the browser tests of the panels
EXTRAS ?= test
PARAMS ?= fast
PYTEST_OPTIONS ?=
LAB_OPTIONS ?=

# keep the tree's root off sys.path: its folder `kernels` would hide a module transformers looks for
export PYTHONSAFEPATH := 1

VENV := .venv
PY := $(VENV)/bin/python
DSPEC := $(PY) -m dspec_lab.cli.main
comma := ,
RUN_STAMP := $(VENV)/.ready-run
TEST_STAMP := $(VENV)/.ready-$(subst $(comma),-,$(EXTRAS))
BUSY := $(VENV).installing
SETUP_INPUTS := pyproject.toml constraints.txt
PIP_INSTALL := $(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt

.PHONY: help setup setup-test model demo test lint lab notebooks figures clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name what; do printf '  make %-11s %s\n' "$$name" "$$what"; done

setup: $(RUN_STAMP)  ## make .venv and install the program (skipped when nothing changed)

setup-test: $(TEST_STAMP)  ## the same, with what the tests need

model: $(RUN_STAMP)  ## fetch and check the default model
	@echo "== model"
	@$(DSPEC) fetch smollm2

demo: model  ## set up, fetch the model, compare plain decoding with every drafter
	@echo "== demo"
	@$(DSPEC) demo

test: $(TEST_STAMP) model lint  ## set up, fetch the model, run every test, notebooks included
	@echo "== tests"
	@$(PY) -m pytest $(PYTEST_OPTIONS)

lint: $(TEST_STAMP)  ## check the code with ruff
	@echo "== ruff"
	@$(PY) -m ruff check .

lab: model  ## open JupyterLab on notebook 00 (this machine only, with a token)
	@book=$$(cd notebooks 2>/dev/null && ls 00_*.ipynb 2>/dev/null | head -1); \
	if [ -z "$$book" ]; then echo "make lab: there is no notebooks/00_*.ipynb" >&2; exit 1; fi; \
	echo "== JupyterLab on notebooks/$$book; stop it with Ctrl-C"; \
	cd notebooks; \
	exec ../$(PY) -m jupyterlab --ServerApp.ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_OPTIONS) "$$book"

notebooks: model  ## run all notebooks with papermill into runs/notebooks (PARAMS=full for the long runs)
	@echo "== notebooks"
	@$(DSPEC) notebooks run --params $(PARAMS)

figures: model  ## run all notebooks and write the figures they show to figures/
	@echo "== figures"
	@$(DSPEC) notebooks run --params $(PARAMS) --figures figures

clean:  ## remove what runs and tests left in the tree (not .venv, not the model cache)
	@echo "== removing runs/, build outputs and tool caches"
	@rm -rf runs build dist dspec_lab.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -path ./.git -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -print0 | xargs -0 -r rm -rf

# $(call install,EXTRAS): an install that was cut short leaves $(BUSY) behind; the next one mends what it left.
# torch goes first, alone: the pinned build, whatever else asks for.
define install
	@if [ -e $(BUSY) ] && kill -0 "$$(cat $(BUSY))" 2>/dev/null; then \
	  echo "make: process $$(cat $(BUSY)) is installing into $(VENV) already" >&2; exit 1; \
	fi; \
	$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit(f"make: Python 3.11 or newer is needed, $(PYTHON) is {v}; name another with PYTHON=")'; \
	if [ -e $(BUSY) ]; then echo "== the last set-up was cut short"; fi; \
	if ! $(PY) -m pip --version >/dev/null 2>&1; then echo "== making $(VENV)"; rm -rf $(VENV); echo $$$$ > $(BUSY); $(PYTHON) -m venv $(VENV); \
	elif [ -e $(BUSY) ]; then $(PY) .ci/mend_environment.py; fi; \
	echo $$$$ > $(BUSY); rm -f $(VENV)/.ready-*; \
	echo "== installing torch (pinned in constraints.txt)"; \
	$(PIP_INSTALL) torch; \
	echo "== installing dspec_lab$(1) (a few minutes the first time)"; \
	$(PIP_INSTALL) -e '.$(1)'; \
	$(PY) -m pip check --disable-pip-version-check; \
	rm -f $(BUSY); \
	touch $(RUN_STAMP) $@
endef

$(RUN_STAMP): $(SETUP_INPUTS)
	$(call install,)

$(TEST_STAMP): $(SETUP_INPUTS) | $(RUN_STAMP)
	$(call install,[$(EXTRAS)])
