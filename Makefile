# What a newcomer and CI run. `make demo` and `make test` need a C compiler, Python 3.11 and a package index; nothing else.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NATIVE := $(shell find native -name '*.[ch]' -o -name CMakeLists.txt -o -name build.py 2>/dev/null)

.PHONY: demo test nightly lint native house native-tests clean help

help:
	@echo "make demo          build, get the model, start two daemons on this machine, ask them a question"
	@echo "make test          everything the tests need, then the tests"
	@echo "make nightly       10,000 simulated meshes from fresh seeds (MESHLLM_SIMULATION_WORLDS=100000 make nightly for more)"
	@echo "make lint          ruff, format check, mypy, and the tests of the house rules"
	@echo "make native        build the C part again"
	@echo "make native-tests  the C tests: plain, ASan+UBSan, TSan, and for aarch64 under qemu where that is installed"

demo: $(VENV)/.installed
	@$(BIN)/python scripts/demo.py

test: $(VENV)/.tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

nightly: $(VENV)/.tests
	MESHLLM_SIMULATION_WORLDS=$${MESHLLM_SIMULATION_WORLDS:-10000} $(BIN)/python -m pytest -q -rA -o faulthandler_timeout=0 tests/simulation -k many

lint: $(VENV)/.tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/house

native: $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e .
	@touch $(VENV)/.installed

native-tests:
	$(MAKE) -C native check check-asan check-tsan
	@if command -v aarch64-linux-gnu-gcc qemu-aarch64 >/dev/null; then $(MAKE) -C native check-aarch64; \
	else echo "left out: aarch64 (apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)"; fi

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "meshllm needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || { echo "no C compiler: apt install gcc (or clang)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "no venv module: apt install python3-venv python3-dev"; exit 1; }

$(VENV)/.installed: pyproject.toml $(NATIVE) | $(VENV)/bin/python
	@echo "building meshllm into $(VENV) (about a minute the first time)"
	@$(BIN)/python -m pip install -q -e .
	@touch $@

# The test tools alone, so that the C part is not built twice.
$(VENV)/.tests: pyproject.toml $(VENV)/.installed
	@$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['test'], sep='\n')" > $(VENV)/test-tools.txt
	@$(BIN)/python -m pip install -q -r $(VENV)/test-tools.txt
	@touch $@

clean:
	rm -rf build $(VENV)/.installed $(VENV)/.tests .demo
