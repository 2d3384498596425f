"""Models whose linear maps stay codes of 8 or 4 bits on the devices.

Cost: every weight is rounded once; see `nn.weights.coded`, and `block_codes`
for 4 bits, for a call.
Memory: 8 bits: a byte a weight of a map, and 4 for each output. 4 bits: half a
byte, and 8 for each group; NF4 and MXFP4 have 2 for each group. Each expert of
a mixture has separate codes.
Embedding, head, norms, routers and the map that latent attention absorbs into
its queries stay as they are. Layers in host memory are codes there; those on
disk stay as they are in the folder, and become codes when they are read.
Ref: Sheng et al. 2023, FlexGen, arXiv 2303.06865; Dettmers et al. 2023, QLoRA,
arXiv 2305.14314 (NF4; steps are bfloat16 here, not coded a second time);
Rouhani et al. 2023, OCP Microscaling Formats 1.0 (MXFP4).
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ringjax.checks import one_of, positive_int
from ringjax.errors import OptionError
from ringjax.models.grouping import looped
from ringjax.models.hf.tensors import parameters
from ringjax.models.transformer import Transformer
from ringjax.models.weights.linear_maps import (
  CODED,
  inner_size,
  replaced,
  rounded_maps,
)
from ringjax.models.weights.placed_maps import with_maps
from ringjax.models.weights.weight_placement import refuse_placed
from ringjax.nn.linear import Linear
from ringjax.nn.weights.adapted import AdaptedLinear, LowRankSum
from ringjax.nn.weights.block_codes import (
  BlockCodesLinear,
  BlockLayout,
  with_shards,
)
from ringjax.nn.weights.coded import Coded8Linear, level_nibbles, nibbles
from ringjax.nn.weights.integer import IntegerLinear
from ringjax.ops.integer_product import codes_of
from ringjax.parallel.mesh import entering

BITS = (8, 4)
GROUP = 64
# Levels of codes of 4 bits.
EVEN, NF4, MXFP4 = LEVELS = ("even", "nf4", "mxfp4")
# Options of `with_coded_weights` by the names that scripts have for them.
KINDS: dict[str, dict[str, Any]] = {
  "int8": {"bits": 8},
  "int4": {"bits": 4},
  NF4: {"bits": 4, "levels": NF4},
  MXFP4: {"bits": 4, "levels": MXFP4},
}
# Weights that share a power of two in the MX formats.
_MX_GROUP = 32
# Quantiles of the normal distribution in -1 to 1, of which 0 is one (QLoRA,
# appendix E).
_NF4_LEVELS = (
  -1.0,
  -0.6961928009986877,
  -0.5250730514526367,
  -0.39491748809814453,
  -0.28444138169288635,
  -0.18477343022823334,
  -0.09105003625154495,
  0.0,
  0.07958029955625534,
  0.16093020141124725,
  0.24611230194568634,
  0.33791524171829224,
  0.44070982933044434,
  0.5626170039176941,
  0.7229568362236023,
  1.0,
)
# Twice the numbers of FP4 (E2M1); one code of 16 is spare, as there are two
# zeros.
_FP4_LEVELS = (-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12, 12)


def with_coded_weights(
  model: Transformer,
  *,
  bits: int = 8,
  group: int | None = None,
  levels: str = EVEN,
) -> Transformer:
  """The model with codes in place of the weights of its linear maps.

  Activations, and the products, stay floats. It generates, serves and drafts as
  any model does, on any mesh. Adapters can be trained on it (`Lora`), its own
  weights cannot; `with_float_weights` makes a model of floats, which can be
  saved.

  Args:
    model: Model of floats.
    bits: Bits of a code. 8: integers times a step for each output. 4: from the
      least to the largest number of a group.
    group: Number of weights of an output that share these, for 4 bits; even;
      default 64. A map with fewer inputs has one group. Not for "mxfp4", whose
      groups have 32.
    levels: Levels of codes of 4 bits, of `LEVELS`: "even", at equal distances
      from a group's least to its largest number; "nf4", quantiles of the
      normal distribution times a group's largest size; "mxfp4", FP4 numbers
      times a power of two.

  Raises:
    OptionError: If an argument is out of range, or the model has codes already.
  """
  one_of("bits", bits, BITS)
  one_of("levels", levels, LEVELS)
  if group is not None and bits == 8:
    raise OptionError(
      "group", group, "none, for 8 bits", "leave it out, or pass bits=4"
    )
  if levels != EVEN and bits == 8:
    raise OptionError(
      "levels", repr(levels), "'even', for 8 bits", "pass bits=4"
    )
  if group is not None and levels == MXFP4:
    raise OptionError(
      "group",
      group,
      f"none, for 'mxfp4', whose groups have {_MX_GROUP}",
      "leave it out",
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
  result = coded_model(model, bits=bits, group=group, levels=levels)
  _bring_groups_together(result)
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
  model: Transformer,
  *,
  bits: int = 8,
  group: int | None = None,
  levels: str = EVEN,
) -> Transformer:
  """The result of `with_coded_weights`, also of arrays that are traced.

  Args:
    model: Model of floats.
    bits: Bits of a code.
    group: Number of weights of an output that share a step, for 4 bits.
    levels: Levels of codes of 4 bits, of `LEVELS`.

  Raises:
    OptionError: If `group` is out of range, or the model has codes already.
  """
  group = positive_int("group", GROUP if group is None else group)
  if group % 2:
    raise OptionError("group", group, "an even number", "pass group=64")
  maps = rounded_maps(model, "codes of weights")
  make = (
    _coded8
    if bits == 8
    else functools.partial(_coded4, group=group, levels=levels)
  )
  return with_maps(model, dict.fromkeys(maps, make))


def _bring_groups_together(model: Transformer) -> None:
  """Places the codes of a group, which weights' shards cut, on one device.

  Each call would bring them there.
  """
  for _, module in nnx.iter_modules(model):
    if not isinstance(module, BlockCodesLinear):
      continue
    parameter: Any = module.codes
    codes = parameter.get_value()
    sharding = getattr(codes, "sharding", None)
    if not isinstance(sharding, NamedSharding):
      continue
    spec = (*sharding.spec, *(None,) * codes.ndim)[: codes.ndim]
    if spec[-2] is None:
      continue
    whole = NamedSharding(sharding.mesh, P(*spec[:-2], None, spec[-1]))
    # Devices of other processes may have parts.
    placed = jax.jit(lambda x: x, out_shardings=whole)(codes)
    module.codes = parameter.replace(placed)


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
      "train adapters of it (Lora), or make floats of the codes with "
      "rj.models.with_float_weights",
    )


def _coded8(linear: Linear) -> nnx.Module:
  return Coded8Linear(linear, *rounded(linear))


def _coded4(linear: Linear, group: int, levels: str) -> nnx.Module:
  weight, first = linear.weight.get_value(), 1 + linear.lead
  inner, inputs = inner_size(linear), first + linear.contracted
  group = min(_MX_GROUP if levels == MXFP4 else group, inner + inner % 2)
  arrays = _nibbles(weight, linear.lead, inner, group, levels)
  return BlockCodesLinear(
    linear,
    _layout(levels, group),
    *arrays,
    inputs=weight.shape[first:inputs],
    outputs=weight.shape[inputs:],
  )


def _layout(levels: str, group: int) -> BlockLayout:
  """Layout of 4-bit codes of some levels, of `LEVELS`."""
  if levels == EVEN:
    return BlockLayout(
      group=group,
      levels=tuple(range(16)),
      step="float32",
      minimum="float32",
    )
  numbers = {NF4: _NF4_LEVELS, MXFP4: _FP4_LEVELS}[levels]
  return BlockLayout(group=group, levels=numbers, step="bfloat16")


def code_kind(model: Transformer) -> str:
  """Name of the codes of a model's maps: "int8", or "nf4/64" for groups of 64.

  Several kinds are separated by spaces; those of a file are "file", and a model
  of floats has "".
  """
  kinds = set()
  for _, module in nnx.iter_modules(model.stack):
    if isinstance(module, Coded8Linear):
      kinds.add("int8")
    elif isinstance(module, BlockCodesLinear):
      group = module.layout.group
      names = [x for x in LEVELS if _layout(x, group) == module.layout]
      name = names[0] if names else "file"
      kinds.add(f"{'int4' if name == EVEN else name}/{group}")
  return " ".join(sorted(kinds))


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


@jax.jit(static_argnums=(1, 2, 3, 4))
def _nibbles(
  weight: Float[Array, " *shape"],
  lead: int,
  inner: int,
  group: int,
  levels: str,
) -> tuple[jax.Array | None, ...]:
  """Codes [L, G, half, O], steps and least numbers [L, G, O]."""
  encode = {
    EVEN: nibbles,
    NF4: functools.partial(level_nibbles, step_of=_largest, levels=_NF4_LEVELS),
    MXFP4: functools.partial(level_nibbles, step_of=_power, levels=_FP4_LEVELS),
  }[levels]

  def round_layer(x: jax.Array) -> tuple[jax.Array | None, ...]:
    return encode(x.reshape(inner, -1), group)

  return jax.lax.map(jax.vmap(round_layer) if lead else round_layer, weight)


def _largest(largest: Float[Array, "G O"]) -> Float[Array, "G O"]:
  """Step of an NF4 group from its largest size."""
  return largest


def _power(largest: Float[Array, "G O"]) -> Float[Array, "G O"]:
  """Step of an MXFP4 group: half of its power of two, see `_FP4_LEVELS`."""
  # largest = m 2^e with m in [0.5, 1); the largest exponent of FP4 is 2.
  exponent = jnp.frexp(largest)[1] - 1 - 2
  return jnp.ldexp(jnp.ones_like(largest), exponent - 1)


@entering(lambda model, *_, **__: model.mesh)
def with_float_weights(
  model: Transformer, *, dtype: DTypeLike = jnp.float32
) -> Transformer:
  """The model with floats in place of the codes of its linear maps.

  Adapters over codes (`Lora.merged`) are added to them. The result can be
  saved and trained.

  Args:
    model: Model by `with_coded_weights`, of a file's codes, or of floats.
    dtype: Dtype of the decoded weights.

  Raises:
    OptionError: If not all layers are on the devices, its maps round
      activations, or rows have different adapters.
  """
  refuse_placed(model, "make floats of it", "load it without placement=")
  maps: dict[str, nnx.Module | nnx.Variable] = {}
  for path, module in nnx.iter_modules(model.stack):
    name = ".".join(map(str, path))
    if isinstance(module, (IntegerLinear, AdaptedLinear)):
      raise OptionError(
        "model",
        f"one whose map {name} rounds activations to integers"
        if isinstance(module, IntegerLinear)
        else f"one whose map {name} has an adapter for each row",
        "codes of weights, with at most one adapter",
        "pass the model that was rounded"
        if isinstance(module, IntegerLinear)
        else "merge one adapter: Lora.merged",
      )
    if name.endswith(".base"):
      # It is decoded with its adapter.
      continue
    if isinstance(module, (*CODED, LowRankSum)):
      maps[f"stack.{name}"] = _float_map(module, jnp.dtype(dtype))
  return replaced(model, maps)


def _float_map(
  module: Coded8Linear | BlockCodesLinear | LowRankSum, dtype: jnp.dtype
) -> nnx.Module | nnx.Variable:
  """A map of floats, or the parameter of experts."""
  if isinstance(module, LowRankSum):
    base: Any = module.base
    factors = module.a.get_value(), module.b.get_value(), module.scale
  else:
    base, factors = module, ()
  weight = _decoded(base, jnp.float32 if base.widened else dtype, *factors)
  marks = {"axes": base.axes, "wide": base.widened, "by_index": base.by_index}
  if "experts" in base.axes:
    return nnx.Param(weight, **marks, by_rows=False)
  inputs, outputs = base.inputs, base.outputs
  has_bias = base.bias is not None
  linear: Any = nnx.eval_shape(
    lambda: Linear(
      nnx.Rngs(0),
      inputs,
      outputs,
      base.axes,
      bias=has_bias,
      wide=base.widened,
    )
  )
  linear.weight = linear.weight.replace(weight)
  if has_bias:
    linear.bias = base.bias
  return linear


@jax.jit(static_argnums=(1, 4))
def _decoded(
  module: Any,
  dtype: jnp.dtype,
  a: jax.Array | None = None,
  b: jax.Array | None = None,
  scale: float = 1.0,
) -> jax.Array:
  """Weight of a map, and the product of its adapter."""
  weight = module.weight()
  if a is not None and b is not None:
    layers, rank = a.shape[0], a.shape[-1]
    product = jnp.matmul(
      a.reshape(layers, -1, rank).astype(jnp.float32),
      b.reshape(layers, rank, -1).astype(jnp.float32),
    )
    weight = weight + product.reshape(weight.shape) * jnp.float32(scale)
  return weight.astype(dtype)
