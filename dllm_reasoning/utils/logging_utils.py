"""Warnings that concern a run, not a step."""

import functools
import os

from loguru import logger


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning once per process, and only on rank 0 of a torchrun job."""
    if int(os.environ.get("RANK", "0")) == 0:
        logger.warning("{}", text)
