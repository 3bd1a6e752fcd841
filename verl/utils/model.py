"""Compatibility with verl: import path of `verl.models.loading`."""

import sys

from verl.models import loading

sys.modules[__name__] = loading
