"""Entry of DAPO training: `python -m recipe.dapo.main_dapo key=value ...`.

That of `verl.trainer.main_ppo` with other defaults; algorithm.filter_groups.enable=true chooses RayDAPOTrainer in both.
"""

from omegaconf import DictConfig

from verl.config.compose import hydra_main
from verl.trainer.main_ppo import run_ppo


@hydra_main(config_path="config", config_name="dapo_trainer")
def main(config: DictConfig) -> None:
    run_ppo(config)


if __name__ == "__main__":
    main()
