"""DAPO (arXiv 2503.14476): groups that teach nothing are drawn anew, long answers are told off."""
