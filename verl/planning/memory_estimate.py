"""One rank's memory in the phases of a step, from configs alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl.config.batch_sizes import sharding_ranks
from verl.config.model import LOGITS_CHUNK
from verl.config.roles import need_critic, reads_reference, serves_reward_model
from verl.config.rollout import CPU_CACHE_BYTES, ROLLOUTS_OF_THE_ACTOR
from verl.utils.registry import Registry

ACTIVATIONS = "activations of a micro-batch"
BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2, "float": 4, "auto": 2}
PROCESS = "process with its libraries"
PROCESS_BYTES = 600 << 20  # of a process on a CPU: Python, PyTorch, transformers, vLLM, before it has a tensor
LOSS_COPIES = 3  # logits in the computation's type, in float32 and, with an entropy's gradient, their softmax


@dataclass(frozen=True)
class ModelSize:
    """What the estimate needs to know of a model; head_dim and kv_heads give the KV cache, none with 0 heads.

    `trained_layers` keep activations for the backward; `group_forward`: the samples of a prompt are forwarded once;
    `frozen_computes`: what is not trained is held in the engine's `dtype`, not in `model_dtype`.
    """

    parameters: int
    trainable: int
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    trained_layers: int
    group_forward: bool = False
    frozen_computes: bool = False


MEASURES: Registry[str, Callable[[Any, Mapping[str, Any]], ModelSize]] = Registry(
    "actor_rollout_ref.model.loader.name", "Register a measure with the loader."
)  # what a loader makes of (hf_config, the resolved config); a loader without one is taken for the plain model


def measure_loaded(hf_config: Any, config: Mapping[str, Any]) -> tuple[ModelSize, bool]:
    """Sizes of the model that the config's loader makes, and whether the loader has its own measure."""
    model = config["actor_rollout_ref"]["model"]
    name = model["loader"]["name"]
    if name in MEASURES:
        return MEASURES[name](hf_config, config), True
    return measure_model(hf_config, model["lora_rank"]), name == "auto"


