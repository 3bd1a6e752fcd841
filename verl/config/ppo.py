"""The tree of ppo_trainer.yaml: the sections of an RL run, and those settings that no component owns."""

from dataclasses import dataclass
from typing import Any

from verl.config.actor import FSDPActorConfig, FSDPRefConfig
from verl.config.algorithm import AlgoConfig
from verl.config.base import BaseConfig
from verl.config.common import RewardManagerConfig, TrainerConfig
from verl.config.critic import FSDPCriticConfig
from verl.config.data import DataConfig
from verl.config.fields import setting
from verl.config.model import HFModelConfig
from verl.config.profiler import TOOLS, TorchMemoryToolConfig
from verl.config.reward_model import RewardModelConfig
from verl.config.rollout import RolloutConfig


@dataclass
class ActorRolloutRefConfig(BaseConfig, section="actor_rollout_ref"):
    """Policy, rollout and reference on shared ranks."""

    nccl_timeout: int = setting(600, "Seconds after which a collective that did not finish ends the run.", low=1)
    model: HFModelConfig = setting(HFModelConfig, "The model that is trained.")
    actor: FSDPActorConfig = setting(FSDPActorConfig, "The PPO update of the policy.")
    ref: FSDPRefConfig = setting(FSDPRefConfig, "The reference policy, which only runs forward.")
    rollout: RolloutConfig = setting(RolloutConfig, "How completions are generated.")


@dataclass
class CustomRewardFunctionConfig(BaseConfig, section="custom_reward_function"):
    """Your reward function."""

    path: str | None = setting(None, "File (path, file:// or pkg://package.module); null: built-in rewards.")
    name: str = setting("compute_score", "Name of the function in that file.")
    reward_kwargs: dict[str, Any] = setting(dict, "Keyword arguments of the function; any key.")


@dataclass
class RayConfig(BaseConfig, section="ray_kwargs"):
    """How Ray is started."""

    ray_init: dict[str, Any] = setting(lambda: {"num_cpus": None}, "Arguments of ray.init; any key.")
    timeline_json_file: str | None = setting(None, "File to write Ray's timeline to at the end; null for none.")


@dataclass
class GlobalNsysConfig(BaseConfig, section="global_profiler.global_tool_config.nsys"):
    """Options of `nsys profile` around the ranks."""

    worker_nsight_options: dict[str, Any] = setting(
        lambda: {
            "trace": "cuda,nvtx,cublas,ucx", "cuda-memory-usage": "true", "cuda-graph-trace": "graph",
            "capture-range": "cudaProfilerApi", "capture-range-end": None, "kill": "none",
        },
        "Options of nsys around each rank, which Ray starts.",
    )  # fmt: skip
    controller_nsight_options: dict[str, Any] = setting(
        lambda: {"trace": "cuda,nvtx,cublas,ucx", "cuda-memory-usage": "true", "cuda-graph-trace": "graph"},
        "Options of nsys around the driver, which is a Ray actor then.",
    )
    discrete: bool = setting(False, "One capture range for each call of a role, not for the step; roles follow it.")


@dataclass
class GlobalToolConfig(BaseConfig, section="global_profiler.global_tool_config"):
    """Settings of the tools for all processes."""

    nsys: GlobalNsysConfig = setting(GlobalNsysConfig, "Nsight Systems.")
    torch_memory: TorchMemoryToolConfig = setting(TorchMemoryToolConfig, "CUDA memory history; roles follow it.")


@dataclass
class GlobalProfilerConfig(BaseConfig, section="global_profiler"):
    """Profiling of full steps."""

    tool: str | None = setting(None, "torch, torch_memory (CUDA), nsys (CUDA); null profiles nothing.", choices=TOOLS)
    steps: list[int] | None = setting(None, "Steps to profile, for roles with profiler.enable=true.")
    profile_continuous_steps: bool = setting(False, "Put consecutive steps into one profile.")
    save_path: str = setting("outputs/profile", "Folder of the profiles.")
    global_tool_config: GlobalToolConfig = setting(GlobalToolConfig, "Settings of the tools for all processes.")


@dataclass
class PPOConfig(BaseConfig, section=""):
    """The full tree of an RL run; recipes add sections of their own next to it."""

    data: DataConfig = setting(DataConfig, "Training and validation data.")
    actor_rollout_ref: ActorRolloutRefConfig = setting(
        ActorRolloutRefConfig, "Policy, rollout and reference on shared ranks."
    )
    critic: FSDPCriticConfig = setting(FSDPCriticConfig, "The critic: a value model and its update.")
    reward_model: RewardModelConfig = setting(RewardModelConfig, "Where scores come from.")
    reward_manager: RewardManagerConfig = setting(RewardManagerConfig, "Where the reward manager comes from.")
    custom_reward_function: CustomRewardFunctionConfig = setting(CustomRewardFunctionConfig, "Your reward function.")
    algorithm: AlgoConfig = setting(AlgoConfig, "How scores become advantages.")
    trainer: TrainerConfig = setting(TrainerConfig, "The run: its length, its ranks, what it writes.")
    ray_kwargs: RayConfig = setting(RayConfig, "How Ray is started.")
    global_profiler: GlobalProfilerConfig = setting(GlobalProfilerConfig, "Profiling of full steps.")
