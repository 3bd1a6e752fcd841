"""Compatibility with verl: import path of `verl.reward.rules.search_r1_like_qa_em`."""

import sys

from verl.reward.rules import search_r1_like_qa_em

sys.modules[__name__] = search_r1_like_qa_em
