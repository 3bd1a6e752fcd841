"""One runnable file for each part of a run that can be replaced; docs/plugins.md explains them."""