def measure_model(hf_config: Any, lora_rank: int = 0, with_lm_head: bool = True) -> ModelSize:
    """Sizes of the model that a Hugging Face config describes, built on the meta device: no weight is allocated."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    with torch.device("meta"):
        model = (AutoModelForCausalLM if with_lm_head else AutoModel).from_config(hf_config)
    parameters = sum(p.numel() for p in model.parameters())
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    adapters = sum(lora_rank * (m.in_features + m.out_features) for m in linear)
    text = hf_config.get_text_config()
    settings, heads = text.to_dict(), text.num_attention_heads
    return ModelSize(
        parameters=parameters + adapters,
        trainable=adapters if lora_rank else parameters,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        kv_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim") or text.hidden_size // heads,
        vocabulary=text.vocab_size,
        trained_layers=text.num_hidden_layers,
    )


def training_memory(
    size: ModelSize, engine: Mapping[str, Any], shards: int, tokens: int, logits: int, checkpointed: bool,
    deferred: bool = False,
) -> dict[str, int]:  # fmt: skip
    """Bytes of one rank by part for a micro-batch of `tokens`, of which `logits` need the vocabulary at once.

    `engine` has model_dtype, dtype, tensor_parallel_size and sequence_parallel; weights are shared by `shards` ranks.
    `deferred`: gradients are exchanged after the last micro-batch only, and kept whole in float32 until then.
    """
    master, compute, split = BYTES[engine["model_dtype"]], BYTES[engine["dtype"]], engine["tensor_parallel_size"]
    frozen = compute if size.frozen_computes else master
    # With checkpointing one hidden state a layer stays and one layer is recomputed (about 34 values a hidden
    # unit); without it every layer keeps those. A frozen one leaves nothing but the layer at work. Tensor parallel
    # ranks share 24 of the 34, with sequence_parallel all of them and what is between layers (Korthikanti et al. 2022,
    # arXiv 2205.05198).
    between = split if engine["sequence_parallel"] else 1
    in_layer = -(-10 // between) + -(-24 // split)
    hidden_states = -(-size.trained_layers // between)
    kept = hidden_states + in_layer if checkpointed else in_layer * max(1, size.trained_layers)
    gathered = size.parameters // max(1, size.layers) // split if shards > split else 0
    return {
        "weights": (size.trainable * master + (size.parameters - size.trainable) * frozen) // shards,
        "gradients": size.trainable * master // shards + (4 * size.trainable if deferred and shards > 1 else 0),
        "a gathered layer, the next one, a layer's gradient": gathered * (2 * compute + 4),
        "optimizer (two moments)": 2 * size.trainable * master // shards,
        ACTIVATIONS: tokens * size.hidden * kept * compute,
        "logits of a micro-batch": logits * size.vocabulary * 4 * LOSS_COPIES,
    }


def estimate_memory(
    size: ModelSize, config: Mapping[str, Any], ranks: int, micro: int, samples: int,
    update: Mapping[str, int] | None = None, gpu_bytes: float | None = None,
) -> dict[str, dict[str, int]]:  # fmt: skip
    """Bytes on one rank by part, "update" and "generation" apart: a rank needs the larger sum.

    `update`: the actor's own part of an update with micro-batches of `micro` full-length samples, where it was traced;
    else it is estimated. Around it are reference, critic and reward model (each taken for a model of the
    actor's size), rollout weights and the KV cache of `samples` full-length sequences at most. `gpu_bytes` of a GPU
    (None: ranks on CPUs, where nothing is offloaded) give a vLLM or SGLang engine its share.
    """
    roles, data = config["actor_rollout_ref"], config["data"]
    engine, rollout = roles["actor"]["fsdp_config"], roles["rollout"]
    on_gpu, shards = gpu_bytes is not None, sharding_ranks(engine, ranks)
    if update is None:
        update = _estimated_update(size, config, shards, micro)
    uses_actor = rollout["name"] in ROLLOUTS_OF_THE_ACTOR
    generation: dict[str, int] = {}
    if uses_actor or _stays(engine, "param", on_gpu):
        generation["weights"] = update["weights"]
    if _stays(engine, "optimizer", on_gpu):
        generation["optimizer (two moments)"] = update["optimizer (two moments)"]
    rollout_engine: dict[str, int] = {}
    if uses_actor:
        compute = BYTES[engine["dtype"]]
        if shards > 1:
            generation["gathered weights"] = size.parameters * compute
        length = data["max_prompt_length"] + data["max_response_length"]
        cached = length * min(samples, rollout["max_num_seqs"])  # tokens
        generation["KV cache of the rollout"] = 2 * size.layers * size.kv_heads * size.head_dim * cached * compute
    elif on_gpu:
        rollout_engine["rollout engine"] = int(rollout["gpu_memory_utilization"] * gpu_bytes)
    else:
        split, kept_as = rollout["tensor_model_parallel_size"], BYTES[rollout["dtype"]]
        own = rollout["engine_kwargs"].get(rollout["name"]) or {}
        rollout_engine["rollout weights"] = size.parameters * kept_as // split
        rollout_engine["KV cache of the rollout"] = own.get("kv_cache_memory_bytes") or CPU_CACHE_BYTES
        if rollout["name"] == "vllm":
            rollout_engine["rollout's packed copy of the head"] = size.vocabulary * size.hidden * kept_as // split
    others = _other_models(size, config, shards, gpu_bytes)
    sleeps = on_gpu and rollout["free_cache_engine"] and rollout["enable_sleep_mode"]
    phases = {
        "update": {**update, **others, **({} if sleeps else rollout_engine)},
        "generation": {**generation, **others, **rollout_engine},
    }
    return {phase: {name: count for name, count in parts.items() if count} for phase, parts in phases.items()}


def _estimated_update(size: ModelSize, config: Mapping[str, Any], shards: int, micro: int) -> dict[str, int]:
    """`training_memory` of the actor's update with micro-batches of `micro` full-length samples."""
    roles, data = config["actor_rollout_ref"], config["data"]
    engine, shares_prompt = roles["actor"]["fsdp_config"], roles["actor"]["share_prompt_forward"]
    prompts = -(-micro // roles["rollout"]["n"]) if size.group_forward or shares_prompt else micro
    answers = prompts if size.group_forward else micro
    tokens = prompts * data["max_prompt_length"] + answers * data["max_response_length"]
    tokens = -(-tokens // engine["ulysses_sequence_parallel_size"])
    chunk = roles["model"]["policy"]["kwargs"].get("chunk_tokens", LOGITS_CHUNK)
    logits = min(micro * data["max_response_length"], chunk)
    checkpointed = roles["model"]["enable_gradient_checkpointing"]
    return training_memory(size, engine, shards, tokens, logits, checkpointed, engine["defer_gradient_sync"])


def _stays(engine: Mapping[str, Any], part: str, on_gpu: bool) -> bool:
    """Whether the weights ("param") or the moments ("optimizer") stay on the device while others compute."""
    return not (on_gpu and (engine["offload_policy"] or engine[f"{part}_offload"]))


def _other_models(
    size: ModelSize, config: Mapping[str, Any], shards: int, gpu_bytes: float | None
) -> dict[str, int]:
    """Bytes of one rank by part, in every phase: the process on a CPU, reference, critic and reward model."""
    roles, reward, on_gpu = config["actor_rollout_ref"], config["reward_model"], gpu_bytes is not None

    def kept(engine: Mapping[str, Any], moments: int = 0) -> int:
        """Bytes that a further model, of the actor's size, keeps on the rank's device while others compute."""
        copies = _stays(engine, "param", on_gpu) + moments * _stays(engine, "optimizer", on_gpu)
        return copies * size.parameters * BYTES[engine["model_dtype"]] // shards

    parts = {} if on_gpu else {PROCESS: PROCESS_BYTES}
    if reads_reference(config) and (roles["model"]["lora_rank"] == 0 or roles["ref"]["model_path"]):
        parts["reference weights"] = kept(roles["ref"]["fsdp_config"])
    if need_critic(config):
        parts["critic: weights and moments"] = kept(config["critic"]["model"]["fsdp_config"], moments=2)
    if reward["enable"] and not reward["enable_resource_pool"]:
        served = reward["rollout"]
        if not serves_reward_model(config):
            parts["reward model"] = kept(reward["model"]["fsdp_config"])
        elif on_gpu:
            parts["reward model's server"] = int(served["gpu_memory_utilization"] * gpu_bytes)
        else:
            weights = size.parameters * BYTES[served["dtype"]]
            parts["reward model's server"] = weights // served["tensor_model_parallel_size"]
    return parts
