VENV ?= .venv
PYTHON ?= python3
STAMP := $(VENV)/.holdover-installed
BIN := $(VENV)/bin

.PHONY: setup demo test test-slow lint simulate mutants coverage clean

setup: $(STAMP)

# Installed anew only when what is installed has changed.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/holdover demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)

# Seeds that nobody has chosen, to break the laws; `make simulate ARGS="--seeds 0:100000"` for a long run.
simulate: $(STAMP)
	$(BIN)/python -m tests.simulation $(or $(ARGS),--fresh 500)

# Planted faults that the tests must catch.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutation $(ARGS)

# Branches of holdover/state that the tests run.
coverage: $(STAMP)
	$(BIN)/python -m pytest tests/state tests/store tests/engine tests/simulation --cov --cov-report=term-missing --cov-fail-under=95

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
