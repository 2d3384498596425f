"""Grain's data as documents of a loader, and a loader as a dataset of Grain.

Guarantees: the rows are those of `Loader`; the state of an iterator is the
loader's own, so that Grain's checkpoints resume bit for bit.
Ref: https://google-grain.readthedocs.io.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from ringjax.data.batches.loader import Loader
from ringjax.data.batches.packing import PackedBatch, as_document
from ringjax.errors import DataError, OptionError


@runtime_checkable
class RecordSource(Protocol):
  """Records by their index, as those of Grain and of Hugging Face datasets."""

  def __len__(self) -> int:
    """Number of records."""
    ...

  def __getitem__(self, record: int, /) -> Any:
    """A record."""
    ...


class RecordDocuments:
  """Records of a random-access source as documents, read when they are packed.

  All are read once to know their lengths, and each again when a batch needs it:
  in memory are the lengths alone. A source is a `grain.sources` one, a
  `grain.MapDataset` of records, or anything else with a length and an index.

  Args:
    source: Records, which must not change.
    encode: Function of a record that returns its token ids, int [n]; default:
      records are token ids.

  Attributes:
    lengths: Tokens of each document, int64 [N].
    fingerprint: Digest of all tokens.

  Raises:
    DataError: If a record's tokens are not ids.
  """

  def __init__(
    self,
    source: RecordSource,
    encode: Callable[[Any], Any] = lambda record: record,
  ):
    self._source, self._encode = source, encode
    hashed = hashlib.sha256()
    lengths = []
    for record in range(len(source)):
      ids = self._ids(record)
      lengths.append(ids.size)
      hashed.update(np.int64(ids.size).tobytes() + ids.tobytes())
    self.lengths = np.array(lengths, np.int64)
    self.fingerprint = hashed.hexdigest()[:16]

  def __len__(self) -> int:
    return len(self.lengths)

  def read(
    self, document: int, start: int, stop: int
  ) -> tuple[Int32[np.ndarray, " n"], None]:
    """Tokens `start` to `stop` of a document, or fewer, and no weights.

    Raises:
      DataError: If the record has changed its length.
    """
    ids = self._ids(document)
    if ids.size != self.lengths[document]:
      raise DataError(
        f"source[{document}]",
        f"{ids.size} tokens",
        f"{self.lengths[document]}, as when it was read first",
        "leave the source alone, and encode without random choices",
      )
    return ids[start:stop], None

  def _ids(self, record: int) -> Int32[np.ndarray, " n"]:
    return as_document(f"source[{record}]", self._encode(self._source[record]))


def grain_dataset(make: Callable[[], Loader]) -> Any:
  """A `grain.IterDataset` whose elements are the batches of a loader.

  Its iterators have the loader's state: `get_state` and `set_state`, and with
  them Grain's checkpoints, resume exactly, on another number of hosts too.
  Processes of `mp_prefetch` are refused: a loader prepares batches in a thread
  (`prefetch=`), and gives each host its rows (`host=`, `hosts=`).

  Args:
    make: Function that makes a loader; called for each iterator.

  Raises:
    OptionError: If Grain is not installed.
  """
  try:
    grain: Any = importlib.import_module("grain")
  except ImportError:
    raise OptionError(
      "grain_dataset",
      "a Python without grain",
      "the extra `grain`",
      "pip install 'ringjax[grain]'",
    ) from None

  class LoaderIterator(grain.DatasetIterator):
    """Batches of one loader."""

    def __init__(self, loader: Loader):
      super().__init__()
      self._loader = loader

    def __next__(self) -> PackedBatch:
      return next(self._loader)

    def get_state(self) -> dict[str, Any]:
      """State of the loader."""
      return self._loader.state()

    def set_state(self, state: dict[str, Any]) -> None:
      """Resumes at a state, see `Loader.restore`."""
      self._loader.restore(state)

    def close(self) -> None:
      """Ends the loader's thread."""
      self._loader.close()
      super().close()

  class LoaderDataset(grain.IterDataset):
    """Dataset that makes a loader for each iterator."""

    def __iter__(self) -> LoaderIterator:
      return LoaderIterator(make())

    def __reduce__(self) -> Any:
      raise OptionError(
        "grain_dataset",
        "a loader for another process (mp_prefetch)",
        "a loader of this process, whose thread prepares batches",
        "pass prefetch= to rj.data.Loader, and leave mp_prefetch out",
      )

  return LoaderDataset()
