"""Compatibility with verl: import path of `verl.reward.rules.search_r1_like_qa_em`."""

from verl.reward.rules.search_r1_like_qa_em import *  # noqa: F403
