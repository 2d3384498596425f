"""A model with more tokens in its vocabulary."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from ringjax.checks import integer, number, positive_int
from ringjax.errors import MeshError
from ringjax.models.heads.added_layer import refuse_head
from ringjax.models.transformer import Transformer
from ringjax.parallel.mesh import entering


@entering(lambda model, *_, **__: model.mesh)
def with_more_tokens(
  model: Transformer, n: int, *, seed: int = 0, spread: float = 0.1
) -> Transformer:
  """The model with `n` new ids at the end of its vocabulary.

  Embeddings of new ids, and their columns of an untied head, are the mean of
  the known ones plus normal noise; other weights are shared with `model`.
  Logits of known ids stay as they are.

  Args:
    model: Any model, tied or not; its weights stay sharded as they are.
    n: Number of new ids.
    seed: Seed of the noise.
    spread: Size of the noise, in standard deviations of the known embeddings:
      small if new ids must not be likely at once, 1 if they must differ at
      once.

  Raises:
    MeshError: If the vocabulary is sharded and the new one does not divide.
    OptionError: If the model has an EAGLE-3 head.
  """
  positive_int("n", n)
  refuse_head(model, "give it more tokens")
  integer("seed", seed, least=0)
  spread = number("spread", spread, least=0)
  keys = jax.random.split(jax.random.key(seed), 2)
  grown = jax.tree.map(lambda x: x, model)
  grown.config = dataclasses.replace(model.config, vocab=model.config.vocab + n)
  source = json.loads(model.source) | {"vocab_size": grown.config.vocab}
  grown.source = json.dumps(source, sort_keys=True, allow_nan=True)
  grown.embed.weight = _grown(model.embed.weight, n, keys[0], spread)
  if model.head is not None:
    grown.head.weight = _grown(model.head.weight, n, keys[1], spread)
    if model.head.bias is not None:
      grown.head.bias = _grown(model.head.bias, n, None, spread)
  return grown


def _grown(
  param: nnx.Variable, n: int, key: jax.Array | None, spread: float
) -> nnx.Variable:
  """A parameter with n more entries along its axis "vocab"."""
  value, axis = param.get_value(), param.get_metadata()["axes"].index("vocab")
  sharding = value.sharding
  if not isinstance(sharding, NamedSharding):
    return param.replace(_more(value, n, axis, spread, key))
  spec = (*sharding.spec, *(None,) * value.ndim)
  parts = sharding.mesh.shape[spec[axis]] if spec[axis] else 1
  if (value.shape[axis] + n) % parts:
    missing = -(value.shape[axis] + n) % parts
    raise MeshError(
      "n",
      f"{n} more than {value.shape[axis]} ids over {parts} devices",
      "a vocabulary that they divide",
      f"pass n={n + missing}, or rules=Rules(vocab=None) for the model",
    )
  grow = jax.jit(_more, static_argnums=(1, 2, 3), out_shardings=sharding)
  return param.replace(grow(value, n, axis, spread, key))


def _more(
  x: jax.Array, n: int, axis: int, spread: float, key: jax.Array | None
) -> jax.Array:
  floats = x.astype(jnp.float32)
  shape = (*x.shape[:axis], n, *x.shape[axis + 1 :])
  new = jnp.broadcast_to(jnp.mean(floats, axis, keepdims=True), shape)
  if key is not None:
    noise = jax.random.normal(key, shape, jnp.float32)
    new = new + noise * jnp.std(floats) * jnp.float32(spread)
  return jnp.concatenate([x, new.astype(x.dtype)], axis)
