# One command sets up (any target does), one checks: `make check`.

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV ?= .venv
# What `make test` and `make check` install; add `parity` to compare with transformers live.
EXTRAS ?= dev
PROMPT ?= def fibonacci(n):\n\040\040\040\040
# Compiling, which most of the tests' time goes to, takes one core.
WORKERS ?= 2

BIN := $(VENV)/bin
comma := ,
DEV_STAMP := $(VENV)/installed-$(subst $(comma),-,$(EXTRAS))

.PHONY: demo chat serve test check format format-check lint types protos goldens prove prove-schemas bench-decode load-test grpc-overhead train clean

demo: $(VENV)/installed ## start a server on the embedded checkpoint, ask it, print tokens and figures
	$(BIN)/python tools/client.py --serve --max-tokens 128 --seed 6 $(ARGS) "$$(printf '$(PROMPT)')"

chat: $(VENV)/installed ## talk with the embedded checkpoint in the terminal
	$(BIN)/python tools/chat.py $(ARGS)

serve: $(VENV)/installed ## serve the embedded checkpoint until interrupted
	$(BIN)/python -m service $(ARGS)

test: $(DEV_STAMP) ## all tests
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: format-check lint types test ## what CI runs

format: $(DEV_STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

format-check: $(DEV_STAMP)
	$(BIN)/ruff format --check .

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/buf lint proto

types: $(DEV_STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

protos: $(DEV_STAMP) ## regenerate service/pb from proto/
	$(BIN)/python tools/gen_protos.py

goldens: $(VENV)/installed-dev-parity ## record the reference values again, with transformers
	$(BIN)/python tools/make_goldens.py

prove: $(VENV)/installed ## replies are bitwise the same whatever the drafts, company and load
	$(BIN)/python tools/prove.py $(ARGS)

prove-schemas: $(VENV)/installed-bench ## 200 replies held to JSON schemas: valid, and the same with drafts
	$(BIN)/python tools/prove_schemas.py $(ARGS)

bench-decode: $(VENV)/installed ## rounds per second, tokens per second, acceptance by draft length
	$(BIN)/python tools/bench_decode.py $(ARGS)

load-test: $(VENV)/installed-bench ## 10 minutes of mixed load on a server of its own, with a report
	$(BIN)/python tools/load_test.py $(ARGS)

grpc-overhead: $(VENV)/installed ## time per token through gRPC over the engine's own
	$(BIN)/python tools/grpc_overhead.py $(ARGS)

train: $(VENV)/installed-dev-train ## train the embedded checkpoint again, from packages of both extras
	$(BIN)/python tools/train_demo.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

# installed-dev-parity: the package with the extras dev and parity.
$(VENV)/installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[$(subst -,$(comma),$*)]"
	@touch $@ $(VENV)/installed
