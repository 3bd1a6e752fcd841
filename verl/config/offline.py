"""Settings of the entries that train nothing: main_generation, main_eval."""

from dataclasses import dataclass
from typing import Any

from verl.config.base import BaseConfig
from verl.config.fields import setting
from verl.config.model import HFModelConfig
from verl.config.ppo import CustomRewardFunctionConfig
from verl.config.reward_model import GradingConfig
from verl.config.rollout import RolloutConfig


@dataclass
class GenerationTrainerConfig(BaseConfig, section="trainer"):
    """The ranks that generate."""

    device: str = setting("cuda", "Device of the ranks.", choices=("cuda", "cpu"))
    nnodes: int = setting(
        1,
        "Number of machines; only 1 is supported.",
        low=1,
        high=1,
        hint="run one command on each machine, with a part of the prompts.",
    )
    n_gpus_per_node: int = setting(1, "Ranks, each with a share of the prompts; torchrun starts several.", low=1)
    dry_run: bool = setting(False, "Print plan and all problems of the settings, and start nothing.")


@dataclass
class GenerationDataConfig(BaseConfig, section="data"):
    """Prompts to answer, and the parquet file to write."""

    path: str = setting("~/data/rlhf/math/test.parquet", "File with the prompts: parquet, jsonl or json.")
    prompt_key: str = setting("prompt", "Column that holds a prompt's chat messages.")
    n_samples: int = setting(5, "Answers per prompt.", low=1)
    output_path: str = setting(
        "outputs/generation.parquet",
        "Parquet file to write: rows of path plus column responses. Until then <output_path>.partial keeps the "
        "answers, with which the same command resumes.",
    )
    batch_size: int = setting(128, "Prompts sent to the engine at a time.", low=1)
    truncation: str = setting(
        "error",
        "What happens to a prompt longer than rollout.prompt_length.",
        choices=("error", "left", "right", "middle"),
    )
    apply_chat_template_kwargs: dict[str, Any] = setting(dict, "Keyword arguments of the chat template; any key.")


@dataclass
class EvaluationDataConfig(BaseConfig, section="data"):
    """Answers to score, and the columns that say how."""

    path: str = setting("outputs/generation.parquet", "Parquet, jsonl or json file, such as main_generation writes.")
    prompt_key: str = setting("prompt", "Column that holds a prompt's chat messages.")
    response_key: str = setting("responses", "Column that holds the answers: a text, or a list of texts.")
    data_source_key: str = setting("data_source", "Column that selects the reward function.")
    reward_model_key: str = setting("reward_model", "Column that holds {ground_truth: ...}.")


@dataclass
class GenerationConfig(BaseConfig, section=""):
    """The full tree of generation.yaml."""

    trainer: GenerationTrainerConfig = setting(GenerationTrainerConfig, "The ranks.")
    data: GenerationDataConfig = setting(GenerationDataConfig, "Prompts and answers.")
    model: HFModelConfig = setting(HFModelConfig, "The model that generates.")
    rollout: RolloutConfig = setting(
        lambda: RolloutConfig(
            name="vllm", top_k=50, top_p=0.7, load_format="auto", prompt_length=1536, response_length=512
        ),
        "How answers are generated.",
    )


@dataclass
class EvaluationRewardConfig(GradingConfig):
    """How answers are graded."""

    num_workers: int = setting(2, "Processes that grade.", low=0)


@dataclass
class EvaluationTrainerConfig(BaseConfig, section="trainer"):
    """The run itself."""

    dry_run: bool = setting(False, "Print plan and all problems of the settings, and score nothing.")


@dataclass
class EvaluationConfig(BaseConfig, section=""):
    """The full tree of evaluation.yaml."""

    data: EvaluationDataConfig = setting(EvaluationDataConfig, "The answers and their columns.")
    custom_reward_function: CustomRewardFunctionConfig = setting(CustomRewardFunctionConfig, "Your reward function.")
    reward_model: EvaluationRewardConfig = setting(EvaluationRewardConfig, "How answers are graded.")
    trainer: EvaluationTrainerConfig = setting(EvaluationTrainerConfig, "The run itself.")
