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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree, Shaped

from ringjax.checks import number, one_of, positive_int
from ringjax.errors import OptionError
from ringjax.kv.base import CallCache, NoCache
from ringjax.kv.encoder_states import StatesAlone
from ringjax.models.cepe import CepeTransformer
from ringjax.models.checkpoint import cast
from ringjax.models.longspec import LaggedCache
from ringjax.models.transformer import Transformer, tokens_of
from ringjax.nn.draft_layers.eagle_layer import EagleLayer
from ringjax.nn.draft_layers.predict_layer import FIRST
from ringjax.nn.linear import Head
from ringjax.nn.sharding_context import CachedAttention, ShardingContext
from ringjax.nn.sums.layer_record import LayerRecord
from ringjax.nn.tokens import Tokens
from ringjax.ops.loss import IGNORE_INDEX, blockwise_cross_entropy
from ringjax.ops.narrow_product import FLOAT, PRODUCTS, narrow_products
from ringjax.parallel import collectives
from ringjax.train.batch import Batch
from ringjax.train.block_sizes import check_block, number_of_tokens
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
from ringjax.train.methods.eagle_loss import (
  DECAY,
  STEPS,
  eagle_losses,
  eagle_outputs,
)
from ringjax.train.optimizers.qk_clip import ScoreTotals
from ringjax.train.posttraining.posttraining_loss import (
  LossTerms,
  Mean,
  PosttrainingLoss,
)
from ringjax.typing import Index

# Tokens per step of the head, on each shard.
_BLOCK = 1024


