"""The neurons that the last calls needed, in a buffer of fixed size.

Guarantees: behind every step the buffer holds exactly the union of the sets of
the last k steps, of fewer if that many do not fit; the used rows are the first
`num_used`, each neuron once. A step whose read fails leaves a whole window.
Cost: a step of which c neurons go moves at most c rows, and reads only neurons
that were not there.
Memory: the buffer, allocated once, and 8 bytes for each of the layer's neurons
and 4 for each member of the last k sets: `nbytes`.
Ref: Alizadeh et al. 2023, LLM in a Flash, arXiv 2312.11514 (section 3.3).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Int, Shaped


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowStep:
  """What one step did.

  Attributes:
    needed: neurons that it asked for.
    fresh: of these, that had to be read.
    deleted: neurons that went.
    forgotten: sets that went before they were k steps old, for lack of rows.
  """

  needed: int
  fresh: int
  deleted: int
  forgotten: int


class NeuronWindow:
  """A layer's window.

  Attributes:
    rows: [max_rows, ...], what is known of each neuron.
    pointer: int32 [max_rows], the neuron in each row; `neurons` for none.
    num_used: rows that hold a neuron, the first ones.
    window: k, how many steps a neuron stays.
  """

  def __init__(
    self,
    neurons: int,
    max_rows: int,
    shape: tuple[int, ...],
    dtype: np.dtype,
    *,
    window: int,
  ):
    """Allocates an empty window.

    Args:
      neurons: of the layer, F.
      max_rows: that the buffer has.
      shape: of a row.
      dtype: of a row.
      window: k.
    """
    self.neurons, self.window, self.num_used = neurons, window, 0
    self.rows = np.zeros((max_rows, *shape), dtype)
    self.pointer = np.full(max_rows, neurons, np.int32)
    self._row_of = np.full(neurons, -1, np.int32)
    # In how many of the recent sets a neuron is.
    self._count = np.zeros(neurons, np.int32)
    self._recent: collections.deque[np.ndarray] = collections.deque()

  @property
  def max_rows(self) -> int:
    """Rows of the buffer."""
    return len(self.pointer)

  @property
  def nbytes(self) -> int:
    """Bytes that it has, and may have at most."""
    fixed = (self.rows, self.pointer, self._row_of, self._count)
    sets = 4 * self.max_rows * (self.window + 1)
    return sum(x.nbytes for x in fixed) + sets

  def rows_of(self, ids: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """In which row each neuron is, -1 for none."""
    return self._row_of[ids]

  def fits(self, ids: Int[np.ndarray, " n"]) -> bool:
    """Whether a step may ask for these."""
    return len(ids) <= self.max_rows

  def step(
    self,
    ids: Int[np.ndarray, " n"],
    read: Callable[[np.ndarray, Shaped[np.ndarray, "m ..."]], None],
  ) -> WindowStep:
    """Has neurons in the buffer, and those of the k - 1 steps before.

    Args:
      ids: int32, in increasing order, each once; they fit.
      read: called with those that are not there, in increasing order, and the
        rows that they go to.
    """
    fresh = ids[self._row_of[ids] < 0]
    self._count[ids] += 1
    self._recent.append(ids)
    gone, forgotten = [np.zeros(0, np.int32)], 0
    left = self.num_used + len(fresh)
    while len(self._recent) > self.window or left > self.max_rows:
      early = len(self._recent) <= self.window
      old = self._forget(self._recent.popleft())
      forgotten += early
      left -= len(old)
      gone.append(old)
    out = np.concatenate(gone)
    self._delete(out)
    at = self.num_used
    try:
      if len(fresh):
        read(fresh, self.rows[at : at + len(fresh)])
    except BaseException:
      self._delete(self._forget(self._recent.pop()))
      raise
    self.num_used = at + len(fresh)
    self.pointer[at : self.num_used] = fresh
    self._row_of[fresh] = np.arange(at, self.num_used)
    return WindowStep(
      needed=len(ids),
      fresh=len(fresh),
      deleted=len(out),
      forgotten=forgotten,
    )

  def _forget(self, ids: np.ndarray) -> np.ndarray:
    """Those of a set that is over, that no other set has and that are here."""
    self._count[ids] -= 1
    return ids[(self._count[ids] == 0) & (self._row_of[ids] >= 0)]

  def _delete(self, ids: np.ndarray) -> None:
    """Fills the rows of neurons that go with the last ones that stay."""
    rows = self._row_of[ids]
    left = self.num_used - len(ids)
    self._row_of[ids] = -1
    holes = rows[rows < left]
    tail = np.arange(left, self.num_used)
    movers = tail[self._row_of[self.pointer[tail]] >= 0]
    self.rows[holes] = self.rows[movers]
    self.pointer[holes] = self.pointer[movers]
    self._row_of[self.pointer[holes]] = holes
    self.pointer[left : self.num_used] = self.neurons
    self.num_used = left
