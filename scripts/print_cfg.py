"""Prints a composed config: `python scripts/print_cfg.py [--config-name NAME] key=value ...`; starts nothing."""

import sys

import hydra
from omegaconf import DictConfig, OmegaConf


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    sys.stdout.write(OmegaConf.to_yaml(config, resolve=False))


if __name__ == "__main__":
    main()
