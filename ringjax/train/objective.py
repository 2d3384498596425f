"""The loss of a batch, without an array over all tokens and the vocabulary.

Guarantees: sum over tokens of weight * (-log p(label) + z logsumexp^2), without
those whose label is -100 (`ops.loss.IGNORE_INDEX`); its gradients are those of
the plain model, whatever the layout and the mesh.
Memory: the head works on a block of tokens at a time, forward and backward;
no shard holds more of the sequence than its own part.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError
from ringjax.kv.base import CallCache, NoCache
from ringjax.kv.encoder_states import StatesAlone
from ringjax.models.cepe import CepeTransformer
from ringjax.models.checkpoint import cast
from ringjax.models.longspec import LaggedCache
from ringjax.models.transformer import Transformer, tokens_of
from ringjax.nn.linear import Head
from ringjax.nn.sharding_context import CachedAttention, ShardingContext
from ringjax.nn.sums.layer_record import LayerRecord
from ringjax.nn.tokens import Tokens
from ringjax.ops.loss import IGNORE_INDEX, blockwise_cross_entropy
from ringjax.parallel import collectives
from ringjax.train.batch import Batch
from ringjax.train.choice_training import (
  ChoiceTotals,
  choosing_layers,
  has_indexes,
)
from ringjax.train.expert_balance import (
  ExpertBalance,
  RoutingTotals,
  has_routers,
)
from ringjax.typing import Index

# Tokens per step of the head, on each shard.
_BLOCK = 1024


class LossSums(NamedTuple):
  """Sums over a batch's tokens, float32 [].

  Fields:
    loss: Objective, with the z-loss and the losses of experts' balance.
    nll: Sum of weighted negative log-likelihoods.
    weight: Sum of the labels' weights.
    wrong: Number of labels outside of the vocabulary, whose losses are NaN.
    routing: Sums of the routing in layers with experts; None without any.
    choice: Sums of the choices in layers that choose keys; None without any.
  """

  loss: jax.Array
  nll: jax.Array
  weight: jax.Array
  wrong: jax.Array
  routing: RoutingTotals | None = None
  choice: ChoiceTotals | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
  """The loss of a training, and the dtype of its computation.

  Attributes:
    z_loss: Factor of the squared logsumexp.
    block: Tokens per step of the head, on each shard.
    dtype: Dtype of the computation; None: the parameters'.
    distil: Factor of the divergence from the decoder alone that reads the
      context as text (CEPED); 0 for none.
    top: Number of the teacher's likeliest tokens that the divergence sums over.
    expert_balance: Losses and bias updates that balance the experts of a
      mixture.
    index_loss: Factor of the sum over layers of the mean over tokens of
      `rj.index_loss`, from which only indexes learn; 0: they do not learn.
    index_warm_up: Whether queries read all keys, and only indexes learn.
  """

  z_loss: float = 0.0
  block: int = _BLOCK
  dtype: DTypeLike | None = None
  distil: float = 0.0
  top: int = 50
  expert_balance: ExpertBalance = ExpertBalance()
  index_loss: float = 1.0
  index_warm_up: bool = False

  def __post_init__(self) -> None:
    number("index_loss", self.index_loss, least=0)
    if self.index_warm_up and not self.index_loss:
      raise OptionError(
        "index_loss",
        "0 with index_warm_up, in which only indexes learn",
        "a number above 0",
        "leave index_loss out",
      )
    number("distil", self.distil, least=0)
    positive_int("top", self.top)

  def sums(
    self, model: Transformer, batch: Batch, attend: ShardingContext
  ) -> LossSums:
    """Computes the loss of one micro-batch, whose fields are [B, T], as sums.

    Args:
      model: Model with its parameters, in float32 or another dtype.
      batch: Micro-batch in the layout's order.
      attend: Sharding context of its tokens.
    """
    if self.dtype is not None:
      model = cast(model, self.dtype)
    balance = self.expert_balance.of_model(model)
    manual = collectives.manual_axes()
    if balance.used and manual:
      raise OptionError(
        "expert_balance",
        f"{', '.join(balance.used)} in a shard_map over {sorted(manual)}",
        "the tokens of all shards, whose loads are added up",
        "compute the loss outside of the shard_map, with mesh= and axis=",
      )
    places = _places(model, batch, attend)
    chooses = choosing_layers(model)
    if self.index_warm_up and (manual or not has_indexes(model)):
      raise OptionError(
        "index_warm_up",
        f"a shard_map over {sorted(manual)}"
        if manual
        else f"a {model.config.family} whose layers have no index",
        "layers with an index, whose loss is of the tokens of all shards",
        "pass the whole batch with mesh= and axis=, or add an index with "
        "rj.train.with_sparse_attention",
      )
    if (has_routers(model) or chooses) and not manual:
      places.recorder = functools.partial(
        LayerRecord,
        warm_up=self.index_warm_up,
        index_learns=self.index_loss > 0,
      )
    h = _hidden(model, batch, attend, places)
    summed_loss = lambda z: jnp.sum(
      _head_losses(model, batch, h, attend, self.block, z)
    )
    loss = summed_loss(self.z_loss)
    # Without a z-loss both are the same, and are computed once.
    nll = summed_loss(0.0) if self.z_loss else loss
    if self.distil:
      divergence = jnp.sum(_divergences(model, batch, h, attend, self.top))
      loss = loss + jnp.float32(self.distil) * divergence
    routing, choice, weight = None, None, jnp.sum(_weights(batch))
    # The step divides by the weight.
    if places.recorder is not None and has_routers(model):
      balance_loss, routing = balance.total(model, places)
      loss = loss + balance_loss * weight
    if places.recorder is not None and chooses:
      choice = ChoiceTotals.of(model, places)
      if self.index_warm_up:
        loss = jax.lax.stop_gradient(loss)
      factor = jnp.float32(self.index_loss)
      loss = loss + factor * choice.index_loss() * weight
      choice = jax.lax.stop_gradient(choice)
    labels, vocab = batch.labels, model.config.vocab
    in_vocab = (labels >= 0) & (labels < vocab)
    wrong = ~in_vocab & (labels != IGNORE_INDEX)
    return LossSums(
      loss,
      jax.lax.stop_gradient(nll),
      weight,
      jnp.sum(wrong.astype(jnp.float32)),
      routing,
      choice,
    )


def sums(
  model: Transformer, batch: Batch, attend: ShardingContext, **options: Any
) -> LossSums:
  """`Objective(**options).sums`."""
  return Objective(**options).sums(model, batch, attend)


def each_token(
  model: Transformer, batch: Batch, attend: ShardingContext
) -> Float[Array, "B T"]:
  """Weighted negative log-likelihoods, float32 [B, T], in the layout's order.

  The arguments are those of `Objective.sums`.
  """
  h = _hidden(model, batch, attend)
  return _head_losses(model, batch, h, attend, _BLOCK, 0.0)


def each_token_cached(
  model: Transformer,
  batch: Batch,
  attend: CachedAttention,
  cache: CallCache,
  length: Index,
) -> tuple[Float[Array, "B T"], Any]:
  """Losses as of `each_token`, for tokens that follow those in a cache.

  Args:
    model: Model that filled the cache.
    batch: Batch with positions and segments, which all rows need.
    attend: Sharding context of the cache.
    cache: Cache with the keys of the tokens before.
    length: Tokens of the whole text, int32 [].

  Returns:
    Losses, float32 [B, T], and the cache with these tokens.
  """
  places = tokens_of(
    model, attend, batch.tokens.shape, batch.positions, batch.segments, length
  )
  cache = cache.allocate(
    places.at, replicated=False, sees=True, tokens=batch.tokens
  )
  h, cache = model.hidden(batch.tokens, places, cache, attend)
  return _head_losses(model, batch, h, attend, _BLOCK, 0.0), cache


def _places(
  model: Transformer, batch: Batch, attend: ShardingContext
) -> Tokens:
  return tokens_of(
    model, attend, batch.tokens.shape, batch.positions, batch.segments, None
  )


def _hidden(
  model: Transformer,
  batch: Batch,
  attend: ShardingContext,
  places: Tokens | None = None,
) -> jax.Array:
  """Input of the head, [B, T, D]; the batch's context, if any, is encoded.

  `places` are the tokens of `_places`, which receive the layers' routing.
  """
  kinds, chunks = len(model.kinds), batch.context
  cache = NoCache(kinds)
  if batch.lag is not None:
    cache = LaggedCache(batch.lag)
  if chunks is not None:
    if not isinstance(model, CepeTransformer):
      raise OptionError(
        "context",
        f"chunks for a {model.config.family} without an encoder",
        "a model with an encoder",
        "make one with rj.models.cepe.with_encoder(model)",
      )
    states = model.read(chunks.tokens, chunks.segments, attend)
    cache = StatesAlone(kinds, states)
  places = _places(model, batch, attend) if places is None else places
  h, _ = model.hidden(batch.tokens, places, cache, attend)
  return h


def _weights(batch: Batch) -> jax.Array:
  """Weights of the labels [B, T], 0 for tokens without one."""
  weights = jnp.asarray(batch.weights)
  zero = jnp.zeros((), weights.dtype)
  return jnp.where(batch.labels == IGNORE_INDEX, zero, weights)


def _divergences(
  model: Transformer,
  batch: Batch,
  h: jax.Array,
  attend: ShardingContext,
  top: int,
) -> jax.Array:
  """sum_i p_i log(p_i / q_i) over the teacher's likeliest i, float32 [B, T].

  Weighted as the labels. The teacher p is the model without states that reads
  the whole rows; q is the model with hidden states h.
  """
  assert batch.whole is not None
  size, layout = attend.size, attend.layout
  teacher_batch = batch.whole._replace(context=None, whole=None)
  teacher_h = layout.restore(_hidden(model, teacher_batch, attend), shards=size)
  teacher_h = layout.permute(teacher_h[:, -h.shape[1] :], shards=size)
  teacher_h = attend.constrain(jax.lax.stop_gradient(teacher_h))
  width = h.shape[-1]

  def token_divergence(states: jax.Array) -> jax.Array:
    q = jax.nn.log_softmax(model.logits(states[..., :width]))
    p = jax.nn.log_softmax(model.logits(states[..., width:]))
    p, top_tokens = jax.lax.top_k(p, min(top, p.shape[-1]))
    log_ratio = p - jnp.take_along_axis(q, top_tokens, -1)
    return jnp.sum(jnp.exp(p) * log_ratio, -1, keepdims=True)

  divergences = attend.rowwise(
    token_divergence, jnp.concatenate([h, teacher_h], -1)
  )
  return divergences[..., 0] * _weights(batch)


def _head_losses(
  model: Transformer,
  batch: Batch,
  h: jax.Array,
  attend: ShardingContext,
  block: int,
  z_loss: float,
) -> jax.Array:
  """Weighted losses [B, T] of hidden states [B, T, D].

  Each shard computes those of the tokens it has, `block` at a time: the head is
  gathered once, and its gradient is summed over the shards once, in float32,
  after all steps. Left to itself a compiler may do either in each step.
  """
  h, w = _head(model, h)

  def losses(
    h: jax.Array, w: jax.Array, labels: jax.Array, weights: jax.Array
  ) -> jax.Array:
    return blockwise_cross_entropy(
      h,
      w,
      labels,
      weights,
      block,
      logits_soft_cap=model.config.logit_cap,
      z_loss=z_loss,
    )

  operands = h, w, batch.labels, _weights(batch)
  spec = P() if attend.mesh is None else attend.spec(h)
  axes = {axis for entry in spec for axis in collectives.names(entry)}
  if not axes:
    return losses(*operands)
  return jax.shard_map(
    losses,
    mesh=attend.mesh,
    in_specs=(spec, P(), spec, spec),
    out_specs=spec,
    axis_names=axes,
  )(*operands)


def _head(model: Transformer, h: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(h [B, T, D], W [D, V]) whose product are the logits."""
  if model.config.logit_scale != 1.0:
    h = h * jnp.asarray(model.config.logit_scale, h.dtype)
  head = model.head
  if head is None:
    return h, model.embed.weight[...].T
  w = head.weight[...]
  if isinstance(head, Head) and head.bias is not None:
    # A bias is one more row of the matrix, and h has a 1 for it.
    bias = head.bias[...].astype(w.dtype) * jnp.asarray(
      model.config.logit_scale, w.dtype
    )
    h = jnp.concatenate([h, jnp.ones_like(h[..., :1])], -1)
    w = jnp.concatenate([w, bias[None]], 0)
  return h, w
