"""Thin adapters to training libraries. Each module needs its library; no other module imports it."""
