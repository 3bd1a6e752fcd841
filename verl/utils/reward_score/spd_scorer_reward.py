"""Compatibility with verl: import path of `recipe.spd.reward`."""

from recipe.spd.reward import *  # noqa: F403
