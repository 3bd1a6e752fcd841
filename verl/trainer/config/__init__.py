"""The yaml files of the trainers' settings, which are dataclasses in `verl.config`."""

import importlib

__getattr__, __dir__ = importlib.import_module("verl.compat").lazy_names(__name__)
