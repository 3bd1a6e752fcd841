"""A rank's memory by part, worked out by hand for a text model."""

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig

from tests.helpers.rl_run import compose_run
from verl.config.batch_sizes import plan_batches
from verl.config.model import LOGITS_CHUNK
from verl.planning.memory_estimate import estimate_memory, measure_model, training_memory
from verl.protocol import DataProto
from verl.training.actor.batch_cuts import micro_batches
from verl.training.policy import get_policy


def logits_of(model, tmp_path, micro, response, **policy):
    config = OmegaConf.to_container(compose_run(tmp_path, model, data__max_response_length=response), resolve=True)
    config["actor_rollout_ref"]["model"]["policy"]["kwargs"] |= policy
    size = measure_model(AutoConfig.from_pretrained(model))
    parts = estimate_memory(size, config, ranks=1, micro=micro, samples=micro)["update"]
    return parts["logits of a micro-batch"] / (size.vocabulary * 4 * 3)


def test_no_more_logits_are_counted_than_the_policy_holds_at_once(tiny_llama, tmp_path):
    assert get_policy("causal_lm").chunk_tokens == LOGITS_CHUNK == 896
    assert logits_of(tiny_llama, tmp_path, 4, 100) == 400
    assert logits_of(tiny_llama, tmp_path, 4, 1000) == 896
    assert logits_of(tiny_llama, tmp_path, 4, 1000, chunk_tokens=64) == 64


def test_a_cpu_rank_with_vllm_has_the_libraries_a_cache_of_fixed_size_and_the_head_twice(tiny_llama, tmp_path):
    on_cpu = {"trainer__device": "cpu", "actor_rollout_ref__rollout__name": "vllm",
              "actor_rollout_ref__rollout__dtype": "bfloat16"}  # fmt: skip
    config = OmegaConf.to_container(compose_run(tmp_path, tiny_llama, **on_cpu), resolve=True)
    size = measure_model(AutoConfig.from_pretrained(tiny_llama))
    for phase in estimate_memory(size, config, ranks=1, micro=4, samples=16).values():
        assert phase["process with its libraries"] == 600 << 20 and phase["KV cache of the rollout"] == 1 << 30
        assert phase["rollout weights"] == 2 * size.parameters
        assert phase["rollout's packed copy of the head"] == 2 * 64 * 64  # vocabulary x hidden
    config["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"] = {"kv_cache_memory_bytes": 5}
    assert estimate_memory(size, config, 1, 4, 16)["update"]["KV cache of the rollout"] == 5
    gpu = estimate_memory(size, config, 1, 4, 16, gpu_bytes=1e9)
    assert not any("process" in name for phase in gpu.values() for name in phase)


def test_gradients_are_counted_as_the_engine_keeps_them(tiny_llama):
    """4 ranks: a quarter of float32 gradients; with defer_gradient_sync also all of them whole."""
    size = measure_model(AutoConfig.from_pretrained(tiny_llama))
    engine = {"model_dtype": "fp32", "dtype": "bfloat16", "tensor_parallel_size": 1, "sequence_parallel": False}
    parts = [training_memory(size, engine, 4, 100, 10, False, deferred) for deferred in (False, True)]
    assert parts[0]["gradients"] == size.parameters and parts[1]["gradients"] == 5 * size.parameters
    assert {name for name in parts[0] if parts[0][name] != parts[1][name]} == {"gradients"}
    alone = training_memory(size, engine, 1, 100, 10, False, True)
    assert alone["gradients"] == 4 * size.parameters  # nothing is exchanged


def test_ranks_that_split_layers_share_what_is_inside_them(tiny_llama):
    size = measure_model(AutoConfig.from_pretrained(tiny_llama))
    engine = {"model_dtype": "fp32", "dtype": "float32", "sequence_parallel": False}
    whole, half = (training_memory(size, engine | {"tensor_parallel_size": n}, 4, 100, 10, False) for n in (1, 2))
    gathered = "a gathered layer, the next one, a layer's gradient"
    assert whole[gathered] - 24 <= 2 * half[gathered] <= whole[gathered] and half["weights"] == whole["weights"]
    name = "activations of a micro-batch"
    assert whole[name] == 100 * size.hidden * size.layers * 34 * 4 and half[name] * 34 == whole[name] * 22
    split = engine | {"tensor_parallel_size": 2, "sequence_parallel": True}
    assert 2 * training_memory(size, split, 4, 100, 10, False)[name] == whole[name]
    # 2 layers: of both ranks together 2 hidden states and one layer at work, instead of twice as much
    assert training_memory(size, split, 4, 100, 10, True)[name] == 100 * size.hidden * (1 + 17) * 4


@pytest.mark.parametrize("budget", [100, 170, 400, 1000, 5000])
@pytest.mark.parametrize("shares", [True, False])
def test_micro_batches_of_full_length_samples_are_as_large_as_the_plan_says(budget, shares, tiny_llama, tmp_path):
    """6 prompts of 20 tokens with 4 answers of 30: 50 tokens a sample, or 140 a prompt whose forward is shared."""
    samples, prompt, response = 4, 20, 30
    ids = torch.ones(24, prompt + response, dtype=torch.int64)
    ids[:, :prompt] += torch.arange(24)[:, None] // samples
    rows = DataProto.from_dict(tensors={
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, prompt:],
        "position_ids": torch.arange(prompt + response).expand_as(ids),
        "group_index": torch.arange(24) // samples,
    })  # fmt: skip
    largest = max(len(part) for part, _ in micro_batches(rows, rows=None, tokens=budget, whole_groups=shares))
    actor = "actor_rollout_ref__actor"
    config = compose_run(tmp_path, tiny_llama, **{
        "data__max_prompt_length": prompt, "data__max_response_length": response, "data__train_batch_size": 6,
        "actor_rollout_ref__rollout__n": samples, f"{actor}__ppo_mini_batch_size": 6, f"{actor}__use_dynamic_bsz": True,
        f"{actor}__ppo_micro_batch_size_per_gpu": None, f"{actor}__ppo_max_token_len_per_gpu": budget,
        f"{actor}__share_prompt_forward": shares,
    })  # fmt: skip
    most = plan_batches(OmegaConf.to_container(config, resolve=True)).micro_batch_size
    assert largest == (most if shares else -(-24 // -(-24 // most)))  # single rows are shared out evenly
