# make demo          train, kill, resume, compare            (DATA=file: on a Criteo file)
# make test          every check that CI runs                (PYTEST_FLAGS="-k name": a part of the tests)
# make kill-loop     20 kills and resumes on a Criteo file   (DATA=file)
# PYTHON=…           the interpreter to set up with; PIP_FLAGS=… are handed to pip install

PYTHON ?= python3.11
PIP_FLAGS ?=
PYTEST_FLAGS ?=
VENV := .venv
RUN := $(VENV)/bin/python
READY_TO_RUN := $(VENV)/.ready-to-run
READY_TO_TEST := $(VENV)/.ready-to-test
INSTALL := $(RUN) -m pip install -qq --disable-pip-version-check $(PIP_FLAGS)

.DEFAULT_GOAL := test
.DELETE_ON_ERROR:
.PHONY: demo test lint kill-loop clean

demo: $(READY_TO_RUN)
	@$(RUN) examples/demo.py $(if $(DATA),--data "$(DATA)")

test: lint
	OMP_NUM_THREADS=1 $(RUN) -m pytest $(PYTEST_FLAGS)

lint: $(READY_TO_TEST)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

kill-loop: $(READY_TO_RUN)
	@test -n "$(DATA)" || { echo "give a Criteo file: make kill-loop DATA=train.txt" >&2; exit 2; }
	@$(RUN) tests/e2e/kill_loop.py --data "$(DATA)"

clean:
	rm -rf $(VENV)

$(READY_TO_RUN): pyproject.toml requirements/run.txt requirements/no-deps.txt
	@echo "setting up $(VENV) (once; some minutes)"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -r requirements/run.txt
	$(INSTALL) --no-deps -r requirements/no-deps.txt
	$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

$(READY_TO_TEST): $(READY_TO_RUN) requirements/test.txt
	$(INSTALL) -r requirements/test.txt
	@touch $@
