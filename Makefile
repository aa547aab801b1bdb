# make demo   trains on 4 simulated devices (or all GPUs) and compares with one: about a minute
# make test   the linters, the type checker and all tests but those marked slow: about ten minutes
# make quick  the contract on two simulated devices, the layers, the public API: half a minute
# make affected   the tests of what differs from main: by file names and folders
# make mutants IN=mirror/execution   how many of 50 small faults the tests find
# make slow-test   the tests that take longer: races, compilers of the kernels, soaks
# make exhaustive-test   whole products, long soaks, every fault at every point: hours
# make third-party  trains programs over public libraries, and writes build/third-party.md
# make wheel  the sdist, of it a wheel for manylinux_2_28, checked, and that of extras/tpu, in dist/
# make installed   these wheels installed outside the checkout, and used: under a minute
# make docs   the documents and the API as a site, in build/site; what is broken is an error
# make smoke TORCH=2.7.0 PYTHON=python3.13   trains with that torch, in an environment of its own
# make tpu    the tests of mirror.TPUStrategy on simulated devices of jax, in .venv-tpu
# make core TORCH=2.7.0   the three ways, optimizers and the compiler with that torch, likewise
# make free-threaded   finds or builds Python 3.14 without the GIL, and tests parallel replicas there
#
# Needs Python >= 3.10 with venv, g++ and make. Everything goes into .venv; a second call installs
# nothing. torch is pinned in every install command, so that no extra can pull another one.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
SAFETENSORS ?= safetensors
PLATFORM ?= manylinux_2_28_$(shell uname -m)

# What `make affected` compares with, and where `make mutants` makes faults.
BASE ?= main
IN ?= mirror

# Some environments keep Python from writing .pyc files; the tests start it many times, and import.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
QUICK := $(wildcard tests/strategy/test_*.py) tests/programs tests/test_layers.py \
    tests/project/test_public_api.py
THREADED := tests/threads tests/execution tests/interrupts tests/programs \
    tests/replica/modules tests/replica/optimizers tests/replica/collectives tests/replica/gradients \
    tests/train/checkpoint
# A process for each core, with one intra-op thread: small tensors gain nothing from more.
PARALLEL := --numprocesses auto --dist worksteal
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo docs test quick-test quick affected mutants slow-test exhaustive-test lint bench third-party wheel installed wheel-aarch64 smoke smoke-here core core-here tpu tpu-here free-threaded free-threaded-here clean
.DELETE_ON_ERROR:

demo: $(VENV)/examples.stamp
	$(BIN)/mirror demo

# The type checker has one thread: the first tests run beside it.
test: $(VENV)/test.stamp
	@$(MAKE) --no-print-directory --jobs 2 lint quick-test

quick-test: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" $(PARALLEL)

quick: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" -k "not x1 and not x3 and not importing" \
	    $(PARALLEL) $(QUICK)

affected: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.scripts.affected --base $(BASE)

mutants: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.scripts.mutants $(IN)

slow-test: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "slow and not exhaustive" $(PARALLEL)

exhaustive-test: $(VENV)/test.stamp
	$(BIN)/pytest -m exhaustive

lint: $(VENV)/test.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/bench.stamp
	$(BIN)/python benchmarks/overhead.py

