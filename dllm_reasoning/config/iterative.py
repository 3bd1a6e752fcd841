"""Settings of the noise, the rounds and the own answers."""

from dataclasses import dataclass, field

from dllm_reasoning.utils.noise_utils import PATTERNS, SCHEDULES
from verl.base_config import BaseConfig
from verl.config.common import ModuleConfig
from verl.config.fields import setting
from verl.config.sft import SFTConfig, SFTDataConfig, SFTModelConfig, SFTOptimConfig, SFTTrainerConfig


@dataclass
class SelfGenerateConfig(BaseConfig, section="iterative.self_generate"):
    """Training on the starting model's own greedy answers, those kept that a reward function scores above 0."""

    enable: bool = False
    max_prompts: int = setting(-1, low=-1)
    batch_size: int = setting(64, low=1)
    max_new_tokens: int = setting(1024, low=1)
    item_timeout: float = setting(300.0, above=0)
    keep_ground_truth: bool = False
    ground_truth_key: str | None = None
    reward_function: ModuleConfig = field(default_factory=lambda: ModuleConfig(name="compute_score"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable and not self.reward_function["path"]:
            raise ValueError(
                "iterative.self_generate.enable=true needs iterative.self_generate.reward_function.path: the file with "
                "the function that scores an answer; only answers scored above 0 are kept."
            )


@dataclass
class IterativeConfig(BaseConfig, section="iterative"):
    """Noise, rounds and their weights. `block_length` is W, the tokens that one forward of generation predicts."""

    num_iterations: int = setting(2, low=1)
    single_round_steps: int = setting(0, low=0)
    noise_pattern: str = setting("iid", choices=tuple(PATTERNS))
    noise_min: float = setting(0.1, low=0, high=1)
    noise_max: float = setting(0.9, low=0, high=1)
    noise_schedule: str = setting("uniform", choices=tuple(SCHEDULES))
    noise_token: str = "eos"
    noise_seed: int = setting(0, low=0)
    loss_weights: list[float] | None = None
    ar_loss_weight: float = setting(0.0, low=0)
    block_length: int = setting(128, low=1)
    windows_per_sample: int = setting(8, low=1)
    aligned_windows: float = setting(0.0, low=0, high=1)
    trajectory_max_rounds: int = setting(4, low=0)
    share_instruction: str = setting("auto", choices=("auto", "on", "off"))
    self_generate: SelfGenerateConfig = field(default_factory=SelfGenerateConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_min > self.noise_max:
            raise ValueError(
                f"iterative.noise_min={self.noise_min} is above iterative.noise_max={self.noise_max}; exchange them."
            )
        if self.loss_weights is not None and len(self.loss_weights) != self.num_iterations:
            raise ValueError(
                f"iterative.loss_weights={list(self.loss_weights)} has {len(self.loss_weights)} weights, but "
                f"iterative.num_iterations={self.num_iterations}; give one a round, or null for 1 each."
            )

    @property
    def round_weights(self) -> list[float]:
        """Weight of each round's loss."""
        return [1.0] * self.num_iterations if self.loss_weights is None else list(self.loss_weights)


@dataclass
class IterativeDataConfig(SFTDataConfig):
    """Instruction and output; a row that cannot be trained on stops the run, or is skipped (`bad_rows`)."""

    train_files: str | list[str] = "~/data/dllm/train.parquet"
    val_files: str | list[str] | None = None
    train_batch_size: int = setting(32, low=1)
    prompt_key: str = "instruction"
    response_key: str = "output"
    max_length: int = setting(2048, low=2)
    dataloader_num_workers: int = setting(0, low=0)
    use_chat_template: bool = False
    bad_rows: str = setting("stop", choices=("stop", "skip"))


@dataclass
class IterativeModelConfig(SFTModelConfig):
    """Without gradient checkpointing, so that rounds can share the instruction."""

    partial_pretrain: str = "~/models/start"
    enable_gradient_checkpointing: bool = False


@dataclass
class IterativeOptimConfig(SFTOptimConfig):
    """`warmup_steps_ratio` is this recipe's name of lr_warmup_steps_ratio."""

    lr: float = setting(2e-5, low=0)
    warmup_steps_ratio: float = setting(0.1, low=0, high=1)


@dataclass
class IterativeTrainerConfig(SFTTrainerConfig):
    """`save_checkpoint_steps` is this recipe's name of save_freq."""

    default_local_dir: str = "checkpoints/dllm_reasoning/iterative_refine"
    project_name: str = "dllm_reasoning"
    experiment_name: str = "iterative_refine"
    total_epochs: int = setting(3, low=1)
    save_checkpoint_steps: int = setting(1000, low=-1)
    save_freq: int = setting(1000, low=-1)


@dataclass
class IterativeRefineConfig(SFTConfig, section=""):
    """The whole tree of iterative_refine.yaml."""

    data: IterativeDataConfig = field(default_factory=IterativeDataConfig)
    model: IterativeModelConfig = field(default_factory=IterativeModelConfig)
    optim: IterativeOptimConfig = field(default_factory=IterativeOptimConfig)
    iterative: IterativeConfig = field(default_factory=IterativeConfig)
    trainer: IterativeTrainerConfig = field(default_factory=IterativeTrainerConfig)
