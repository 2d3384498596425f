"""A model folder at an address, written so that it is whole or not there.

Guarantees: without a rename, one object decides. A new folder exists once its
config.json does, which is written last: a killed process leaves objects that no
reader takes for a model, and that a save with overwrite=True removes. Weights
that replace others have names that no other save has, and count once the index
is written, in one request; the old ones are deleted then. So a reader, also
after a crash, sees the old weights or the new ones.
Cost: one file of weights at a time is on the disk of this machine.
"""

from __future__ import annotations

import pathlib
import secrets

from ringjax.errors import OptionError
from ringjax.models.hf.safe_files import CONFIG, INDEX, SUFFIX, shown
from ringjax.paths import ObjectPath, check_writable, upload_folder


class ObjectFolder:
  """A folder of objects that a model is written to.

  Args:
    place: Address of the folder.
    config: Text of its config.json.
    overwrite: Whether to replace the weights that it has.

  Attributes:
    replaces: Whether it has a model, of the same config, which is replaced.

  Raises:
    OptionError: If it has a model that may not be replaced.
    StorageError: If no object can be written there.
  """

  def __init__(self, place: ObjectPath, config: str, overwrite: bool):
    self._place, self._config = place, config
    self._names = {entry.name for entry in place.iterdir()}
    self.replaces = CONFIG in self._names
    self._token = secrets.token_hex(4)
    self._new: set[str] = set()
    if self._names and not overwrite:
      raise OptionError(
        "path",
        f"{shown(place)}, a folder with {len(self._names)} objects",
        "a new or an empty folder",
        "pass overwrite=True",
      )
    if self.replaces and (place / CONFIG).read_text() != config:
      # Two objects cannot be replaced in one step.
      raise OptionError(
        "path",
        f"{shown(place)}, which has a model of another config.json",
        "a new address, or weights of the same config",
        "pass another address, or delete that folder",
      )
    check_writable(place / CONFIG)
    if not self.replaces:
      self._remove_weights()

  def upload(self, file: pathlib.Path, name: str | int) -> str:
    """Writes a file of weights, deletes it here, and returns its name.

    Args:
      file: File on this machine.
      name: Name of the object, or its number.
    """
    if isinstance(name, int):
      name = f"model-{self._token}-{name:05}{SUFFIX}"
    target = self._place / name
    target.store.upload(str(target), str(file))
    self._new.add(name)
    file.unlink()
    return name

  def finish(self, others: pathlib.Path, index: str | None) -> None:
    """Writes the other files, and makes the folder that of the new weights.

    Args:
      others: Folder with the files next to the weights.
      index: Text of the index; None for weights of one file in a new folder.
    """
    upload_folder(others, self._place)
    if index is not None:
      (self._place / INDEX).write_text(index)
    if self.replaces:
      self._remove_weights()
    else:
      (self._place / CONFIG).write_text(self._config)

  def _remove_weights(self) -> None:
    """Deletes weights and indices of other saves."""
    for name in self._names - self._new:
      weights = name.startswith("model") and name.endswith(SUFFIX)
      if weights or (name == INDEX and not self.replaces):
        (self._place / name).unlink(missing_ok=True)
