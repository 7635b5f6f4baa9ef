# Every target does its own set-up. PYTHON names the interpreter that .venv is made with (3.11 or newer).
PYTHON ?= python3
TORCH  ?= torch==2.13.0
# Where to find another build of torch, e.g. one for CPUs alone: make demo TORCH_INDEX=<url of an index of wheels>
TORCH_INDEX ?=
OMNI   := $(shell sed -n 's/^vllm-omni==//p' requirements/vllm-omni-cpu.txt)

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Files of tests at a time, in their order, which has long ones early; the tests of one file share what they start.
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
CODE := flowfleet services recipes bench deploy examples tests
# What calls the packages with wide ranges: models and engines, the trainer, REST and the command line, the rewards.
LOWEST_TESTS := tests/flowfleet/models tests/flowfleet/algorithms tests/flowfleet/client/test_client.py \
	tests/flowfleet/cli/test_main.py tests/services tests/e2e/test_loop.py
# What writes the generated parts of the docs.
DOCS := docs.generate.algorithms docs.generate.metrics docs.generate.models docs.generate.settings \
	docs.generate.scorers examples.quotes

# Tests start many processes: each would compile the tree again, and each worker the tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo veomni vllm-omni vllm-omni-cuda test test-fast test-lowest test-cluster test-slurm test-all lint audit fmt docs lock protos \
	bench images clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 16

setup: $(VENV)/.dev $(VENV)/.vllm-omni  ## make .venv with all that development needs

demo: $(VENV)/.local  ## train the tiny model on this machine until it writes its signs right
	$(BIN)/flowfleet demo $(DEMO_FLAGS)

vllm-omni: $(VENV)/.vllm-omni  ## add the vLLM-Omni engine, for CPUs

veomni: $(VENV)-veomni/.ready  ## make .venv-veomni, whose Python has the training engine VeOmni

vllm-omni-cuda: $(VENV)/.vllm-omni-cuda  ## add the vLLM-Omni engine, for NVIDIA GPUs

# Three files on two cores: a third of the time of these tests is waiting.
test: $(VENV)/.dev $(VENV)/.vllm-omni  ## run the tests, without the long ones
	@tests/browser
	$(PYTEST) --numprocesses 3 -m "not long and not cluster and not slurm" $(PYTEST_FLAGS)

test-fast: $(VENV)/.dev  ## run the tests that need neither torch nor a process, in a minute and a half
	$(PYTEST) --numprocesses 2 --fast $(PYTEST_FLAGS)

# The same target in an environment of its own, where pip takes what requirements/lowest.txt pins.
test-lowest:  ## run some of the tests with the oldest versions that pyproject.toml accepts
	@PIP_CONSTRAINT=$(CURDIR)/requirements/lowest.txt $(MAKE) --no-print-directory VENV=.venv-lowest \
		PYTEST_FLAGS="$(LOWEST_TESTS) $(PYTEST_FLAGS)" test

test-cluster: $(VENV)/.dev  ## run the demo, and faults, in the Kubernetes cluster that KUBECONFIG names; see tests/cluster/run
	PYTEST="$(BIN)/python -m pytest" tests/cluster/run $(PYTEST_FLAGS)

test-slurm: $(VENV)/.dev  ## run a fleet, and faults, on a Slurm of two nodes on this machine; see tests/slurm/run
	PYTEST="$(BIN)/python -m pytest" tests/slurm/run $(PYTEST_FLAGS)

test-all: $(VENV)/.dev $(VENV)/.vllm-omni $(VENV)-veomni/.ready  ## run all tests: kills, matrices and learning too
	@tests/packages
	@tests/browser
	@start=$$(date +%s); $(PYTEST) --numprocesses 2 -m "not cluster and not slurm" $(PYTEST_FLAGS); status=$$?; took=$$(($$(date +%s) - start)); \
	echo "test-all took $$((took / 60)) min $$((took % 60)) s; the aim is 40 min on two cores"; exit $$status

