"""Entry of supervised fine-tuning by the settings of verl's model engine.

    torchrun --standalone --nproc_per_node=N -m verl.trainer.sft_trainer model.path=... engine.strategy=fsdp2 ...

The trainer is that of `verl.trainer.fsdp_sft_trainer`; `verl.config.aliases` has the keys, sft_trainer_engine.yaml the
defaults. Rows are conversations (data.messages_key).
"""

from omegaconf import DictConfig

from verl.config.compose import hydra_main
from verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer as SFTTrainer  # noqa: F401
from verl.trainer.fsdp_sft_trainer import create_sft_dataset, run_sft  # noqa: F401


@hydra_main(config_path="config", config_name="sft_trainer_engine", groups=False)
def main(config: DictConfig) -> None:
    run_sft(config)


if __name__ == "__main__":
    main()
