# `make demo` and `make test` need nothing but Python 3.10 to 3.13 and make: they set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint types clean

demo: $(VENV)/.installed
	$(BIN)/vitrail train digits --epochs 30 --name demo --overwrite

test: lint types
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PINS) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install $(PINS) --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
