"""Compatibility with verl: import path of `verl.reward.rules.prime_code`."""

import sys

from verl.reward.rules import prime_code

sys.modules[__name__] = prime_code
