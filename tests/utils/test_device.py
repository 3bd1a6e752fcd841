"""The dtype that a device gets by default."""

from pathlib import Path

import pytest
import torch

from verl.utils.accelerator import default_dtype


@pytest.mark.parametrize(
    ("instructions", "dtype"),
    [({"avx512_bf16": True}, "bfloat16"), ({"amx_bf16": True, "avx512_bf16": False}, "bfloat16"),
     ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, "float32"), ({"neon": True}, "float32")],
)  # fmt: skip
def test_a_cpu_computes_in_bfloat16_only_with_instructions_for_its_products(monkeypatch, instructions, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    assert default_dtype("cpu") == dtype
    assert default_dtype("cuda") == "bfloat16"


def test_the_default_dtype_of_this_cpu_follows_what_linux_says_of_it():
    flags = Path("/proc/cpuinfo").read_text().split()
    assert default_dtype("cpu") == ("bfloat16" if {"avx512_bf16", "amx_bf16"} & set(flags) else "float32")
