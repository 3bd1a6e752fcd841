"""Ulysses sequence parallelism: the steps, log-probs and values of one rank, on ranks that share every sequence."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.engines import make_engine
from tests.helpers.models import make_tokenizer
from tests.helpers.ranks import mean_metrics, run_ranks
from tests.training import test_cuts as cuts
from tests.training.test_attention import shared_prompts
from verl.config.model import PluginConfig
from verl.protocol import DataProto
from verl.training.policy import attention, prefix_tree
from verl.training.policy.causal_lm import CausalLMPolicy

#: 4 query heads; 2 ranks have a key head each, and of 4 ranks two share one
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
TWO_PASSES = "shared in two passes of attention"
STEPS = {
    "rows": ("actor", "token-mean", "rows"), "packed": ("actor", "seq-mean-token-mean", "tokens packed"),
    "shared": ("actor", "token-mean", "rows shared"), "shared by tokens": ("actor", "token-mean", "tokens shared"),
    TWO_PASSES: ("actor", "token-mean", "rows shared"), "chosen tokens": ("actor", "kl_cov", "rows"),
    "critic": ("critic", "token-mean", "rows packed"),
}  # fmt: skip


@pytest.fixture(scope="module")
def gqa(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("gqa"))
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    LlamaForCausalLM(LlamaConfig(**sizes, **HEADS, pad_token_id=0)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def two_passes(query, value, packing, *_):
    return "sdpa" if packing.parents is None else "shared_prompt"


def branches() -> DataProto:
    """`ragged_batch`, where answers begin with the first tokens of the first answer of their group."""
    data = cuts.ragged_batch()
    columns, first = data.batch, torch.arange(cuts.ROWS) // cuts.N * cuts.N
    for name, start in (("input_ids", cuts.P), ("responses", 0)):
        columns[name][:, start : start + 2] = columns[name][first, start : start + 2]
    columns["input_ids"] *= columns["attention_mask"]
    columns["responses"] *= columns["attention_mask"][:, cuts.P :]
    return data


def results_of(*args):
    """{step: (metrics, gradients)}, log-probs of this rank's rows, tokens that its forwards for them read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "SHORTEST_GAIN", 1)
        return results_of_trees(*args)


def results_of_trees(rank, world_size, path, size):
    settings = {"engine": {"ulysses_sequence_parallel_size": size}}
    critic = make_engine(path, loader=PluginConfig(name="value_head"), **settings)
    made = {"actor": cuts.recording(make_engine(path, **settings)), "critic": cuts.recording(critic)}
    own = slice(rank * cuts.ROWS // world_size, (rank + 1) * cuts.ROWS // world_size)
    share, results = branches()[own], {}
    for name, (role, mode, cut) in STEPS.items():
        step = cuts.actor_step if role == "actor" else cuts.critic_step
        with pytest.MonkeyPatch.context() as patch:
            if name == TWO_PASSES and world_size > 1:  # by the kernel that runs on CPUs
                patch.setitem(attention.BACKENDS, "shared_prompt", shared_prompts)
                patch.setattr(attention, "choose_backend", two_passes)
            results[name] = step(made[role], share, mode, cut)
    first = cuts.first_step(branches())[own]
    results["first"] = cuts.actor_step(made["actor"], first, "token-mean", "tokens shared", terms=False)
    seen = []
    embedding = made["actor"].module.model.embed_tokens
    embedding.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CausalLMPolicy, "compare_layouts", lambda *_: None)  # its tokens are not counted
        scored = [x.numpy() for x in cuts.log_probs(made["actor"], "rows shared", share)]
    return results, scored, sum(seen)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2), (4, 4)])
def test_ranks_that_share_sequences_take_the_step_of_one_rank(gqa, ranks, size):
    expected, scored, tokens = results_of(0, 1, gqa, 1)
    by_rank = run_ranks(results_of, ranks, gqa, size)
    for name in (*STEPS, "first"):
        metrics = mean_metrics([results[name][0] for results, *_ in by_rank])
        cuts.same((metrics, by_rank[0][0][name][1]), expected[name])
    for column, one in enumerate(scored):
        np.testing.assert_allclose(np.concatenate([s[column] for _, s, _ in by_rank]), one, rtol=0, atol=1e-5)
    for *_, read in by_rank:  # a rank reads its part of each forward's flat row, padded to an even share
        assert tokens / ranks <= read <= tokens / ranks + 4 * cuts.ROWS / size


def test_heads_that_ranks_cannot_share_are_refused(gqa):
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size=3 does not divide the 1 ranks"):
        make_engine(gqa, engine={"ulysses_sequence_parallel_size": 3})


def whether_layers_are_checkpointed(rank, world_size, path):
    from verl.training.engine import fsdp

    fsdp.available_memory = lambda: (1 << 40, 1)[rank]
    engine = make_engine(path, enable_gradient_checkpointing=None, engine={"ulysses_sequence_parallel_size": 2})
    with engine.train_mode(), engine.autocast(10):
        return engine.module.is_gradient_checkpointing


@pytest.mark.process
def test_ranks_that_share_sequences_checkpoint_layers_where_one_of_them_lacks_the_memory(gqa):
    assert run_ranks(whether_layers_are_checkpointed, 2, gqa) == [True, True]
