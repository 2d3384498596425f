"""Selection of the context tokens to recompute (CacheBlend).

Guarantees: the keys compared are those of the model's second layer, the first
that depends on other tokens: stored keys of the separately encoded contexts,
and keys of all contexts read as one text.
Cost: two layers of the model over all contexts.

Ref: Yao et al. 2025, CacheBlend, arXiv 2405.16444.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from ringjax.errors import OptionError
from ringjax.infer.contexts.context_library import EncodedContext
from ringjax.infer.prompt_reading import read_context
from ringjax.infer.session import Session
from ringjax.kv.cache_kind import CacheConfig, LayoutConfig
from ringjax.kv.codecs import Codec
from ringjax.kv.composed.context_cache import exported
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.models.first_layers import first_layers
from ringjax.models.transformer import Transformer
from ringjax.nn.stack import keeps
from ringjax.ops.attention.cached.code_format import as_bytes
from ringjax.ops.attention.cached.views import Decoder


def differing_tokens(
  model: Transformer,
  session: Session,
  contexts: Sequence[EncodedContext],
  prefix: Sequence[int],
  count: int,
) -> list[Bool[np.ndarray, " _"]]:
  """Selects the `count` tokens whose keys differ most.

  Args:
    model: Model that encoded the contexts.
    session: Session whose mesh and dtype are used.
    contexts: Encoded contexts in the order of the text.
    prefix: Token ids before all of them.
    count: Number of tokens to select, all contexts together.

  Returns:
    A mask for each context, bool [n].
  """
  sizes = [x.tokens.size for x in contexts]
  if count >= sum(sizes):
    return [np.ones(n, bool) for n in sizes]
  if not count:
    return [np.zeros(n, bool) for n in sizes]
  shallow_model = first_layers(model, min(2, len(model.config.layers)))
  texts = [np.asarray(prefix, np.int32), *(x.tokens for x in contexts)]
  text = np.concatenate(texts)
  shallow_session = Session(
    shallow_model,
    text.size + 8 * session.shards,
    mesh=session.mesh,
    axis=session.axis,
    dtype=session.cache.dtype,
    cache_kind=CacheConfig(layout=LayoutConfig(unrotated=True)),
  )
  read_context(shallow_model, [text], cache=shallow_session)
  (joint_blocks,) = exported(
    shallow_session.cache, [(0, len(prefix), text.size)]
  )
  joint_keys = _keys(shallow_model, joint_blocks, 1)
  stored_keys = np.concatenate([_keys(model, x.blocks, 1) for x in contexts], 1)
  distances = np.sum(np.square(joint_keys - stored_keys), (0, 2))
  chosen = np.zeros(distances.size, bool)
  chosen[np.argsort(-distances, kind="stable")[:count]] = True
  return np.split(chosen, np.cumsum(sizes)[:-1])


def _keys(model: Transformer, blocks: Any, layer: int) -> np.ndarray:
  """Stored keys of a layer, decoded to float32 [K, n, H]."""
  layer = min(layer, len(model.config.layers) - 1)
  # A layer that shares another's keys is replaced by the first layer.
  layer = layer if keeps(model.config.layers[layer]) else 0
  for kind, shape in enumerate(model.kinds):
    if not isinstance(shape, LayerCacheSpec) or layer not in shape.which:
      continue
    index, codec = shape.which.index(layer), blocks.kind.codec
    keys = blocks.parts[kind].k
    if codec is None:
      return np.asarray(keys[index]).astype(np.float32)
    if not isinstance(codec, Codec):
      raise OptionError(
        "cache kind",
        f"{blocks.kind}, for combine='recompute'",
        "one codec for all heads, whose keys can be compared",
        "take one codec, or combine='kvlink'",
      )
    constants = [jnp.asarray(x[index]) for x in codec.constants(kind, shape)[0]]
    decoder = Decoder(codec.keys, shape.key, jnp.float32)
    data = as_bytes(jnp.asarray(keys[index])[None])
    return np.asarray(decoder(data, constants)[0])
  raise AssertionError(layer)
