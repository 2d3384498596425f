"""Feedforward layers: plain, gated, and mixtures of experts."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from ringjax.errors import MeshError
from ringjax.nn.linear import (
  Identity,
  LayerNorm,
  Linear,
  Norm,
  RMSNorm,
  linear_product,
  part_dtype,
)
from ringjax.nn.param import param
from ringjax.nn.row_tiles import (
  RowTiles,
  by_tile,
  current_row_tiles,
  in_row_tiles,
  tiled_pair,
)
from ringjax.nn.sharding_context import Attend
from ringjax.nn.sums.router_sums import RouterRecord
from ringjax.nn.weights.expert_maps import ExpertAxes, expert_maps
from ringjax.nn.weights.layer_array import LayerArray, entry_of
from ringjax.ops.experts.expert_shards import ExpertShards, mix_sharded
from ringjax.ops.experts.grouped_product import (
  GroupedExperts,
  choose_product,
  gated,
  products,
)
from ringjax.ops.experts.grouped_product_tpu import (
  ExpertMaps,
  GroupedProductTPU,
)
from ringjax.ops.experts.moe import mix, mix_in_tiles
from ringjax.ops.experts.row_blocks import RowBlocks
from ringjax.ops.flat_product_tpu import LiveTiles
from ringjax.ops.norm import rms_norm, scaled_rms_norm
from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import model_call

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  "gelu": lambda x: jax.nn.gelu(x, approximate=False),
  "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
  "relu": jax.nn.relu,
  "relu2": lambda x: jnp.square(jax.nn.relu(x)),
  "silu": jax.nn.silu,
}
# Name of the weight of experts' norm among their maps.
_OUT_NORM = "out_norm"
# Activations that Pallas can't compute on a TPU: it has no erfc.
_NOT_IN_KERNELS = ("gelu",)


class AllWeights:
  """Base class of feedforwards of which each token uses all weights."""

  def idle(self, embed: int) -> int:
    """Number of weights that a token does not use."""
    del embed
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoFeedforward(AllWeights):
  """A layer that mixes tokens, and nothing else."""

  @property
  def width(self) -> int:
    """Number of intermediate numbers per token."""
    return 0

  def build(self, rngs: nnx.Rngs, embed: int) -> NoFeedforwardLayer:
    del rngs, embed
    return NoFeedforwardLayer()


class NoFeedforwardLayer(nnx.Module):
  """The module of `NoFeedforward`: it adds nothing."""

  def __call__(
    self, x: Float[Array, "B T D"], attend: Attend
  ) -> Float[Array, "B T D"]:
    del attend
    return jnp.zeros_like(x)


class XIELU(nnx.Module):
  """An activation with learned slopes: xIELU.

  Ref: Huang 2024, Deriving Activation Functions Using Integration, arXiv
  2411.13010.
  """

  def __init__(self, rngs: nnx.Rngs):
    # softplus(alpha_p) = .8 and beta + softplus(alpha_n) = .8.
    self.alpha_p = param(rngs, (1,), (None,), value=0.2035)
    self.alpha_n = param(rngs, (1,), (None,), value=-1.0502)
    self.beta = param(rngs, (), (), value=0.5)
    self.eps = param(rngs, (), (), value=-1e-6)

  def __call__(self, x: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
    as_row = lambda p: p[...].astype(x.dtype).reshape((1,) * x.ndim)
    # `beta` and `eps` are constants of the file, and not trained.
    beta, eps = lax.stop_gradient((as_row(self.beta), as_row(self.eps)))
    positive_side = jax.nn.softplus(as_row(self.alpha_p)) * x * x
    negative_side = (jnp.expm1(jnp.minimum(x, eps)) - x) * (
      beta + jax.nn.softplus(as_row(self.alpha_n))
    )
    return jnp.where(x > 0, positive_side, negative_side) + beta * x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain(AllWeights):
  """down(act(up(x))); the activation "xielu" has learned weights."""

  hidden: int
  act: str
  bias: bool = False

  @property
  def width(self) -> int:
    """Number of intermediate numbers per token."""
    return self.hidden

  def build(self, rngs: nnx.Rngs, embed: int) -> PlainLayer:
    return PlainLayer(rngs, self, embed)


class PlainLayer(nnx.Module):
  """The module of `Plain`."""

  def __init__(self, rngs: nnx.Rngs, spec: Plain, embed: int):
    self.spec = spec
    f = spec.hidden
    self.up = Linear(rngs, (embed,), (f,), ("embed", "ffn"), bias=spec.bias)
    self.down = Linear(rngs, (f,), (embed,), ("ffn", "embed"), bias=spec.bias)
    self.act = XIELU(rngs) if spec.act == "xielu" else None

  def __call__(
    self, x: Float[Array, "B T D"], attend: Attend
  ) -> Float[Array, "B T D"]:
    return attend.summed_rowwise(self, x)

  def row(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Apply the layer to some tokens, all at once."""
    act = self.act or ACTIVATIONS[self.spec.act]
    return self.down(by_tile(act, self.up(x)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clamped:
  """GPT-OSS' gate: (up + 1) * gate * sigmoid(alpha gate), both clamped."""

  alpha: float
  limit: float

  def __call__(
    self, gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]
  ) -> Float[Array, "*batch F"]:
    limit = jnp.asarray(self.limit, gate.dtype)
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    return (
      (up + 1)
      * gate
      * jax.nn.sigmoid(gate * jnp.asarray(self.alpha, gate.dtype))
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClampedProduct:
  """act(gate) * up, where the gate has an upper limit, and `up` is clamped.

  Attributes:
    act: Activation of the gate.
    limit: Largest gate, and largest absolute value of `up`.
  """

  act: str
  limit: float

  def __call__(
    self, gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]
  ) -> Float[Array, "*batch F"]:
    limit = jnp.asarray(self.limit, gate.dtype)
    gate = jnp.minimum(gate, limit)
    return ACTIVATIONS[self.act](gate) * jnp.clip(up, -limit, limit)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gated(AllWeights):
  """down(act(gate(x)) * up(x)).

  Attributes:
    hidden: F, width of the layer.
    act: Activation of the gate.
    bias: Whether the maps have biases.
    gate_scale: Factor on the gate before its activation.
    scale: Factor on the output.
    sparsity: Fraction of a token's gates that are zeroed, assuming that they
      are normally distributed; 0 leaves gates unchanged.
    clamped: Gate to use instead of act(gate) * up, or None.
  """

  hidden: int
  act: str
  bias: bool = False
  gate_scale: float = 1.0
  scale: float = 1.0
  sparsity: float = 0.0
  clamped: Clamped | ClampedProduct | None = None

  @property
  def width(self) -> int:
    """Number of intermediate numbers per token."""
    return 2 * self.hidden

  def build(self, rngs: nnx.Rngs, embed: int) -> GatedLayer:
    return GatedLayer(rngs, self, embed)


class GatedLayer(nnx.Module):
  """The module of `Gated`."""

  def __init__(self, rngs: nnx.Rngs, spec: Gated, embed: int):
    self.spec = spec
    into = lambda: Linear(
      rngs, (embed,), (spec.hidden,), ("embed", "ffn"), bias=spec.bias
    )
    self.gate, self.up = into(), into()
    self.down = Linear(
      rngs, (spec.hidden,), (embed,), ("ffn", "embed"), bias=spec.bias
    )

  def __call__(
    self, x: Float[Array, "B T D"], attend: Attend
  ) -> Float[Array, "B T D"]:
    return attend.summed_rowwise(self, x)

  def row(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Apply the layer to some tokens, all at once."""
    spec, tiles = self.spec, current_row_tiles()
    in_kernel = not spec.bias and spec.act not in _NOT_IN_KERNELS
    in_kernel = tiles is not None and in_kernel and not spec.sparsity
    pair = tiled_pair(self.gate, self.up) if in_kernel else None
    if tiles is not None and pair is not None:
      h = tiles.gated(x, *pair, self._combined)
    else:
      h = by_tile(self._combined, self.gate(x), self.up(x))
    y = self.down(h)
    if spec.scale == 1.0:
      return y
    return by_tile(lambda y: y * jnp.asarray(spec.scale, y.dtype), y)

  def _combined(
    self, gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]
  ) -> Float[Array, "*batch F"]:
    """Intermediate numbers, from both products."""
    spec = self.spec
    if spec.gate_scale != 1.0:
      gate = gate * jnp.asarray(spec.gate_scale, gate.dtype)
    if spec.sparsity:
      gate = above(gate, spec.sparsity)
    if spec.clamped is not None:
      return spec.clamped(gate, up)
    return ACTIVATIONS[spec.act](gate) * up


def above(x: Float[Array, "*batch F"], part: float) -> Float[Array, "*batch F"]:
  """relu(x - quantile), for the quantile `part` of a normal distribution."""
  x32 = x.astype(jnp.float32)
  cut = jnp.float32(statistics.NormalDist().inv_cdf(part))
  mean = jnp.mean(x32, -1, keepdims=True)
  spread = jnp.std(x32, -1, keepdims=True)
  return jax.nn.relu(x32 - (mean + spread * cut)).astype(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Softmax:
  """The k likeliest experts, weighted by their likelihood.

  Attributes:
    renormalise: Whether the weights of the chosen experts sum to one.
  """

  renormalise: bool

  def __call__(
    self,
    logits: Float[Array, "T E"],
    correction: Float[Array, " E"] | None,
    k: int,
  ) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    del correction
    if self.renormalise:
      top, chosen = lax.top_k(logits, k)
      return jax.nn.softmax(top, -1), chosen
    top, chosen = lax.top_k(jax.nn.softmax(logits, -1), k)
    return top, chosen

  def likelihoods(self, logits: Float[Array, "*n E"]) -> Float[Array, "*n E"]:
    """Routing probabilities of each token, which sum to one."""
    return jax.nn.softmax(logits, -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sigmoid:
  """The k experts of largest logits, weighted by the logits' sigmoid."""

  def __call__(
    self,
    logits: Float[Array, "T E"],
    correction: Float[Array, " E"] | None,
    k: int,
  ) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    del correction
    top, chosen = lax.top_k(logits, k)
    return jax.nn.sigmoid(top), chosen

  def likelihoods(self, logits: Float[Array, "*n E"]) -> Float[Array, "*n E"]:
    """Routing probabilities of each token, which sum to one."""
    return _normalised(jax.nn.sigmoid(logits))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseMixer:
  """Phi-3.5-MoE's choice: two experts, one after another.

  Each is the expert of the largest logit among those that are left, weighted by
  its likelihood among the experts whose logits are near its own.

  Guarantees: the choice of evaluation. Training draws experts at random there
  and has its own gradient; here a gradient is that of the weights.
  Ref: Liu et al. 2024, GRIN, arXiv 2409.12136.

  Attributes:
    tolerance: Largest distance of a near logit, as a fraction of the larger
      absolute value of the two.
  """

  tolerance: float

  def __call__(
    self,
    logits: Float[Array, "T E"],
    correction: Float[Array, " E"] | None,
    k: int,
  ) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    del correction
    remaining, weights, chosen = logits, [], []
    for _ in range(k):
      best = jnp.argmax(remaining, -1, keepdims=True)
      top = jnp.take_along_axis(remaining, best, -1)
      size = lax.stop_gradient(jnp.maximum(jnp.abs(logits), top))
      distant = (top - logits) / size > jnp.float32(self.tolerance)
      likelihoods = jax.nn.softmax(jnp.where(distant, -jnp.inf, remaining), -1)
      weights.append(jnp.take_along_axis(likelihoods, best, -1))
      chosen.append(best)
      is_best = jnp.arange(logits.shape[-1])[None] == best
      remaining = jnp.where(is_best, -jnp.inf, remaining)
    return jnp.concatenate(weights, -1), jnp.concatenate(chosen, -1)

  def likelihoods(self, logits: Float[Array, "*n E"]) -> Float[Array, "*n E"]:
    """Routing probabilities of each token, which sum to one."""
    return jax.nn.softmax(logits, -1)


def _normalised(x: Float[Array, "*n E"]) -> Float[Array, "*n E"]:
  return x / (jnp.sum(x, -1, keepdims=True) + jnp.float32(1e-20))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouped:
  """DeepSeek's choice: the best groups of experts, then the best experts.

  Attributes:
    groups: Number of groups of experts.
    best: Number of groups that may be chosen from.
    renormalise: Whether the weights of the chosen experts sum to one.
    scale: Factor on the weights.
    softmax: Whether experts are weighed by a softmax of the logits
      (DeepSeek-V2), not each by a sigmoid (V3).
    judged: Number of a group's best experts whose sum ranks the group.
    logit_scale: Factor of the logits.
  """

  groups: int = 1
  best: int = 1
  renormalise: bool = True
  scale: float = 1.0
  softmax: bool = False
  judged: int = 2
  logit_scale: float = 1.0

  def __call__(
    self,
    logits: Float[Array, "T E"],
    correction: Float[Array, " E"] | None,
    k: int,
  ) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    logits = self._scaled(logits)
    likelihoods = (
      jax.nn.softmax(logits) if self.softmax else jax.nn.sigmoid(logits)
    )
    ranked = (
      likelihoods if correction is None else likelihoods + correction[None]
    )
    tokens, experts = ranked.shape
    group = ranked.reshape(tokens, self.groups, -1)
    merit = jnp.sum(lax.top_k(group, self.judged)[0], -1)
    _, best_groups = lax.top_k(merit, self.best)
    allowed = jnp.any(
      jax.nn.one_hot(best_groups, self.groups, dtype=jnp.bool_), 1
    )
    ranked = jnp.where(allowed[..., None], group, -jnp.inf).reshape(
      tokens, experts
    )
    _, chosen = lax.top_k(ranked, k)
    weights = jnp.take_along_axis(likelihoods, chosen, -1)
    if self.renormalise:
      total = jnp.sum(weights, -1, keepdims=True)
      weights = weights / (total + jnp.float32(1e-20))
    return weights * jnp.float32(self.scale), chosen

  def likelihoods(self, logits: Float[Array, "*n E"]) -> Float[Array, "*n E"]:
    """Routing probabilities of each token, which sum to one."""
    logits = self._scaled(logits)
    if self.softmax:
      return jax.nn.softmax(logits, -1)
    return _normalised(jax.nn.sigmoid(logits))

  def _scaled(self, logits: Float[Array, "*n E"]) -> Float[Array, "*n E"]:
    if self.logit_scale == 1.0:
      return logits
    return logits * jnp.asarray(self.logit_scale, logits.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
  """DeepSeek-V4's choice: the best scores of single experts.

  Attributes:
    root: Whether a score is the root of the logit's softplus, not its sigmoid.
    scale: Factor on the weights, which sum to one before it.
    by_id: Number of token ids, each of which has fixed experts, whose scores
      weigh them; 0: a token chooses by its scores.
  """

  root: bool
  scale: float
  by_id: int = 0

  def __call__(
    self,
    logits: Float[Array, "T E"],
    correction: Float[Array, " E"] | None,
    k: int,
  ) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    ranked = self._scores(logits)
    if correction is not None:
      ranked = ranked + correction[None]
    chosen = lax.top_k(ranked, k)[1]
    return self.weights(logits, chosen), chosen

  def weights(
    self, logits: Float[Array, "T E"], chosen: Int[Array, "T k"]
  ) -> Float[Array, "T k"]:
    """Weights of chosen experts."""
    scores = jnp.take_along_axis(self._scores(logits), chosen, -1)
    return _normalised(scores) * jnp.float32(self.scale)

  def likelihoods(self, logits: Float[Array, "*n E"]) -> Float[Array, "*n E"]:
    """Routing probabilities of each token, which sum to one."""
    return _normalised(self._scores(logits))

  def _scores(self, logits: Float[Array, "*n E"]) -> Float[Array, "*n E"]:
    if self.root:
      return jnp.sqrt(jax.nn.softplus(logits))
    return jax.nn.sigmoid(logits)


# Choices of a token's experts, from their logits.
Router = Grouped | Scored | Sigmoid | Softmax | SparseMixer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
  """A mixture of experts.

  Attributes:
    experts: Number of experts, E.
    chosen: Number of experts per token, k.
    hidden: F of an expert.
    act: Activation of the gate, or of experts without one.
    router: Turns logits into weights and choices.
    bias: Whether the experts' maps have biases.
    router_bias: Whether the router has a bias.
    correction: Whether the router has a learned offset for its ranking.
    clamped: Gate to use instead of act(gate) * up, or None.
    scale_input: Whether weights multiply an expert's input, not its output.
    shared: Hidden size of the expert that all tokens use, 0 for none.
    shared_clamped: Whether `clamped` is that expert's gate, too.
    shared_gate: Whether that expert's output has a gate.
    gated: Whether experts, including the shared one, are
      down(act(gate(x)) * up(x)); else down(act(up(x))).
    latent: Size of the experts' input and output, between two maps that they
      share; 0: the experts read and write vectors of the layer's width.
    latent_norm: Norm of the experts' input in latents, or None.
    out_norm: RMSNorm of each expert's output, whose weight multiplies its input
      (`scaled_input`) and is the same for all experts; or None.
    scaled: Whether the router and the experts each scale their input,
      elementwise, the router also by the root of D, and each expert its
      output.
    identities: Number of further experts of the router, after the others,
      whose output is their input; not with `latent` nor `scale_input`.
  """

  experts: int
  chosen: int
  hidden: int
  act: str
  router: Router
  bias: bool = False
  router_bias: bool = False
  correction: bool = False
  clamped: Clamped | ClampedProduct | None = None
  scale_input: bool = False
  shared: int = 0
  shared_clamped: bool = False
  shared_gate: bool = False
  gated: bool = True
  latent: int = 0
  latent_norm: Norm | None = None
  out_norm: Norm | None = None
  scaled: bool = False
  identities: int = 0

  @property
  def routed(self) -> int:
    """Number of experts that the router chooses among, with identities."""
    return self.experts + self.identities

  @property
  def width(self) -> int:
    """Number of intermediate numbers per token."""
    return (1 + self.gated) * (self.chosen * self.hidden + self.shared)

  @property
  def by_id(self) -> int:
    """Number of token ids that have fixed experts; 0: tokens choose."""
    return self.router.by_id if isinstance(self.router, Scored) else 0

  def idle(self, embed: int) -> int:
    """Number of weights that a token does not use: those of other experts."""
    expert_weights = (2 + self.gated) * (self.latent or embed) * self.hidden
    return (self.experts - self.chosen) * expert_weights

  def combine(
    self, gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]
  ) -> Float[Array, "*batch F"]:
    """Intermediate numbers of an expert with a gate."""
    if self.clamped is not None:
      return self.clamped(gate, up)
    return ACTIVATIONS[self.act](gate) * up

  def build(self, rngs: nnx.Rngs, embed: int) -> ExpertsLayer:
    return ExpertsLayer(rngs, self, embed)


class ExpertsLayer(nnx.Module):
  """The module of `Experts`.

  Attributes:
    gate: [E, D, F]; or a replacement of an `ExpertLinear` of it, as for `up`
      and `down`.
    up: [E, D, F].
    down: [E, F, D].
    over: Mesh axes that shard the experts, the last one moving fastest.
  """

  # Maps of each expert, without biases.
  MAPS = ("gate", "up", "down")
  # Maps whose arrays it uses directly instead of calling them.
  ARRAYS = ("router", "into", "out_of")

  def __init__(self, rngs: nnx.Rngs, spec: Experts, embed: int):
    e, f, d = spec.experts, spec.hidden, spec.latent or embed
    self.spec = spec
    self.over: tuple[str, ...] = ()
    assert not spec.identities or not (spec.latent or spec.scale_input)
    routed = spec.routed
    self.router = Linear(
      rngs, (embed,), (routed,), ("embed", None), bias=spec.router_bias
    )
    self.correction = (
      param(rngs, (routed,), (None,), wide=True) if spec.correction else None
    )
    self.table = _expert_table(rngs, spec) if spec.by_id else None
    if spec.scaled:
      scale = lambda n: param(rngs, (n,), (None,), value=1.0)
      self.router_scale, self.input_scale = scale(embed), scale(embed)
      self.expert_scale = scale(e)
    # Latent axes are not sharded like the layer's width.
    inner = None if spec.latent else "embed"
    maps = functools.partial(param, rngs, by_index=True)
    into = lambda: maps((e, d, f), ("experts", inner, "ffn"), fan_in=d)
    self.gate = into() if spec.gated else None
    self.up = into()
    self.down = maps((e, f, d), ("experts", "ffn", inner), fan_in=f)
    latent = lambda a, b, *axes: (
      Linear(rngs, (a,), (b,), axes) if spec.latent else None
    )
    self.into = latent(embed, d, "embed", None)
    self.out_of = latent(d, embed, None, "embed")
    latent_norm, out_norm = spec.latent_norm, spec.out_norm
    self.latent_norm = (
      None if latent_norm is None else latent_norm.build(rngs, d)
    )
    assert out_norm is None or (out_norm.scaled_input and not spec.scale_input)
    self.out_norm = None if out_norm is None else out_norm.build(rngs, d)
    bias = lambda n, axis: (
      maps((e, n), ("experts", axis)) if spec.bias else None
    )
    self.gate_bias = bias(f, "ffn") if spec.gated else None
    self.up_bias = bias(f, "ffn")
    self.down_bias = bias(d, inner)
    shared_spec: Gated | Plain = Plain(hidden=spec.shared, act=spec.act)
    if spec.gated:
      shared_spec = Gated(
        hidden=spec.shared,
        act=spec.act,
        clamped=spec.clamped if spec.shared_clamped else None,
      )
    self.shared = shared_spec.build(rngs, embed) if spec.shared else None
    self.shared_gate = (
      Linear(rngs, (embed,), (1,), ("embed", None))
      if spec.shared_gate
      else None
    )

  def __call__(
    self,
    x: Float[Array, "B T D"],
    attend: Attend,
    record: RouterRecord | None = None,
    ids: Int[Array, "B T"] | None = None,
  ) -> Float[Array, "B T D"]:
    """[B, T, D] -> [B, T, D].

    Args:
      x: Tokens.
      attend: Sharding of the tokens.
      record: Record that gets the routing; None for none.
      ids: Token ids, int32 [B, T], for experts that are fixed by them.
    """
    tiles = current_row_tiles()
    if tiles is not None:
      assert record is None
      return self._in_row_tiles(tiles, x, attend)
    spec = self.spec
    fixed: tuple[Int[Array, "B T k"], ...] = ()
    if self.table is not None:
      assert ids is not None, "layers whose experts ids choose need the ids"
      table = lax.stop_gradient(self.table[...])
      fixed = (table[jnp.clip(ids, 0, spec.by_id - 1)].astype(jnp.int32),)
    weights, maps = self._router_weights(x), self._expert_weights()
    weights["latent"] = tuple(
      None if map_ is None else map_.weight[...]
      for map_ in (self.into, self.out_of)
    )
    if self.latent_norm is not None:
      weights["latent_norm"] = _norm_weight(self.latent_norm)

    def run(
      w: PyTree,
      maps: PyTree,
      tokens: tuple[jax.Array, ...],
      shards: ExpertShards | None = None,
    ) -> Any:
      x, *fixed_experts = tokens
      x, routing = self._routed(w, x, *fixed_experts)
      logits, routed, chosen, mixing, of_identities = routing
      into, out_of = w["latent"]
      x = x if into is None else linear_product(x, into, 1)
      if spec.latent_norm is not None:
        norm = spec.latent_norm
        x = rms_norm(x, w["latent_norm"], norm.eps, offset=norm.offset)
      grouped = self._grouped(maps, x)
      if shards is None:
        y = mix(
          lambda expert, x: self._expert(entry_of(maps, expert), x),
          x,
          chosen,
          mixing,
          spec.experts,
          scale_input=spec.scale_input,
          grouped=grouped,
        )
      else:
        y = mix_sharded(
          self._expert,
          maps,
          x,
          chosen,
          mixing,
          spec.experts,
          shards,
          scale_input=spec.scale_input,
          entry=entry_of,
          grouped=grouped,
        )
      y = y if out_of is None else linear_product(y, out_of, 1)
      if of_identities is not None:
        sums = y.astype(jnp.float32) + of_identities * x.astype(jnp.float32)
        y = sums.astype(y.dtype)
      return y if record is None else (y, logits, routed)

    if self.over and attend.mesh is not None:
      y = attend.per_expert_shard(run, weights, maps, (x, *fixed), self.over)
    else:
      _check_all_here(maps, spec.experts)
      y = attend.per_shard(
        lambda w, x: run(w[0], w[1], x), (weights, maps), (x, *fixed)
      )
    if record is not None:
      y, logits, chosen = y
      offset = self.correction is not None
      record.add(spec.router, logits, chosen, offset=offset)
    if self.shared is None:
      return y
    return y + attend.rowwise(self._shared, x)

  def _router_weights(self, x: Float[Array, "_ _ D"]) -> dict[str, Any]:
    """Arrays of the router of tokens like x."""
    weights = dict(
      router=_value(self.router.weight),
      router_bias=_value(self.router.bias),
      correction=_value(self.correction),
    )
    if self.spec.scaled:
      root = jnp.asarray(1 / math.sqrt(x.shape[-1]), x.dtype)
      weights["router_scale"] = self.router_scale[...] * root
      weights["input_scale"] = self.input_scale[...]
      weights["expert_scale"] = self.expert_scale[...]
    return weights

  def _expert_weights(self) -> dict[str, tuple[Any, Any]]:
    """Weight and bias, or None, of each map of the experts."""
    maps = dict(
      gate=(_stored(self.gate), _stored(self.gate_bias)),
      up=(_stored(self.up), _stored(self.up_bias)),
      down=(_stored(self.down), _stored(self.down_bias)),
    )
    if self.out_norm is not None:
      # With an axis of experts, as functions of an expert close over no array.
      norm_weight = _norm_weight(self.out_norm)
      norm_weights = jnp.broadcast_to(
        norm_weight[None], (self.spec.experts, *norm_weight.shape)
      )
      maps[_OUT_NORM] = (norm_weights, None)
    return maps

  def _routed(
    self,
    w: PyTree,
    x: Float[Array, "T D"],
    *fixed_experts: Int[Array, "T k"],
  ) -> tuple[Float[Array, "T D"], _Routing]:
    """Inputs of the experts, and the experts of each token.

    Args:
      w: Arrays of the router, see `_router_weights`.
      x: Tokens.
      *fixed_experts: Experts that the tokens' ids choose, if they do.
    """
    spec, router_input = self.spec, x
    if spec.scaled:
      router_input, x = (
        x * w["router_scale"][None],
        x * w["input_scale"][None],
      )
    logits = lax.dot_general(
      router_input, w["router"], (((1,), (0,)), ((), ())),
      preferred_element_type=jnp.float32,
    )  # fmt: skip
    if w["router_bias"] is not None:
      logits = logits + w["router_bias"].astype(jnp.float32)[None]
    if fixed_experts:
      assert isinstance(spec.router, Scored)
      (chosen,) = fixed_experts
      mixing = spec.router.weights(logits, chosen)
    else:
      mixing, chosen = spec.router(logits, w["correction"], spec.chosen)
    if spec.scaled:
      mixing = mixing * w["expert_scale"].astype(jnp.float32)[chosen]
    routed, of_identities = chosen, None
    if spec.identities:
      is_identity = chosen >= spec.experts
      of_identities = jnp.sum(
        jnp.where(is_identity, mixing, 0), -1, keepdims=True
      )
      # The number of experts stands for none.
      chosen = jnp.minimum(chosen, spec.experts)
    return x, _Routing(logits, routed, chosen, mixing, of_identities)

  def _in_row_tiles(
    self, tiles: RowTiles, x: Float[Array, "tiles size D"], attend: Attend
  ) -> Float[Array, "tiles size D"]:
    """[tiles, size, D]: one product for the rows of all tiles with tokens."""
    spec, router_weights = self.spec, self._router_weights(x)
    maps = self._expert_weights()

    def route(x: Float[Array, "1 size D"]) -> tuple[Array, ...]:
      x, routing = self._routed(router_weights, x[0])
      parts = x, routing.chosen, routing.mixing, routing.of_identities
      return tuple(part[None] for part in parts if part is not None)

    inputs, chosen, mixing, *of_identities = tiles.map_tiles(route, x)
    # The number of experts stands for none.
    chosen = jnp.where(tiles.holds[..., None], chosen, spec.experts)
    if self.into is not None:
      inputs = self.into(inputs)
    if self.latent_norm is not None:
      inputs = tiles.map_tiles(self.latent_norm, inputs)

    y = self._mixed(maps, inputs, chosen, mixing, tiles.live)
    y = y if self.out_of is None else self.out_of(y)
    if of_identities:

      def with_identities(y: Array, x: Array, factor: Array) -> Array:
        return (y.astype(jnp.float32) + factor * x.astype(jnp.float32)).astype(
          y.dtype
        )

      y = tiles.map_tiles(with_identities, y, inputs, *of_identities)
    if self.shared is None:
      return y
    return tiles.map_tiles(jnp.add, y, attend.rowwise(self._shared, x))

  def _mixed(
    self,
    maps: PyTree,
    x: Float[Array, "tiles size D"],
    chosen: Int[Array, "tiles size k"],
    mixing: Float[Array, "tiles size k"],
    live: LiveTiles,
  ) -> Float[Array, "tiles size D"]:
    """Sums of the experts' outputs, on each shard of them by itself.

    All shards have all tokens: each adds up its experts, or its part of their
    width, and a float32 sum over the shards follows.
    """
    mesh = model_call().mesh
    if mesh is None or mesh.size == 1:
      return self._mixed_here(maps, x, chosen, mixing, live)
    axes = ExpertAxes(over=self.over, mesh=mesh)
    width = tuple(sorted(axes.width(self.down, down=True)))
    local_experts = self.spec.experts // math.prod(
      mesh.shape[axis] for axis in self.over
    )
    specs = {
      name: tuple(axes.specs(getattr(self, part)) for part in parts)
      for name, parts in ((name, (name, f"{name}_bias")) for name in self.MAPS)
    }
    if _OUT_NORM in maps:
      specs[_OUT_NORM] = (P(self.over or None), None)

    def local(
      maps: PyTree, x: Array, chosen: Array, mixing: Array, live: LiveTiles
    ) -> Array:
      if self.over:
        number = chosen - collectives.axis_index(self.over) * local_experts
        is_here = (number >= 0) & (number < local_experts)
        chosen = jnp.where(is_here, number, local_experts)
      if width and (bias := maps["down"][1]) is not None:
        if isinstance(bias, LayerArray):
          bias = bias.array()
        # One shard of the width adds it.
        is_first = collectives.axis_index(width) == 0
        bias = jnp.where(is_first, bias, jnp.zeros((), bias.dtype))
        maps = maps | {"down": (maps["down"][0], bias)}
      over = (*self.over, *width)
      y = self._mixed_here(
        maps, x, chosen, mixing, live, experts=local_experts, wide=bool(over)
      )
      return collectives.total(y, over).astype(x.dtype) if over else y

    arrays = x, chosen, mixing, live
    replicated = jax.tree.map(lambda _: P(), arrays)
    return jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(specs, *replicated),
      out_specs=P(),
      # Pallas' interpreter mixes arrays that vary over axes with ones that
      # don't.
      check_vma=False,
    )(maps, *arrays)

  def _mixed_here(
    self,
    maps: PyTree,
    x: Float[Array, "tiles size D"],
    chosen: Int[Array, "tiles size k"],
    mixing: Float[Array, "tiles size k"],
    live: LiveTiles,
    *,
    experts: int | None = None,
    wide: bool = False,
  ) -> Float[Array, "tiles size D"]:
    """`mix_in_tiles` of these maps, of some experts or of all."""

    def expert(number: Array, x: Array) -> Array:
      # Rows of a block of one expert, which its maps read as those of a call.
      with in_row_tiles(None):
        return self._expert(entry_of(maps, number), x)

    return mix_in_tiles(
      expert,
      x,
      chosen,
      mixing,
      self.spec.experts if experts is None else experts,
      live,
      scale_input=self.spec.scale_input,
      grouped=self._grouped(maps, x.reshape(-1, x.shape[-1])),
      wide=wide,
    )

  def _expert(self, maps: PyTree, x: jax.Array) -> jax.Array:
    """Output of one expert, whose weights and biases these are."""
    spec = self.spec

    def linear(name: str, x: jax.Array) -> jax.Array:
      weight, bias = maps[name]
      if isinstance(weight, nnx.Module):
        y: Any = weight(x)  # pyrefly: ignore[not-callable]
      else:
        y = jnp.matmul(x, weight, preferred_element_type=x.dtype)
      return y if bias is None else y + bias[None].astype(y.dtype)

    up = linear("up", x)
    if not spec.gated:
      h = ACTIVATIONS[spec.act](up)
    else:
      h = spec.combine(linear("gate", x), up)
    y = linear("down", h)
    if spec.out_norm is None:
      return y
    return self._normed(y, maps[_OUT_NORM][0])

  def _normed(
    self, y: Float[Array, "n D"], weight: Float[Array, "*#n D"]
  ) -> Float[Array, "n D"]:
    """Outputs of experts after their norm."""
    norm = self.spec.out_norm
    assert norm is not None
    return scaled_rms_norm(y, weight, norm.eps, offset=norm.offset)

  def _grouped(self, maps: PyTree, x: jax.Array) -> GroupedExperts | None:
    """These experts for all rows at once, if a kernel serves them."""
    kernel_maps: dict[str, ExpertMaps] = {}
    for name, (weight, _) in maps.items():
      if name == _OUT_NORM:
        continue
      map_ = expert_maps(weight)
      if map_ is not None:
        kernel_maps[name] = map_
      elif weight is not None:
        return None
    inputs = tuple(kernel_maps[n] for n in ("gate", "up") if n in kernel_maps)
    choice = choose_product(x, (inputs, (kernel_maps["down"],)))
    if choice.algorithm is None:
      return None
    return GroupedExperts(
      kernel=choice.algorithm, f=self._experts_of_blocks, weights=maps
    )

  def _experts_of_blocks(
    self,
    kernel: GroupedProductTPU,
    maps: PyTree,
    x: Float[Array, "P D"],
    blocks: RowBlocks,
  ) -> Float[Array, "P D"]:
    """Outputs of the rows of all blocks, each by its expert."""
    spec = self.spec
    weights = {
      name: expert_maps(maps[name][0]) for name in maps if name != _OUT_NORM
    }

    def rows_of(vectors: jax.Array) -> jax.Array:
      # A block without rows has no expert, nor a gradient.
      rows = vectors.at[blocks.expert].get(mode="fill", fill_value=0)
      return jnp.repeat(rows, blocks.row.shape[1], axis=0)

    def biased(name: str, y: jax.Array) -> jax.Array:
      bias = maps[name][1]
      if bias is None:
        return y
      if isinstance(bias, LayerArray):
        bias = bias.array()
      return y + rows_of(bias.astype(y.dtype))

    names = ("gate", "up") if spec.gated else ("up",)
    inputs = tuple(weights[name] for name in names)
    if spec.gated and not spec.bias and spec.act not in _NOT_IN_KERNELS:
      h = gated(kernel, spec.combine, x, inputs, blocks)
    else:
      sums = map(biased, names, products(kernel, x, inputs, blocks))
      h = (spec.combine if spec.gated else ACTIVATIONS[spec.act])(*sums)
    (y,) = products(kernel, h, (weights["down"],), blocks)
    y = biased("down", y)
    if spec.out_norm is None:
      return y
    return self._normed(y, rows_of(maps[_OUT_NORM][0]))

  def _shared(self, x: jax.Array) -> jax.Array:
    assert self.shared is not None
    y = self.shared.row(x)
    if self.shared_gate is None:
      return y
    gated = lambda y, gate: y * jax.nn.sigmoid(gate)
    return by_tile(gated, y, self.shared_gate(x))


