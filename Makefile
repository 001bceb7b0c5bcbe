# `make` lists the targets. Every command runs through .venv/bin/python -m, so that the path of the checkout may contain spaces.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
UV := $(shell command -v uv 2>/dev/null)
RUN := .venv/bin/python -m
STAMP := .venv/.stamp

ifdef UV
VENV = uv venv --quiet --clear --python "$(PYTHON)" .venv
INSTALL = uv pip install --quiet --python .venv/bin/python
else
VENV = "$(PYTHON)" -m venv --clear .venv
INSTALL = $(RUN) pip install --quiet --disable-pip-version-check
endif

.PHONY: help setup demo test test-slow lint metaworld lock clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*  ## /\1:/p' Makefile | while IFS=: read -r name text; do printf '  make %-10s %s\n' "$$name" "$$text"; done

setup: $(STAMP)  ## make .venv with the exact versions of requirements.lock

# The lock is complete, so nothing is resolved (--no-deps) and setuptools is there to install the checkout without build isolation.
$(STAMP): requirements.lock setup.cfg pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo 'Tether needs Python 3.11 or newer: install one, or name it with make PYTHON=/path/to/python3' >&2; exit 2; }
ifndef UV
	@"$(PYTHON)" -c 'import ensurepip' 2>/dev/null || \
		{ echo 'This Python cannot make virtual environments: apt install python3-venv, or install uv' >&2; exit 2; }
endif
	@echo 'Installing into .venv (about 1.6 GB; a minute or two)'
	@test -x .venv/bin/python || $(VENV)
	@$(INSTALL) --no-deps -r requirements.lock
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $(STAMP)

demo: $(STAMP)  ## train TRQAM on a point maze and plot success before and after
	.venv/bin/python scripts/demo.py --out=runs/demo

# Two processes, since most tests compile on one core; a file stays in one of them, as its tests share what they compile.
test: $(STAMP)  ## all tests but the slow ones
	$(RUN) pytest -q -n 2 --dist=loadfile --durations=15 -m 'not slow'

test-slow: $(STAMP)  ## the slow tests: every backend, long runs
	$(RUN) pytest -q --durations=15 -m slow

lint: $(STAMP)  ## style, format and types
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) pyright --pythonpath .venv/bin/python

metaworld: $(STAMP)  ## add Meta-World, which pins an older mujoco and so is left out of the lock
	$(INSTALL) --no-deps metaworld==3.1.1

# labmaze has no wheel for Python 3.13 and only dm_control's mazes, which nothing here uses, import it.
lock:  ## rewrite requirements.lock from setup.cfg (needs uv)
	echo "labmaze ; python_version < '3.13'" | UV_CUSTOM_COMPILE_COMMAND='make lock' uv pip compile --quiet --universal \
		--python-version 3.11 --extra dev --overrides - setup.cfg --output-file requirements.lock

clean:  ## remove .venv, build products and caches; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
