"""Origin of a model: what `save` keeps of the folder it was loaded from.

Guarantees: tensors that the model does not read (layers that predict further
tokens) are saved bit for bit, as long as all that it reads has the numbers of
that folder; only a tied head, and what is computed from the config, is not
stored again. Otherwise they would belong to other weights: the saved folder has
none of them, its config says so, and a warning names them. Files next to the
weights (tokenizer, chat template, generation settings, ...) are copied; code is
never copied.
Cost: a model with such tensors is compared with its folder when it is saved:
one more pass over the files, up to the first number that differs.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Shaped

from ringjax.errors import RingjaxError
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.save import host_copy
from ringjax.paths import AnyPath

if TYPE_CHECKING:
  from ringjax.models.contents import Contents

AnyArray = Shaped[np.ndarray | Array, "..."]
_log = logging.getLogger(__name__)
# Keys of a config with the number of layers that predict further tokens, and
# the type of their values.
_GUESSES: dict[str, type[int]] = {
  "mtp_num_hidden_layers": int,
  "num_mtp_modules": int,
  "num_nextn_predict_layers": int,
  "use_mtp": bool,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
  """The folder of a model, or none.

  All are equal to each other, so that models of two folders run one program.

  Attributes:
    folder: Folder with its files, as they were when they were opened.
    names: Names in the folder, by the name that `save` gives each tensor of the
      model.
    unread: Names in the folder, by the name to save, of tensors that the model
      does not read.
    lost: Reason that no tensor can be kept, or "".
    copies: Name to save of each copy of the embedding or the head -> path of
      the model's parameter, for a model with a layer that predicts further
      tokens.
  """

  folder: Folder | None = None
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  unread: Mapping[str, str] = dataclasses.field(default_factory=dict)
  lost: str = ""
  copies: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Origin)

  def __hash__(self) -> int:
    return hash(Origin)

  @property
  def copied(self) -> Mapping[str, str]:
    """The tensors to copy, if all others are unchanged."""
    return {} if self.lost else self.unread

  def kept_tensors(
    self,
    tensors: Callable[[], Iterable[tuple[str, AnyArray]]],
    written: Collection[str] = (),
  ) -> dict[str, str]:
    """The tensors to copy, the name in the folder by the name to save.

    Args:
      tensors: Function that makes the names and values that are to be saved.
      written: Names of tensors among them that the model need not have.
    """
    unread = {k: x for k, x in self.unread.items() if k not in written}
    if self.folder is None or not unread:
      return {}
    reason = self.lost or self._changed(tensors)
    if not reason:
      _log.info(
        "kept %d tensors of %s that the model does not read: %s",
        len(unread),
        self.folder.path,
        ", ".join(unread),
      )
      return dict(unread)
    names = list(unread)
    more_text = f" and {len(names) - 3} more" if len(names) > 3 else ""
    warnings.warn(
      f"left out of the saved folder: {len(names)} tensors of "
      f"{self.folder.path} that the model does not read ("
      f"{', '.join(names[:3])}{more_text}), as {reason}",
      RuntimeWarning,
      stacklevel=4,
    )
    return {}

  def _changed(
    self, tensors: Callable[[], Iterable[tuple[str, AnyArray]]]
  ) -> str:
    """Reason that the model's numbers are not those of the folder, or ""."""
    not_seen, reason = set(self.names), ""
    for name, x in tensors():
      not_seen.discard(name)
      # With several processes all gather every tensor, so none may return
      # early.
      if reason and jax.process_count() == 1:
        return reason
      value = host_copy(x)
      reason = reason or self._differs(name, value)
    if not reason and not_seen:
      reason = f"{min(not_seen)} is not in the model any more"
    if jax.process_count() > 1:
      all_same = multihost_utils.process_allgather(np.array(not reason))
      reason = reason or ("" if np.all(all_same) else "another process says so")
    return reason

  def _differs(self, name: str, value: Shaped[np.ndarray, ...]) -> str:
    """Reason that a tensor is not that of the folder, or ""."""
    assert self.folder is not None
    stored = self.names.get(name, "")
    info = self.folder.tensors.get(stored)
    if info is None or info.shape != value.shape:
      return f"{name} is not one of that folder's"
    try:
      old = self.folder.raw(stored)
    except (OSError, RingjaxError) as error:
      return f"that folder can't be read any more: {error}"
    with np.errstate(over="ignore", invalid="ignore"):
      is_same = np.array_equal(old.astype(value.dtype), value)
    return "" if is_same else f"{name} has other numbers than there"

  def stored(
    self, kept: Mapping[str, str]
  ) -> Iterator[tuple[str, Shaped[np.ndarray, ...]]]:
    """Names and values of tensors to copy."""
    for name, stored in kept.items():
      assert self.folder is not None
      yield name, self.folder.raw(stored)

  def config(
    self,
    config: Mapping[str, Any],
    kept: Mapping[str, str],
    predicting: int = 0,
  ) -> dict[str, Any]:
    """A config without the layers that are left out.

    Args:
      config: Config of the model.
      kept: Tensors that are copied, see `kept_tensors`.
      predicting: Number of layers that the model itself has to predict further
        tokens.
    """
    drops_layers = {*self.unread} - {*self.copies} and not kept
    return dict(config) | {
      key: kind(predicting)
      for key, kind in _GUESSES.items()
      if drops_layers and config.get(key)
    }

  def copy_files(self, to: pathlib.Path, place: AnyPath) -> None:
    """Copies files next to the weights into a folder that is being written.

    Args:
      to: Folder that is being written.
      place: Final path of that folder; files that exist there stay.
    """
    if self.folder is None:
      return
    files = {
      name: write
      for name, write in self.folder.companions().items()
      if not (place / name).exists()
    }
    for write in files.values():
      write(to)
    if files:
      _log.info("wrote %s of %s", ", ".join(files), self.folder.path)


def origin_of(contents: Contents, *, whole: bool, packed: bool) -> Origin:
  """The origin of a model that is read from a folder.

  Args:
    contents: Content of the folder.
    whole: Whether the model is all of the folder, and not the text model of
      one with images.
    packed: Whether its weights are quantised.
  """
  folder, unread = contents.folder, contents.unread if whole else {}
  names = {t.name: t.stored_name or t.name for t in contents.tensors}
  odd = [
    stored
    for stored in unread.values()
    if not isinstance(folder.tensors[stored].dtype, np.dtype)
  ]
  lost = ""
  if packed:
    lost = "that folder is quantised and this one is not"
  elif odd:
    lost = f"{odd[0]} is of {folder.tensors[odd[0]].dtype}, which NumPy lacks"
  by_stored = {stored: name for name, stored in unread.items()}
  copies = {
    by_stored[stored]: path
    for stored, path in contents.copies.items()
    if stored in by_stored
  }
  names |= {name: unread[name] for name in copies}
  return Origin(folder, names, unread, lost, copies)
