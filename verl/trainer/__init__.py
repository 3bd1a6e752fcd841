"""Configuration, algorithms, trainers."""
