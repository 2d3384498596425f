"""FastDecode: attention in processes next to the caches."""
