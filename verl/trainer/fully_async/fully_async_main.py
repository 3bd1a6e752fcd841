"""Entry of asynchronous training: `python -m recipe.fully_async_policy.fully_async_main key=value ...`."""

from omegaconf import DictConfig

from verl.config.compose import hydra_main
from verl.trainer.main_ppo import run_ppo


@hydra_main(config_path="pkg://verl.trainer.config", config_name="fully_async_ppo_trainer")
def main(config: DictConfig) -> None:
    run_ppo(config)


if __name__ == "__main__":
    main()
