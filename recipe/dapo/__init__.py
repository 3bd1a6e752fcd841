"""DAPO (arXiv 2503.14476): groups without a gradient are replaced by new draws, overlong responses are penalised."""
