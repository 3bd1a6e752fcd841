"""Model loading by registry, and the small helpers around it."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, ViTConfig

from verl.utils import model as m
from verl.utils.fs import verify_copy
from verl.workers.config import HFModelConfig


def test_the_auto_loader_gives_the_weights_of_the_directory(tiny_llama):
    model = m.create_huggingface_actor(tiny_llama, override_config_kwargs={"attention_dropout": 0.25})
    reference = LlamaForCausalLM.from_pretrained(tiny_llama)
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight)
    assert model.config.attention_dropout == 0.25 and model.dtype == torch.float32
    both = {"dtype": torch.float32, "torch_dtype": torch.bfloat16}
    assert m.create_huggingface_actor(tiny_llama, automodel_kwargs=both).dtype == torch.bfloat16
    config = HFModelConfig(path=tiny_llama, load_tokenizer=False)
    assert m.get_model_loader("auto")(config, torch.bfloat16).dtype == torch.bfloat16


def test_config_and_weights_may_lie_in_other_folders(tiny_llama, tmp_path):
    own = LlamaConfig.from_pretrained(tiny_llama)
    own.rope_parameters = {**own.rope_parameters, "rope_theta": 123.0}
    own.save_pretrained(tmp_path / "config")
    settings = {"hf_config_path": str(tmp_path / "config"), "use_shm": True, "load_tokenizer": False}
    config = HFModelConfig(path=tiny_llama, **settings).load()
    copied = Path(config.local_path)
    try:
        assert copied.is_relative_to("/dev/shm") and verify_copy(tiny_llama, config.local_path)
        model = m.get_model_loader("auto")(config, torch.float32)
    finally:
        shutil.rmtree(copied.parent)
    assert model.config.rope_parameters["rope_theta"] == config.hf_config.rope_parameters["rope_theta"] == 123.0
    assert torch.equal(model.lm_head.weight, LlamaForCausalLM.from_pretrained(tiny_llama).lm_head.weight)


def test_a_loader_of_ones_own_is_used_by_name(tiny_llama):
    @m.register_model_loader("for_this_test")
    def load(model_config, torch_dtype, size=1):
        return torch.nn.Linear(size, size, dtype=torch_dtype)

    made = m.create_huggingface_actor(tiny_llama, loader="for_this_test", automodel_kwargs={"size": 3})
    assert made.weight.shape == (3, 3)
    with pytest.raises(ValueError, match="did you mean 'auto'"):
        m.get_model_loader("autos")


def test_a_critic_has_one_value_a_token(tiny_llama):
    logits = m.create_huggingface_critic(tiny_llama)(input_ids=torch.arange(5, 11).reshape(2, 3)).logits
    assert logits.shape == (2, 3, 1)


def test_positions_count_attended_tokens():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert m.compute_position_id_with_mask(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]


def test_nested_overrides_and_size():
    config = GPT2Config(n_embd=8)
    m.update_model_config(config, {"n_layer": 3})
    assert config.n_layer == 3
    assert m.get_model_size(torch.nn.Linear(10, 100, bias=False)) == (1.0, "K")
    assert m.get_model_size(torch.nn.Linear(10, 100, bias=False), "M") == (0.001, "M")
    with pytest.raises(ValueError, match="scale='G'"):
        m.get_model_size(torch.nn.Linear(1, 1), "G")


def test_a_model_of_another_kind_is_refused_with_what_helps(tiny_llama):
    with pytest.raises(ValueError, match="model_type 'vit' .* Name another model, or in RL a loader"):
        m.get_hf_auto_model_class(ViTConfig())
    assert m.get_hf_auto_model_class(LlamaConfig()).__name__ == "AutoModelForCausalLM"


def test_the_rank_of_an_adapter_is_read_and_its_absence_named(tiny_llama, tmp_path):
    get_peft_model(LlamaForCausalLM.from_pretrained(tiny_llama), LoraConfig(r=5)).save_pretrained(tmp_path)
    assert m.get_lora_rank_from_adapter(tmp_path) == 5
    with pytest.raises(FileNotFoundError, match="adapter_config.json"):
        m.get_lora_rank_from_adapter(tmp_path / "elsewhere")
    for text, wrong in (("{}", "has no rank 'r'"), ("[5]", "has no rank 'r'"), ('{"r": "x"}', "has no rank 'r'"),
                        ('{"r": 5', "is no JSON")):  # fmt: skip
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match=f"adapter_config.json {wrong}"):
            m.get_lora_rank_from_adapter(tmp_path)


def test_a_dtype_that_does_not_exist_is_named_with_its_key():
    assert m.torch_dtype_of("bf16", "dtype") == torch.bfloat16
    with pytest.raises(ValueError, match="fsdp_config.dtype='bf61'"):
        m.torch_dtype_of("bf61", "fsdp_config.dtype")
