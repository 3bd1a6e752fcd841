"""Whether a model computes the same without padding is decided on the loaded model."""

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Qwen3MoeConfig,
)

from tests.helpers.engines import make_engine
from tests.helpers.logs import logged
from tests.models.families import model_of
from verl.config.model import PluginConfig
from verl.training.critic.dp_critic import packs_values
from verl.training.policy import get_policy
from verl.training.policy.layout_probe import layout_difference

SIZE = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
MODELS = {
    "llama": LlamaConfig(**SIZE),
    "llama_tied": LlamaConfig(**SIZE, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**SIZE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "gemma2": Gemma2Config(**SIZE, sliding_window=4096),
    "llama4": Llama4TextConfig(**SIZE, attention_chunk_size=8192, num_local_experts=2, intermediate_size_mlp=64),
    "lfm2": Lfm2Config(**SIZE, layer_types=["conv", "full_attention"]),
    "mamba": MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, state_size=8),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for weight in model.parameters():  # larger weights: what one token does to another is visible
                weight.mul_(3 if weight.dim() == 2 else 1)
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name])
    yield made


def compared(folder, share=True, **engine):
    """(policy after the comparison, warnings) of a model that would rather remove padding and share prompts."""
    built = make_engine(str(folder), optim=False, engine={"forward_only": True, **engine})
    policy = get_policy("causal_lm")
    policy.set_forward(remove_padding=True, share_prompt=share)
    with logged() as warned, built.eval_mode():
        policy.bind(built.module)
        policy.compare_layouts(built.module, built.device)
    return policy, warned, built


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3_moe", "gemma2"])
def test_models_that_mix_tokens_by_attention_alone_need_no_padding(folders, name, dtype):
    policy, warned, built = compared(folders[name], dtype=dtype)
    assert policy.remove_padding and policy.share_prompt and not warned
    with built.eval_mode():
        for share in (False, True):
            compute = partial(policy.probe_log_probs, built.module, share)
            difference, limit = layout_difference(built.module, compute, True, built.device)
            assert difference < 1e-5 and limit == 1e-3  # in float32, whatever the engine computes in


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["lfm2", "mamba", "llama4"])
def test_models_that_mix_tokens_otherwise_keep_their_padding_and_say_so(folders, name, dtype):
    policy, warned, built = compared(folders[name], dtype=dtype)
    assert not policy.remove_padding and not policy.share_prompt
    assert len(warned) == 1 and "Batches keep their padding" in warned[0] or "cannot be replaced" in warned[0]
    if "differ" in warned[0]:
        assert type(built.module).__name__.removeprefix("FSDP") in warned[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_value_model_that_mixes_tokens_otherwise_keeps_its_padding(tmp_path, folders, dtype):
    model_of("Qwen3-Next").save_pretrained(tmp_path)
    for folder, packs in ((tmp_path, False), (folders["llama"], True)):
        value = PluginConfig(name="value_head")
        engine = make_engine(str(folder), optim=False, engine={"dtype": dtype}, loader=value, use_remove_padding=True)
        with logged() as warned:
            assert packs_values(engine) == packs
        assert packs or "values of Qwen3NextForTokenClassification" in warned[0] and "differ by" in warned[0]


def test_a_model_whose_padding_changes_log_probs_is_refused():
    """Its recurrences read padding in front of a row, whatever the mask says."""
    model, policy = model_of("RecurrentGemma"), get_policy("causal_lm")
    with pytest.raises(ValueError, match="of RecurrentGemmaForCausalLM .* does not leave padding out"):
        policy.compare_layouts(model, torch.device("cpu"))


def test_windows_are_shorter_only_while_layouts_are_compared():
    model, policy = model_of("Mistral"), get_policy("causal_lm")
    model.config.sliding_window = 4096  # none of the rows compared is as long
    policy.set_forward(remove_padding=True, share_prompt=True)
    policy.bind(model)
    windows = []
    layer = model.model.layers[0].self_attn
    layer.register_forward_pre_hook(lambda *_: windows.append(model.config.sliding_window))
    policy.compare_layouts(model, torch.device("cpu"))
    assert set(windows) == {4} and model.config.sliding_window == 4096 and policy.share_prompt


def test_the_comparison_leaves_the_engines_own_type(folders):
    """FSDP2 keeps the buffers of the first gather: they must be of the type that later forwards read."""
    policy, _, built = compared(folders["llama"], dtype="bfloat16")
    plain = make_engine(str(folders["llama"]), optim=False, engine={"forward_only": True, "dtype": "bfloat16"})
    ids = torch.arange(5, 25).reshape(2, 10)
    ones = torch.ones_like(ids)
    columns = {"input_ids": ids, "attention_mask": ones, "position_ids": ones.cumsum(-1) - 1, "responses": ids[:, 4:]}
    batch = TensorDict(columns | {"group_index": torch.arange(2)}, batch_size=2)
    outputs = []
    for engine in (built, plain):
        with engine.eval_mode(), torch.no_grad(), engine.autocast():
            outputs.append(policy.log_probs(engine.module, batch, temperature=1.0, with_entropy=False)[0])
            assert isinstance(engine.module, FSDPModule) and engine.module.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(*outputs)



@pytest.mark.parametrize(("spread", "agrees"), [(5.0, True), (0.5, False)])
def test_differences_are_compared_with_the_spread_of_the_values(spread, agrees):
    """Rounding changes the log-probs of Qwen2.5-0.5B by 0.0014 in float32; they spread by 4 to 6, and by 0.3 in small
    random models, where such a difference is a fault."""
    model = model_of("Llama")

    def compute(rows, flat, in_float32):
        values = spread * torch.tensor([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0]).expand(len(rows), -1)
        return values[:, : rows["responses"].shape[1]] + (0.002 if len(rows) > 1 else 0.0)

    difference, limit = layout_difference(model, compute, True, torch.device("cpu"))
    assert (difference <= limit) == agrees
