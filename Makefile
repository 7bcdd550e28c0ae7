# make demo | test | test-all | test-versions | lint | bench | docs.
# Another torch: make test TORCH=2.15.0, in an environment of its own. Needs python3, g++ and make.
DEFAULT_TORCH := 2.13.0
TORCH ?= $(DEFAULT_TORCH)
PYTHON ?= python3
NPROC ?= 2
ARGS ?=

VENV := .venv$(if $(filter-out $(DEFAULT_TORCH),$(TORCH)),-$(TORCH))
RUN := $(VENV)/bin/python
READY := $(VENV)/ready
CLIENTS := $(VENV)/clients
SPHINX := $(VENV)/sphinx

.PHONY: demo test test-all test-versions lint format bench docs

demo: $(READY)  ## trains a small language model in NPROC processes: set NPROC to the number of GPUs
	OMP_NUM_THREADS=1 $(RUN) -m torch.distributed.run --nproc-per-node $(NPROC) examples/train_lm.py \
	  --checkpoint-dir runs/$(shell date +%Y%m%d-%H%M%S) $(ARGS)

test: $(READY)  ## the suite
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m "not more" $(ARGS)

test-all: $(CLIENTS)  ## the suite, further variants of what it shows, and other people's trainers
	OMP_NUM_THREADS=1 $(RUN) -m pytest $(ARGS)

VERSIONS ?= 2.11.0 2.13.0 2.14.1 2.15.0
test-versions: $(READY)  ## the suite on every torch that is supported, and on a nightly where pip finds one
	$(RUN) -m tests.versions $(VERSIONS) --nightly $(if $(ARGS),-- $(ARGS))

lint: $(READY)
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

format: $(READY)
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

bench: $(READY)  ## all of docs/benchmarks.md into build/bench, as root, over two hours; ARGS=--list says what
	$(RUN) -m bench.all $(ARGS)

docs: $(SPHINX)  ## the site of docs/ and of the docstrings, into build/site
	$(RUN) -m sphinx --fail-on-warning --keep-going --quiet docs build/site

# torch first and alone: the package's own requirement would take the newest one.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet torch==$(TORCH)
	$(RUN) -m pip install --quiet --editable '.[dev]'
	touch $@

$(CLIENTS): $(READY)
	$(RUN) -m pip install --quiet torch==$(TORCH) --editable '.[dev,clients,docs]'
	touch $@

$(SPHINX): $(READY)
	$(RUN) -m pip install --quiet torch==$(TORCH) --editable '.[dev,docs]'
	touch $@
