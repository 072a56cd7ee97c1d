"""Optimizers of models whose layers change: carried state, Frobenius decay, learning-rate changes."""
