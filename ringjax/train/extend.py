"""A longer context for a trained model: its rotations are stretched.

Guarantees: all weights stay; only what turns the queries and keys of the layers
that see everything changes. Layers with a window keep theirs where the file
tells them apart; where it has one rotation for all, as Gemma 2's, all have it.

  theta   another base, as given
  ntk     the base grows by s^(d / (d - 2)) for s times the context, so that the
          slowest of d / 2 rotations is s times slower and the fastest stays
  linear  positions are divided by s (Chen et al. 2023, arXiv 2306.15595)
  yarn    slow rotations are divided by s, fast ones stay (Peng et al. 2023,
          arXiv 2309.00071)

s counts from the context that the model was first made for, so that one stage
after another gives what the last one alone would.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import jax

from ringjax.checks import positive_int
from ringjax.errors import ConfigError, OptionError
from ringjax.models.checkpoint import create, read_config
from ringjax.models.transformer import Transformer, TransformerConfig
from ringjax.ops.rope import Linear, Rope, Unscaled, Yarn
from ringjax.plan.cost import check_number

METHODS = ("theta", "ntk", "linear", "yarn")
_FULL = "full_attention"
_SCALED: dict[str, type[Unscaled]] = {"linear": Linear, "yarn": Yarn}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """How a stage reaches further.

  Attributes:
    context: tokens, the new max_position_embeddings.
    method: of `METHODS`; None changes the context's number and nothing else.
    theta: the base, for "theta".
  """

  context: int
  method: str | None = None
  theta: float | None = None

  def __post_init__(self) -> None:
    positive_int("context", self.context)
    if self.method is not None and self.method not in METHODS:
      raise OptionError(
        "method",
        repr(self.method),
        f"None or one of {', '.join(METHODS)}",
        "set method to one of these",
      )
    if (self.theta is None) == (self.method == "theta"):
      raise OptionError(
        "theta",
        f"{self.theta} with method={self.method!r}",
        "a base with method='theta', and only there",
        "pass both or neither",
      )
    if self.theta is not None:
      check_number("theta", self.theta, least=1.0)


def scaled_config(
  config: dict[str, Any], scaling: RopeScaling
) -> dict[str, Any]:
  """The config.json of the stretched model.

  Raises:
    ConfigError: a model whose layers do not turn, or turn in ways that the
      method cannot go on from.
  """
  config = copy.deepcopy(config)
  before, _ = read_config(config)
  if scaling.method is not None:
    rope = _rope(before)
    entry, key = _entry(config)
    if scaling.method in ("theta", "ntk"):
      theta = scaling.theta
      if theta is None:
        grown = scaling.context / before.max_positions
        theta = rope.theta * grown ** (rope.dims / (rope.dims - 2))
      # Where the file keeps the base at the top, scaling stays as it is.
      (config if key == "rope_scaling" else entry)[_base(config, key)] = theta
    else:
      original = _original(rope, scaling.method, before.max_positions)
      factor = scaling.context / original
      if factor < 1:
        raise ConfigError(
          "context",
          scaling.context,
          f"at least the {original} that the model was made for",
          "raise it",
        )
      entry = {k: v for k, v in entry.items() if k in ("rope_theta",
               "partial_rotary_factor")}  # fmt: skip
      entry |= {
        "rope_type": scaling.method,
        "factor": float(factor),
        # Without it a reader could take the new context for the old one.
        "original_max_position_embeddings": original,
      }
      _put(config, key, entry)
  config["max_position_embeddings"] = scaling.context
  # What folded the distances of the old context does not bound the new one.
  config.pop("dual_chunk_attention_config", None)
  after, _ = read_config(config)
  if scaling.method is None and _scalings(after) != _scalings(before):
    raise ConfigError(
      "context",
      f"{scaling.context} for a model whose scaling follows from that "
      f"number ({_scalings(before)[0][:40]}...)",
      f"{before.max_positions}, as it is",
      "pass method='theta', with the base that it has or another",
    )
  if scaling.method is not None and _rope(after) == _rope(before):
    raise ConfigError(
      "config.json",
      f"{before.family}, whose rotations stayed",
      "a file whose rotations this method can change",
      "pass method='theta', or edit the file",
    )
  return config


def extend_context(model: Transformer, scaling: RopeScaling) -> Transformer:
  """The same weights with a longer context.

  Raises:
    ConfigError: as `scaled_config`.
  """
  config = scaled_config(json.loads(model.source), scaling)
  like = jax.eval_shape(lambda: create(config))
  leaves = jax.tree.leaves(model)
  if [x.shape for x in leaves] != [x.shape for x in jax.tree.leaves(like)]:
    # Layers that were equal, and shared an array, are not any more.
    raise ConfigError(
      "model",
      f"a {model.config.family} whose layers group otherwise then",
      "layers that are changed alike",
      "save it, edit its config.json and load it again",
    )
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _rope(config: TransformerConfig) -> Rope:
  """The rotation of the layers that see most."""
  full = [a for a in (x.attention for x in config.layers) if a.reach is None]
  ropes = {r for a in full for r in a.ropes}
  if not full:
    ropes = {r for x in config.layers for r in x.attention.ropes}
  if len(ropes) != 1:
    raise ConfigError(
      "config.json",
      f"{len(ropes)} rotations of layers that see everything",
      "one",
      "pass no method: nothing has to be stretched",
    )
  return ropes.pop()


def _scalings(config: TransformerConfig) -> list[str]:
  """How the rotations are scaled."""
  return [str(rope.scaling) for rope in config.ropes]


def _entry(config: dict[str, Any]) -> tuple[dict[str, Any], str]:
  """Where the file says how full layers turn: what, and the key."""
  new = config.get("rope_parameters")
  if new is None:
    return dict(config.get("rope_scaling") or {}), "rope_scaling"
  nested = new and all(isinstance(v, dict | None) for v in new.values())
  return (new[_FULL] if nested else new), "rope_parameters"


def _put(config: dict[str, Any], key: str, entry: dict[str, Any]) -> None:
  old = config.get(key)
  if key == "rope_parameters" and old and _FULL in old:
    old[_FULL] = entry
  else:
    config[key] = entry


def _base(config: dict[str, Any], key: str) -> str:
  if key == "rope_scaling" and "rotary_emb_base" in config:
    return "rotary_emb_base"
  return "rope_theta"


def _original(rope: Rope, method: str, context: int) -> int:
  """Tokens that the model was first made for, by its scaling.

  Raises:
    ConfigError: it is scaled in another way already.
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
