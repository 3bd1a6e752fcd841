"""A function as a tool."""

from verl.tools.function_tool import function_tool


def _split(text):
    return text.split()


@function_tool
def count_words(text: str) -> int:
    """Count the words of a text.

    Args:
        text: the text
    """
    return len(_split(text))
