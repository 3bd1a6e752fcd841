"""Scoring of answers: rules by data source, processes that grade, the sandbox for programs."""
