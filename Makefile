# make demo          train, kill, resume, compare            (DATA=file: on a Criteo file)
# make test          every check that CI runs                (PYTEST_FLAGS="-k name": a part of the tests)
# make test-long     the schedules and the state machine, 50 times as long as in make test (SEARCH=n: n times),
#                    then kills of ranks, ten times as many (KILLS=n)
# make crash-loop    30,000 deaths over every store, then every kind of damage    (DEATHS=n, FIRST_SEED=n; TALLY=file goes on)
# make fuzz          atheris over every parser of the format                      (SECONDS=n)
# make bench         the benchmark of docs/benchmarks.md on this machine, some 10 minutes (BENCH_FLAGS="--rows 200000 ...")
# make bench-full    all of docs/benchmarks.md, some 40 minutes    (16 GB of free memory for 50M rows, else fewer)
# make export-check  exports, loaded by torch, safetensors and DCP, predict the same on a Criteo file    (DATA=file)
# make kill-loop     20 kills and resumes on a Criteo file   (DATA=file)
# PYTHON=…           the interpreter to set up with; PIP_FLAGS=… are handed to pip install

PYTHON ?= python3.11
PIP_FLAGS ?=
PYTEST_FLAGS ?=
WORKERS ?= 2
SEARCH ?= 50
KILLS ?= 10
DEATHS ?= 30000
FIRST_SEED ?= 0
SECONDS ?= 300
BENCH_FLAGS ?=
BENCH_FULL_FLAGS ?=
BENCH_NAME ?= save
VENV := .venv
RUN := $(VENV)/bin/python
READY_TO_RUN := $(VENV)/.ready-to-run
READY_TO_TEST := $(VENV)/.ready-to-test
INSTALL := $(RUN) -m pip install -qq --disable-pip-version-check $(PIP_FLAGS)

.DEFAULT_GOAL := test
.DELETE_ON_ERROR:
.PHONY: demo test test-long crash-loop fuzz lint bench bench-full kill-loop export-check clean

demo: $(READY_TO_RUN)
	@$(RUN) examples/demo.py $(if $(DATA),--data "$(DATA)")

test: lint
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS)

test-long: $(READY_TO_TEST)
	OMP_NUM_THREADS=1 ICKPT_SEARCH=$(SEARCH) $(RUN) -m pytest -n $(WORKERS) -o faulthandler_timeout=3600 tests/stateful $(PYTEST_FLAGS)
	OMP_NUM_THREADS=1 ICKPT_SEARCH=$(KILLS) $(RUN) -m pytest -n $(WORKERS) --dist loadfile -o faulthandler_timeout=3600 \
		tests/distributed/test_shardings.py tests/distributed/test_rank_counts.py $(PYTEST_FLAGS)

crash-loop: $(READY_TO_TEST)
	OMP_NUM_THREADS=1 $(RUN) tests/crash/crash_loop.py --deaths $(DEATHS) --first-seed $(FIRST_SEED) --workers $(WORKERS) \
		$(if $(TALLY),--tally "$(TALLY)")
	OMP_NUM_THREADS=1 ICKPT_SEARCH=$(SEARCH) $(RUN) -m pytest -s -o faulthandler_timeout=3600 tests/crash/test_damage_over_stores.py

fuzz: $(READY_TO_TEST)
	$(INSTALL) atheris==3.0.0
	$(RUN) tests/fuzz/fuzz_parsers.py -max_total_time=$(SECONDS) -max_len=4096 .fuzz

bench: $(READY_TO_TEST)
	$(RUN) benchmarks/save.py --store "$$(mktemp -d)" --out benchmarks/results/$(BENCH_NAME).json \
		--budget 40 $(BENCH_FLAGS)
	$(RUN) benchmarks/report.py

bench-full: bench
	$(RUN) benchmarks/matrix.py --store "$$(mktemp -d)" $(BENCH_FULL_FLAGS)
	$(RUN) benchmarks/resume.py --store "$$(mktemp -d)"
	$(RUN) benchmarks/report.py

lint: $(READY_TO_TEST)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

kill-loop: $(READY_TO_RUN)
	@test -n "$(DATA)" || { echo "give a Criteo file: make kill-loop DATA=train.txt" >&2; exit 2; }
	@$(RUN) tests/e2e/kill_loop.py --data "$(DATA)"

export-check: $(READY_TO_TEST)
	@test -n "$(DATA)" || { echo "give a Criteo file: make export-check DATA=train.txt" >&2; exit 2; }
	@$(RUN) tests/e2e/export_predictions.py --data "$(DATA)"

clean:
	rm -rf $(VENV)

$(READY_TO_RUN): pyproject.toml incremental_ckpt/codecs/_span.c requirements/run.txt requirements/no-deps.txt
	@echo "setting up $(VENV) (once; some minutes)"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -r requirements/run.txt
	$(INSTALL) --no-deps -r requirements/no-deps.txt
	$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

$(READY_TO_TEST): $(READY_TO_RUN) requirements/test.txt
	$(INSTALL) -r requirements/test.txt
	@touch $@
