"""Tensor-parallel parts of a model: what each rank stores, and reads.

A rank has some KV heads with their query heads, and some columns of each
feedforward. Its part of a layer is a smaller layer of the same kind, whose
output is a term of the sum over ranks that the whole layer makes:

  attention    o(mix(q, k, v)) = sum over ranks of o_i(mix(q_i, k_i, v_i))
  feedforward  down(act(up x)) = sum over ranks of down_i(act(up_i x))

Guarantees: the parts of all ranks are the model. Each number is in one part,
except what all heads share (norms of queries and keys, routers). The bias of a
sum is in one rank's part. A rank reads its rows and columns only.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Shaped

from ringjax.checks import float_dtype, integer, number
from ringjax.errors import ConfigError, OptionError
from ringjax.models import checkpoint
from ringjax.models.contents import contents, read_source
from ringjax.models.fingerprint import digest
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.layer_reader import StoredPart, check_finite
from ringjax.models.hf.names import (
  FirstRows,
  Form,
  FusedColumns,
  FusedRows,
  Reshape,
  SwappedAxes,
  Transpose,
)
from ringjax.models.hf.packed import Packed
from ringjax.models.hf.tensor_boxes import TensorBoxes
from ringjax.models.hf.tensors import (
  CheckpointTensor,
  checkpoint_tensors,
  parameters,
)
from ringjax.models.transformer import Transformer, TransformerConfig
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.block import Feedforward, Layer
from ringjax.nn.feedforward import Experts, Gated, Plain
from ringjax.nn.linear import Norm

# The sharded parts of a layer, and the norms around each.
ATTENTION, FEEDFORWARD = "attention", "feedforward"
# Biases of a sum over heads or columns, which one rank adds.
_ADDED = ("o.bias", "down.bias", "down_bias")
# XLA uses buffers in place that begin at a multiple of this, in bytes.
_ALIGNED = 64
# Size from which on an allocator may not give memory back, in bytes.
_LARGE = 1 << 20


def spans(count: int, weights: Sequence[int | float]) -> list[tuple[int, int]]:
  """Cuts `count` things among ranks by their weights: (first, end) of each.

  Each rank gets its share rounded down; those with the largest remainders get
  one more.

  Raises:
    OptionError: If a weight is negative, or all are 0.
  """
  for weight in weights:
    number("shares", weight, least=0)
  total = sum(weights)
  if not total > 0:
    raise OptionError(
      "shares", f"{tuple(weights)}", "some above 0", "pass shares=(3, 2, 1)"
    )
  exact = [count * w / total for w in weights]
  counts = [math.floor(x) for x in exact]
  order = sorted(
    range(len(exact)), key=lambda r: (counts[r] - exact[r], -exact[r], r)
  )
  for rank in order[: count - sum(counts)]:
    counts[rank] += 1
  ends = np.cumsum([0, *counts]).tolist()
  return list(itertools.pairwise(ends))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorPart:
  """Part of a stored tensor, or of several that are stacked.

  Attributes:
    names: Names of the tensors.
    stacked: Whether they are stacked along a first axis.
    form: Form of the parameters in the part read of each tensor.
    paths: Paths of the parameters in their module.
    shape: Shape of the part read of each tensor.
    boxes: Boxes that are read of each tensor, concatenated along `axis`.
    axis: Axis along which the boxes are concatenated.
    dtype: Dtype on disk.
    zero: Whether zeros take its place, since another rank adds it.
  """

  names: tuple[str, ...]
  stacked: bool
  form: Form
  paths: tuple[str, ...]
  shape: tuple[int, ...]
  boxes: tuple[tuple[slice, ...], ...]
  axis: int
  dtype: np.dtype
  zero: bool = False

  @property
  def nbytes(self) -> int:
    """Bytes in memory."""
    return len(self.names) * math.prod(self.shape) * self.dtype.itemsize

  @property
  def layout(self) -> tuple[Any, ...]:
    """Static facts for a compiled program: form, paths, whether stacked."""
    return self.form, self.paths, self.stacked


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModulePart:
  """Part of a module that one rank has.

  Attributes:
    spec: Spec that builds the module: an `Attention`, a `Norm`, ...; None if
      the rank has no part in it.
    tensors: Parameters of the module.
  """

  spec: Attention | Feedforward | Norm | HeadSpec | None
  tensors: tuple[TensorPart, ...] = ()

  @property
  def nbytes(self) -> int:
    """Bytes in memory."""
    return sum(x.nbytes for x in self.tensors)

  @property
  def layout(self) -> tuple[Any, ...]:
    """Static facts for a compiled program: the spec, its tensors' layouts."""
    return self.spec, tuple(x.layout for x in self.tensors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSpec:
  """Output of a model: its last norm, and the head or the embedding.

  Attributes:
    config: Config of the model.
  """

  config: TransformerConfig

  def build(self, rngs: nnx.Rngs, embed: int) -> OutputHead:
    del embed
    return OutputHead(rngs, self.config)


class OutputHead(nnx.Module):
  """The module of `HeadSpec`."""

  def __init__(self, rngs: nnx.Rngs, config: TransformerConfig):
    alone = dataclasses.replace(config, layers=())
    outer = Transformer(alone, rngs)
    self.norm = outer.norm
    self.embed, self.head = (
      (outer.embed, None) if config.tied else (None, outer.head)
    )


class ModelShares:
  """Parts of a model that the ranks of a group have, without the weights.

  Attributes:
    config: Config of the whole model.
    dtype: Dtype of the computation.
    weights: Share of the model per rank, in any unit.
  """

  def __init__(
    self,
    config: Mapping[str, Any],
    weights: Sequence[int | float],
    *,
    dtype: DTypeLike | None = None,
    folder: Folder | None = None,
  ):
    """Cuts the model that a config.json describes.

    Args:
      config: Content of config.json.
      weights: Share of the model per rank, in any unit.
      dtype: Dtype of the computation; default: the folder's, or what the
        config says, or float32.
      folder: Folder whose headers say how tensors are stored; None: they are
        stored in `dtype`, and equal layers are taken to have the tensors of the
        first of them.

    Raises:
      ConfigError: If a layer of the family cannot be cut so.
      RingjaxError: See `rj.models.load`.
    """
    self.weights = tuple(weights)
    spans(1, self.weights)
    whole_config, source, family = read_source(config)
    self.config = whole_config
    stored = dtype
    if stored is None and folder is not None:
      stored = checkpoint.stored_dtype(folder, source)
    if stored is None:
      stated = source.get("dtype") or source.get("torch_dtype")
      stored = "float32" if stated is None else stated
    self.dtype = float_dtype("dtype", stored)
    if whole_config.positions is not None:
      raise ConfigError(
        "model",
        f"{whole_config.family}, whose embeddings know their positions",
        "embeddings of tokens alone",
        "load it with memory= or placement= (docs/how/offload.md)",
      )
    for n, layer in enumerate(whole_config.layers):
      _check_layer(whole_config.family, n, layer)
    self._family, self._headers = family, folder
    layers = whole_config.layers
    representatives = [
      n if folder is not None else layers.index(layer)
      for n, layer in enumerate(layers)
    ]
    # Layers with separate tensors, and the index of the one each layer uses.
    self._shown = sorted(set(representatives))
    self._place = [self._shown.index(n) for n in representatives]
    shown = dataclasses.replace(
      whole_config, layers=tuple(layers[n] for n in self._shown)
    )
    model = _shapes(shown, self.dtype)
    self._params = parameters(model)
    if folder is not None:
      tensors = contents(folder, family, model, source).tensors
    else:
      tensors = tuple(checkpoint_tensors(model, family.tensor_names(shown)))
    packed = [x.name for x in tensors if isinstance(x.form, Packed)]
    if packed:
      raise ConfigError(
        "quantization_config",
        f"packed weights, {packed[0]} for one",
        "floats, of which some rows or columns are read",
        "convert the folder first: python -m ringjax.launch.convert",
      )
    self._stored = {x.name: x for x in tensors}

  def heads(self, layer: int) -> list[tuple[int, int]]:
    """Ranges of KV heads per rank in a layer: (first, end)."""
    spec: Any = self.config.layers[layer].attention
    return spans(spec.kv_heads, self.weights)

  def columns(self, layer: int) -> list[tuple[int, int]]:
    """Ranges of feedforward columns per rank in a layer: (first, end)."""
    spec: Any = self.config.layers[layer].feedforward
    return spans(spec.hidden, self.weights)

  def layers(self, rank: int) -> list[dict[str, ModulePart]]:
    """Parts of a rank in each layer: its `ATTENTION` and `FEEDFORWARD`."""
    integer("rank", rank, least=0, most=len(self.weights) - 1)
    layers = self.config.layers
    kinds = {layers[n]: self._cut_layer(n, rank) for n in reversed(self._shown)}
    cut = tuple(kinds[layers[n]] for n in self._shown)
    config = dataclasses.replace(self.config, layers=cut)
    model = _shapes(config, self.dtype)
    tensors = checkpoint_tensors(model, self._family.tensor_names(config))
    shown_parts: list[dict[str, ModulePart]] = []
    tensors_by_layer = _by_layer(tensors)
    for at, layer in enumerate(cut):
      parts: dict[str, ModulePart] = {}
      n = self._shown[at]
      axis_range = self._axis_ranges(n, rank)
      for name, owners in (
        (ATTENTION, self.heads(n)),
        (FEEDFORWARD, self.columns(n)),
      ):
        owned = [r for r, (first, end) in enumerate(owners) if end > first]
        if rank not in owned:
          parts[name] = ModulePart(spec=None)
          continue
        parts[name] = ModulePart(
          spec=getattr(layer, name),
          tensors=self._parts(
            tensors_by_layer[at][name],
            f".{name}.",
            axis_range,
            rank == owned[0],
          ),
        )
      shown_parts.append(parts)
    return [shown_parts[at] for at in self._place]

  def norms(self, layer: int) -> dict[str, ModulePart]:
    """Norms of a layer by their names, `pre_attention` and others."""
    spec = self.config.layers[layer]
    prefix = f"stack.blocks.{self._place[layer]}.0."
    norms: dict[str, ModulePart] = {}
    for name, present in (
      ("pre_attention", spec.pre),
      ("post_attention", spec.post),
      ("pre_feedforward", spec.pre and not spec.shared_norm),
      ("post_feedforward", spec.post),
    ):
      if present:
        norms[name] = self._module(spec.norm, f"{prefix}{name}.")
    return norms

  def head(self) -> ModulePart:
    """The last norm and the head, or the embedding in its place."""
    prefixes = ("norm.", "embed." if self.config.tied else "head.")
    parts = [self._module(None, prefix, prefix) for prefix in prefixes]
    return ModulePart(
      spec=HeadSpec(config=dataclasses.replace(self.config, layers=())),
      tensors=tuple(x for part in parts for x in part.tensors),
    )

  def embed_norm(self) -> ModulePart | None:
    """The norm of the embeddings, or None."""
    norm = self.config.embed_norm
    return None if norm is None else self._module(norm, "embed.norm.")

  def _cut_layer(self, number: int, rank: int) -> Layer:
    """A layer as a rank has it; a part that it has no share in stays whole."""
    layer = self.config.layers[number]
    mix: Any = layer.attention
    first, end = self.heads(number)[rank]
    if end > first:
      group = mix.heads // mix.kv_heads
      slopes = mix.alibi
      mix = dataclasses.replace(
        mix,
        heads=(end - first) * group,
        kv_heads=end - first,
        alibi=None if slopes is None else slopes[first * group : end * group],
      )
    feed: Any = layer.feedforward
    if self._columns(feed.hidden, rank):
      shared = getattr(feed, "shared", 0)
      changes = {"shared": self._columns(shared, rank)} if shared else {}
      feed = dataclasses.replace(
        feed, hidden=self._columns(feed.hidden, rank), **changes
      )
    return dataclasses.replace(layer, attention=mix, feedforward=feed)

  def _columns(self, width: int, rank: int) -> int:
    first, end = spans(width, self.weights)[rank]
    return end - first

  def _module(
    self, spec: Any, prefix: str, cut: str | None = None
  ) -> ModulePart:
    """A module that is not cut, by the prefix of its parameters' paths."""
    dropped = prefix if cut is None else ""
    tensors = [
      x for x in self._stored.values() if x.targets[0][0].startswith(prefix)
    ]
    parts = []
    for tensor in tensors:
      stored = tensor.form.stored
      parts.append(
        TensorPart(
          names=(tensor.pieces[0].name,),
          stacked=False,
          form=_plain(tensor),
          paths=tuple(path.removeprefix(dropped) for path, _ in tensor.targets),
          shape=stored,
          boxes=(tuple(slice(0, n) for n in stored),),
          axis=0,
          dtype=self._dtype(tensor),
        )
      )
    return ModulePart(spec=spec, tensors=tuple(parts))

  def _dtype(self, tensor: CheckpointTensor) -> np.dtype:
    if self._headers is None:
      return self.dtype
    dtype = self._headers.tensors[tensor.pieces[0].name].dtype
    assert isinstance(dtype, np.dtype)
    return dtype

  def _parts(
    self,
    tensors: Sequence[CheckpointTensor],
    within: str,
    axis_range: Callable[[str | None, int], tuple[int, int] | None],
    adds: bool,
  ) -> tuple[TensorPart, ...]:
    """Parts of a module's tensors that a rank has, in one layer."""
    by_paths: dict[tuple[str, ...], list[CheckpointTensor]] = {}
    for tensor in tensors:
      paths = tuple(path for path, _ in tensor.targets)
      by_paths.setdefault(paths, []).append(tensor)
    parts = []
    for paths, stacked_tensors in by_paths.items():
      stacked_tensors.sort(key=lambda t: t.targets[0][1])
      first, stored = stacked_tensors[0], self._stored[stacked_tensors[0].name]
      index = len(first.targets[0][1])
      ranges = [_ranges(self._params[p], index, axis_range) for p in paths]
      axis, boxes = _boxes(stored.form, ranges)
      shape: tuple[int, ...] = first.form.stored
      box_shapes = [tuple(b.stop - b.start for b in box) for box in boxes]
      read_shape = list(box_shapes[0])
      for box_shape in box_shapes[1:]:
        read_shape[axis] += box_shape[axis]
      assert tuple(read_shape) == shape, first.name
      inner = tuple(path.split(within, 1)[1] for path in paths)
      parts.append(
        TensorPart(
          names=tuple(
            self._stored[t.name].pieces[0].name for t in stacked_tensors
          ),
          stacked=index > 1,
          form=_plain(first),
          paths=inner,
          shape=shape,
          boxes=tuple(boxes),
          axis=axis,
          dtype=self._dtype(stored),
          zero=not adds and inner[0] in _ADDED,
        )
      )
    return tuple(parts)

  def _axis_ranges(
    self, layer: int, rank: int
  ) -> Callable[[str | None, int], tuple[int, int] | None]:
    """Function from an axis' name and size to the rank's range; None is all."""
    spec: Any = self.config.layers[layer].attention
    first, end = self.heads(layer)[rank]
    group = spec.heads // spec.kv_heads

    def axis_range(name: str | None, size: int) -> tuple[int, int] | None:
      if name == "kv_heads":
        return first, end
      if name == "heads":
        return first * group, end * group
      return spans(size, self.weights)[rank] if name == "ffn" else None

    return axis_range


class SharedModel(ModelShares):
  """Model of a folder, as the ranks of a group share it.

  Attributes:
    folder: Folder that the tensors are read from.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    weights: Sequence[int | float],
    *,
    dtype: DTypeLike | None = None,
  ):
    """Reads config.json and headers, and no weights.

    Args:
      path: Folder, as `rj.models.load` reads it.
      weights: Share of the model per rank, in any unit.
      dtype: Dtype of the computation; default: the folder's.

    Raises:
      ConfigError: If a layer of the family cannot be cut so.
      RingjaxError: See `rj.models.load`.
    """
    self.folder = folder = Folder.open(path)
    super().__init__(folder.config, weights, dtype=dtype, folder=folder)
    self._boxes = TensorBoxes(folder)
    self._checked: set[tuple[str, ...]] = set()
    (self._embedding,) = self._module(None, "embed.weight").tensors

  def embedding_rows(self, ids: Sequence[int]) -> Shaped[np.ndarray, "_ D"]:
    """Reads rows of the embedding, [n, D] in the dtype of the computation.

    The embedding is never in memory as a whole.
    """
    part = self._embedding
    out = np.empty((len(ids), self.config.embed), part.dtype)
    for row, token in zip(out, ids, strict=True):
      at = (slice(token, token + 1), slice(0, self.config.embed))
      self._boxes.read(part.names[0], row[None], at)
    _check(part, out)
    return out.astype(self.dtype)

  def read(self, part: ModulePart) -> list[Shaped[np.ndarray, " ..."]]:
    """Reads the arrays of a module's tensors, as they are stored.

    Raises:
      CheckpointFormatError: If a file has changed or cannot be read.
      CheckpointMismatchError: If numbers are not finite.
    """
    arrays = []
    self.folder.unchanged([n for t in part.tensors for n in t.names])
    for tensor in part.tensors:
      lead = (len(tensor.names),) if tensor.stacked else ()
      out = _aligned((*lead, *tensor.shape), tensor.dtype)
      if tensor.zero:
        out[...] = 0
      else:
        for name, array in zip(
          tensor.names, out if tensor.stacked else [out], strict=True
        ):
          self._read(name, tensor, array)
        if tensor.names not in self._checked:
          _check(tensor, out)
          self._checked.add(tensor.names)
      arrays.append(out)
    self.folder.unchanged([n for t in part.tensors for n in t.names])
    return arrays

  def _read(self, name: str, tensor: TensorPart, out: np.ndarray) -> None:
    if len(tensor.boxes) == 1:
      self._boxes.read(name, out, tensor.boxes[0])
      return
    at = 0
    for box in tensor.boxes:
      size = box[tensor.axis].stop - box[tensor.axis].start
      window = (*(slice(None),) * tensor.axis, slice(at, at + size))
      target = out[window]
      if target.flags.c_contiguous:
        self._boxes.read(name, target, box)
      else:
        part = np.empty(target.shape, target.dtype)
        self._boxes.read(name, part, box)
        target[...] = part
      at += size


def _check_layer(family: str, number: int, layer: Layer) -> None:
  """Refuses a layer that is not a sum over heads and columns."""
  mix, feed = layer.attention, layer.feedforward
  fault = None
  if type(mix) is not Attention:
    fault = f"is {type(mix).__name__}, not attention with keys of its own heads"
  elif mix.qk_norm is not None and mix.qk_norm_whole:
    fault = "norms queries and keys over all heads together"
  elif mix.qk_norm is not None and mix.qk_norm_per_head:
    fault = "norms each head with a weight of its own"
  elif mix.reads or mix.group is not None:
    fault = "shares its keys with others"
  elif mix.one_map or mix.value_norm is not None:
    fault = "makes its values of its keys, or norms them"
  elif layer.output_scale is None:
    fault = "has residuals that are no plain sums"
  elif layer.post_norms is not None:
    fault = "has norms of several kinds"
  elif layer.inputs is not None or layer.learned_scale:
    fault = "reads tokens' ids, or scales its output"
  elif getattr(feed, "sparsity", 0):
    fault = "shuts gates by what all of them are"
  elif layer.cross is not None:
    fault = "reads an encoder's states"
  elif isinstance(feed, Experts) and (feed.latent or not feed.gated):
    fault = "has experts that read latents, or have no gate"
  elif not isinstance(feed, Plain | Gated | Experts):
    fault = f"has a feedforward of {type(feed).__name__}"
  if fault is not None:
    raise ConfigError(
      "model",
      f"{family}, whose layer {number} {fault}",
      "layers that are sums over heads and over columns",
      "load it with memory= or placement= (docs/how/offload.md)",
    )


def _shapes(config: TransformerConfig, dtype: DTypeLike) -> Transformer:
  """A model of shapes, whose layers are not stacked with each other."""

  def build() -> Transformer:
    return checkpoint.cast(Transformer(config, nnx.Rngs(0), scan=False), dtype)

  return jax.eval_shape(build)


def _by_layer(
  tensors: Sequence[CheckpointTensor],
) -> dict[int, dict[str, list[CheckpointTensor]]]:
  """The tensors of each layer's attention and feedforward."""
  by_layer: dict[int, dict[str, list[CheckpointTensor]]] = {}
  for tensor in tensors:
    places = {_place(path) for path, _ in tensor.targets}
    if places == {None}:
      continue
    assert len(places) == 1, tensor.name
    ((number, name),) = places  # pyrefly: ignore
    if name in (ATTENTION, FEEDFORWARD):
      by_layer.setdefault(number, {}).setdefault(name, []).append(tensor)
  return by_layer


def _plain(tensor: CheckpointTensor) -> Form:
  """Form of a tensor; packed ones were refused before."""
  assert not isinstance(tensor.form, Packed)
  return tensor.form


def _place(path: str) -> tuple[int, str] | None:
  """Layer and module of a parameter; None for one outside of layers."""
  if not path.startswith("stack.blocks."):
    return None
  _, _, number, _, name, *_ = path.split(".")
  return int(number), name


def _ranges(
  whole: nnx.Variable,
  index: int,
  axis_range: Callable[[str | None, int], tuple[int, int] | None],
) -> tuple[tuple[int, int] | None, ...]:
  """Range of each axis of a parameter's piece that a rank has.

  Args:
    whole: Parameter of the whole model.
    index: Number of leading axes that the piece does not have.
    axis_range: Function from an axis' name and size to its range; None is all.
  """
  shape = whole.get_value().shape[index:]
  names = whole.get_metadata()["axes"][index - 1 :]
  return tuple(axis_range(*axis) for axis in zip(names, shape, strict=True))


def _boxes(
  form: Any, ranges: Sequence[tuple[tuple[int, int] | None, ...]]
) -> tuple[int, list[tuple[slice, ...]]]:
  """Boxes of a stored tensor that hold parts of its parameters.

  Args:
    form: Form of the whole tensor.
    ranges: Wanted range of each axis of each parameter; None is all.

  Returns:
    (axis, boxes): concatenated along the axis, the boxes are the tensor of
      the parts.
  """
  all_of = lambda n: slice(0, n)
  if isinstance(form, FirstRows):
    return _boxes(form.form, ranges)
  if isinstance(form, SwappedAxes):
    axis, boxes = _boxes(form.form, ranges)
    last = len(form.stored) - 1
    axis = {last: last - 1, last - 1: last}.get(axis, axis)
    return axis, [(*box[:-2], box[-1], box[-2]) for box in boxes]
  if isinstance(form, FusedColumns):
    *lead, columns = ranges[0]
    assert not any(lead)
    first, end = columns or (0, form.shape[-1])
    outer = tuple(map(all_of, form.stored[:-1]))
    axis, half = len(outer), form.shape[-1]
    if form.interleaved:
      return axis, [(*outer, slice(2 * first, 2 * end))]
    return axis, [
      (*outer, slice(at + first, at + end)) for at in (0, half)
    ]  # fmt: skip
  if isinstance(form, FusedRows):
    rows = [
      _boxes(part, [cuts])[1][0][0]
      for part, cuts in zip(form.parts, ranges, strict=True)
    ]
    inner = tuple(map(all_of, form.stored[1:]))
    return 0, [(rows_slice, *inner) for rows_slice in _fused(form, rows)]
  (cuts,) = ranges
  if isinstance(form, Transpose):
    outputs, inputs = cuts[len(form.inputs) :], cuts[: len(form.inputs)]
    return 0, [
      (
        _scaled(form.outputs, outputs, form.stored[0]),
        _scaled(form.inputs, inputs, form.stored[1]),
      )
    ]
  assert isinstance(form, Reshape)
  if not any(cuts):
    return 0, [tuple(map(all_of, form.stored))]
  if form.shape == form.stored:
    return 0, [
      tuple(
        all_of(n) if cut is None else slice(*cut)
        for n, cut in zip(form.shape, cuts, strict=True)
      )
    ]
  return 0, [(_scaled(form.shape, cuts, form.stored[0]),)]


def _scaled(
  axes: tuple[int, ...], cuts: Sequence[tuple[int, int] | None], size: int
) -> slice:
  """Slice of a stored axis that joins several, the first of which is cut."""
  assert not any(cuts[1:])
  if not cuts or cuts[0] is None:
    return slice(0, size)
  width = size // axes[0]
  return slice(cuts[0][0] * width, cuts[0][1] * width)


def _fused(form: FusedRows, rows: Sequence[slice]) -> list[slice]:
  """Slices of a tensor that holds rows of several parts, in groups."""
  slices: list[slice] = []
  at = 0
  for group in range(form.groups):
    for part, wanted in zip(form.parts, rows, strict=True):
      size = part.stored[0] // form.groups
      first = max(wanted.start, group * size) - group * size
      end = min(wanted.stop, (group + 1) * size) - group * size
      if end > first:
        if slices and slices[-1].stop == at + first:
          slices[-1] = slice(slices[-1].start, at + end)
        else:
          slices.append(slice(at + first, at + end))
      at += size
  return slices


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """An empty array that a CPU device takes without a copy.

  A large one is a memory map, which goes back to the system when it is freed.
  """
  size = math.prod(shape) * dtype.itemsize
  if size >= _LARGE:
    memory = mmap.mmap(-1, size)
    return np.frombuffer(memory, dtype).reshape(shape)
  room = np.empty(size + _ALIGNED, np.uint8)
  first = -room.ctypes.data % _ALIGNED
  return room[first : first + size].view(dtype).reshape(shape)


def _check(part: TensorPart, x: np.ndarray) -> None:
  check_finite(
    StoredPart(
      names=part.names, stacked=part.stacked, shape=part.shape, dtype=part.dtype
    ),
    x,
  )


def digest_of(folder: Folder) -> str:
  """Digest of a folder's config and of its tensors' names, shapes, dtypes."""
  text = repr(
    (
      sorted(folder.config.items()),
      sorted((n, x.shape, str(x.dtype)) for n, x in folder.tensors.items()),
    )
  )
  return digest(text.encode())
