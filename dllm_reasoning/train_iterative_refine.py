"""Entry: `torchrun --standalone --nproc_per_node=N -m dllm_reasoning.train_iterative_refine key=value ...`."""

from omegaconf import DictConfig

from dllm_reasoning.trainer.iterative_refine_trainer import IterativeRefineTrainer
from verl.config.compose import hydra_main
from verl.trainer.fsdp_sft_trainer import run_sft


@hydra_main(config_path="config", config_name="iterative_refine")
def main(config: DictConfig) -> None:
    run_sft(config, trainer_class=IterativeRefineTrainer)


if __name__ == "__main__":
    main()
