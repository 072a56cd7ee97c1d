"""Experiments: the paper's models and tasks, and the tools to train, compare and advise."""
