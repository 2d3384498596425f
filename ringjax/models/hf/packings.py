"""Reads the quantisation settings of a config.json.

Guarantees: the tensors show which of them are packed; the config says how. A
key or a value that may change what the codes mean and that is not known is an
error, before any weight is read. Activations are not rounded here, whatever a
config says of them, and scales of a cache's keys and values are not used.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree

from ringjax.models.hf.codes import Awq, Gptq, PackedRows, Scaled
from ringjax.models.hf.config_reader import ConfigReader, error
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.packed import BLOCK4, Float4, Float4Rows, Float8
from ringjax.models.hf.tensors import CheckpointTensor

_PLAIN = (
  "take the unquantised checkpoint, or write one with transformers: "
  "model.dequantize().save_pretrained(folder)"
)
_WHAT = (
  "plain weights, or quant_method mxfp4, fp8, fbgemm_fp8, modelopt, "
  "compressed-tensors, gptq, awq or bitsandbytes"
)
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def packed_name(name: str, ending: str) -> str:
  """Name of a weight's codes: its name with another ending."""
  return name.removesuffix("weight") + ending


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
  """Format of a folder's packed weights.

  Attributes:
    codes: Endings of the names of codes, in place of "weight".
    beside: Endings of tensors that the folder may have and that are not read.
  """

  codes: tuple[str, ...] = ()
  beside: tuple[str, ...] = ()

  def form(self, form: PyTree, name: str, have: Mapping[str, Any]) -> Any:
    """Stored form of a tensor, from the tensors on disk."""
    raise NotImplementedError

  def check(
    self,
    folder: Folder,
    tensors: Iterable[CheckpointTensor],
    unread: Iterable[str],
  ) -> None:
    """Refuses a folder whose tensors contradict its config.

    Args:
      folder: Folder whose tensors have the expected names and shapes.
      tensors: Tensors of the model, with their forms.
      unread: Names of other tensors.
    """
    del folder, tensors, unread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float4Packing(Packing):
  """MXFP4."""

  def form(self, form: PyTree, name: str, have: Mapping[str, Any]) -> Any:
    packed = name not in have and f"{name}_blocks" in have
    blocked = len(form.stored) == 3 and form.stored[1] % BLOCK4 == 0
    return Float4(form) if packed and blocked else form


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Packing(Packing):
  """Float8 with a scale for each block, beside maps of four bits.

  Scales are named "_scale_inv", or, as in DeepSeek-V4, "scale" in place of
  "weight"; they are floats, or exponents of powers of two. Maps of four bits
  have an exponent for each 32 numbers of a row.

  Attributes:
    block: Rows and columns of a block.
  """

  block: tuple[int, int]

  def form(self, form: PyTree, name: str, have: Mapping[str, Any]) -> Any:
    codes = have.get(name)
    if codes is None or len(form.stored) != 2:
      return form
    names = (f"{name}_scale_inv", packed_name(name, "scale"))
    scale = next((x for x in names if x in have), None)
    exponents = scale is not None and have[scale].dtype == np.uint8
    if codes.dtype == jnp.float8_e4m3fn:
      return Float8(form, self.block, scale, exponents)
    m, n = form.stored
    # The scales of other codes are missing, or of another shape.
    in_rows = codes.dtype == np.int8 and codes.shape == (m, n // 2)
    if in_rows and n % BLOCK4 == 0 and exponents and scale is not None:
      return Float4Rows(form=form, scale=scale)
    return form


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledPacking(Packing):
  """Codes of eight bits, each stored as one number.

  Attributes:
    scales: Endings of the names of scales, in place of "weight".
    zero: Ending of the names of zeros, in place of "weight".
    factor: Factor of the scales.
    blocks: Allowed rows and columns of a block, None for all.
    dtypes: Allowed dtypes of codes.
    zeros: Whether the config says that there are zeros; None: it may be.
  """

  scales: tuple[str, ...] = ("weight_scale", "weight_scale_inv")
  zero: str = "weight_zero_point"
  factor: float = 1.0
  blocks: tuple[tuple[int | None, int | None], ...] = ((None, None), (1, None))
  dtypes: tuple[str, ...] = ("float8_e4m3fn",)
  zeros: bool | None = False

  def form(self, form: PyTree, name: str, have: Mapping[str, Any]) -> Any:
    codes = have.get(name)
    if codes is None or str(codes.dtype) not in ("int8", *_FLOAT8):
      return form
    if len(form.stored) != 2:
      return form
    if str(codes.dtype) not in self.dtypes:
      want = f"{' or '.join(self.dtypes)}, as it says"
      raise error("quantization_config", f"{name} of {codes.dtype}", want)
    names = (packed_name(name, x) for x in self.scales)
    scale = next((x for x in names if x in have), None)
    # Without scales the first name is reported as missing.
    scale = scale or packed_name(name, self.scales[0])
    shape = have[scale].shape if scale in have else ()
    block = self._block(shape, form.stored)
    if block is None:
      # The block by the config, whose scales the file then lacks.
      block = self._whole(self.blocks[0], form.stored)
      shape = _counts(block, form.stored)
    ending = name.removesuffix(".weight")
    return Scaled(
      form=form,
      dtype=str(codes.dtype),
      scale=scale.removeprefix(ending),
      scale_shape=shape,
      block=block,
      zero=f".{self.zero}"
      if packed_name(name, self.zero) in have or self.zeros
      else None,
      factor=self.factor,
    )

  def check(
    self,
    folder: Folder,
    tensors: Iterable[CheckpointTensor],
    unread: Iterable[str],
  ) -> None:
    del unread
    for tensor in tensors:
      form = tensor.form
      if isinstance(form, Scaled) and form.zero and self.zeros is False:
        name = tensor.pieces[2].name
        symmetric("symmetric", name, folder.raw(name), 0)

  def _block(
    self, shape: tuple[int, ...], stored: tuple[int, ...]
  ) -> tuple[int, int] | None:
    """The block that matches a shape of scales, or None if none does."""
    for rows_columns in self.blocks:
      block = self._whole(rows_columns, stored)
      counts = _counts(block, stored)
      without_columns = (counts[0],) if counts[1] == 1 else None
      if shape in (counts, without_columns) or (
        shape == () and math.prod(counts) == 1
      ):
        return block
    return None

  def _whole(
    self, block: tuple[int | None, int | None], stored: tuple[int, ...]
  ) -> tuple[int, int]:
    return block[0] or stored[0], block[1] or stored[1]


def _counts(block: tuple[int, int], stored: tuple[int, ...]) -> tuple[int, int]:
  """Number of blocks along each axis."""
  return -(-stored[0] // block[0]), -(-stored[1] // block[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class BitsAndBytes(ScaledPacking):
  """LLM.int8()."""

  def check(
    self,
    folder: Folder,
    tensors: Iterable[CheckpointTensor],
    unread: Iterable[str],
  ) -> None:
    del tensors
    names = [n for n in unread if n.endswith(".weight_format")]
    wanted = {
      name: jax.ShapeDtypeStruct(folder.tensors[name].shape, jnp.uint8)
      for name in names
    }
    for name, x in folder.read(wanted).items():
      if jnp.any(x):
        raise error(
          "quantization_config",
          f"{name} of {x}, an order of codes for some GPUs",
          "0, rows",
          "save it again with a newer transformers",
        )


@dataclasses.dataclass(frozen=True)
class PackedScheme:
  """Settings of some layers' codes in a config.

  Attributes:
    bits: Bits of a code, or 0 for floats.
    size: Columns of a group; None for all.
    symmetric: Whether all zeros are the middle code.
    ordered: Whether a group's columns may be in any place.
  """

  bits: int
  size: int | None
  symmetric: bool = True
  ordered: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRowsPacking(Packing):
  """compressed-tensors' pack-quantized, or its plain codes.

  Attributes:
    schemes: Schemes by which codes may be packed.
    plain: Format of codes that are not packed.
  """

  schemes: tuple[PackedScheme, ...]
  plain: ScaledPacking

  def form(self, form: PyTree, name: str, have: Mapping[str, Any]) -> Any:
    if name in have or len(form.stored) != 2:
      return self.plain.form(form, name, have)
    words = have.get(f"{name}_packed")
    if words is None:
      return form
    zeros, order = f"{name}_zero_point" in have, f"{name}_g_idx" in have
    scheme = max(
      self.schemes, key=lambda x: self._likeness(x, form, name, have)
    )
    n = form.stored[1]
    size = scheme.size or n
    return PackedRows(
      form=form,
      bits=scheme.bits,
      groups=-(-n // size),
      size=size,
      zeros=zeros or not scheme.symmetric,
      order=order or scheme.ordered,
    )

  def _likeness(
    self,
    scheme: PackedScheme,
    form: PyTree,
    name: str,
    have: Mapping[str, Any],
  ) -> tuple[bool, ...]:
    """Facts of a scheme that the tensors of a weight match; the most wins.

    If none matches, the first scheme counts, whose shapes the file then lacks.
    """
    n, scales = form.stored[1], have.get(f"{name}_scale")
    groups = -(-n // (scheme.size or n))
    return (
      have[f"{name}_packed"].shape[1:] == (-(-n // (32 // scheme.bits)),),
      scales is not None and scales.shape[1:] == (groups,),
      (f"{name}_zero_point" in have) == (not scheme.symmetric),
      (f"{name}_g_idx" in have) == scheme.ordered,
    )

  def check(
    self,
    folder: Folder,
    tensors: Iterable[CheckpointTensor],
    unread: Iterable[str],
  ) -> None:
    tensors = list(tensors)
    self.plain.check(folder, tensors, unread)
    shapes = {n for n in unread if n.endswith(".weight_shape")}
    for tensor in tensors:
      form = tensor.form
      if not isinstance(form, PackedRows):
        continue
      names = [piece.name for piece in tensor.pieces]
      shape = names[0].removesuffix("packed") + "shape"
      if shape in shapes and folder.raw(shape).tolist() != list(form.stored):
        raise error(shape, folder.raw(shape).tolist(), f"{list(form.stored)}")
      matching = [s for s in self.schemes if (s.bits, s.size or form.stored[1])
              == (form.bits, form.size)]  # fmt: skip
      if form.zeros and all(s.symmetric for s in matching):
        rows = form.stored[0]
        codes = stored_codes(folder.raw(names[2]).T, form.bits, rows)
        symmetric("symmetric", names[2], codes, 2 ** (form.bits - 1))
      if form.order:
        any_order = any(s.ordered for s in matching)
        group_order("actorder", names[-1], folder, form, any_order)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptqPacking(Packing):
  """GPTQ.

  Attributes:
    bits: Bits of a code.
    size: Inputs of a group; None for all.
    less: Offset by which zeros are too small on disk.
    symmetric: Whether the config says that all zeros are the middle code.
    ordered: Whether the config says that a group's inputs may be in any
      place; None: it does not say.
  """

  bits: int
  size: int | None
  less: int
  symmetric: bool
  ordered: bool | None

  def check(
    self,
    folder: Folder,
    tensors: Iterable[CheckpointTensor],
    unread: Iterable[str],
  ) -> None:
    for tensor in tensors:
      form = tensor.form
      if not isinstance(form, Gptq):
        continue
      names = [piece.name for piece in tensor.pieces]
      if self.symmetric:
        zeros = stored_codes(folder.raw(names[1]), form.bits, form.stored[0])
        zeros = (zeros + form.less) % 2**form.bits
        symmetric("sym", names[1], zeros, 2 ** (form.bits - 1))
      if form.order:
        group_order("desc_act", names[3], folder, form, self.ordered)
    # Some writers give every layer a bias, which is zero where it had none.
    for name in (n for n in unread if n.endswith(".bias")):
      like = jax.ShapeDtypeStruct(folder.tensors[name].shape, jnp.float32)
      (bias,) = folder.read({name: like}).values()
      if jnp.any(bias):
        raise error(
          "quantization_config",
          f"{name}, which is not zero, of a layer without a bias",
          "biases of the layers that have one",
          _PLAIN,
        )

  def form(self, form: PyTree, name: str, have: Mapping[str, Any]) -> Any:
    if not _coded(form, name, have):
      return form
    n = form.stored[1]
    size = self.size or n
    return Gptq(
      form=form,
      bits=self.bits,
      groups=-(-n // size),
      size=size,
      order=packed_name(name, "g_idx") in have or bool(self.ordered),
      less=self.less,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AwqPacking(Packing):
  """AWQ.

  Attributes:
    size: Inputs of a group; None for all.
    zeros: Whether zeros are stored.
    symmetric: Whether the config says that all zeros are the middle code.
  """

  size: int | None
  zeros: bool
  symmetric: bool

  def check(
    self,
    folder: Folder,
    tensors: Iterable[CheckpointTensor],
    unread: Iterable[str],
  ) -> None:
    del unread
    for tensor in tensors:
      form = tensor.form
      if isinstance(form, Awq) and form.zeros and self.symmetric:
        name = tensor.pieces[2].name
        # The order differs from that of the outputs; for equal zeros it is the
        # same.
        symmetric(
          "sym", name, stored_codes(folder.raw(name), 4, form.stored[0]), 8
        )

  def form(self, form: PyTree, name: str, have: Mapping[str, Any]) -> Any:
    if not _coded(form, name, have):
      return form
    n = form.stored[1]
    size = self.size or n
    return Awq(form=form, groups=-(-n // size), size=size, zeros=self.zeros)


def stored_codes(
  words: Int[np.ndarray, "A W"], bits: int, count: int
) -> Int[np.ndarray, "A n"]:
  """Unpacks rows of 32-bit words into codes, lowest bits first.

  Args:
    words: Packed codes, int32 [A, W].
    bits: Bits of a code, a divisor of 32.
    count: Number of codes in a row, n.
  """
  words = np.ascontiguousarray(words).view(np.uint32)[..., None]
  codes = (words >> np.arange(0, 32, bits, dtype=np.uint32)) & (2**bits - 1)
  return codes.reshape(len(words), -1)[:, :count].astype(np.int32)


def symmetric(
  key: str, name: str, zeros: Int[np.ndarray, ...], middle: int
) -> None:
  """Refuses zeros that are not all the middle code.

  Args:
    key: Key of the config that says that zeros are symmetric.
    name: Name of the tensor of zeros.
    zeros: Unpacked zeros.
    middle: Expected value of each.

  Raises:
    ConfigError: If a zero differs from `middle`.
  """
  others = zeros[zeros != middle]
  if not others.size:
    return
  remedy = f"set {key} to false if the zeros are right"
  if key == "sym" and np.all(np.abs(zeros - middle) == 1):
    remedy = "set checkpoint_format to the other one of gptq and gptq_v2"
  raise error(
    f"quantization_config.{key}",
    f"true beside a zero of {others.flat[0]} in {name}"[-78:],
    f"zeros of {middle} alone",
    remedy,
  )


def group_order(
  key: str,
  name: str,
  folder: Folder,
  form: Gptq | PackedRows,
  said: bool | None,
) -> None:
  """Refuses groups of inputs that contradict their number or the config.

  Args:
    key: Key of the config that says whether inputs may be in any order.
    name: Name of the tensor with the group of each input.
    folder: Folder that holds the tensor.
    form: Packed form of the weight.
    said: Value of `key` in the config; None: it does not say.

  Raises:
    ConfigError: If the groups contradict one of them.
  """
  groups, n = folder.raw(name), form.stored[1]
  usual = np.arange(n) // form.size
  if not np.array_equal(np.sort(groups), usual):
    fault = f"{name}, with groups from {groups.min()} to {groups.max()}"
    want = f"{form.groups} groups of {form.size} inputs, as group_size says"
    raise error("quantization_config.group_size", fault, want, _PLAIN)
  if said is False and not np.array_equal(groups, usual):
    raise error(
      f"quantization_config.{key}",
      f"inputs in another order in {name}",
      "inputs of a group next to each other, as it says",
      f"say in {key} that inputs are in any order",
    )


def _coded(form: PyTree, name: str, have: Mapping[str, Any]) -> bool:
  codes = packed_name(name, "qweight") in have
  return codes and name not in have and len(form.stored) == 2


def packing(config: Mapping[str, Any]) -> Packing | None:
  """Reads the packing of a config's `quantization_config`; None without one.

  Raises:
    ConfigError: If the packing is not supported.
  """
  stated = config.get("quantization_config") or config.get("compression_config")
  if not stated:
    return None
  r = ConfigReader({}).part("quantization_config", stated)
  kind = r.value("quant_method", default=None)
  # The tensors show which of them are packed.
  r.ignore("modules_to_not_convert", "ignored_layers")
  readers = {
    "mxfp4": lambda r: Float4Packing(),
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
  }
  if not isinstance(kind, str) or kind not in readers:
    raise error("quantization_config", stated, _WHAT, _PLAIN)
  result = readers[kind](r)
  r.finish()
  return result


# Scales of activations, and of a cache's keys and values.
_OTHERS = (
  ".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale",
  ".input_zero_point", ".input_global_scale", ".activation_scale",
)  # fmt: skip


def _fp8(r: ConfigReader) -> Packing:
  """DeepSeek's blocks, or one scale per tensor."""
  # Activations are not rounded here.
  one_of(r, "activation_scheme", ("dynamic", "static"), "dynamic")
  r.only("fmt", "e4m3")
  # The tensors show which experts have four bits.
  r.ignore("scale_fmt", "kv_cache_scheme", "dequantize", "expert_dtype")
  block = r.value("weight_block_size", default=None)
  if block is None:
    return ScaledPacking(beside=_OTHERS)
  return Float8Packing(block=_pair(r, "weight_block_size", block))


def _pair(r: ConfigReader, key: str, block: Any) -> tuple[int, int]:
  valid = isinstance(block, list) and len(block) == 2
  if not valid or any(type(n) is not int or not 0 < n < 2**31 for n in block):
    raise r.error(
      key,
      block,
      "the rows and columns of a block",
      "take a checkpoint with scales for blocks",
    )
  return block[0], block[1]


def one_of(
  r: ConfigReader, key: str, wanted: tuple[Any, ...], default: object
) -> Any:
  """Reads a value that must be one of `wanted`.

  Raises:
    ConfigError: If it is another one.
  """
  x = r.value(key, default=default)
  if x not in wanted or type(x) is not type(wanted[wanted.index(x)]):
    raise r.error(key, x, f"one of {', '.join(map(repr, wanted))}", _PLAIN)
  return x


def _fbgemm(r: ConfigReader) -> Packing:
  r.ignore("activation_scale_ub")
  return ScaledPacking(beside=_OTHERS)


def _modelopt(r: ConfigReader) -> Packing:
  one_of(r, "quant_algo", ("FP8",), None)
  r.ignore("producer", "kv_cache_scheme", "kv_cache_quant_algo", "ignore",
           "config_groups", "exclude_modules")  # fmt: skip
  return ScaledPacking(beside=_OTHERS)


def _bitsandbytes(r: ConfigReader) -> Packing:
  for key, wanted, default in (
    ("load_in_8bit", True, False),
    ("load_in_4bit", False, False),
  ):
    x = r.value(key, default=default)
    if x is not wanted:
      expected = "int8 weights (load_in_8bit)"
      raise r.error(key, x, f"{wanted}, {expected}", _PLAIN)
    # Newer writers repeat the key with an underscore.
    r.only(f"_{key}", wanted)
  # Settings of activations and of 4-bit weights, which change nothing here.
  r.ignore(
    "llm_int8_threshold", "llm_int8_skip_modules",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight", "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage", "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
  )  # fmt: skip
  return BitsAndBytes(
    scales=("SCB",),
    factor=1 / 127,
    blocks=((1, None),),
    dtypes=("int8",),
    beside=(".weight_format",),
  )


def _group(r: ConfigReader, default: object = -1) -> int | None:
  size = r.value("group_size", default=default)
  if type(size) is not int or not (size == -1 or 0 < size < 2**31):
    raise r.error("group_size", size, "inputs of a group, or -1 for all")
  return None if size == -1 else size


def _gptq(r: ConfigReader) -> Packing:
  bits = one_of(r, "bits", (4, 8, 2), None)
  # Two names of one field; they must agree where a file has both.
  formats = ("gptq", "gptq_v2")
  stated = one_of(r, "format", (None, *formats), None)
  layout = one_of(r, "checkpoint_format", formats, stated or "gptq")
  if stated not in (None, layout):
    raise r.error("format", stated, f"{layout!r}, as checkpoint_format says")
  for key in ("is_marlin_format", "use_marlin"):
    r.only(key, False)
  one_of(r, "pack_dtype", ("int32",), "int32")
  sym, order = (r.flag(key, default=None) for key in ("sym", "desc_act"))
  # How the codes were made, which changes nothing here.
  r.ignore(
    "static_groups", "true_sequential", "damp_percent",
    "damp_auto_increment", "model_name_or_path", "model_file_base_name",
    "lm_head", "meta", "dataset", "tokenizer", "model_seqlen",
    "block_name_to_quantize", "module_name_preceding_first_block",
    "batch_size", "pad_token_id", "use_cuda_fp16", "use_exllama",
    "max_input_length",
    "exllama_config", "cache_block_outputs", "modules_in_block_to_quantize",
    "disable_exllama", "backend", "quantizer", "hyb_act", "act_group_aware",
    "mse", "rotation", "parallel_packing",
  )  # fmt: skip
  if r.value("dynamic", default=None):
    raise r.error(
      "dynamic", "other bits or groups for some layers", "the same for all",
      _PLAIN,
    )  # fmt: skip
  less = 1 if layout == "gptq" else 0
  return GptqPacking(
    bits=bits,
    size=_group(r),
    less=less,
    symmetric=bool(sym),
    ordered=order,
    codes=("qweight",),
    beside=(".bias",),
  )


def _awq(r: ConfigReader) -> Packing:
  one_of(r, "bits", (4,), r.value("w_bit", default=4))
  r.ignore("w_bit")
  one_of(r, "version", ("gemm", "GEMM"), "gemm")
  r.ignore(
    "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse",
    "exllama_config", "damp_percent",
  )  # fmt: skip
  r.only("desc_act", False)
  sym = r.flag("sym", default=False)
  zeros = one_of(r, "zero_point", (True, False), True)
  size = _group(r, r.value("q_group_size", default=-1))
  return AwqPacking(size=size, zeros=zeros, symmetric=sym, codes=("qweight",))


_FORMATS = (
  "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
  "mixed-precision", "dense",
)  # fmt: skip


def _compressed(r: ConfigReader) -> Packing:
  """compressed-tensors, with one group of layers or several."""
  one_of(r, "format", _FORMATS, "dense")
  one_of(r, "quantization_status", ("compressed", "frozen"), "compressed")
  r.ignore("global_compression_ratio", "ignore", "kv_cache_scheme", "version")
  for key in ("sparsity_config", "transform_config", "moe_sparsity_config"):
    x = r.value(key, default=None)
    if x and x != {"format": "dense"}:
      raise r.error(key, x, "nothing", _PLAIN)
  groups = r.value("config_groups", default=None)
  if not isinstance(groups, dict) or not groups:
    raise r.error("config_groups", groups, "at least one group of layers")
  schemes: list[PackedScheme] = []
  plain: list[PackedScheme] = []
  blocks: list[tuple[int | None, int | None]] = []
  for name, group in groups.items():
    part = r.part("config_groups", groups).part(name, group)
    part.ignore("targets", "input_activations", "output_activations")
    one_of(part, "format", (*_FORMATS, None), None)
    weights = part.part("weights", part.value("weights"))
    scheme, block = _scheme(weights)
    blocks.append(block)
    plain.append(scheme)
    if scheme.bits and block[0] == 1:
      schemes.append(scheme)
    weights.finish()
    part.finish()
  return PackedRowsPacking(
    # Codes with one scale for a whole weight are never packed.
    schemes=tuple(dict.fromkeys(schemes)) or (PackedScheme(8, None),),
    plain=ScaledPacking(
      blocks=tuple(dict.fromkeys(blocks)),
      dtypes=tuple(
        dict.fromkeys("int8" if s.bits else "float8_e4m3fn" for s in plain)
      ),
      zeros=not plain[0].symmetric
      if len({s.symmetric for s in plain}) == 1
      else None,
    ),
    codes=("weight_packed",),
    beside=(".weight_shape", *_OTHERS),
  )


def _scheme(
  r: ConfigReader,
) -> tuple[PackedScheme, tuple[int | None, int | None]]:
  """A scheme, with 0 bits for floats; and the rows and columns of a block."""
  kind = one_of(r, "type", ("int", "float"), "int")
  wanted = (4, 8) if kind == "int" else (8,)
  bits = one_of(r, "num_bits", wanted, 8)
  r.only("dynamic", False)
  orders = (None, "weight", "group", "static", True, False)
  order = one_of(r, "actorder", orders, None)
  symmetric_zeros = r.flag("symmetric", default=True)
  r.ignore("observer", "observer_kwargs", "scale_dtype",
           "zp_dtype")  # fmt: skip
  stated = r.value("group_size", default=None) is not None
  size = _group(r)
  block = r.value("block_structure", default=None)
  # The default of older writers, which follows from the group size.
  default = "tensor" if not stated else "channel" if size is None else "group"
  strategy = one_of(
    r, "strategy", ("tensor", "channel", "group", "block"), default
  )
  scale_block: tuple[int | None, int | None] = (None, None)
  if strategy == "channel":
    scale_block = (1, None)
  elif strategy == "group":
    scale_block = (1, size)
  elif strategy == "block":
    scale_block = _pair(r, "block_structure", block)
  return (
    PackedScheme(
      bits if kind == "int" else 0,
      scale_block[1],
      symmetric_zeros,
      order in ("group", True),
    ),
    scale_block,
  )
