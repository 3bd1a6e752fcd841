"""Scorers on one gloo rank and on two: an own backbone's losses, steps, export and exact resume; the head next to a
frozen target, which is held in the dtype it computes in."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

import spd_scorer  # noqa: F401  (its loader)
from recipe.spd.scorer.auto import AutoModelForSPDScoring
from tests.helpers.engines import make_engine, weights_of
from tests.helpers.ranks import run_ranks
from verl.protocol import DataProto
from verl.training.actor import DataParallelPPOActor
from verl.training.parallel.sharding import full_tensor
from verl.training.peft_weights import full_weights
from verl.training.policy import get_policy
from verl.workers.config import FSDPActorConfig, PluginConfig

pytestmark = pytest.mark.process

N, PROMPTS, GAMMA = 3, 4, 3
KINDS = {
    "whole": {"spd": {"backbone": "own", "attention": "hybrid"}},
    "adapters": {"spd": {"backbone": "own", "head_inputs": "pair"}, "lora_rank": 4},
}


def judged_blocks(seed: int) -> DataProto:
    """Four blocks of unlike context lengths, three samples each, with advantages drawn at random."""
    rng = np.random.default_rng(seed)
    contexts = [rng.integers(5, 60, 4 + i).tolist() for i in range(PROMPTS)]
    drafts = [rng.integers(5, 30, GAMMA).tolist() for _ in contexts]
    targets = [rng.integers(30, 60, GAMMA + 1).tolist() for _ in contexts]  # mismatches everywhere
    blocks = spd_scorer.SPDInputData.from_blocks(contexts, drafts, targets, sep_token_id=3, pad_token_id=0)
    rows = {name: value.repeat_interleave(N, 0) for name, value in blocks.as_kwargs().items()}
    g, shape = torch.Generator().manual_seed(seed), (PROMPTS * N, GAMMA)
    for name in ("attention_mask", "position_ids"):  # the actor's rows hold prompt and response
        rows[name] = torch.cat([rows[name], rows[name].new_ones(shape)], dim=1)
    sampled = {"responses": torch.randint(0, 2, shape, generator=g), "response_mask": torch.ones(shape, dtype=int)}
    sampled["advantages"] = torch.randn(shape, generator=g)
    groups = {"group_index": torch.arange(PROMPTS).repeat_interleave(N)}
    return DataProto.from_dict(tensors={**rows, **sampled, **groups}, meta_info={"temperature": 1.0})


def build(path: str, kind: str, **model):
    loader = PluginConfig(name="spd_scorer", kwargs=KINDS[kind])
    return make_engine(path, loader=loader, contents=("model", "optimizer", "extra", "hf_model"), **model)


def step(engine, rank: int, world_size: int, seed: int, remove_padding: bool = False, **cut) -> dict:
    """Metrics of this rank's share of one update, with the old log-probs computed first as in training."""
    rows = PROMPTS * N // world_size
    config = FSDPActorConfig(**{
        "ppo_mini_batch_size": rows, "ppo_micro_batch_size_per_gpu": N, "rollout_n": N, "share_prompt_forward": True,
        "grad_clip": 1.0, **cut,
    })  # fmt: skip
    policy = get_policy("bernoulli", share=True)
    policy.set_forward(remove_padding=remove_padding, share_prompt=True)
    actor = DataParallelPPOActor(config, engine, policy)
    mine = judged_blocks(seed)[rank * rows : (rank + 1) * rows]
    mine.batch["old_log_probs"] = actor.compute_log_prob(mine)[0]
    return actor.update_policy(mine)


