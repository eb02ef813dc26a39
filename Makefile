# The two commands a newcomer needs are `make demo` and `make test`; each does all of its own set-up.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A cluster is used by the tests only when it is named on the command line: one that is in the environment by habit may be in use.
OWN_CLUSTER := $(if $(filter command,$(origin KUBECONFIG)),$(KUBECONFIG))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test test-long docs test-manual test-newcomer system-packages clients axe lint soak test-kubernetes bench bench-server bench-scale bench-growth bench-postgres bench-gateway bench-serving bench-autoscale bench-kubernetes bench-plan bench-train bench-aot bench-attention bench-maxtext bench-files bench-page screenshots clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.ready  ## Make .venv with Podway and everything the tests need

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

demo:  ## Plan, rehearse, launch on a simulated pod, train, serve, ask and measure, in about two minutes
	@$(PYTHON) tools/demo

test:  ## Lint, types and the tests (under 20 minutes on 2 cores)
	@$(MAKE) -s -j3 --output-sync system-packages clients axe lint
	$(BIN)/python -m pytest -n 4 --dist loadfile tests

test-long: setup system-packages clients  ## More cases of the same: every crash point, mesh and model family (10 minutes)
	$(BIN)/python -m pytest -n 4 --dist loadfile -m long tests

docs: setup  ## The manual as a site, links checked: build/site (a few seconds)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

test-manual: setup system-packages  ## Type the commands of every page of the manual, on simulated slices and the sandbox (10 minutes)
	$(BIN)/python -m pytest -m 'soak or not soak' tests/manual/test_site.py tests/manual/test_commands.py

test-newcomer: setup  ## Play a newcomer in a terminal of 60 and of 120 columns: README and first pages (5 minutes)
	@bash tools/system-packages tmux
	$(BIN)/python -m pytest -m soak tests/manual/test_newcomer.py

system-packages:
	@bash tools/system-packages

clients:
	@bash tools/clients

axe:  # of the browser tests; without npm they skip what needs it
	@bash tools/axe || true

lint: setup  ## ruff and mypy --strict
	$(BIN)/ruff check src tests tools/bench
	$(BIN)/ruff format --check src tests tools/bench
	$(BIN)/mypy

soak: setup  ## The long fuzz, chaos and load runs
	@bash tools/clients all
	$(BIN)/python -m pytest -m soak --timeout=3600 tests

test-kubernetes: setup $(if $(OWN_CLUSTER),,system-packages)  ## The Kubernetes tests on a real control plane, built by Go first; KUBECONFIG=FILE: on that cluster instead
	$(if $(OWN_CLUSTER),,tools/kubernetes/build)
	PODWAY_TEST_KUBECONFIG='$(OWN_CLUSTER)' $(BIN)/python -m pytest -m 'kubernetes and (long or not long)' --timeout=1800 tests/kubernetes

bench: setup  ## CPU of the CLI beside sky and dstack, launch and exec overhead, log merging: writes docs/benchmarks.md
	$(BIN)/python -m tools.bench.spine

bench-server: setup  ## How soon the server answers with 2,000 waiters and 200 log followers open (3 minutes): docs/benchmarks.md
	$(BIN)/python -m tools.bench.server

bench-scale: setup system-packages  ## As root: 64 namespace hosts over ssh, files against rsync, logs, 1,000 endpoints (25 minutes): docs/benchmarks.md
	$(BIN)/python -m tools.bench.scale

bench-growth: setup  ## What the control plane costs for 100, 1,000 and 10,000 hosts (15 minutes): docs/benchmarks.md
	$(BIN)/python -m tools.bench.growth

bench-postgres: setup system-packages  ## Two servers on one PostgreSQL: 200 clusters, 2,000 jobs, servers killed at random (10 minutes): docs/benchmarks.md
	$(BIN)/python -m tools.bench.postgres

bench-gateway: setup  ## The gateway beside LiteLLM's, SkyServe's and dstack's proxies: requests/s, latency, streams (6 minutes): docs/benchmarks.md
	$(BIN)/python -m tools.bench.gateway --write

bench-serving: setup  ## The server of a model beside the model: hostile requests, streams, guided rows, on this CPU (10 minutes): docs/benchmarks.md
	$(BIN)/python -m tools.bench.serving --write

bench-autoscale: setup  ## The autoscaler over days of load beside the rules of SkyServe and dstack (1 minute): writes docs/services.md
	$(BIN)/python -m tools.bench.autoscale --write docs/services.md

bench-kubernetes: setup  ## As root, with Go: 64 pods on a real control plane beside a bare JobSet, and their logs (5 minutes)
	$(BIN)/python -m tools.bench.kubernetes

bench-plan: setup  ## The planner's predictions beside published results: writes docs/planning.md
	$(BIN)/python -m tools.bench.plan --write docs/planning.md

bench-train: setup  ## The training step on this machine, small: a table
	$(BIN)/python -m tools.bench.train

bench-aot: setup  ## Training steps and serving programs through the TPU compiler, without a TPU: writes docs/aot.md
	$(BIN)/python -m tools.bench.aot

bench-attention: setup  ## Cycles of attention over the paged cache beside jax's kernel, by the TPU compiler, without a TPU (10 minutes): docs/serving-internals.md
	$(BIN)/python -m tools.bench.attention

bench-maxtext: setup  ## MaxText's published recipes beside Podway's plans, through the same TPU compiler, without a TPU: writes docs/aot.md
	$(BIN)/python -m tools.bench.maxtext

bench-files: setup  ## How many task files of SkyPilot and dstack are accepted, and why the others are not: FOLDERS="their checkouts"
	$(BIN)/python -m tools.bench.files $(FOLDERS)

bench-page: setup system-packages  ## The web page against its budgets: size, first paint, frames, memory (3 minutes): docs/benchmarks.md
	$(BIN)/python -m tools.bench.page

screenshots: setup system-packages  ## Pictures of the page, of a terminal and the drawings of the docs: docs/images
	@bash tools/system-packages tmux
	$(BIN)/python tools/docs/pictures.py
	$(BIN)/python tools/docs/terminal_picture.py
	$(BIN)/python tools/screenshots.py

clean:  ## Remove what the other targets made
	rm -rf $(VENV) build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
