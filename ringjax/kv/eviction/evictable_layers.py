"""Layers and meshes that policies and pages support."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ringjax.errors import OptionError
from ringjax.kv.base import CacheSpec
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.kv.policies import Policy
from ringjax.kv.state import StateShape
from ringjax.kv.storage.pages import Pages, Places
from ringjax.ops.mask import Causal


def kv_heads(shapes: Sequence[Any]) -> int:
  """Greatest common divisor of the KV heads of all kinds of layers."""
  return math.gcd(*(s.heads for s in shapes if isinstance(s, LayerCacheSpec)))


def pages_spec(
  shape: LayerCacheSpec | StateShape, room: CacheSpec, kind: CacheConfig
) -> Pages | None:
  """Specs of empty pages; None for recurrent layers."""
  if not isinstance(shape, LayerCacheSpec):
    return None
  places = Places.of(room, shape.heads)
  return Pages.spec(shape, room, kind.layout.page, places, kind.alike)


def check_layers(
  shapes: Sequence[Any], kind: CacheConfig, room: CacheSpec
) -> None:
  """Refuse layers and meshes that the policy or pages do not support."""
  policy = kind.policy
  if kind.exact.residual is not None and room.shards > 1:
    raise OptionError(
      "residual",
      f"{kind.exact.residual}, over {room.shards} shards of the sequence",
      "one shard: groups that become codes together are of consecutive tokens",
      "leave residual out, or make the mesh without that axis",
    )
  layers = [s for s in shapes if isinstance(s, LayerCacheSpec)]
  if kind.exact.residual is not None and not all(
    layer.value for layer in layers
  ):
    raise OptionError(
      "residual",
      f"{kind.exact.residual}, for a layer whose values are parts of its keys",
      "layers with values of their own, which leave the residual one by one",
      f"write recent={kind.exact.residual} in its place",
    )
  heads = {Places.of(room, s.heads).heads for s in layers}
  over = room.axes.get("heads")
  uneven = over is not None and heads != {(over,)} and room.axes.get("batch")
  if uneven or len(heads) > 1:
    raise OptionError(
      "mesh",
      f"KV heads {sorted({s.heads for s in layers})} that do not all divide "
      f"over {over!r}, for a cache with pages",
      "heads that divide, or a mesh that shards the sequence alone",
      "make the mesh without that axis, or the cache with kind='dense'",
    )
  if policy is not None and policy.moves:
    _check_moves(layers, policy)
  _check_learned(layers, kind)
  if policy is None or not policy.reads:
    return
  rotates_late = any(s.reading is not None and s.reading.late for s in layers)
  if kind.layout.unrotated and rotates_late:
    raise OptionError(
      "kind",
      f"{policy} over keys that are stored before a rotation and a norm",
      "keys that are stored rotated",
      "leave unrotated out, or use a policy of positions, rj.kv.Sinks",
    )


def _check_learned(layers: Sequence[LayerCacheSpec], kind: CacheConfig) -> None:
  """Refuse learned rotations of keys that are rotated outside of a call."""
  ropes = [layer.reading.rope for layer in layers if layer.reading is not None]
  if not any(rope is not None and rope.learned for rope in ropes):
    return
  policy = kind.policy
  reads_later = policy is not None or kind.tier.device is not None
  unrotated = kind.layout.unrotated and reads_later
  # Moments are those of queries before their rotation.
  if unrotated or (policy is not None and policy.moments):
    raise OptionError(
      "kind",
      f"a rotation with learned factors, which are weights, for {kind}",
      "a kind that rotates keys in a call of the model alone",
      "leave unrotated out, or use a policy other than expected",
    )


def _check_moves(layers: Sequence[LayerCacheSpec], policy: Policy) -> None:
  """Refuse layers whose attention depends on more than token distances."""
  for shape in layers:
    reading = shape.reading
    got = None
    if reading is None or shape.reach is not None:
      got = "a layer that looks back a window"
    elif reading.most is not None:
      got = f"a layer in which {reading.chooser} chooses keys"
    elif reading.mask != Causal():
      got = f"a layer whose queries see {reading.mask}"
    elif reading.rope is not None and reading.rope.scaling.by_length:
      got = "a rotation that depends on the length of the text"
    if got is not None:
      raise OptionError(
        "kind",
        f"{policy} for {got}",
        "layers whose queries see all tokens before them, by their distance",
        "leave positions='cache' out, or use another kind of cache",
      )
