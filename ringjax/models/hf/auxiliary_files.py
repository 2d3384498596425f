"""Side files of a model's weights that are copied with them, by their names.

They are the tokenizer, generation settings and licences. No file in a folder is
ever run.
"""

from __future__ import annotations

import pathlib
import shutil

from ringjax.errors import OptionError
from ringjax.models.hf import safe_files
from ringjax.paths import AnyPath, ObjectPath
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


def copy(folder: AnyPath, to: pathlib.Path) -> None:
  """Copies the files next to a model's weights.

  Raises:
    OptionError: If a file is too large.
  """
  for name in names(folder):
    copy_file(folder, name, to)


def names(folder: AnyPath) -> list[str]:
  """Names of the files to copy that a folder has."""
  if isinstance(folder, ObjectPath):
    present = {entry.name for entry in folder.iterdir()}
    return [name for name in NAMES if name in present]
  return [name for name in NAMES if (folder / name).is_file()]


def copy_file(folder: AnyPath, name: str, to: pathlib.Path) -> None:
  """Copies one of these files, and replaces an existing one.

  Raises:
    OptionError: If it is too large.
  """
  with safe_files.open_inside(folder, name) as source:
    nbytes = safe_files.opened_identity(source).nbytes
    if nbytes > _BYTES:
      raise OptionError(
        name, f"{nbytes:,} bytes", f"at most {_BYTES:,}", "remove it"
      )
    with replacing(to / name) as target:
      shutil.copyfileobj(source, target)
