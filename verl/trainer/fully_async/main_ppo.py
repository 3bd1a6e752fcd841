"""Entry of training one step off the policy: `python -m recipe.one_step_off_policy.main_ppo key=value ...`."""

from omegaconf import DictConfig

from verl.config.compose import hydra_main
from verl.trainer.main_ppo import run_ppo


@hydra_main(config_path="pkg://verl.trainer.config", config_name="one_step_off_ppo_trainer")
def main(config: DictConfig) -> None:
    run_ppo(config)


if __name__ == "__main__":
    main()
