"""Compatibility with verl: names of floating-point types, as texts, numbers of bits and torch dtypes."""

import torch

HALF_LIST = [16, "16", "fp16", "float16", torch.float16]
FLOAT_LIST = [32, "32", "fp32", "float32", torch.float32]
BFLOAT_LIST = ["bf16", "bfloat16", torch.bfloat16]


class PrecisionType:
    """Names of precisions, and functions from one kind of name to another."""

    HALF = "16"
    FLOAT = "32"
    FULL = "64"
    BFLOAT = "bf16"
    MIXED = "mixed"

    @staticmethod
    def supported_type(precision: str | int) -> bool:
        """Whether the name is one of `supported_types`."""
        return str(precision) in PrecisionType.supported_types()

    @staticmethod
    def supported_types() -> list[str]:
        """The names of the class."""
        return [PrecisionType.HALF, PrecisionType.FLOAT, PrecisionType.FULL, PrecisionType.BFLOAT, PrecisionType.MIXED]

    @staticmethod
    def is_fp16(precision) -> bool:
        """Whether a name or dtype is float16."""
        return precision in HALF_LIST

    @staticmethod
    def is_fp32(precision) -> bool:
        """Whether a name or dtype is float32."""
        return precision in FLOAT_LIST

    @staticmethod
    def is_bf16(precision) -> bool:
        """Whether a name or dtype is bfloat16."""
        return precision in BFLOAT_LIST

    @staticmethod
    def to_dtype(precision) -> torch.dtype:
        """The torch dtype; RuntimeError for an unknown name."""
        for names in (HALF_LIST, FLOAT_LIST, BFLOAT_LIST):
            if precision in names:
                return names[-1]
        raise RuntimeError(f"precision {precision!r} is unknown. Known: fp16, fp32, bf16.")

    @staticmethod
    def to_str(precision) -> str:
        """fp16, fp32 or bf16; RuntimeError for an unknown name."""
        return {torch.float16: "fp16", torch.float32: "fp32", torch.bfloat16: "bf16"}[PrecisionType.to_dtype(precision)]