class _Routing(NamedTuple):
  """Experts of tokens.

  Fields:
    logits: Logits of the router, float32 [T, E].
    routed: Experts and identities that the router has chosen, int32 [T, k].
    chosen: Experts of each token, int32 [T, k]; E for none.
    mixing: Weights of the experts, float32 [T, k].
    of_identities: Sum of the weights of identities, float32 [T, 1], or None.
  """

  logits: Float[Array, "T E"]
  routed: Int[Array, "T k"]
  chosen: Int[Array, "T k"]
  mixing: Float[Array, "T k"]
  of_identities: Float[Array, "T 1"] | None


def _stored(parameter: Any) -> Any:
  """Value of a parameter, which may be a `LayerArray`; others unchanged."""
  is_parameter = isinstance(parameter, nnx.Variable)
  return parameter.get_value() if is_parameter else parameter


def _value(parameter: nnx.Variable | None) -> Any:
  """The array of a parameter of a layer, or None."""
  value = _stored(parameter)
  return value.array() if isinstance(value, LayerArray) else value


def _norm_weight(norm: LayerNorm | RMSNorm | Identity) -> Any:
  """The weight of a norm of experts, or None."""
  assert not isinstance(norm, Identity)
  return _value(norm.weight)


def _expert_table(rngs: nnx.Rngs, spec: Experts) -> nnx.Variable:
  """Experts of each token id, whole numbers; in a new model k neighbours."""
  table = param(rngs, (spec.by_id, spec.chosen), (None, None), wide=True)
  first = jnp.arange(spec.by_id, dtype=jnp.int32)[:, None]
  offset = jnp.arange(spec.chosen, dtype=jnp.int32)[None]
  return table.replace(((first + offset) % spec.experts).astype(jnp.float32))


