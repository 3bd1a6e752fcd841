"""Training in environments that others wrote, one file for each library; docs/environments.md explains them."""
