"""Making models low-rank and dense again, in memory and in files; their optimizers."""
