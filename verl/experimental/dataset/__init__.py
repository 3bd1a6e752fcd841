"""Compatibility with verl: import path of `verl.data.sampler`."""
