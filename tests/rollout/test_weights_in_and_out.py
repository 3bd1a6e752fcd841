"""From a model's files into sharded parameters, and back out of them under the files' names."""

import platform

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, MixtralConfig, Qwen3MoeConfig

from tests.helpers.engines import make_engine
from tests.helpers.models import save_tiny_llama
from tests.helpers.ranks import run_ranks
from verl.models.loading import load_without_weights
from verl.workers.config import HFModelConfig, PluginConfig

SIZES = dict(vocab_size=63, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, num_experts_per_tok=2)  # fmt: skip
MOE = {
    "mixtral": MixtralConfig(num_local_experts=3, **SIZES),
    "qwen3_moe": Qwen3MoeConfig(num_experts=3, moe_intermediate_size=32, decoder_sparse_step=1, **SIZES),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models by name: safetensors in several files."""
    made = {}
    for name, config in MOE.items():
        torch.manual_seed(0)
        made[name] = str(tmp_path_factory.mktemp(name))
        AutoModelForCausalLM.from_config(config).save_pretrained(made[name], max_shard_size="100KB")
    made["llama"] = save_tiny_llama(tmp_path_factory.mktemp("llama"), vocab_size=63)
    made["tied llama"] = save_tiny_llama(tmp_path_factory.mktemp("tied"), vocab_size=63, tied=True)
    return made


def on_disk(folder):
    from verl.utils.weight_files import safetensors_of

    return {name: tensor for file in safetensors_of(folder) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", ["llama", "tied llama", "mixtral", "qwen3_moe"])
def test_weights_leave_under_the_names_of_the_files_and_unchanged(folders, name):
    """Experts are stored one by one, joined in the module, and one by one again for a rollout engine."""
    engine, stored = make_engine(folders[name]), on_disk(folders[name])
    torch.testing.assert_close(dict(engine.get_per_tensor_param()), stored, rtol=0, atol=0)
    with torch.no_grad(), engine.eval_mode():
        ids = torch.arange(5, 17).reshape(2, 6)
        reference = AutoModelForCausalLM.from_pretrained(folders[name])(ids).logits
        torch.testing.assert_close(engine.module(ids).logits, reference, rtol=0, atol=0)


def test_parameters_take_no_memory_before_they_are_sharded_and_new_ones_are_drawn_as_ever(folders):
    config = HFModelConfig(path=folders["llama"], loader=PluginConfig(name="value_head"))
    torch.manual_seed(3)
    module, _ = load_without_weights(config, torch.float32)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    whole = AutoModelForTokenClassification.from_pretrained(folders["llama"], num_labels=1)
    assert torch.equal(torch.rand(1), drawn)
    assert torch.equal(module.score.weight, whole.score.weight)
    assert sum(p.untyped_storage().nbytes() for n, p in module.named_parameters() if "score" not in n) < 200
    assert module.config.name_or_path == folders["llama"]


def test_a_weight_of_another_shape_is_named(folders):
    config = HFModelConfig(path=folders["llama"], override_config={"intermediate_size": 64})
    with pytest.raises(ValueError, match=r"mlp.*_proj.weight is \(.*\), but the model's is"):
        load_without_weights(config, torch.float32)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_a_weight_that_is_not_finite_is_named_and_not_sent(folders, value):
    engine = make_engine(folders["llama"])
    with torch.no_grad():
        engine.module.lm_head.weight.to_local()[3, 5] = float(value)
    assert len(dict(engine.get_per_tensor_param())) > 3
    with pytest.raises(FloatingPointError, match=r"weight 'lm_head.weight' \(63, 64\) is not finite"):
        list(engine.get_per_tensor_param(check_finite=True))


def sent_by_three(rank, world_size, path, dtype, bucket, nodes):
    """All weights in float32, from rank 2 only; `nodes` holds a letter for the machine of each rank."""
    platform.node = lambda: nodes[rank]
    engine = make_engine(path)
    weights = engine.get_per_tensor_param(getattr(torch, dtype), bucket, check_finite=True)
    sent = {name: tensor.float().numpy() for name, tensor in weights}
    return sent if rank == 2 else sorted(sent)


def with_adapter(rank, world_size, path):
    """Merged weights of a model with an adapter whose B is not zero."""
    engine = make_engine(path, lora_rank=4)
    with torch.no_grad():
        for name, p in engine.module.named_parameters():
            if "lora_B" in name:  # the same on any number of ranks: by row of the full tensor
                rows = torch.arange(p.shape[0], dtype=p.dtype).sin()[:, None].expand(p.shape)
                per_rank = -(-p.shape[0] // world_size)
                p.to_local().copy_(rows[rank * per_rank : (rank + 1) * per_rank])
    return {name: tensor.numpy() for name, tensor in engine.get_per_tensor_param()}


@pytest.mark.process
@pytest.mark.slow
def test_three_ranks_load_and_send_what_is_in_the_files(folders):
    """63 rows on 3 ranks, 64 on 3 ranks (22, 22, 20), 1 expert a rank; buckets smaller than a tensor and larger; the
    ranks on one node and on two, each of which reads the files."""
    for name, dtype, bucket, nodes in (("llama", "float32", 20_000, "aaa"), ("qwen3_moe", "bfloat16", 1 << 20, "aba")):
        sent = run_ranks(sent_by_three, 3, folders[name], dtype, bucket, nodes)[2]
        stored = on_disk(folders[name]).items()
        np.testing.assert_equal(sent, {k: t.to(getattr(torch, dtype)).float().numpy() for k, t in stored})


@pytest.mark.process
@pytest.mark.slow
def test_adapters_are_merged_into_shards_as_into_full_weights(folders):
    alone = with_adapter(0, 1, folders["llama"])
    for merged in run_ranks(with_adapter, 3, folders["llama"]):
        torch.testing.assert_close(merged, alone, rtol=0, atol=1e-6)
