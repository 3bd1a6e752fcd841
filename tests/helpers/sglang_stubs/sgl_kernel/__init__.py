"""Stands in for SGLang's CUDA kernels, which it imports on every machine."""

from import_stub import make_stub

__getattr__ = make_stub(__name__)
