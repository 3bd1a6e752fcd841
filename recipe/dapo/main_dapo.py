"""Entry of DAPO training: `python -m recipe.dapo.main_dapo key=value ...`."""

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig

from verl.config.compose import hydra_main
from verl.trainer.main_ppo import TaskRunner, run_ppo


@hydra_main(config_path="config", config_name="dapo_trainer")
def main(config: DictConfig) -> None:
    run_ppo(config, task_runner_class=DAPOTaskRunner)


class DAPOTaskRunner(TaskRunner):
    """TaskRunner with RayDAPOTrainer."""

    def make_trainer(self, config: Any, stop_flag: Callable[[], bool] | None = None) -> Any:
        from recipe.dapo.dapo_ray_trainer import RayDAPOTrainer

        return self.build(RayDAPOTrainer, config, stop_flag)


if __name__ == "__main__":
    main()
