"""Moments of an optimizer in the host's memory, fetched layer by layer.

Guarantees: an update is the optimizer's own; numbers are those of moments on
the devices. A step that is not finite leaves moments as they are.
Memory: a device holds the moments of two layers of one parameter, that which is
updated and the one that is fetched meanwhile, and of parameters without layers,
such as embeddings, those of one whole parameter. Updates are written over the
gradients. Arrays of fewer than 4,096 numbers, and vectors, stay on the devices.
Cost: each step reads and writes all moments over the link to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree, Shaped

from ringjax.typing import Index

HOST = "pinned_host"
# Small arrays save little.
_SMALL = 4096
# Most layers of a stack; a longer first axis is none of layers.
_MOST_LAYERS = 512


def is_on_host(x: Shaped[Array, " ..."]) -> bool:
  """Whether an array of a traced function is in the host's memory."""
  return jax.typeof(x).memory_space == jax.memory.Space.Host


def on_host(init: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
  """Tree of bool as `init(params)`: whether an array is in the host's memory.

  Args:
    init: Function that makes an optimizer's state.
    params: Parameters, arrays or shapes.
  """
  jaxpr, shapes = jax.make_jaxpr(init, return_shape=True)(params)
  host = jax.memory.Space.Host
  spaces = [x.memory_space == host for x in jaxpr.out_avals]
  return jax.tree.unflatten(jax.tree.structure(shapes), spaces)


def with_host_moments(
  optimizer: optax.GradientTransformation,
  by_leaf: Callable[[PyTree], Sequence[optax.GradientTransformation]],
) -> optax.GradientTransformationExtraArgs:
  """The optimizer, with its moments in the host's memory between updates.

  Args:
    optimizer: Optimizer whose numbers are updated independently of each other;
      its state is a tuple of trees as the parameters, and of counts.
    by_leaf: Function from a tree of parameters to the optimizer of each of its
      arrays, whose state has that array's moment in place of each tree.
  """

  def init(params: PyTree) -> Any:
    move = lambda x: _to_host(x) if x.ndim > 1 and x.size >= _SMALL else x
    return jax.tree.map(move, optimizer.init(params))

  def update(
    updates: PyTree,
    state: Any,
    params: PyTree = None,
    *,
    is_finite: Bool[Array, ""] | bool = True,
    **_: Any,
  ) -> tuple[PyTree, Any]:
    del params
    gradients, form = jax.tree.flatten(updates)
    is_tree = lambda x: jax.tree.structure(x) == form
    parts, container = jax.tree.flatten(state, is_leaf=is_tree)
    columns = [jax.tree.leaves(x) if is_tree(x) else None for x in parts]
    results = []
    new_columns: list[Any] = [[] for _ in columns]
    rules = by_leaf(updates)
    for n, (gradient, rule) in enumerate(zip(gradients, rules, strict=True)):
      moments = [
        part if column is None else column[n]
        for part, column in zip(parts, columns, strict=True)
      ]

      def update_part(
        gradient: jax.Array,
        moments: list[jax.Array],
        rule: optax.GradientTransformation = rule,
      ) -> tuple[jax.Array, list[jax.Array]]:
        part_state = jax.tree.unflatten(container, moments)
        result: Any = rule.update(gradient, part_state)
        update, new_state = result
        new = [
          jnp.where(is_finite, a, b).astype(b.dtype)
          for a, b in zip(jax.tree.leaves(new_state), moments, strict=True)
        ]
        return update.astype(gradient.dtype), new

      update, new = _by_layer(update_part, gradient, moments)
      results.append(update)
      for column, moment in zip(new_columns, new, strict=True):
        column.append(moment)
    new_parts = [
      # Counts are the same after each parameter.
      new[0] if column is None else jax.tree.unflatten(form, new)
      for column, new in zip(columns, new_columns, strict=True)
    ]
    return (
      jax.tree.unflatten(form, results),
      jax.tree.unflatten(container, new_parts),
    )

  return optax.GradientTransformationExtraArgs(init, update)


def _by_layer(
  update: Callable[[Any, list[Any]], tuple[Any, list[Any]]],
  gradient: Float[Array, " ..."],
  moments: Sequence[Shaped[Array, " ..."]],
) -> tuple[jax.Array, list[jax.Array]]:
  """Update a parameter, of which the device holds few layers' moments.

  Args:
    update: Function from a part of the gradient and of the moments to the
      update and the new moments.
    gradient: Gradient, [layers, ...].
    moments: Moments, some of them in the host's memory, and counts.
  """
  hosted = [n for n, x in enumerate(moments) if is_on_host(x)]
  if not hosted:
    return update(gradient, list(moments))
  if gradient.ndim < 3 or gradient.shape[0] > _MOST_LAYERS:
    fetched = [_to_device(x) if is_on_host(x) else x for x in moments]
    result, new = update(gradient, fetched)
    return result, [
      _to_host(x) if n in hosted else x for n, x in enumerate(new)
    ]
  layers = gradient.shape[0]

  def fetch(arrays: Sequence[jax.Array], layer: Index) -> list[jax.Array]:
    return [
      _to_device(lax.dynamic_slice_in_dim(x, layer, 1, 0)) for x in arrays
    ]

  def step(carry: tuple[Any, ...], layer: jax.Array) -> tuple[Any, None]:
    gradient, arrays, fetched, _ = carry
    part = list(moments)
    for n, x in zip(hosted, fetched, strict=True):
      part[n] = x
    # It arrives while this layer is updated, and before its own is written.
    next_layer = jnp.minimum(layer + 1, layers - 1)
    arriving = fetch(arrays, next_layer)
    result, new = update(lax.dynamic_slice_in_dim(gradient, layer, 1, 0), part)
    gradient = lax.dynamic_update_slice_in_dim(gradient, result, layer, 0)
    arriving, written = lax.optimization_barrier(
      (arriving, [new[n] for n in hosted])
    )
    arrays = [
      lax.dynamic_update_slice_in_dim(x, _to_host(y), layer, 0)
      for x, y in zip(arrays, written, strict=True)
    ]
    others = [x for n, x in enumerate(new) if n not in hosted]
    return (gradient, arrays, arriving, others), None

  arrays = [moments[n] for n in hosted]
  others = [x for n, x in enumerate(moments) if n not in hosted]
  first = (gradient, arrays, fetch(arrays, 0), others)
  numbers = jnp.arange(layers, dtype=jnp.int32)
  (result, arrays, _, others), _ = lax.scan(step, first, numbers)
  hosted_moments, other_moments = iter(arrays), iter(others)
  return result, [
    next(hosted_moments if n in hosted else other_moments)
    for n in range(len(moments))
  ]


def _to_host(x: jax.Array) -> jax.Array:
  return jax.device_put(x, jax.memory.Space.Host)


def _to_device(x: jax.Array) -> jax.Array:
  return jax.device_put(x, jax.memory.Space.Device)
