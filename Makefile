# The two commands: `make reproduce` and `make test`. Both set up what they need.
#   PYTHON=python3.12      the interpreter (3.11 or 3.12)
#   ACCELERATOR=cuda12     or tpu: adds JAX's build for it
#   VENV=.venv             where the environment lives; it is rebuilt only when the lock changes

supported = $(1) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do $(call supported,$$p) && echo $$p && break; done)
ACCELERATOR ?=
VENV ?= .venv

VERSION := $(shell $(PYTHON) -c 'import sys; print("py%d%d" % sys.version_info[:2])' 2>/dev/null)
LOCK := requirements/$(VERSION).txt
STAMP := $(VENV)/.installed-$(VERSION)-$(or $(ACCELERATOR),cpu)
RUN := $(VENV)/bin/python
SCALE ?= cpu
JOBS ?= 2

.PHONY: setup reproduce test test-slow lint bench lock clean

setup: $(STAMP)

$(STAMP): $(wildcard $(LOCK))
	@test -f "$(LOCK)" || { echo "error: needs Python 3.11 or 3.12; set PYTHON=/path/to/python3.11"; exit 2; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r $(LOCK)
	$(if $(ACCELERATOR),$(RUN) -m pip install --quiet --disable-pip-version-check "jax[$(ACCELERATOR)]==$$($(RUN) -c 'import jax; print(jax.__version__)')")
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

# Figure 2 of "Why Diffusion Models Don't Memorize" on real 8x8 digits: trains, evaluates, writes an HTML report.
reproduce: setup
	$(RUN) -m experiments.reproduce diffusion_mem/fig2_memorization_window --scale=$(SCALE)

test: setup
	$(RUN) -m pytest -n $(JOBS) -m "not slow"

test-slow: setup
	$(RUN) -m pytest -n $(JOBS) -m slow

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright --pythonpath $(RUN)

bench: setup
	$(RUN) -m experiments.benchmarks.foundation

# Resolves pyproject.toml anew; `pip install uv` first.
lock:
	for v in 11 12; do uv pip compile pyproject.toml --extra data --extra dev --python-version 3.$$v \
	  --no-header --no-annotate --quiet --upgrade --output-file requirements/py3$$v.txt; done

clean:
	rm -rf .venv* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
