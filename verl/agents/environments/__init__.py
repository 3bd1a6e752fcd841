"""Environments that others wrote: prompts, conversations and scores of their libraries (data.environment)."""
