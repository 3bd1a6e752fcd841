"""The refinement loss of an RL update against windows that are forwarded one at a time."""

import re

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from dllm_reasoning.inference.settings import NOISE_KEY, WINDOW_KEY
from dllm_reasoning.losses.layouts import build_layout
from dllm_reasoning.losses.refine_loss import RefineLoss, seeds_of
from dllm_reasoning.utils.noise_utils import row_generator, window_starts
from tests.dllm_reasoning.models import tiny
from tests.helpers.engines import make_actor, make_engine, rl_batch, weights_of
from tests.helpers.ranks import run_ranks
from verl.training.actor import DataParallelPPOActor, base
from verl.training.policy import get_policy
from verl.training.policy.packing import to_device
from verl.workers.config import FSDPActorConfig

WINDOW, NOISE, WINDOWS = 4, 3, 2
SETTINGS = {"coef": 0.5, "windows_per_sample": WINDOWS}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    model = tiny("llama", seed=4, initializer_range=0.2)
    model.config.update({WINDOW_KEY: WINDOW, NOISE_KEY: NOISE})
    folder = tmp_path_factory.mktemp("refined")
    model.save_pretrained(folder)
    return str(folder)


def actor_of(path, micro=8, **more):
    return make_actor(make_engine(path), micro=micro, auxiliary_losses={"refine_loss": SETTINGS | more})


def batch():
    return rl_batch(vocab=48)


