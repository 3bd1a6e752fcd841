"""Settings of the run and of what actor, critic and reward share: checkpoints, models, plug-in modules."""

from dataclasses import dataclass
from typing import Any

from verl.config.base import BaseConfig
from verl.config.fields import setting

CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")
# Help of settings that several sections have.
SEQUENCE_RANKS = "Neighbouring ranks that share each sequence; their rows are computed together."
SUM_OVER_RANKS = "Deprecated: the sum over all ranks; use the key with _per_gpu, the number on one rank."
LAYER_RANKS = "Neighbouring ranks that split each layer; their rows are computed together."
TOKEN_PARTS = "Let the ranks that split a layer (tensor_parallel_size) keep parts of the tokens between layers."
COMPILED = "Compile log-probs and entropy with torch.compile, which takes time at their first use."
RECOMPUTED = (
    "Recompute activations in the backward to save memory; null, the default on CPUs: only for micro-batches whose "
    "activations would not fit in memory."
)
LIGER = "Let kernels of the package liger-kernel compute norms, rotations and MLPs; needs a GPU."
EXTERNAL_LIB = (
    "Dotted name of one module to import first, such as my_parts (no path; its folder on PYTHONPATH); it may import "
    "others."
)


@dataclass
class CheckpointConfig(BaseConfig, section="checkpoint"):
    """What a checkpoint holds: model, optimizer, extra (scheduler, RNG), hf_model (Hugging Face safetensors)."""

    save_contents: list[str] = setting(
        lambda: list(CHECKPOINT_CONTENTS[:3]),
        "Parts to save; hf_model is the full model for transformers.",
        each_of=CHECKPOINT_CONTENTS,
    )
    load_contents: list[str] = setting(
        lambda: list(CHECKPOINT_CONTENTS[:3]), "Parts to load.", each_of=CHECKPOINT_CONTENTS
    )
    async_save: bool = setting(
        False,
        "Copy weights and state to the CPU, and write them during the next steps; hf_model is written before those.",
    )


@dataclass
class ProfileConfig(BaseConfig, section="profile"):
    """Steps and ranks that a profile covers, -1 is off; no section has it, it is for code that was written for verl."""

    profile_ranks: list[int] | None = None
    step_start: int = setting(-1, low=-1)
    step_end: int = setting(-1, low=-1)
    save_path: str | None = None


@dataclass
class BaseModelConfig(BaseConfig, section="model"):
    """Where a model and its tokenizer are, and what is changed in its config."""

    path: str = setting("~/models/deepseek-llm-7b-chat", "Folder or hub name of the model to start from.")
    tokenizer_path: str | None = setting(None, "Folder of the tokenizer; null takes the model's.")
    override_config: dict[str, Any] = setting(dict, "Values that replace those of config.json; any key.")
    external_lib: str | None = setting(None, EXTERNAL_LIB)
    trust_remote_code: bool = setting(False, "Let the model run code that comes with it.")


@dataclass
class ModuleConfig(BaseConfig, section="module"):
    """A name in a file or module: `path` is a plain path, file://... or pkg://module."""

    path: str | None = setting(None, "File (path, file:// or pkg://package.module); null for none.")
    name: str | None = setting(None, "Name of the class in the file of `path`.")


