"""Which tokens end an answer: one rule for all rollouts."""

import json

import pytest
from transformers import GenerationConfig

from tests.helpers.models import make_tokenizer, save_tiny_llama
from verl.utils.tokenizer import hf_tokenizer, stop_ids
from verl.workers.config import HFModelConfig

EOS, SEP, UNK = 2, 3, 4


@pytest.fixture
def model(tmp_path):
    path = save_tiny_llama(tmp_path / "model")
    GenerationConfig(eos_token_id=[UNK, EOS, SEP], pad_token_id=0).save_pretrained(path)
    return path


def test_the_union_of_tokenizer_and_generation_config_begins_with_the_eos_token(model):
    assert stop_ids(make_tokenizer(), model) == stop_ids(hf_tokenizer(model)) == [EOS, UNK, SEP]
    assert HFModelConfig(path=model).load().generation_config.eos_token_id == [UNK, EOS, SEP]


def test_given_ids_replace_the_union(model):
    assert stop_ids(make_tokenizer(), model, [SEP]) == [SEP] and stop_ids(make_tokenizer(), model, []) == []


def test_without_a_generation_config_the_ids_of_the_config_count(tmp_path):
    for name, config in (("plain", {"eos_token_id": SEP}), ("nested", {"text_config": {"eos_token_id": [SEP, UNK]}})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    assert stop_ids(make_tokenizer(), str(tmp_path / "plain")) == [EOS, SEP]
    assert stop_ids(make_tokenizer(), str(tmp_path / "nested")) == [EOS, SEP, UNK]


def test_a_tokenizer_without_a_model_has_its_own_eos_token_only(tmp_path):
    tokenizer = make_tokenizer()
    assert stop_ids(tokenizer) == [EOS]
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert stop_ids(hf_tokenizer(str(tmp_path / "tokenizer"))) == [EOS]
    tokenizer.eos_token = None
    assert stop_ids(tokenizer) == []
