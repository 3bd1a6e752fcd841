"""Defaults that depend on the machine and on other settings: `${verl.default:NAME}` in the yaml files."""

from typing import Any

from omegaconf import DictConfig, OmegaConf


def on_cpu(root: DictConfig) -> bool:
    """Whether the ranks have no GPU."""
    return OmegaConf.select(root, "trainer.device") == "cpu"


def dtype(root: DictConfig) -> str:
    """bfloat16; float32 on a CPU without instructions for bfloat16 matrices."""
    if not on_cpu(root):
        return "bfloat16"
    from verl.utils.accelerator import default_dtype

    return default_dtype("cpu")


def gradient_checkpointing(root: DictConfig) -> bool | None:
    """True on GPUs. On a CPU None: the engine checkpoints a forward whose activations would not fit in memory."""
    return None if on_cpu(root) else True


def share_prompt_forward(root: DictConfig) -> bool:
    """Whether the samples of a prompt share its forward: on a CPU, unless other settings do not permit it.

    Those are padding that is kept, one sample a prompt, PF-PPO, a policy other than causal_lm, batches whose prompts
    the ranks cannot share evenly, and micro-batches of fewer samples than a prompt has. Sizes that are not positive
    integers do not permit it either: the checks of the settings report them.
    """

    def chosen(*names: str) -> list[Any]:
        return [OmegaConf.select(root, name) for name in names]

    policy, packs, redraws = chosen(
        "actor_rollout_ref.model.policy.name", "actor_rollout_ref.model.use_remove_padding", "algorithm.use_pf_ppo"
    )
    if not (on_cpu(root) and packs) or policy != "causal_lm" or redraws:
        return False
    n, nodes, a_node, *prompts = counts = chosen(
        "actor_rollout_ref.rollout.n", "trainer.nnodes", "trainer.n_gpus_per_node", "data.train_batch_size",
        "data.gen_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size",
    )  # fmt: skip
    of_rank, of_all = [], []  # samples in a micro-batch
    for size, switch in (("actor.ppo_", "actor."), *((f"{role}.log_prob_",) * 2 for role in ("rollout", "ref"))):
        key = f"actor_rollout_ref.{size}micro_batch_size"
        *given, dynamic = chosen(f"{key}_per_gpu", key, f"actor_rollout_ref.{switch}use_dynamic_bsz")
        for sizes, value in zip((of_rank, of_all), given, strict=True):
            sizes += [] if dynamic or value is None else [value]
    if any(type(count) is not int or count < 1 for count in (*counts, *of_rank, *of_all)):
        return False
    ranks = nodes * a_node
    smallest = min([*of_rank, *(size // ranks for size in of_all)], default=n)
    return 1 < n <= smallest and all(count % ranks == 0 for count in prompts)


DEFAULTS = {
    "dtype": dtype, "gradient_checkpointing": gradient_checkpointing, "remove_padding": on_cpu,
    "share_prompt_forward": share_prompt_forward,
}  # fmt: skip
OmegaConf.register_new_resolver("verl.default", lambda name, *, _root_: DEFAULTS[name](_root_), replace=True)
