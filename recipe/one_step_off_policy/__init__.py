"""Compatibility with verl: import path of `verl.trainer.fully_async` with the settings of one step off."""
