# Each target makes .venv itself when it is missing or out of date.
#   make demo                     trains an SPD scorer end to end and evaluates it (target head)
#   make demo SPD_BACKBONE=own    the same with a scorer that reads the text itself (LoRA or full backbone)
#   make demo-serve               the demo's scorer in a vLLM server: accuracy and speed over HTTP (after make demo)
#   make demo-grpo                runs GRPO on a small language model, with vLLM in the ranks' processes
#   make demo-pretrained          GRPO of SmolLM2-135M-Instruct, which a Python package carries, or of MODEL=DIR (under half an hour)
#   make demo-pretrained-dllm     iterative refinement of that model after fine-tuning, next to plain SFT, in vLLM's server too (hours on 2 cores; resumes)
#                                 both take MODEL=DIR, OUT=DIR and SEEDS="0 1 2"; the latter GSM8K=DIR, too, for questions of GSM8K
#   make demo-pretrained-spd      a scorer for speculative decoding of Qwen2.5-Coder-1.5B-Instruct with the 0.5B model's drafts on GSM8K=DIR
#                                 (train.jsonl, test.jsonl), up to vLLM's server (hours on 2 cores; resumes); of another pair by TARGET=DIR
#                                 DRAFT=DIR, and OUT=DIR, SEEDS="0 1 2"
#   make demo-gsm8k               GRPO of Qwen2.5-Coder-0.5B-Instruct, or of MODEL=DIR, on GSM8K=DIR (hours on 2 cores; resumes); LORA=32 trains
#                                 adapters, PROMPT=NAME asks in another way (docs/gsm8k.md); OUT=DIR and SEEDS="0 1 2" too
#   make demo-dllm                iterative refinement and a plain SFT twin; generation in blocks
#   make demo-tools               GRPO with a calculator as a tool, next to GRPO without it
#   make frontier                 scorers and rules swept, five seeds (about 10 minutes per seed on 2 cores; resumes)
#   make test                     the tests, without the longest, and those of demos, benchmarks, audit and fault injection (about 15 minutes)
#   make test-quick               the tests that start no process (about 6 minutes)
#   make test-all                 every test
#   make test-models              what works for each model family and chat template (fetched first), against the stored tables
#                                 (tests/models); families on ranks and in vLLM too
#   make test-sglang              the tests of SGLang with a real server on the CPU (environment of make sglang-env)
#   make test-environments        a few steps of GRPO with each library of environments, in .venv-environments/NAME (docs/environments.md)
#   make test-gateway             an agent library as a client of the gateway, in an environment of its own
#   make bench                    measurements, medians in one run (benchmarks/)
#   make bench BENCH=rl           one of them by name
#   make bench BENCH=pretrained   the pretrained model: three seeds, TRL (hours; resumes), only by name
#   make bench BENCH=gsm8k        make demo-gsm8k on three seeds, with GSM8K in outputs/gsm8k (hours; resumes), only by name
#   make bench BENCH=pretrained_spd   make demo-pretrained-spd on three seeds of the scorer (hours; resumes), only by name
#   make bench BENCH=pretrained_dllm  make demo-pretrained-dllm on three seeds (hours; resumes), only by name
#   make bench BENCH=speculative  rollouts with drafts, of the refined model of make demo-dllm, only by name
#   make test-v2                  the scorer in vLLM's V2 runner, in Triton's interpreter (fetches Triton, 1 GB on disk)
#   make chaos                    fault injection: its tests, 20 random SIGKILLs of SPD trainings and 10 of one with tools, 20 SIGSTOPs of GRPO
#   make gpu-check                CUDA paths against a CPU or one GPU, throughput, MFU and memory; a list without a GPU
#   make gpu-check MODEL=DIR      with the demo of a pretrained model too
#   make audit                    public names, keys and metrics against upstream's 0.7.0 wheel, which pip fetches
#   make audit AUDIT=0.9.1        the same of verl 0.9.1
#   make docs                     the documentation site in outputs/site (mkdocs in an environment of its own)
#   make lint                     ruff; yaml files and tables of the docs are those of the code
SHELL := /bin/bash
VENV ?= .venv
DOCS_VENV ?= .venv-docs
V2_VENV ?= .venv-v2
SGLANG_VENV ?= .venv-sglang
ENVIRONMENT_VENVS ?= .venv-environments
export AGENTS_VENV ?= .venv-agents
PY := $(VENV)/bin/python
SPD_BACKBONE ?= target
AUDIT ?= 0.7.0
TEST_PROCESSES ?= 2
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Without bytecode files every process of a run would compile all modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: env sglang-env demo demo-serve demo-grpo demo-pretrained demo-pretrained-spd demo-pretrained-dllm demo-gsm8k demo-dllm demo-tools frontier test test-quick test-all test-models \
  test-v2 test-sglang test-environments test-gateway \
  bench chaos gpu-check audit docs lint clean

