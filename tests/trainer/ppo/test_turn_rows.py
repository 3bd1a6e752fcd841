"""Rows of single turns: by hand, and against the same conversations as one row each."""

import numpy as np
import pytest
import torch

from tests.helpers.columns import object_columns
from tests.helpers.engines import make_actor, make_engine, weights_of
from tests.helpers.rl_run import FakeGroup, fake_run, metrics_rows
from verl.protocol import DataProto
from verl.protocol.serialization import object_array
from verl.trainer.ppo.batching import fill_groups
from verl.trainer.ppo.turn_rows import TURNS, RankRows, from_rows, to_rows
from verl.training.actor.batch_cuts import ROWS_PER_SAMPLE, mini_batches
from verl.training.policy import prefix_tree


def samples(prompts, responses, masks, turns, width=3, length=6, **columns) -> DataProto:
    """Conversations as agent loops give them: left-padded prompts, right-padded responses."""
    rows = []
    for prompt, response, mask in zip(prompts, responses, masks, strict=True):
        left, right = [0] * (width - len(prompt)), [0] * (length - len(response))
        attention = [0] * len(left) + [1] * (len(prompt) + len(response)) + [0] * len(right)
        rows.append((left + prompt, response + right, mask + right, attention))
    tensors = {
        name: torch.tensor([row[i] for row in rows])
        for i, name in enumerate(("prompts", "responses", "response_mask", "attention_mask"))
    }
    tensors["input_ids"] = torch.cat([tensors["prompts"], tensors["responses"]], 1)
    tensors["position_ids"] = (tensors["attention_mask"].cumsum(1) - 1).clamp(min=0)
    meta = {"temperature": 1.0, "global_steps": 1}
    return DataProto.from_dict(tensors | columns, object_columns(**{TURNS: turns, "uid": ["a"] * len(rows)}), meta)


def two() -> DataProto:
    """A conversation of two turns, the second after a prompt of its own, and one that an agent loop left whole."""
    return samples(
        [[1, 2], [3]], [[11, 12, 51, 13], [21, 22]], [[1, 1, 0, 1], [1, 1]],
        [[(0, 2, [1, 2]), (3, 4, [1, 2, 12, 51])], None],
        advantages=torch.arange(12.0).reshape(2, 6), reward_baselines=torch.tensor([0.5, 0.25]),
    )  # fmt: skip


def test_each_turn_is_a_row_after_its_own_prompt():
    rows = to_rows(two())
    assert rows.meta_info[ROWS_PER_SAMPLE] == 2 and rows.meta_info["temperature"] == 1.0
    assert rows.non_tensor_batch == {}
    batch = rows.batch
    assert batch["prompts"].tolist() == [[0, 0, 1, 2], [1, 2, 12, 51], [0, 0, 0, 3], [0, 0, 0, 0]]
    assert batch["responses"][:, :3].tolist() == [[11, 12, 0], [13, 0, 0], [21, 22, 0], [0, 0, 0]]
    assert batch["response_mask"][:, :3].tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert batch["attention_mask"].sum(1).tolist() == [4, 5, 3, 2] == rows.meta_info["global_token_num"]
    assert batch["attention_mask"][0].tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0]
    assert batch["attention_mask"][3].tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    assert batch["input_ids"].tolist() == torch.cat([batch["prompts"], batch["responses"]], 1).tolist()
    assert batch["position_ids"][1].tolist() == [0, 1, 2, 3, 4, 4, 4, 4, 4, 4]
    assert batch["advantages"][:, :3].tolist() == [[0, 1, 0], [3, 0, 0], [6, 7, 0], [0, 0, 0]]
    assert batch["reward_baselines"].tolist() == [0.5, 0.5, 0.25, 0.25]
    assert batch["group_index"].tolist() == [0, 1, 2, 3]
    data = two()
    data.batch["group_index"] = torch.tensor([5, 6])
    assert to_rows(data).batch["group_index"].tolist() == [5, 5, 6, 6]


