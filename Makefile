# `make help` lists the targets. Every target sets up what it needs; see deploy/setup/setup.sh.

MODEL ?=
POLICY ?= h2o
BUDGET ?=
PORT ?= 8000
VLLM ?= 0.32.0
ARGS ?=

SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help serve demo test test-all lint format bench bench-overhead bench-scheduler bench-pressure soak stream-100k stream-4m model setup lock check-wheel clean distclean

BIN := .venv/bin
export PYTHON DEVICE

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17
	@echo
	@echo "Variables of serve: MODEL (default: the embedded one), POLICY (h2o), BUDGET (tokens), PORT (8000),"
	@echo "ARGS (further options of vllm serve). Of every target: PYTHON (a Python 3.11), DEVICE (cpu or gpu)."

serve: setup ## Serve a model on 127.0.0.1:8000 with KV cache eviction
	@exec $(BIN)/vllm-evict serve --port $(PORT) --policy $(POLICY) \
		$(if $(MODEL),--model '$(MODEL)') $(if $(BUDGET),--budget $(BUDGET)) -- $(ARGS)

demo: setup ## Serve on a free port, send a long prompt and a chat, show what was evicted, stop
	@exec $(BIN)/python examples/demo.py $(ARGS)

test: setup-dev lint model ## Lint and run the tests
	$(BIN)/pytest tests -m "not slow and not gpu" $(ARGS)

test-all: setup-dev lint model ## The same with the slow tests
	$(BIN)/pytest tests -m "not gpu" $(ARGS)

lint: setup-dev ## Check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup-dev ## Rewrite the files in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup-dev model ## Measure throughput under batching (ARGS=--quick: in under 20 minutes)
	@exec $(BIN)/vllm-evict bench throughput $(ARGS)

bench-overhead: setup model ## Measure what eviction costs a decode step
	@exec $(BIN)/vllm-evict bench overhead $(ARGS)

bench-scheduler: setup model ## Measure what eviction costs the scheduler, without a model
	@exec $(BIN)/vllm-evict bench scheduler $(ARGS)

bench-pressure: setup model ## A pool for 60 % of the load: eviction against preemption
	@exec $(BIN)/vllm-evict bench pressure $(ARGS)

soak: setup model ## Half an hour of mixed load: does any process grow? (ARGS='--minutes 5')
	@exec $(BIN)/vllm-evict bench soak $(ARGS)

stream-100k: setup ## 100,000 tokens through one request: time per token and memory at both ends
	@exec $(BIN)/vllm-evict bench stream --tokens 100000 --window 20000 --decode 1000 $(ARGS)

stream-4m: setup ## The same with 4 million tokens
	@exec $(BIN)/vllm-evict bench stream $(ARGS)

model: setup ## Prepare the embedded model and print its folder
	@$(BIN)/vllm-evict model

setup: ## Set up .venv
	@deploy/setup/setup.sh run

.PHONY: setup-dev
setup-dev:
	@deploy/setup/setup.sh dev

lock: setup ## Write the locks of pinned packages anew
	deploy/setup/locks/update.sh

check-wheel: ## Check a GPU wheel of vLLM (VLLM=0.33.0) against all that this project relies on
	@deploy/gpu-check/check_wheel.sh $(VLLM)

clean: ## Remove caches and build output
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis deploy/setup/vllm-name/{build,*.egg-info}
	find . -path ./.venv -prune -o -path ./.bootstrap -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## Remove .venv as well (the model stays in its cache)
	rm -rf .venv .bootstrap *.egg-info
