# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEXTS ?= data/text

.PHONY: paper demo test lint types unit setup clean

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard codec/kernels/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

setup: $(STAMP)

demo: setup
	$(BIN)/python scenarios/run.py demo --json out/demo.json --html out/demo.html

# The paper's tables on the bundled model, into docs/results; TEXTS is the evaluation texts' folder, QUICK=--quick
# a short form.
paper: setup
	$(BIN)/python -m bench.paper --texts $(TEXTS) $(QUICK)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest -q

test: lint types unit

# The native decoder under AddressSanitizer and UndefinedBehaviorSanitizer; a short form is among the tests.
sanitize: setup
	$(BIN)/python -m tests.fuzz.sanitize --inputs 20000

clean:
	rm -rf $(VENV) build out *.egg-info codec/_native*.so
