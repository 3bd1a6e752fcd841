"""Small SFT runs for tests: composed config, data files, a trainer in this process."""

import json
import random
from pathlib import Path

from omegaconf import DictConfig

from tests.helpers.configs import compose_ppo
from tests.helpers.rl_run import merged, metrics_rows

TREE = "sft_trainer"
#: A run on the CPU in float32.
RUN = """
data.train_batch_size=8 data.micro_batch_size_per_gpu=4 data.max_length=24 data.dataloader_num_workers=0
model.fsdp_config.dtype=float32 model.enable_gradient_checkpointing=false optim.lr=1e-2 trainer.device=cpu
trainer.n_gpus_per_node=1 trainer.logger=[] trainer.report=false trainer.total_epochs=2
"""


def write_pairs(directory: Path, rows: int = 24, seed: int = 0) -> Path:
    """train.jsonl and val.jsonl of questions and answers of 1 to 7 words; the folder."""
    directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    pairs = [
        {"question": f"{i % 20} + {3 * i % 20} =", "answer": " ".join(str(draw.randrange(20)) for _ in range(n))}
        for i, n in enumerate(1 + i % 7 for i in range(rows))
    ]
    for name, kept in (("train", pairs), ("val", pairs[:5])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in kept))
    return directory


def overrides(directory: Path, model: str, **more) -> list[str]:
    """Overrides of RUN in a folder; `more` has dots written as two underscores."""
    files = {f"data.{name}_files": directory / f"{name}.jsonl" for name in ("train", "val")}
    places = {"model.partial_pretrain": model, "trainer.default_local_dir": directory / "out"}
    return merged(RUN, files | places, more)


def compose_sft(directory: Path, model: str, **more) -> DictConfig:
    """The config of such a run."""
    return compose_ppo(*overrides(directory, model, **more), config_name=TREE)


def make_trainer(directory: Path, model: str, **more):
    """An FSDPSFTTrainer as the entry builds it."""
    from verl.trainer.sft.trainer import FSDPSFTTrainer

    config = compose_sft(directory, model, **more)
    tokenizer = FSDPSFTTrainer.build_tokenizer(config)
    train, val = (
        FSDPSFTTrainer.build_dataset(config.data[f"{split}_files"], config, tokenizer, -1) for split in ("train", "val")
    )
    return FSDPSFTTrainer(config, None, None, tokenizer, train, val)


def metric_rows(directory: Path) -> list[dict]:
    """metrics.jsonl without what differs between machines and moments."""
    return metrics_rows(directory, moment=("train/time", "perf/"))
