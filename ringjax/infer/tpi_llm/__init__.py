"""TPI-LLM: tensor parallelism over processes with a window of weights."""
