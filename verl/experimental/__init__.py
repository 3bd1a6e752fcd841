"""Compatibility with verl: import paths of agent loops, the reward loop and curriculum samplers."""
