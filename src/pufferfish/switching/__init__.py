"""The switch from full rank to low rank in a running training job."""