# From the sdist, as `build` does it: what the sdist lacks, the wheel lacks too, and is missed.
wheel: $(VENV)/test.stamp
	rm -rf dist
	$(BIN)/python -m build --outdir dist/unchecked
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --plat $(PLATFORM) \
	    --wheel-dir dist dist/unchecked/*.whl
	mv dist/unchecked/*.tar.gz dist
	$(BIN)/python -m build --wheel --outdir dist extras/tpu

# The same for another architecture; its compiler is Debian's g++-aarch64-linux-gnu. Of other
# architectures auditwheel finds the platform, and takes none by name.
wheel-aarch64:
	CXX=aarch64-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-aarch64 $(MAKE) --no-print-directory \
	    PLATFORM=auto wheel
	ls dist/*manylinux_2_2[0-8]_aarch64*.whl

installed: wheel
	OMP_NUM_THREADS=1 $(BIN)/python tests/scripts/installed.py \
	    dist/mirror_strategy-*.whl dist/mirror_strategy_tpu-*.whl

docs: $(VENV)/docs.stamp
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs/site . build/site
	@echo "build/site/README.html"

third-party: .venv-third-party/third-party.stamp
	.venv-third-party/bin/python -m tests.scripts.third_party

smoke:
	@$(MAKE) --no-print-directory VENV=.venv-torch-$(TORCH)-$(notdir $(PYTHON)) smoke-here

smoke-here: $(VENV)/smoke.stamp
	$(BIN)/python tests/scripts/smoke.py

core:
	@$(MAKE) --no-print-directory VENV=.venv-torch-$(TORCH)-$(notdir $(PYTHON)) core-here

core-here: $(VENV)/core.stamp
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" tests/programs tests/replica/optimizers \
	    tests/compiler tests/base/test_torch_private.py

# Not part of make test: jax and a pre-release of torchax, whose import changes torch.
tpu:
	@$(MAKE) --no-print-directory VENV=.venv-tpu tpu-here

tpu-here: $(VENV)/tpu.stamp
	$(PIP) pytest
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/tpu

# Not part of make test: gigabytes of torch for that interpreter. Its safetensors is a pre-release,
# and libraries that do not declare themselves would turn the GIL on: triton, which optimizers import.
free-threaded:
	python=$$($(PYTHON) tests/scripts/free_threaded.py $(abspath .venv-python3.14t)) && \
	$(MAKE) --no-print-directory VENV=.venv-free-threaded PYTHON="$$python" \
	    SAFETENSORS='safetensors>=0.9.0rc1' free-threaded-here

free-threaded-here: $(VENV)/core.stamp
	PYTHON_GIL=0 OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" --schedule parallel $(THREADED)

clean:
	rm -rf $(VENV) .venv-tpu .venv-free-threaded .venv-python3.14t .venv-torch-* .venv-third-party build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is an installed extra; installing builds the libraries of csrc/host.
$(VENV)/%.stamp: $(VENV)/torch.stamp pyproject.toml setup.py $(wildcard csrc/* csrc/host/*)
	$(PIP) 'torch==$(TORCH)' --editable '.[$*]'
	touch $@

# The extra tpu is a distribution of its own, in the same repository.
$(VENV)/tpu.stamp: $(VENV)/torch.stamp pyproject.toml extras/tpu/pyproject.toml setup.py $(wildcard csrc/* csrc/host/*)
	$(PIP) 'torch==$(TORCH)' --editable '.[tpu]' --editable extras/tpu
	touch $@

.venv-third-party/third-party.stamp: tests/scripts/third_party/requirements.txt
	$(MAKE) --no-print-directory VENV=.venv-third-party .venv-third-party/smoke.stamp
	.venv-third-party/bin/python -m pip --disable-pip-version-check install --quiet \
	    'torch==$(TORCH)' -r $<
	touch $@

# Without what pyproject.toml says of torch, so that other versions can be tried.
$(VENV)/smoke.stamp: $(VENV)/torch.stamp setup.py $(wildcard csrc/* csrc/host/*)
	$(PIP) numpy
	$(PIP) --no-deps --editable .
	touch $@

# What those tests need beside it; torch stays as it is.
$(VENV)/core.stamp: $(VENV)/smoke.stamp
	$(PIP) pytest hypothesis expecttest '$(SAFETENSORS)'
	touch $@

$(VENV)/torch.stamp: | $(BIN)/python
	$(PIP) 'torch==$(TORCH)'
	touch $@

.PRECIOUS: $(VENV)/%.stamp

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "mirror needs Python >= 3.10; name one with: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	    { echo "$(PYTHON) has no venv; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