class LossSums(NamedTuple):
  """Sums over a batch's tokens, float32 [].

  Fields:
    loss: Objective, with the z-loss and the losses of experts' balance.
    nll: Sum of weighted negative log-likelihoods, or of the losses of
      `Objective.posttraining`.
    weight: Sum of the labels' weights, or of what that loss counts.
    wrong: Number of labels outside of the vocabulary, whose losses are NaN.
    routing: Sums of the routing in layers with experts; None without any.
    choice: Sums of the choices in layers that choose keys; None without any.
    policy: Sums of a policy's ratios and divergences, see `rj.rl`; None of
      other losses.
    metrics: Means of a loss after pre-training, by their names, or None.
    predicted: Mean negative log-likelihood of the layer that predicts one token
      further, of an EAGLE-3 head the mean loss of its predictions, times
      `weight`; None if it is not trained.
    scores: Largest attention logits of heads; None if they are not recorded.
  """

  loss: jax.Array
  nll: jax.Array
  weight: jax.Array
  wrong: jax.Array
  routing: RoutingTotals | None = None
  choice: ChoiceTotals | None = None
  policy: PyTree = None
  metrics: dict[str, Mean] | None = None
  predicted: jax.Array | None = None
  scores: ScoreTotals | None = None

  @classmethod
  def zeros(cls, like: LossSums) -> LossSums:
    """Sums of no micro-batch, of the shapes of `like`."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    lowest = jax.tree.map(lambda x: jnp.full_like(x, -jnp.inf), zeros.scores)
    return zeros._replace(scores=lowest)

  def plus(self, other: LossSums) -> LossSums:
    """Sums, and maxima of the scores, of both micro-batches."""
    added = jax.tree.map(
      jnp.add, self._replace(scores=None), other._replace(scores=None)
    )
    maxima = jax.tree.map(jnp.maximum, self.scores, other.scores)
    return added._replace(scores=maxima)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
  """The loss of a training, and the dtype of its computation.

  Attributes:
    z_loss: Factor of the squared logsumexp.
    block: Tokens per step of the head, on each shard; in a `Recipe` also
      "auto", see its `with_block_sizes`.
    dtype: Dtype of the computation; None: the parameters'.
    products: Products of linear maps, of `ops.narrow_product.PRODUCTS`: "float"
      or, of 8-bit numbers, "int8" and "float8". Routers, experts, the head,
      frozen codes and maps that latent attention splits stay "float".
    distil: Factor of the divergence from the decoder alone that reads the
      context as text (CEPED); 0 for none.
    top: Number of the teacher's likeliest tokens that the divergence sums over.
    expert_balance: Losses and bias updates that balance the experts of a
      mixture.
    index_loss: Factor of the sum over layers of the mean over tokens of
      `rj.index_loss`, from which only indexes learn; 0: they do not learn.
    index_warm_up: Whether queries read all keys, and only indexes learn.
    posttraining: Loss in place of the labels' negative log-likelihood, such as
      `Dpo()`; None for that likelihood.
    predict_loss: Factor of the mean loss of the layer that predicts one token
      further (DeepSeek-V3: 0.3, later 0.1); 0: it does not learn. For an
      EAGLE-3 head 1, see `methods.eagle_loss`.
    predict_steps: Number of predictions in a row of an EAGLE-3 head, each from
      its output before; None: 7. Other layers make one.
    record_scores: Whether the largest attention logit of each head is computed,
      as `Optimizer.qk_clip` needs it.
  """

  z_loss: float = 0.0
  block: int | str = _BLOCK
  dtype: DTypeLike | None = None
  products: str = FLOAT
  distil: float = 0.0
  top: int = 50
  expert_balance: ExpertBalance = ExpertBalance()
  index_loss: float = 1.0
  index_warm_up: bool = False
  posttraining: PosttrainingLoss | None = None
  predict_loss: float = 0.0
  predict_steps: int | None = None
  record_scores: bool = False

  def __post_init__(self) -> None:
    if self.posttraining is not None:
      self._check_posttraining(self.posttraining)
    number("predict_loss", self.predict_loss, least=0)
    if self.predict_steps is not None:
      positive_int("predict_steps", self.predict_steps)
    if self.predict_loss and self.index_warm_up:
      raise OptionError(
        "predict_loss",
        f"{self.predict_loss:g} with index_warm_up, where only indexes learn",
        "one of them",
        "train the indexes in a run of their own",
      )
    number("index_loss", self.index_loss, least=0)
    if self.index_warm_up and not self.index_loss:
      raise OptionError(
        "index_loss",
        "0 with index_warm_up, in which only indexes learn",
        "a number above 0",
        "leave index_loss out",
      )
    number("distil", self.distil, least=0)
    check_block("block", self.block)
    one_of("products", self.products, PRODUCTS)
    positive_int("top", self.top)

  def _check_posttraining(self, loss: PosttrainingLoss) -> None:
    for name in ("z_loss", "distil", "index_warm_up"):
      if getattr(self, name):
        raise OptionError(
          name,
          f"{getattr(self, name)} with {type(loss).__name__}, which replaces "
          "the likelihood of labels",
          "one of them",
          f"leave {name} out",
        )
    if self.products != FLOAT:
      raise OptionError(
        "products",
        f"{self.products!r} with {type(loss).__name__}, whose other "
        "log-probabilities are of products in floats",
        repr(FLOAT),
        "leave products out",
      )

  def sums(
    self, model: Transformer, batch: Batch, attend: ShardingContext
  ) -> LossSums:
    """Computes the loss of one micro-batch, whose fields are [B, T], as sums.

    Args:
      model: Model with its parameters, in float32 or another dtype.
      batch: Micro-batch in the layout's order.
      attend: Sharding context of its tokens.
    """
    block = number_of_tokens("block", self.block)
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
    if self.record_scores and manual:
      raise OptionError(
        "record_scores",
        f"True in a shard_map over {sorted(manual)}",
        "the tokens of all shards, whose logits are compared",
        "compute the loss outside of the shard_map, with mesh= and axis=",
      )
    records = has_routers(model) or chooses or self.record_scores
    if records and not manual:
      places.recorder = functools.partial(
        LayerRecord,
        warm_up=self.index_warm_up,
        index_learns=self.index_loss > 0,
        scores=self.record_scores,
      )
    predicts = model.config.predicts
    eagle = self.predict_loss > 0 and isinstance(predicts, EagleLayer)
    self._check_steps(eagle)
    with narrow_products(self.products):
      if self.predict_loss and not eagle:
        h, further = _hidden_and_predicted(model, batch, attend, places)
      else:
        h, further = hidden_states(model, batch, attend, places), None
    summed_loss = lambda z: jnp.sum(
      head_losses(model, batch, h, attend, block, z)
    )
    weight, metrics = jnp.sum(_weights(batch)), None
    if self.posttraining is None:
      loss = summed_loss(self.z_loss)
      # Without a z-loss both are the same, and are computed once.
      nll = summed_loss(0.0) if self.z_loss else loss
    else:
      if manual:
        raise OptionError(
          "posttraining",
          f"{type(self.posttraining).__name__} in a shard_map over "
          f"{sorted(manual)}",
          "the tokens of all shards, whose answers are added up",
          "compute the loss outside of the shard_map, with mesh= and axis=",
        )
      loss, weight, metrics = self._posttraining_terms(
        self.posttraining, model, batch, h, attend
      )
      nll = loss
    if self.distil:
      divergence = jnp.sum(_divergences(model, batch, h, attend, self.top))
      loss = loss + jnp.float32(self.distil) * divergence
    routing, choice = None, None
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
    scores = ScoreTotals.of(model, places) if self.record_scores else None
    predicted = None
    if eagle:
      predicted = self._unrolled(model, batch, attend, places, h)
    elif further is not None:
      predicted = self._predicted(model, batch, attend, places, further)
    if predicted is not None:
      loss = loss + jnp.float32(self.predict_loss) * predicted
      predicted = jax.lax.stop_gradient(predicted)
    labels, vocab = batch.labels, model.config.vocab
    in_vocab = (labels >= 0) & (labels < vocab)
    wrong = ~in_vocab & (labels != IGNORE_INDEX)
    return LossSums(
      loss,
      jax.lax.stop_gradient(nll),
      weight,
      jnp.sum(wrong.astype(jnp.float32)),
      routing=routing,
      choice=choice,
      metrics=metrics,
      predicted=predicted,
      scores=scores,
    )

  def _posttraining_terms(
    self,
    loss: PosttrainingLoss,
    model: Transformer,
    batch: Batch,
    h: jax.Array,
    attend: ShardingContext,
  ) -> LossTerms:
    """Sums of a loss of the log-probabilities of the labels."""
    counted = (_weights(batch) != 0).astype(jnp.float32)
    unit = batch._replace(weights=counted)
    block = number_of_tokens("block", self.block)
    logprobs = -head_losses(model, unit, h, attend, block, 0.0)
    return loss.terms(logprobs, batch)

  def _predicted(
    self,
    model: Transformer,
    batch: Batch,
    attend: ShardingContext,
    places: Tokens,
    h: Float[Array, "B T D"],
  ) -> jax.Array:
    """Mean loss of the predicting layer, times the weight of the batch.

    The layer's label at a token is that of the model. The first token of a
    document has no hidden state before it, and no label here.
    """
    weights = _weights(batch)
    zero = jnp.zeros((), weights.dtype)
    with_previous = jnp.where(places.ordered().pos > 0, weights, zero)
    weighted = batch._replace(weights=with_previous)
    block = number_of_tokens("block", self.block)
    losses = head_losses(model, weighted, h, attend, block, 0.0)
    share = jnp.sum(weights) / jnp.maximum(jnp.sum(with_previous), 1e-9)
    return jnp.sum(losses) * share

  def _check_steps(self, eagle: bool) -> None:
    """Refuses several predictions in a row of a layer that makes one."""
    if self.predict_steps is not None and not eagle:
      raise OptionError(
        "predict_steps",
        f"{self.predict_steps} without the loss of an EAGLE-3 head",
        "a head, whose outputs it reads again",
        "leave predict_steps out",
      )

  def _unrolled(
    self,
    model: Transformer,
    batch: Batch,
    attend: ShardingContext,
    places: Tokens,
    h: Float[Array, "B T D"],
  ) -> jax.Array:
    """Mean loss of an EAGLE-3 head's predictions, times the batch's weight.

    Prediction j has no label at the first j + 1 tokens of a document.
    """
    steps = STEPS if self.predict_steps is None else self.predict_steps
    outputs = eagle_outputs(model, places, attend, steps)
    losses = eagle_losses(model, h, outputs, attend)
    weights = _weights(batch)
    first = jnp.arange(FIRST, FIRST + steps)[None, None]
    begun = places.ordered().pos[..., None] >= first
    counted = jnp.where(begun, weights[..., None], 0.0)
    means = jnp.sum(losses * counted, (0, 1))
    means = means / jnp.maximum(jnp.sum(counted, (0, 1)), 1e-9)
    decay = jnp.asarray(DECAY ** np.arange(steps), jnp.float32)
    return jnp.sum(means * decay) / jnp.sum(decay) * jnp.sum(weights)


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
  h = hidden_states(model, batch, attend)
  return head_losses(model, batch, h, attend, _BLOCK, 0.0)


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
  return head_losses(model, batch, h, attend, _BLOCK, 0.0), cache


def _places(
  model: Transformer, batch: Batch, attend: ShardingContext
) -> Tokens:
  places = tokens_of(
    model, attend, batch.tokens.shape, batch.positions, batch.segments, None
  )
  places.order = batch.order
  return places


def hidden_states(
  model: Transformer,
  batch: Batch,
  attend: ShardingContext,
  places: Tokens | None = None,
) -> Float[Array, "B T D"]:
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


def _hidden_and_predicted(
  model: Transformer, batch: Batch, attend: ShardingContext, places: Tokens
) -> tuple[jax.Array, jax.Array]:
  """Inputs of the head [B, T, D], of the model and of its predicting layer.

  Raises:
    OptionError: If the model has no such layer.
  """
  predicts = model.config.predicts
  if predicts is None or not predicts.by_token:
    raise OptionError(
      "predict_loss",
      f"a {model.config.family} without a layer that predicts further tokens",
      "a model with one",
      "add one with rj.models.with_predict_layer(model), or load it with "
      "predict_layers=True",
    )
  cache = NoCache(len(model.kinds))
  return model.hidden_and_predicted(batch.tokens, places, cache, attend)


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
  teacher_h = layout.restore(
    hidden_states(model, teacher_batch, attend), shards=size
  )
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


def head_losses(
  model: Transformer,
  batch: Batch,
  h: Float[Array, "B T D"],
  attend: ShardingContext,
  block: int,
  z_loss: float,
  *,
  temperature: float = 1.0,
) -> Float[Array, "B T"]:
  """Weighted losses [B, T] of hidden states [B, T, D].

  Logits are divided by `temperature`.

  Each shard computes those of the tokens it has, `block` at a time: the head is
  gathered once, and its gradient is summed over the shards once, in float32,
  after all steps. Left to itself a compiler may do either in each step.
  """
  h, w, soft_cap = head_operands(model, h, temperature)

  def losses(
    h: jax.Array, w: jax.Array, labels: jax.Array, weights: jax.Array
  ) -> jax.Array:
    return blockwise_cross_entropy(
      h,
      w,
      labels,
      weights,
      block,
      logits_soft_cap=soft_cap,
      z_loss=z_loss,
    )

  return on_shards(attend, losses, h, w, batch.labels, _weights(batch))


def on_shards(
  attend: ShardingContext,
  f: Callable[..., Float[Array, "B T"]],
  h: Float[Array, "B T D"],
  w: Float[Array, "D V"],
  *by_token: Shaped[Array, "B T"],
) -> Float[Array, "B T"]:
  """f(h, w, *by_token) on each shard's own tokens: [B, T] of [B, T, D].

  Args:
    attend: Sharding context of the tokens.
    f: Function of some tokens that returns a number for each.
    h: Hidden states, [B, T, D].
    w: Matrix that every shard needs, [D, V]; its gradient is summed over the
      shards once.
    by_token: Further arrays of tokens, [B, T].
  """
  spec = P() if attend.mesh is None else attend.spec(h)
  axes = {axis for entry in spec for axis in collectives.names(entry)}
  if not axes:
    return f(h, w, *by_token)
  return jax.shard_map(
    f,
    mesh=attend.mesh,
    in_specs=(spec, P(), *[spec] * len(by_token)),
    out_specs=spec,
    axis_names=axes,
  )(h, w, *by_token)


def head_operands(
  model: Transformer, h: Float[Array, "B T D"], temperature: float = 1.0
) -> tuple[Float[Array, "B T D"], Float[Array, "D V"], float | None]:
  """(h [B, T, D], W [D, V], soft cap) of logits that are h W, capped.

  A temperature divides h and the cap c: c/t tanh(h/t W / (c/t)) is the capped
  logit over t.
  """
  if model.config.logit_scale != 1.0:
    h = h * jnp.asarray(model.config.logit_scale, h.dtype)
  head, soft_cap = model.head, model.config.logit_cap
  w = model.embed.weight[...].T if head is None else head.weight[...]
  if isinstance(head, Head) and head.bias is not None:
    # A bias is one more row of the matrix, and h has a 1 for it.
    bias = head.bias[...].astype(w.dtype) * jnp.asarray(
      model.config.logit_scale, w.dtype
    )
    h = jnp.concatenate([h, jnp.ones_like(h[..., :1])], -1)
    w = jnp.concatenate([w, bias[None]], 0)
  if temperature == 1.0:
    return h, w, soft_cap
  h = h * jnp.asarray(1 / temperature, h.dtype)
  return h, w, None if soft_cap is None else soft_cap / temperature
