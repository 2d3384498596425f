"""The neurons that the last calls needed, in a buffer of fixed size.

Guarantees: after every step the buffer holds exactly the union of the sets of
the last k steps, of fewer if that many do not fit; the used rows are the first
`num_used`, each neuron once. A step whose read fails leaves a valid window.
Cost: a step that deletes c neurons moves at most c rows, and reads only neurons
that are not in the buffer.
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
  """Counters of one step of a window.

  Attributes:
    needed: Number of neurons that the step needed.
    fresh: Number of these that had to be read.
    deleted: Number of neurons deleted from the buffer.
    forgotten: Number of sets dropped before they were k steps old, for lack of
      rows.
  """

  needed: int
  fresh: int
  deleted: int
  forgotten: int


class NeuronWindow:
  """A layer's window of neurons.

  Attributes:
    rows: Weights of the neurons, [max_rows, ...].
    pointer: Neuron in each row, int32 [max_rows]; `neurons` for none.
    num_used: Number of rows that hold a neuron, the first ones.
    window: Number of steps that a neuron stays, k.
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
      neurons: Number of neurons of the layer, F.
      max_rows: Number of rows of the buffer.
      shape: Shape of a row.
      dtype: Dtype of a row.
      window: Number of steps that a neuron stays, k.
    """
    self.neurons, self.window, self.num_used = neurons, window, 0
    self.rows = np.zeros((max_rows, *shape), dtype)
    self.pointer = np.full(max_rows, neurons, np.int32)
    self._row_of = np.full(neurons, -1, np.int32)
    # Number of the recent sets that have a neuron.
    self._count = np.zeros(neurons, np.int32)
    self._recent: collections.deque[np.ndarray] = collections.deque()

  @property
  def max_rows(self) -> int:
    """Number of rows of the buffer."""
    return len(self.pointer)

  @property
  def nbytes(self) -> int:
    """Upper bound of the bytes of buffer and bookkeeping."""
    fixed = (self.rows, self.pointer, self._row_of, self._count)
    sets = 4 * self.max_rows * (self.window + 1)
    return sum(array.nbytes for array in fixed) + sets

  def rows_of(self, ids: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Return the row of each neuron, -1 for none."""
    return self._row_of[ids]

  def fits(self, ids: Int[np.ndarray, " n"]) -> bool:
    """Whether the buffer has enough rows for these neurons."""
    return len(ids) <= self.max_rows

  def step(
    self,
    ids: Int[np.ndarray, " n"],
    read: Callable[[np.ndarray, Shaped[np.ndarray, "m ..."]], None],
  ) -> WindowStep:
    """Brings neurons into the buffer; those of k - 1 steps before may stay.

    Args:
      ids: Neurons, int32, in increasing order, each once; they fit.
      read: Called with the neurons that are not in the buffer, in increasing
        order, and the rows for them.
    """
    fresh = ids[self._row_of[ids] < 0]
    self._count[ids] += 1
    self._recent.append(ids)
    gone, forgotten = [np.zeros(0, np.int32)], 0
    num_left = self.num_used + len(fresh)
    while len(self._recent) > self.window or num_left > self.max_rows:
      too_many = len(self._recent) <= self.window
      dropped = self._forget(self._recent.popleft())
      forgotten += too_many
      num_left -= len(dropped)
      gone.append(dropped)
    deleted = np.concatenate(gone)
    self._delete(deleted)
    start = self.num_used
    try:
      if len(fresh):
        read(fresh, self.rows[start : start + len(fresh)])
    except BaseException:
      self._delete(self._forget(self._recent.pop()))
      raise
    self.num_used = start + len(fresh)
    self.pointer[start : self.num_used] = fresh
    self._row_of[fresh] = np.arange(start, self.num_used)
    return WindowStep(
      needed=len(ids),
      fresh=len(fresh),
      deleted=len(deleted),
      forgotten=forgotten,
    )

  def _forget(self, ids: np.ndarray) -> np.ndarray:
    """Drops a set: returns its neurons in the buffer that no other set has."""
    self._count[ids] -= 1
    return ids[(self._count[ids] == 0) & (self._row_of[ids] >= 0)]

  def _delete(self, ids: np.ndarray) -> None:
    """Deletes neurons: fills their rows with the last ones that stay."""
    rows = self._row_of[ids]
    num_left = self.num_used - len(ids)
    self._row_of[ids] = -1
    holes = rows[rows < num_left]
    tail = np.arange(num_left, self.num_used)
    movers = tail[self._row_of[self.pointer[tail]] >= 0]
    self.rows[holes] = self.rows[movers]
    self.pointer[holes] = self.pointer[movers]
    self._row_of[self.pointer[holes]] = holes
    self.pointer[num_left : self.num_used] = self.neurons
    self.num_used = num_left
