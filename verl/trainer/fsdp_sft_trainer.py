"""Entry of supervised fine-tuning: `torchrun --standalone --nproc_per_node=N -m verl.trainer.fsdp_sft_trainer k=v`."""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from loguru import logger
from omegaconf import DictConfig

from verl.config.aliases import current_names_or_exit
from verl.config.compose import hydra_main
from verl.config.sft import SFTConfig
from verl.planning.sft import refuse_bad_rows, sft_entry
from verl.trainer.run.failure import failure_message
from verl.trainer.sft.data import create_sft_dataset
from verl.trainer.sft.trainer import FSDPSFTTrainer
from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group
from verl.utils.supervisor import end_with_parent

__all__ = ["FSDPSFTTrainer", "create_sft_dataset", "extract_step", "main", "run_sft"]


def extract_step(path: str) -> int | None:
    """N of a path with `global_step_N`; None where there is none."""
    match = re.search(r"global_step_(\d+)", path)
    return int(match.group(1)) if match else None


def run_sft(config: DictConfig, trainer_class: type[FSDPSFTTrainer] = FSDPSFTTrainer) -> None:
    """Check the config, then train on the ranks of this torchrun job (without torchrun: on this process alone).

    Exits with code 0 (done), 130 or 143 (stopped by Ctrl-C or SIGTERM, after a finished step or, by a second signal, at
    once), or 1 with an error message. `trainer_class`: a subclass of FSDPSFTTrainer.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    config = current_names_or_exit(config)
    if config.trainer.dry_run:
        sys.exit(sft_entry(trainer_class).dry_run(config) if is_first else 0)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    if not is_first:
        logger.remove()
        logger.add(sys.stderr, level="WARNING")
    try:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        settings = sft_entry(trainer_class, ranks).refuse_problems(config, warn=is_first)
        tokenizer = trainer_class.build_tokenizer(settings)
        train_dataset = _dataset(settings, trainer_class, tokenizer, "train", is_first)
        val_dataset = _dataset(settings, trainer_class, tokenizer, "val", is_first)
    except (ValueError, OSError) as e:  # as a rule every rank has the same one
        _fail(str(e), shown=is_first)
    try:
        if "RANK" in os.environ:
            initialize_global_process_group()
        code = trainer_class(settings, None, None, tokenizer, train_dataset, val_dataset).fit()
        destroy_global_process_group()
    except Exception as e:
        _fail(failure_message(e, settings))
    if code and "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun reports the signal itself
        sys.exit(code)


def _fail(message: str, shown: bool = True) -> NoReturn:
    """Exit with code 1 and the message; torchrun repeats it in its report, after its own traceback."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
    sys.exit(message if shown else 1)


def _dataset(config: SFTConfig, trainer_class: type[FSDPSFTTrainer], tokenizer: Any, split: str, warn: bool) -> Any:
    """The data set of a split, its first rows tried; None without validation files."""
    files = config.data[f"{split}_files"]
    if not files:
        return None
    build = trainer_class.build_dataset if split == "train" else trainer_class.build_val_dataset
    dataset = build(files, config, tokenizer, config.data[f"{split}_max_samples"])
    refuse_bad_rows(dataset, f"data.{split}_files", warn)
    return dataset


@hydra_main(config_path="config", config_name="sft_trainer", groups=False)
def main(config: DictConfig) -> None:
    run_sft(config)


if __name__ == "__main__":
    main()