def by_hand(path, rows, rounds):
    """Gradients and loss of all windows, each a forward of its clean prefix and noise; `rows`: which have labels."""
    model = LlamaForCausalLM.from_pretrained(path)
    data, losses, labels = batch().batch, [[] for _ in range(rounds)], 0
    for i in rows:
        kept = data["attention_mask"][i].bool()
        ids, prompt = data["input_ids"][i][kept].tolist(), int(kept[:4].sum())
        seed = seeds_of({"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))})[0]
        for start in window_starts(len(ids) - prompt, WINDOWS, row_generator(seed)):
            true = ids[prompt + start : prompt + start + WINDOW]
            fed = [NOISE] * (WINDOW - 1)
            labels += len(true)
            for k in range(rounds):
                logits = model(input_ids=torch.tensor([ids[: prompt + start] + fed])).logits[0, -WINDOW:]
                losses[k].append(cross_entropy(logits[: len(true)], torch.tensor(true), reduction="sum"))
                fed = logits.argmax(-1)[:-1].tolist()
    loss = sum(sum(part) for part in losses) / labels / rounds
    (0.5 * loss).backward()
    return {name: p.grad for name, p in model.named_parameters()}, loss.item()


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("samples", ["all", "positive"])
def test_gradient_and_value_are_those_of_windows_forwarded_one_by_one(model_path, rounds, samples):
    data = batch()
    generated, advantages = data.batch["response_mask"], data.batch["advantages"]
    rows = [i for i in range(8) if generated[i].any()]
    if samples == "positive":
        rows = [i for i in rows if (advantages[i] * generated[i]).sum() > 0]
        assert 0 < len(rows) < 8
    expected, value = by_hand(model_path, rows, rounds)
    actor = actor_of(model_path, samples=samples, num_iterations=rounds)
    (loss,), engine = actor.auxiliary_losses, actor.engine
    assert isinstance(loss, RefineLoss)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        loss.begin(data)
        metrics = loss.backward(data.batch)
        nothing = engine.module(input_ids=torch.ones(1, 2, dtype=torch.long)).logits.sum() * 0
        engine.backward(nothing, is_last_micro_batch=True)  # the policy's loss, after which gradients are exchanged
        gradients = {name: p.grad.full_tensor() for name, p in engine.module.named_parameters()}
    assert metrics == {"actor/refine_loss": pytest.approx(value, rel=1e-5)}
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("samples", ["all", "positive"])
def test_windows_are_laid_out_without_a_look_at_the_device(model_path, samples):
    """Values of tensors on the meta device cannot be read at all."""
    (loss,) = actor_of(model_path, samples=samples).auxiliary_losses
    here = batch().batch
    there = to_device(here, torch.device("meta"))
    expected = loss._rows(here)
    layout = build_layout(expected, seeds_of(expected), loss.noise, loss.noise_token)
    packings = [loss._packing(columns, expected, layout) for columns in (here, there)]
    assert all(torch.equal(rows, expected[name]) for name, rows in loss._rows(there).items())
    assert torch.equal(packings[0].keys, packings[1].keys)
    assert torch.equal(packings[0].attention_mask, packings[1].attention_mask)


def test_cuts_do_not_change_the_update(model_path):
    whole = actor_of(model_path)
    metrics = whole.update_policy(batch())
    for cut in (dict(micro=2), dict(micro=3)):
        pieces = actor_of(model_path, **cut)
        again = pieces.update_policy(batch())
        for name in ("actor/refine_loss", "actor/pg_loss", "actor/grad_norm"):
            assert again[name] == pytest.approx(metrics[name], rel=1e-4), name
        torch.testing.assert_close(weights_of(pieces.engine), weights_of(whole.engine), rtol=0, atol=2e-4)


def changes(path, data, *, apart, shared, sequences=1, losses=("refine_loss",), **more):
    """Metrics of an update, and what it subtracts from the weights at learning rate 1; `apart`: windows read again what
    the policy has read."""
    optimizer = {"optimizer": "SGD", "lr": 1.0, "weight_decay": 0.0, "clip_grad": 1e6}
    engine = make_engine(path, optim=optimizer, engine={"ulysses_sequence_parallel_size": sequences})
    policy = get_policy("causal_lm")
    policy.set_forward(remove_padding=True, share_prompt=shared)
    config = FSDPActorConfig(
        ppo_mini_batch_size=8, ppo_micro_batch_size_per_gpu=4, rollout_n=4, grad_clip=1e6,
        auxiliary_losses=dict.fromkeys(losses, SETTINGS | more), share_prompt_forward=shared,
    )  # fmt: skip
    actor = DataParallelPPOActor(config, engine, policy)
    (loss,) = actor.auxiliary_losses
    assert loss.needs_cache
    loss.needs_cache = not apart
    before = weights_of(engine)
    metrics = actor.update_policy(data)
    return metrics, {name: before[name] - weight for name, weight in weights_of(engine).items()}


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("samples", ["all", "positive"])
def test_windows_that_attend_to_the_policys_forward_have_the_same_gradient(model_path, rounds, shared, samples):
    """Losses and gradients are those of windows whose clean text is read again, with packing and shared prompts."""
    data = batch()
    columns = data.batch
    columns["group_index"] = torch.arange(8) // 4
    for name in ("input_ids", "attention_mask", "position_ids"):  # four samples of each prompt
        columns[name][:, :4] = columns[name][torch.arange(8) // 4 * 4 + 1, :4]
    columns["position_ids"] = (columns["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    more = {"shared": shared, "num_iterations": rounds, "samples": samples}
    expected, gradients = changes(model_path, data, apart=True, **more)
    metrics, same = changes(model_path, data, apart=False, **more)
    for name in ("actor/refine_loss", "actor/pg_loss", "actor/grad_norm"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5), name
    assert expected["actor/refine_loss"][0] > 0.1 < max(abs(gradient).max() for gradient in gradients.values())
    torch.testing.assert_close(same, gradients, rtol=0, atol=1e-5)


def on_ranks(rank, world_size, path, sequences):
    rows = slice(rank * 8 // world_size, (rank + 1) * 8 // world_size)
    data = batch()[rows]
    data.batch["group_index"] = torch.arange(len(data))
    settings = {"sequences": sequences, "num_iterations": 2, "samples": "positive"}
    return [changes(path, data, apart=apart, shared=True, **settings)[1] for apart in (False, True)]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sequences"), [(2, 1), (2, 2), (4, 4)])
def test_ranks_that_share_a_batch_have_its_gradient(model_path, ranks, sequences):
    """Also if samples with labels are not spread evenly, and if ranks share every sequence, of two key heads."""
    ((whole, _),), parts = run_ranks(on_ranks, 1, model_path, 1), run_ranks(on_ranks, ranks, model_path, sequences)
    for part in (gradients for of_rank in parts for gradients in of_rank):
        torch.testing.assert_close(part, whole, rtol=0, atol=1e-5)


def test_one_loss_alone_gets_the_cache_of_the_policys_forward(model_path, monkeypatch):
    monkeypatch.setitem(base._AUXILIARY_LOSSES, "second", RefineLoss)
    with pytest.raises(ValueError, match="losses refine_loss, second need the keys and values of the policy's forward"):
        changes(model_path, batch(), apart=False, shared=False, losses=("refine_loss", "second"))


def test_a_model_without_a_window_is_refused(tiny_llama):
    with pytest.raises(ValueError, match=r"losses.refine_loss.coef=0.5 needs a model trained by iterative refinement"):
        actor_of(tiny_llama)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ({"refine_los": {"coef": 0.5}}, "auxiliary_losses='refine_los' is unknown; did you mean 'refine_loss'?"),
        ({"refine_loss": {"windows": 2}}, "actor.auxiliary_losses.refine_loss.windows is unknown"),
        ({"refine_loss": {"coef": -1}}, "actor.auxiliary_losses.refine_loss.coef=-1 is too small"),
        ({"refine_loss": {"samples": "both"}}, "actor.auxiliary_losses.refine_loss.samples='both' is unknown"),
    ],
)
def test_wrong_settings_are_refused_before_a_model_is_loaded(losses, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        base.enabled_losses(FSDPActorConfig(rollout_n=1, auxiliary_losses=losses))
