# Each target installs what it needs. ARGS="..." is passed to the command. PYTHON=... chooses the interpreter of a new .venv.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test scripts slow slow-changed newest check nightly lint format types compare benchmark gpu \
  wheelhouse notebook docs dist pins
PY := .venv/bin/python
NEWEST := .venv-newest/bin/python
# In CI, up to three failed tests run once more, because a machine may stall. The summary names these tests.
IN_CI := $(if $(CI),--reruns 1 --max-suite-reruns 3 --rerun-show-tracebacks --durations 8 --durations-min 5)
PYTEST := -m pytest -q -n logical --maxprocesses 8 --dist worksteal $(IN_CI)
# Tests that compile for absent devices run on the newest Python only, because only its environment has the compilers.
ABSENT := absent_gpu or absent_tpu
QUICK := not slow and not ($(ABSENT))
LIBRARY := jaxmp $(filter-out tests/tools/ tests/experiments/ tests/repository/ %/__pycache__/,$(wildcard tests/*/)) $(wildcard tests/test_*.py)
INTERNALS := $(wildcard $(addprefix tests/,engine program models linen nnx test_explicit_x64.py))
SOURCES := jaxmp experiments tests notebooks docs .ci
export PYTHON
export PYTHONDONTWRITEBYTECODE := # unset: the tests start a hundred processes, which reuse the bytecode on disk
export MPLCONFIGDIR := $(CURDIR)/.cache/matplotlib
export NO_MKDOCS_2_WARNING := 1

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile
demo: .venv/installed ## train on real data under five precisions and compare the results, in 3 to 6 minutes on two cores
	@$(PY) -m experiments.compare --demo $(ARGS)
test: .venv/installed ## the tests of the library, 2 to 4 minutes on two cores: make test ARGS="tests/cli -x"
	$(PY) $(PYTEST) -m "$(QUICK)" $(if $(filter tests% jaxmp%,$(ARGS)),,$(LIBRARY)) $(ARGS)
scripts: .venv/installed ## the tests of the scripts and benchmarks, 1 to 2 minutes
	$(PY) $(PYTEST) -m "$(QUICK)" tests/experiments $(ARGS)
slow: .venv/installed ## all slow tests: pages, notebooks, real models
	$(PY) $(PYTEST) -m slow $(or $(ARGS),tests)
slow-changed: .venv/installed ## the slow tests in the folders of your changes since main or the commit BASE, the first case of each
	@tests=$$(.ci/changed.sh) && { [ -z "$$tests" ] || $(PY) $(PYTEST) -m slow --cases 1 $$tests || [ $$? -eq 5 ]; } # 5: none is slow
newest: .venv-newest/installed ## the tests of JAX's internals on the newest Python and JAX, and those that compile for an absent GPU
	$(NEWEST) $(PYTEST) -m "$(QUICK) and not once" --cases 1 $(INTERNALS)
	$(NEWEST) $(PYTEST) -m "($(ABSENT)) and not slow" tests
check: lint types test scripts slow-changed newest ## everything that a change must pass, 10 to 15 minutes on two cores
# Its last runs use the newer transforms of JAX, which will be the default, and XLA's default flags: see conftest.py.
nightly: lint types test scripts slow .venv-newest/installed ## everything that there is to run, an hour on two cores
	JAX_REMAT3=1 JAX_CUSTOM_VJP3=1 JAX_CUSTOM_JVP3=1 $(NEWEST) $(PYTEST) -m "$(QUICK) and not once" --cases 1 $(INTERNALS)
	JAXMP_TESTS_OPTIMISED=1 $(NEWEST) $(PYTEST) -m "$(QUICK) and not once" --cases 1 tests jaxmp
	$(NEWEST) $(PYTEST) -m "$(ABSENT)" tests
compare: .venv/installed ## train one task under several policies: make compare ARGS="--help"
	@$(PY) -m experiments.compare $(ARGS)
benchmark: .venv/installed ## run a benchmark of experiments/benchmarks: make benchmark NAME=train_step ARGS="--help"
	@$(PY) -m experiments.benchmarks.$(or $(NAME),loss_scaling) $(ARGS)
gpu: ## run the benchmarks that need a GPU; repeat the command to continue: make gpu MINUTES=9 [SMOKE=1] [ARGS="--list"]
	@python=$${PYTHON:-python3}; \
	if [ -d build/wheelhouse ] && $$python -c 'import jax' 2>/dev/null; then \
	  wheels=$$($$python .ci/wheels.py) || exit 1; export PYTHONPATH="$$wheels$${PYTHONPATH:+:$$PYTHONPATH}"; \
	else make --no-print-directory .venv/installed && python=$(PY); fi && \
	$$python -m experiments.benchmarks.gpu --minutes $(or $(MINUTES),$(if $(SMOKE),0,9)) $(if $(SMOKE),--smoke) $(ARGS)
wheelhouse: .venv/installed ## download the packages of `make gpu` for a machine without a network [WHEEL_PYTHON=3.12]
	@.ci/wheelhouse.sh $(PY)
notebook: .venv/installed ## run a notebook and save its outputs in it: make notebook NOTEBOOK=paper_rope
	@cd notebooks && PYTHONPATH=$(CURDIR) ../.venv/bin/jupyter execute --inplace $(or $(NOTEBOOK),quickstart).ipynb $(ARGS)
lint: .venv/installed ## check rules and format with ruff, the direction of imports, and the files of the repository
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m ruff format --check $(SOURCES)
	.venv/bin/lint-imports
	$(PY) -m pytest -q -m "not slow" tests/repository
format: .venv/installed ## fix and format the code with ruff
	$(PY) -m ruff check --fix $(SOURCES)
	$(PY) -m ruff format $(SOURCES)
types: .venv/installed ## check the types of the library and of a user's program with mypy
	$(PY) -m mypy
docs: .venv/installed ## build the site in build/site; its search needs a server: python -m http.server -d build/site
	@$(PY) -m mkdocs build --quiet --strict
dist: .venv/installed ## build the sdist and the wheel in dist/, and try the wheel in an empty environment
	@.ci/dist.sh $(CURDIR)/$(PY)
pins: ## write constraints.txt again, with the newest versions: make pins PYTHON=python3.11
	@.ci/setup.sh build/pins/oldest default pins
	@.ci/setup.sh build/pins/newest newest pins
	@for env in oldest newest; do build/pins/$$env/bin/python -m pip freeze --exclude-editable > build/pins/$$env.txt; done
	@python3 .ci/pins.py build/pins/oldest.txt build/pins/newest.txt > constraints.txt
	@rm -rf build/pins
.venv/installed: pyproject.toml constraints.txt .ci/setup.sh
	@.ci/setup.sh .venv default
.venv-newest/installed: pyproject.toml constraints.txt .ci/setup.sh
	@.ci/setup.sh .venv-newest newest
