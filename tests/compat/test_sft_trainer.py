"""`verl.trainer.sft_trainer` takes the keys of verl's model engine and trains with the SFT trainer."""

import json
import random

import pytest

from verl.config.aliases import with_current_names
from verl.config.compose import forced_override, to_settings
from verl.config.sft import SFTConfig, SFTDataConfig, SFTTrainerConfig
from verl.config.sft_engine import steps_of_epochs, tokens_per_forward
from verl.trainer import sft_trainer
from verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer


def write_conversations(folder, rows=12):
    draw = random.Random(0)
    lines = []
    for i in range(rows):
        answer = " ".join(str(draw.randrange(20)) for _ in range(1 + i % 5))
        messages = [{"role": "user", "content": f"{i} + 1 ="}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text("".join(lines))
    return folder / "train.jsonl"


def composed(folder, model, *words):
    from hydra import compose, initialize_config_module

    file = write_conversations(folder)
    words = [
        f"data.train_files={file}", f"data.val_files={file}", "data.messages_key=messages", "data.train_batch_size=4",
        "data.max_length=24", "data.max_token_len_per_gpu=48", "data.use_dynamic_bsz=True", "data.pad_mode=no_padding",
        "data.num_workers=0", f"model.path={model}", "model.use_remove_padding=True",
        "model.enable_gradient_checkpointing=False", "engine=fsdp", "engine.strategy=fsdp2", "engine.dtype=float32",
        "engine.ulysses_sequence_parallel_size=1", "optim=fsdp", "optim.lr=1e-2", "optim.lr_warmup_steps_ratio=0.2",
        "optim.min_lr_ratio=0.1", "optim.lr_scheduler_type=cosine", "optim.clip_grad=1.0",
        "checkpoint.save_contents=[model,optimizer,extra]", "trainer.device=cpu", "trainer.logger=[]",
        "trainer.report=False", "trainer.total_epochs=2", "trainer.test_freq=after_each_epoch",
        "trainer.save_freq=after_each_epoch", f"trainer.default_local_dir={folder / 'out'}", *words,
    ]  # fmt: skip
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("sft_trainer_engine", [forced_override(word, groups=False) for word in words])
    return with_current_names(config)


@pytest.mark.process
def test_it_trains_on_conversations(tmp_path, tiny_llama, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    config = composed(tmp_path / "run", tiny_llama)
    sft_trainer.run_sft(config)
    rows = [json.loads(line) for line in (tmp_path / "run" / "out" / "metrics.jsonl").read_text().splitlines()]
    data = {row["step"]: row["data"] for row in rows}
    assert [step for step in data if "val/loss" in data[step]] == [0, 3, 6]  # before, and after each of two epochs
    assert data[6]["val/loss"] < data[0]["val/loss"]
    assert data[6]["train/lr"] == pytest.approx(1e-2 * (0.1 + 0.9 * 0.5 * (1 - 0.8090169)), rel=0.2)
    assert all((tmp_path / "run" / "out" / f"global_step_{step}").is_dir() for step in (3, 6))


def test_its_defaults_are_those_of_the_model_engine(tmp_path, tiny_llama):
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("sft_trainer_engine", ["model.partial_pretrain=m"])
    settings = to_settings(config, SFTConfig)
    assert settings.data.packing and settings.data.multiturn.enable and settings.data.max_token_len_per_gpu == 8192
    assert settings.optim.lr == 1e-3 and settings.optim.lr_scheduler == "constant" and settings.data.val_files is None
    assert sft_trainer.SFTTrainer is FSDPSFTTrainer


def test_a_packed_forward_holds_as_many_tokens_as_it_may():
    data = SFTDataConfig(packing=True, max_length=24, max_token_len_per_gpu=48)
    assert tokens_per_forward(data, 4) == 48
    assert tokens_per_forward(SFTDataConfig(packing=True, max_length=24), 4) == 96
    with pytest.raises(ValueError, match="max_token_len_per_gpu=20"):
        SFTDataConfig(packing=True, max_length=24, max_token_len_per_gpu=20)


def test_frequencies_may_count_epochs():
    trainer = SFTTrainerConfig(test_freq="after_each_epoch", save_freq=5)
    assert steps_of_epochs(trainer, 7) == {"test_freq": 7}
    for wrong in ("each_epoch", -2):
        with pytest.raises(ValueError, match="test_freq"):
            SFTTrainerConfig(test_freq=wrong)
