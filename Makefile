# Everything runs in .venv, which each target makes or brings up to date first; a second run starts at once.
# Serving needs torch, transformers and small libraries; what tests, checks and benchmarks need beyond them is
# installed by the first target that does.
TORCH ?= torch==2.13.0
PIP_ARGS ?=
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Bytecode is made by the first import, of what is imported, and kept, whatever the shell says: without it each process of a
# launch compiles all that it imports again, and starting takes twice as long.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/pip install --disable-pip-version-check --no-compile --progress-bar on $(PIP_ARGS)

.PHONY: setup setup-serving serve test test-page test-metrics test-servers test-rings test-models test-launches test-kernels test-simulation test-project test-faults test-pretended test-unit test-unit-first test-unit-rest test-all soak check docs-check format bench gpu gpu-wheels gpu-prepare gpu-test gpu-kernels gpu-bench gpu-serve gpu-bars clean

setup: $(VENV)/.ready
# Who has the test tools has all that serving needs.
setup-serving: $(if $(wildcard $(VENV)/.ready),$(VENV)/.ready,$(VENV)/.serving)

# torch first and by itself: which build it is, is the caller's choice, and the range in pyproject is then satisfied.
define install
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV), once: $(2)"
	$(PIP) "$(TORCH)"
	$(PIP) --editable "$(1)"
	@touch $@
endef

