"""Compatibility with verl: import path of `verl.workers.rollout.tools`."""