env:
	@VENV=$(VENV) scripts/setup_env.sh

demo: env
	@$(PY) -m examples.spd_arithmetic.demo --backbone $(SPD_BACKBONE)

demo-serve: env
	@$(PY) -m examples.spd_arithmetic.demo_serve

demo-grpo: env
	@$(PY) -m examples.grpo_arithmetic.demo

# What examples/pretrained needs, next to the environment.
PRETRAINED = $(PY) -m pip --disable-pip-version-check -qq install --no-deps -r requirements/pretrained.txt
OUT_AND_SEEDS = $(if $(OUT),--out $(OUT)) $(if $(SEEDS),--seeds $(SEEDS))
PAIR_OPTIONS = $(if $(TARGET),--target $(TARGET)) $(if $(DRAFT),--draft $(DRAFT)) $(if $(GSM8K),--gsm8k $(GSM8K))

demo-pretrained: env
	@$(PRETRAINED)
	@$(PY) -m examples.pretrained.demo $(if $(MODEL),--model $(MODEL)) $(OUT_AND_SEEDS)

demo-pretrained-spd: env
	@$(PRETRAINED)
	@$(PY) -m examples.pretrained.spd.demo $(PAIR_OPTIONS) $(OUT_AND_SEEDS)

demo-pretrained-dllm: env
	@$(PRETRAINED)
	@$(PY) -m examples.pretrained.dllm.demo $(if $(MODEL),--model $(MODEL)) $(if $(GSM8K),--gsm8k $(GSM8K)) $(OUT_AND_SEEDS)

demo-gsm8k: env
	@$(PRETRAINED)
	@$(PY) -m examples.pretrained.gsm8k.demo $(if $(MODEL),--model $(MODEL)) $(if $(GSM8K),--gsm8k $(GSM8K)) \
	  $(if $(LORA),--lora $(LORA)) $(if $(PROMPT),--prompt $(PROMPT)) $(OUT_AND_SEEDS)

demo-dllm: env
	@$(PY) -m examples.dllm_arithmetic.demo

demo-tools: env
	@$(PY) -m examples.tools_arithmetic.demo

frontier: env
	@$(PY) -m examples.spd_arithmetic.frontier --results benchmarks/results/spd_seeds.json

PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest --dist loadfile --no-loadscope-reorder
LATER = chaos or demo or benchmark or audit or long or v2 or sglang or environments or gateway
# Named, so that pytest does not collect the other files.
CHAOS = $(shell grep -l mark.chaos -r tests --include=test_*.py)

test: env
	$(PYTEST) -n $(TEST_PROCESSES) -m "not ($(LATER))" $(PYTEST_ARGS)

test-quick: env
	$(PYTEST) -n $(TEST_PROCESSES) -p tests.no_processes -m "not (process or $(LATER))" $(PYTEST_ARGS)

test-all: test
	$(PYTEST) -n $(TEST_PROCESSES) -m "(demo or benchmark or audit) and not (chaos or environments)" $(PYTEST_ARGS)
	$(PYTEST) -n $(TEST_PROCESSES) -m "long and not chaos" $(PYTEST_ARGS)
	$(PYTEST) -n 3 -m chaos $(CHAOS) $(PYTEST_ARGS)

