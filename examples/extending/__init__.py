"""One runnable file for each part of a run that can be replaced; docs/extending.md explains them."""
