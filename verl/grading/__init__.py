"""Grading of answers: processes with time limits, and a sandbox for programs."""
