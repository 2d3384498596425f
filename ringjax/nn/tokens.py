"""The tokens of one call: coordinates, and tables of their rotations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ringjax.nn.sums.choice_sums import ChoiceRecord
from ringjax.nn.sums.layer_record import LayerRecord, LayerSums
from ringjax.nn.sums.router_sums import RouterRecord
from ringjax.nn.sums.score_sums import ScoreRecord
from ringjax.nn.sums.tile_sums import PageRecord, PageSums, TileRecord, TileSums
from ringjax.nn.weights.adapter_rows import current_adapter_rows
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rope, Rotation
from ringjax.typing import Lengths

R = TypeVar(
  "R", RouterRecord, ChoiceRecord, ScoreRecord, TileRecord, PageRecord
)
# What a layer records, and its sums.
Record = LayerRecord | TileRecord | PageRecord
Sums = LayerSums | TileSums | PageSums

# Attributes that may have a row for each row of a call.
_ARRAYS = ("pos", "seg", "order", "length", "ids", "embedded", "adapters")
_TABLE = "table of rotation "


class Tokens:
  """Coordinates of a call's tokens, with the tables of its rotations.

  Built once, outside of the loop over layers.

  Attributes:
    pos: Positions, int32 [B or 1, T].
    seg: Segments, int32 [B or 1, T], 0 for padding.
    order: Index of each token in its document, int32 [B or 1, T], where a
      training moves positions; None: positions are these indices.
    derived: Whether positions are those of the layout, so that attention may
      assume them before it sees them.
    segmented: Whether segments matter.
    length: Number of tokens of the whole context.
    inputs: Function from a layer's number to its inputs from the tokens' ids,
      [B, T, P], or from that of a use of shared blocks to the use; None for
      models without them. Set with the embeddings.
    ids: Token ids, int32 [B, T]; None where a call has none. Set with the
      embeddings.
    embedded: Embeddings of the tokens, [B, T, D]; set with them for a model
      that has a `PredictLayer`, else None.
    last_norm: Norm between the model's last layer and its head, likewise.
    predicting: Whether a `PredictLayer` returns its output, too.
    tapped: Residual stream [B, T, D] before layers, by their numbers; set by
      the stack where a layer reads it.
    tree: Coordinates [B, T] of drafted tokens among themselves, or None; see
      `ops.ancestors`.
    recorder: Function from the tokens that are no padding to the record that a
      layer fills, or None; set before the layers run.
    recorded: Sums of each run's layers, a tuple of those of its positions,
      [repeats, ...], None for a layer that records nothing; set by the stack.
    record: Record of the layer that reads these tokens.
    adapters: Adapter of each row, int32 [B], that `adapter_rows` had set when
      these tokens were made, or None.
    handed: Numbers [B, T, n] from the layer before, which the layer replaces by
      those for the next one; None for models without.
  """

  def __init__(
    self,
    pos: Int[Array, "#B T"],
    seg: Int[Array, "#B T"],
    *,
    derived: bool,
    segmented: bool,
    ropes: Iterable[Rope],
    length: Lengths,
    tree: Coords | None = None,
    log_factors: Float[Array, " half"] | None = None,
  ):
    self.pos, self.seg, self.tree = pos, seg, tree
    self.order: Int[Array, "#B T"] | None = None
    self.derived, self.segmented = derived, segmented
    self.length = length
    self.inputs: Callable[[Any], Any] | None = None
    self.ids: Int[Array, "B T"] | None = None
    self.embedded: Float[Array, "B T D"] | None = None
    self.last_norm: Callable[[Array], Array] | None = None
    self.predicting = False
    self.tapped: dict[int, Float[Array, "B T D"]] = {}
    self.recorder: Callable[[Array], Record] | None = None
    self.recorded: tuple[tuple[Sums | None, ...], ...] = ()
    self.record: Record | None = None
    self.adapters: Int[Array, " B"] | None = current_adapter_rows()
    self.handed: Float[Array, "B T n"] | None = None
    self._log_factors = log_factors
    self._tables = {
      rope: rope.tables(pos, length, log_factors) for rope in ropes
    }

  @property
  def at(self) -> Coords:
    batch = max(self.pos.shape[0], self.seg.shape[0])
    shape = (batch, self.pos.shape[1])
    return Coords(
      jnp.broadcast_to(self.pos, shape), jnp.broadcast_to(self.seg, shape)
    )

  def ordered(self) -> Tokens:
    """These tokens, by their order for masks; rotations are of positions."""
    if self.order is None:
      return self
    tokens = copy.copy(self)
    tokens.pos, tokens.order = self.order, None
    return tokens

  def of_layer(self) -> Tokens:
    """These tokens, with a record of one layer if there is a recorder."""
    if self.recorder is None:
      return self
    tokens = copy.copy(self)
    tokens.record = self.recorder(self.seg > 0)
    return tokens

  def handing(self, numbers: Float[Array, "B T n"]) -> Tokens:
    """These tokens, with numbers that the layer before hands on."""
    tokens = copy.copy(self)
    tokens.handed = numbers
    return tokens

  def record_of(self, kind: type[R]) -> R | None:
    """The layer's record of this class, or None."""
    record: Any = self.record
    parts = record.parts if isinstance(record, LayerRecord) else (record,)
    return next((part for part in parts if isinstance(part, kind)), None)

  def by_row(self, batch: int) -> dict[str, Any]:
    """Arrays of these tokens that have a row for each of `batch`, by name."""
    arrays = {name: getattr(self, name) for name in _ARRAYS}
    arrays |= {
      f"{_TABLE}{n}": table for n, table in enumerate(self._tables.values())
    }
    # An array of one row is that of all rows.
    return {
      name: array
      for name, array in arrays.items()
      if all(np.shape(x)[:1] == (batch,) for x in jax.tree.leaves(array))
      and jax.tree.leaves(array)
    }

  def of_rows(self, arrays: dict[str, Any]) -> Tokens:
    """These tokens, with the arrays of other rows in place of `by_row`'s."""
    tokens = copy.copy(self)
    for name in _ARRAYS:
      setattr(tokens, name, arrays.get(name, getattr(self, name)))
    tokens._tables = {
      rope: arrays.get(f"{_TABLE}{n}", table)
      for n, (rope, table) in enumerate(self._tables.items())
    }
    return tokens

  def of_tile(
    self,
    take: Callable[[Array], Array],
    take_row: Callable[[Array], Array],
    is_filled: Bool[Array, "1 t"],
  ) -> Tokens:
    """Restrict to a tile of the call's tokens.

    Not for layers that read `inputs`, nor for drafted trees.

    Args:
      take: Function that takes the tile's part of an array [B, T, ...].
      take_row: Function that takes the row of the tile from an array [B, ...].
      is_filled: Whether each of its places holds a token.
    """
    assert self.inputs is None
    assert self.tree is None
    tile = copy.copy(self)
    tile.pos = take(self.pos)
    tile.order = None if self.order is None else take(self.order)
    tile.ids = None if self.ids is None else take(self.ids)
    tile.embedded = None if self.embedded is None else take(self.embedded)
    tile.tapped = {number: take(x) for number, x in self.tapped.items()}
    tile.seg = jnp.where(is_filled, take(self.seg), 0)
    if np.ndim(self.length):
      tile.length = take_row(jnp.asarray(self.length))
    if self.adapters is not None:
      tile.adapters = take_row(self.adapters)
    tile._tables = {
      rope: (take(cosines), take(sines))
      for rope, (cosines, sines) in self._tables.items()
    }
    return tile

  def rotation(
    self,
    rope: Rope | None,
    *,
    first: int = 0,
    after: Callable[[Array], Array] | None = None,
  ) -> Rotation:
    """Make the rotation that turns a projection into a key, see `Rotation`."""
    return Rotation(
      rope=rope,
      first=first,
      length=self.length,
      tables=None if rope is None else self._tables[rope],
      after=after,
      log_factors=self._log_factors,
    )

  def rotate(
    self, rope: Rope | None, x: Float[Array, "B T N H"]
  ) -> Float[Array, "B T N H"]:
    """Rotate queries or keys, [B, T, heads, H]; None leaves them unchanged."""
    return x if rope is None else rope.rotate(x, self._tables[rope])
