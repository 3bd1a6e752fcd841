"""Text of models, users and templates as terminals and pages may show it."""

import re

# C0 and C1 controls but tab and line feed, half surrogates, and controls of the direction of writing.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with the escapes of Python in place of characters that would act on a terminal or turn text around."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
