"""Functions over a sequence that may be sharded: common parts.

Guarantees: `run` calls a function of one shard's tokens where the tokens are:
once, on one device; under one shard_map over the sequence's axis, for global
arrays; directly, inside a caller's shard_map or vmap. Other automatic mesh
axes are left to the compiler; explicit ones follow the dimensions that they
shard.
Cost: where a length does not divide, a copy of each operand and result; none
otherwise. Nothing is sent here, except for an explicit sequence axis that such
a length cannot be sharded over: its results are gathered.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Shaped

from ringjax.checks import FLOATS, as_array
from ringjax.errors import (
  DtypeError,
  InputTypeError,
  MeshError,
  OptionError,
  ShapeError,
)
from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import (
  AUTO,
  CallSharding,
  locate,
  manual_over,
)
from ringjax.parallel.layout import (
  Contiguous,
  Layout,
  Uneven,
  into_slots,
  out_of_slots,
  slots_of,
)
from ringjax.typing import Index

_LETTERS = "bt" + "acdefghijklmnopqrsuvwxyz"


@dataclasses.dataclass(frozen=True)
class Shards:
  """Sharding of a sequence: static, and the same on all shards.

  Attributes:
    layout: Order of the tokens; `Contiguous()` on one device.
    axis: Mesh axis of the shards, None on one device.
    size: Number of shards.
    length: Tokens of the sequence; positions at and beyond it are padding.
    local: Tokens of a shard, padding included.
  """

  layout: Layout
  axis: str | None
  size: int
  length: int
  local: int

  @classmethod
  def of(cls, layout: Layout, place: CallSharding, length: int) -> Shards:
    """Describe shards; `length` counts the rows of all shards together."""
    local = layout.local_length(length, place.size)
    if isinstance(layout, Uneven):
      length = sum(layout.counts)
    # One shard has all tokens in natural order, whatever the layout.
    layout = layout if place.size > 1 else Contiguous()
    assert not isinstance(place.axis, tuple)
    return cls(layout, place.axis, place.size, length, local)

  @property
  def index(self) -> Index:
    """Index of this shard."""
    return 0 if self.axis is None else collectives.axis_index(self.axis)

  @property
  def positions(self) -> Int[Array, " T"]:
    """Positions of this shard's slots, int32 [local]."""
    return self.layout.positions(self.index, self.size, self.local)

  @property
  def counts(self) -> Int[np.ndarray, " R"]:
    """Number of tokens of each shard, [R], if it holds consecutive ones."""
    if isinstance(self.layout, Uneven):
      return np.asarray(self.layout.counts)
    first = np.arange(self.size) * self.local
    return np.clip(self.length - first, 0, self.local)

  @property
  def real(self) -> Bool[Array, " T"] | None:
    """Slots that are not padding, bool [local]; None if all are tokens."""
    if self.length == self.size * self.local:
      return None
    return self.positions < self.length


def run(
  f: Callable[..., tuple[Array, ...]],
  place: CallSharding,
  layout: Layout,
  x: Sequence[Shaped[Array, " ..."] | None],
  dims: Sequence[str],
  outs: Sequence[str],
) -> tuple[Shaped[Array, " ..."], ...]:
  """Call f(shards, *x) where the tokens are.

  Args:
    f: Function of one shard's part of x; hashable, and the same one for the
      same call, or each call outside of a jit compiles again.
    place: Sharding that `locate` found.
    layout: Order of the tokens on the shards.
    x: Operands; the first holds tokens, and None is passed on.
    dims: A letter for each dimension of each operand. "t" is the sequence, and
      its arrays are split; dimensions of one letter are sharded alike over
      explicit mesh axes, and those of a capital letter are whole.
    outs: Letters for the results. Those without "t" are the same on all shards.

  Returns:
    The results of f, without the padding that was inserted.
  """
  assert x[0] is not None
  length = x[0].shape[1]
  if isinstance(place.axis, tuple):
    raise MeshError(
      "axis",
      repr(place.axis),
      "one mesh axis",
      "shard the sequence over one axis, in a mesh that has it",
    )
  if place.manual:
    expected = layout.check_local_length(length) if place.size > 1 else None
    shards = Shards.of(layout, place, length * place.size)
    if expected is None and shards.local != length:
      expected = f"{shards.local}"
    if expected:
      raise ShapeError(
        "sequence",
        f"{length} tokens a shard",
        f"{expected} in the layout {layout}",
        "pad the sequence, or call outside of shard_map",
      )
    return _run_shard(f, shards, tuple(x), tuple(dims))
  shards = Shards.of(layout, place, length)
  if place.mesh is None:
    return _jitted_run_shard(f, shards, tuple(x), tuple(dims))
  mesh = place.mesh
  if isinstance(mesh, Mesh):
    x = [_to_mesh(a, mesh, d, place.axis) for a, d in zip(x, dims, strict=True)]
  return _on_mesh(f, shards, place, tuple(dims), tuple(outs), tuple(x))


