# Everything a fresh Linux machine with Python 3.11+ needs: `make demo`, `make test`.
PYTHON ?= python3
BIN := .venv/bin
# most modules of the libraries are never imported: those that are get compiled then
INSTALL := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt

.PHONY: demo test torchtitan-check setup lint wheel-check clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) -e '.[dev,examples,deepspeed,accelerate,lightning,notebooks]'
	touch .venv/.ready

demo: setup
	$(BIN)/advise examples/gpt2.py

.venv/.compiled: .venv/.ready
	$(BIN)/python tests/tools/compile_imports.py
	touch .venv/.compiled

# two workers, each takes whole files: most start processes that wait for one another; PyTorch's own threads would only be in the way
test: .venv/.compiled
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# torchtitan brings a gigabyte that every process of the suite would look at: it gets an environment of its own on top of .venv
torchtitan-check: setup .venv/torchtitan/.ready
	OMP_NUM_THREADS=1 .venv/torchtitan/bin/python -m pytest tests/unit/engines/test_torchtitan.py -k "installed_version or reads_the_files"

.venv/torchtitan/.ready: .venv/.ready
	$(BIN)/python -m venv .venv/torchtitan
	$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" > below.pth
	mv below.pth .venv/torchtitan/lib/python*/site-packages/
	.venv/torchtitan/bin/python -m pip install --quiet --no-compile -c constraints.txt -e '.[torchtitan]'
	touch .venv/torchtitan/.ready

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

wheel-check: setup
	tests/packaging/check_wheel.sh

clean:
	rm -rf .venv build dist *.egg-info
