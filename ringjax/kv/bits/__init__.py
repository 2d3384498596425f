"""Bits of the codecs of layers and KV heads, under a byte budget."""
