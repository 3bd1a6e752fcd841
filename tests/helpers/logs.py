"""What a piece of code logs."""

from contextlib import contextmanager

from loguru import logger


@contextmanager
def logged(level: str = "WARNING", format: str = "{message}"):
    """The list of messages of this level and above, filled while the block runs."""
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message).strip()), level=level, format=format)
    try:
        yield lines
    finally:
        logger.remove(sink)
