"""The data of the tasks: found, fetched, read, and put in order for any number of workers."""
