"""Compatibility with verl: import path of `verl.protocol.seqlen_balancing`."""

import sys

from verl.protocol import seqlen_balancing

sys.modules[__name__] = seqlen_balancing
