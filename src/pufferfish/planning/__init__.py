"""Plans: which layers become low-rank, at which ranks, and what that costs."""
