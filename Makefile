# Everything a fresh Linux machine with Python 3.11+ needs: `make demo`, `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test setup lint wheel-check clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,examples,deepspeed,accelerate,lightning,notebooks]'
	touch .venv/.ready

demo: setup
	$(BIN)/advise examples/gpt2.py

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

wheel-check: setup
	tests/packaging/check_wheel.sh

clean:
	rm -rf .venv build dist *.egg-info