def test_a_turn_is_cut_where_the_response_is():
    data = samples([[1]], [[11, 12, 13]], [[1, 1, 1]], [[(0, 2, [1]), (2, 9, [1, 5]), (7, 9, [1])]], length=3)
    assert to_rows(data).batch["responses"].tolist() == [[11, 12, 0], [13, 0, 0]]


def test_mini_batches_hold_the_same_samples():
    data = to_rows(DataProto.concat([two(), two()]))
    parts = list(mini_batches(data, 2, whole_groups=False, epochs=1, shuffle=False, seed=0))
    assert [part.batch["responses"][:, 0].tolist() for part in parts] == [[11, 13, 21, 0]] * 2
    parts = list(mini_batches(data, 2, whole_groups=True, epochs=1, shuffle=False, seed=0))
    assert [len(part) for part in parts] == [4, 4]


def whole_and_split() -> tuple[DataProto, DataProto]:
    """Conversations of uneven turns as one row each, and the same whose turns' prompts are the tokens before them."""
    generator = torch.Generator().manual_seed(0)
    prompts, responses, masks, turns = [], [], [], []
    for sizes in ([(3, 1), (2, 0)], [(4, 0)], [(1, 1), (1, 1), (2, 0)], [(2, 2), (1, 1)]):
        ids = torch.randint(3, 60, (2 + sum(map(sum, sizes)),), generator=generator).tolist()
        start, mask, own = 0, [], []
        for generated, given in sizes:
            own.append((start, start + generated, ids[: 2 + start]))
            mask += [1] * generated + [0] * given
            start += generated + given
        prompts.append(ids[:2]), responses.append(ids[2:]), masks.append(mask), turns.append(own)
    scores = torch.tensor([[1.0], [-0.5], [0.25], [-0.75]]).expand(4, 6).clone()
    old = -torch.rand(4, 6, generator=generator) - 3.5
    made = [samples(prompts, responses, masks, turns, advantages=scores, old_log_probs=old,
                    group_index=torch.arange(4)) for _ in range(2)]  # fmt: skip
    del made[0].non_tensor_batch[TURNS]
    return made[0], made[1]


def test_log_probs_of_turns_are_those_of_the_conversation(llama):
    whole, split = whole_and_split()
    actor, mask = make_actor(make_engine(llama)), whole.batch["response_mask"]
    expected, _ = actor.compute_log_prob(whole)
    log_probs, _ = actor.compute_log_prob(to_rows(split))
    merged = from_rows(DataProto.from_dict({"old_log_probs": log_probs}), split).batch["old_log_probs"]
    torch.testing.assert_close(merged, expected * mask, rtol=1e-4, atol=1e-5)
    assert merged[mask.bool()].abs().min() > 0


@pytest.mark.parametrize(("mini", "shared"), [(4, False), (2, False), (4, True)])
def test_an_update_by_turns_is_that_by_conversations(tiny_llama, mini, shared, monkeypatch):
    """Also over mini-batches, with a sample that fills up a group and counts nowhere, and with shared prefixes."""
    monkeypatch.setattr(prefix_tree, "SHORTEST_GAIN", 1)
    results = []
    for data in whole_and_split():
        data, own = fill_groups(data.select_idxs(np.arange(3)), n=4)
        assert own.tolist() == [True, True, True, False]
        share = shared and TURNS in data.non_tensor_batch
        if share:
            data.batch["group_index"] = torch.zeros(4, dtype=torch.int64)
        engine = make_engine(tiny_llama, optim={"optimizer": "SGD", "lr": 1.0, "weight_decay": 0.0})
        actor = make_actor(engine, mini=mini, loss_agg_mode="token-mean", share_prompt_forward=share)
        actor.policy.set_forward(remove_padding=share, share_prompt=share)
        metrics = actor.update_policy(to_rows(data))
        results.append((metrics, weights_of(engine)))
    (metrics, weights), (other, again) = results
    assert len(other["actor/grad_norm"]) == 4 // mini and max(other["actor/grad_norm"]) > 1e-3
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/pg_clipfrac"):
        assert other[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6)
    for name in weights:
        np.testing.assert_allclose(again[name], weights[name], atol=1e-5)


