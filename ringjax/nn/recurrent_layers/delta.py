"""Gated delta net: layers that carry a state instead of looking back.

Guarantees: equal results for a whole sequence, for consecutive chunks of it
through a cache, and token by token; for one device and for shards.
Cost: linear in the tokens. Between shards the tail of a convolution and one
affine map a head are gathered, for any length. Shards whose tokens are not
consecutive bring the inputs into order and the outputs back.
Ref:  Yang et al. 2024, arXiv 2412.06464; as in Qwen3-Next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from ringjax.errors import OptionError
from ringjax.kv.base import StateCache
from ringjax.kv.state import State, StateShape
from ringjax.nn.linear import Linear, RMSNorm
from ringjax.nn.param import param
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.sparse.compressed_keys import TokenInputs
from ringjax.ops.mask import SameSegment
from ringjax.ops.recurrent.conv import Tail, begins, causal_conv, tails
from ringjax.ops.recurrent.delta import delta_rule
from ringjax.ops.recurrent.sequence import beside
from ringjax.ops.rope import Rope
from ringjax.ops.softmax import wide_dtype
from ringjax.parallel import redeal
from ringjax.parallel.call_sharding import manual_over
from ringjax.parallel.layout import (
  Contiguous,
  into_slots,
  out_of_slots,
  slots_of,
)

# State of a mixer: `State`, or a tail alone.
StateT = TypeVar("StateT")


class Recurrent:
  """Common properties of mixers that carry a state."""

  @property
  def ropes(self) -> tuple[Rope, ...]:
    """Rotations that a call needs tables for: none."""
    return ()

  @property
  def pair_flops(self) -> int:
    """FLOPs per pair of tokens: 0, as tokens only meet the state."""
    return 0

  @property
  def reach(self) -> int | None:
    """Number of tokens it looks back: None, all by its state."""
    return None

  def cache_shape(self, layers: int) -> StateShape:
    """Shape of the state that `layers` of this kind keep."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta(Recurrent):
  """The gated delta rule after a short convolution.

  Attributes:
    key_heads: Number of heads of queries and keys, K.
    heads: Number of heads of values, N, a multiple of K.
    key: Size of a head of queries and keys, H.
    value: Size of a head of values, J.
    taps: Number of tokens that the convolution sees, including the token
      itself.
    eps: Epsilon of the norm of the outputs.
    most_beta: Limit of the update rates, whose least is 0: 1, or 2 for states
      that a token may also reflect.
    gate: Activation of the gates of the outputs, "silu" or "sigmoid".
  """

  key_heads: int
  heads: int
  key: int
  value: int
  taps: int
  eps: float
  most_beta: float = 1.0
  gate: str = "silu"

  def cache_shape(self, layers: int) -> StateShape:
    """Shape of the state that `layers` of this kind keep."""
    return StateShape(
      layers=layers,
      heads=self.heads,
      key=self.key,
      value=self.value,
      tail=self.taps - 1,
      convolved=(
        *((self.key_heads, self.key),) * 2,
        (self.heads, self.value),
      ),
    )

  def build(self, rngs: nnx.Rngs, embed: int) -> DeltaLayer:
    return DeltaLayer(rngs, self, embed)


class Taps(nnx.Module):
  """Weights of a convolution of each channel, [heads, dims, taps]."""

  def __init__(
    self,
    rngs: nnx.Rngs,
    shape: tuple[int, int, int],
    axes: tuple[str | None, str | None],
    *,
    bias: bool = False,
  ):
    self.weight = param(rngs, shape, (*axes, None), fan_in=shape[-1])
    self.bias = param(rngs, shape[:-1], axes) if bias else None

  @property
  def arrays(self) -> tuple[Float[Array, "... W"], Float[Array, " ..."] | None]:
    """The weight, and the bias or None."""
    return self.weight[...], None if self.bias is None else self.bias[...]


class RecurrentInputs(NamedTuple):
  """Inputs of a recurrent mixer for each token, [B, T, ...].

  Fields:
    qkv: Inputs of the convolutions: queries, keys and values, or fewer.
    decay: float32 [B, T, N], or for each channel of keys [B, T, N, H]; None
      if a mixer has no state besides the convolution's, or computes the decays
      from the convolution's output.
    beta: float32 [B, T, N]; None as `decay` is.
    seg: int32 [B, T].
  """

  qkv: tuple[jax.Array, ...]
  decay: jax.Array | None
  beta: jax.Array | None
  seg: jax.Array


