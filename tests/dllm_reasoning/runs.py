"""A model directory, data files and composed configs for runs of the refinement trainer."""

from pathlib import Path

import pandas as pd
import torch
from omegaconf import OmegaConf

import dllm_reasoning.config
from dllm_reasoning.trainer.iterative_refine_trainer import IterativeRefineTrainer
from tests.dllm_reasoning.models import tiny
from tests.helpers.configs import compose_ppo
from tests.helpers.models import make_tokenizer

WORDS = [*map(str, range(13)), *"abcdefghijklmnopqrstuv", *"+-*=.,?:"]  # 48 tokens with the special ones
CONFIG_DIR = Path(dllm_reasoning.config.__file__).parent


def save_model(directory: Path, architecture: str = "llama", **shape) -> str:
    """A tiny random model with the word-level tokenizer (ids 0 to 4 are pad, bos, eos, sep, unk)."""
    tiny(architecture, **shape).save_pretrained(directory)
    make_tokenizer(WORDS).save_pretrained(directory)
    return str(directory)


def save_rows(file: Path, rows: list[tuple[str, str]]) -> str:
    pd.DataFrame(rows, columns=["instruction", "output"]).to_parquet(file)
    return str(file)


def sums(count: int) -> list[tuple[str, str]]:
    """Instructions and responses of unlike lengths."""
    return [(" ".join(["a"] * (i % 3)) + f" {i % 9} + {i % 4} =", f"{i % 9 + i % 4} ." + " b" * (i % 5))
            for i in range(count)]  # fmt: skip


def small(model, train, folder) -> tuple[str, ...]:
    """Overrides of a small CPU run."""
    return (
        f"model.partial_pretrain={model}", f"data.train_files={train}", f"trainer.default_local_dir={folder}",
        "model.fsdp_config.dtype=float32", "data.max_length=24", "data.train_batch_size=8",
        "data.micro_batch_size_per_gpu=4", "trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.logger=[]",
        "iterative.block_length=4", "iterative.windows_per_sample=3", "optim.lr=1e-2", "trainer.report=false",
    )  # fmt: skip


def compose(model, train, folder, *overrides):
    """The config of such a run, of four steps unless `overrides` say otherwise."""
    given = (*small(model, train, folder), "trainer.total_training_steps=4", *overrides)
    config = compose_ppo(*given, config_dir=CONFIG_DIR, config_name="iterative_refine")
    OmegaConf.resolve(config)
    return config


def trainer(model, train, folder, *overrides, cls=IterativeRefineTrainer):
    """The trainer of such a run."""
    config = compose(model, train, folder, *overrides)
    tokenizer = cls.build_tokenizer(config)
    train = cls.build_dataset(config.data.train_files, config, tokenizer)
    val = cls.build_val_dataset(config.data.val_files, config, tokenizer) if config.data.val_files else None
    return cls(config, None, None, tokenizer, train, val)


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.engine.get_per_tensor_param()}
