"""The compression methods, one file each."""
