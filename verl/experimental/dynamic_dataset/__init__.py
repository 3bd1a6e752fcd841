"""Compatibility with verl: import path of `verl.data.dynamicgen_dataset`."""
