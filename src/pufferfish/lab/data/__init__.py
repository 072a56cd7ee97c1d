"""Data sets of the tasks: download, reading, decoding, and the order of batches for any number of workers."""
