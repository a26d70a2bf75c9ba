# `make train` and `make test` need Python 3.11 or newer and nothing else; both set up .venv first.
# Options for a command go through ARGS:  make train ARGS="--stage 2 --minutes 5"

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PEERS  := $(VENV)/.ready-bench
ARGS   ?=

# Tests start many processes, and each would compile all of the library anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all bench matrix lint setup clean

train: setup
	$(BIN)/zerofold train $(ARGS)

test: lint
	$(BIN)/pytest $(ARGS)

test-all: lint
	$(BIN)/pytest -m "thorough or not thorough" $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

bench: $(PEERS)
	$(BIN)/zerofold bench step $(ARGS)

# Every model × row × feature against DDP, on 2, 3 and 4 ranks; the table goes to the docs.
matrix: setup
	PYTHONPATH=src:. $(BIN)/python -m tests.matrix --write docs/matrix.md $(ARGS)

setup: $(READY)

# The stamp is written last, so an interrupted setup is taken up again.
$(READY): requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "zerofold needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch alone first: a package that asks for any torch must find this one and not bring another.
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' requirements-dev.txt)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps -e .
	@touch $@

$(PEERS): $(READY) requirements-bench.txt
	$(BIN)/python -m pip install --quiet -r requirements-bench.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
