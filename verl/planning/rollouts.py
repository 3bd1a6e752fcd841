"""Checks of what vLLM and SGLang need: kernels for the model, a readable draft model, installed packages."""

import importlib.util
from collections.abc import Iterator
from typing import Any

from verl.config.ppo import PPOConfig
from verl.utils.problems import Problem, absent, one_line, wrong

ROLLOUT = "actor_rollout_ref.rollout"
# Widths of an attention head that vLLM's CPU kernels are built for; others fail at the first request, not at the start.
CPU_HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_cpu_heads(config: PPOConfig, findings: Any) -> Iterator[Problem]:
    """A model whose attention no CPU kernel of vLLM knows."""
    if config.actor_rollout_ref.rollout.name != "vllm" or config.trainer.device != "cpu" or findings.hf_config is None:
        return
    model = findings.hf_config.get_text_config().to_dict()
    if "num_attention_heads" not in model or "hidden_size" not in model:
        return
    width = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    if width not in CPU_HEAD_DIMS:
        key = "actor_rollout_ref.model.path"
        rule = f"{key}={config.actor_rollout_ref.model.path} has attention heads of dimension {width}"
        known = ", ".join(map(str, CPU_HEAD_DIMS))
        remedy = f"Take another model, or {ROLLOUT}.name=hf."
        yield wrong(key, f"{rule}, which vLLM on a CPU (trainer.device=cpu) cannot run: it has {known}. {remedy}")


def check_drafter(config: PPOConfig, findings: Any) -> Iterator[Problem]:
    """A draft model that cannot be read, or whose vocabulary has another size than the model's."""
    rollout, key = config.actor_rollout_ref.rollout, f"{ROLLOUT}.speculative.draft_path"
    path = rollout.speculative.draft_path
    if rollout.name != "vllm" or path is None:
        return
    if rollout.speculative.refresh_every and rollout.mode != "sync":
        every = f"{ROLLOUT}.speculative.refresh_every"
        rule = f"{every}={rollout.speculative.refresh_every} needs {ROLLOUT}.mode=sync, not {rollout.mode}"
        yield wrong(every, f"{rule}: the draft model is trained on the batches that its own rank generates.")
    if rollout.speculative.refresh_every and config.actor_rollout_ref.actor.ulysses_sequence_parallel_size > 1:
        every = f"{ROLLOUT}.speculative.refresh_every"
        sharing = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
        rule = f"{every} does not work with {sharing} above 1: each rank trains the draft model on its own samples."
        yield wrong(every, f"{rule} Set one of them to its default.")
    from transformers import AutoConfig

    try:
        draft = AutoConfig.from_pretrained(path, local_files_only=not findings.to_start).get_text_config()
    except (OSError, ValueError) as error:
        yield absent(key, f"{key}={path} has no config.json that can be read: {one_line(error)}")
        return
    size = findings.hf_config and findings.hf_config.get_text_config().vocab_size
    if size and draft.vocab_size != size:
        rule = f"{key}={path} has {draft.vocab_size} tokens in its vocabulary, the model {size}."
        yield wrong(key, f"{rule} Take a draft model with the same tokenizer, or rollout.speculative.method=ngram.")


def check_sglang(config: PPOConfig, findings: Any) -> Iterator[Problem]:
    """SGLang, or the kernels that it imports, are not installed."""
    if config.actor_rollout_ref.rollout.name != "sglang":
        return
    on_cpu = config.trainer.device == "cpu"
    missing = [name for name in ("sglang", "sgl_kernel") if importlib.util.find_spec(name) is None]
    if missing:
        how = "make sglang-env, then .venv-sglang/bin/python" if on_cpu else "pip install -e .[sglang]"
        what = f"{ROLLOUT}.name=sglang: the package {missing[0]} is not installed here"
        yield absent(f"{ROLLOUT}.name", f"{what}. Set up an environment with it: {how}. Or set {ROLLOUT}.name=vllm.")
