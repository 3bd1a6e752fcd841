"""Compatibility with verl: `verl.trainer.main_ppo` under the path of verl 0.9's first trainer."""

from typing import Any

from verl.trainer.main_ppo import TaskRunner, main, run_ppo  # noqa: F401


class BaseTaskRunner(TaskRunner):
    """TaskRunner with the methods that verl 0.9 calls for pools of reward and teacher models."""

    add_reward_model_resource_pool = TaskRunner.add_reward_model_worker

    def add_teacher_model_resource_pool(self, config: Any) -> None:
        """Nothing: a teacher is the reference policy (algorithm.adv_estimator=opd)."""


if __name__ == "__main__":
    main()
