"""Local steps: workers train separately and average their models every few updates."""
