# make demo   three synthetic hospitals, a table and a picture
# make test   formatting, types and all tests
# make coverage   the tests with their coverage, at least 90 %; half as long again
# make slow   what takes minutes: large networks, every variant of an export, every table of the papers
# make gpu    what only a GPU can show
# make hospitals   the deployment with real processes, on this machine: about half an hour
# make browser   the report in a real browser (Chromium), skipped where there is none
# make release   wheel and source distribution in dist/, installed elsewhere and tried there
# make docs   the documentation site, into build/site; any warning is an error
# All set up .venv on first use and start at once afterwards.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)

.DEFAULT_GOAL := help
.PHONY: help install demo test coverage slow gpu hospitals browser release docs check format bench clean

help:
	@sed -n 's/^# //p' Makefile
	@echo "make install | check | format | bench | clean"

install: $(VENV)/.installed

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "wardround needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	@echo "Installing wardround into $(VENV) (once, about a minute) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . && touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "Installing what the tests need ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]' && touch $@

demo: $(VENV)/.installed
	@$(BIN)/wardround demo

test: check
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

coverage: $(VENV)/.installed-test
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" --cov --cov-report=term:skip-covered --cov-fail-under=90

slow: $(VENV)/.installed-test
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m slow

gpu: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -m gpu

hospitals: $(VENV)/.installed-test
	@failed=""; for script in parity flare faults thin_link refusals survey attacks poison keys fuzz offline soak; do \
	  echo "$$script"; $(BIN)/python tests/deploy/real/$$script.py || failed="$$failed $$script"; done; \
	  test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

check: $(VENV)/.installed-test
	@$(BIN)/ruff format --check --quiet . || { echo "Run: make format"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy

format: $(VENV)/.installed-test
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

browser: $(VENV)/.installed-test
	@command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium) >/dev/null 2>&1 \
	  || echo "Chromium cannot be installed here: the browser tests will be skipped."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]' \
	  || echo "Playwright cannot be installed here: the browser tests will be skipped."
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs tests/browser

release: $(VENV)/.installed-test
	@$(BIN)/python tools/release.py

docs: $(VENV)/.installed
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@$(BIN)/python docs/make_site.py && echo "Open build/site/index.html"

bench: $(VENV)/.installed
	@$(BIN)/python benchmarks/engine_overhead.py
	@$(BIN)/python benchmarks/memory.py

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
