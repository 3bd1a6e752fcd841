"""Sharding of parameters, sequences and matrices over ranks."""