def letters(rank: int) -> str:
  """Letters for dimensions [B, T, ...] of elementwise operands."""
  return _LETTERS[:rank]


def _run_shard(
  f: Callable[..., Any],
  shards: Shards,
  x: tuple[Any, ...],
  dims: tuple[str, ...],
) -> tuple[Any, ...]:
  # A caller may pass the same tokens to all shards; they vary from here on.
  axes = () if shards.axis is None else (shards.axis,)
  operands = (
    collectives.vary(a, axes) if "t" in d else a
    for a, d in zip(x, dims, strict=True)
  )
  return f(shards, *operands)


# Compiled here: without this, each call outside of a jit would compile its
# loops again.
_jitted_run_shard = jax.jit(_run_shard, static_argnums=(0, 1, 3))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _on_mesh(
  f: Callable[..., Any],
  shards: Shards,
  place: CallSharding,
  dims: tuple[str, ...],
  outs: tuple[str, ...],
  x: tuple[Any, ...],
) -> tuple[Any, ...]:
  mesh, length = place.mesh, x[0].shape[1]
  assert mesh is not None
  slots = (
    None if place.size == 1 else slots_of(shards.layout, length, shards.size)
  )
  x = tuple(
    into_slots(a, slots, 1) if a is not None and "t" in d else a
    for a, d in zip(x, dims, strict=True)
  )
  explicit = {
    a
    for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    if kind == AxisType.Explicit
  }
  axes_of_dim = _axes_of(x, dims, mesh, shards.axis) if explicit else {}
  if place.axis is not None:
    axes_of_dim["t"] = place.axis
  specs = tuple(_spec(a, d, axes_of_dim) for a, d in zip(x, dims, strict=True))
  if explicit:
    x = tuple(_reshard(a, mesh, s) for a, s in zip(x, specs, strict=True))
  names = explicit | {*collectives.names(place.axis)}
  results = jax.shard_map(
    lambda *x: _run_shard(f, shards, x, dims),
    mesh=mesh,
    in_specs=specs,
    out_specs=tuple(P(*map(axes_of_dim.get, d)) for d in outs),
    **(manual_over(mesh, names) if names else {}),
  )(*x)
  if slots is None:
    return results
  if explicit:
    # Explicit shardings cannot have shards of unequal lengths.
    axes_of_dim["t"] = None
    results = (
      _reshard(a, mesh, P(*map(axes_of_dim.get, d)))
      for a, d in zip(results, outs, strict=True)
    )
  return tuple(
    out_of_slots(a, slots) if "t" in d else a
    for a, d in zip(results, outs, strict=True)
  )


def _axes_of(
  x: Sequence[Array | None],
  dims: Sequence[str],
  mesh: Mesh | AbstractMesh,
  axis: str | None,
) -> dict[str, Any]:
  """Explicit mesh axes of each letter, as in the operands' shardings."""
  axes_of_dim: dict[str, Any] = {}
  used = {axis}
  for a, letters_ in zip(x, dims, strict=True):
    sharding = None if a is None else jax.typeof(a).sharding
    if sharding is None or sharding.mesh.empty:
      continue
    for d, entry in zip(letters_, tuple(sharding.spec), strict=False):
      axes = entry if isinstance(entry, tuple) else (entry,)
      available = entry is not None and not used & set(axes)
      if d == "t" or d.isupper() or d in axes_of_dim or not available:
        continue
      axes_of_dim[d] = entry
      used |= set(axes)
  for a, letters_ in zip(x, dims, strict=True):
    for d, n in zip(letters_, () if a is None else a.shape, strict=False):
      entry = axes_of_dim.get(d)
      axes = entry if isinstance(entry, tuple) else (entry,)
      size = 1 if entry is None else math.prod(mesh.shape[i] for i in axes)
      if n > 1 and n % size:
        raise MeshError(
          "sharding",
          f"a dimension of {n} over the {size} shards of {axes}",
          "one that they divide",
          "reshard the operands over a smaller axis",
        )
  return axes_of_dim


def _spec(x: Array | None, dims: str, axes_of_dim: dict[str, Any]) -> P | None:
  if x is None:
    return None
  return P(
    *(
      axes_of_dim.get(d) if n > 1 or d == "t" else None
      for d, n in zip(dims, x.shape, strict=True)
    )
  )


