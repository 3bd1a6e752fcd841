"""Compatibility with verl: import path of `verl.trainer.fully_async`."""