class DeltaLayer(nnx.Module):
  """The module of `Delta`."""

  def __init__(self, rngs: nnx.Rngs, spec: Delta, embed: int):
    self.spec = spec
    keys, values = (spec.key_heads, spec.key), (spec.heads, spec.value)
    into = lambda shape, *axes: Linear(rngs, (embed,), shape, ("embed", *axes))
    self.q = into(keys, "kv_heads", None)
    self.k = into(keys, "kv_heads", None)
    self.v = into(values, "heads", None)
    self.z = into(values, "heads", None)
    self.beta = into((spec.heads,), "heads")
    self.step = into((spec.heads,), "heads")
    self.q_taps = Taps(rngs, (*keys, spec.taps), ("kv_heads", None))
    self.k_taps = Taps(rngs, (*keys, spec.taps), ("kv_heads", None))
    self.v_taps = Taps(rngs, (*values, spec.taps), ("heads", None))
    self.log_rate = param(rngs, (spec.heads,), ("heads",), fan_in=1)
    self.offset = param(rngs, (spec.heads,), ("heads",), value=1.0)
    self.norm = RMSNorm(rngs, (spec.value,), (None,), eps=spec.eps)
    self.out = Linear(rngs, values, (embed,), ("heads", None, "embed"))

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: StateCache,
    attend: Attend,
  ) -> tuple[Float[Array, "B T D"], StateCache]:
    """[B, T, D] and the layer's cache with the state after these tokens."""
    compute_dtype = wide_dtype(x.dtype)
    rate = jnp.exp(self.log_rate[...].astype(compute_dtype))
    step = (
      self.step(x).astype(compute_dtype)
      + self.offset[...].astype(compute_dtype)[None, None]
    )
    beta = jax.nn.sigmoid(self.beta(x).astype(compute_dtype))
    if self.spec.most_beta != 1.0:
      beta = beta * jnp.asarray(self.spec.most_beta, compute_dtype)
    inputs = RecurrentInputs(
      (self.q(x), self.k(x), self.v(x)),
      -rate[None, None] * jax.nn.softplus(step),
      beta,
      jnp.broadcast_to(tokens.seg, x.shape[:2]),
    )
    taps = tuple(
      conv.weight[...] for conv in (self.q_taps, self.k_taps, self.v_taps)
    )
    shape = self.spec.cache_shape(1)
    mixed, cache = carried(
      mix_delta, taps, inputs, shape, tokens, cache, attend
    )
    mixed = self.norm(mixed.astype(compute_dtype))
    gate = jax.nn.silu if self.spec.gate == "silu" else jax.nn.sigmoid
    mixed = mixed * gate(self.z(x).astype(compute_dtype))
    return self.out(mixed.astype(x.dtype)), cache


def convolved(
  x: RecurrentInputs,
  taps: Sequence[tuple[Float[Array, "_ _ _"], Float[Array, "_ _"] | None]],
  before: Tail,
) -> list[Float[Array, "B T ..."]]:
  """Apply the convolutions to `x.qkv`, with biases if there are.

  Args:
    x: Inputs of the tokens.
    taps: Weight and bias (or None) of each convolution.
    before: Tokens that precede.
  """
  outputs = []
  for channels, (weight, bias), tail in zip(x.qkv, taps, before.x, strict=True):
    y = causal_conv(channels, weight, x.seg, before._replace(x=tail))
    outputs.append(y if bias is None else y + bias[None, None].astype(y.dtype))
  return outputs


def carried(
  mix: Callable[..., Any],
  weights: PyTree,
  x: RecurrentInputs,
  shape: StateShape,
  tokens: Tokens,
  cache: StateCache,
  attend: Attend,
) -> tuple[Float[Array, "B T N J"], StateCache]:
  """Run `over_tokens` from the state in a layer's cache; update the cache.

  Args:
    mix: Mixer, see `over_tokens`, as are `weights`, `x` and `attend`.
    weights: Arrays that all shards have.
    x: Inputs of the tokens.
    shape: Shape of the layer's state, which is zeros without a cache.
    tokens: Tokens of the call.
    cache: Cache of the layer.
    attend: Sharding of the tokens.

  Raises:
    OptionError: If some document may not see the document before it.
  """
  if tokens.segmented and attend.segments != SameSegment():
    raise OptionError(
      "segments",
      f"{attend.segments} for a model with recurrent layers",
      "SameSegment(): a state goes from each token to the next, and skips "
      "no document",
      "leave segments out, or take a model of attention alone",
    )
  state = shape.empty(x.seg.shape[0], x.qkv[0].dtype)
  if attend.resident:
    state = cache.recall(state)
  mixed, state = over_tokens(mix, weights, x, state, attend)
  return mixed, cache.keep(state)


