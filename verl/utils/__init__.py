"""General helpers, without Ray and without process groups."""

import importlib

__getattr__, __dir__ = importlib.import_module("verl.compat").lazy_names(__name__)
