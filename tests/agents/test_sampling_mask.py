"""Kept tokens of top-k and top-p: recorded by rollouts, and what the trainer renormalises its log-probs over."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.agents.agent_loop.parts import listed
from tests.helpers.configs import compose_ppo
from tests.helpers.engines import leave_group, make_actor, make_engine
from tests.helpers.models import save_tiny_llama
from tests.helpers.rl_run import compose_run, metrics_rows
from tests.rollout.test_vllm_rollout import Hybrid, P, R, difference, prompts
from verl.agents.agent_loop.base import AgentLoopOutput
from verl.agents.agent_loop.rows import batch_of
from verl.agents.conversation import Conversation, ConversationTree
from verl.config.compose import to_settings
from verl.planning.config_check import sampling_problems
from verl.protocol import DataProto
from verl.protocol.sampling_mask import SAMPLING_MASK, KeptTokens, mask_column, mask_tensor
from verl.rollout import get_rollout_class
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.ppo.turn_rows import to_rows
from verl.trainer.run.ray_session import run_here
from verl.training.policy import get_policy
from verl.training.policy.chunked_log_probs import FinalLogits, chunked_log_probs
from verl.workers.config import RolloutConfig


def random_sets(rows, length, vocabulary, seed=0):
    """Kept ids of ragged responses: [rows][tokens] arrays."""
    g = np.random.default_rng(seed)
    lengths = g.integers(0, length + 1, rows)
    return [[g.choice(vocabulary, g.integers(0, vocabulary), replace=False) for _ in range(n)] for n in lengths]


def test_sets_survive_the_column_the_tensor_and_any_choice_of_positions():
    rows, length, vocabulary = 5, 7, 11
    kept = random_sets(rows, length, vocabulary)
    mask = mask_tensor(mask_column(kept), length)
    generator = torch.Generator().manual_seed(0)
    for count in (rows * length, 9, 1, 0):
        positions = torch.randperm(rows * length, generator=generator)[:count]
        found = KeptTokens.at(mask, length, positions)
        removed = found.removed(vocabulary, 0, count)
        for position, row in zip(positions.tolist(), removed, strict=True):
            sets, t = kept[position // length], position % length
            expected = set(sets[t].tolist()) if t < len(sets) and len(sets[t]) else set(range(vocabulary))
            assert set((~row).nonzero()[:, 0].tolist()) == expected
        if count > 4:
            assert found.removed(vocabulary, 2, 5).equal(removed[2:5])


@pytest.mark.parametrize("config", [FinalLogits(None, 1.0), FinalLogits(None, 1 / 0.7), FinalLogits(0.2, 5.0)])
@pytest.mark.parametrize("head", ["plain", "other"])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_log_probs_over_kept_tokens_have_the_gradient_of_a_masked_softmax(config, head, with_entropy):
    torch.manual_seed(0)
    count, hidden, vocabulary = 7, 6, 13
    layer = nn.Linear(hidden, vocabulary, bias=True).double()
    if head == "other":
        layer.register_forward_hook(lambda module, args, output: output)  # takes the checkpointed way
    states = torch.randn(count, hidden, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(vocabulary, (count,))
    allowed = torch.rand(count, vocabulary) < 0.5
    allowed[torch.arange(count), labels] = True
    allowed[2] = True  # a position without a filter
    counts = allowed.sum(1)
    counts[2] = 0
    ids = torch.cat([row.nonzero()[:, 0] for i, row in enumerate(allowed) if i != 2])
    kept = KeptTokens(counts, ids)
    weights = torch.randn(2, count, dtype=torch.float64)

    def gradients(log_probs, entropy):
        loss = (weights[0] * log_probs).sum() + ((weights[1] * entropy).sum() if with_entropy else 0)
        return torch.autograd.grad(loss, [states, layer.weight, layer.bias])

    output = chunked_log_probs(layer, config, states, labels, chunk_tokens=3, with_entropy=with_entropy, kept=kept)
    log_p = config(layer(states)).masked_fill(~allowed, -1e30).log_softmax(-1)
    plain = log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    tight = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(output.log_probs.double(), plain[0], **tight)
    if with_entropy:
        torch.testing.assert_close(output.entropy.double(), plain[1], **tight)
    for ours, reference in zip(gradients(output.log_probs, output.entropy), gradients(*plain), strict=True):
        torch.testing.assert_close(ours, reference, **tight)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=96)


def hf_rollout(engine, **settings):
    config = RolloutConfig(name="hf", prompt_length=P, response_length=R, **settings)
    rollout = get_rollout_class("hf", "sync")(config, engine.model_config, engine.mesh)
    rollout.bind_actor(engine, get_policy("causal_lm"))
    return rollout


FILTERS = [{"top_p": 0.6}, {"top_k": 5}, {"top_k": 20, "top_p": 0.5}]
LAYOUTS = {"padded": {}, "packed": {"remove_padding": True}, "shared": {"remove_padding": True, "share_prompt": True}}


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_before_the_first_update_the_ratio_of_hf_samples_is_one(model_path, filters, layout):
    engine = make_engine(model_path)
    samples = hf_rollout(engine, calculate_log_probs=True, **filters).generate_sequences(prompts(temperature=0.8))
    assert samples.non_tensor_batch[SAMPLING_MASK][0][0] == samples.batch["response_mask"][0].sum()
    (mass,) = samples.meta_info.pop("metrics")["health/kept_mass"]
    assert (0 if "top_k" in filters else filters["top_p"] - 1e-6) < mass < 1
    switches = {"remove_padding": False, "share_prompt": False, **LAYOUTS[layout]}
    actor = make_actor(engine, micro=6 if not switches["share_prompt"] else 4,
                       share_prompt_forward=switches["share_prompt"])  # fmt: skip
    actor.policy.set_forward(**switches)
    samples.batch["group_index"] = torch.arange(len(samples)) // 4
    samples.meta_info["temperature"] = 0.8
    with_mask, _ = actor.compute_log_prob(to_rows(samples))
    samples.non_tensor_batch.pop(SAMPLING_MASK)
    without, _ = actor.compute_log_prob(to_rows(samples))
    mask = samples.batch["response_mask"].bool()
    error = (samples.batch["rollout_log_probs"] - with_mask)[mask].abs().max()
    assert error < 1e-5 and difference(samples, without) > 0.05
    leave_group()


def test_masks_are_recorded_for_filtered_training_samples_only(model_path):
    engine = make_engine(model_path)
    for settings, meta, recorded in (
        ({"top_p": 0.9}, {}, True), ({}, {}, False), ({"top_p": 0.9, "record_sampling_mask": False}, {}, False),
        ({"top_p": 0.9}, {"validate": True}, False), ({"top_p": 0.9}, {"do_sample": False}, False),
        ({"top_p": 0.9}, {"probe_tokens": 3}, False),
    ):  # fmt: skip
        rollout = hf_rollout(engine, max_num_seqs=8, **settings)
        samples = rollout.generate_sequences(prompts(**meta))  # 12 samples, 8 at a time
        assert (SAMPLING_MASK in samples.non_tensor_batch) == recorded
        assert len(samples) == 12
    leave_group()


@pytest.mark.process
def test_before_the_first_update_the_ratio_of_vllm_samples_is_one(model_path):
    made = Hybrid(model_path, {"top_k": 30, "max_model_len": 64, "max_num_batched_tokens": 64})
    try:
        for filters in ({"top_k": 5}, {"top_k": 30, "top_p": 0.5}):
            made.sample_with(**filters)
            samples = made.generate(prompts(temperature=0.8))
            assert samples.non_tensor_batch[SAMPLING_MASK][0][0] == samples.batch["response_mask"][0].sum()
            rows = to_rows(DataProto(samples.batch, samples.non_tensor_batch, {"temperature": 0.8}))
            with_mask, _ = made.actor.compute_log_prob(rows)
            mask = samples.batch["response_mask"].bool()
            error = (samples.batch["rollout_log_probs"] - with_mask)[mask].abs().max()
            assert error < 1e-4 and difference(samples, made.log_probs(samples, 0.8)) > 0.05
    finally:
        made.rollout.close()
        leave_group()


def rows_of_conversations(directory, **more):
    """Metrics of two steps of GRPO with agent loops of vLLM; one update a step, with the rollout's log-probs as old."""
    directory.mkdir()
    rollout = {
        "name": "vllm", "mode": "async", "dtype": "float32", "calculate_log_probs": "true", "max_num_seqs": 64,
        "top_p": 0.9, "top_k": 30, "stop_token_ids": list(range(2, 30)), "agent__default_agent_loop": "tool_agent",
        "multi_turn__interaction_config_path": listed(directory, "interaction", "PatientInteraction"), **more,
    }  # fmt: skip
    config = compose_run(
        directory, save_tiny_llama(directory / "model", vocab_size=64), trainer__local="true",
        trainer__total_training_steps=2, trainer__save_freq=-1, trainer__test_freq=-1, reward_model__num_workers=0,
        data__max_response_length=40, actor_rollout_ref__actor__use_rollout_log_probs="true",
        actor_rollout_ref__model__use_remove_padding="true",
        **{f"actor_rollout_ref__rollout__{name}": value for name, value in rollout.items()},
    )  # fmt: skip
    assert run_here(TaskRunner(), config) == 0
    rows = metrics_rows(directory)
    assert [row["step"] for row in rows] == [1, 2] and all(row["num_turns/mean"] > 3 for row in rows)
    return rows


