"""Compatibility with verl: import path of `verl.data.chat_template`."""

import sys

from verl.data import chat_template

sys.modules[__name__] = chat_template