@dataclass
class RewardManagerConfig(BaseConfig, section="reward_manager"):
    """Reward manager by registered name, or imported from `module`, whose name counts before `name`."""

    source: str = setting(
        "register",
        "register: a manager by name; importlib: a class from reward_manager.module.",
        choices=("register", "importlib"),
    )
    name: str = setting("naive", "Registered name of the manager, or its class in the module if module.name is null.")
    module: ModuleConfig | None = setting(ModuleConfig, "File of the class, for source=importlib.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == "importlib" and not (self.module and self.module.get("path")):  # it may be a plain dict
            raise ValueError("reward_manager.source=importlib needs reward_manager.module.path: name the file.")


@dataclass
class WatchdogConfig(BaseConfig, section="trainer.watchdog"):
    """Seconds that ranks may take for one call of a phase before the run ends; None waits forever."""

    init: float | None = setting(1800.0, "Seconds for loading the models; null for no limit.", above=0)
    generate: float | None = setting(3600.0, "Seconds for one batch of generation; null for no limit.", above=0)
    log_prob: float | None = setting(
        1800.0, "Seconds for log-probs, values or reward scores of one batch; null for no limit.", above=0
    )
    update: float | None = setting(
        3600.0, "Seconds for the updates of one step, a weight sync or any other call; null for no limit.", above=0
    )
    save: float | None = setting(1800.0, "Seconds for writing or reading a checkpoint; null for no limit.", above=0)


@dataclass
class RunConfig(BaseConfig, section="trainer"):
    """What every training has: length, ranks, trackers, checkpoints, resume."""

    total_epochs: int = setting(30, "Epochs over the training data.", low=1)
    total_training_steps: int | None = setting(None, "Maximum number of steps; null follows from the epochs.", low=1)
    seed: int = setting(42, "Seed that all other seeds follow unless they are set.", low=0)
    project_name: str = setting("verl_examples", "Project in the trackers and in default_local_dir.")
    experiment_name: str = setting("gsm8k", "Experiment in the trackers and in default_local_dir.")
    logger: Any = setting(
        lambda: ["console", "wandb"],
        "Trackers: console, file, tensorboard, wandb, mlflow, swanlab, trackio, clearml, vemlp_wandb.",
    )
    nnodes: int = setting(1, "Machines; for more than one, RAY_ADDRESS names a Ray cluster of them.", low=1)
    n_gpus_per_node: int = setting(8, "Ranks on each machine, with device=cpu too.", low=1)
    device: str = setting("cuda", "cuda (NCCL), or cpu (gloo) for ranks without a GPU.", choices=("cuda", "cpu"))
    dry_run: bool = setting(False, "Print plan and all problems of the settings, and start nothing.")
    report: bool = setting(True, "Keep a self-contained report.html in default_local_dir.")
    nonfinite_steps_max: int = setting(5, "Skipped updates (NaN or Inf) in a row after which the run stops.", low=1)
    test_freq: int = setting(
        -1, "Steps between validations; the last step has one too. -1 for none once training has begun.", low=-1
    )
    val_before_train: bool = setting(True, "Validate before the first step; a resumed run does not do so again.")
    save_freq: int = setting(-1, "Steps between checkpoints; -1 for one at the end only, 0 for none.", low=-1)
    resume_mode: str = setting(
        "auto",
        "auto resumes from the newest valid checkpoint of the run that started last in the folder, resume_path from "
        "resume_from_path; disable starts a new run.",
        choices=("auto", "disable", "resume_path"),
    )
    resume_from_path: str | None = setting(None, "Folder global_step_N to resume from with resume_mode=resume_path.")
    allow_data_change: bool = setting(False, "Allow a resumed run to use other training data than the checkpoint's.")
    default_local_dir: str = setting("checkpoints/verl_examples/gsm8k", "Folder of checkpoints and report.")
    default_hdfs_dir: str | None = setting(
        None, "Folder (hdfs://... or a path) that published checkpoints are copied to; null for none."
    )
    peak_tflops: float | None = setting(
        None, "Peak dense bfloat16 TFLOP/s of one device, for perf/mfu/*; null looks it up by device name.", above=0
    )


@dataclass
class TrainerConfig(RunConfig):
    """One RL run on nnodes x n_gpus_per_node ranks; a step generates one batch and trains on it."""

    watchdog: WatchdogConfig = setting(
        WatchdogConfig, "Seconds of one call before the run ends and names the slow rank; null for no limit."
    )
    gpu_memory_gib: float | None = setting(
        None, "Memory of a GPU that a dry run plans for; null: that of this machine's, 80 without one.", above=0
    )
    balance_batch: bool = setting(True, "Distribute samples so that ranks get equal numbers of tokens.")
    critic_warmup: int = setting(0, "Steps in which only the critic is trained.", low=0)
    val_only: bool = setting(False, "Validate once, train nothing.")
    log_val_generations: int = setting(0, "Validation samples that are logged each time.", low=0)
    rollout_data_dir: str | None = setting(None, "Folder of a jsonl file of training samples per step; null for none.")
    validation_data_dir: str | None = setting(None, "Folder of a jsonl file per validation; null for none.")
    esi_redundant_time: float = setting(
        0, "Seconds to spare in the checkpoint that is saved before a rented instance expires.", low=0
    )
    del_local_ckpt_after_load: bool = setting(False, "Delete a checkpoint once it is loaded.")
    max_actor_ckpt_to_keep: int | None = setting(None, "Newest actor checkpoints to keep; null keeps all.", low=1)
    max_critic_ckpt_to_keep: int | None = setting(None, "Newest critic checkpoints to keep; null keeps all.", low=1)
    ray_wait_register_center_timeout: int = setting(300, "Seconds to wait until all ranks have registered.", low=1)
    local: bool = setting(False, "Run the one rank in the command's own process, without Ray, for a debugger.")
