"""Feedforward layers whose neurons are on disk, read when a call needs them.

Guarantees: with a resident deciding projection (the gate, or the up-projection
of a plain layer) the result is that of the layer with all weights, up to the
order of sums. With a predictor each token sums the neurons that are named for
it, and no other: neither the call's other tokens nor what is in the window
matter. Calls of many tokens, and those that need more neurons than a window
holds, read all neurons, block by block, and sum the same.
Cost: a call of few tokens stops once for the host, which reads what is new.
Memory: on the devices the rows of one layer's window, or one block.
Ref: Alizadeh et al. 2023, LLM in a Flash, arXiv 2312.11514.
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
from ringjax.nn.placed import ReadFault
from ringjax.nn.sharding_context import Attend
from ringjax.parallel import collectives

# Tokens of a call for which single neurons are read: more need most of them.
FEW = 64


@runtime_checkable
class HoldsNeurons(Protocol):
  """What has neurons, see `store.neuron_store`."""

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

  def cut(x: jax.Array) -> jax.Array:
    y = f(x)
    return jnp.where(jnp.abs(y) > jnp.asarray(threshold, y.dtype), y, 0)

  return cut


class LowRankPredictor(nnx.Module):
  """Which neurons a token needs: x . down . up + bias is above zero.

  Attributes:
    down: [D, r].
    up: [r, F].
    bias: [F], float32.
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
    found = jnp.matmul(x @ self.down[...], self.up[...])
    return found.astype(jnp.float32) + self.bias[...][None] > 0


class NeuronFeedforward(nnx.Module):
  """The module of `Plain` or `Gated` with neurons on disk.

  Attributes:
    deciding: the resident map whose activation says which neurons are needed,
      or None with a predictor.
    predictor: says it without that map.
    gate_bias: [F], of the deciding map where that is read; or None.
    up_bias: [F], of the up-projection of a gated layer; or None.
    down_bias: [D], or None.
    number: int32 [], of the layer, or [L] while layers share an array.
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
    """Takes over what is resident of a layer.

    Args:
      base: the layer.
      number: of the layer.
      store: has its neurons.
      fault: where the error of a read is kept.
      sizes: rows that the store returns, in increasing order.
      block: neurons of a block.
      predictor: in place of the resident map that decides; or None.
      threshold: see `activation`.
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
    y = self._few(flat) if len(flat) <= FEW else self._all(flat)
    if self.down_bias is not None:
      y = y + self.down_bias[...][None].astype(y.dtype)
    return y.reshape(x.shape)

  def _few(self, x: jax.Array) -> jax.Array:
    """Of the neurons in the window, [n, D]."""
    number = self.number[...]
    chosen = self._chosen(x)
    needed = jnp.any(chosen.astype(bool), 0)
    branch, ticket = io_callback(
      self._guarded(self._prepare),
      (jax.ShapeDtypeStruct((), jnp.int32),) * 2,
      number,
      needed,
    )

    def some(size: int) -> Callable[[], jax.Array]:
      def run() -> jax.Array:
        rows, ids = io_callback(
          self._guarded(lambda *said: self._fetch(size, *said)),
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

    every = [*(some(size) for size in self.sizes), lambda: self._all(x)]
    return lax.switch(branch, every)

  def _all(self, x: jax.Array) -> jax.Array:
    """Of all neurons, [n, D]."""
    number, f = self.number[...], self.spec.hidden
    chosen = self._chosen(x)

    def add(index: jax.Array, y: jax.Array) -> jax.Array:
      # Not before the block before has been used.
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

  def _chosen(self, x: Float[Array, "n D"]) -> Shaped[Array, "n F"]:
    """Activations of the deciding map; or which neurons are named, bool."""
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
    """What each token's neurons add up to, float32; number F is none."""
    into = lambda w: lax.dot_general(
      x, w, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype
    )
    of = lambda b: jnp.take(b[...], ids, mode="fill", fill_value=0)[None]
    add = lambda y, b: y if b is None else y + of(b).astype(y.dtype)
    part = 0
    # A row without a neuron has what was there before.
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

  def _shape(self, rows: int, dtype: Any) -> jax.ShapeDtypeStruct:
    parts = 3 if isinstance(self.spec, Gated) else 2
    parts -= self.deciding is not None
    embed = self._embed
    return jax.ShapeDtypeStruct((rows, parts, embed), dtype)

  @property
  def _embed(self) -> int:
    decides: Any = self.deciding or self.predictor
    weight = decides.weight if self.predictor is None else decides.down
    return weight[...].shape[-2]

  def _prepare(self, number: Any, needed: Any) -> tuple[np.ndarray, ...]:
    found = self.store.prepare(int(number), np.asarray(needed))
    return tuple(np.asarray(n, np.int32) for n in found)

  def _fetch(
    self, size: int, number: Any, ticket: Any, needed: Any
  ) -> tuple[np.ndarray, ...]:
    return self.store.fetch(int(number), size, int(ticket), np.asarray(needed))

  def _block(self, number: Any, index: Any) -> np.ndarray:
    return self.store.block(int(number), int(index))

  def _guarded(self, f: Callable[..., Any]) -> Callable[..., Any]:
    """f, whose error is raised by who called the program."""

    def call(*said: Any) -> Any:
      try:
        return f(*said)
      except Exception as error:
        found = error
        if not isinstance(found, RingjaxError):
          found = CheckpointFormatError(
            "neurons",
            f"{type(error).__name__}: {error}",
            "neurons that can be read",
            "write them again with rj.models.write_neurons",
          )
        self.fault.error, self.fault.silent = found, False
        raise found from error

    return call


@jax.custom_jvp
def _constant(x: jax.Array) -> jax.Array:
  """x, of which nothing is differentiated."""
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
  """A feedforward that tells its input, and which neurons were active.

  Attributes:
    base: the layer.
    number: int32 [], of the layer, or [L] while layers share an array.
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

  def _note(self, number: Any, x: Any, active: Any) -> None:
    self.note(int(number), np.asarray(x, np.float32), np.asarray(active))
