"""Which accelerator this process has: CUDA, or none and then the CPU."""

import os

import torch


def get_device_name() -> str:
    """Either "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device_type: str) -> str:
    """The dtype of a model on "cuda" or "cpu" unless a setting names another: "bfloat16" or "float32".

    A CPU multiplies bfloat16 matrices faster than float32 ones only with instructions for their products; without
    them it widens every operand first.
    """
    if device_type == "cuda":
        return "bfloat16"
    supported = torch.cpu.get_capabilities()
    return "bfloat16" if supported.get("avx512_bf16") or supported.get("amx_bf16") else "float32"


def threads_of_rank(ranks: int) -> int:
    """Threads of each of the `ranks` of this machine that compute on its CPUs at the same time."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def get_device_id() -> int:
    """Index of the current accelerator; 0 on the CPU."""
    return torch.cuda.current_device() if get_device_name() == "cuda" else 0


def rank_device_index() -> int:
    """Index of this rank's GPU among the visible ones: LOCAL_RANK, or 0 where the launcher shows it no other."""
    return 0 if torch.cuda.device_count() == 1 else int(os.environ.get("LOCAL_RANK", "0"))


def visible_device() -> str:
    """The current GPU, as CUDA_VISIBLE_DEVICES names it."""
    index, names = torch.cuda.current_device(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",")[index] if names else str(index)


def get_nccl_backend() -> str:
    """Name of the collective library for this device: nccl or gloo."""
    return "nccl" if get_device_name() == "cuda" else "gloo"
