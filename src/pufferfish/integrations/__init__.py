"""Thin adapters to training libraries, which need their library; `convert` uses that of a folder where it is installed."""
