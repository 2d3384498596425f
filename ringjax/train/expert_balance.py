"""Balance of a mixture's experts in training: losses, biases and statistics.

Guarantees: counts are of all real tokens of a micro-batch, on whatever shards
they are, so losses and gradients do not depend on the mesh; padding is not
counted. A loss is of one micro-batch, as its counts are, and the mean over a
step's micro-batches is weighted by their labels. Biases and statistics are of
the whole step.
Cost: sums that layers record while they run; no second pass.
Ref:  `loss`: Fedus et al. 2021, Switch Transformers, arXiv 2101.03961, in the
form of `load_balancing_loss_func` of transformers; `z_loss`: Zoph et al. 2022,
ST-MoE, arXiv 2202.08906; `bias_rate`: Wang et al. 2024, arXiv 2408.15664;
`sequence_loss`: DeepSeek-V3, arXiv 2412.19437, equations 17 to 20.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ringjax.checks import number
from ringjax.errors import OptionError
from ringjax.models.longspec import DraftTransformer
from ringjax.models.transformer import Transformer
from ringjax.nn.feedforward import Experts
from ringjax.nn.sums.layer_record import LayerSums
from ringjax.nn.sums.router_sums import RouterSums
from ringjax.nn.tokens import Tokens

# Families whose class in transformers has the first key and ignores it.
_IGNORES = ("llama4", "llama4_text")


def stated_loss(source: Mapping[str, Any], family: str) -> float:
  """Factor of the balance loss that a config.json states, 0 if none applies.

  Args:
    source: Contents of the config.json.
    family: `model_type` of the config.
  """
  applies = source.get("output_router_logits") and family not in _IGNORES
  return float((source.get("router_aux_loss_coef") if applies else None) or 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertBalance:
  """Losses and bias updates that balance the experts of a mixture.

  Attributes:
    loss: Factor of E sum_e f_e P_e, for the fraction f_e of tokens that have
      expert e among their k likeliest, and its mean probability P_e, both over
      all tokens of all layers; it is k for balanced experts. None: as
      transformers, `router_aux_loss_coef` of the model's config.json if
      `output_router_logits` is true there, else 0.
    layer_loss: Factor of the sum over layers of E / k sum_e f_e P_e, f and P
      over the tokens of one layer; each is 1 for balanced experts.
    sequence_loss: Factor of the sum over layers of the mean over rows of E / k
      sum_e f_e P_e, f and P over the tokens of one row. Documents that are
      packed into a row are one sequence.
    z_loss: Factor of the sum over layers of the mean squared logsumexp of the
      router's logits.
    bias_rate: u in b_e += u sign(mean load - load of e), for the offsets b of
      the experts' ranking, after each step, from the loads of the whole step.
  """

  loss: float | None = None
  layer_loss: float = 0.0
  sequence_loss: float = 0.0
  z_loss: float = 0.0
  bias_rate: float = 0.0

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value is not None:
        number(field.name, value, least=0)

  @property
  def used(self) -> tuple[str, ...]:
    """Names of the options that are given and not 0."""
    names = (field.name for field in dataclasses.fields(self))
    return tuple(name for name in names if getattr(self, name))

  def of_model(self, model: object) -> ExpertBalance:
    """These options with `loss` as the model's config.json says it.

    Raises:
      OptionError: If options are given that the model does not support.
    """
    _check(self, model)
    if self.loss is not None or not has_routers(model):
      return dataclasses.replace(self, loss=self.loss or 0.0)
    mixture: Any = model
    loss = stated_loss(_source(mixture), mixture.config.family)
    return dataclasses.replace(self, loss=loss)

  def total(
    self, model: Transformer, tokens: Tokens
  ) -> tuple[Float[Array, ""], RoutingTotals]:
    """Sum of the losses times their factors, and the sums of the routing.

    Args:
      model: Model whose layers have run.
      tokens: Tokens that they have read, with the recorded routing.
    """
    options = self.of_model(model)
    layers = sparse_layers(model)
    routing = [_sums_of(tokens, layer) for layer in layers]
    # A row of coordinates may be that of all rows.
    shape = routing[0].load.shape[1], tokens.seg.shape[1]
    real = jnp.broadcast_to(tokens.seg > 0, shape)
    row_tokens = jnp.sum(real, 1, dtype=jnp.int32).astype(jnp.float32)
    totals = RoutingTotals(
      tuple(jax.lax.stop_gradient(jnp.sum(s.load, 1)) for s in routing),
      tuple(jax.lax.stop_gradient(jnp.sum(s.likelihood, 1)) for s in routing),
      jnp.sum(row_tokens),
    )
    count = jnp.maximum(totals.tokens, 1.0)
    loss = jnp.float32(0.0)
    if options.loss:
      pooled = _pooled(
        [jnp.sum(s.favoured, (0, 1)) for s in routing],
        [jnp.sum(s.likelihood, (0, 1)) for s in routing],
        count * sum(s.load.shape[0] for s in routing),
      )
      loss = loss + jnp.float32(options.loss) * pooled
    for layer, sums in zip(layers, routing, strict=True):
      share = jnp.float32(layer.experts.routed / layer.experts.chosen)
      if options.layer_loss:
        product = jnp.sum(sums.favoured, 1) * jnp.sum(sums.likelihood, 1)
        layer_losses = share * jnp.sum(product, -1) / jnp.square(count)
        loss = loss + jnp.float32(options.layer_loss) * jnp.sum(layer_losses)
      if options.sequence_loss:
        tokens_of_row = jnp.maximum(row_tokens, 1.0)[None]
        product = jnp.sum(sums.favoured * sums.likelihood, -1)
        row_losses = share * product / jnp.square(tokens_of_row)
        rows = jnp.maximum(jnp.sum(row_tokens > 0, dtype=jnp.int32), 1)
        mean = jnp.sum(row_losses) / rows.astype(jnp.float32)
        loss = loss + jnp.float32(options.sequence_loss) * mean
      if options.z_loss:
        mean = jnp.sum(sums.squares) / count
        loss = loss + jnp.float32(options.z_loss) * mean
    return loss, totals


class RoutingTotals(NamedTuple):
  """Sums over the tokens of a step, which micro-batches add up, float32.

  Fields:
    load: Number of tokens that each expert computes, [L, E], for each group of
      layers as of `sparse_layers`.
    likelihood: Sums of the routing probabilities, [L, E] each.
    tokens: Number of tokens without padding, [].
  """

  load: tuple[Float[Array, "L E"], ...]
  likelihood: tuple[Float[Array, "L E"], ...]
  tokens: Float[Array, ""]

  def statistics(self) -> RouterStatistics:
    """Statistics of the routing of all layers."""
    tokens = jnp.maximum(self.tokens, 1.0)
    peaks, entropies = [], []
    for load, likelihood in zip(self.load, self.likelihood, strict=True):
      mean_load = jnp.maximum(jnp.mean(load, -1), 1e-9)
      peaks.append(jnp.max(load, -1) / mean_load)
      mean_routing = likelihood / tokens
      log = jnp.log(jnp.where(mean_routing > 0, mean_routing, 1.0))
      entropies.append(-jnp.sum(mean_routing * log, -1))
    peak, entropy = jnp.concatenate(peaks), jnp.concatenate(entropies)
    return RouterStatistics(
      jnp.max(peak),
      jnp.mean(peak),
      jnp.min(entropy),
      jnp.mean(entropy),
      jnp.float32(0.0),
    )


class RouterStatistics(NamedTuple):
  """Statistics of a step's routing, float32 [].

  Fields:
    load_worst: Largest load of an expert over the mean load, in the layer
      where it is largest; 1 is balanced.
    load_mean: Mean over layers of the largest load over the mean load.
    entropy_worst: Entropy of the mean routing probabilities, in nats, in the
      layer where it is smallest; log E is balanced.
    entropy_mean: Mean over layers of the entropy of the mean routing
      probabilities, in nats.
    dropped: Fraction of tokens that an expert did not compute: 0, as no
      expert has a capacity.
  """

  load_worst: jax.Array | float
  load_mean: jax.Array | float
  entropy_worst: jax.Array | float
  entropy_mean: jax.Array | float
  dropped: jax.Array | float


class SparseLayers(NamedTuple):
  """Layers with experts whose weights are stacked.

  Fields:
    run: Number of their run in the model's stack.
    position: Position in a repeat of the run.
    experts: Mixture of each of them.
  """

  run: int
  position: int
  experts: Experts


def sparse_layers(model: object) -> tuple[SparseLayers, ...]:
  """Groups of a model's layers that have experts, in the stack's order."""
  if not isinstance(model, Transformer):
    return ()
  groups = []
  for run_number, run in enumerate(model.stack.runs):
    for position, layer in enumerate(run.layers):
      spec = getattr(layer.feedforward, "sparse", layer.feedforward)
      if isinstance(spec, Experts):
        groups.append(SparseLayers(run_number, position, spec))
  return tuple(groups)


def has_routers(model: object) -> bool:
  """Whether layers of a model that is trained choose among experts."""
  return not isinstance(model, DraftTransformer) and bool(sparse_layers(model))


def with_updated_biases(
  params: Transformer, totals: RoutingTotals, rate: float
) -> Transformer:
  """Move the offsets of the experts' ranking towards an even load.

  Args:
    params: Model.
    totals: Loads of a step.
    rate: u in b_e += u sign(mean load - load of e).
  """
  updated: dict[int, Any] = {}
  for layer, load in zip(sparse_layers(params), totals.load, strict=True):
    bias = _correction(params, layer)
    if bias is None:
      continue
    value = bias.get_value()
    step = jnp.sign(jnp.mean(load, -1, keepdims=True) - load)
    updated[id(bias)] = value + (jnp.float32(rate) * step).astype(value.dtype)
  is_variable = lambda x: isinstance(x, nnx.Variable)
  return jax.tree.map(
    lambda p: p.replace(updated[id(p)]) if id(p) in updated else p,
    params,
    is_leaf=is_variable,
  )


def warn_unbalanced(model: object, options: ExpertBalance) -> None:
  """Warns of a mixture whose config names a loss that is not computed.

  Args:
    model: Model that is trained.
    options: Options of the training.
  """
  if not has_routers(model) or options.used or options.loss is not None:
    return
  mixture: Any = model
  if options.of_model(model).loss:
    return
  source = _source(mixture)
  if source.get("router_aux_loss_coef"):
    key, option = "router_aux_loss_coef", "loss"
  elif source.get("aux_loss_alpha"):
    key = "aux_loss_alpha"
    option = "sequence_loss" if source.get("seq_aux") else "layer_loss"
  else:
    return
  warnings.warn(
    f"{key} is {source[key]} in the model's config, but no loss that balances "
    f"experts is computed: pass ExpertBalance({option}={source[key]}), "
    f"--config.expert_balance.{option}={source[key]}, or loss=0 for none",
    UserWarning,
    stacklevel=2,
  )


def refuse_frozen(options: ExpertBalance, method: object | None) -> None:
  """Refuse bias updates where routers are not trained.

  Args:
    options: Options of the training.
    method: Method that trains something else than all parameters, or None.
  """
  if method is None or not options.bias_rate:
    return
  raise OptionError(
    "expert_balance.bias_rate",
    f"{options.bias_rate:g} with {type(method).__name__}, which freezes the "
    "routers",
    "a training of all parameters",
    "leave it out, or train all parameters",
  )


def _check(options: ExpertBalance, model: Any) -> None:
  """Refuse options that the model does not support."""
  if not options.used:
    return
  name = f"expert_balance.{options.used[0]}"
  value = f"{getattr(options, options.used[0]):g}"
  if not has_routers(model):
    config = getattr(model, "config", None)
    family = getattr(config, "family", type(model).__name__)
    raise OptionError(
      name,
      f"{value} for a {family} whose layers have no router",
      "a mixture of experts that is trained",
      "leave it out",
    )
  layers = sparse_layers(model)
  if options.loss and len({x.experts.routed for x in layers}) > 1:
    raise OptionError(
      "expert_balance.loss",
      f"{options.loss:g} for layers of different numbers of experts",
      "layers of as many experts each, whose counts are added up",
      "pass layer_loss, which treats each layer by itself",
    )
  if options.bias_rate and not all(x.experts.correction for x in layers):
    raise OptionError(
      "expert_balance.bias_rate",
      f"{options.bias_rate:g} for a {model.config.family}, whose routers rank "
      "experts without an offset",
      "routers with an offset, as of deepseek_v3",
      "pass loss or layer_loss",
    )


def _source(model: Any) -> dict[str, Any]:
  """Entries of a model's config.json, those of its text model first."""
  source = json.loads(model.source)
  return {**source, **(source.get("text_config") or {})}


def _correction(model: Transformer, layer: SparseLayers) -> Any:
  feedforward = model.stack.blocks[layer.run][layer.position].feedforward
  return getattr(feedforward, "sparse", feedforward).correction


def _sums_of(tokens: Tokens, layer: SparseLayers) -> RouterSums:
  sums = tokens.recorded[layer.run][layer.position]
  assert isinstance(sums, LayerSums) and sums.router is not None
  return sums.router


def _pooled(
  favoured: list[jax.Array], likelihood: list[jax.Array], count: jax.Array
) -> Float[Array, ""]:
  """E sum_e f_e P_e of counts [E] and sums [E] over `count` tokens."""
  fraction, mean = sum(favoured) / count, sum(likelihood) / count
  return jnp.float32(favoured[0].shape[0]) * jnp.sum(fraction * mean)
