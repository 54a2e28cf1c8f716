# make demo   train LeNet on four unequal workers      make test    the whole suite
# make check  ruff, mypy, import-linter                make clean   remove .venv and caches
PYTHON ?= python3
BIN := .venv/bin
# Many tests wait rather than compute, so there are more processes than cores on a small machine.
TEST_PROCESSES ?= 4

.PHONY: demo test check lint types imports install dev clean

demo: install
	$(BIN)/echelon train --model lenet --data digits --workers 4 --epochs 8 \
	    --speed 1,0.5,0.5,0.25 --shares by-speed --name demo

test: dev
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES)

check: lint types imports

lint: dev
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples

types: dev
	$(BIN)/mypy

imports: dev
	$(BIN)/lint-imports

install: .venv/installed
dev: .venv/installed-dev

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build src/*.egg-info
