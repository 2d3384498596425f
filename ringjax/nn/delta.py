"""Gated delta net: layers that carry a state along instead of looking back.

Guarantees: the same for a whole sequence, for chunks of it that follow each
other through a cache, and token by token; for one device and for shards.
Cost: linear in the tokens. Between shards the tail of a convolution and one
affine map a head are gathered, whatever the length.
Ref:  Yang et al. 2024, arXiv 2412.06464; as in Qwen3-Next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from ringjax.ops.conv import Tail, begins, causal_conv, tails
from ringjax.ops.delta import delta_rule
from ringjax.ops.mask import SameSegment
from ringjax.ops.rope import Rope
from ringjax.ops.sequence import beside
from ringjax.ops.softmax import wide_dtype
from ringjax.parallel.layout import Contiguous


class Recurrent:
  """What mixers that carry a state along say of themselves alike."""

  @property
  def ropes(self) -> tuple[Rope, ...]:
    """What the tables of a call have to be made for: nothing turns."""
    return ()

  @property
  def pair_flops(self) -> int:
    """No token meets another: the work is the state's."""
    return 0

  @property
  def reach(self) -> int | None:
    """How many tokens it looks back: all, by its state."""
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta(Recurrent):
  """The gated delta rule behind a short convolution.

  Attributes:
    key_heads: heads of queries and keys, K.
    heads: heads of values, N, a multiple of K.
    key: head dim of queries and keys, H.
    value: head dim of values, J.
    taps: tokens that the convolution sees, the token itself counted.
    eps: of the norm of the outputs.
  """

  key_heads: int
  heads: int
  key: int
  value: int
  taps: int
  eps: float

  def cache_shape(self, layers: int) -> StateShape:
    """What `layers` of this kind keep."""
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
  """The weights of a convolution of each channel, [heads, dims, taps]."""

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
  def arrays(self) -> tuple[jax.Array, jax.Array | None]:
    """The weight, and the bias or None."""
    return self.weight[...], None if self.bias is None else self.bias[...]


class RecurrentInputs(NamedTuple):
  """What is known of each token, [B, T, ...].

  Fields:
    qkv: what a convolution reads: queries, keys and values, or fewer.
    decay: float32 [B, T, N], or of each channel of keys [B, T, N, H]; None
      where a mixer has no state beside the convolution's, or makes the
      decays of what is convolved.
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
  ) -> tuple[jax.Array, StateCache]:
    """[B, T, D] and the layer's cache with the state behind these tokens."""
    wide = wide_dtype(x.dtype)
    rate = jnp.exp(self.log_rate[...].astype(wide))
    step = self.step(x).astype(wide) + self.offset[...].astype(wide)[None, None]
    inputs = RecurrentInputs(
      (self.q(x), self.k(x), self.v(x)),
      -rate[None, None] * jax.nn.softplus(step),
      jax.nn.sigmoid(self.beta(x).astype(wide)),
      jnp.broadcast_to(tokens.seg, x.shape[:2]),
    )
    taps = tuple(t.weight[...] for t in (self.q_taps, self.k_taps, self.v_taps))
    shape = self.spec.cache_shape(1)
    mixed, cache = carried(
      mix_delta, taps, inputs, shape, tokens, cache, attend
    )
    mixed = self.norm(mixed.astype(wide))
    mixed = mixed * jax.nn.silu(self.z(x).astype(wide))
    return self.out(mixed.astype(x.dtype)), cache


def convolved(
  x: RecurrentInputs,
  taps: Sequence[tuple[Float[Array, "_ _ _"], Float[Array, "_ _"] | None]],
  before: Tail,
) -> list[jax.Array]:
  """What `x.qkv` are behind their convolutions, with biases if there are.

  Args:
    x: of the tokens.
    taps: for each of them a weight and a bias or None.
    before: the tokens that precede.
  """
  found = []
  for a, (weight, bias), tail in zip(x.qkv, taps, before.x, strict=True):
    y = causal_conv(a, weight, x.seg, before._replace(x=tail))
    found.append(y if bias is None else y + bias[None, None].astype(y.dtype))
  return found


