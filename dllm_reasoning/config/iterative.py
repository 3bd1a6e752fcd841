"""Settings of iterative_refine training: SFT that teaches a model to undo noise in a response, in several rounds."""

from dataclasses import dataclass

from dllm_reasoning.utils.noise_utils import PATTERNS, SCHEDULES
from verl.config.actor import AuxiliaryLossConfig
from verl.config.base import BaseConfig
from verl.config.common import ModuleConfig
from verl.config.fields import setting
from verl.config.sft import (
    SFTConfig,
    SFTDataConfig,
    SFTModelConfig,
    SFTMultiturnConfig,
    SFTOptimConfig,
    SFTTrainerConfig,
)


@dataclass
class SelfGenerateConfig(BaseConfig, section="iterative.self_generate"):
    """Training on the starting model's own greedy answers, of which those are kept that a reward scores above 0."""

    enable: bool = setting(False, "Generate answers before training.")
    max_prompts: int = setting(-1, "Instructions of data.train_files to answer, from the first; -1 for all.", low=-1)
    batch_size: int = setting(64, "Answers generated at a time.", low=1)
    max_new_tokens: int = setting(1024, "Maximum tokens of an answer, limited by data.max_length too.", low=1)
    item_timeout: float = setting(300.0, "Seconds of the reward per answer; slower ones are dropped.", above=0)
    keep_ground_truth: bool = setting(False, "Also train on the rows of data.train_files.")
    ground_truth_key: str | None = setting(None, "Column the reward function compares with; null for the response.")
    reward_function: ModuleConfig = setting(
        lambda: ModuleConfig(name="compute_score"),
        "Reward function in the RL signature; answers scored above 0 are kept.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable and not self.reward_function["path"]:
            raise ValueError(
                "iterative.self_generate.enable=true needs iterative.self_generate.reward_function.path: the file with "
                "the function that scores an answer; only answers scored above 0 are kept."
            )


@dataclass
class IterativeConfig(BaseConfig, section="iterative"):
    """Noise on the responses, and the rounds that learn to undo it.

    A round is one forward that predicts the noised tokens; the next one begins with its prediction. Patterns in
    parentheses: only these read the setting. `block_length` is W, the tokens that one forward of generation predicts.
    """

    num_iterations: int = setting(2, "K, the number of refinement rounds; 1 without noise is plain SFT.", low=1)
    single_round_steps: int = setting(0, "Steps at the start that train the first round only.", low=0)
    noise_pattern: str = setting(
        "iid",
        "Where noise is: single tokens (iid), all from a position on (suffix), a block (block), a block after rounds "
        "that are not trained (trajectory), or windows beside the clean text (packed).",
        choices=tuple(PATTERNS),
    )
    noise_min: float = setting(0.1, "Minimum share of noised response tokens (iid).", low=0, high=1)
    noise_max: float = setting(0.9, "Maximum share of noised response tokens (iid).", low=0, high=1)
    noise_schedule: str = setting(
        "uniform",
        "Share of noise in a sample: drawn from noise_min to noise_max (uniform), or rising over the run.",
        choices=tuple(SCHEDULES),
    )
    noise_token: str = setting("eos", "Noise token: eos, mask, or a token of the vocabulary.")
    noise_seed: int = setting(0, "Seed of the noise, which is drawn apart from other random numbers.", low=0)
    loss_weights: list[float] | None = setting(None, "Weight of each round's loss; null for 1 each.")
    ar_loss_weight: float = setting(0.0, "Weight of the next-token loss on the clean text.", low=0)
    block_length: int = setting(128, "W: tokens of a noised block, a window and a block in generation.", low=1)
    windows_per_sample: int = setting(8, "Windows per sample (packed).", low=1)
    aligned_windows: float = setting(
        0.0, "Share of windows that start at multiples of block_length (packed).", low=0, high=1
    )
    trajectory_max_rounds: int = setting(
        4, "Untrained rounds before the first trained one: drawn each step from 0 to this (trajectory).", low=0
    )
    share_instruction: str = setting(
        "auto",
        "Rounds share the instruction's keys and values; auto where that is faster.",
        choices=("auto", "on", "off"),
    )
    self_generate: SelfGenerateConfig = setting(SelfGenerateConfig, "Training on the model's own greedy answers.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_min > self.noise_max:
            raise ValueError(
                f"iterative.noise_min={self.noise_min} is above iterative.noise_max={self.noise_max}; swap them."
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
class NoConversationsConfig(SFTMultiturnConfig):
    """data.multiturn, always off: a row is one instruction and its response."""

    enable: bool = setting(False, fixed="a row is an instruction and its response")


@dataclass
class IterativeDataConfig(SFTDataConfig):
    """Instruction and output; a row that cannot be trained on stops the run, or is skipped (`bad_rows`)."""

    train_files: str | list[str] = "~/data/dllm/train.parquet"
    val_files: str | list[str] | None = None
    train_batch_size: int = 32
    prompt_key: str = setting("instruction", "Column of the instruction.")
    response_key: str = setting("output", "Column of the response.")
    max_length: int = 2048
    dataloader_num_workers: int = setting(0, "Processes per rank that read ahead; rows are tokenized before.", low=0)
    multiturn: NoConversationsConfig = setting(NoConversationsConfig)
    custom_cls: ModuleConfig = setting(ModuleConfig, "Data set class, a subclass of IterativeSFTDataset.")
    packing: bool = setting(False, fixed="rounds keep their rows")
    use_chat_template: bool = setting(False, "Send the instruction through the chat template as a user turn.")
    bad_rows: str = setting(
        "stop",
        "Rows that cannot be trained on: stop the run and name file and row, or skip and count them.",
        choices=("stop", "skip"),
    )


@dataclass
class IterativeModelConfig(SFTModelConfig):
    """Without gradient checkpointing, so that rounds can share the instruction."""

    partial_pretrain: str = "~/models/start"
    enable_gradient_checkpointing: bool = setting(False, "Recompute activations; rounds then share no prefix.")


@dataclass
class IterativeOptimConfig(SFTOptimConfig):
    """iterative_refine.yaml passes `warmup_steps_ratio`, this recipe's name for it, on to `lr_warmup_steps_ratio`."""

    lr: float = 2e-5
    warmup_steps_ratio: float = setting(0.1, "Warm-up as a share of all steps.", low=0, high=1)


@dataclass
class IterativeTrainerConfig(SFTTrainerConfig):
    """iterative_refine.yaml passes `save_checkpoint_steps`, this recipe's name for it, on to `save_freq`."""

    default_local_dir: str = "checkpoints/dllm_reasoning/iterative_refine"
    project_name: str = "dllm_reasoning"
    experiment_name: str = "iterative_refine"
    total_epochs: int = 3
    save_checkpoint_steps: int = setting(1000, "Steps between checkpoints; -1: at the end only, 0: none.", low=-1)
    save_freq: int = setting(1000, "Same as save_checkpoint_steps, under sft_trainer's name.", low=-1)


@dataclass
class IterativeRefineConfig(SFTConfig, section=""):
    """The full tree of iterative_refine.yaml."""

    data: IterativeDataConfig = setting(IterativeDataConfig)
    model: IterativeModelConfig = setting(IterativeModelConfig)
    optim: IterativeOptimConfig = setting(IterativeOptimConfig)
    iterative: IterativeConfig = setting(IterativeConfig, "Noise, refinement rounds and self-generated answers.")
    use_remove_padding: bool = setting(False, fixed="rounds keep their padding, which is cut to the longest row")
    trainer: IterativeTrainerConfig = setting(IterativeTrainerConfig)


@dataclass
class RefineLossConfig(AuxiliaryLossConfig, section="actor_rollout_ref.actor.auxiliary_losses.refine_loss"):
    """The refinement loss of an RL update, which keeps a policy able to draft its own tokens (rollout refine)."""

    coef: float = setting(0.0, "Weight of the refinement loss on the policy's samples; 0: none.", low=0)
    samples: str = setting(
        "all", "Samples it is taken on: all, or those of positive advantage.", choices=("all", "positive")
    )
    windows_per_sample: int = setting(8, "Windows per sample.", low=1)
    num_iterations: int = setting(1, "Refinement rounds per window.", low=1)
    aligned_windows: float = setting(0.0, "Share of windows that start at multiples of their width.", low=0, high=1)
