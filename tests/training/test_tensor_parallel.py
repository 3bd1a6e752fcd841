"""Tensor parallelism: the steps, weights and checkpoints of one rank, on ranks that split every layer."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.engines import make_actor, make_engine, rl_batch, weights_of
from tests.helpers.models import make_tokenizer
from tests.helpers.ranks import mean_metrics, run_ranks
from tests.training.test_cuts import ROWS, actor_step, critic_step, log_probs, ragged_batch, recording, same
from verl.config.model import PluginConfig
from verl.training.parallel.sharding import local_tensor
from verl.training.parallel.tensor_parallel import refusal
from verl.training.peft_weights import without_adapters

SIZES = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, pad_token_id=0,
)  # fmt: skip
#: an output matrix of its own and tied to the embedding, biases, norms of heads
MODELS = {"llama": {}, "qwen2": {"tie_word_embeddings": True}, "qwen3": {}, "mistral": {"sliding_window": None}}
STEPS = {
    "rows": ("actor", "token-mean", "rows"), "packed": ("actor", "seq-mean-token-mean", "tokens packed"),
    "shared": ("actor", "token-mean", "tokens shared"), "critic": ("critic", "token-mean", "rows packed"),
}  # fmt: skip
LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, more in MODELS.items():
        made[name] = str(tmp_path_factory.mktemp(name))
        torch.manual_seed(0)
        written = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES, **more))
        with torch.no_grad():
            for parameter in written.parameters():  # biases and norms unlike 0 and 1
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        written.save_pretrained(made[name])
        make_tokenizer().save_pretrained(made[name])
    return made


def engine_of(path, tensors, sequences, lora, by_tokens=False, **more):
    settings = {"tensor_parallel_size": tensors, "ulysses_sequence_parallel_size": sequences,
                "sequence_parallel": by_tokens}  # fmt: skip
    return make_engine(path, engine=settings, **(LORA if lora else {}), **more)


def results_of(rank, world_size, path, tensors, sequences, lora, steps, by_tokens=False):
    """{step: (metrics, gradients)}, log-probs of this rank's rows, weights after a step, bytes of its parameters."""
    checkpointed = {"enable_gradient_checkpointing": by_tokens}
    actor, kept = engine_of(path, tensors, sequences, lora, by_tokens, **checkpointed), []
    second = without_adapters(actor.module).get_decoder().layers[1]
    second.register_forward_pre_hook(lambda _, args: kept.append((local_tensor(args[0]).shape[1], args[0].shape[1])))
    size = sum(local_tensor(p).nbytes for p in actor.module.parameters())
    made = {"actor": recording(actor)}
    if "critic" in steps:
        made["critic"] = recording(
            engine_of(path, tensors, sequences, lora, by_tokens, loader=PluginConfig(name="value_head"))
        )
    share, results = ragged_batch()[rank * ROWS // world_size : (rank + 1) * ROWS // world_size], {}
    for name in steps:
        role, mode, cut = STEPS[name]
        results[name] = (actor_step if role == "actor" else critic_step)(made[role], share, mode, cut)
    scored = [x.numpy() for x in log_probs(actor, "rows shared", share)]
    assert kept and all(mine <= -(-every // (tensors if by_tokens else 1)) for mine, every in kept)
    return results, scored, weights_of(actor), size


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "tensors", "sequences", "lora", "steps", "by_tokens"),
    [
        ("llama", 2, 2, 1, False, tuple(STEPS), False), ("llama", 4, 2, 1, False, tuple(STEPS), False),
        ("llama", 4, 2, 2, False, ("packed", "critic"), False), ("llama", 4, 2, 1, True, ("rows", "critic"), False),
        ("qwen2", 4, 2, 1, False, ("rows",), False), ("qwen3", 4, 2, 1, False, ("packed",), False),
        ("mistral", 4, 2, 1, False, ("rows",), False), ("llama", 2, 2, 1, False, tuple(STEPS), True),
        ("qwen3", 4, 2, 2, False, ("packed",), True), ("qwen2", 4, 2, 1, True, ("rows", "critic"), True),
    ],
)  # fmt: skip
def test_ranks_that_split_layers_take_the_step_of_one_rank(
    folders, name, ranks, tensors, sequences, lora, steps, by_tokens
):
    expected, scored, weights, size = results_of(0, 1, folders[name], 1, 1, lora, steps)
    by_rank = run_ranks(results_of, ranks, folders[name], tensors, sequences, lora, steps, by_tokens)
    for step in steps:
        metrics = mean_metrics([results[step][0] for results, *_ in by_rank])
        same((metrics, by_rank[0][0][step][1]), expected[step])
    for column, one in enumerate(scored):
        np.testing.assert_allclose(np.concatenate([s[column] for _, s, *_ in by_rank]), one, rtol=0, atol=1e-5)
    for _, _, sent, held in by_rank:
        torch.testing.assert_close(sent, weights, rtol=0, atol=1e-5)
        assert held < 1.4 * size / ranks if tensors * 2 == ranks else held < size


def steps(rank, world_size, path, tensors, sequences, loaded, saved, numbers):
    """Weights after one AdamW step, clipped, for each seed in `numbers`, between a checkpoint loaded and one saved."""
    engine = engine_of(path, tensors, sequences, lora=False)
    if loaded:
        engine.load_checkpoint(loaded)
    rows = 8 // world_size
    actor, norms = make_actor(engine, mini=rows, micro=2, grad_clip=0.05), []
    for seed in numbers:
        norms += actor.update_policy(rl_batch(seed=seed)[rank * rows : (rank + 1) * rows])["actor/grad_norm"]
    if saved:
        engine.save_checkpoint(saved)
    return norms, weights_of(engine)


@pytest.mark.process
@pytest.mark.slow
def test_checkpoints_load_however_layers_and_sequences_are_shared(folders, tmp_path):
    path, split, alone = folders["llama"], str(tmp_path / "split"), str(tmp_path / "alone")
    straight, expected = steps(0, 1, path, 1, 1, None, None, [0, 1])
    steps(0, 1, path, 1, 1, None, alone, [0])
    run_ranks(steps, 4, path, 2, 1, None, split, [0])
    ends = {"4 ranks to 1": [steps(0, 1, path, 1, 1, split, None, [1])]}
    ends["4 ranks to 2"] = run_ranks(steps, 2, path, 1, 2, split, None, [1])
    ends["1 rank to 4"] = run_ranks(steps, 4, path, 2, 2, alone, None, [1])
    for name, by_rank in ends.items():
        for norms, weights in by_rank:
            np.testing.assert_allclose(norms, straight[1:], rtol=1e-4, err_msg=name)
            torch.testing.assert_close(weights, expected, rtol=0, atol=2e-5, msg=f"weights of {name}")


def test_models_that_ranks_cannot_split_are_refused(folders):
    heads = AutoConfig.for_model("llama", **SIZES | {"num_key_value_heads": 1})
    assert "num_key_value_heads=1, which 2 ranks cannot split" in refusal(heads, 2)
    wide = AutoConfig.for_model("llama", **SIZES | {"num_attention_heads": 64, "num_key_value_heads": 64})
    assert "intermediate_size=96, which 64 ranks" in refusal(wide, 64)
    assert "mixtral splits layers by" in refusal(AutoConfig.for_model("mixtral"), 2)
    assert "no tensor parallel plan for gpt2" in refusal(AutoConfig.for_model("gpt2"), 2)
    assert refusal(AutoConfig.for_model("llama", **SIZES), 2) is None
    with pytest.raises(ValueError, match="tensor_parallel_size=2 does not divide the 1 ranks"):
        make_engine(folders["llama"], engine={"tensor_parallel_size": 2})
