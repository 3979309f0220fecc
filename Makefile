# The two commands of the README are `make run` and `make test`; each sets up everything it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run demo test check bench soak train clean

run: demo

demo: $(STAMP)
	$(BIN)/twostroke generate --prompt-file examples/stack.txt --max-tokens 160 --temperature 0.5 --seed 7

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/twostroke bench offline
	$(BIN)/twostroke bench reproduce all --full

soak: $(STAMP)
	$(BIN)/python -m pytest --hypothesis-profile=soak

train: $(STAMP)
	$(BIN)/python -m training.train

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
