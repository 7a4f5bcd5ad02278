# make test, make demo, make docs: each makes .venv by itself when it is missing or out of date.
# PYTHON picks the interpreter (3.11 or newer); PIP_ARGS is passed to pip, for example an index with the CPU build
# of PyTorch, which is much smaller than the default one.

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PIP_ARGS ?=
# Three files at a time on two cores, slow ones first: ranks wait for each other and for time-outs much of the time. (With
# four they wait for cores: 750 s for 650 to 700 on an EPYC.)
PYTEST_ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder
DEMO_ARGS ?=
# Some containers forbid byte code on disk: every process of a test would then compile all of the project first.
unexport PYTHONDONTWRITEBYTECODE
GPU_PYTHON ?= python3
GPU_PYTEST_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := espresso strategies compressors comm cpu_offload benchmarks tests examples docs noxfile.py

.PHONY: venv test demo docs lint format format-check types cuda gpu clean
venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "espresso needs Python 3.11 or newer; name one with make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS) --editable '.[test]'
	touch $@

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

demo: $(STAMP)
	$(BIN)/python -m benchmarks.demo $(DEMO_ARGS)

# Warnings are errors: a broken link or reference stops the build. The site is build/docs/index.html.
docs: $(STAMP)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs

lint: $(STAMP)
	$(BIN)/ruff check $(CODE)

format: $(STAMP)
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

format-check: $(STAMP)
	$(BIN)/ruff format --check $(CODE)

types: $(STAMP)
	$(BIN)/mypy -p espresso -p benchmarks -m tests.users_script

# For real devices; what they compute is a matter of `make test` and `make gpu`.
cuda: $(STAMP)
	$(BIN)/python -m tests.nvrtc

# The machine's own Python from the repository root, nothing installed: GPU machines often allow no more. The benchmarks
# first, with the machine to themselves, then the tests, side by side where pytest-xdist is there (pytest-benchmark,
# which refuses to, is left out). Only files with GPU tests are loaded: others may need what is not installed there. All
# run, also after a failure; the exit status is the last one's that failed.
gpu:
	@$(GPU_PYTHON) -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' \
		|| echo "NO GPU: $(GPU_PYTHON) sees no CUDA device, so nothing is measured and every GPU test below is skipped"
	$(GPU_PYTHON) -m benchmarks.gpu; failed=$$?; \
	for backend in gloo nccl; do \
		$(GPU_PYTHON) -m benchmarks.speed --device cuda --backend $$backend --rows cnn-1 --compressors auto \
			--json benchmarks/results/speed_gpu_$$backend.json || failed=$$?; done; \
	workers=$$($(GPU_PYTHON) -c 'import importlib.util as u, os; \
		print(f"-n {min(12, max(1, len(os.sched_getaffinity(0)) * 3 // 4))}" if u.find_spec("xdist") else "")'); \
	$(GPU_PYTHON) -m pytest -m gpu -q -o addopts= -W default -p no:benchmark --timeout 240 $$workers \
		$(GPU_PYTEST_ARGS) $$(grep -lE 'tests.backends|mark\.gpu' tests/test_*.py) || failed=$$?; exit $$failed

clean:
	rm -rf build dist $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