def trained(rank: int, world_size: int, path: str, kind: str, folder: str | None):
    """(metrics of three updates, weights after them); the second is saved to `folder`, the third repeats from it."""
    engine = build(path, kind)
    metrics = [step(engine, rank, world_size, seed) for seed in (1, 2)]
    if folder:
        at_save = weights_of(engine)
        engine.save_checkpoint(folder, global_step=2)
    metrics.append(step(engine, rank, world_size, 3))
    weights = weights_of(engine)
    if not folder:
        return metrics, weights
    if rank == 0:
        assert Path(folder, "lora_adapter", "adapter_model.safetensors").exists() is (kind == "adapters")
        exported = AutoModelForSPDScoring.from_pretrained(f"{folder}/huggingface", base_model_path=path).state_dict()
        assert exported.keys() == at_save.keys()
        assert all(np.array_equal(exported[name].numpy(), value) for name, value in at_save.items())
        if kind == "adapters":
            going_on = AutoModelForSPDScoring.from_pretrained(f"{folder}/lora_adapter", base_model_path=path)
            assert all(np.array_equal(value, at_save[name]) for name, value in full_weights(going_on))
    again = build(path, kind)
    again.load_checkpoint(folder)
    assert step(again, rank, world_size, 3) == metrics[-1]
    np.testing.assert_equal(weights_of(again), weights)
    return metrics, {name: value for name, value in weights.items() if value.size < 2000}  # what a pipe holds


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_two_ranks_train_an_own_backbone_as_one_does_and_resume_to_the_bit(tiny_llama, tmp_path, kind):
    start = weights_of(build(tiny_llama, kind))
    metrics, weights = trained(0, 1, tiny_llama, kind, None)
    of_two = run_ranks(trained, 2, tiny_llama, kind, str(tmp_path / "actor"))
    for number, one in enumerate(metrics):
        for name in ("actor/pg_loss", "actor/grad_norm"):
            both = np.mean([of_rank[0][number][name] for of_rank in of_two])
            assert both == pytest.approx(np.mean(one[name]), rel=1e-5, abs=1e-5), (number, name)
    moved = 0
    for of_rank in of_two:
        for name, value in of_rank[1].items():
            # Adam divides by the gradient's size: what is 1e-9 of the largest one may turn a full step of 1e-2.
            assert np.mean(np.abs(value - weights[name]) > 1e-4) < 0.01, name
            moved += not np.array_equal(value, start[name])
    assert moved > 4


def head_trained(rank: int, world_size: int, path: str, dtype: str, store: str | None):
    """(dtypes of backbone and head, metrics of two updates, the head's weights after them)."""
    if rank:  # reads no weights
        AutoModel.from_pretrained = None
    kwargs = {"compute_dtype": dtype, "spd": {"backbone": "target", "feature_store": store}}
    loader = PluginConfig(name="spd_scorer", kwargs=kwargs)
    engine = make_engine(path, loader=loader, engine={"dtype": dtype})
    parts = (engine.module.backbone, engine.module.head)
    dtypes = [sorted({str(p.dtype) for p in part.parameters()}) for part in parts]
    metrics = [step(engine, rank, world_size, seed) for seed in (1, 2)]
    features = engine.module.features
    kept = {str(t.dtype) for t in features._memory.values()} if features else set()
    return dtypes, metrics, {n: full_tensor(p).numpy() for n, p in engine.module.head.named_parameters()}, kept


def test_two_ranks_train_the_head_of_a_bfloat16_target_as_one_does(tied_llama, tmp_path):
    dtypes, metrics, weights, kept = head_trained(0, 1, tied_llama, "bfloat16", str(tmp_path / "one"))
    assert dtypes == [["torch.bfloat16"], ["torch.float32"]] and kept == {"torch.bfloat16"}
    for of_rank in run_ranks(head_trained, 2, tied_llama, "bfloat16", str(tmp_path / "two")):
        assert of_rank[0] == dtypes
        for name, value in of_rank[2].items():
            assert np.mean(np.abs(value - weights[name]) > 1e-3) < 0.02, name
    exact = head_trained(0, 1, tied_llama, "float32", None)
    assert exact[0] == [["torch.float32"], ["torch.float32"]]
    for name in ("actor/pg_loss", "actor/grad_norm"):  # the states have eight bits
        assert metrics[0][name] == pytest.approx(exact[1][0][name], rel=0.05, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_checkpointed_layers_and_micro_batches_by_tokens_change_no_update(tiny_llama, kind):
    plain, saving = build(tiny_llama, kind), build(tiny_llama, kind, enable_gradient_checkpointing=True)
    forwards = []
    layer = next(m for m in saving.module.modules() if "LlamaDecoderLayer" in type(m).__name__)
    layer.register_forward_pre_hook(lambda module, args: forwards.append(torch.is_grad_enabled()))
    # Blocks have 17 to 20 ids, actions included: two fit into a micro-batch.
    by_tokens = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 40, "ppo_micro_batch_size_per_gpu": None}
    for seed in (1, 2):
        one = step(plain, 0, 1, seed)
        two = step(saving, 0, 1, seed, remove_padding=kind == "adapters", **by_tokens)
        for name in ("actor/pg_loss", "actor/grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert forwards.count(True) == 2 * 2 * 2  # steps, micro-batches, the forward and its repetition in the backward
    for name, value in weights_of(saving).items():
        assert np.mean(np.abs(value - weights_of(plain)[name]) > 1e-4) < 0.01, name
