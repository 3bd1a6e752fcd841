"""actor.batch_invariant with rollout hf in float32: the rollout's log-probs are the trainer's, bit for bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.engines import leave_group, make_engine
from tests.helpers.models import save_tiny_llama
from tests.helpers.rl_run import compose_run, metrics_rows
from tests.models.families import model_of
from verl.config.actor import FSDPActorConfig
from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto
from verl.rollout import get_rollout_class
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.ppo.turn_rows import to_rows
from verl.trainer.run.ray_session import run_here
from verl.training.actor import DataParallelPPOActor
from verl.training.policy import get_policy, row_invariant

P, R = 140, 24  # some prompts with their answers exceed a block of keys


def actor_of(model, folder):
    """An actor on the model as a worker with rollout hf sets it up."""
    model.save_pretrained(folder)
    policy = get_policy("causal_lm")
    policy.row_invariant = True
    policy.set_forward(remove_padding=True, share_prompt=False)
    config = FSDPActorConfig(ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=4, rollout_n=1, batch_invariant=True)
    return DataParallelPPOActor(config, make_engine(str(folder)), policy)


def samples_of(actor, temperature, **settings):
    """Three samples each of four prompts of unlike lengths."""
    config = RolloutConfig(name="hf", prompt_length=P, response_length=R, calculate_log_probs=True, **settings)
    rollout = get_rollout_class("hf", "sync")(config, actor.engine.model_config, actor.engine.mesh)
    rollout.bind_actor(actor.engine, actor.policy)
    words = actor.engine.module.config.vocab_size
    ids, mask = torch.randint(5, words, (4, P), generator=torch.Generator().manual_seed(0)), torch.ones(4, P).long()
    for row, padding in enumerate((0, 9, 100, P - 2)):
        mask[row, :padding] = 0
    meta = {"n": 3, "eos_token_id": list(range(2, 2 + words // 20)), "pad_token_id": 0, "do_sample": True,
            "temperature": temperature, "global_steps": 1}  # fmt: skip
    columns = {"input_ids": ids * mask, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    samples = rollout.generate_sequences(DataProto.from_dict(columns, meta_info=meta))
    samples.meta_info = {"temperature": temperature}
    return samples


def largest_difference(actor, samples):
    mask = samples.batch["response_mask"].bool()
    return (actor.compute_log_prob(to_rows(samples))[0] - samples.batch["rollout_log_probs"])[mask].abs().max().item()


SIZES = {"grouped heads": (128, 4, 2, 256, 64), "odd sizes": (72, 3, 3, 100, 161)}


def llama(hidden, heads, shared, inner, words):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=words, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=shared, initializer_range=0.1, max_position_embeddings=256,
    ))  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_rollout_and_trainer_agree_exactly(tmp_path, sizes):
    actor = actor_of(llama(*sizes), tmp_path)
    settings = [(1.0, {}), (0.7, {"max_num_seqs": 6}), (1.0, {"top_p": 0.8}), (0.8, {"top_k": 9, "top_p": 0.9})]
    for temperature, filters in settings:
        assert largest_difference(actor, samples_of(actor, temperature, **filters)) == 0
    leave_group()


def test_without_it_they_differ_in_the_last_bits(tmp_path):
    actor = actor_of(llama(*SIZES["grouped heads"]), tmp_path)
    policy = get_policy("causal_lm")
    policy.set_forward(remove_padding=True, share_prompt=False)
    plain = DataParallelPPOActor(actor.config, make_engine(str(tmp_path)), policy)
    assert 0 < largest_difference(plain, samples_of(plain, 1.0)) < 1e-4
    leave_group()


def test_the_update_begins_with_ratios_of_exactly_one(tmp_path):
    actor = actor_of(llama(*SIZES["grouped heads"]), tmp_path)
    samples = samples_of(actor, 0.9)
    samples.batch["old_log_probs"] = samples.batch["rollout_log_probs"]
    samples.batch["advantages"] = torch.randn(samples.batch["old_log_probs"].shape)
    assert actor.update_policy(to_rows(samples))["actor/logprob_drift_max"][0] == 0
    assert largest_difference(actor, samples_of(actor, 0.9)) == 0  # with the new weights too
    leave_group()


def rows_of_a_run(directory, **more):
    """Metrics of three steps of GRPO with rollout hf in float32."""
    settings = {"rollout__calculate_log_probs": "true", "rollout__temperature": 0.8, "actor__batch_invariant": "true"}
    config = compose_run(
        directory, save_tiny_llama(directory / "model", hidden=128), trainer__total_training_steps=3,
        trainer__save_freq=-1, reward_model__num_workers=0,
        **{f"actor_rollout_ref__{name}": value for name, value in (settings | more.pop("roles", {})).items()}, **more,
    )  # fmt: skip
    assert run_here(TaskRunner(), config) == 0
    rows = metrics_rows(directory)
    assert [row["step"] for row in rows] == [1, 2, 3] and all(row["actor/grad_norm"] > 0 for row in rows)
    return rows


def assert_no_difference(rows):
    for row in rows:
        assert row["training/rollout_probs_diff_valid"] == 1 and row["training/rollout_probs_diff_max"] == 0.0
        assert row["health/first_ratio"] == row["health/effective_sample_size"] == 1.0


@pytest.mark.process
def test_the_metrics_of_a_run_show_no_difference(tmp_path):
    rows = rows_of_a_run(tmp_path / "exact", trainer__local="true", roles={"actor__ppo_mini_batch_size": 4})
    assert_no_difference(rows)
    usual = rows_of_a_run(tmp_path / "usual", trainer__local="true", roles={"actor__batch_invariant": "false"})
    assert all(0 < row["training/rollout_probs_diff_max"] < 1e-4 for row in usual)


@pytest.mark.process
def test_a_run_that_does_not_recompute_log_probs_updates_with_ratios_of_exactly_one(tmp_path):
    """With one optimizer step a batch: later ones of a batch compute with other weights."""
    old = {"actor__use_rollout_log_probs": "true", "rollout__top_p": 0.9}
    for row in rows_of_a_run(tmp_path, trainer__local="true", roles=old):
        assert row["actor/logprob_drift_max"] == row["actor/ppo_kl"] == 0.0
        assert row["health/kept_mass"] < 1


@pytest.mark.process
@pytest.mark.slow
def test_the_metrics_of_a_run_on_two_ranks_show_no_difference(ray_cluster, tmp_path):
    kl = {"actor__use_kl_loss": "true"}  # the reference policy, which is the start, is computed by the same kernels
    rows = rows_of_a_run(tmp_path, trainer__n_gpus_per_node=2, roles=kl)
    assert_no_difference(rows)
    assert rows[0]["health/kl_ref_k3"] == 0.0 < rows[-1]["health/kl_ref_k3"]


EXACT = ("Llama", "Qwen2", "Qwen3", "Gemma", "SmolLM3", "OLMo 2", "Helium", "Seed-OSS", "ERNIE 4.5")
REFUSED = {"Mixtral": "MixtralExperts", "StableLM": "needs forwards without padding", "Mistral": "sliding_window",
           "Granite": "scales its logits", "Mamba": "MambaMixer", "GPT-2": "Conv1D"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", EXACT)
def test_families_that_agree(tmp_path, family):
    actor = actor_of(model_of(family, max_position_embeddings=256), tmp_path)
    assert largest_difference(actor, samples_of(actor, 0.8)) == 0
    leave_group()


@pytest.mark.parametrize(("family", "part"), REFUSED.items())
def test_models_that_cannot_are_refused(tmp_path, family, part):
    with pytest.raises(ValueError, match=rf"{part}.*Set (it|actor_rollout_ref.actor.batch_invariant)( to |=)false"):
        actor_of(model_of(family, **({"logits_scaling": 2.0} if family == "Granite" else {})), tmp_path)
    leave_group()


def test_gradients_are_those_of_usual_kernels(tmp_path):
    model = llama(*SIZES["odd sizes"])
    ids = torch.randint(5, 161, (1, 50))

    def gradients():
        model.zero_grad()
        F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    usual = gradients()
    row_invariant.make_row_invariant(model)
    for ours, expected in zip(gradients(), usual, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def test_rows_of_a_product_do_not_depend_on_their_number():
    rows, layer = torch.randn(100, 37), nn.Linear(37, 53)
    layer.__class__ = row_invariant.RowInvariantLinear
    whole = layer(rows)
    for count in (1, 2, 7, 31, 33, 64):
        assert layer(rows[20 : 20 + count]).equal(whole[20 : 20 + count])
    torch.testing.assert_close(whole, F.linear(rows, layer.weight, layer.bias))
