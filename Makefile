# `make demo`, `make test` and `make bench` need nothing but Python 3.10 to 3.13 and make: they set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test faults fuzz bench lint types chromium echarts clean

demo: $(VENV)/.installed
	$(BIN)/vitrail train digits --epochs 30 --name demo --overwrite

test: lint types chromium
	$(BIN)/python -m pytest -n 2 --dist worksteal

# A kill at every change of the file system and a failing disk at every write; the tests try a few of them.
faults: $(VENV)/.installed-dev
	VITRAIL_FAULTS=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/faults/test_faults.py

# Damaged files of every format and random command lines, for ten minutes; the tests try some hundred.
fuzz: $(VENV)/.installed-dev
	$(BIN)/python tests/faults/fuzz.py

# At most 20 minutes, on an otherwise idle machine: docs/speed.md
bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/peers.py draw

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

$(VENV)/.installed-bench: $(VENV)/.installed
	$(BIN)/python -m pip install $(PINS) --editable ".[bench]"
	touch $@

# Reports are tested in a real browser. Where it is missing and cannot be installed, those tests are skipped.
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=30 update \
	  && DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install chromium >/dev/null; } \
	|| echo "There is no Chromium, and it cannot be installed here: the tests that need it are skipped."

# Renews the plotting library inside reports: change the version, run `make echarts`, look at a report.
ECHARTS := 6.1.0
echarts:
	cd vitrail/report/assets/echarts && file=$$(npm pack --silent echarts@$(ECHARTS)) \
	&& tar -xzf $$file --transform 's|.*/||' \
	  package/dist/echarts.min.js package/LICENSE package/NOTICE package/licenses/LICENSE-d3 && rm $$file

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
