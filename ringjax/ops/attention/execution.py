"""Execution of an attention call: on a mesh, per shard, or on one device.

Guarantees: those of `api`, for operands that `AttentionArgs` has checked. On a
mesh there is one shard_map, over the sequence's axis, the mesh's explicit axes
and the axes that the caller names for batch and heads; other axes are left to
the compiler. The strategy is chosen and adapted here, before anything is sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from ringjax.checks import boolean
from ringjax.errors import MeshError, OptionError, ShapeError
from ringjax.ops.attention.arguments import AttentionArgs
from ringjax.ops.attention.blockwise import Local
from ringjax.ops.attention.cost.call_shape import CallShape, RowShape
from ringjax.ops.attention.cost.select import Auto, find_machine
from ringjax.ops.attention.kernels.auto_kernel import expected
from ringjax.ops.attention.scores import Context, Terms
from ringjax.ops.attention.sparse.block_selection import ShardTokens
from ringjax.ops.attention.strategies import nesting, registry
from ringjax.ops.attention.strategies.gather import Gather
from ringjax.ops.attention.strategies.latents import Absorbed, UpProjected
from ringjax.ops.attention.strategies.nesting import Strategy
from ringjax.ops.mask import Coords, Everything
from ringjax.ops.softmax import wide_dtype
from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import (
  CallSharding,
  MeshAxes,
  device_of,
  manual_over,
)
from ringjax.parallel.chips import Machine
from ringjax.parallel.layout import out_of_slots, slots_of


def run(
  x: AttentionArgs,
  place: CallSharding,
  strategy: Strategy | Auto,
  return_residual: bool,
) -> Any:
  """Return the output in the caller's shape, with the residual if asked."""
  return_residual = boolean("return_residual", return_residual)
  machine = strategy.machine if isinstance(strategy, Auto) else None
  if isinstance(strategy, Auto):
    strategy = _choose_strategy(strategy, x, place)
  _check_axes(strategy, place)
  strategy = nesting.on_device(strategy, *device_of(place, x.operands))
  if x.up is not None:
    return _run_rows(x, place, strategy, return_residual, machine)
  return _run(x, place, strategy, return_residual)


def _run_rows(
  x: AttentionArgs,
  place: CallSharding,
  strategy: Strategy,
  return_residual: bool,
  machine: Machine | str | None,
) -> Any:
  """Run latent attention in the form that the cost model chooses.

  Where queries choose rows, they attend to the rows themselves.
  """
  form = "heads" if x.selection is None else "absorbed"
  if place.size > 1 and x.selection is None:
    call = _call_shape(x, place)
    found_machine = find_machine(machine, place.mesh)
    form = registry.latent_form(strategy, call, found_machine, x.layout)
  around = lambda algorithm: nesting.around(
    strategy, algorithm(nesting.innermost(strategy))
  )
  if form == "heads":
    return _run(x.up_projected(), place, strategy, return_residual)
  if form == "rows":
    return _run(x, place, around(UpProjected), return_residual)
  result = _run(x.absorbed(), place, around(Absorbed), return_residual)
  is_tuple = return_residual or x.selection is not None
  attended, *others = result if is_tuple else (result,)
  up = x.up
  assert up is not None
  out = jnp.einsum(
    "...nc,cnj->...nj",
    attended[..., : up.shape[0]],
    up[..., x.plain :],
    preferred_element_type=attended.dtype,
  )
  return (out, *others) if is_tuple else out


def _run(
  x: AttentionArgs,
  place: CallSharding,
  strategy: Strategy,
  return_residual: bool,
) -> Any:
  """Run a checked call by a strategy that is bound to a kind of device.

  With a selection the result is (out, lse, blocks of each query).
  """
  chosen: list[jax.Array] = []
  if x.q.shape[0] == 0:
    out = jnp.zeros((*x.q.shape[:3], x.v.shape[3]), x.q.dtype)
    lse = jnp.zeros(x.q.shape[:3], wide_dtype(x.q.dtype))
    if x.selection is not None:
      chosen = [jnp.zeros((*x.q.shape[:2], 1, 1), jnp.int32)]
  else:
    with _forward_mode_refused():
      if place.mesh is not None:
        results = _on_mesh(x, place, strategy)
      else:
        # Compiled here: without this, a call outside of a jit would compile its
        # loops again each time, and in a shard_map outside of one each
        # operation of each device would be a program.
        results = _jitted_local(x, place, strategy, None)
    out, lse, chosen = results[0], results[1], list(results[2:])
  if not x.batched:
    out, lse, *chosen = (a[0] for a in (out, lse, *chosen))
  if x.selection is not None:
    return out, lse, *chosen
  return (out, lse) if return_residual else out


