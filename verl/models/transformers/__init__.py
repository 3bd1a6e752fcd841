"""Compatibility with verl: package of `monkey_patch`; models are used as transformers builds them."""
