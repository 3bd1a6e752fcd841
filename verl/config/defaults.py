"""Defaults that depend on the machine and on other settings: `${verl.default:NAME}` in the yaml files."""

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

DEFAULTS: dict[str, Callable[[DictConfig], Any]] = {}


def _default(of: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
    DEFAULTS[of.__name__] = of
    return of


def _on_cpu(root: DictConfig) -> bool:
    return OmegaConf.select(root, "trainer.device") == "cpu"


@_default
def dtype(root: DictConfig) -> str:
    """bfloat16; float32 on a CPU without instructions for bfloat16 matrices."""
    if not _on_cpu(root):
        return "bfloat16"
    from verl.utils.device import default_dtype

    return default_dtype("cpu")


@_default
def gradient_checkpointing(root: DictConfig) -> bool | None:
    """True on GPUs. On a CPU None: the engine checkpoints a forward whose activations would not fit in memory."""
    return None if _on_cpu(root) else True


@_default
def remove_padding(root: DictConfig) -> bool:
    """Whether SFT removes padding: on a CPU."""
    return _on_cpu(root)


@_default
def share_prompt_forward(root: DictConfig) -> bool:
    """Whether the samples of a prompt share its forward: on a CPU, unless other settings do not permit it.

    Those are padding that is kept, one sample a prompt, PF-PPO, a policy of its own, batches whose prompts the ranks
    cannot share evenly, and micro-batches of fewer samples than a prompt has.
    """
    names = ("rollout.n", "rollout.log_prob_use_dynamic_bsz", "rollout.log_prob_micro_batch_size_per_gpu",
             "actor.use_dynamic_bsz", "actor.ppo_micro_batch_size_per_gpu", "actor.ppo_micro_batch_size",
             "actor.ppo_mini_batch_size", "model.policy.name", "model.use_remove_padding")  # fmt: skip
    n, dynamic_log_probs, log_prob_rows, dynamic, rows, rows_of_all, mini, policy, packs = (
        OmegaConf.select(root, f"actor_rollout_ref.{name}") for name in names
    )
    if not (_on_cpu(root) and packs) or policy != "causal_lm" or OmegaConf.select(root, "algorithm.use_pf_ppo"):
        return False
    ranks = OmegaConf.select(root, "trainer.nnodes") * OmegaConf.select(root, "trainer.n_gpus_per_node")
    if rows_of_all is not None:
        rows = rows_of_all // ranks
    sizes = [None if dynamic else rows, None if dynamic_log_probs else log_prob_rows]
    prompts = [mini, *(OmegaConf.select(root, f"data.{name}") for name in ("train_batch_size", "gen_batch_size"))]
    return n > 1 and all(size is None or size >= n for size in sizes) and all(count % ranks == 0 for count in prompts)


OmegaConf.register_new_resolver("verl.default", lambda name, *, _root_: DEFAULTS[name](_root_), replace=True)
