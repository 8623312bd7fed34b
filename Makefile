# memlab: everything here works in a fresh clone with nothing but Python 3.11, 3.12 or 3.13 and pip. Start with `make run`.
.DEFAULT_GOAL := help
.PHONY: help run test test-all test-versions oldest lab docs hooks clean

VENV := .venv
BIN := $(VENV)/bin
# Distributions compile Python with profile-guided optimization, and pyenv by default does not: the tests then take 25 %
# more processor time. So the system's own Python comes first, if it can make virtual environments (on Debian, that is a
# package of its own). A name on the PATH may be a shim that runs nothing, so each candidate is asked for its version.
PYTHON ?= $(firstword $(foreach name,$(addprefix /usr/bin/,python3.11 python3.12 python3.13) python3.11 python3.12 python3.13 python3,$(shell \
	$(name) -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $(name))))
# Python compiles a module when it first imports it. pip would compile 12,000 of them, of which 3,500 are ever imported.
export PYTHONDONTWRITEBYTECODE :=
# Twice quiet: errors only.
INSTALL := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check install --no-compile --editable

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  PIP_EXTRA_INDEX_URL=<index of CPU wheels> make run  fetches a smaller torch on Linux without a GPU"

run: $(VENV)/.installed ## Run the quickstart lab headless and say where its notebook and page are
	@$(BIN)/memlab run labs/00_quickstart.ipynb
	@echo "make lab opens the labs in JupyterLab"

test: $(VENV)/.installed-dev ## Lint, check types and the import order of the packages, run the tests
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/mypy --no-error-summary & types=$$!; $(BIN)/pytest -n 3 --dist worksteal -m "not slow"; tests=$$?; wait $$types && exit $$tests

test-all: $(VENV)/.installed-dev ## Run all tests, the slow ones too
	@$(BIN)/pytest -n 3 --dist worksteal

# Another Python beside it: make PYTHON=python3.12 VENV=.venv-3.12 test-versions
test-versions: $(VENV)/.installed-dev ## Run only the tests that depend on the versions of torch and megatron-core
	@$(BIN)/pytest -n 3 --dist worksteal $(shell grep -l "^pytestmark = pytest.mark.versions" tests/unit/*.py)

# The lower bounds of pyproject.toml, all together: make VENV=.venv-oldest oldest test
oldest: pyproject.toml | $(BIN)/python ## Install the oldest set that is supported in place of the pinned one
	@$(BIN)/python -c "import tomllib; print(*(each.split(',')[0].replace('>=', '==') for each in tomllib.load(open('$<', 'rb'))['project']['dependencies']), sep='\n')" > $(VENV)/oldest.txt
	@PIP_CONSTRAINT=$(VENV)/oldest.txt $(INSTALL) '.[dev]'
	@touch $(VENV)/.installed $(VENV)/.installed-dev

lab: $(VENV)/.installed ## Open JupyterLab on labs/
	@$(BIN)/memlab lab

# The later labs take longest: they begin first, so that two that run at the same time end together.
LABS := $(patsubst labs/%.ipynb,build/book/labs/%/notebook.ipynb,$(shell ls -r labs/*.ipynb))

docs: $(VENV)/.installed-docs ## Run each lab once, and build the book with them: build/book/html/index.html
	@$(MAKE) --no-print-directory --jobs=2 $(LABS)
	@$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c labs/book -d build/book/doctrees . build/book/html
	@echo "the book is in build/book/html: open index.html"

build/book/labs/%/notebook.ipynb: labs/%.ipynb $(shell find memlab -name '*.py')
	@rm -rf $(@D) $(@D).failed && mkdir -p build/book/labs
	@$(BIN)/memlab run $< --out $(@D) > $(@D).log && echo "ran $<"

hooks: $(VENV)/.installed-dev ## Check every commit with pre-commit
	@$(BIN)/pre-commit install

clean: ## Remove the virtual environment and caches; runs stay
	@rm -rf $(VENV) .venv-3.* .venv-oldest build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "memlab needs Python 3.11, 3.12 or 3.13: put one on the PATH, or name it: make PYTHON=/path/to/python3.12"; exit 1; }
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv --clear $(VENV)

# The stamps are written last, so an interrupted install is taken up again, and pyproject.toml renews them.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing memlab, torch, megatron-core and JupyterLab into $(VENV) (minutes, once)"
	@$(INSTALL) '.[cpu]'
	@$(BIN)/python -c "from memlab.allocator.choice import why_not_compiled; why_not_compiled()"  # numba compiles once, and keeps what it has compiled
	@touch $@

$(VENV)/.installed-dev $(VENV)/.installed-docs: $(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	@echo "installing memlab, torch, megatron-core, JupyterLab and what make $(if $(filter dev,$*),test,docs) needs into $(VENV) (minutes, once)"
	@$(INSTALL) '.[cpu,$*]'
	@$(BIN)/python -c "from memlab.allocator.choice import why_not_compiled; why_not_compiled(); from memlab import Lab"  # compiles once what three test processes would compile at the same time
	@touch $(VENV)/.installed $@
