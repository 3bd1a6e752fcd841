"""A model's fingerprint: every byte of its weights and what of its config shapes a forward, and nothing else."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from recipe.spd.fingerprint import folder_fingerprint, model_fingerprint, model_folder
from spd_scorer import AutoModelForSPDScoring, ScoringModelConfig
from tests.helpers.models import save_tiny_llama

WEIGHTS = "model.safetensors"


def of_folder(folder) -> str | None:
    return folder_fingerprint(folder, AutoConfig.from_pretrained(folder))


def copy(folder, to: Path, **config) -> Path:
    """The model folder again, with other values in its config.json."""
    shutil.copytree(folder, to)
    values = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(values | config))
    return to


def test_a_loaded_model_has_its_folder_s_in_whatever_dtype_and_shards(tiny_llama, tmp_path):
    found = of_folder(tiny_llama)
    for auto_class in (AutoModel, AutoModelForCausalLM):
        for dtype in (torch.float32, torch.bfloat16):
            assert model_fingerprint(auto_class.from_pretrained(tiny_llama, dtype=dtype)) == found
    folder = copy(tiny_llama, tmp_path / "shards")
    (folder / WEIGHTS).unlink()
    weights = load_file(Path(tiny_llama) / WEIGHTS)
    for part in (0, 1):
        shard = {name: weight for i, (name, weight) in enumerate(sorted(weights.items())) if i % 2 == part}
        save_file(shard, folder / f"model-{part}.safetensors", metadata={"format": "pt"})
    assert of_folder(folder) == found


def test_a_model_that_was_never_in_a_folder_has_that_of_the_one_it_is_saved_to(tmp_path):
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(config)
    found = model_fingerprint(model)
    model.save_pretrained(tmp_path)
    assert of_folder(tmp_path) == found


def test_one_bit_of_any_weight_counts(tiny_llama, tmp_path):
    found = of_folder(tiny_llama)
    weights = load_file(Path(tiny_llama) / WEIGHTS)
    assert "lm_head.weight" in weights
    for i, (name, weight) in enumerate(weights.items()):
        folder = copy(tiny_llama, tmp_path / str(i))
        bits = weight.clone().view(torch.int32)
        bits.view(-1)[-2] ^= 1  # the least of the last but one number
        save_file({**weights, name: bits.view(torch.float32)}, folder / WEIGHTS, metadata={"format": "pt"})
        assert of_folder(folder) != found, name


@pytest.mark.parametrize(
    "change, counts",
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, True),
        ({"rms_norm_eps": 1e-5}, True),
        ({"num_key_value_heads": 1}, True),
        ({"architectures": ["Another"], "dtype": "bfloat16", "transformers_version": "4.0.0"}, False),
        ({"_name_or_path": "elsewhere", "use_cache": False, "eos_token_id": 7, "attention_bias": False}, False),
    ],
)
def test_what_of_a_config_counts(tiny_llama, tmp_path, change, counts):
    assert (of_folder(copy(tiny_llama, tmp_path / "other", **change)) != of_folder(tiny_llama)) is counts


def test_an_overridden_config_counts_before_and_after_loading(tiny_llama):
    override = {"rms_norm_eps": 1e-3}
    early = folder_fingerprint(tiny_llama, AutoConfig.from_pretrained(tiny_llama, **override))
    assert early == model_fingerprint(AutoModel.from_pretrained(tiny_llama, **override)) != of_folder(tiny_llama)


def test_weights_changed_in_memory_count(tiny_llama):
    for name in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        model = AutoModelForCausalLM.from_pretrained(tiny_llama)
        with torch.no_grad():
            model.get_parameter(name)[3, 5] += 0.01
        assert model_fingerprint(model) != of_folder(tiny_llama), name


def test_files_of_others_do_not_count_and_pickled_weights_do(tiny_llama, tmp_path):
    folder = copy(tiny_llama, tmp_path / "model")
    save_file({"head": torch.ones(2)}, folder / "score_head.safetensors")
    assert of_folder(folder) == of_folder(tiny_llama)
    (folder / WEIGHTS).unlink()
    (folder / "score_head.safetensors").unlink()
    assert of_folder(folder) is None
    marks = []
    for value in (1.0, 2.0):
        torch.save({"w": torch.tensor([value])}, folder / "pytorch_model.bin")
        marks.append(of_folder(folder))
    assert len({*marks, None}) == 3


def test_the_folder_of_a_name(tiny_llama):
    assert model_folder(tiny_llama) == Path(tiny_llama)
    assert model_folder("") is None and model_folder("nobody/knows-this") is None


@pytest.fixture(scope="module")
def head(tiny_llama, tmp_path_factory):
    """A head for tiny_llama."""
    folder = tmp_path_factory.mktemp("head")
    AutoModelForSPDScoring.from_config(ScoringModelConfig(base_model_path=tiny_llama)).save_pretrained(folder)
    return folder


def test_a_head_is_refused_beside_a_target_that_keeps_a_column_of_each_weight(tiny_llama, head, tmp_path):
    """Samples at a stride of the row's width would see only this column."""
    weights = load_file(Path(tiny_llama) / WEIGHTS)
    for weight in weights.values():
        if weight.ndim == 2:
            weight[:, 1:] = torch.randn(weight[:, 1:].shape, generator=torch.Generator().manual_seed(5))
    folder = copy(tiny_llama, tmp_path / "other")
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"belongs to the target '{tiny_llama}' .*the target here, '{folder}'"):
        AutoModelForSPDScoring.from_pretrained(head, base_model_path=str(folder))


@pytest.mark.parametrize("change", ["lm_head", "rope_theta"])
def test_a_head_is_refused_beside_another_lm_head_or_rope(tiny_llama, head, change):
    target = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert AutoModelForSPDScoring.from_pretrained(head, base_model=target).config.base_fingerprint
    if change == "lm_head":
        torch.nn.init.ones_(target.lm_head.weight)
    else:
        target.config.rope_parameters["rope_theta"] = 1000.0
    with pytest.raises(ValueError, match="belongs to the target .*name that one"):
        AutoModelForSPDScoring.from_pretrained(head, base_model=target)


def test_a_copy_of_a_target_is_the_same_and_another_seed_is_not(tiny_llama, tmp_path):
    paths = (tiny_llama, str(copy(tiny_llama, tmp_path / "same")), save_tiny_llama(tmp_path / "other", seed=1))
    configs = [ScoringModelConfig(base_model_path=path) for path in paths]
    marks = [AutoModelForSPDScoring.from_config(config).config.base_fingerprint for config in configs]
    assert marks[0] == marks[1] != marks[2]
