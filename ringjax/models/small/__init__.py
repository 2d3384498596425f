"""A second small model that ships with the package: `path()` is its folder.

It reads bytes as a Llama, all of whose layers rotate and see the whole text, so
that what a cache's codec or eviction loses shows in its answers. It has learned
to recall: see README.md here, and configs/train/small.py.
"""

from __future__ import annotations

import pathlib


def path() -> pathlib.Path:
  """The folder with config.json, model.safetensors and tokenizer.json."""
  return pathlib.Path(__file__).parent


__all__ = ["path"]
