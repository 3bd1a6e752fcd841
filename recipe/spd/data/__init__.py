"""Drafted blocks: prepared files, their checks, and the data set that reads them."""
