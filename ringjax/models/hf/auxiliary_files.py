"""Side files of a model's weights that are copied with them, by their names.

They are the tokenizer, generation settings and licences. No file in a folder is
ever run.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import stat

from ringjax.errors import OptionError
from ringjax.models.hf import safe_files
from ringjax.regular_files import replacing

# Only files of these names are copied.
NAMES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "tokenizer.model",
  "tokenizer.model.v3",
  "tekken.json",
  "tiktoken.model",
  "sentencepiece.bpe.model",
  "spiece.model",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "vocab.txt",
  "merges.txt",
  "chat_template.jinja",
  "chat_template.json",
  "generation_config.json",
  "preprocessor_config.json",
  "processor_config.json",
  "video_preprocessor_config.json",
  "LICENSE",
  "LICENSE.md",
  "LICENSE.txt",
  "NOTICE",
)
_BYTES = 256 << 20


def copy(folder: pathlib.Path, to: pathlib.Path) -> None:
  """Copies the files next to a model's weights.

  Raises:
    OptionError: If a file is too large.
  """
  for name in names(folder):
    copy_file(folder, name, to)


def names(folder: pathlib.Path) -> list[str]:
  """Names of the files to copy that a folder has."""
  return [name for name in NAMES if (folder / name).is_file()]


def copy_file(folder: pathlib.Path, name: str, to: pathlib.Path) -> None:
  """Copies one of these files, and replaces an existing one.

  Raises:
    OptionError: If it is too large.
  """
  descriptor = safe_files.open_inside(folder, name)
  with open(descriptor, "rb") as source:
    status = os.fstat(source.fileno())
    if status.st_size > _BYTES or not stat.S_ISREG(status.st_mode):
      raise OptionError(
        name, f"{status.st_size:,} bytes", f"at most {_BYTES:,}", "remove it"
      )
    with replacing(to / name) as target:
      shutil.copyfileobj(source, target)