FOR_SERVING := $(TORCH) (0.2 GB as a CPU build, 3 GB with CUDA's libraries), transformers and small libraries (0.1 GB)
$(VENV)/.serving: pyproject.toml
	$(call install,.,$(FOR_SERVING))

$(VENV)/.ready: pyproject.toml
	$(call install,.[test],$(FOR_SERVING); the tools of tests and checks (0.3 GB))

serve: setup-serving
	$(BIN)/python launch.py $(ARGS)

# In parts, each a process of its own that computes on one core, more or less, and waits for launches: one more at a time
# than there are cores, so that none idles. The longest come first, so that what is left at the end is short. With a GPU Triton
# compiles in tests/gpu, and interprets in no other.
PARTS := servers rings kernels models launches simulation faults pretended project unit-first unit-rest
JOBS := $(shell expr $$(nproc) + 1)
test: setup
	$(MAKE) --no-print-directory --jobs $(JOBS) --keep-going $(PARTS:%=test-%)

# The benchmark collects garbage in each run: before others have imported LiteLLM, whose objects take it 0.4 s.
SERVERS := tests/cpu/bench tests/cpu/openai tests/cpu/http tests/cpu/guides
MODELS := tests/cpu/models tests/cpu/sampling tests/cpu/worker
SIMULATION := tests/simulation tests/cpu/scheduler
LAUNCHES := tests/cpu/launch tests/cpu/launcher
# With ARGS it may be that a part has no test that is chosen: 5.
TEST = $(BIN)/python -m pytest -m "not full" $(1) $(ARGS) $(if $(ARGS),|| [ $$? -eq 5 ])
# Beside the first part, which shows how far it is.
define in_one_piece
	@out=$$(mktemp); trap 'rm -f "$$out"' EXIT; { $(1); } >"$$out" 2>&1; status=$$?; echo; cat "$$out"; exit $$status
endef
ELSEWHERE := $(SERVERS) $(MODELS) $(SIMULATION) $(LAUNCHES) tests/cpu/triton
test-rings: setup
	@$(call TEST,tests/cpu $(ELSEWHERE:%=--ignore %))
test-servers: setup
	$(call in_one_piece,$(call TEST,$(SERVERS)))
test-models: setup
	$(call in_one_piece,$(call TEST,$(MODELS)))
test-simulation: setup
	$(call in_one_piece,$(call TEST,$(SIMULATION)))
test-project: setup
	$(call in_one_piece,$(call TEST,tests/project))
test-launches: setup
	$(call in_one_piece,$(call TEST,$(LAUNCHES)))
test-kernels: setup
	$(call in_one_piece,$(call TEST,tests/cpu/triton))
test-faults: setup
	$(call in_one_piece,$(call TEST,tests/faults))
test-pretended: setup
	$(call in_one_piece,$(call TEST,--pretend tests/gpu))

# In two processes, which two cores take half the time for.
test-unit: setup
	@$(MAKE) --no-print-directory --jobs 2 --keep-going test-unit-first test-unit-rest
# By the first letters of the folders of tests/unit, so that both take as long. Whoever asks for these has set up.
test-unit-first:
	$(call in_one_piece,$(call TEST,tests/unit/[c-l]*/))
test-unit-rest:
	$(call in_one_piece,$(call TEST,tests/unit/[abm-z]*/))

# Its launches start as they do for a user; those of `make test` are forked from a process with all imports.
test-all: setup
	$(BIN)/python -m pytest --cold tests/project tests/unit tests/simulation tests/cpu tests/faults $(ARGS)
	$(BIN)/python -m pytest --pretend tests/gpu $(ARGS)

# The page in Debian's Chromium. Who is not root is told the one command that installs it.
CHROMIUM := DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends chromium
test-page: $(VENV)/.page
	@command -v chromium >/dev/null || { \
	  [ $$(id -u) = 0 ] || { echo "test-page needs Chromium: sudo $(CHROMIUM)" >&2; exit 1; }; \
	  apt-get update && $(CHROMIUM); }
	$(BIN)/python -m pytest tests/page $(ARGS)

$(VENV)/.page: $(VENV)/.ready
	$(PIP) --editable ".[test,page]"
	@touch $@

# Metrics as a real Prometheus reads them, with the dashboard and the alerts of deploy/.
PROMETHEUS := DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends prometheus
test-metrics: setup
	@command -v prometheus >/dev/null || { \
	  [ $$(id -u) = 0 ] || { echo "test-metrics needs Prometheus: sudo $(PROMETHEUS)" >&2; exit 1; }; \
	  apt-get update && $(PROMETHEUS); }
	$(BIN)/python -m pytest tests/metrics $(ARGS)

# The long form of tests/faults; ARGS="--minutes 10" for a short one.
soak: setup
	$(BIN)/python -m tests.faults.soak $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# In two processes; where these do not find each other in time (2), as on a busy machine, in one.
	$(BIN)/mypy --num-workers 2 || { [ $$? -eq 2 ] && $(BIN)/mypy; }
	$(BIN)/python -m pytest -q tests/project/test_import_floors.py tests/project/test_file_sizes.py \
	  tests/project/test_docstrings.py tests/project/test_code_rules.py $(DOCS)
	@# Figures that nobody judges.
	$(BIN)/python -m benchmarks.code.code_rules

# Links and blocks of code of all pages; ARGS=tests/cpu/launch/test_docs_run.py also runs the blocks, in 2 minutes.
DOCS := tests/project/test_docs_links.py tests/project/test_docs_blocks.py
docs-check: setup
	$(BIN)/python -m pytest -q $(DOCS) $(ARGS)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m benchmarks.bench_step
	$(BIN)/python -m benchmarks.bench_overlap
	$(BIN)/python -m benchmarks.bench_worker_plan
	$(BIN)/python -m benchmarks.bench_detokenizer
	$(BIN)/python -m benchmarks.bench_load_client
	$(BIN)/python -m benchmarks.bench_front

# On a machine with a GPU, no network: stages that can be run one by one; what has a file in GPU_OUT is done.
GPU_OUT ?= gpu-results
MODEL ?=

# What fails keeps nothing else from running. `SETUP= BIN=DIR`: nothing is installed, DIR has all that is needed.
SETUP ?= setup
gpu:
	$(MAKE) --keep-going gpu-test gpu-kernels gpu-bench gpu-serve gpu-bars

# What benchmarks/gpu/image_packages.txt lacks, for its Python 3.12; one version of each.
PLATFORMS := manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux1_x86_64
gpu-wheels:
	rm -rf .whl
	$(PYTHON) -m pip download --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --only-binary=:all: \
	  --python-version 3.12 --implementation cp $(PLATFORMS:%=--platform %) \
	  --dest .whl --requirement benchmarks/gpu/wheels.txt
	du -sh .whl

# Into Triton's cache; without a GPU say for which: ARGS="--capability 9.0".
gpu-prepare: $(SETUP)
	$(BIN)/python -m benchmarks.gpu.prepare $(ARGS)

gpu-test: $(SETUP)
	mkdir -p $(GPU_OUT)
	$(BIN)/python -m pytest -q tests/gpu --junit-xml $(GPU_OUT)/gpu-test.xml $(ARGS)

gpu-kernels: $(SETUP)
	$(BIN)/python -m benchmarks.gpu.stages --out $(GPU_OUT) device kernels attention launch_cost graph_gap block_copy nccl \
		tiles $(ARGS)

gpu-bench: $(SETUP)
	$(BIN)/python -m benchmarks.gpu.stages --out $(GPU_OUT) decode $(if $(MODEL),--model $(MODEL)) $(ARGS)

gpu-serve: $(SETUP)
	$(BIN)/python -m benchmarks.gpu.stages --out $(GPU_OUT) serve baseline $(if $(MODEL),--model $(MODEL)) $(ARGS)

gpu-bars: $(SETUP)
	$(BIN)/python -m benchmarks.gpu.bars $(GPU_OUT)

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache
