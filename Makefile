# The two commands of the README are `make run` and `make test`; each sets up everything it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PORT ?= 8000
CMAKE := $(BIN)/cmake

.PHONY: run demo path test test-second test-time run-time test-all test-triton check bench figures soak compat compatibility pictures train wheel native native-test native-test-address native-test-thread native-test-arm clean

# A completion by the embedded model; `run` then fetches a small chat model and serves it until Ctrl-C.
run: $(STAMP)
	$(BIN)/python examples/demo.py --port $(PORT) --serve

demo: $(STAMP)
	$(BIN)/python examples/demo.py --port $(PORT)

# A process for each core; a file's tests stay together, since they share servers and engines, and files start in their order,
# so that the long ones are not the last. Tests on two threads share the cores with the other processes: a thread of torch's that
# waits gives its core away. ARGS go to pytest: make test ARGS="tests/api -x", ARGS=-n0 for a single process.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# The first tier: every room and every kind of path, in minutes. tests/second_tier.toml lists what is left to the second, and why.
test: $(STAMP)
	$(PYTEST) --tier first $(ARGS)

# What `make test` leaves out, and property tests again with all of their examples.
test-second: $(STAMP)
	$(PYTEST) --tier second $(ARGS)

# Three timed runs of `make test`, into benchmarks/results/test-tiers.json; ARGS="test ci" times .ci/run, too. On a quiet machine.
test-time: $(STAMP)
	$(BIN)/python tests/time_tiers.py $(ARGS)

# How long a new clone's `make run` takes to show an answer, and the second one, into benchmarks/results/first-run.json.
run-time: $(STAMP)
	$(BIN)/python tests/time_first_run.py $(ARGS)

# Everything: both tiers, and the GPU's kernels in Triton's interpreter.
test-all: test
	$(MAKE) test-second
	$(MAKE) test-triton

# The GPU's kernels in Triton's interpreter, number by number on the CPU, and their compiler without a card. The interpreter is
# chosen when Triton is imported, for the whole process: so they have processes of their own, and `make test` skips these.
test-triton: $(VENV)/.triton
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PYTEST) tests/triton_kernels $(ARGS)

# Alone: what it asks for beside itself is for a GPU, and torch's CUDA builds bring a Triton of their own.
$(VENV)/.triton: $(STAMP)
	$(BIN)/python -c "import triton" 2> /dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "triton==3.9.0"
	touch $@

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n0 -q tests/unit/test_house.py

bench: $(STAMP)
	$(BIN)/twostroke bench offline
	$(BIN)/python -m benchmarks reproduce all --full

# Files and lines of code that a plain chat request and a plain LLM.generate run through; ARGS="--files" names them, ARGS="--write"
# commits to what is there.
path: $(STAMP)
	$(BIN)/python -m benchmarks path $(ARGS)

# The tables of README.md and docs/measurements.md, from the JSON files in benchmarks/results.
figures: $(STAMP)
	$(BIN)/python -m benchmarks table --write

# An hour or two of random schedules, then an hour of a server under everything that clients do.
soak: $(STAMP)
	$(PYTEST) --hypothesis-profile=soak
	$(BIN)/python -m benchmarks reproduce soak --full

# Clients that others wrote, each installed into build/compat/NAME; the first time takes minutes and gigabytes.
compat: $(STAMP)
	PYTHONPATH=. $(BIN)/python tests/compat/run.py

# docs/compatibility.md, from the table of features that tests/compatibility runs pair by pair.
compatibility: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m compatibility.table

# docs/images/page-*.png: what the tests of the page see, on a real server in a real browser.
pictures: $(STAMP)
	$(BIN)/python -m pytest -q --require-all --pictures docs/images tests/api/test_page.py tests/api/test_live_page.py tests/api/test_live_pools_page.py tests/api/test_lab.py

train: $(STAMP)
	$(BIN)/python -m training.train

# dist/twostroke-*.whl, for this Python and this kind of processor.
wheel: $(BIN)/cmake
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*) $(wildcard csrc/kernels/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e ".[dev]"
	touch $@

# An environment that was made once has the tools; an older one than the sources will do for these.
$(BIN)/cmake:
	$(MAKE) $(STAMP)

# The native module inside src/, for working on it without installing: PYTHONPATH=src then finds it.
native: $(BIN)/cmake
	$(CMAKE) -S . -B build/native -DPython_EXECUTABLE=$(abspath $(BIN)/python) -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir)
	$(CMAKE) --build build/native --parallel
	$(CMAKE) --install build/native --prefix src

# The kernels without Python, under the compiler's sanitizers: levels that have code of their own (avx512 is avx512_bf16 but for
# one product), as far as this processor runs them; the pool of threads with the plainest, since who shares what is the same.
NATIVE_TEST := $(CMAKE) -S . -DTWOSTROKE_MODULE=OFF -DTWOSTROKE_TESTS=ON -DTWOSTROKE_OPTIMISE=-O1
IS_ARM := $(filter aarch64 arm64,$(shell uname -m))
SANITIZED_LEVELS := $(if $(IS_ARM),neon;neon_dotprod,portable;avx2;avx512_bf16;amx)
PLAINEST_LEVEL := $(if $(IS_ARM),neon,portable)
native-test: native-test-address native-test-thread

native-test-address: $(BIN)/cmake
	$(NATIVE_TEST) -B build/native-address -DTWOSTROKE_SANITIZE=address,undefined -DTWOSTROKE_LEVELS="$(SANITIZED_LEVELS)"
	$(CMAKE) --build build/native-address --parallel
	build/native-address/native_tests

native-test-thread: $(BIN)/cmake
	$(NATIVE_TEST) -B build/native-thread -DTWOSTROKE_SANITIZE=thread -DTWOSTROKE_LEVELS=$(PLAINEST_LEVEL)
	$(CMAKE) --build build/native-thread --parallel
	build/native-thread/native_tests

# The kernels of 64-bit Arm on an emulated processor, where attention takes longest: its code is the same at both levels, which
# differ in one product of quantized weights. Debian: apt install g++-aarch64-linux-gnu qemu-user
native-test-arm: $(BIN)/cmake
	$(NATIVE_TEST) -B build/native-arm -DTWOSTROKE_TEST_LEVELS="neon;neon_dotprod:linear,quantized,elementwise,sampling" \
	  -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake
	$(CMAKE) --build build/native-arm --parallel
	$(BIN)/ctest --test-dir build/native-arm --verbose

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
