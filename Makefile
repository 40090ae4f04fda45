# Each target installs what it needs. ARGS="..." is passed to the command, and PYTHON=... chooses the interpreter.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test experiments slow slow-changed newest on-newest quick check nightly lint format types \
  compare benchmark gpu wheelhouse notebook doctor docs docs-version dist pins clean

PY := .venv/bin/python
SELF := $(MAKE)# `make --dry-run` runs recipe lines that contain the name MAKE, but not those with SELF
VERSION := 'import sys; print("%d.%d" % sys.version_info[:2])'
NAME ?= loss_scaling
NOTEBOOK ?= quickstart
SMALL := $(filter-out 0,$(SMOKE))
MINUTES ?= $(if $(SMALL),0,9)
WORKERS := $(shell getconf _NPROCESSORS_ONLN)
# In CI, up to three failed tests run once more, because a machine may stall. The summary names these tests, and those
# that took long.
IN_CI := $(if $(CI),--reruns 1 --max-suite-reruns 3 --rerun-show-tracebacks --durations 8 --durations-min 5)
PYTEST := -m pytest -q -n $(WORKERS) --maxprocesses 8 --dist worksteal $(IN_CI)
# Tests that compile for absent devices run on the newest Python only, because only its environment has the compilers.
ABSENT := absent_gpu or absent_tpu
QUICK := not slow and not ($(ABSENT))
# The tests of the library, and the tests of two training scripts, which show that the scripts run.
SCRIPTS := tests/experiments/test_language_modeling.py tests/experiments/test_masked_lm.py
FOLDERS := $(patsubst %/,%,$(wildcard tests/*/)) $(wildcard tests/test_*.py)
LIBRARY := jaxmp $(filter-out %/tools %/experiments %/repository %/__pycache__,$(FOLDERS)) $(SCRIPTS)
check nightly: WITHOUT := $(addprefix --ignore=,$(SCRIPTS))# for `make experiments`, because `make test` ran them
# The tests that JAX's internals may break: they run on the newest JAX, too.
INTERNALS := $(wildcard $(addprefix tests/,engine program models linen nnx test_explicit_x64.py))
# Those of checkpoints and derivative rules run once more with the newer transforms of JAX, which will be the default.
NEWER := JAX_REMAT3=1 JAX_CUSTOM_VJP3=1 JAX_CUSTOM_JVP3=1
CHANGED := remat or checkpoint or custom or derivative or rule or transform or primitive or float8
# $(call paths,DEFAULT): the files and folders that ARGS names, or else DEFAULT
paths = $(if $(filter tests% jaxmp%,$(ARGS)),,$(1)) $(ARGS)
SOURCES := jaxmp experiments tests notebooks docs .ci
ifneq ($(filter tests/% %.py,$(MAKECMDGOALS)),)
$(error Write make test ARGS="$(filter tests/% %.py,$(MAKECMDGOALS))")
endif
export PYTHON
export PYTHONDONTWRITEBYTECODE := # unset: the tests start a hundred processes, which reuse the bytecode on disk
export MPLCONFIGDIR := $(CURDIR)/.cache/matplotlib

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

demo: .venv/installed ## train on real data under five precisions and compare the results, in 3 to 6 minutes on two cores
	@$(PY) -m experiments.compare --demo $(ARGS)

test: .venv/installed ## the tests of the library, 2 to 4 minutes on two cores: make test ARGS="tests/cli -x"
	$(PY) $(PYTEST) -m "$(QUICK)" $(call paths,$(LIBRARY))

experiments: .venv/installed ## the tests of the scripts and benchmarks, 1 to 2 minutes
	$(PY) $(PYTEST) -m "$(QUICK)" $(WITHOUT) $(call paths,tests/experiments)

quick: .venv/installed ## the tests that cover your changes since main, or since the commit BASE
	@tests=$$($(PY) .ci/quick.py) && $(PY) $(PYTEST) -m "$(QUICK)" $$tests $(ARGS)

slow: .venv/installed ## all slow tests: notebooks, real models
	$(PY) $(PYTEST) -m slow $(call paths,tests)

slow-changed: .venv/installed ## the slow tests of the library that cover these changes, the first case of each
	@tests=$$($(PY) .ci/quick.py --slow) && { $(PY) $(PYTEST) -m slow --cases 1 $$tests || [ $$? -eq 5 ]; } # 5 means that none of them is slow

newest: .venv/installed ## the tests of JAX's internals on the newest Python and JAX, and those that compile for an absent GPU
	@$(SELF) --no-print-directory on-newest PATHS="$(call paths,$(INTERNALS))" COMPILED="($(ABSENT)) and not slow"

check: lint types test experiments slow-changed newest ## everything that a change must pass, 10 to 15 minutes on two cores

# The last run compiles with XLA's default flags: see conftest.py.
nightly: lint types test experiments slow ## everything that there is to run, an hour on two cores
	@JAXMP_TESTS_OPTIMISED=1 $(SELF) --no-print-directory on-newest PATHS="tests jaxmp"

compare: .venv/installed ## train one task under several policies: make compare ARGS="--help"
	@$(PY) -m experiments.compare $(ARGS)

benchmark: .venv/installed ## run a benchmark of experiments/benchmarks: make benchmark NAME=train_step ARGS="--help"
	@$(PY) -c 'from importlib.util import find_spec; exit(not find_spec("experiments.benchmarks.$(NAME)"))' || \
	  { echo 'error: NAME is a benchmark of experiments/benchmarks/README.md, got $(NAME)' >&2; exit 2; }
	@$(PY) -m experiments.benchmarks.$(NAME) $(ARGS)

gpu: ## run the benchmarks that need a GPU; repeat the command to continue: make gpu MINUTES=9 [SMOKE=1] [ARGS="--list"]
	@python=$${PYTHON:-python3}; \
	if [ -d build/wheelhouse ] && $$python -c 'import jax' 2>/dev/null; then \
	  wheels=$$($$python .ci/wheels.py) || exit 1; export PYTHONPATH="$$wheels$${PYTHONPATH:+:$$PYTHONPATH}"; \
	else $(SELF) --no-print-directory .venv/installed && python=$(PY); fi && \
	$$python -m experiments.benchmarks.gpu --minutes $(MINUTES) $(if $(SMALL),--smoke) $(ARGS)

wheelhouse: .venv/installed ## download the packages of `make gpu` for a machine without a network [WHEEL_PYTHON=3.12]
	@.ci/wheelhouse.sh $(PY)

notebook: .venv/installed ## run a notebook and save its outputs in it: make notebook NOTEBOOK=paper_rope
	@cd notebooks && PYTHONPATH=$(CURDIR) ../.venv/bin/jupyter execute --inplace $(NOTEBOOK).ipynb $(ARGS)

doctor: .venv/installed ## show which dtypes this machine computes fast, and what to fix
	@$(PY) -m jaxmp doctor $(ARGS)

lint: .venv/installed ## check rules and format with ruff, and the files of the repository: imports, links, the reference
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m ruff format --check $(SOURCES)
	$(PY) -m pytest -q -m "not slow" tests/repository

format: .venv/installed ## fix and format the code with ruff
	$(PY) -m ruff check --fix $(SOURCES)
	$(PY) -m ruff format $(SOURCES)

types: .venv/installed ## check the types of the library and of a user's program with mypy
	$(PY) -m mypy

# Run PATHS on the newest Python, and the tests for an absent GPU or TPU. Only the first case of each test runs.
on-newest: COMPILED ?= $(ABSENT)
on-newest:
	@newest=$$(.ci/pythons.sh "$$PYTHON" | tail -n 1); \
	current=$$($(PY) -c $(VERSION)); \
	if [ "$${newest%% *}" = "$$current" ]; then \
	  echo "No supported Python newer than $$current on this machine: the tests ran on $$current only"; \
	  $(PY) $(PYTEST) -m "$(COMPILED)" tests; \
	else \
	  $(SELF) --no-print-directory .venv-newest/installed && \
	  .venv-newest/bin/python $(PYTEST) -m "$(QUICK) and not once" --cases 1 $(PATHS) && \
	  $(NEWER) .venv-newest/bin/python $(PYTEST) -m "$(QUICK) and not once" --cases 1 -k "$(CHANGED)" $(INTERNALS) && \
	  .venv-newest/bin/python $(PYTEST) -m "$(COMPILED)" tests; \
	fi

docs: .venv/installed ## build the site in build/site
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict
	@echo "The site is in build/site. Its search needs a server: $(PY) -m http.server -d build/site"

docs-version: .venv/installed ## add this version of the site to the branch gh-pages: make docs-version [ARGS=--push]
	@version=$$($(PY) -c 'import jaxmp; print(*jaxmp.__version__.split(".")[:2], sep=".")') && \
	export NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/.venv/bin:$$PATH" && \
	mike --quiet deploy --update-aliases $(ARGS) $$version latest && mike set-default $(ARGS) latest

dist: .venv/installed ## build the sdist and the wheel in dist/, and try the wheel in an empty environment
	@.ci/dist.sh $(CURDIR)/$(PY)

pins: ## write constraints.txt again, with the newest versions: make pins PYTHON=python3.11
	@rm -rf build/pins && mkdir -p build/pins
	@.ci/setup.sh build/pins/oldest default pins
	@.ci/setup.sh build/pins/newest newest pins
	@for env in oldest newest; do build/pins/$$env/bin/python -m pip freeze --exclude-editable > build/pins/$$env.txt; done
	@build/pins/oldest/bin/python .ci/pins.py build/pins/oldest.txt build/pins/newest.txt > constraints.txt
	@rm -rf build/pins

clean: ## remove the environments and everything that was built; runs and data stay
	rm -rf .venv .venv-newest .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -prune -exec rm -rf {} +

# If PYTHON names another version than .venv has, .venv is created again. setup.sh refuses a PYTHON that cannot run.
ifdef PYTHON
ifneq ($(firstword $(shell .ci/pythons.sh "$(PYTHON)")),$(shell [ ! -x $(PY) ] || $(PY) -c $(VERSION) 2>&1))
.PHONY: .venv/installed
endif
endif

.venv/installed: pyproject.toml constraints.txt .ci/setup.sh
	@.ci/setup.sh .venv default

.venv-newest/installed: pyproject.toml constraints.txt .ci/setup.sh
	@.ci/setup.sh .venv-newest newest
