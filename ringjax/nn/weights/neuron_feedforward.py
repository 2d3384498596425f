"""Feedforward layers whose neurons are on disk, read when a call needs them.

Guarantees: with a resident deciding projection (the gate, or the up-projection
of a plain layer) the result is that of the layer with all weights, up to the
order of sums. With a predictor each token sums exactly the neurons predicted
for it: neither the call's other tokens nor the contents of the window matter.
Calls of many tokens, and calls that need more neurons than a window holds, read
all neurons, block by block, and compute the same sums.
Cost: a call of few tokens stops once for the host, which reads new neurons.
Memory: on the devices the rows of one layer's window, or one block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.experimental import io_callback
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from ringjax.errors import (
  CheckpointFormatError,
  MeshError,
  OptionError,
  RingjaxError,
)
from ringjax.nn.feedforward import (
  ACTIVATIONS,
  Gated,
  GatedLayer,
  Plain,
  PlainLayer,
)
from ringjax.nn.linear import Linear
from ringjax.nn.sharding_context import Attend
from ringjax.nn.weights.placed_layers import ReadFault
from ringjax.parallel import collectives

# Maximum tokens of a call that reads single neurons: more need most of them.
FEW = 64


@runtime_checkable
class HoldsNeurons(Protocol):
  """Store of neurons, see `store.flash.neuron_store`."""

  def prepare(
    self, number: int, needed: Bool[np.ndarray, " F"]
  ) -> tuple[int, int]: ...

  def fetch(
    self, number: int, size: int, ticket: int, needed: Bool[np.ndarray, " F"]
  ) -> tuple[Shaped[np.ndarray, "R P D"], Int[np.ndarray, " R"]]: ...

  def block(self, number: int, index: int) -> Shaped[np.ndarray, "R P D"]: ...


def activation(act: str, threshold: float) -> Callable[[Array], Array]:
  """An activation that is zero where its size is at most a threshold."""
  f = ACTIVATIONS[act]
  if not threshold:
    return f

  def thresholded(x: jax.Array) -> jax.Array:
    y = f(x)
    return jnp.where(jnp.abs(y) > jnp.asarray(threshold, y.dtype), y, 0)

  return thresholded


class LowRankPredictor(nnx.Module):
  """Predicts the neurons that a token needs: x . down . up + bias > 0.

  Attributes:
    down: First factor, [D, r].
    up: Second factor, [r, F].
    bias: Bias, float32 [F].
  """

  def __init__(
    self,
    down: Float[Array, "*L D r"],
    up: Float[Array, "*L r F"],
    bias: Float[Array, "*L F"],
  ):
    self.down = nnx.Param(down, axes=("embed", None))
    self.up = nnx.Param(up, axes=(None, "ffn"))
    self.bias = nnx.Param(bias, axes=("ffn",), wide=True)

  def __call__(self, x: Float[Array, "n D"]) -> Bool[Array, "n F"]:
    logits = jnp.matmul(x @ self.down[...], self.up[...])
    return logits.astype(jnp.float32) + self.bias[...][None] > 0


class NeuronFeedforward(nnx.Module):
  """The module of `Plain` or `Gated` with neurons on disk.

  Attributes:
    deciding: Resident map whose activation selects the needed neurons, or None
      with a predictor.
    predictor: Predictor of the needed neurons, or None.
    gate_bias: Bias of the deciding map where that is read, [F]; or None.
    up_bias: Bias of the up-projection of a gated layer, [F]; or None.
    down_bias: Bias of the down-projection, [D], or None.
    number: Number of the layer, int32 [], or [L] while layers share an array.
  """

  def __init__(
    self,
    base: PlainLayer | GatedLayer,
    number: Int[Array, " *L"],
    *,
    store: HoldsNeurons,
    fault: ReadFault,
    sizes: tuple[int, ...],
    block: int,
    predictor: LowRankPredictor | None,
    threshold: float,
  ):
    """Take over the resident parts of a layer.

    Args:
      base: Layer to replace.
      number: Number of the layer.
      store: Store of its neurons.
      fault: Holder of the error of a read.
      sizes: Numbers of rows that the store may return, in increasing order.
      block: Number of neurons of a block.
      predictor: Predictor instead of the resident deciding map; or None.
      threshold: See `activation`.
    """
    self.spec: Plain | Gated = base.spec
    self.store, self.fault, self.sizes = store, fault, sizes
    self.block, self.threshold = block, threshold
    gated = isinstance(base, GatedLayer)
    decides: Linear = base.gate if gated else base.up
    self.deciding = decides if predictor is None else None
    self.predictor = predictor
    self.gate_bias = decides.bias if predictor is not None else None
    self.up_bias = base.up.bias if gated else None
    self.down_bias = base.down.bias
    self.number = nnx.Param(number, axes=(), wide=True)

  def __call__(
    self, x: Float[Array, "B T D"], attend: Attend
  ) -> Float[Array, "B T D"]:
    mesh = getattr(attend, "mesh", None)
    if collectives.manual_axes() or (mesh is not None and mesh.size > 1):
      raise MeshError(
        "model",
        "feedforward neurons on disk, on a mesh",
        "a call on one device",
        "call it without a mesh, or the model that it was made of",
      )
    flat = _constant(x.reshape(-1, x.shape[-1]))
    y = self._from_window(flat) if len(flat) <= FEW else self._by_blocks(flat)
    if self.down_bias is not None:
      y = y + self.down_bias[...][None].astype(y.dtype)
    return y.reshape(x.shape)

  def _from_window(self, x: jax.Array) -> jax.Array:
    """Sum the neurons in the window, [n, D]."""
    number = self.number[...]
    chosen = self._select_neurons(x)
    needed = jnp.any(chosen.astype(bool), 0)
    branch, ticket = io_callback(
      self._guarded(self._prepare),
      (jax.ShapeDtypeStruct((), jnp.int32),) * 2,
      number,
      needed,
    )

    def sum_of_size(size: int) -> Callable[[], jax.Array]:
      def run() -> jax.Array:
        rows, ids = io_callback(
          self._guarded(lambda *args: self._fetch(size, *args)),
          (
            self._shape(size, x.dtype),
            jax.ShapeDtypeStruct((size,), jnp.int32),
          ),
          number,
          ticket,
          needed,
        )
        return self._sum(x, rows, ids, chosen).astype(x.dtype)

      return run

    branches = [
      *(sum_of_size(size) for size in self.sizes),
      lambda: self._by_blocks(x),
    ]
    return lax.switch(branch, branches)

  def _by_blocks(self, x: jax.Array) -> jax.Array:
    """Sum all neurons, [n, D]."""
    number, f = self.number[...], self.spec.hidden
    chosen = self._select_neurons(x)

    def add(index: jax.Array, y: jax.Array) -> jax.Array:
      # Not before the previous block has been used.
      index, y = lax.optimization_barrier((index, y))
      rows = io_callback(
        self._guarded(self._block),
        self._shape(self.block, x.dtype),
        number,
        index,
      )
      ids = index * self.block + jnp.arange(self.block, dtype=jnp.int32)
      return y + self._sum(x, rows, jnp.minimum(ids, f), chosen)

    start = jnp.zeros(x.shape, jnp.float32)
    return lax.fori_loop(0, -(-f // self.block), add, start).astype(x.dtype)

  def _select_neurons(self, x: Float[Array, "n D"]) -> Shaped[Array, "n F"]:
    """Activations of the deciding map; or the predicted neurons, bool."""
    if self.predictor is not None:
      return self.predictor(x)
    assert self.deciding is not None
    return activation(self.spec.act, self.threshold)(self.deciding(x))

  def _sum(
    self,
    x: Float[Array, "n D"],
    rows: Float[Array, "R P D"],
    ids: Int[Array, " R"],
    chosen: Shaped[Array, "n F"],
  ) -> Float[Array, "n D"]:
    """Sum of each token's neurons, float32; the number F means no neuron."""
    into = lambda w: lax.dot_general(
      x, w, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype
    )
    bias_of = lambda b: jnp.take(b[...], ids, mode="fill", fill_value=0)[None]
    add = lambda y, b: y if b is None else y + bias_of(b).astype(y.dtype)
    part = 0
    # Rows without a neuron have undefined contents.
    none = chosen.dtype.type(0)
    h = jnp.take(chosen, ids, axis=1, mode="fill", fill_value=none)
    counts = h.astype(bool)
    if self.predictor is not None:
      act = activation(self.spec.act, self.threshold)
      h, part = act(add(into(rows[:, 0]), self.gate_bias)), 1
    if isinstance(self.spec, Gated):
      h = h * add(into(rows[:, part]), self.up_bias)
    h = jnp.where(counts, h, jnp.zeros((), h.dtype))
    return jnp.matmul(h, rows[:, -1], preferred_element_type=jnp.float32)

  def _shape(self, rows: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    parts = 3 if isinstance(self.spec, Gated) else 2
    parts -= self.deciding is not None
    embed = self._embed
    return jax.ShapeDtypeStruct((rows, parts, embed), dtype)

  @property
  def _embed(self) -> int:
    decides: Any = self.deciding or self.predictor
    weight = decides.weight if self.predictor is None else decides.down
    return weight[...].shape[-2]

  def _prepare(
    self, number: Array | np.ndarray, needed: Array | np.ndarray
  ) -> tuple[np.ndarray, ...]:
    branch_and_ticket = self.store.prepare(int(number), np.asarray(needed))
    return tuple(np.asarray(n, np.int32) for n in branch_and_ticket)

  def _fetch(
    self,
    size: int,
    number: Array | np.ndarray,
    ticket: Array | np.ndarray,
    needed: Array | np.ndarray,
  ) -> tuple[np.ndarray, ...]:
    return self.store.fetch(int(number), size, int(ticket), np.asarray(needed))

  def _block(
    self, number: Array | np.ndarray, index: Array | np.ndarray
  ) -> np.ndarray:
    return self.store.block(int(number), int(index))

  def _guarded(self, f: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap f to store its error, which the program's caller raises."""

    def call(*args: Any) -> Any:
      try:
        return f(*args)
      except Exception as error:
        ringjax_error = error
        if not isinstance(ringjax_error, RingjaxError):
          ringjax_error = CheckpointFormatError(
            "neurons",
            f"{type(error).__name__}: {error}",
            "neurons that can be read",
            "write them again with rj.models.write_neurons",
          )
        self.fault.error, self.fault.silent = ringjax_error, False
        raise ringjax_error from error

    return call


@jax.custom_jvp
def _constant(x: jax.Array) -> jax.Array:
  """x, which raises an error when it is differentiated."""
  return x


@_constant.defjvp
def _no_gradient(primals: Any, tangents: Any) -> Any:
  raise OptionError(
    "model",
    "one whose feedforward neurons are on disk, for a gradient",
    "weights that are resident",
    "train the model that it was made of",
  )


class NotedFeedforward(nnx.Module):
  """A feedforward that reports its input and its active neurons.

  Attributes:
    base: Wrapped layer.
    number: Number of the layer, int32 [], or [L] while layers share an array.
  """

  def __init__(
    self,
    base: PlainLayer | GatedLayer,
    number: Int[Array, " *L"],
    note: Callable[[int, np.ndarray, np.ndarray], None],
    *,
    threshold: float,
  ):
    self.base, self.note, self.threshold = base, note, threshold
    self.number = nnx.Param(number, axes=(), wide=True)

  def __call__(
    self, x: Float[Array, "B T D"], attend: Attend
  ) -> Float[Array, "B T D"]:
    base = self.base
    decides = base.gate if isinstance(base, GatedLayer) else base.up
    act = activation(base.spec.act, self.threshold)
    jax.debug.callback(self._note, self.number[...], x, act(decides(x)) != 0)
    return base(x, attend)

  def _note(
    self,
    number: Array | np.ndarray,
    x: Array | np.ndarray,
    active: Array | np.ndarray,
  ) -> None:
    self.note(int(number), np.asarray(x, np.float32), np.asarray(active))
