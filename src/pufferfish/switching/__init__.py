"""The switch from full rank to low rank in a running job."""
