"""Context extension: a longer context for a trained model by RoPE scaling.

Guarantees: all weights stay; only the rotary embedding of the layers with full
attention changes. Layers with a window keep theirs if config.json has one per
kind of layer; if it has one for all layers, as Gemma 2's, that one changes.

  theta   another base, as given
  ntk     the base grows by s^(d / (d - 2)) for s times the context, so that the
          slowest of d / 2 rotations is s times slower and the fastest stays
  linear  positions are divided by s (Chen et al. 2023, arXiv 2306.15595)
  yarn    slow rotations are divided by s, fast ones stay (Peng et al. 2023,
          arXiv 2309.00071)

s is relative to the context of the original model, so that several stages give
the result that the last one alone would.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import jax

from ringjax.checks import number, one_of, positive_int
from ringjax.errors import ConfigError, OptionError
from ringjax.models.checkpoint import create
from ringjax.models.contents import read_config
from ringjax.models.transformer import Transformer, TransformerConfig
from ringjax.ops.rope import Linear, Rope, Unscaled, Yarn

METHODS = ("theta", "ntk", "linear", "yarn")
_FULL = "full_attention"
_SCALED: dict[str, type[Unscaled]] = {"linear": Linear, "yarn": Yarn}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """A longer context, and the method that scales the rotary embedding.

  Attributes:
    context: New max_position_embeddings, in tokens.
    method: One of `METHODS`; None changes max_position_embeddings alone.
    theta: Base, for "theta".
  """

  context: int
  method: str | None = None
  theta: float | None = None

  def __post_init__(self) -> None:
    positive_int("context", self.context)
    one_of("method", self.method, (None, *METHODS))
    if (self.theta is None) == (self.method == "theta"):
      raise OptionError(
        "theta",
        f"{self.theta} with method={self.method!r}",
        "a base with method='theta', and only there",
        "pass both or neither",
      )
    if self.theta is not None:
      number("theta", self.theta, least=1)


def scaled_config(
  config: dict[str, Any], scaling: RopeScaling
) -> dict[str, Any]:
  """The config.json of the model with the longer context.

  Raises:
    ConfigError: If the model has no rotary embeddings, or ones that the
      method does not apply to.
  """
  config = copy.deepcopy(config)
  old, _ = read_config(config)
  if old.positions is not None:
    raise ConfigError(
      "config.json",
      f"{old.family}, which has learned {old.positions.count} positions",
      "a model whose positions are computed",
      "choose another model: what it has not learned cannot be stretched",
    )
  if scaling.method is not None:
    rope = _rope(old)
    holder, key = _entry(config)
    entry = dict(holder.get(key) or {})
    if scaling.method in ("theta", "ntk"):
      theta = scaling.theta
      if theta is None:
        growth = scaling.context / old.max_positions
        theta = rope.theta * growth ** (rope.dims / (rope.dims - 2))
      if key != "rope_scaling":
        holder[key] = entry | {"rope_theta": theta}
      else:
        # A file with the base at the top level keeps its scaling.
        top_level_key = "rotary_emb_base"
        config[top_level_key if top_level_key in config else "rope_theta"] = (
          theta
        )
    else:
      original = _original(rope, scaling.method, old.max_positions)
      factor = scaling.context / original
      if factor < 1:
        raise ConfigError(
          "context",
          scaling.context,
          f"at least the {original} of the original model",
          f"pass context={original} or more",
        )
      kept_keys = ("rope_theta", "partial_rotary_factor")
      holder[key] = {k: v for k, v in entry.items() if k in kept_keys} | {
        "rope_type": scaling.method,
        "factor": float(factor),
      }
      if scaling.method == "yarn":
        # Without it a reader would take the new context for the original one. A
        # reader of "linear" divides the new context by the factor.
        holder[key]["original_max_position_embeddings"] = original
  config["max_position_embeddings"] = scaling.context
  # Dual chunk attention was for the old context.
  config.pop("dual_chunk_attention_config", None)
  new, _ = read_config(config)
  if scaling.method is None and _scalings(new) != _scalings(old):
    raise ConfigError(
      "context",
      f"{scaling.context} for a model whose scaling follows from that "
      f"number ({_scalings(old)[0][:40]}...)",
      f"{old.max_positions}, which it has",
      "pass method='theta', with its own base or another",
    )
  if scaling.method is not None and _rope(new) == _rope(old):
    raise ConfigError(
      "config.json",
      f"{old.family}, whose rotary embedding did not change",
      "a file whose rotary embedding this method changes",
      "pass method='theta', or edit the file",
    )
  return config


def extend_context(model: Transformer, scaling: RopeScaling) -> Transformer:
  """The model with a longer context and the same weights.

  Raises:
    ConfigError: See `scaled_config`.
  """
  config = scaled_config(json.loads(model.source), scaling)
  like = jax.eval_shape(lambda: create(config))
  leaves = jax.tree.leaves(model)
  if [x.shape for x in leaves] != [x.shape for x in jax.tree.leaves(like)]:
    # Equal layers share an array, and these are no longer equal.
    raise ConfigError(
      "model",
      f"a {model.config.family} whose stacked layers would differ",
      "layers that all change alike",
      "save it, edit its config.json and load it again",
    )
  extended = jax.tree.unflatten(jax.tree.structure(like), leaves)
  extended.origin = model.origin
  return extended


def _rope(config: TransformerConfig) -> Rope:
  """The rotary embedding of the layers with full attention, else of all."""
  full = [a for a in (x.attention for x in config.layers) if a.reach is None]
  ropes = {r for a in full for r in a.ropes}
  if not full:
    ropes = {r for x in config.layers for r in x.attention.ropes}
  if len(ropes) != 1:
    raise ConfigError(
      "config.json",
      f"{len(ropes)} rotary embeddings of layers with full attention",
      "one",
      "pass no method: nothing has to be stretched",
    )
  return ropes.pop()


def _scalings(config: TransformerConfig) -> list[str]:
  """The scaling of each rotary embedding."""
  return [str(rope.scaling) for rope in config.ropes]


def _entry(config: dict[str, Any]) -> tuple[dict[str, Any], str]:
  """The dict, and its key, with the RoPE settings of full attention."""
  new = config.get("rope_parameters")
  if new is None:
    return config, "rope_scaling"
  nested = new and all(isinstance(v, dict | None) for v in new.values())
  return (new, _FULL) if nested else (config, "rope_parameters")


def _original(rope: Rope, method: str, context: int) -> int:
  """The context of the original model in tokens.

  Raises:
    ConfigError: If the model has another scaling already.
  """
  scaling = rope.scaling
  kind = type(scaling)
  if kind not in (Unscaled, _SCALED[method]):
    raise ConfigError(
      "method",
      f"{method!r} for a model with {kind.__name__} scaling",
      f"one without, or with {method}",
      "pass method='theta' or None",
    )
  if isinstance(scaling, Linear):
    return scaling.original or round(context / scaling.factor)
  return scaling.original if isinstance(scaling, Yarn) else context
