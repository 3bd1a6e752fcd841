"""The model that is refined: SmolLM2-135M-Instruct after supervised fine-tuning, and its own answers to train on."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.demo_runner import python
from examples.pretrained.dllm import tasks
from examples.pretrained.stages import Stage
from verl.utils.accelerator import default_dtype, get_device_name

COUNTS = {"train": 1600, "val": 150, "test": 240}  # questions; `val` and `test` of COUNTS are not trained on
STEPS, BATCH, LR = 147, 16, 2e-4
ANSWERED = 800  # training questions that the fine-tuned model answers
SEED = 0


def sft_command(model: Path, data: Path, folder: Path, steps: int, batch: int, lr: float, seed: int) -> list[str]:
    """Supervised fine-tuning of all weights on DATA.train.jsonl, validated on DATA.val.jsonl."""
    device = get_device_name()
    settings = {
        "data.train_files": f"{data}.train.jsonl", "data.val_files": f"{data}.val.jsonl", "data.max_length": 512,
        "data.multiturn.enable": "true", "data.train_batch_size": batch, "data.micro_batch_size_per_gpu": batch // 2,
        "data.packing": "true", "data.dataloader_num_workers": 0, "model.partial_pretrain": model,
        "model.enable_gradient_checkpointing": "false", "model.fsdp_config.dtype": default_dtype(device),
        "optim.lr": lr, "optim.weight_decay": 0.0, "trainer.device": device, "trainer.n_gpus_per_node": 1,
        "trainer.total_epochs": 1000, "trainer.total_training_steps": steps, "trainer.test_freq": max(1, steps // 4),
        "trainer.save_freq": max(1, steps // 6), "trainer.max_ckpt_to_keep": 1, "trainer.seed": seed + 1,
        "trainer.default_local_dir": folder, "trainer.logger": "[tensorboard]", "trainer.project_name": "pretrained",
        "trainer.experiment_name": folder.name, "trainer.checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
    }  # fmt: skip
    return python("verl.trainer.fsdp_sft_trainer", *(f"{key}={value}" for key, value in settings.items()))


def write_conversations(rows: Sequence[Mapping[str, Any]], data: Path, held_out: int = 24) -> None:
    """DATA.train.jsonl and DATA.val.jsonl from rows with question and answer; the last ones validate."""
    for split, kept in (("train", rows[:-held_out]), ("val", rows[-held_out:])):
        lines = ({"messages": [*tasks.messages(row["question"]), {"role": "assistant", "content": row["answer"]}]}
                 for row in kept)  # fmt: skip
        Path(f"{data}.{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_given_answers(data: Path, counts: dict[str, int], gsm8k: Path | None = None) -> None:
    """DATA.SPLIT.jsonl: the answers that come with the training questions."""
    asked = tasks.draw(counts, seed=SEED, gsm8k=gsm8k)["train"]
    write_conversations([{"question": a.question, "answer": a.worked} for a in asked], data)


def limit_of(gsm8k: Path | None) -> int:
    """Tokens of an answer."""
    return tasks.LIMIT if gsm8k is None else tasks.LIMIT_GSM8K


def tuned(out: Path) -> Path:
    """The folder of the fine-tuned model."""
    return out / "target_run" / f"global_step_{STEPS}" / "huggingface"


def target_stages(model: Path, out: Path, gsm8k: Path | None = None) -> list[Stage]:
    """Fine-tuning of the model, and the fine-tuned model's answers to training questions."""
    counts, options = json.dumps(COUNTS), []
    if gsm8k is not None:
        options = ["--gsm8k", gsm8k, "--max-new-tokens", limit_of(gsm8k)]
    trained = Stage(
        "target", sft_command(model, out / "target", out / "target_run", STEPS, BATCH, LR, SEED), out / "target_run",
        (), lambda: write_given_answers(out / "target", COUNTS, gsm8k), f"{counts} {gsm8k}",
        (out / "target_run", STEPS),
    )  # fmt: skip
    answers = Stage("answers_train", python(
        "examples.pretrained.dllm.answers", "--model", tuned(out), "--counts", counts, "--split", "train", "--seed",
        SEED, "--limit", ANSWERED, "--out", out / "answers_train.jsonl", *options,
    ), out / "answers_train.jsonl", (trained,))  # fmt: skip
    return [trained, answers]
