"""Supervised fine-tuning: the trainer, what surrounds its steps, its plan."""