def _check_all_here(maps: PyTree, experts: int) -> None:
  """Refuse a part of the experts, as a caller's shard_map may pass."""
  is_array = lambda x: isinstance(x, LayerArray)
  count = min(a.shape[0] for a in jax.tree.leaves(maps, is_leaf=is_array))
  if count != experts:
    raise MeshError(
      "model",
      f"{count} of {experts} experts in a shard_map",
      "all of them",
      "pass the model with in_specs=P(), or call it outside of the shard_map",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseAndExperts:
  """A plain feedforward and experts, each with its own norms, added up.

  Attributes:
    dense: The plain feedforward.
    sparse: The experts, which scale their input.
    norm: Norms before and after both; before the experts without weights.
  """

  dense: Gated
  sparse: Experts
  norm: Norm

  @property
  def width(self) -> int:
    """Number of intermediate numbers per token."""
    return self.dense.width + self.sparse.width

  def idle(self, embed: int) -> int:
    """Number of weights that a token does not use."""
    return self.sparse.idle(embed)

  def build(self, rngs: nnx.Rngs, embed: int) -> DenseAndExpertsLayer:
    return DenseAndExpertsLayer(rngs, self, embed)


class DenseAndExpertsLayer(nnx.Module):
  """The module of `DenseAndExperts`; its input has not been normalised."""

  def __init__(self, rngs: nnx.Rngs, spec: DenseAndExperts, embed: int):
    self.spec = spec
    norm = lambda **options: dataclasses.replace(spec.norm, **options).build(
      rngs, embed
    )
    self.dense = spec.dense.build(rngs, embed)
    self.sparse = spec.sparse.build(rngs, embed)
    self.pre_dense, self.post_dense = norm(), norm()
    self.pre_sparse, self.post_sparse = norm(weight=False), norm()

  def __call__(
    self,
    x: Float[Array, "B T D"],
    attend: Attend,
    record: RouterRecord | None = None,
  ) -> Float[Array, "B T D"]:
    """[B, T, D] -> [B, T, D]; `record` gets the routing, None for none."""
    narrow = part_dtype(self, x.dtype)
    normed = lambda norm: by_tile(lambda x: norm(x).astype(narrow), x)
    dense = self.dense(normed(self.pre_dense), attend)
    sparse = self.sparse(normed(self.pre_sparse), attend, record)

    def total(dense: jax.Array, sparse: jax.Array) -> jax.Array:
      dense = self.post_dense(dense.astype(x.dtype))
      return dense + self.post_sparse(sparse.astype(x.dtype))

    return by_tile(total, dense, sparse)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortcutFeedforward:
  """Two dense feedforwards, and experts whose output is added after both.

  Attributes:
    dense: Both dense feedforwards.
    sparse: Mixture of experts.
  """

  dense: Gated
  sparse: Experts

  @property
  def width(self) -> int:
    """Number of intermediate numbers per token."""
    return self.dense.width + self.sparse.width

  def idle(self, embed: int) -> int:
    """Number of weights that a token does not use."""
    return self.sparse.idle(embed)

  def build(self, rngs: nnx.Rngs, embed: int) -> ShortcutFeedforwards:
    return ShortcutFeedforwards(rngs, self, embed)


class ShortcutFeedforwards(nnx.Module):
  """The modules of `ShortcutFeedforward`."""

  def __init__(self, rngs: nnx.Rngs, spec: ShortcutFeedforward, embed: int):
    self.spec = spec
    self.dense = nnx.List([spec.dense.build(rngs, embed) for _ in range(2)])
    self.sparse = spec.sparse.build(rngs, embed)
