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
import jax.numpy as jnp

from ringjax.checks import number, one_of, positive_int
from ringjax.errors import ConfigError, OptionError
from ringjax.models.checkpoint import create
from ringjax.models.contents import read_config
from ringjax.models.heads.added_layer import refuse_head
from ringjax.models.rope_scaling import (
  ContextExtension,
  LinearExtension,
  NtkExtension,
  YarnExtension,
  extended_config,
  full_rope,
  rope_entry,
  set_base,
)
from ringjax.models.transformer import Transformer, TransformerConfig
from ringjax.ops.rope import Unscaled

_EXTENSIONS: dict[str, type[ContextExtension]] = {
  "ntk": NtkExtension,
  "linear": LinearExtension,
  "yarn": YarnExtension,
}
METHODS = ("theta", *_EXTENSIONS)


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
  if config.get("position_folding") is not None:
    raise ConfigError(
      "config",
      "a model whose positions are folded (position_folding)",
      "a model whose distances are those of its tokens",
      "extend the folder without that key",
    )
  old, _ = read_config(config)
  # Dual chunk attention was for the old context.
  config.pop("dual_chunk_attention_config", None)
  if scaling.method is None or scaling.method == "theta":
    if old.positions is not None or scaling.method is not None:
      full_rope(old)
    if scaling.theta is not None:
      set_base(config, *rope_entry(config), scaling.theta)
    config["max_position_embeddings"] = scaling.context
  else:
    kind = _EXTENSIONS[scaling.method]
    original = _original(old, scaling.method)
    if scaling.context < original:
      raise ConfigError(
        "context",
        scaling.context,
        f"at least the {original} of the original model",
        f"pass context={original} or more",
      )
    config = extended_config(
      config,
      kind(
        factor=scaling.context / original,
        original_max_position_embeddings=original,
      ),
    )
  new, _ = read_config(config)
  if scaling.method is None and _scalings(new) != _scalings(old):
    raise ConfigError(
      "context",
      f"{scaling.context} for a model whose scaling follows from that "
      f"number ({_scalings(old)[0][:40]}...)",
      f"{old.max_positions}, which it has",
      "pass method='theta', with its own base or another",
    )
  if scaling.method == "theta" and full_rope(new) == full_rope(old):
    raise ConfigError(
      "config.json",
      f"{old.family}, whose rotary embedding did not change",
      "a file whose rotary embedding this method changes",
      "pass another theta, or edit the file",
    )
  return config


def extend_context(model: Transformer, scaling: RopeScaling) -> Transformer:
  """The model with a longer context and the same weights.

  Raises:
    ConfigError: See `scaled_config`.
    OptionError: If some weights are codes, or the model has an EAGLE-3 head.
  """
  kinds = (x.dtype for x in jax.tree.leaves(model))
  if any(jnp.issubdtype(kind, jnp.integer) for kind in kinds):
    raise OptionError(
      "model",
      "one whose weights are codes, to extend its context",
      "weights of floats",
      "edit the config.json of its folder, and load and code that",
    )
  refuse_head(model, "extend its context")
  config = scaled_config(json.loads(model.source), scaling)
  predicts = model.config.predicts is not None
  like = jax.eval_shape(lambda: create(config, predict_layers=predicts))
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


def _scalings(config: TransformerConfig) -> list[str]:
  """The scaling of each rotary embedding."""
  return [str(rope.scaling) for rope in config.ropes]


def _original(config: TransformerConfig, method: str) -> int:
  """The context in tokens that a stage's context is compared with.

  Raises:
    ConfigError: If the model has another scaling already.
  """
  scaling, kind = full_rope(config).scaling, _EXTENSIONS[method].scaling
  if kind is None or type(scaling) is Unscaled:
    return config.max_positions
  if type(scaling) is not kind:
    raise ConfigError(
      "method",
      f"{method!r} for a model with {type(scaling).__name__} scaling",
      f"one without, or with {method}",
      "pass method='theta' or None",
    )
  scaled: Any = scaling
  return scaled.original or round(config.max_positions / scaled.factor)
