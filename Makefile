# make report   measure this machine and write reports/index.html
# make test     lint, types and all tests
# make lab      open the notebooks in JupyterLab
# make gpu-check  check bits and measure rebinds on a CUDA GPU, with the python3 that has torch
# Each sets up .venv first; PYTHON chooses the interpreter (3.11 or newer).

PYTHON ?= python3
SIZE ?= laptop
RECORDS ?= scratch/gpu-records.jsonl
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup report test lab chromium gpu-check clean

help:
	@sed -n 's/^# //p' Makefile

setup: .venv/ready

# ltx-core's own requirements pull a whole pipeline; its LoRA fusing needs torch and einops alone.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "lorabench needs Python 3.11 or newer; set PYTHON=python3.x" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]' einops
	$(BIN)/python -m pip install --quiet --no-deps ltx-core==1.0.0
	@touch $@

report: setup
	$(BIN)/lorabench report --size $(SIZE)

test: setup chromium
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/nbstripout --verify notebooks/*.ipynb
	$(BIN)/python -m pytest -n 2 --dist loadfile

lab: setup
	$(BIN)/jupyter lab --notebook-dir notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

# The browser test wants a Chromium: the one there is, or Debian's where it may be installed.
chromium:
	@command -v chromium chromium-browser google-chrome >/dev/null || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		  apt-get update -qq && apt-get install -qq -y chromium >/dev/null; } || \
		echo "no Chromium here: the browser tests will be skipped" >&2

# Runs on a machine's own Python: a GPU's torch is its own build. Under 5 minutes on an H200.
gpu-check:
	$(PYTHON) -c 'import torch; assert torch.cuda.is_available(), "no CUDA GPU here"'
	$(PYTHON) -m pytest -q tests/test_cuda.py
	$(PYTHON) -m lorabench bench walk ti2vid_two_stage --size laptop --device cuda --renders 2 \
		--strategy both_fixes --strategy snapshot --strategy snapshot,restore=device_snapshot \
		--out $(RECORDS)

clean:
	rm -rf .venv reports scratch