@pytest.mark.process
@pytest.mark.parametrize("row_per_turn", ["false", "true"])
def test_before_the_first_update_the_ratio_of_two_turn_conversations_is_one(tmp_path, row_per_turn):
    rows = rows_of_conversations(tmp_path / "run", multi_turn__row_per_turn=row_per_turn)
    assert all(row["actor/logprob_drift_max"] < 1e-4 for row in rows)


def test_each_turn_of_a_conversation_keeps_its_sets():
    """Of a conversation of two turns, one of a single turn, and one that was lost."""
    conversations = [Conversation([7, 8]), Conversation([9])]
    conversations[0].add_generated([5, 6], kept=[[5, 1], [6]])
    conversations[0].add_given([4, 4])
    conversations[0].add_generated([3], kept=[[2, 3, 4]])
    conversations[1].add_generated([5], kept=[[]])  # without a filter
    assert conversations[0].kept_tokens == [[5, 1], [6], [], [], [2, 3, 4]]
    with pytest.raises(ValueError, match="2 sets of kept tokens for 1 generated tokens"):
        conversations[1].add_generated([5], kept=[[5], [6]])
    turns = [[(0, 2, [7, 8]), (4, 5, [7, 8, 4])], None, []]
    rows = [
        AgentLoopOutput(
            prompt_ids=c.prompt_ids, response_ids=c.response_ids, response_mask=c.response_mask,
            kept_tokens=c.kept_tokens, extra_fields={"turn_prompts": t},
        )
        for c, t in zip(conversations, turns, strict=False)
    ]  # fmt: skip
    batch = batch_of([*rows, None], RolloutConfig(name="vllm", prompt_length=3, response_length=6), 0)
    batch.non_tensor_batch["turn_prompts"][2] = []
    batch.non_tensor_batch[SAMPLING_MASK][2] = None
    whole = mask_tensor(batch.non_tensor_batch[SAMPLING_MASK], 6)
    assert whole[:, :6].tolist() == [[2, 1, 0, 0, 3, 0], [0] * 6, [0] * 6]
    of_turns = to_rows(batch).batch[SAMPLING_MASK]
    assert of_turns[:, :6].sum(1).tolist() == [3, 3, 0, 0, 0, 0]
    assert of_turns[0, 6:].tolist() == [5, 1, 6] and of_turns[1].tolist() == [3, 0, 0, 0, 0, 0, 2, 3, 4]


