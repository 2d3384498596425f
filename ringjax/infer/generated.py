"""What `generate` returns: new tokens, and how many belong to each row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np


# Arrays have no single truth value, by which dataclasses would compare them.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Generated:
  """New tokens of a batch, whose rows may end at different lengths.

  `new[row]` and iteration give the ids of a row without its padding, so that
  `tokenizer.decode(new[0])` is the answer. Any other index, as `new[0, :3]` or
  `new[:2]`, is one of `tokens`, which NumPy also takes for the whole:
  `np.asarray(new)` has padding.

  A row ends with the token that ended it: the stop id, or the token that
  completed a stop string. `decode` leaves out special tokens, as most stop ids
  are, but not the text of a stop string.

  Attributes:
    tokens: int32 [B, max_new_tokens], rows filled up with `pad_id`.
    lengths: int32 [B], how many tokens of each row were generated.
  """

  tokens: np.ndarray
  lengths: np.ndarray

  def __len__(self) -> int:
    """The number of rows."""
    return len(self.tokens)

  def __getitem__(self, key: Any) -> Any:
    """A row without padding, int32 [lengths[row]]; else `tokens[key]`."""
    if isinstance(key, int | np.integer):
      return self.tokens[key, : self.lengths[key]]
    return self.tokens[key]

  def __iter__(self) -> Iterator[np.ndarray]:
    """The rows without padding."""
    return (self[row] for row in range(len(self)))

  def __array__(
    self, dtype: Any = None, copy: bool | None = None
  ) -> np.ndarray:
    """`tokens`, as NumPy asks for an array."""
    return np.array(self.tokens, dtype, copy=copy)
