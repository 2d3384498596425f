"""Building blocks of the models: Flax NNX modules that hold parameters only."""
