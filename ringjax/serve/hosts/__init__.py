"""One engine of several processes, which take the same steps."""
