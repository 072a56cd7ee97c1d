"""The laboratory: the paper's models and what is needed to train and compare them."""
