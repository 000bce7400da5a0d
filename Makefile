# make demo: watch FedHist against FedAvg on stale, skewed clients.   make test: linter, types, tests.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint format clean

demo: $(READY)
	$(BIN)/fedhist compare --config examples/demo.toml --out demo/$$(date +%Y%m%d-%H%M%S)

test: lint
	$(BIN)/python -m pytest -q

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# PIP_CONSTRAINT, unlike -c, also reaches what is installed to build the package.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedhist needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache
