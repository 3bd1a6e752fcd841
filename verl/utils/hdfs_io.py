"""Compatibility with verl: copies files to hdfs:// and from it, by `verl.utils.fs`."""

from verl.utils.fs import copy, exists, makedirs  # noqa: F401