def carried(
  mix: Callable[..., Any],
  weights: PyTree,
  x: RecurrentInputs,
  shape: StateShape,
  tokens: Tokens,
  cache: StateCache,
  attend: Attend,
) -> tuple[Float[Array, "B T N J"], StateCache]:
  """`over_tokens` from the state that a layer's cache has, and the cache then.

  Args:
    mix: see `over_tokens`, as `weights`, `x` and `attend`.
    weights: arrays that all shards have.
    x: of the tokens.
    shape: of the layer's state, without a cache one of zeros.
    tokens: the call's.
    cache: of the layer.
    attend: how tokens are sharded.

  Raises:
    OptionError: documents of which one may not see the one before it.
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
  x: RecurrentInputs,
  state: State,
  attend: Attend,
) -> tuple[Float[Array, "B T N J"], State]:
  """A recurrent mixer where the tokens lie.

  Args:
    mix: of `taps`, `x`, `state` and the axis of shards or None, per shard;
      gives the outputs and the state behind.
    taps: arrays that all shards have.
    x: of the tokens, whose convolutions come first.
    state: before them.
    attend: how they are sharded.
  """
  inside = attend.around
  if not attend.sharded and inside is None:
    return mix(taps, x, state, None)
  if (inside is not None or attend.size > 1) and not isinstance(
    attend.layout, Contiguous
  ):
    raise OptionError(
      "layout",
      attend.layout,
      "Contiguous() for a model with recurrent layers, whose state goes "
      "from each token to the next",
      "pass layout=Contiguous()",
    )
  if inside is not None:
    return mix(taps, x, state, inside)
  length = x.seg.shape[1]
  more = -length % attend.size
  fill = lambda a: jnp.pad(a, ((0, 0), (0, more), *((0, 0),) * (a.ndim - 2)))
  sequence = P(None, attend.axis)
  mixed, state = jax.shard_map(
    lambda taps, x, state: mix(taps, x, state, attend.axis),
    mesh=attend.mesh,
    in_specs=(P(), sequence, P()),
    out_specs=(sequence, P()),
    axis_names={attend.axis},
  )(taps, jax.tree.map(fill, x), state)
  return mixed[:, :length], state


def mix_delta(
  taps: Sequence[Float[Array, "_ _ _"]],
  x: RecurrentInputs,
  state: State,
  axis: str | None,
) -> tuple[jax.Array, State]:
  """The delta rule behind convolutions, for `over_tokens`.

  Args:
    taps: the weights of the convolutions of queries, keys and values.
    x: of the tokens.
    state: before them.
    axis: of the shards, or None.

  Returns:
    [B, T, N, J], and the state behind the last token.
  """
  assert x.decay is not None and x.beta is not None
  before, after = tails(state.tail, x.qkv, x.seg, axis)
  q, k, v = (
    jax.nn.silu(causal_conv(a, weight, x.seg, before._replace(x=tail)))
    for a, weight, tail in zip(x.qkv, taps, before.x, strict=True)
  )
  real = x.seg > 0
  decay = jnp.where(beside(real, x.decay), x.decay, 0)
  first = beside(begins(x.seg, before), decay)
  mixed, memory = delta_rule(
    _unit(q, q.shape[-1] ** -0.5),
    _unit(k, 1.0),
    v,
    jnp.where(first, -jnp.inf, decay),
    jnp.where(beside(real, x.beta), x.beta, 0),
    state.memory,
    axis=axis,
  )
  return mixed, State(memory, after)


def _unit(x: jax.Array, length: float) -> jax.Array:
  """Vectors of the given length, in x's dtype."""
  wide = x.astype(wide_dtype(x.dtype))
  square = jnp.sum(jnp.square(wide), -1, keepdims=True)
  scale = lax.rsqrt(square + jnp.asarray(1e-6, wide.dtype))
  return (wide * scale * jnp.asarray(length, wide.dtype)).astype(x.dtype)
