"""The speculative-decoding scorer: its masks, models and files."""

import verl  # noqa: F401 - first, since a module in VERL_USE_EXTERNAL_MODULES may import this package's modules
