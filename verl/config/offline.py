"""Settings of the entries that train nothing: main_generation, main_eval."""

from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig
from verl.config.fields import setting


@dataclass
class GenerationTrainerConfig(BaseConfig, section="trainer"):
    """The ranks that generate."""

    device: str = setting("cuda", choices=("cuda", "cpu"))
    nnodes: int = setting(1, low=1, high=1, hint="run one command on each machine, with a part of the prompts.")
    n_gpus_per_node: int = setting(1, low=1)
    dry_run: bool = False


@dataclass
class GenerationDataConfig(BaseConfig, section="data"):
    """Prompts to answer, and the parquet file to write."""

    path: str = "~/data/rlhf/math/test.parquet"
    prompt_key: str = "prompt"
    n_samples: int = setting(5, low=1)
    output_path: str = "outputs/generation.parquet"
    batch_size: int = setting(128, low=1)
    truncation: str = setting("error", choices=("error", "left", "right", "middle"))
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class EvaluationDataConfig(BaseConfig, section="data"):
    """Answers to score, and the columns that say how."""

    path: str = "outputs/generation.parquet"
    prompt_key: str = "prompt"
    response_key: str = "responses"
    data_source_key: str = "data_source"
    reward_model_key: str = "reward_model"