def test_rows_of_a_tree_keep_the_sets_of_their_tokens():
    tree = ConversationTree()
    tree.add([1, 2], [3, 4], kept=[[3], [4, 5]])
    tree.add([1, 2, 3], [6], kept=[[6, 7]])  # splits the first turn
    first, second = tree.rows()
    assert (first.response_ids, first.kept_tokens) == ([3, 4], [[3], [4, 5]])
    assert (second.response_ids, second.kept_tokens) == ([6], [[6, 7]])


@pytest.mark.parametrize(("settings", "said"), [
    (("name=vllm", "top_k=20", "top_p=0.9"), None), (("name=hf", "top_p=0.9", "do_sample=false"), None),
    (("name=vllm", "top_p=0.9"), "Set actor_rollout_ref.rollout.top_k=100, say, to record"),
    (("name=vllm", "top_k=20", "mode=async"), None),
    (("name=vllm", "top_k=20", "prompt_queue=true"), "Set actor_rollout_ref.rollout.prompt_queue=false to"),
    (("name=sglang", "top_k=20"), "rollout.name=sglang cannot record"),
    (("name=vllm", "top_k=20", "logprobs_mode=raw_logprobs"),
     "Set actor_rollout_ref.rollout.logprobs_mode=processed_logprobs to"),
    (("name=vllm", "top_p=0.9", "mode=async", "record_sampling_mask=false"), "record_sampling_mask=true and "),
    (("name=vllm", "repetition_penalty=1.1"), "repetition_penalty=1.1 biases"),
    (("name=sglang", "repetition_penalty=0.9", "do_sample=false"), "Set it to 1 in training"),
    (("name=hf", "repetition_penalty=1.1"), None),  # not read, which another check says
])  # fmt: skip
def test_a_dry_run_says_which_ratios_are_biased(settings, said):
    config = compose_ppo("trainer.device=cpu", *(f"actor_rollout_ref.rollout.{part}" for part in settings))
    problems = list(sampling_problems(to_settings(config.actor_rollout_ref.rollout, RolloutConfig)))
    assert [said in problem.message and "biases every ratio" in problem.message for problem in problems] == (
        [True] if said else []
    )
