"""The small trained model that ships with the package: `path()` is its folder.

It reads bytes and has learned one thing beside the look of Python: to find the
passkey of a name that a line somewhere in a long text gives, when the text ends
in the question for it. See README.md here, and configs/train/tiny.py.
"""

from __future__ import annotations

import pathlib

# A line of a text, what a text ends with, and what the model answers.
from ringjax.data.needle import ANSWER, NEEDLE, QUESTION


def path() -> pathlib.Path:
  """The folder with config.json, model.safetensors and tokenizer.json."""
  return pathlib.Path(__file__).parent


__all__ = ["ANSWER", "NEEDLE", "QUESTION", "path"]
