# Two commands for a new machine (Python 3.11+, a C compiler): `make demo` and `make test`.
# Both create .venv and install into it first. `make docs` builds the documentation site into site/.
# `make test-all` does so, too, and runs also the tests marked `long`, which `make test` leaves out. `make coverage`
# is `make test` under coverage, which takes longer. `make check` and `make format` are for
# developers.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install demo test test-all coverage docs check format clean

install: $(VENV)/.installed

# torch goes first: a plain install of the rest would pull the newest torch with another Triton.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	PATH="$(CURDIR)/$(BIN):$$PATH" bash scripts/demo.sh

test coverage: SELECTED := not long
test-all: docs
coverage: REPORT := --cov --cov-report=term:skip-covered
test test-all coverage: install check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "$(SELECTED)" -n 2 --dist loadfile --no-loadscope-reorder $(REPORT)

# --strict: a broken link or anchor, or a page that the navigation lacks, fails the build. It needs no network.
docs: install
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .coverage*
