"""The chain of commands on a pair shaped like Qwen2.5-7B and 0.5B: blocks, a dry run of the training, the evaluation.

Vocabulary, special tokens and generation_config.json are those of the real models, weights and layers are tiny. Not
covered: the training itself, which test_spd_run.py runs on other models.
"""

import json

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import train_spd_scorer
from examples.spd_arithmetic import prepare_blocks
from recipe.spd.rollout.spd_rollout import server_of
from recipe.spd.settings import SPDRolloutSettings, SPDSettings
from scripts import eval_spd_scorer
from spd_scorer import AutoModelForSPDScoring, ScoringModelConfig

WORDS = 151_643
SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> "
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"
).split()
CHAT = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
GENERATION = {
    "bos_token_id": 151643, "pad_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20,
}  # fmt: skip


def save_tokenizer(directory):
    vocabulary = {f"w{i}": i for i in range(WORDS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.sep_token_id) == (151_665, 151_645, None)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(directory)


def save_qwen(directory, vocabulary, tied, seed):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, tie_word_embeddings=tied, max_position_embeddings=32768, sliding_window=131072,
        use_sliding_window=False, max_window_layers=28, bos_token_id=151643, eos_token_id=151645,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[151_665:] = 0.0  # padding, never the largest of 151,665 random logits
    model.generation_config = GenerationConfig(**GENERATION)
    model.save_pretrained(directory)
    save_tokenizer(directory)


def exit_code(*arguments):
    """That of train_spd_scorer.py, which a dry run gives by ending the process or by returning."""
    try:
        return train_spd_scorer.main(arguments)
    except SystemExit as ended:
        return ended.code


@pytest.mark.process
def test_no_command_refuses_a_qwen_pair_or_asks_a_target_head_for_a_separator(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SPD_SEP_TOKEN_ID", raising=False)
    target, draft, bed = tmp_path / "target", tmp_path / "draft", tmp_path / "bed"
    save_qwen(target, 152_064, tied=False, seed=0)
    save_qwen(draft, 151_936, tied=True, seed=1)
    rows = [{"question": f"w{i} w{i + 7} w3", "answer": f"w5 #### {i}"} for i in range(12)]
    for split, part in (("train", rows[:9]), ("test", rows[9:])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    sizes = {"train-questions": 6, "val-questions": 3, "test-questions": 3, "train-blocks": 8, "val-blocks": 4,
             "harm-blocks": 3}  # fmt: skip
    prepare_blocks.main([
        "--out", str(bed), "--train-questions", str(tmp_path / "train.jsonl"),
        "--test-questions", str(tmp_path / "test.jsonl"), "--target", str(target), "--draft", str(draft),
        "--max-new-tokens", "10", "--gamma", "3", "--processes", "1", "--batch-size", "6",
        *(word for name, count in sizes.items() for word in (f"--n-{name}", str(count))),
    ])  # fmt: skip
    files = [f"--{kind}={bed}/{kind}_train.parquet" for kind in ("blocks", "metadata")]
    options = ["--model", str(target), *files, "--output-dir", str(tmp_path / "run"), "trainer.device=cpu"]
    dry = ["data.train_batch_size=2", "spd.rollout.max_tokens=10", "trainer.dry_run=true", "trainer.logger=[]"]
    assert not exit_code(*options, *dry), capsys.readouterr().err
    assert exit_code(*options, *dry, "spd.backbone=own") == 1
    assert "set SPD_SEP_TOKEN_ID to a token id that never occurs in text" in capsys.readouterr().err

    config = ScoringModelConfig(base_model_path=str(target))
    AutoModelForSPDScoring.from_config(config).save_pretrained(tmp_path / "scorer")
    evaluation = eval_spd_scorer.main([
        "--target", str(target), "--draft", str(draft), "--scorer", str(tmp_path / "scorer"),
        "--questions", str(bed / "questions_test.jsonl"), "--val-questions", str(bed / "questions_val.jsonl"),
        "--harm-labels", str(bed / "harm_labels.jsonl"), "--out", str(tmp_path / "evaluation"),
        "--max-new-tokens", "10", "--gamma", "3", "--all-rules", "--processes", "1", "--scorer-thresholds", "0",
        "--margins", "1", "--divergences", "1",
    ])  # fmt: skip
    assert {row.rule for row in evaluation} >= {"exact", "scorer", "typical", "divergence"}


def test_own_servers_ignore_the_sampling_of_a_generation_config(monkeypatch):
    started = []
    monkeypatch.setattr("recipe.spd.rollout.spd_rollout.LocalVllmServer", lambda *arguments: started.append(arguments))
    rollout = SPDRolloutSettings(server_args=["--seed", "1"], max_tokens=5)
    server_of(SPDSettings(target_path="t", rollout=rollout), 7, 3)
    assert started == [("t", "vllm_server.log", 16, ["--generation-config", "vllm", "--seed", "1"])]
