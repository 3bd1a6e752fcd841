"""Supervised fine-tuning: a step on packed rows, against the same step on padded ones."""

import tempfile
from pathlib import Path

import torch
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Row, alternate, ratios, row, say
from verl.data.sft_dataset import pad_sample
from verl.trainer.sft.trainer import FSDPSFTTrainer

SAMPLES, LENGTH, MICRO, VOCABULARY = 32, 512, 4, 1024
REPETITIONS = 5


class Samples(Dataset):
    """Lengths as chat data has them (log-normal, median 120, cut at 512); the last two thirds are learned."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.empty(SAMPLES).log_normal_(4.8, 0.7, generator=generator).long().clamp(8, LENGTH).tolist()
        self.rows = []
        for n in lengths:
            ids = torch.randint(5, VOCABULARY, (n,), generator=generator).tolist()
            self.rows.append(pad_sample(ids, [int(i >= n // 3) for i in range(n)], LENGTH, 0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        return self.rows[item]


def make_model(folder: Path) -> str:
    """4 layers of width 256, random."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=LENGTH,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(str(folder))
    return str(folder)


def make_trainer(folder: Path, packing: bool) -> FSDPSFTTrainer:
    """The trainer on this process alone, in float32; a learning rate of 0 keeps every step the same."""
    settings = {
        "model.partial_pretrain": folder / "model", "model.fsdp_config.dtype": "float32", "data.packing": packing,
        "data.train_files": folder / "none", "data.train_batch_size": SAMPLES, "data.max_length": LENGTH,
        "data.micro_batch_size_per_gpu": MICRO, "data.dataloader_num_workers": 0, "optim.lr": 0,
        "model.enable_gradient_checkpointing": False, "trainer.device": "cpu", "trainer.total_epochs": 1,
        "trainer.default_local_dir": folder / f"packing_{packing}",
    }  # fmt: skip
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("sft_trainer", overrides=[f"{key}={value}" for key, value in settings.items()])
    return FSDPSFTTrainer(config, None, None, None, Samples())


def run() -> list[Row]:
    """Seconds of a full step (forward, backward, optimizer) both ways, in turn."""
    say(__doc__)
    samples = Samples()
    batch = TensorDict({k: torch.stack([s[k] for s in samples.rows]) for k in samples[0]}, batch_size=SAMPLES)
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        ways = {"padded": make_trainer(folder, False), "packed": make_trainer(folder, True)}

        def step(way: str) -> None:
            losses[way] = ways[way].training_step(batch)["train/loss"]

        seconds = alternate({way: lambda way=way: step(way) for way in ways}, REPETITIONS)
    tokens = int(batch["attention_mask"].sum())
    return [
        row("sft_packing_speedup", ratios(seconds["padded"], seconds["packed"]), "times, padded / packed"),
        row("sft_packing_loss_difference", [abs(losses["padded"] - losses["packed"])], "absolute"),
        row("sft_step_packed", seconds["packed"], "s"),
        row("sft_tokens_per_second", [tokens / s for s in seconds["packed"]], "tokens/s, packed"),
        row("sft_padding", [1 - tokens / (SAMPLES * LENGTH)], "share of rows of full length"),
    ]
