# All the set-up a newcomer needs: `make demo` and `make test` work on a fresh machine with
# Python 3.10+, a C++ compiler and make. Everything lands in .venv and build/.
PYTHON ?= python3
VENV   := .venv
comma  := ,
BIN    := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(shell find cpp -type f)

.PHONY: demo engine engine-tools test test-cpp test-slow bench gpu-check plugin-docs lint clean

# An editable install: Python sources are used in place, the C++ core is built once and again
# when a source of it changes.
$(VENV)/.installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing tllm-wmtp and its dependencies into $(VENV) (some minutes the first time)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

$(VENV)/.linters: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[lint]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/wmtp demo

# What `wmtp build` needs beside the package: TensorRT-RTX and our plugin for it. The CUDA compiler is
# the system's, else fetched from PyPI.
EXTRAS := $(if $(shell command -v nvcc 2>/dev/null),rtx,cuda-build$(comma)rtx)
$(VENV)/.engine-tools: $(VENV)/.installed
	@echo "installing TensorRT-RTX$(if $(findstring cuda,$(EXTRAS)), and the CUDA compiler) into $(VENV)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $@

engine-tools: $(VENV)/.engine-tools
	mkdir -p build
	@echo "compiling the TensorRT plugin (some minutes the first time); log: build/plugin.log"
	$(BIN)/cmake -S . -B build/cuda -G Ninja -DWMTP_PYTHON=OFF -DWMTP_CUDA=ON -DWMTP_TENSORRT=ON \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja > build/plugin.log 2>&1 || (cat build/plugin.log; false)
	$(BIN)/cmake --build build/cuda --target wmtp_tensorrt >> build/plugin.log 2>&1 || (tail -50 build/plugin.log; false)

# The demonstration's draft head, from checkpoint to a compiled NVFP4 engine; no GPU needed.
engine: engine-tools
	test -d build/demo-nvfp4 || $(BIN)/wmtp quantize --model demo --out build/demo-nvfp4
	$(BIN)/wmtp build --model build/demo-nvfp4 --backend rtx --target sm120 --out build/demo-engine
	$(BIN)/wmtp inspect build/demo-engine

test: $(VENV)/.installed test-cpp
	$(BIN)/python -m pytest

# The C++ core's own unit tests: no Python, no framework.
test-cpp: $(VENV)/.installed
	mkdir -p build
	$(BIN)/cmake -S . -B build/cpp-tests -G Ninja -DWMTP_PYTHON=OFF -DWMTP_TESTS=ON \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja > build/cpp-tests.log 2>&1 || (cat build/cpp-tests.log; false)
	$(BIN)/cmake --build build/cpp-tests
	$(BIN)/ctest --test-dir build/cpp-tests --output-on-failure

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow

# Everything that this machine can measure, and one page of it; about 16 minutes on two idle cores.
# Results of an earlier run are taken away first: a page shows one run.
RESULTS := build/bench
bench: $(VENV)/.installed
	rm -rf $(RESULTS) && mkdir -p $(RESULTS)
	$(BIN)/wmtp demo --json > $(RESULTS)/demo.json
	$(BIN)/wmtp bench attention --contexts 64k,256k,1m --repeats 5 --out $(RESULTS)
	$(BIN)/wmtp bench step --contexts 16k,64k,256k,1m --out $(RESULTS)
	$(BIN)/wmtp bench step --contexts 16k,64k,256k,1m --kv-dtype bfloat16 --out $(RESULTS)
	$(BIN)/wmtp bench fit --model demo --out $(RESULTS)
	$(BIN)/wmtp bench fit --model demo-mamba2 --out $(RESULTS)
	$(BIN)/wmtp bench prefill --contexts 4k,16k --out $(RESULTS)
	$(BIN)/wmtp bench run docs/benchmarks/suite.yaml --out $(RESULTS)
	$(BIN)/wmtp probe --model demo --out $(RESULTS)
	$(BIN)/wmtp probe --model demo-mamba2 --out $(RESULTS)
	for model in docs/benchmarks/models/*/; do \
	  $(BIN)/wmtp plan $$model --context 1m --gpu-memory 180g --weights nvfp4 --out $(RESULTS) > /dev/null || exit 1; done
	$(BIN)/wmtp report $(RESULTS) --out $(RESULTS)/report.html --png $(RESULTS)/figures \
	  --markdown $(RESULTS)/README.md

# On a machine with an NVIDIA GPU and no network: builds, tests and measures with that machine's own
# Python (torch) and nvcc; installs nothing.
gpu-check:
	$(PYTHON) build_scripts/gpu_check.py

# The verification table of docs/plugin.md, from the last full run of tests/trt.
plugin-docs: $(VENV)/.installed
	$(BIN)/python build_scripts/plugin_verification.py

lint: $(VENV)/.linters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(find cpp plugins tests/trt -name '*.[ch]pp' -o -name '*.h')

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
