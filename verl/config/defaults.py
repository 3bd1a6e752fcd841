"""Defaults that depend on the machine and on other settings: `${oc.select:machine.NAME,VALUE}` in the yaml files.

No tree has a section `machine`: who reads the files without this module gets VALUE, the default for GPUs.
"""

import copy
import os
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf, open_dict, read_write

ValueOf = Callable[[str], Any]  # the value of a dotted key in the tree that is being composed; None for an absent one
PROMPT_BATCHES = ("data.train_batch_size", "data.gen_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size")
# Key of the samples in a micro-batch over all ranks (with _per_gpu: on one rank) -> key that cuts by tokens instead.
MICRO_BATCHES = {
    "actor_rollout_ref.actor.ppo_micro_batch_size": "actor_rollout_ref.actor.use_dynamic_bsz",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
}


def on_cpu(value_of: ValueOf) -> bool:
    """Whether the ranks have no GPU."""
    return value_of("trainer.device") == "cpu"


def dtype(value_of: ValueOf) -> str:
    """bfloat16; float32 on a CPU without instructions for bfloat16 matrices."""
    if not on_cpu(value_of):
        return "bfloat16"
    from verl.utils.accelerator import default_dtype

    return default_dtype("cpu")


def agent_loop_workers(value_of: ValueOf) -> int:
    """8; on a CPU at most the cores of this machine, which the workers would share while they start."""
    return min(8, len(os.sched_getaffinity(0))) if on_cpu(value_of) else 8


def gradient_checkpointing(value_of: ValueOf) -> bool | None:
    """True on GPUs. On a CPU None: the engine checkpoints a forward whose activations would not fit in memory."""
    return None if on_cpu(value_of) else True


def share_prompt_forward(value_of: ValueOf) -> bool:
    """Whether the samples of a prompt share its forward: on a CPU, unless other settings do not permit it.

    Those are padding that is kept, one sample a prompt, PF-PPO, a policy other than causal_lm, batches whose prompts
    the ranks cannot share evenly, and micro-batches of fewer samples than a prompt has. Sizes that are not positive
    integers do not permit it either: the checks of the settings report them.
    """
    if not (on_cpu(value_of) and value_of("actor_rollout_ref.model.use_remove_padding")):
        return False
    if value_of("actor_rollout_ref.model.policy.name") != "causal_lm" or value_of("algorithm.use_pf_ppo"):
        return False
    n, nodes, per_node = map(value_of, ("actor_rollout_ref.rollout.n", "trainer.nnodes", "trainer.n_gpus_per_node"))
    batches = [value_of(key) for key in PROMPT_BATCHES]
    cut_by_samples = [key for key, by_tokens in MICRO_BATCHES.items() if not value_of(by_tokens)]
    of_one_rank = [value_of(f"{key}_per_gpu") for key in cut_by_samples]
    of_all_ranks = [value_of(key) for key in cut_by_samples]
    sizes = [n, nodes, per_node, *batches, *(size for size in of_one_rank + of_all_ranks if size is not None)]
    if any(type(size) is not int or size < 1 for size in sizes):
        return False
    ranks = nodes * per_node
    micro_batches = [size for size in of_one_rank if size is not None]
    micro_batches += [size // ranks for size in of_all_ranks if size is not None]
    return n > 1 and all(size >= n for size in micro_batches) and all(prompts % ranks == 0 for prompts in batches)


DEFAULTS = {
    "dtype": dtype, "gradient_checkpointing": gradient_checkpointing, "remove_padding": on_cpu,
    "share_prompt_forward": share_prompt_forward, "agent_loop_workers": agent_loop_workers,
}  # fmt: skip


def resolved(config: Any) -> Any:
    """A composed config, or a section of one, as plain data; interpolations have the values for this machine.

    Raises the errors of OmegaConf for interpolations that cannot be resolved.
    """
    root, key = config._get_root(), config._get_full_key(None)
    if not (OmegaConf.is_dict(root) and "trainer" in root):
        return OmegaConf.to_container(config, resolve=True)
    root = copy.deepcopy(root)
    with read_write(root), open_dict(root):
        root.machine = {name: rule(lambda key: OmegaConf.select(root, key)) for name, rule in DEFAULTS.items()}
    plain = OmegaConf.to_container(OmegaConf.select(root, key) if key else root, resolve=True)
    if not key:
        del plain["machine"]
    return plain
