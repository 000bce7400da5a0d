# make demo: watch FedHist against FedAvg on stale, skewed clients.   make test: linter, types, tests.
# make flower-demo: the same on a real network of processes, one slow and one dying.   make docs: the site.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo flower-demo test lint format docs clean

demo: $(READY)
	$(BIN)/fedhist compare --config examples/demo.toml --out demo/$$(date +%Y%m%d-%H%M%S)

flower-demo: $(READY)
	$(BIN)/python examples/flower/demo.py

# The tests with real processes mostly wait, so they run beside the others, which share two cores.
NETWORK := tests/flower/test_network.py
test: lint
	$(BIN)/python -m pytest -q $(NETWORK) >.network.log 2>&1 & network=$$!; \
	$(BIN)/python -m pytest -q -n 2 --ignore=$(NETWORK); others=$$?; \
	wait $$network; network=$$?; cat .network.log; rm -f .network.log; exit $$((others + network))

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site is in build/site/index.html."

# PIP_CONSTRAINT, unlike -c, also reaches what is installed to build the package.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedhist needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache
