# Every task of the project. `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PYTEST_ARGS ?=

export PYSPARK_PYTHON := $(CURDIR)/$(BIN)/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types imports docs check bench results scorecard soak crash-matrix ddl-fuzz spark-versions lock format clean

help: ## list the tasks
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  \033[36mmake %-14s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv with everything for running and developing

$(STAMP): pyproject.toml constraints.txt scripts/make_venv.sh hatch_build.py $(shell find src -name "*.[ch]")
	@PYTHON=$(PYTHON) VENV=$(VENV) sh scripts/make_venv.sh
	@touch $@

demo: $(STAMP) ## run the main job on this machine, nothing to set up
	$(BIN)/headwater demo

test: $(STAMP) ## run all tests (makes its own virtual environment)
	@sh scripts/install_servers.sh
	@PIP=$(BIN)/pip sh scripts/install_oldest_spark.sh
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: $(STAMP) ## ruff: lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

imports: $(STAMP) ## the layers of the design, as import contracts
	$(BIN)/lint-imports

docs: $(STAMP) ## build the documentation into site/, without network
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet

check: lint types imports docs ## everything that CI checks beside the tests

BENCHMARKS := $(notdir $(basename $(wildcard benchmarks/[a-z]*.py)))

bench: $(STAMP) ## run all benchmarks and print their tables: BENCH="mysql sinks" for some, BENCH_ARGS=--quick
	@sh scripts/install_servers.sh
	@failed=0; for name in $(or $(BENCH),$(BENCHMARKS)); do \
	  echo "== $$name"; $(BIN)/python benchmarks/$$name.py $(BENCH_ARGS) || failed=1; done; exit $$failed

results: $(STAMP) ## run all benchmarks, or BENCH="mysql sinks", and write their tables to benchmarks/RESULTS.md
	@sh scripts/install_servers.sh
	$(BIN)/python benchmarks/_results.py $(BENCH) $(BENCH_ARGS)

scorecard: $(STAMP) ## start, latency, idle, memory, lines, beside a version before: SCORECARD_ARGS="--before FOLDER"
	@sh scripts/install_servers.sh
	$(BIN)/python benchmarks/_scorecard.py $(SCORECARD_ARGS)

soak: $(STAMP) ## long crash rounds: minutes, not part of `make test`
	@sh scripts/install_servers.sh
	HEADWATER_SOAK=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

crash-matrix: $(STAMP) ## kill every sink at every durable step, print the table, write docs/crash_matrix.md
	@sh scripts/install_servers.sh
	PYTHONPATH=. $(BIN)/python scripts/crash_matrix.py $(MATRIX_ARGS)

ddl-fuzz: $(STAMP) ## random schema changes on real databases, every value compared: SEED=1 ROUNDS=60, FUZZ_ARGS=--help for more
	@sh scripts/install_servers.sh
	PYTHONPATH=. $(BIN)/python scripts/ddl_fuzz.py --seed $(or $(SEED),1) --rounds $(or $(ROUNDS),60) $(FUZZ_ARGS)

spark-versions: $(STAMP) ## run the demo on several versions of PySpark (gigabytes the first time): SPARK_VERSIONS="3.5.7 4.0.5"
	$(BIN)/python scripts/spark_versions.py

lock: ## resolve the dependencies anew into constraints.txt
	$(PYTHON) -m venv $(VENV)-lock && $(VENV)-lock/bin/pip install -q uv
	$(VENV)-lock/bin/uv pip compile --quiet --all-extras --group dev --python-version 3.11 --no-header --no-annotate \
	  --no-emit-package headwater --upgrade -o constraints.txt pyproject.toml
	rm -rf $(VENV)-lock

format: $(STAMP) ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what the tasks above made
	rm -rf $(VENV) .cache site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
