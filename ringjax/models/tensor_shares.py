"""Which part of each tensor a rank of a tensor-parallel group has, and reads.

A rank has some KV heads with their query heads, and some columns of each
feedforward. Its part of a layer is a smaller layer of the same kind, whose
output is a term of the sum over ranks that the whole layer makes:

  attention    o(mix(q, k, v)) = sum over ranks of o_i(mix(q_i, k_i, v_i))
  feedforward  down(act(up x)) = sum over ranks of down_i(act(up_i x))

Guarantees: the parts of all ranks are the model, each number once but for what
all heads share (norms of queries and keys, routers); what a map adds to its sum
(a bias) is in one rank's part. A rank reads its rows and columns alone.
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
from ringjax.nn.attention import Attention
from ringjax.nn.block import Feedforward, Layer
from ringjax.nn.feedforward import Experts, Gated, Plain
from ringjax.nn.linear import Norm

# The parts of a layer that are cut, and the norms around each.
ATTENTION, FEEDFORWARD = "attention", "feedforward"
# What is added to a sum over heads or columns: one rank adds it.
_ADDED = ("o.bias", "down.bias", "down_bias")
# Buffers that XLA takes as they are begin at a multiple of this.
_ALIGNED = 64
# Bytes from which on an allocator may not give memory back.
_LARGE = 1 << 20


def spans(count: int, weights: Sequence[int | float]) -> list[tuple[int, int]]:
  """Cuts `count` things among ranks by their weights: (first, end) of each.

  Each gets the whole number below its share, and those whose shares were cut
  the most one more.

  Raises:
    OptionError: weights that are negative, or all 0.
  """
  for weight in weights:
    number("shares", weight, least=0)
  total = sum(weights)
  if not total > 0:
    raise OptionError(
      "shares", f"{tuple(weights)}", "some above 0", "pass shares=(3, 2, 1)"
    )
  exact = [count * w / total for w in weights]
  found = [math.floor(x) for x in exact]
  order = sorted(
    range(len(exact)), key=lambda r: (found[r] - exact[r], -exact[r], r)
  )
  for rank in order[: count - sum(found)]:
    found[rank] += 1
  ends = np.cumsum([0, *found]).tolist()
  return list(itertools.pairwise(ends))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorPart:
  """Some of a tensor of a folder, or of several that are stacked.

  Attributes:
    names: of the tensors.
    stacked: whether they are stacked along a first axis.
    form: how parameters are stored in what is read of each.
    paths: of the parameters in their module.
    shape: of what is read of each.
    boxes: what is read of each, one behind the other along `axis`.
    axis: see `boxes`.
    dtype: on disk.
    zero: whether zeros take its place: another rank has it.
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
    """What a program has to know of it: form, paths, and whether stacked."""
    return self.form, self.paths, self.stacked


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModulePart:
  """A module of a model as one rank has it.

  Attributes:
    spec: builds the module: an `Attention`, a `Norm`, ...; None where the
      rank has no part in it.
    tensors: its parameters.
  """

  spec: Attention | Feedforward | Norm | HeadSpec | None
  tensors: tuple[TensorPart, ...] = ()

  @property
  def nbytes(self) -> int:
    """Bytes in memory."""
    return sum(x.nbytes for x in self.tensors)

  @property
  def layout(self) -> tuple[Any, ...]:
    """What a program has to know of it."""
    return self.spec, tuple(x.layout for x in self.tensors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSpec:
  """The output of a model: its last norm, and the head or the embedding.

  Attributes:
    config: of the model.
  """

  config: TransformerConfig

  def build(self, rngs: nnx.Rngs, embed: int) -> OutputHead:
    del embed
    return OutputHead(rngs, self.config)


class OutputHead(nnx.Module):
  """The module of `HeadSpec`."""

  def __init__(self, rngs: nnx.Rngs, config: TransformerConfig):
    alone = dataclasses.replace(config, layers=())
    made = Transformer(alone, rngs)
    self.norm = made.norm
    self.embed, self.head = (
      (made.embed, None) if config.tied else (None, made.head)
    )


class ModelShares:
  """What of a model the ranks of a group have, without its numbers.

  Attributes:
    config: of the whole model.
    dtype: of the computation.
    weights: of the ranks.
  """

  def __init__(
    self,
    config: Mapping[str, Any],
    weights: Sequence[int | float],
    *,
    dtype: DTypeLike | None = None,
    folder: Folder | None = None,
  ):
    """Cuts what a config.json describes.

    Args:
      config: as in config.json.
      weights: how much of the model each rank gets, in any unit.
      dtype: of the computation; default: the folder's, or what the config
        says, or float32.
      folder: whose headers say how tensors are stored; None: they are stored in
        `dtype`, and equal layers are taken to have the tensors of the first of
        them.

    Raises:
      ConfigError: a family whose layers cannot be cut so.
      RingjaxError: as `rj.models.load`.
    """
    self.weights = tuple(weights)
    spans(1, self.weights)
    whole_config, source, family = read_source(config)
    self.config = whole_config
    stored: Any = dtype
    if stored is None and folder is not None:
      stored = checkpoint.stored_dtype(folder, source)
    if stored is None:
      said = source.get("dtype") or source.get("torch_dtype")
      stored = "float32" if said is None else said
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
    first = [
      n if folder is not None else layers.index(layer)
      for n, layer in enumerate(layers)
    ]
    # Layers that have tensors of their own, and of each layer which of them.
    self._shown = sorted(set(first))
    self._place = [self._shown.index(n) for n in first]
    shown = dataclasses.replace(
      whole_config, layers=tuple(layers[n] for n in self._shown)
    )
    whole = _shapes(shown, self.dtype)
    self._params = parameters(whole)
    if folder is not None:
      found = contents(folder, family, whole, source).tensors
    else:
      found = tuple(checkpoint_tensors(whole, family.names(shown)))
    packed = [x.name for x in found if isinstance(x.form, Packed)]
    if packed:
      raise ConfigError(
        "quantization_config",
        f"packed weights, {packed[0]} for one",
        "floats, of which some rows or columns are read",
        "convert the folder first: python -m launch.convert",
      )
    self._stored = {x.name: x for x in found}

  def heads(self, layer: int) -> list[tuple[int, int]]:
    """KV heads of each rank in a layer: first and end."""
    spec: Any = self.config.layers[layer].attention
    return spans(spec.kv_heads, self.weights)

  def columns(self, layer: int) -> list[tuple[int, int]]:
    """Columns of the feedforward of each rank in a layer: first and end."""
    spec: Any = self.config.layers[layer].feedforward
    return spans(spec.hidden, self.weights)

  def layers(self, rank: int) -> list[dict[str, ModulePart]]:
    """Of each layer the rank's `ATTENTION` and `FEEDFORWARD`."""
    integer("rank", rank, least=0, most=len(self.weights) - 1)
    whole = self.config.layers
    kinds = {whole[n]: self._cut_layer(n, rank) for n in reversed(self._shown)}
    cut = tuple(kinds[whole[n]] for n in self._shown)
    config = dataclasses.replace(self.config, layers=cut)
    model = _shapes(config, self.dtype)
    tensors = checkpoint_tensors(model, self._family.names(config))
    found: list[dict[str, ModulePart]] = []
    by_layer = _by_layer(tensors)
    for at, layer in enumerate(cut):
      parts: dict[str, ModulePart] = {}
      n = self._shown[at]
      mine = self._mine(n, rank)
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
            by_layer[at][name], f".{name}.", mine, rank == owned[0]
          ),
        )
      found.append(parts)
    return [found[at] for at in self._place]

  def norms(self, layer: int) -> dict[str, ModulePart]:
    """The norms of a layer by their names, `pre_attention` and others."""
    spec = self.config.layers[layer]
    prefix = f"stack.blocks.{self._place[layer]}.0."
    found: dict[str, ModulePart] = {}
    for name, here in (
      ("pre_attention", spec.pre),
      ("post_attention", spec.post),
      ("pre_feedforward", spec.pre and not spec.shared_norm),
      ("post_feedforward", spec.post),
    ):
      if here:
        found[name] = self._module(spec.norm, f"{prefix}{name}.")
    return found

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
    """The layer as a rank has it; what it has no part in stays whole."""
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
      more = {"shared": self._columns(shared, rank)} if shared else {}
      feed = dataclasses.replace(
        feed, hidden=self._columns(feed.hidden, rank), **more
      )
    return dataclasses.replace(layer, attention=mix, feedforward=feed)

  def _columns(self, width: int, rank: int) -> int:
    first, end = spans(width, self.weights)[rank]
    return end - first

  def _module(
    self, spec: Any, prefix: str, cut: str | None = None
  ) -> ModulePart:
    """A module that is not cut, by the prefix of its parameters' paths."""
    own = prefix if cut is None else ""
    tensors = [
      x for x in self._stored.values() if x.targets[0][0].startswith(prefix)
    ]
    made = []
    for tensor in tensors:
      stored = tensor.form.stored
      made.append(
        TensorPart(
          names=(tensor.pieces[0].name,),
          stacked=False,
          form=_plain(tensor),
          paths=tuple(path.removeprefix(own) for path, _ in tensor.targets),
          shape=stored,
          boxes=(tuple(slice(0, n) for n in stored),),
          axis=0,
          dtype=self._dtype(tensor),
        )
      )
    return ModulePart(spec=spec, tensors=tuple(made))

  def _dtype(self, tensor: CheckpointTensor) -> np.dtype:
    if self._headers is None:
      return self.dtype
    found = self._headers.tensors[tensor.pieces[0].name].dtype
    assert isinstance(found, np.dtype)
    return found

  def _parts(
    self,
    tensors: Sequence[CheckpointTensor],
    within: str,
    mine: Callable[[str | None, int], tuple[int, int] | None],
    adds: bool,
  ) -> tuple[TensorPart, ...]:
    """What a rank has of the tensors of a module in a layer."""
    together: dict[tuple[str, ...], list[CheckpointTensor]] = {}
    for tensor in tensors:
      paths = tuple(path for path, _ in tensor.targets)
      together.setdefault(paths, []).append(tensor)
    found = []
    for paths, same in together.items():
      same.sort(key=lambda t: t.targets[0][1])
      first, stored = same[0], self._stored[same[0].name]
      index = len(first.targets[0][1])
      ranges = [_ranges(self._params[p], index, mine) for p in paths]
      axis, boxes = _boxes(stored.form, ranges)
      shape: tuple[int, ...] = first.form.stored
      got = [tuple(b.stop - b.start for b in box) for box in boxes]
      total = sum(x[axis] for x in got)
      assert (*got[0][:axis], total, *got[0][axis + 1 :]) == shape, first.name
      inner = tuple(path.split(within, 1)[1] for path in paths)
      found.append(
        TensorPart(
          names=tuple(self._stored[t.name].pieces[0].name for t in same),
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
    return tuple(found)

  def _mine(
    self, layer: int, rank: int
  ) -> Callable[[str | None, int], tuple[int, int] | None]:
    """What a rank has of an axis, by its name and size; None is all."""
    spec: Any = self.config.layers[layer].attention
    first, end = self.heads(layer)[rank]
    group = spec.heads // spec.kv_heads

    def mine(name: str | None, size: int) -> tuple[int, int] | None:
      if name == "kv_heads":
        return first, end
      if name == "heads":
        return first * group, end * group
      return spans(size, self.weights)[rank] if name == "ffn" else None

    return mine


class SharedModel(ModelShares):
  """A folder's model as the ranks of a group share it.

  Attributes:
    folder: where the tensors are.
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
      path: a folder, as `rj.models.load` reads it.
      weights: how much of the model each rank gets, in any unit.
      dtype: of the computation; default: the folder's.

    Raises:
      ConfigError: a family whose layers cannot be cut so.
      RingjaxError: as `rj.models.load`.
    """
    self.folder = folder = Folder.open(path)
    super().__init__(folder.config, weights, dtype=dtype, folder=folder)
    self._boxes = TensorBoxes(folder)
    self._checked: set[tuple[str, ...]] = set()
    (self._embedding,) = self._module(None, "embed.weight").tensors

  def embedding_rows(self, ids: Sequence[int]) -> np.ndarray:
    """Rows of the embedding, [n, D] in the dtype of the computation.

    They are read from disk: the embedding is never in memory as a whole.
    """
    part = self._embedding
    out = np.empty((len(ids), self.config.embed), part.dtype)
    for row, one in zip(out, ids, strict=True):
      at = (slice(one, one + 1), slice(0, self.config.embed))
      self._boxes.read(part.names[0], row[None], at)
    _check(part, out)
    return out.astype(self.dtype)

  def read(self, part: ModulePart) -> list[np.ndarray]:
    """The arrays of a module's tensors, as they are stored.

    Raises:
      CheckpointFormatError: a file that has changed, or an I/O error.
      CheckpointMismatchError: numbers that are not finite.
    """
    made = []
    self.folder.unchanged([n for t in part.tensors for n in t.names])
    for tensor in part.tensors:
      lead = (len(tensor.names),) if tensor.stacked else ()
      out = _aligned((*lead, *tensor.shape), tensor.dtype)
      if tensor.zero:
        out[...] = 0
      else:
        for name, one in zip(
          tensor.names, out if tensor.stacked else [out], strict=True
        ):
          self._read(name, tensor, one)
        if tensor.names not in self._checked:
          _check(tensor, out)
          self._checked.add(tensor.names)
      made.append(out)
    self.folder.unchanged([n for t in part.tensors for n in t.names])
    return made

  def _read(self, name: str, tensor: TensorPart, out: np.ndarray) -> None:
    if len(tensor.boxes) == 1:
      self._boxes.read(name, out, tensor.boxes[0])
      return
    at = 0
    for box in tensor.boxes:
      size = box[tensor.axis].stop - box[tensor.axis].start
      where = (*(slice(None),) * tensor.axis, slice(at, at + size))
      target = out[where]
      if target.flags.c_contiguous:
        self._boxes.read(name, target, box)
      else:
        part = np.empty(target.shape, target.dtype)
        self._boxes.read(name, part, box)
        target[...] = part
      at += size


def _check_layer(family: str, number: int, layer: Layer) -> None:
  """Refuses a layer that is no sum over heads and columns."""
  mix, feed = layer.attention, layer.feedforward
  fault = None
  if not isinstance(mix, Attention):
    fault = f"is {type(mix).__name__}, not attention with keys of its own heads"
  elif mix.qk_norm is not None and mix.qk_norm_whole:
    fault = "norms queries and keys over all heads together"
  elif mix.qk_norm is not None and mix.qk_norm_per_head:
    fault = "norms each head with a weight of its own"
  elif mix.reads or mix.group is not None:
    fault = "shares its keys with others"
  elif mix.one_map or mix.value_norm is not None:
    fault = "makes its values of its keys, or norms them"
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
  found: dict[int, dict[str, list[CheckpointTensor]]] = {}
  for tensor in tensors:
    where = {_place(path) for path, _ in tensor.targets}
    if where == {None}:
      continue
    assert len(where) == 1, tensor.name
    ((number, name),) = where  # pyrefly: ignore
    if name in (ATTENTION, FEEDFORWARD):
      found.setdefault(number, {}).setdefault(name, []).append(tensor)
  return found


def _plain(tensor: CheckpointTensor) -> Form:
  """The form of a tensor, which is not packed: that was refused."""
  assert not isinstance(tensor.form, Packed)
  return tensor.form


def _place(path: str) -> tuple[int, str] | None:
  """Layer and module of a parameter; None for one of no layer."""
  if not path.startswith("stack.blocks."):
    return None
  _, _, number, _, name, *_ = path.split(".")
  return int(number), name


def _ranges(
  whole: nnx.Variable,
  index: int,
  mine: Callable[[str | None, int], tuple[int, int] | None],
) -> tuple[tuple[int, int] | None, ...]:
  """Of each axis of a parameter's piece in a tensor what a rank has of it.

  Args:
    whole: the parameter.
    index: leading axes that the piece does not have.
    mine: of an axis by its name and size; None is all.
  """
  shape = whole.get_value().shape[index:]
  names = whole.get_metadata()["axes"][index - 1 :]
  return tuple(mine(*axis) for axis in zip(names, shape, strict=True))


def _boxes(
  form: Any, ranges: Sequence[tuple[tuple[int, int] | None, ...]]
) -> tuple[int, list[tuple[slice, ...]]]:
  """Where parts of a form's parameters are in the stored tensor.

  Args:
    form: of the whole tensor.
    ranges: of each parameter, and each of its axes, what is wanted.

  Returns:
    (axis, boxes): the boxes one behind the other along the axis are the
      tensor of the parts.
  """
  every = lambda n: slice(0, n)
  if isinstance(form, FirstRows):
    return _boxes(form.form, ranges)
  if isinstance(form, FusedColumns):
    *lead, columns = ranges[0]
    assert not any(lead)
    first, end = columns or (0, form.shape[-1])
    outer = tuple(map(every, form.stored[:-1]))
    axis, half = len(outer), form.shape[-1]
    if form.interleaved:
      return axis, [(*outer, slice(2 * first, 2 * end))]
    return axis, [
      (*outer, slice(at + first, at + end)) for at in (0, half)
    ]  # fmt: skip
  if isinstance(form, FusedRows):
    rows = [
      _boxes(part, [one])[1][0][0]
      for part, one in zip(form.parts, ranges, strict=True)
    ]
    rest = tuple(map(every, form.stored[1:]))
    return 0, [(one, *rest) for one in _fused(form, rows)]
  (one,) = ranges
  if isinstance(form, Transpose):
    outputs, inputs = one[len(form.inputs) :], one[: len(form.inputs)]
    return 0, [
      (
        _scaled(form.outputs, outputs, form.stored[0]),
        _scaled(form.inputs, inputs, form.stored[1]),
      )
    ]
  assert isinstance(form, Reshape)
  if form.shape == form.stored:
    return 0, [
      tuple(
        every(n) if cut is None else slice(*cut)
        for n, cut in zip(form.shape, one, strict=True)
      )
    ]
  return 0, [(_scaled(form.shape, one, form.stored[0]),)]


def _scaled(
  axes: tuple[int, ...], cuts: Sequence[tuple[int, int] | None], size: int
) -> slice:
  """Of some axes that are one in the file, of which the first may be cut."""
  assert not any(cuts[1:])
  if not cuts or cuts[0] is None:
    return slice(0, size)
  each = size // axes[0]
  return slice(cuts[0][0] * each, cuts[0][1] * each)


def _fused(form: FusedRows, rows: Sequence[slice]) -> list[slice]:
  """Rows of a tensor that holds rows of several parts, in groups."""
  found: list[slice] = []
  at = 0
  for group in range(form.groups):
    for part, wanted in zip(form.parts, rows, strict=True):
      many = part.stored[0] // form.groups
      first = max(wanted.start, group * many) - group * many
      end = min(wanted.stop, (group + 1) * many) - group * many
      if end > first:
        if found and found[-1].stop == at + first:
          found[-1] = slice(found[-1].start, at + end)
        else:
          found.append(slice(at + first, at + end))
      at += many
  return found


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """An empty array that a CPU device takes without a copy.

  A large one is memory of its own, which goes back to the system at once.
  """
  size = math.prod(shape) * dtype.itemsize
  if size >= _LARGE:
    memory: Any = mmap.mmap(-1, size)
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
  """A digest of a folder's config and of its tensors' names, shapes, dtypes."""
  text = repr(
    (
      sorted(folder.config.items()),
      sorted((n, x.shape, str(x.dtype)) for n, x in folder.tensors.items()),
    )
  )
  return digest(text.encode())
