"""LLM in a Flash: neurons in files, a window of them in memory."""
