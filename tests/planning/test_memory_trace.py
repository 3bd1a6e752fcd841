"""The peak of an update, traced without storage: against what ranks hold, and against numbers by hand."""

import pytest
import torch.distributed as dist
from transformers import AutoConfig, LlamaConfig

from tests.helpers.engines import make_actor, make_engine, rl_batch
from tests.helpers.models import save_tiny_llama
from tests.helpers.ranks import run_ranks
from verl.planning import memory_trace
from verl.planning.memory_trace import ACTIVATIONS, GATHERED, LOGITS, TEMPORARY, MicroBatch, trace_update
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=320, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0,
)  # fmt: skip
# q and o, k and v, the MLP and two norms in each layer; embedding, head and the last norm.
LAYER, AROUND = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64, 2 * 320 * 64 + 64
STATIC = ("weights", "gradients", "optimizer (two moments)")


def trace(ranks, micro=None, layers=2, on_gpu=False, model=None, **engine):
    config = LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": layers})
    of_model = {"path": "none", "load_tokenizer": False, "enable_gradient_checkpointing": False, **(model or {})}
    settings = HFModelConfig(**of_model), FSDPEngineConfig(**{"dtype": "float32", **engine})
    return trace_update(config, *settings, FSDPOptimizerConfig(), micro or MicroBatch(4, 20, 30), ranks, on_gpu)


def test_what_a_rank_keeps_is_its_share():
    parts = trace(ranks=4, layers=7)
    share = (7 * LAYER + AROUND) * 4 // 4
    steps = 4 * (9 * 7 + 3)  # AdamW counts its steps in a float32 of each of 9 weights a layer, and of 3 around
    assert [parts[name] for name in STATIC] == [share, share, 2 * share + steps]
    adapters = 8 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 96))
    parts = trace(ranks=1, model={"lora_rank": 8})
    assert parts["weights"] == 4 * (2 * LAYER + AROUND + 2 * adapters) and parts["gradients"] == 4 * 2 * adapters


def test_layers_that_are_not_traced_are_like_those_that_are(monkeypatch):
    checkpointing = {"enable_gradient_checkpointing": True}
    expected = [trace(ranks=2, layers=8, model=model) for model in (None, checkpointing)]
    monkeypatch.setattr(memory_trace, "LAYERS", (8, 8))
    assert [trace(ranks=2, layers=8, model=model) for model in (None, checkpointing)] == expected


def test_settings_that_save_memory_do_so_where_they_should():
    plain = trace(ranks=4, layers=3)
    checkpointed = trace(ranks=4, layers=3, model={"enable_gradient_checkpointing": True})
    assert checkpointed[ACTIVATIONS] < plain[ACTIVATIONS] / 2
    halved = trace(ranks=4, layers=3, ulysses_sequence_parallel_size=2)
    assert halved[ACTIVATIONS] < 0.6 * plain[ACTIVATIONS]
    split = trace(ranks=4, layers=3, tensor_parallel_size=2)
    assert split[ACTIVATIONS] < 0.8 * plain[ACTIVATIONS] and split["weights"] > plain["weights"]
    deferred = trace(ranks=4, layers=3, defer_gradient_sync=True)
    assert deferred[GATHERED] - plain[GATHERED] > 2 * 3 * LAYER  # more than half of the gradients are there whole
    away = trace(ranks=4, layers=3, on_gpu=True, offload_policy=True)
    assert not any(away[name] for name in STATIC)
    alone = trace(ranks=4, layers=3, micro=MicroBatch(4, 20, 30, adds_to_gradients=False))
    assert sum(alone.values()) < sum(plain.values())
    shared = trace(ranks=4, layers=3, micro=MicroBatch(4, 40, 10, samples=4))
    assert shared[ACTIVATIONS] < 0.6 * trace(ranks=4, layers=3, micro=MicroBatch(4, 40, 10))[ACTIVATIONS]


@pytest.mark.parametrize(("several", "together", "moment"), [(True, 12, ACTIVATIONS), (False, 9, TEMPORARY)])
def test_the_larger_of_the_backward_and_the_optimizers_step_counts(several, together, moment):
    """The step has all gradients, 1 + 4 + 2 + 2. The backward of a single micro-batch has none yet, 1 + 2 + 3 + 2."""
    sizes = {**dict(zip(STATIC, (1, 4, 2), strict=True)), GATHERED: 3, ACTIVATIONS: 2, LOGITS: 0, TEMPORARY: 2}
    parts = memory_trace._at_peak(sizes, several)
    assert sum(parts.values()) == together and moment in parts


def on_rank(rank, world_size, path, model, settings):
    """The most bytes of tensors that this rank holds in an update of two micro-batches, from its second on."""
    live = memory_trace._Live()
    with live:
        engine = make_engine(path, engine=settings, use_remove_padding=True, **model)
        batch = rl_batch(rows=8, vocab=64)
        for name in ("attention_mask", "response_mask"):
            batch.batch[name].fill_(1)
        batch.batch["position_ids"] = batch.batch["attention_mask"].cumsum(-1) - 1
        actor = make_actor(engine, mini=8, micro=4, use_remove_padding=True)
        actor.update_policy(batch)
        live.reset()
        actor.update_policy(batch)
    return live.peak


@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "engine"),
    [
        ({}, {}),
        ({"enable_gradient_checkpointing": True}, {"ulysses_sequence_parallel_size": 2}),
        ({"lora_rank": 4}, {}),
    ],
)
def test_ranks_hold_what_was_traced(model, engine, tmp_path):
    path = save_tiny_llama(tmp_path, hidden=128, layers=6)
    config = HFModelConfig(path=path, load_tokenizer=False, **{"enable_gradient_checkpointing": False, **model})
    settings = FSDPEngineConfig(dtype="float32", **engine)
    parts = config, settings, FSDPOptimizerConfig(), MicroBatch(4, 4, 6)
    expected = sum(trace_update(AutoConfig.from_pretrained(path), *parts, ranks=2).values())
    measured = run_ranks(on_rank, 2, path, model, engine)
    assert measured == pytest.approx([expected] * 2, rel=0.05)


def test_memory_is_traced_without_a_process_group(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="before a process group is made"):
        trace(ranks=2)
