"""Local steps: workers train alone and average now and then."""
