VENV ?= .venv
PYTHON ?= python3
STAMP := $(VENV)/.holdover-installed
BIN := $(VENV)/bin

.PHONY: setup demo test test-slow lint clean

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

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
