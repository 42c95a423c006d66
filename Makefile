# The few commands of this project. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
STAMP := $(VENV)/.keepstep-installed
SOAK_KILLS ?= 50
BENCHMARKS := recovery overhead transfer migration control

.PHONY: help venv demo test retest check format soak bench clean

help:
	@echo "make venv    the environment in $(VENV), from pinned versions"
	@echo "make demo    train a small GPT, kill a rank, prove that nothing was lost"
	@echo "make test    the whole suite"
	@echo "make check   ruff, format, mypy, import arrows"
	@echo "make soak    $(SOAK_KILLS) random kills (SOAK_KILLS=n)"
	@echo "make bench   every benchmark; figures as JSON under build/"

venv: $(STAMP)

$(STAMP): constraints.txt pyproject.toml
	@if [ ! -x $(RUN)/python ]; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "Keepstep needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name another with: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }; \
	  $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }; \
	fi
	$(RUN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: venv
	$(RUN)/keepstep demo --out build/demo

test: venv
	$(RUN)/python -m pytest tests -m "not soak" -n 3 --durations=15

retest: venv
	@echo "once more, one at a time: the tests that failed"
	$(RUN)/python -m pytest tests -m "not soak" --last-failed --last-failed-no-failures none

check: venv
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy --strict --follow-imports=silent keepstep/core keepstep/wire
	$(RUN)/mypy
	$(RUN)/python -m pytest -q tests/test_arrows.py

format: venv
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

soak: venv
	KEEPSTEP_SOAK_KILLS=$(SOAK_KILLS) $(RUN)/python -m pytest tests -m soak --timeout 3600

bench: venv
	@mkdir -p build
	@for name in $(BENCHMARKS); do \
	  $(RUN)/python benchmarks/$$name.py --json build/$$name.json || exit 1; \
	done

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
