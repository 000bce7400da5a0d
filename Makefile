# make demo: watch FedHist against FedAvg on stale, skewed clients.   make test: linter, types, tests.
# make flower-demo: Flower's FedAvg and KAsync on a real network of processes; two minutes.   make docs: the site.
# make kernels: the kernels for GPUs, on a machine without one.
# make soak: what is random, for as long as you like: KILLS=300 kills at any moment, FUZZ=20000 damaged files of each kind.
PYTHON ?= python3
BIN := .venv/bin
CORE := .venv/.core
FLOWER := .venv/.flower
READY := .venv/.ready
# PIP_CONSTRAINT, unlike -c, also reaches what is installed to build the package.
PIP := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --disable-pip-version-check
# PyTorch for CPUs has an index of its own; the usual one has several GB for NVIDIA's GPUs with it.
CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: demo flower-demo test kernels soak lint format docs wheel-lowest wheel-newest clean

demo: $(CORE)
	@echo "FedAvg and FedHist, three seeds each, on 100 clients with skewed digits (examples/demo.toml)."
	@$(BIN)/fedhist compare --config examples/demo.toml --out demo/$$(date +%Y%m%d-%H%M%S)

flower-demo: $(FLOWER)
	$(BIN)/python examples/flower/demo.py

# The tests with real processes mostly wait, so they run beside the others, which share two cores.
NETWORK := tests/flower/test_network.py tests/flower/test_recipes.py
test: lint
	$(BIN)/python -m pytest -q $(NETWORK) >.network.log 2>&1 & network=$$!; \
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup $(NETWORK:%=--ignore=%); others=$$?; \
	wait $$network; network=$$?; cat .network.log; rm -f .network.log; exit $$((others + network))

# Triton, 190 MB, compiles kernels without a GPU, and its interpreter runs them: what they compute is checked, not how fast.
kernels: $(READY)
	@$(PIP) --quiet triton
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 tests/clients/test_compiled.py
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 tests/clients/test_kernels.py

# In memory where there is such a folder: each kill and each damaged file is a few writes that wait for the disk.
KILLS ?= 300
FUZZ ?= 20000
SOAK := $(shell mktemp -u -d --tmpdir=$$([ -d /dev/shm ] && echo /dev/shm || echo /tmp) fedhist-soak-XXXX)
soak: $(READY)
	FEDHIST_KILLS=$(KILLS) $(BIN)/python -m pytest -q -n 2 --basetemp=$(SOAK) tests/command/test_kill.py; kills=$$?; \
	FEDHIST_FUZZ=$(FUZZ) $(BIN)/python -m pytest -q -n 2 --basetemp=$(SOAK) tests/fuzz; files=$$?; \
	rm -rf $(SOAK); exit $$((kills + files))

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/sphinx-build -q -W --keep-going docs build/site
	@echo "The site is in build/site/index.html."

# Interrupted on the way, each of these begins anew, with what pip has downloaded by then. On a terminal pip shows bars.
$(CORE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedhist needs Python 3.11 or newer")'
	@echo "1 of 3: making a virtual environment in .venv."
	@$(PYTHON) -m venv .venv
	@if command -v nvidia-smi >/dev/null; then \
	    echo "2 of 3: installing PyTorch with what it needs for the GPU here, several GB."; $(PIP) torch; \
	elif $(BIN)/python -c "import urllib.request as web; web.urlopen('$(CPU_INDEX)/torch/', timeout=15)" 2>/dev/null; then \
	    echo "2 of 3: installing PyTorch for CPUs, about 200 MB."; $(PIP) --index-url $(CPU_INDEX) torch; \
	else \
	    echo "2 of 3: installing PyTorch from pip's usual index, since $(CPU_INDEX) cannot be reached;"; \
	    echo "from PyPI it may come with several GB for GPUs."; $(PIP) torch; \
	fi
	@echo "3 of 3: installing fedhist with what a simulation and its figures need, about 100 MB."
	@$(PIP) -e .
	@touch $@

$(FLOWER): $(CORE)
	@echo "Installing Flower as well, about 60 MB."
	@$(PIP) -e '.[flower]'
	@touch $@

$(READY): $(CORE)
	@echo "Installing what tests and documents need as well, some 100 packages; this takes a few minutes."
	@$(PIP) --quiet -e '.[dev]'
	@touch $@

# The wheel alone with the lowest, or the newest, versions of what it needs: make wheel-lowest INSTEAD=torch==2.13.0
wheel-lowest wheel-newest:
	$(PYTHON) .ci/wheel.py $(@:wheel-%=%) $(INSTEAD)

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache
