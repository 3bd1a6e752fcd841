"""RayDAPOTrainer, which the trainer of `verl.trainer.main_ppo` with algorithm.filter_groups.enable=true is too."""

from verl.trainer.ppo.dapo_trainer import RayDAPOTrainer

__all__ = ["RayDAPOTrainer"]
