"""Compatibility with verl: import path of `recipe.spd.data.dataset`."""

from recipe.spd.data.dataset import *  # noqa: F403
