# One command each; every target makes what it needs. See README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SLOW := $(VENV)/.slow-installed
SOURCES := pyproject.toml CMakeLists.txt $(shell find custom_ops/cpu -type f 2>/dev/null)

.PHONY: demo test test-slow check check-types lint format ext sanitize clean

demo: $(STAMP)
	$(BIN)/pagegraft demo

test: $(STAMP)
	$(BIN)/python -m pytest tests --numprocesses 2 --dist loadfile

test-slow: $(SLOW)
	$(BIN)/python -m pytest tests -m slow -rs --numprocesses 2 --dist loadfile

check: lint check-types

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy does not follow the editable install's import hook: it is shown the namespace as links.
check-types: $(STAMP)
	@rm -rf build/types && mkdir -p build/types/pagegraft
	@ln -s $(CURDIR)/graphpass $(CURDIR)/custom_ops $(CURDIR)/runtime build/types/pagegraft/
	cd build/types && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml -p pagegraft

# Rebuilds the C++ library after a change (an editable install does not do so by itself).
ext: $(STAMP)

$(STAMP): $(SOURCES)
	@command -v $(PYTHON) >/dev/null || { echo "pagegraft needs Python 3.11 or newer: install python3 and python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "pagegraft needs Python 3.11 or newer: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "pagegraft needs Python's venv module: install python3-venv" >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || { echo "pagegraft needs a C++17 compiler: install g++" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing pagegraft and its test tools into $(VENV)"
	@flock $(VENV)/.lock $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(STAMP)

# The core with AddressSanitizer and UBSan: random malformed calls, then the conformance suite through a pipe.
SANITIZE := build/sanitize
FUZZ_CALLS ?= 20000
sanitize: $(STAMP)
	@command -v cmake >/dev/null || test -x $(BIN)/cmake || $(BIN)/python -m pip install --quiet cmake
	PATH="$$PATH:$(CURDIR)/$(BIN)" cmake -S . -B $(SANITIZE) -DCMAKE_BUILD_TYPE=None -DPAGEGRAFT_TOOLS=ON -DPAGEGRAFT_SANITIZE=address,undefined
	PATH="$$PATH:$(CURDIR)/$(BIN)" cmake --build $(SANITIZE) --target pagegraft_fuzz pagegraft_replay
	$(SANITIZE)/custom_ops/cpu/pagegraft_fuzz $(FUZZ_CALLS)
	PAGEGRAFT_CORE_REPLAY=$(CURDIR)/$(SANITIZE)/custom_ops/cpu/pagegraft_replay PYTHONPATH=tests/unit/cpu \
	  $(BIN)/pagegraft conformance --backend core_process:CoreProcess

# Only some slow tests and the Ascend path want torch, only slow tests the engine and the workflows of other projects.
$(SLOW): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 onnxruntime-genai==0.18.0 olive-ai==0.13.0
	@touch $(SLOW)

clean:
	rm -rf build $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
