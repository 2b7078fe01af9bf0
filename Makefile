# Every target sets up what it needs in .venv; a second run starts at once. See CONTRIBUTING.md.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
JAX ?= jax>=0.10.2
MAX_JOBS ?= $(shell nproc)
# One more than cores: tests of jobs wait for processes half of their time.
WORKERS ?= $(shell expr $$(nproc) + 1)
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PYTEST_ARGS ?=
export MAX_JOBS

VENV ?= .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
CSRC := $(wildcard torch_xla/csrc/*/*.cpp torch_xla/csrc/*/*.h)
PY := torch_xla tests benchmarks examples tools setup.py

.PHONY: docs wheel demo test test-fast test-changed test-cost test-sweep test-jobs test-ops test-overloads test-ahead test-callers test-models test-rolled test-plugin conformance fuzz sanitize lint format bench build dev size clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@echo "make demo       train a small CNN on handwritten digits on device xla"
	@echo "make test       all tests (15 minutes on 2 cores); test-fast leaves out the slow ones; fuzz adds examples"
	@echo "make test-changed   what a change touches: since the last commit, or SINCE=main"
	@echo "make test-jobs  the tests of several processes, with four of them too"
	@echo "make test-sweep the long tables of which the tests have a sample"
	@echo "make test-ahead   programs for TPUs that are not here, by their compiler"
	@echo "make test-callers   libraries that call this one; installs torchtitan, whose jobs of four processes take 10 minutes"
	@echo "make test-rolled   models of eight layers, rolled up into loops and not"
	@echo "make test-ops   every operator of PyTorch's database against its CPU kernels; writes docs/op-coverage.md"
	@echo "make test-overloads   the same for all 2,745 overloads of aten, with inputs made from their schemas (50 minutes)"
	@echo "make lint       ruff, clang-format, mypy, the budget of lines"
	@echo "make docs       the guides as a site, in build/docs;  make wheel  a wheel for all supported PyTorch, and an sdist"
	@echo "make bench      the figures of benchmarks/, with targets; writes benchmarks/results/"
	@echo "make build      (re)build the C++ extension;  make dev  everything a developer needs;  make size  lines by file"

# torch comes first and pinned: whatever is resolved later then agrees with it.
$(STAMPS)/torch:
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	$(BIN)/python -m pip install -q --upgrade "pip>=23.2" "setuptools>=77" wheel ninja
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q "$(JAX)"
	@touch $@

$(STAMPS)/install: $(STAMPS)/torch pyproject.toml setup.py
	@echo "compiling the recorder: about a minute on two cores"
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[demo]"
	@touch $@

# The install compiles too; this rule is for sources that changed after it.
$(STAMPS)/build: $(STAMPS)/install $(CSRC)
	$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

# Each source by itself: slower the first time, faster after an edit.
build: export SEPARATE = 1

$(STAMPS)/dev: $(STAMPS)/build pyproject.toml
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[demo,dev,callers]"
	@touch $@

build: $(STAMPS)/build

dev: $(STAMPS)/dev
	@test ! -d .git || $(BIN)/pre-commit install

demo: $(STAMPS)/build
	$(BIN)/python examples/digits.py

test: $(STAMPS)/dev $(STAMPS)/build
	$(BIN)/python -m pytest $(PARALLEL) -m "not sweep" $(PYTEST_ARGS)

# Which tests take more than 1 s of CPU without being marked slow or costs("reason"), and which with that. Not in
# `make test`: a busy machine takes longer.
test-cost: $(STAMPS)/dev $(STAMPS)/build
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not sweep" --cpu-limit=1 $(PYTEST_ARGS)

test-fast: $(STAMPS)/dev $(STAMPS)/build
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not sweep" $(PYTEST_ARGS)

# What a change touches (tests/affected.py): since the last commit, or since SINCE=main.
SINCE ?= HEAD
test-changed: $(STAMPS)/dev $(STAMPS)/build
	@tests=$$($(BIN)/python tests/affected.py $(SINCE)) && if test -z "$$tests"; then echo "no tests for this"; else \
	set -x; $(BIN)/python -m pytest $(PARALLEL) -m "not slow and not sweep" $$tests $(PYTEST_ARGS); fi

# What several processes do together and how they fail, also with four of them.
test-jobs: $(STAMPS)/dev $(STAMPS)/build
	$(BIN)/python -m pytest tests/job tests/distributed $(PYTEST_ARGS)

# With the compiler for TPUs, of package libtpu, which is kept out of the environment: JAX would look for chips.
TPU_COMPILER := build/libtpu
test-ahead: $(STAMPS)/dev $(STAMPS)/build
	wanted=$$($(BIN)/python -c "from torch_xla._core.device import described; print(described.wanted_compiler())") && \
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(TPU_COMPILER) "$$wanted"
	PYTHONPATH=$(TPU_COMPILER) $(BIN)/python -m pytest tests/public/test_ahead.py tests/public/test_ahead_tpu.py $(PYTEST_ARGS)

# The long tables of which `make test` has a sample, apart from those with a target of their own.
test-sweep: $(STAMPS)/dev $(STAMPS)/build
	XLA_FLAGS= $(BIN)/python -m pytest $(PARALLEL) -m sweep $(PYTEST_ARGS)

# On a PJRT plugin of somebody else's: PLUGIN_LIBRARY=/path/of/plugin.so, or that of extra `[plugin]`.
PLUGIN_TESTS ?= $(addprefix tests/,record tensor cut run barrier device lower compile functions job distributed spmd)
test-plugin: $(STAMPS)/dev $(STAMPS)/build
	@test -n "$$PLUGIN_LIBRARY" || $(BIN)/python -m pip install -q fastatomstruct-xla-cpu==2026.6.23
	named=$$($(BIN)/python tests/plugin.py) && PJRT_NAMES_AND_LIBRARY_PATHS=$$named PJRT_DEVICE=vendor \
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not sweep" $(PLUGIN_TESTS) $(PYTEST_ARGS)

