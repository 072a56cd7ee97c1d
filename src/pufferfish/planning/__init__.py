"""Plans: which layers become low-rank, at which ranks, and their cost."""
