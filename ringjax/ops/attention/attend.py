"""Per shard: attention by a strategy, with its gradient.

Law: `attend` returns (out, lse) of the local queries over all keys that the
strategy brings, whichever strategy it is, and both are differentiable.

A *strategy* decides which keys arrive when and wraps a *local algorithm*. Both
have one form, so that a strategy may wrap another:

  forward(scores, x, terms, context, column, carry) -> Partial
  backward(scores, x, terms, context, column, residuals, carry) -> Gradients

The keys that a call sees begin at `column` of the whole sequence's order, and
`carry` holds what earlier calls found: the partial, or (dq, dterms). A
strategy whose local algorithm is `differentiable` is left to JAX; another
gets one custom rule here, which keeps q, k, v, out and lse and nothing else.
out and lse carry the checkpoint names `NAMES`: a remat policy that saves them
(`jax.checkpoint_policies.save_only_these_names(*NAMES)`) never runs the
strategy's forward pass again.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ringjax.errors import OptionError
from ringjax.ops.attention.blockwise import Gradients, Local, Residuals
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.softmax import Partial, add_sink, finalize, wide_dtype
from ringjax.parallel import collectives

NAMES = ("ringjax_attention_out", "ringjax_attention_lse")


class Algorithm(Protocol):
  """A local algorithm, or a strategy around one.

  Attributes:
    axes: the mesh axes over which keys move.
    differentiable: whether JAX may differentiate `forward` itself.
  """

  @property
  def axes(self) -> tuple[str, ...]: ...

  @property
  def differentiable(self) -> bool: ...

  def span(self, keys: int) -> int:
    """How many keys a call sees whose operands hold `keys`."""
    ...

  def forward(
    self,
    scores: Scores,
    x: Local,
    terms: Terms,
    context: Context,
    column: Any,
    carry: Partial,
  ) -> Partial: ...

  def backward(
    self,
    scores: Scores,
    x: Local,
    terms: Terms,
    context: Context,
    column: Any,
    residuals: Residuals,
    carry: tuple[jax.Array, Terms],
  ) -> Gradients: ...


def attend(
  algorithm: Any, scores: Scores, x: Local, terms: Terms, context: Context
) -> tuple[jax.Array, jax.Array]:
  """(out [B, K, G, T, J] in q's dtype, lse [B, K, G, T] in float32)."""
  axes = collectives.varying_axes(x, terms, context) | {*algorithm.axes}
  x, terms, context = collectives.vary((x, terms, context), axes)
  if algorithm.differentiable:
    return _name(*_forward(algorithm, scores, x, terms, context))
  sizes = collectives.sizes(algorithm.axes)
  return _attend(algorithm, sizes, scores, x, terms, context)


def _forward(
  algorithm: Any, scores: Scores, x: Local, terms: Terms, context: Context
) -> tuple[jax.Array, jax.Array]:
  partial = algorithm.forward(scores, x, terms, context, 0, empty_partial(x))
  return _finish(partial, x, terms)


def _finish(
  partial: Partial, x: Local, terms: Terms
) -> tuple[jax.Array, jax.Array]:
  if terms.sinks is not None:
    partial = add_sink(partial, terms.sinks[None, :, :, None])
  out, lse = finalize(partial)
  return out.astype(x.q.dtype), lse


def _name(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
  return checkpoint_name(out, NAMES[0]), checkpoint_name(lse, NAMES[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(
  algorithm: Any,
  sizes: Any,
  scores: Scores,
  x: Local,
  terms: Terms,
  context: Context,
) -> tuple[jax.Array, jax.Array]:
  del sizes
  return _forward(algorithm, scores, x, terms, context)


def _attend_fwd(
  algorithm: Any,
  sizes: Any,
  scores: Scores,
  x: Local,
  terms: Terms,
  context: Context,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
  out, lse = _name(*_attend(algorithm, sizes, scores, x, terms, context))
  return (out, lse), (x, terms, context, out, lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gradient(
  algorithm: Any, sizes: Any, scores: Scores, saved: Any, cotangents: Any
) -> tuple[Local, Terms]:
  x, terms, context, out, lse = saved
  do, dlse = cotangents
  wide = lse.dtype
  delta = jnp.sum(do.astype(wide) * out.astype(wide), -1) - dlse
  bare = terms._replace(sinks=None)
  with collectives.bound(sizes):
    grads = algorithm.backward(
      scores,
      x,
      bare,
      context,
      0,
      Residuals.of(x.q, do, lse, delta),
      zero_gradients(x, bare, wide),
    )
  dx = Local(
    jnp.transpose(grads.q, (0, 1, 3, 4, 2)).astype(x.q.dtype),
    grads.k.astype(x.k.dtype),
    grads.v.astype(x.v.dtype),
  )
  dterms = grads.terms
  if terms.sinks is not None:
    sink = terms.sinks[None, :, :, None].astype(wide)
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
  algorithm: Any, sizes: Any, scores: Scores, saved: Any, cotangents: Any
) -> tuple[Local, Terms, None]:
  return *_gradient(algorithm, sizes, scores, saved, cotangents), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def zero_gradients(
  x: Local, terms: Terms, wide: Any
) -> tuple[jax.Array, Terms]:
  """The (dq, dterms) that a backward pass starts from."""
  b, k, g, t, h = x.q.shape
  zeros = lambda shape: collectives.zeros(shape, wide, x)
  return zeros((b, k, h, g, t)), jax.tree.map(lambda a: zeros(a.shape), terms)


def empty_partial(x: Local) -> Partial:
  """The partial of the local queries over no keys."""
  wide = wide_dtype(x.q.dtype)
  return Partial.empty(x.q.shape[:4], x.v.shape[-1], wide, x)
