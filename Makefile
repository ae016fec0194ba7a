VENV ?= .venv
PYTHON ?= python3
STAMP := $(VENV)/.holdover-installed
BIN := $(VENV)/bin

.PHONY: setup demo test test-slow azurite lint simulate mutants coverage clean

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

test-slow: $(STAMP) azurite
	$(BIN)/python -m pytest -m slow $(ARGS)

# The server that az:// is tested with; without npm that test is left out.
AZURITE := $(VENV)/azurite/node_modules/azurite/dist/src/blob/main.js
azurite: $(STAMP)
	test -e $(AZURITE) || ! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite azurite@3.35.0

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
