"""Stands in for torchvision, which SGLang imports for image models; no build of it fits this torch without a GPU."""

from import_stub import make_stub

__version__ = "0.0"
__getattr__ = make_stub(__name__)
