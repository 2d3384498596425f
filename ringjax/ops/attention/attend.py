"""Attention per shard by a strategy, with its gradient.

Guarantees: `attend` returns (out, lse) of the local queries over all keys that
the strategy brings, whichever strategy it is, and both are differentiable.

A *strategy* decides which keys arrive when and wraps a *local algorithm*. Both
have one form, so that a strategy may wrap another:

  forward(x, args, carry) -> Partial
  backward(x, args, residuals, carry) -> Gradients

`x` holds the local operands, `args` (`ScoreArgs`) the score function and its
arrays, and `carry` the results of earlier calls: the partial, or (dq, dterms).
A strategy whose local algorithm is `differentiable` is left to JAX; any other
gets one custom rule here, which keeps q, k, v, out and lse and nothing else.
out and lse have the checkpoint names `NAMES`: a remat policy that saves them
(`jax.checkpoint_policies.save_only_these_names(*NAMES)`) never runs the
strategy's forward pass again.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from ringjax.errors import OptionError
from ringjax.ops.attention.blockwise import (
  Gradients,
  Local,
  QGradients,
  Residuals,
)
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.softmax import Partial, add_sink, finalize, wide_dtype
from ringjax.parallel import collectives

NAMES = ("ringjax_attention_out", "ringjax_attention_lse")


class Algorithm(Protocol):
  """A local algorithm, or a strategy around one.

  Attributes:
    axes: Mesh axes over which keys move.
    differentiable: Whether JAX may differentiate `forward` itself.
  """

  @property
  def axes(self) -> tuple[str, ...]: ...

  @property
  def differentiable(self) -> bool: ...

  def span(self, keys: int) -> int:
    """Number of keys that a call sees whose operands hold `keys`."""
    ...

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Fold these keys into `carry`, the partial of the local queries."""
    ...

  def backward(
    self, x: Local, args: ScoreArgs, residuals: Residuals, carry: QGradients
  ) -> Gradients:
    """Add the gradients of these keys to `carry`."""
    ...


def attend(
  algorithm: Any, scores: Scores, x: Local, terms: Terms, context: Context
) -> tuple[Float[Array, "B K G T J"], Float[Array, "B K G T"]]:
  """Return out [B, K, G, T, J] in q's dtype, and lse [B, K, G, T]."""
  axes = collectives.varying_axes(x, terms, context) | {*algorithm.axes}
  x, terms, context = collectives.vary((x, terms, context), axes)
  if algorithm.differentiable:
    return _with_checkpoint_names(
      *_forward(algorithm, scores, x, terms, context)
    )
  call = _Call(algorithm, collectives.sizes(algorithm.axes), scores)
  return _attend(call, x, terms, context)


@dataclasses.dataclass(frozen=True)
class _Call:
  """Static part of a call.

  Attributes:
    algorithm: A strategy.
    sizes: Sizes of its axes, see `collectives.bound`.
    scores: Static part of the score function.
  """

  algorithm: Any
  sizes: tuple[tuple[str, int], ...]
  scores: Scores


def _forward(
  algorithm: Any, scores: Scores, x: Local, terms: Terms, context: Context
) -> tuple[jax.Array, jax.Array]:
  args = ScoreArgs(scores, terms, context)
  partial = algorithm.forward(x, args, empty_partial(x, terms))
  if terms.sinks is not None:
    partial = add_sink(partial, terms.sinks[None, :, :, None])
  out, lse = finalize(partial)
  return out.astype(x.q.dtype), lse


def _with_checkpoint_names(
  out: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
  return checkpoint_name(out, NAMES[0]), checkpoint_name(lse, NAMES[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
  call: _Call, x: Local, terms: Terms, context: Context
) -> tuple[jax.Array, jax.Array]:
  return _forward(call.algorithm, call.scores, x, terms, context)


def _attend_fwd(
  call: _Call, x: Local, terms: Terms, context: Context
) -> tuple[tuple[jax.Array, jax.Array], Any]:
  out, lse = _with_checkpoint_names(*_attend(call, x, terms, context))
  return (out, lse), (x, terms, context, out, lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradient(
  call: _Call, saved: PyTree, cotangents: PyTree
) -> tuple[Local, Terms]:
  x, terms, context, out, lse = saved
  do, dlse = cotangents
  dtype = lse.dtype
  delta = jnp.sum(do.astype(dtype) * out.astype(dtype), -1) - dlse
  terms_without_sinks = terms._replace(sinks=None)
  with collectives.bound(call.sizes):
    grads = call.algorithm.backward(
      x,
      ScoreArgs(call.scores, terms_without_sinks, context),
      Residuals.of(x.q, do, lse, delta),
      zero_gradients(x, terms_without_sinks, dtype),
    )
  dx = Local(
    jnp.transpose(grads.q, (0, 1, 3, 4, 2)).astype(x.q.dtype),
    grads.k.astype(x.k.dtype),
    grads.v.astype(x.v.dtype),
  )
  dterms = grads.terms
  if terms.sinks is not None:
    sink = terms.sinks[None, :, :, None].astype(dtype)
    share = jnp.exp(sink - jnp.where(lse == -jnp.inf, jnp.inf, lse))
    dterms = dterms._replace(sinks=-jnp.sum(share * delta, (0, 3)))
  cast = lambda d, like: d.astype(like.dtype)
  return dx, jax.tree.map(cast, dterms, terms)


def _gradient_fwd(*args: Any) -> tuple[Any, None]:
  return _gradient(*args), None


def _gradient_bwd(*args: Any) -> Any:
  del args
  raise OptionError(
    "strategy",
    "a derivative of a derivative of a blockwise algorithm",
    "a plainly differentiated one",
    "pass strategy=Ring(Dense()) for higher orders and forward mode",
  )


_gradient.defvjp(_gradient_fwd, _gradient_bwd)


def _attend_bwd(
  call: _Call, saved: PyTree, cotangents: PyTree
) -> tuple[Local, Terms, None]:
  return *_gradient(call, saved, cotangents), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def zero_gradients(x: Local, terms: Terms, wide: DTypeLike) -> QGradients:
  """Zeros (dq, dterms) from which a backward pass starts."""
  b, k, g, t, h = x.q.shape
  zeros = lambda shape: collectives.zeros(shape, wide, x)
  return zeros((b, k, h, g, t)), jax.tree.map(lambda a: zeros(a.shape), terms)


def empty_partial(x: Local, terms: Terms | None = None) -> Partial:
  """Partial of the local queries over no keys."""
  dtype = wide_dtype(x.q.dtype)
  return Partial.empty(x.q.shape[:4], _value_dim(x, terms), dtype, x)


def _value_dim(x: Local, terms: Terms | None) -> int:
  """Head dim of the values, which rows of latent attention stand for."""
  if x.v.shape[-1]:
    return x.v.shape[-1]
  if terms is None or terms.up is None:
    return x.k.shape[-1]
  size, _, plain_and_value = terms.up.shape
  return plain_and_value - (x.q.shape[-1] - (x.k.shape[-1] - size))