fuzz: $(STAMPS)/dev $(STAMPS)/build
	$(BIN)/python -m pytest -m fuzz --hypothesis-profile=fuzz --timeout=7200 $(PYTEST_ARGS)
	HOT_PROGRAMS=10000 $(BIN)/python -m pytest tests/barrier/test_hot_programs.py --timeout=7200 $(PYTEST_ARGS)
	MIXED_PROGRAMS=3000 $(BIN)/python -m pytest tests/barrier/test_mixed_programs.py --timeout=7200 $(PYTEST_ARGS)
	ROLLED_PROGRAMS=1000 $(BIN)/python -m pytest tests/lower/test_rolled_programs.py --timeout=7200 $(PYTEST_ARGS)

# The extension with its memory accesses and undefined behaviour checked, in a folder of its own, in the tests of graphs,
# traps, threads and forks, and for a minute in threads that record while the process forks. Leaks are not looked for:
# Python's and PyTorch's would be told of.
SANITIZED := build/sanitized
SANITIZED_TESTS ?= tests/record tests/tensor/test_alias.py tests/tensor/test_storage.py tests/tensor/test_lazy_clone.py \
	tests/cut/test_held.py tests/cut/test_donation.py tests/public/test_processes.py
LIBRARY = $(shell $(CXX) -print-file-name=$(1))
sanitize: $(STAMPS)/dev
	SANITIZE=address,undefined $(BIN)/python setup.py -q build --build-base $(SANITIZED) --build-lib $(SANITIZED)/lib
	rm -f $(SANITIZED)/report.*
	LD_PRELOAD="$(call LIBRARY,libasan.so) $(call LIBRARY,libubsan.so) $(call LIBRARY,libstdc++.so)" STRESS_SECONDS=60 \
	ASAN_OPTIONS=detect_leaks=0:log_path=$(CURDIR)/$(SANITIZED)/report \
	UBSAN_OPTIONS=print_stacktrace=1:log_path=$(CURDIR)/$(SANITIZED)/report \
	$(BIN)/python -m pytest -o pythonpath=$(SANITIZED)/lib --timeout=1200 $(PYTEST_ARGS) $(SANITIZED_TESTS)
	@if ls $(SANITIZED)/report.* > /dev/null 2>&1; then cat $(SANITIZED)/report.*; exit 1; fi

# All operators; ARGS="--ops 'linalg.*' --dtypes float32 --only failed" takes some of them.
test-ops: $(STAMPS)/dev $(STAMPS)/build
	PYTHONPATH=tests $(BIN)/python -m opdb --workers $(WORKERS) $(ARGS)

# All overloads of aten, with inputs made from their schemas; ARGS="--ops 'aten.add.*' --only failed" takes some of them.
test-overloads: $(STAMPS)/dev $(STAMPS)/build
	PYTHONPATH=tests $(BIN)/python -m opdb --overloads --workers $(WORKERS) $(ARGS)

# torchtitan, beside the libraries of extra `[callers]`: pip would take a newer PyTorch for it.
test-callers: $(STAMPS)/dev $(STAMPS)/build
	$(BIN)/python -m pip install -q "datasets>=3.6,<4.8" tyro einops tensorboard wandb safetensors tokenizers
	$(BIN)/python -m pip install -q --no-deps torchtitan==0.3.0 torchdata==0.11.0 torch_checkpointing==0.1.1 \
	spmd_types==0.2.3 triton
	$(BIN)/python -m pytest tests/callers $(PYTEST_ARGS)

# Small models of transformers and samplers of diffusers; NAMES="mixtral euler" takes some of them.
test-models: $(STAMPS)/dev $(STAMPS)/build
	PYTHONPATH=tests:tests/callers $(BIN)/python -m models $(NAMES)

# The same models with eight layers, which are loops, against the same where they are none; NAMES=... takes some.
test-rolled: $(STAMPS)/dev $(STAMPS)/build
	PYTHONPATH=tests:tests/callers $(BIN)/python -m models --deep $(NAMES)

# The own tests of torch_xla 2.9, from a clone of them; FILES="test_fp8.py" takes some of them.
conformance: $(STAMPS)/dev $(STAMPS)/build
	PYTHONPATH=tests $(BIN)/python -m conformance $(CHECKOUT) $(FILES)

lint: $(STAMPS)/dev
	$(BIN)/ruff check $(PY)
	$(BIN)/ruff format --check $(PY)
	$(BIN)/clang-format --dry-run --Werror $(CSRC)
	$(BIN)/mypy
	$(BIN)/python tools/size.py --check

format: $(STAMPS)/dev
	$(BIN)/ruff check --fix $(PY)
	$(BIN)/ruff format $(PY)
	$(BIN)/clang-format -i $(CSRC)

# The guides as a site, in build/docs/index.html; a warning is an error.
docs: $(STAMPS)/dev $(STAMPS)/build
	$(BIN)/python -m sphinx -q -n -W --keep-going docs build/docs

# A wheel for this Python with a recorder for each PyTorch, and an sdist; ARGS="--torch 2.13.0" takes some of them.
wheel: $(STAMPS)/dev
	$(BIN)/python tools/wheel.py $(ARGS)

bench: $(STAMPS)/dev $(STAMPS)/build
	$(BIN)/python -m benchmarks.run

size:
	@$(PYTHON) tools/size.py

clean:
	rm -rf build torch_xla/*.so torch_xla.egg-info $(STAMPS)/build $(STAMPS)/install
