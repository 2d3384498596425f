"""Models whose linear maps stay codes of 8 or 4 bits on the devices.

Cost: every weight is rounded once; see `nn.weights.coded`, and `block_codes`
for 4 bits, for a call.
Memory: 8 bits: a byte a weight of a map, and 4 for each output. 4 bits: half a
byte, and 8 for each group. Each expert of a mixture has separate codes.
Embedding, head, norms, routers and the map that latent attention absorbs into
its queries stay as they are. Layers in host memory are codes there; those on
disk stay as they are in the folder, and become codes when they are read.
Ref: Sheng et al. 2023, FlexGen, arXiv 2303.06865.
"""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from ringjax.checks import one_of, positive_int
from ringjax.errors import OptionError
from ringjax.models.grouping import looped
from ringjax.models.hf.tensors import parameters
from ringjax.models.transformer import Transformer
from ringjax.models.weights.linear_maps import inner_size, rounded_maps
from ringjax.models.weights.placed_maps import with_maps
from ringjax.nn.linear import Linear
from ringjax.nn.weights.block_codes import (
  BlockCodesLinear,
  BlockLayout,
  with_shards,
)
from ringjax.nn.weights.coded import Coded8Linear, nibbles
from ringjax.ops.integer_product import codes_of

BITS = (8, 4)
GROUP = 64


def with_coded_weights(
  model: Transformer, *, bits: int = 8, group: int | None = None
) -> Transformer:
  """The model with codes in place of the weights of its linear maps.

  Activations, and the products, stay floats. It generates, serves and drafts as
  any model does, on any mesh; it cannot be trained or saved.

  Args:
    model: Model of floats.
    bits: Bits of a code. 8: integers times a step for each output. 4: from the
      least to the largest number of a group.
    group: Number of weights of an output that share these, for 4 bits; even;
      default 64. A map with fewer inputs has one group.

  Raises:
    OptionError: If an argument is out of range, or the model has codes already.
  """
  one_of("bits", bits, BITS)
  if group is not None and bits == 8:
    raise OptionError(
      "group", group, "none, for 8 bits", "leave it out, or pass bits=4"
    )
  devices = jax.tree.leaves(model)[0].devices()
  is_loop = len(model.stack.runs) == len(looped(model.stack.runs))
  if not is_loop and all(device.platform == "cpu" for device in devices):
    warnings.warn(
      "codes of layers that are not one loop are slow on a CPU; load the model "
      "with scan=True",
      RuntimeWarning,
      stacklevel=2,
    )
  result = coded_model(model, bits=bits, group=group)
  # Layers in host memory or on disk have empty arrays on the devices.
  placed = {
    id(parameters(block)[path]): P(None, *spec)
    for blocks, kinds in zip(
      result.stack.blocks, result.stack.placed or (), strict=False
    )
    for block, kind in zip(blocks, kinds, strict=True)
    if kind is not None
    for path, spec in zip(kind.paths, kind.specs, strict=True)
  }

  def spec_of(parameter: nnx.Variable) -> P | None:
    if (spec := placed.get(id(parameter))) is not None:
      return spec
    sharding = getattr(parameter.get_value(), "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else None

  return with_shards(result, spec_of)


def coded_model(
  model: Transformer, *, bits: int = 8, group: int | None = None
) -> Transformer:
  """The result of `with_coded_weights`, also of arrays that are traced.

  Args:
    model: Model of floats.
    bits: Bits of a code.
    group: Number of weights of an output that share a step, for 4 bits.

  Raises:
    OptionError: If `group` is out of range, or the model has codes already.
  """
  group = positive_int("group", GROUP if group is None else group)
  if group % 2:
    raise OptionError("group", group, "an even number", "pass group=64")
  maps = rounded_maps(model, "codes of weights")
  make = _coded8 if bits == 8 else functools.partial(_coded4, group=group)
  return with_maps(model, dict.fromkeys(maps, make))


def refuse_codes(model: object, doing: str) -> None:
  """Refuses an operation that needs weights of floats.

  Raises:
    OptionError: If some weights are codes, or other integers.
  """
  kinds = (x.dtype for x in jax.tree.leaves(model) if hasattr(x, "dtype"))
  if any(jnp.issubdtype(kind, jnp.integer) for kind in kinds):
    raise OptionError(
      "model",
      f"one whose weights are codes of whole numbers, to {doing}",
      "weights of floats",
      "pass the model that was rounded",
    )


def _coded8(linear: Linear) -> nnx.Module:
  return Coded8Linear(linear, *rounded(linear))


def _coded4(linear: Linear, group: int) -> nnx.Module:
  weight, first = linear.weight.get_value(), 1 + linear.lead
  inner, inputs = inner_size(linear), first + linear.contracted
  layout = BlockLayout(
    group=min(group, inner + inner % 2),
    levels=tuple(range(16)),
    step="float32",
    minimum="float32",
  )
  arrays = _nibbles(weight, linear.lead, inner, layout.group)
  return BlockCodesLinear(
    linear,
    layout,
    *arrays,
    inputs=weight.shape[first:inputs],
    outputs=weight.shape[inputs:],
  )


def rounded(
  linear: Linear, *, channels: bool = True
) -> tuple[Int[Array, " ..."], Float[Array, " ..."]]:
  """int8 codes of a map's weight, of its shape, and float32 scales of outputs.

  Args:
    linear: The map, or that of experts, whose weight is stacked over layers.
    channels: Whether each output has its scale; else all share one.
  """
  weight = linear.weight.get_value()
  out = weight.shape[1 + linear.lead + linear.contracted :]
  return _codes(weight, linear.lead, inner_size(linear), out, channels)


@jax.jit(static_argnums=(1, 2, 3, 4))
def _codes(
  weight: Float[Array, " *shape"],
  lead: int,
  inner: int,
  out: tuple[int, ...],
  channels: bool,
) -> tuple[jax.Array, jax.Array]:
  def round_layer(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    codes, scales = codes_of(x.reshape(inner, -1), channels=channels)
    return codes.reshape(x.shape), scales.reshape(out)

  return jax.lax.map(jax.vmap(round_layer) if lead else round_layer, weight)


@jax.jit(static_argnums=(1, 2, 3))
def _nibbles(
  weight: Float[Array, " *shape"], lead: int, inner: int, group: int
) -> tuple[jax.Array, ...]:
  """Codes [L, G, half, O], steps and least numbers [L, G, O]."""

  def round_layer(x: jax.Array) -> tuple[jax.Array, ...]:
    return nibbles(x.reshape(inner, -1), group)

  return jax.lax.map(jax.vmap(round_layer) if lead else round_layer, weight)