def _choose_strategy(
  auto: Auto, x: AttentionArgs, place: CallSharding
) -> Strategy:
  """Choose the strategy of this call by the cost model; see `select`."""
  if place.size == 1:
    return nesting.named("ring")
  call = _call_shape(x, place)
  derived = x.q_pos is None and x.k_pos is None and call.queries == call.keys
  outside = {*place.names} - collectives.manual_axes()
  # Inside a vmap there are no groups.
  in_vmap = place.manual and bool(outside)

  def serves(name: str) -> bool:
    entry = registry.STRATEGIES[name]
    if entry.same_tokens and (not derived or call.mask is not x.mask):
      return False
    if in_vmap and (entry.grouped or entry.some_pairs):
      return False
    return not (entry.grouped and len(place.names) > 2)

  names = tuple(filter(serves, auto.among or registry.STRATEGIES))
  local, _ = expected(call, device_of(place, x.operands)[0])
  call = dataclasses.replace(call, local=local)
  auto = dataclasses.replace(auto, among=names)
  name, options = auto.choose(call, place.mesh)
  return nesting.built(name, options, levels=len(call.axes))


def _call_shape(x: AttentionArgs, place: CallSharding) -> CallShape:
  """Describe a call for the cost model."""
  b, t, n, h = x.q.shape
  num_shards = place.size if place.manual else 1
  t, s = t * num_shards, x.k.shape[1] * num_shards
  # A mask with traced arrays bounds nothing.
  mask = Everything() if jax.tree.leaves(x.mask) else x.mask
  k, j, rows = x.kv_heads, x.v.shape[3], None
  if x.up is not None:
    size, _, plain_and_value = x.up.shape
    rows = RowShape(latent=size, shared=h - x.plain)
    j = plain_and_value - x.plain
  axes = tuple((name, _size(name, place)) for name in place.names)
  if len(axes) > 2:
    axes = ((" ".join(place.names), place.size),)
  shards = lambda names: math.prod(_size(name, place) for name in names)
  heads = shards(place.heads)
  return CallShape(
    batch=max(b // shards(place.batch), 1),
    queries=t,
    keys=s,
    heads=max(n // heads, 1),
    kv_heads=max(k // heads, 1),
    head_dim=h,
    value_dim=j,
    dtype=x.q.dtype.name,
    mask=mask,
    layout=x.layout,
    axes=axes,
    # With unequal lengths the queries are assumed to be the last tokens.
    offset=max(s - t, 0),
    rows=rows,
  )


def _size(name: str, place: CallSharding) -> int:
  if place.manual:
    return collectives.axis_size(name)
  mesh = place.mesh
  assert mesh is not None, "operands that are not per shard are on a mesh"
  return mesh.shape[name]


def _check_axes(strategy: Strategy, place: CallSharding) -> None:
  """Check that the axes a strategy names are among those of the call."""
  foreign = [name for name in strategy.axes if name not in place.names]
  if foreign:
    call_axes = ", ".join(map(repr, place.names)) or "no axis: one device"
    raise OptionError(
      "strategy",
      f"axis {foreign[0]!r} in {strategy!r}",
      f"the axes that this call goes over ({call_axes})",
      "leave the axis out of the strategy: axis= of the call fills it in",
    )


@contextlib.contextmanager
def _forward_mode_refused() -> Iterator[None]:
  """Replace JAX's error for a custom_vjp under `jax.jvp` by a remedy."""
  try:
    yield
  except TypeError as error:
    if "custom_vjp" not in str(error):
      raise
    raise OptionError(
      "strategy",
      "forward mode through a blockwise algorithm",
      "a plainly differentiated one",
      "pass strategy=Ring(Dense()) for jax.jvp and higher orders",
    ) from error


def _per_shard(
  x: AttentionArgs,
  place: CallSharding,
  strategy: Strategy,
  lengths: tuple[int, int] | None,
) -> tuple[jax.Array, ...]:
  """Attend per shard; `lengths`: true sequence lengths, None if whole.

  With a selection the result is (out, lse, blocks of each query).
  """
  layout, size = x.layout, place.size
  shards = [x.q.shape[1], x.k.shape[1]]
  if lengths is None:
    for name, local in zip(("query", "key"), shards, strict=True):
      expected_length = layout.check_local_length(local) if size > 1 else None
      if expected_length:
        raise ShapeError(
          name,
          f"{local} tokens a shard",
          f"{expected_length} in the layout {layout}",
          "pad the sequence, or call outside of shard_map",
        )
    lengths = (shards[0] * size, shards[1] * size)
  index = 0
  if place.axis is not None:
    index = collectives.axis_index(place.axis)
  natural = [layout.positions(index, size, n)[None] for n in shards]
  q_at = _coords(natural[0], lengths[0], x.q_pos, x.q_seg, x.q_len)
  k_at = _coords(natural[1], lengths[1], x.k_pos, x.k_seg, x.k_len)
  if x.selection is not None:
    tokens = ShardTokens(
      q=x.q,
      k=x.k,
      q_at=q_at,
      k_at=k_at,
      number=natural[1][0],
      mask=x.mask,
      axis=place.axis,
      length=lengths[1],
    )
    return x.selection.attend(tokens, x.v, x.scores, x.sinks, place.heads)
  group = x.q.shape[2] // x.kv_heads
  by_kv_head = lambda a: None if a is None else a.reshape(-1, group)
  context = Context(
    q_at,
    k_at,
    x.mask,
    _grouped(x.allow, x.kv_heads),
    by_kv_head(x.heads),
    x.seed,
  )
  needed = None
  keys_before, keys_after = x.mask.reach
  derived = x.q_pos is None and x.k_pos is None
  if size > 1:
    same_tokens = derived and shards[0] == shards[1]
    strategy = nesting.fitted(strategy, x.mask, layout, same_tokens)
  if derived and keys_before is not None and keys_after is not None:
    q_length, k_length = shards[0] * size, shards[1] * size
    needed = layout.reachable(size, q_length, k_length, keys_before, keys_after)
  if place.axis is not None:
    strategy = nesting.bind(strategy, place.axis, needed, x.kv_heads)
  elif nesting.is_strategy(strategy.local):
    # One device: the keys of all levels are here.
    strategy = Gather(nesting.innermost(strategy))
  else:
    strategy = strategy.on(None, None)
  return attend_shard(x, context, strategy)


def attend_shard(
  x: AttentionArgs, context: Context, strategy: Strategy
) -> tuple[Float[Array, "B T N J"], Float[Array, "B T N"]]:
  """Attend per shard: (output, log-sum-exp) in the caller's order of axes."""
  b, t, n, h = x.q.shape
  kv_heads = x.kv_heads
  group = n // kv_heads
  local = Local(
    jnp.transpose(x.q.reshape(b, t, kv_heads, group, h), (0, 2, 3, 1, 4)),
    jnp.swapaxes(x.k, 1, 2),
    jnp.swapaxes(x.v, 1, 2),
  )
  by_kv_head = lambda a: None if a is None else a.reshape(kv_heads, group)
  terms = Terms(
    _grouped(x.bias, kv_heads), by_kv_head(x.slopes), by_kv_head(x.sinks), x.up
  )
  out, lse = strategy.attend(x.scores, local, terms, context)
  out = jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(b, t, n, -1)
  return out, jnp.transpose(lse, (0, 3, 1, 2)).reshape(b, t, n)


_jitted_local = jax.jit(_per_shard, static_argnums=(1, 2, 3))


def _coords(
  natural: jax.Array,
  length: int,
  pos: jax.Array | None,
  seg: jax.Array | None,
  valid: jax.Array | None,
) -> Coords:
  real = natural < length
  if valid is not None:
    real = real & (natural < valid[:, None])
  seg = jnp.ones_like(natural) if seg is None else seg
  seg = jnp.where(real, seg, 0)
  return Coords(natural if pos is None else pos, seg)


def _grouped(pair: jax.Array | None, kv_heads: int) -> jax.Array | None:
  """Reshape [B|1, N|1, T|1, S|1] to [B|1, K|1, G|1, T|1, S|1]."""
  if pair is None:
    return None
  heads = (1, 1) if pair.shape[1] == 1 else (kv_heads, -1)
  return pair.reshape(pair.shape[0], *heads, *pair.shape[2:])


def _on_mesh(
  x: AttentionArgs, place: CallSharding, strategy: Strategy
) -> tuple[jax.Array, ...]:
  _check_explicit(x, place)
  if isinstance(place.mesh, Mesh):
    # Move arrays that a caller made without a mesh to its devices.
    to_mesh = lambda a, spec: _to_mesh(a, place.mesh, spec)
    x = jax.tree.map(to_mesh, x, x.specs(place))
  return _jitted_on_mesh(x, place, strategy)


def _to_mesh(a: Any, mesh: Mesh, spec: P) -> Any:
  if isinstance(a, jax.core.Tracer) or not isinstance(a, jax.Array):
    return a
  if a.sharding.device_set == set(mesh.devices.flat):
    return a
  divides = all(
    axes is None or n % math.prod(mesh.shape[i] for i in _names(axes)) == 0
    for n, axes in zip(a.shape, tuple(spec), strict=False)
  )
  return jax.device_put(a, NamedSharding(mesh, spec if divides else P()))


def _names(axes: MeshAxes) -> tuple[str, ...]:
  return collectives.names(axes)


def _reshard(
  a: jax.Array, mesh: Mesh | AbstractMesh, spec: P, explicit: set[str]
) -> jax.Array:
  """Reshard `a` over the explicit axes of `spec`; XLA decides the others."""
  explicit_axes = (
    tuple(n for n in _names(axes) if n in explicit) for axes in spec
  )
  spec = P(*(axes or None for axes in explicit_axes))
  sharding = jax.typeof(a).sharding
  if not sharding.mesh.empty and sharding.spec == spec:
    return a
  return jax.sharding.reshard(a, NamedSharding(mesh, spec))


def _check_explicit(x: AttentionArgs, place: CallSharding) -> None:
  assert place.mesh is not None
  size = math.prod(place.mesh.shape[a] for a in place.heads)
  kv_heads = x.k.shape[2]
  if size > 1 and kv_heads > 1 and kv_heads % size:
    raise MeshError(
      "key",
      f"{kv_heads} heads over the {size} shards of {place.heads}",
      "one head, or a multiple of the shards",
      "reshard the query's heads over a smaller axis",
    )


def _narrow_up(x: AttentionArgs) -> AttentionArgs:
  """Arguments with `up` in the queries' dtype, different on each shard first.

  The conversion is after the sum of its gradient, which is then of float32.
  """
  if x.up is None:
    return x
  up = collectives.vary(x.up, collectives.varying_axes(x.q))
  return dataclasses.replace(x, up=up.astype(x.q.dtype))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _jitted_on_mesh(
  x: AttentionArgs, place: CallSharding, strategy: Strategy
) -> tuple[jax.Array, ...]:
  assert place.mesh is not None
  mesh, lengths = place.mesh, (x.q.shape[1], x.k.shape[1])
  slots = [
    slots_of(x.layout, n, place.size) if place.axis else None for n in lengths
  ]
  x = x.padded(*slots)
  if x.up is not None:
    # The shards' gradients of `up` are summed where it enters the shard_map: in
    # float32, like other sums of gradients. XLA's CPU compiler also aborts at a
    # sum of bfloat16 there if a mesh axis is automatic.
    x = dataclasses.replace(x, up=x.up.astype(wide_dtype(x.up.dtype)))
  specs = x.specs(place)
  explicit = {
    a
    for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    if kind == AxisType.Explicit
  }
  if explicit:
    x = jax.tree.map(lambda a, s: _reshard(a, mesh, s, explicit), x, specs)
  names = explicit | {*place.names, *place.batch, *place.heads}
  if place.fully_manual:
    names |= {*mesh.axis_names} - collectives.manual_axes()
  out_specs = specs.q, specs.q
  if x.selection is not None:
    shared = x.selection.choice_heads(x.q.shape[2], x.k.shape[2]) == 1
    out_specs = *out_specs, P(*specs.q[:2], None if shared else specs.q[2])
  options = manual_over(mesh, names)
  if getattr(nesting.innermost(strategy), "interpret", False):
    # The interpreters of Pallas do not track varying axes.
    options["check_vma"] = False
  results = jax.shard_map(
    lambda x: _per_shard(_narrow_up(x), place, strategy, lengths),
    mesh=mesh,
    in_specs=(specs,),
    out_specs=out_specs,
    **options,
  )(x)
  if slots[0] is not None:
    if explicit:
      # Types with explicit axes cannot have uneven shards.
      full_length = P(specs.q[0], None, specs.q[2])
      results = [
        _reshard(a, place.mesh, full_length, explicit) for a in results
      ]
    results = [out_of_slots(a, slots[0]) for a in results]
  return tuple(results)
