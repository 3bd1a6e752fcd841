"""Whether a model computes the same without padding is decided on the loaded model."""

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule

from tests.helpers.engines import make_engine
from tests.helpers.logs import logged
from tests.models.families import model_of
from verl.config.model import PluginConfig
from verl.training.critic.dp_critic import packs_values
from verl.training.policy import get_policy
from verl.training.policy.layout_probe import layout_difference

BY_ATTENTION = ["Llama", "Llama, tied", "Qwen3 MoE", "Gemma 2"]  # layers that mix tokens by attention alone
OTHERWISE = ["LFM2", "Mamba", "Llama 4"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp(name.replace(", ", "_")) for name in (*BY_ATTENTION, *OTHERWISE)}
    for name, folder in made.items():
        model_of(name).save_pretrained(folder)
    return made


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
@pytest.mark.parametrize("name", BY_ATTENTION)
def test_models_that_mix_tokens_by_attention_alone_need_no_padding(folders, name, dtype):
    policy, warned, built = compared(folders[name], dtype=dtype)
    assert policy.remove_padding and policy.share_prompt and not warned
    with built.eval_mode():
        for share in (False, True):
            compute = partial(policy.probe_log_probs, built.module, share)
            difference, limit = layout_difference(built.module, compute, True, built.device)
            assert difference < 1e-5 and limit == 1e-3  # in float32, whatever the engine computes in


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OTHERWISE)
def test_models_that_mix_tokens_otherwise_keep_their_padding_and_say_so(folders, name, dtype):
    policy, warned, built = compared(folders[name], dtype=dtype)
    assert not policy.remove_padding and not policy.share_prompt
    assert len(warned) == 1 and "Batches keep their padding" in warned[0] or "cannot be replaced" in warned[0]
    if "differ" in warned[0]:
        assert type(built.module).__name__.removeprefix("FSDP") in warned[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_value_model_that_mixes_tokens_otherwise_keeps_its_padding(tmp_path, folders, dtype):
    model_of("Qwen3-Next").save_pretrained(tmp_path)
    for folder, packs in ((tmp_path, False), (folders["Llama"], True)):
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
    policy, _, built = compared(folders["Llama"], dtype="bfloat16")
    plain = make_engine(str(folders["Llama"]), optim=False, engine={"forward_only": True, "dtype": "bfloat16"})
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
