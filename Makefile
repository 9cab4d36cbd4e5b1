# The set-up commands:
#   make demo   a real training job: 4 ranks, two emulated vendors
#   make test   linters, type checker and the whole test suite
#   make test WITH_TORCH=torch   the same, with PyTorch (gigabytes) and the tests of its backend, which are skipped otherwise
# All create .venv if needed. PYTHON=/path/to/python3 selects the interpreter. A CPU-only PyTorch is 200 MB:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test WITH_TORCH=torch==2.13.0+cpu

SHELL := /bin/bash
.DEFAULT_GOAL := help
PY := .venv/bin/python
export PYTHON WITH_TORCH

# Containers run as root and laptops have few cores; Open MPI objects to either unless told (5.x's and 4.x's spelling).
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe ?= 1

# Several ranks share a core: threads inside numpy would only slow them down.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test venv ranks jobs torch devices front hosts clusters losses lint types unit plans exhaustive suites sanitize churn docs clean

help:
	@sed -n 's/^#   //p' Makefile

demo:
	@.ci/venv demo
	UCCH_EMULATE=nvidia:2,amd:2 .venv/bin/mpirun -np 4 $(PY) examples/train_digits.py --check

test: venv
	@.ci/ungrouped $(PY) .ci/lanes.py devices torch hosts ranks jobs unit clusters losses plans types lint

venv:
	@.ci/venv test

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	find cffi_build examples tests ucc_hetero \( -name '*.[ch]' -o -name '*.cuh' \) -not -name '_native*' -print0 | xargs -0 -r .venv/bin/clang-format --dry-run -Werror
	$(PY) -m codespell_lib
	.venv/bin/hadolint containers/*.Dockerfile

# benchmarks/ and mpi_launch/ are installed as ucc_hetero.bench and ucc_hetero.launch: mypy sees them in those places.
types: venv
	@rm -rf build/types && mkdir -p build/types
	@tar -c --exclude=__pycache__ ucc_hetero tools _ucc_hetero_autoload.py | tar -x -C build/types
	@for pair in benchmarks:bench mpi_launch:launch; do from=$${pair%:*} to=build/types/ucc_hetero/$${pair#*:}; \
	    mkdir -p $$to && tar -c --exclude=__pycache__ --exclude=results -C $$from . | tar -x -C $$to; done
	cd build/types && ../../$(PY) -m mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p ucc_hetero
	cd build/types && MYPYPATH=. ../../$(PY) -m mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache tools/*.py

# Lanes: tests of single processes, plans, devices and the native engine, several hosts, torch, and ranks of one host.
# front: a fresh clone; README's and the first page's commands, installed in place and as a wheel, Open MPI and MPICH.
unit plans devices hosts clusters losses front torch ranks jobs: venv
	@$(PY) .ci/lanes.py $@

# Every kind of call with every algorithm on every layout of ranks; hours on a laptop. SHARD=3/8: the third of eight parts.
SHARD ?= 1/1
exhaustive: venv
	UCCH_TEST_FULL=1 UCCH_TEST_SHARD=$(SHARD) $(PY) -m pytest tests/mpi/test_collectives.py -s --timeout 7200

# The engine's tests and those of all calls on host memory under gcc's AddressSanitizer and UndefinedBehaviorSanitizer; those
# of the network threads under its ThreadSanitizer.
sanitize: venv
	$(PY) tests/sanitize/run.py
	$(PY) tests/sanitize/run.py --threads

# Kills and restarts replicas for eight hours, and compares them bit for bit; make churn FOR=600 for ten minutes.
churn: venv
	$(PY) -m tests.churn --seconds $(or $(FOR),28800)

# Other projects' test suites through this package: mpi4py's on six layouts of ranks, some half an hour, and torch's where
# it is installed. Each program says what failed unexpectedly, and all run.
suites: venv
	@status=0; for suite in tests/suites/*_suite.py; do $(PY) $$suite || status=1; done; exit $$status

docs: venv
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(PY) -m sphinx -W -b html docs build/docs

clean:
	rm -rf .venv build dist *.egg-info ucc_hetero/_native*
