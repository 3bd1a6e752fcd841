"""Profiling of roles and timing of code."""
