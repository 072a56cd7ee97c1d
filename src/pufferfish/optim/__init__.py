"""Optimizers through a change of parameters: state carried to factors, Frobenius decay, learning rates."""
