"""A second small model that ships with the package: `path()` is its folder.

It is a Llama over bytes, all of whose layers have rotary embeddings and see the
whole text, so that losses of a cache's codec or eviction show in its answers.
It has learned to recall: see README.md here, and configs/train/small.py.
"""

from __future__ import annotations

import pathlib


def path() -> pathlib.Path:
  """The folder with config.json, model.safetensors and tokenizer.json."""
  return pathlib.Path(__file__).parent


__all__ = ["path"]
