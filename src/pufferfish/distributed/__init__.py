"""Cooperation of the workers of a job: agreement, shared SVDs, DDP re-wrapping, exact averages, the finite guard."""