def prompts_of(batch) -> list[list[int]]:
    rows = zip(batch["prompts"], batch["attention_mask"].bool(), strict=True)
    return [ids[kept[: len(ids)]].tolist() for ids, kept in rows]


class TurnsGroup(FakeGroup):
    """Two turns of two tokens in every sample with an even number, of which the second has a prompt of its own."""

    def generate_sequences(self, prompts):
        output = super().generate_sequences(prompts)
        batch = output.batch
        asked = prompts_of(batch)
        two = [[(0, 2, ids), (3, 5, [7, *ids, 8])] for ids in asked]
        output.non_tensor_batch[TURNS] = object_array([turns if i % 2 == 0 else None for i, turns in enumerate(two)])
        batch["response_mask"] = torch.ones_like(batch["responses"])
        batch["response_mask"][::2] = torch.tensor([1, 1, 0, 1, 1, 0])
        return output

    def compute_log_prob(self, data):
        values = -data.batch["input_ids"][:, -data.batch["responses"].shape[1] :].float()
        return DataProto.from_dict({"old_log_probs": values, "entropys": -values})


@pytest.mark.process
def test_a_run_trains_turns_with_the_advantage_of_their_conversation(tmp_path):
    """Rewards and groups count conversations: each prompt's four samples have mean 0, whatever their turns."""
    trainer = fake_run(tmp_path, TurnsGroup, trainer__total_training_steps=1, actor_rollout_ref__actor__ppo_epochs=2)
    (data,) = trainer.actor_rollout_wg.updates
    assert data.meta_info[ROWS_PER_SAMPLE] == 2 and len(data) == 8 * 4 * 2
    batch, mask = data.batch, data.batch["response_mask"]
    assert sorted(mask.sum(1).tolist()) == [0] * 16 + [2] * 32 + [6] * 16
    assert ((batch["old_log_probs"] + batch["responses"]) * mask).abs().max() == 0
    first, second = (batch["advantages"][i::2] for i in (0, 1))
    of_sample = first[:, 0]
    assert (first == of_sample[:, None] * mask[::2]).all() and (second == of_sample[:, None] * mask[1::2]).all()
    assert of_sample.reshape(8, 4).mean(1).abs().max() < 1e-5 and of_sample.abs().min() > 0.1
    own = prompts_of(batch)
    pairs = [(a, b) for a, b, turns in zip(own[::2], own[1::2], mask[1::2].sum(1), strict=True) if turns]
    assert len(pairs) == 16 and all(b == [7, *a, 8] for a, b in pairs)
    assert sum(metrics_rows(tmp_path)[0][f"training/{name}_samples"] for name in ("scored", "dropped")) == 32


@pytest.mark.parametrize("lost", [0, 1])
def test_ranks_get_even_rows_of_tensors_and_the_batch_gets_its_own_rows_back(lost):
    batch = DataProto.concat([two(), two()]).select_idxs(np.arange(4 - lost))
    batch.non_tensor_batch = {"uid": np.array(["a", "a", "b", "b"], dtype=object)[: 4 - lost]}
    sent = []

    def method(rows):
        sent.append(rows)
        return DataProto.from_dict({"lengths": rows.batch["attention_mask"].sum(-1)})

    output = RankRows(n=2, ranks=2, whole_groups=True).forward(method, batch)
    assert len(sent[0]) == 4 and not sent[0].non_tensor_batch
    assert output.batch["lengths"].tolist() == batch.batch["attention_mask"].sum(-1).tolist()
