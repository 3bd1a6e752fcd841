"""Compatibility with verl: entry of supervised fine-tuning under the names of verl's model engine.

    torchrun --standalone --nproc_per_node=N -m verl.trainer.sft_trainer model.path=... engine.strategy=fsdp2 ...

The trainer is that of `verl.trainer.fsdp_sft_trainer`; `verl.config.aliases` has the keys, sft_trainer_engine.yaml the
defaults. Rows are conversations (data.messages_key).
"""

from omegaconf import DictConfig

from verl.config.compose import hydra_main
from verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer, create_sft_dataset, run_sft

__all__ = ["SFTTrainer", "create_sft_dataset", "main", "run_sft"]

SFTTrainer = FSDPSFTTrainer


@hydra_main(config_path="pkg://verl.trainer.config", config_name="sft_trainer_engine", groups=False)
def main(config: DictConfig) -> None:
    run_sft(config)


if __name__ == "__main__":
    main()