def over_tokens(
  mix: Callable[..., Any],
  taps: PyTree,
  x: RecurrentInputs | TokenInputs,
  state: StateT,
  attend: Attend,
  *,
  per_token: bool = True,
) -> tuple[Any, StateT]:
  """Run a recurrent mixer on the shards of the tokens.

  Args:
    mix: Function of `taps`, `x`, `state` and the axis of shards or None, per
      shard; returns the outputs and the state after them.
    taps: Arrays that all shards have.
    x: Inputs of the tokens, a tree of [B, T, ...] with `seg`.
    state: State before them.
    attend: Sharding of the tokens.
    per_token: Whether outputs are [B, T, N, J], in the layout of the tokens;
      else a tree of arrays in the order of the sequence, each with as many
      entries along its second axis on every shard.
  """
  manual_axis, layout = attend.around, attend.layout
  if not attend.sharded and manual_axis is None:
    return mix(taps, x, state, None)
  length = x.seg.shape[1]
  if manual_axis is not None:
    redeal.check(layout)
    mixed, state = mix(
      taps, redeal.to_order(x, layout, manual_axis), state, manual_axis
    )
    if not per_token:
      return mixed, state
    return redeal.from_order(mixed, layout, manual_axis, length), state
  axis, mesh, slots = attend.of_mesh, attend.mesh, None
  assert axis is not None
  assert mesh is not None
  all_axes = manual_over(mesh, mesh.axis_names)
  if attend.size > 1:
    redeal.check(layout)
    slots = slots_of(layout, length, attend.size)
    x = jax.tree.map(lambda a: into_slots(a, slots, 1), x)
  local_length = x.seg.shape[1] // attend.size
  reorders = attend.size > 1 and not isinstance(layout, Contiguous)
  if reorders:
    specs = jax.tree.map(attend.spec_with_heads, x)
    x = jax.shard_map(
      lambda x: redeal.to_order(x, layout, axis),
      mesh=mesh,
      in_specs=(specs,),
      out_specs=specs,
      **all_axes,
    )(x)
  # XLA can't partition gathers of windows over some axes: then over all.
  batch = None if per_token else attend.batch_axes(x.seg.shape[0]) or None
  manual = manual_over(mesh, {axis}) if per_token else all_axes
  sequence = P(batch, axis)
  mixed, state = jax.shard_map(
    lambda taps, x, state: mix(taps, x, state, axis),
    mesh=mesh,
    in_specs=(P(), sequence, P(batch)),
    out_specs=(sequence, P(batch)),
    **manual,
  )(taps, x, state)
  if not per_token:
    return mixed, state
  if reorders:
    spec = attend.spec_with_heads(mixed)
    mixed = jax.shard_map(
      lambda a: redeal.from_order(a, layout, axis, local_length),
      mesh=mesh,
      in_specs=(spec,),
      out_specs=spec,
      **all_axes,
    )(mixed)
  return mixed if slots is None else out_of_slots(mixed, slots), state


def mix_delta(
  taps: Sequence[Float[Array, "_ _ _"]],
  x: RecurrentInputs,
  state: State,
  axis: str | None,
) -> tuple[Float[Array, "B T N J"], State]:
  """Apply the delta rule after convolutions, for `over_tokens`.

  Args:
    taps: Weights of the convolutions of queries, keys and values.
    x: Inputs of the tokens.
    state: State before them.
    axis: Axis of the shards, or None.

  Returns:
    [B, T, N, J], and the state after the last token.
  """
  assert x.decay is not None and x.beta is not None
  tokens_before, tokens_after = tails(state.tail, x.qkv, x.seg, axis)
  q, k, v = (
    jax.nn.silu(causal_conv(a, weight, x.seg, tokens_before._replace(x=tail)))
    for a, weight, tail in zip(x.qkv, taps, tokens_before.x, strict=True)
  )
  real = x.seg > 0
  decay = jnp.where(beside(real, x.decay), x.decay, 0)
  document_start = beside(begins(x.seg, tokens_before), decay)
  mixed, memory = delta_rule(
    _unit(q, q.shape[-1] ** -0.5),
    _unit(k, 1.0),
    v,
    jnp.where(document_start, -jnp.inf, decay),
    jnp.where(beside(real, x.beta), x.beta, 0),
    state.memory,
    axis=axis,
  )
  return mixed, State(memory, tokens_after)


def _unit(x: jax.Array, length: float) -> jax.Array:
  """Scale vectors to the given length, in x's dtype."""
  wide_x = x.astype(wide_dtype(x.dtype))
  square = jnp.sum(jnp.square(wide_x), -1, keepdims=True)
  scale = lax.rsqrt(square + jnp.asarray(1e-6, wide_x.dtype))
  return (wide_x * scale * jnp.asarray(length, wide_x.dtype)).astype(x.dtype)