lint: $(VENV)/.dev  ## check style, words, types and who imports whom
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/python -m docs.lint.words
	$(BIN)/codespell $(CODE) docs docker protos *.md
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

audit: $(VENV)/.dev  ## look up known vulnerabilities of what .venv holds
	$(BIN)/python -m deploy.audit $(AUDIT_FLAGS)

fmt: $(VENV)/.dev  ## format the code and fix what the linter can fix
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: $(VENV)/.dev  ## write the generated tables of the docs again
	@set -e; for module in $(DOCS); do echo "python -m $$module"; $(BIN)/python -m $$module >/dev/null; done

lock: $(VENV)/.dev  ## pin the oldest versions, and those of the images, from pyproject.toml again
	PATH="$(CURDIR)/$(BIN):$$PATH" requirements/lock

protos: $(VENV)/.dev  ## generate flowfleet/proto from protos/
	PATH="$(CURDIR)/$(BIN):$$PATH" protos/generate.sh $(CURDIR)/$(BIN)/python

bench: $(VENV)/.dev  ## time a job as services against the same job in one process; bench/README.md has more
	$(BIN)/python -m bench.loop --tiny --compare $(BENCH_FLAGS)

images:  ## build the container images; see docker/README.md
	docker/build $(IMAGES)

clean:  ## remove .venv, caches and runs/
	rm -rf $(VENV) $(VENV)-veomni .venv-lowest .venv-trackers .venv-scorers .venv-stores runs build dist docker/out *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf examples/reward-node/node_modules
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +

# Stamps: made again when pyproject.toml changes. torch goes first, so that nothing else picks another build of it.
$(VENV)/.torch: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(PYTHON) is older than 3.11: name a newer one, e.g. make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@test -x $(BIN)/python || echo "Making $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) 2>/dev/null || $(PYTHON) -m venv --without-pip $(VENV)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m pip --quiet --python $(BIN)/python install pip
	@echo "Installing $(TORCH)"
	@$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	@touch $@

$(VENV)/.local: $(VENV)/.torch
	@echo "Installing flowfleet[local]"
	@$(PIP) install -e '.[local]' '$(TORCH)'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch
	@echo "Installing flowfleet[dev]"
	@$(PIP) install -e '.[dev]' '$(TORCH)'
	@touch $(VENV)/.local $@

# After .local, which .dev touches too: either may replace what is installed here.
# vLLM is built without kernels: its wheel is for CUDA. Without build isolation, which would download a CUDA torch.
$(VENV)/.vllm-omni: requirements/vllm-omni-cpu.txt Makefile $(VENV)/.local
	@echo "Installing vLLM-Omni $(OMNI) for CPUs"
	@env -u PIP_CONSTRAINT $(PIP) install --no-deps -r requirements/vllm-omni-cpu.txt
	@VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(OMNI) \
		$(PIP) install --no-deps --no-build-isolation --no-binary vllm vllm==$(OMNI)
	@touch $@

# Its older packages come before those of $(VENV), which stay as they are.
$(VENV)-veomni/.ready: requirements/veomni.txt Makefile $(VENV)/.local
	@echo "Installing VeOmni"
	@$(BIN)/python -m venv --without-pip $(VENV)-veomni
	@of='import sysconfig; print(sysconfig.get_path("purelib"))'; site=$$($(VENV)-veomni/bin/python -c "$$of"); \
		env -u PIP_CONSTRAINT $(PIP) install --no-deps --upgrade --target "$$site" -r requirements/veomni.txt && \
		echo "import site; site.addsitedir('$$($(BIN)/python -c "$$of")')" >"$$site/others.pth"
	@touch $@

# Serves CPUs as well, so nothing puts the other vLLM in its place. That one goes first: it has the same version.
$(VENV)/.vllm-omni-cuda: Makefile $(VENV)/.local
	@echo "Installing vLLM-Omni $(OMNI) for NVIDIA GPUs"
	@$(PIP) uninstall --yes vllm
	@$(PIP) install --only-binary vllm -e '.[local,vllm-omni]' '$(TORCH)'
	@touch $(VENV)/.vllm-omni $@
