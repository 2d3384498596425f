"""The small trained model that ships with the package: `path()` is its folder.

It reads bytes and has learned one task in addition to the look of Python: to
find the passkey of a name, which a line somewhere in a long text states, when
the text ends in the question for it. See README.md here, and
configs/train/tiny.py.
"""

from __future__ import annotations

import pathlib

# A line of a text, the question at its end, and the model's answer.
from ringjax.data.tasks.needle import ANSWER, NEEDLE, QUESTION


def path() -> pathlib.Path:
  """The folder with config.json, model.safetensors and tokenizer.json."""
  return pathlib.Path(__file__).parent


__all__ = ["ANSWER", "NEEDLE", "QUESTION", "path"]