test-models: env
	@OMP_NUM_THREADS=1 $(PY) -m tests.models
	$(PYTEST) -n $(TEST_PROCESSES) -m "long" tests/models $(PYTEST_ARGS)

# The environment, and Triton on top of it.
test-v2: env
	@test -d $(V2_VENV)/lib || { python3 -m venv $(V2_VENV) && $(PY) -c "import site; print(*site.getsitepackages())" \
	  > $$(echo $(V2_VENV)/lib/python3*/site-packages)/environment.pth && \
	  $(V2_VENV)/bin/pip --disable-pip-version-check -qq install --no-deps -r requirements/v2.txt; }
	TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 OMP_NUM_THREADS=1 $(V2_VENV)/bin/python -m pytest -m v2 \
	  tests/spd/vllm_plugin/test_v2.py $(PYTEST_ARGS)

sglang-env: env
	@VENV=$(VENV) SGLANG_VENV=$(SGLANG_VENV) scripts/setup_sglang_env.sh

test-sglang: sglang-env
	OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python -m pytest -m sglang $(shell grep -l mark.sglang -r tests --include=test_*.py) $(PYTEST_ARGS)

# Each library on top of the environment, in one of its own: their requirements contradict each other.
test-environments: env
	@for package in reasoning-gym==0.1.25 verifiers==0.4.0 openenv==0.10.0 skyrl-gym==0.4.0; do \
	  name=$${package%%==*}; name=$${name//-/_}; venv=$(ENVIRONMENT_VENVS)/$$name; \
	  test -d $$venv/lib || { python3 -m venv $$venv && $(PY) -c "import site; print(*site.getsitepackages())" \
	    > $$(echo $$venv/lib/python3*/site-packages)/environment.pth; } || exit 1; \
	  $$venv/bin/pip --disable-pip-version-check -qq install $$package || exit 1; \
	  OMP_NUM_THREADS=1 $$venv/bin/python -m pytest -m environments tests/agents/environments/test_training.py \
	    tests/examples/test_environment_adapters.py -k $$name $(PYTEST_ARGS) || exit 1; \
	done

test-gateway: env
	@test -d $(AGENTS_VENV)/lib || { python3 -m venv $(AGENTS_VENV) && \
	  $(AGENTS_VENV)/bin/pip --disable-pip-version-check -qq install -r requirements/agents.txt; }
	$(PYTEST) -m gateway tests/agents/gateway/test_agents_library.py $(PYTEST_ARGS)

bench: env
	@$(PY) -m pip --disable-pip-version-check -qq install --no-deps -r requirements/bench.txt
	@$(if $(filter pretrained% gsm8k,$(BENCH)),$(PRETRAINED))
	@$(PY) -m benchmarks.run $(BENCH)

chaos: env
	$(PYTEST) -n 3 -m chaos $(CHAOS) $(PYTEST_ARGS)
	@$(PY) -m tests.chaos
	@$(PY) -m tests.chaos --signal STOP
	@$(PY) -m tests.agents.agent_loop.test_killed_tools_run 10

gpu-check: env
	@mkdir -p outputs
	@$(if $(MODEL),$(PRETRAINED))
	@$(PY) -m scripts.gpu_check --json outputs/gpu_check.json $(if $(MODEL),--model $(MODEL))

audit: env
	@mkdir -p outputs/audit
	@$(PY) -m pip --disable-pip-version-check download -qq verl==$(AUDIT) --no-deps -d outputs/audit
	@$(PY) scripts/audit_upstream.py --upstream outputs/audit/verl-$(AUDIT)-py3-none-any.whl

docs:
	@test -x $(DOCS_VENV)/bin/mkdocs || { python3 -m venv $(DOCS_VENV) && $(DOCS_VENV)/bin/pip --disable-pip-version-check -qq install -r requirements/docs.txt; }
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build -q
	@echo "outputs/site/index.html; with search: python3 -m http.server -d outputs/site"

lint: env
	@$(PY) -m ruff check .
	@$(PY) scripts/make_docs.py --check

clean:
	rm -rf outputs .pytest_cache .ruff_cache build *.egg-info
