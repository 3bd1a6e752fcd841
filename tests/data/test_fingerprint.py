"""Fingerprints of models: all weight bytes and the config entries that affect a forward, and nothing else."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.helpers.models import save_tiny_llama
from verl.data.fingerprint import folder_fingerprint, model_dir_fingerprint, model_fingerprint
from verl.utils.weight_files import WeightFileError

WEIGHTS = "model.safetensors"


def of_folder(folder) -> str | None:
    return folder_fingerprint(folder, AutoConfig.from_pretrained(folder))


def copy(folder, to: Path, **config) -> Path:
    """The model folder again, with other values in its config.json."""
    shutil.copytree(folder, to)
    values = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(values | config))
    return to


def test_a_loaded_model_has_the_fingerprint_of_its_folder_in_any_dtype_and_sharding(tiny_llama, tmp_path):
    expected = of_folder(tiny_llama)
    for auto_class in (AutoModel, AutoModelForCausalLM):
        for dtype in (torch.float32, torch.bfloat16):
            assert model_fingerprint(auto_class.from_pretrained(tiny_llama, dtype=dtype)) == expected
    folder = copy(tiny_llama, tmp_path / "shards")
    (folder / WEIGHTS).unlink()
    weights = load_file(Path(tiny_llama) / WEIGHTS)
    for part in (0, 1):
        shard = {name: weight for i, (name, weight) in enumerate(sorted(weights.items())) if i % 2 == part}
        save_file(shard, folder / f"model-{part}.safetensors", metadata={"format": "pt"})
    assert of_folder(folder) == expected


def test_an_unsaved_model_has_the_fingerprint_of_the_folder_it_is_saved_to(tmp_path):
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(config)
    expected = model_fingerprint(model)
    model.save_pretrained(tmp_path)
    assert of_folder(tmp_path) == expected


def test_one_bit_of_any_weight_changes_the_fingerprint(tiny_llama, tmp_path):
    expected = of_folder(tiny_llama)
    weights = load_file(Path(tiny_llama) / WEIGHTS)
    assert "lm_head.weight" in weights
    for i, (name, weight) in enumerate(weights.items()):
        folder = copy(tiny_llama, tmp_path / str(i))
        bits = weight.clone().view(torch.int32)
        bits.view(-1)[-2] ^= 1  # the least of the last but one number
        save_file({**weights, name: bits.view(torch.float32)}, folder / WEIGHTS, metadata={"format": "pt"})
        assert of_folder(folder) != expected, name


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
def test_only_config_entries_that_affect_a_forward_change_the_fingerprint(tiny_llama, tmp_path, change, counts):
    assert (of_folder(copy(tiny_llama, tmp_path / "other", **change)) != of_folder(tiny_llama)) is counts


def test_an_overridden_config_changes_the_fingerprint_before_and_after_loading(tiny_llama):
    override = {"rms_norm_eps": 1e-3}
    early = folder_fingerprint(tiny_llama, AutoConfig.from_pretrained(tiny_llama, **override))
    assert early == model_fingerprint(AutoModel.from_pretrained(tiny_llama, **override)) != of_folder(tiny_llama)


def test_other_safetensors_files_are_ignored_and_pickled_weights_are_hashed(tiny_llama, tmp_path):
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


def test_model_dir_fingerprint_changes_with_the_weights(tiny_llama, tmp_path):
    assert model_dir_fingerprint(tiny_llama) == model_dir_fingerprint(save_tiny_llama(tmp_path / "same"))
    assert model_dir_fingerprint(tiny_llama) != model_dir_fingerprint(save_tiny_llama(tmp_path / "other", seed=1))
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightFileError, match="no weight file"):
        model_dir_fingerprint(tmp_path / "empty")
