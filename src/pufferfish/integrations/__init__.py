"""Thin adapters to training libraries. Each file needs its library, and nothing else here imports it."""