def _reshard(x: Array | None, mesh: Mesh | AbstractMesh, spec: P | None) -> Any:
  if x is None or spec is None:
    return x
  sharding = jax.typeof(x).sharding
  if not sharding.mesh.empty and sharding.spec == spec:
    return x
  return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _to_mesh(
  x: Array | None, mesh: Mesh, dims: str, axis: str | None
) -> Array | None:
  """Move an array that was made without the mesh to its devices."""
  if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
    return x
  if x.sharding.device_set == set(mesh.devices.flat):
    return x
  spec = P()
  if axis is not None and "t" in dims and x.shape[1] % mesh.shape[axis] == 0:
    spec = P(None, axis)
  return jax.device_put(x, NamedSharding(mesh, spec))


# Checks of a call's arguments.


def sharding_and_layout(
  x: Sequence[Shaped[Array, "#B T ..."]],
  name: str,
  mesh: Mesh | AbstractMesh | None,
  axis: str | None,
  layout: Layout | None,
  ordered: bool,
) -> tuple[CallSharding, Layout]:
  """Find the sharding and layout of a call over the tokens x [B, T, ...].

  Args:
    x: Operands that are split, the one called `name` first.
    name: Name of the first operand in error messages.
    mesh: Caller's mesh, or None.
    axis: Caller's mesh axis, or None.
    layout: Caller's layout, or None.
    ordered: Whether a shard has to hold consecutive tokens.

  Raises:
    MeshError: If there is no such axis, or it does not shard the sequence.
    OptionError: If it is no layout, or not one of consecutive tokens.
  """
  layout = Contiguous() if layout is None else layout
  if not isinstance(layout, Layout):
    raise OptionError(
      "layout",
      repr(layout),
      "a layout such as Contiguous()",
      "leave it out for contiguous shards",
    )
  axis = AUTO if axis is None else axis
  place = locate(x, mesh, axis, required=False, name=name)
  if ordered and place.size > 1 and not in_order(layout):
    raise OptionError(
      "layout",
      repr(layout),
      "Contiguous() or Uneven(counts), whose shards hold consecutive "
      "tokens: a state goes from each token to the next",
      "restore the sequence's order first, at the cost of one permutation",
    )
  return place, layout


def in_order(layout: Layout) -> bool:
  """Whether shards hold consecutive tokens, each following the one before."""
  return isinstance(layout, Contiguous | Uneven)


def tokens(
  name: str, x: Shaped[Array, "B T ..."], rank: int | None = None
) -> Shaped[Array, "B T ..."]:
  """Convert x to an array [B, T, ...] of at least one token, or raise."""
  x = as_array(name, x)
  if x.ndim < 2 or x.shape[1] < 1 or (rank is not None and x.ndim != rank):
    raise ShapeError(
      name,
      f"shape {x.shape}",
      "[B, T, ...] with at least one token"
      + ("" if rank is None else f", of {rank} dimensions"),
      "add the missing dimensions, e.g. x[None] for one example",
    )
  return x


def check_shape(
  name: str, x: Shaped[Array, " ..."], want: tuple[int, ...]
) -> Shaped[Array, " ..."]:
  """Return x, or raise if its shape is not `want`."""
  if x.shape != want:
    raise ShapeError(
      name, f"shape {x.shape}", f"{want}", "slice or broadcast it"
    )
  return x


def floats(name: str, x: Shaped[Array, " ..."]) -> Float[Array, " ..."]:
  """Return x, or raise if it holds no floats."""
  if x.dtype.name not in FLOATS:
    raise DtypeError(
      name,
      x.dtype,
      f"one of {', '.join(FLOATS)}",
      f"cast it, e.g. {name}.astype(jnp.float32)",
    )
  return x


def documents(
  segment_ids: Int[Array, "B T"] | None, x: Shaped[Array, "B T ..."]
) -> Int[Array, "B T"] | None:
  """Document of each token, 0 for padding; None without segment ids."""
  if segment_ids is None:
    return None
  seg = as_array("segment_ids", segment_ids)
  if not jnp.issubdtype(seg.dtype, jnp.integer):
    raise DtypeError(
      "segment_ids", seg.dtype, "an integer dtype", "number the documents"
    )
  return check_shape("segment_ids", seg, x.shape[:2]).astype(jnp.int32)


def called(name: str, f: object) -> None:
  """Raise if f is no function."""
  if not callable(f):
    raise InputTypeError(
      name, type(f).__name__, "a function", "pass the function itself"
    )


def beside(
  mask: Bool[Array, " T"] | Bool[Array, "#B T"],
  x: Shaped[Array, "#B T ..."],
) -> Bool[Array, "_ ..."]:
  """Expand a mask [L] or [B, L] to the rank of x [B, L, ...]."""
  mask = mask[None] if mask.ndim == 1 else mask
  return mask.reshape(*mask.shape, *(1,) * (x.ndim - 2))
