"""Models whose linear maps stay codes of 8 or 4 bits on the devices.

Cost: every weight is rounded once; a call reads codes in place of floats.
Memory: 1 or 1/2 byte a weight of a map, and 8 bytes for each group. Embedding,
head, norms, routers, the experts of mixtures and the map that latent attention
absorbs into its queries stay as they are.
Ref: Sheng et al. 2023, FlexGen, arXiv 2303.06865.
"""

from __future__ import annotations

import math

import jax
from jaxtyping import Array, Float

from ringjax.checks import one_of, positive_int
from ringjax.errors import OptionError
from ringjax.models.linear_maps import replaced, rounded_maps
from ringjax.models.transformer import Transformer
from ringjax.nn.coded import BITS, CodedLinear, encoded


def with_coded_weights(
  model: Transformer, *, bits: int = 8, group: int = 64
) -> Transformer:
  """The model with codes in place of the weights of its linear maps.

  Activations, and the products, stay floats. It answers, serves and drafts as
  any model does, on any mesh; it is not trained or saved.

  Args:
    model: the model, of floats.
    bits: of a code, 8 or 4.
    group: weights of an output that share a least and a largest number; even.

  Raises:
    OptionError: an argument out of range, or a model that has codes already.
  """
  one_of("bits", bits, BITS)
  positive_int("group", group)
  if group % 2:
    raise OptionError("group", group, "an even number", "pass group=64")
  changed = {}
  for path, linear in rounded_maps(model, "codes of weights").items():
    weight = linear.weight.get_value()
    n = linear.contracted
    codes, step, least = _encoded(weight, n, bits, group)
    changed[path] = CodedLinear(
      linear, codes, step, least, bits=bits, inputs=weight.shape[1 : 1 + n]
    )
  return replaced(model, changed)


@jax.jit(static_argnums=(1, 2, 3))
def _encoded(
  weight: Float[Array, " *shape"], contracted: int, bits: int, group: int
) -> tuple[jax.Array, ...]:
  """Codes, steps and least numbers of each layer, [L, n, *out]."""
  inner = math.prod(weight.shape[1 : 1 + contracted])
  out = weight.shape[1 + contracted :]

  def one(layer: jax.Array) -> tuple[jax.Array, ...]:
    parts = encoded(layer.reshape(inner, -1), bits, group)
    return tuple(x.reshape(x.shape[0], *out) for x in parts)

  return jax.lax.map(one, weight)
