"""Warnings that concern a whole run."""

from __future__ import annotations

import functools
import os

from loguru import logger


@functools.cache
def warn_once(text: str) -> None:
    """Warn of it once in this process, and in the first process of a torchrun job alone."""
    if int(os.environ.get("RANK", "0")) == 0:
        logger.warning("{}", text)
