"""CEPE: an encoder of context chunks, which a decoder reads by cross-attention.

Guarantees: without a context the model is its decoder, bit for bit; the order
of chunks and padding change nothing. A saved folder is the decoder's Hugging
Face folder with two more files, and is loaded bit for bit.
Cost: chunks of C tokens are read separately, so k of them cost k C^2 pairs and
not (k C)^2. The decoder keeps E numbers for a token of the context, in place of
the 2 L K H of keys and values.
Ref: Yen et al. 2024, arXiv 2402.16617.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from ringjax.checks import integer, local_path, number, one_of, positive_int
from ringjax.errors import (
  CheckpointFormatError,
  CheckpointMismatchError,
  InputTypeError,
  OptionError,
  PromptError,
)
from ringjax.json_text import json_text
from ringjax.kv.base import NoCache
from ringjax.kv.encoder_states import EncoderStates, StatesAlone
from ringjax.models.grouping import looped, regrouped
from ringjax.models.heads.added_layer import refuse_predicting
from ringjax.models.hf.tensors import parameters
from ringjax.models.parameter_arrays import (
  arrays_of,
  filled,
  on_host,
  tensors_digest,
)
from ringjax.models.transformer import (
  Transformer,
  TransformerConfig,
  tokens_of,
)
from ringjax.models.weights.calibration import (
  model_digest,
  read_tensors,
  write_tensors,
)
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.attention_layers.cross_attention import CrossAttention
from ringjax.nn.block import Layer
from ringjax.nn.feedforward import Gated
from ringjax.nn.linear import Norm
from ringjax.nn.param import Rules
from ringjax.nn.sharding_context import ContextParallel, ShardingContext
from ringjax.ops.mask import Everything
from ringjax.ops.rope import Rope
from ringjax.parallel.call_sharding import sequence_axis
from ringjax.parallel.mesh import entering
from ringjax.parallel.programs import bounded
from ringjax.paths import as_path
from ringjax.typing import ArrayLeaf

INITS = ("copy", "zero")
# Files in a folder, next to the decoder's.
CONFIG, TENSORS = "cepe.json", "cepe.safetensors"
_REMEDY = "save the model again with rj.models.save"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
  """A bidirectional encoder of chunks.

  Attributes:
    layers: Number of layers.
    width: E, numbers of a state.
    heads: Attention heads; they divide the width.
    hidden: Width of the feedforward.
    chunk: C, tokens of the longest chunk.
    theta: Base of its rotary embedding.
    eps: Epsilon of its norms.
  """

  layers: int = 3
  width: int = 128
  heads: int = 4
  hidden: int = 384
  chunk: int = 256
  theta: float = 10_000.0
  eps: float = 1e-6

  def __post_init__(self) -> None:
    for name in ("layers", "width", "heads", "hidden", "chunk"):
      positive_int(name, getattr(self, name))
    for name in ("theta", "eps"):
      number(name, getattr(self, name), above=0)
    if self.width % (2 * self.heads):
      raise OptionError(
        "heads",
        f"{self.heads} for a width of {self.width}",
        "heads of an even number of features, that divide the width",
        "pass heads=4, width=128, for instance",
      )

  def config(self, vocab: int) -> TransformerConfig:
    """Architecture of the encoder, for a vocabulary size."""
    norm = Norm(eps=self.eps)
    layer = Layer(
      attention=Attention(
        heads=self.heads,
        kv_heads=self.heads,
        head_dim=self.width // self.heads,
        mask=Everything(),
        rope=Rope(theta=self.theta, dims=self.width // self.heads),
        bias=True,
      ),
      feedforward=Gated(hidden=self.hidden, act="silu"),
      norm=norm,
    )
    return TransformerConfig(
      family="encoder",
      vocab=vocab,
      embed=self.width,
      layers=(layer,) * self.layers,
      norm=norm,
      tied=True,
      max_positions=self.chunk,
    )


class CepeTransformer(Transformer):
  """A decoder whose layers also attend to the states of an encoder.

  Attributes:
    encoder: The encoder, whose last hidden states are the context's states.
    encoder_config: Settings of the encoder.
  """

  def __init__(
    self,
    config: TransformerConfig,
    encoder: Encoder,
    rngs: nnx.Rngs,
    *,
    scan: bool = True,
  ):
    super().__init__(config, rngs, scan=scan)
    self.encoder_config = encoder
    self.encoder = Transformer(encoder.config(config.vocab), rngs)

  def __call__(
    self,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    states: EncoderStates | None = None,
    **options: Any,
  ) -> Any:
    """Computes logits of the next tokens.

    Args:
      tokens: Token ids, int32 [B, T].
      states: States of each row's context, by `encode`; None for no context, or
        that of the cache.
      **options: Other options of `Transformer.__call__`.
    """
    if states is None:
      return super().__call__(tokens, **options)
    cache = options.pop("cache", None)
    if cache is not None:
      return super().__call__(
        tokens, cache=cache.with_states(states), **options
      )
    alone = StatesAlone(len(self.kinds), states)
    return super().__call__(tokens, cache=alone, **options)[0]

  @property
  def decoder(self) -> Transformer:
    """The decoder alone, with the same arrays."""
    layers = tuple(
      dataclasses.replace(layer, cross=None) for layer in self.config.layers
    )
    config = dataclasses.replace(self.config, layers=layers)
    build = lambda: Transformer(config, nnx.Rngs(0), scan=_scanned(self))
    return filled(jax.eval_shape(build), arrays_of(self), self)

  def read(
    self,
    tokens: Int[Array, "B k C"],
    seg: Int[Array, "B k C"],
    attend: ShardingContext,
  ) -> EncoderStates:
    """Encodes chunks, within a jit.

    Args:
      tokens: Chunks of each row, int32 [B, k, C].
      seg: 0 for padding, else above 0; int32 [B, k, C].
      attend: Sharding of the decoder's tokens; the states are sharded as a
        sequence over the same axis.
    """
    b, k, c = tokens.shape
    flat = lambda x: x.reshape(b * k, c)
    chunk_context = ContextParallel(
      mesh=attend.mesh, axis=None, remat=attend.remat
    )
    # Each chunk is a separate text.
    seg = (seg > 0).astype(jnp.int32)
    places = tokens_of(
      self.encoder, chunk_context, (b * k, c), None, flat(seg), c
    )
    no_cache = NoCache(len(self.encoder.kinds))
    h, _ = self.encoder.hidden(flat(tokens), places, no_cache, chunk_context)
    phi = h.reshape(b, k * c, h.shape[-1])
    # Queries may be the same on all shards; states are sharded.
    state_context = ContextParallel(mesh=attend.mesh, axis=attend.axis)
    return EncoderStates(
      state_context.constrain(phi),
      state_context.constrain(seg.reshape(b, k * c)),
    )


def with_encoder(
  decoder: Transformer,
  encoder: Encoder | None = None,
  *,
  init: str = "copy",
  seed: int = 0,
  rules: Rules | None = None,
) -> CepeTransformer:
  """Adds cross-attention to a new encoder to every layer of a decoder.

  The decoder's arrays are shared, not copied.

  Args:
    decoder: Model of any family whose layers have grouped-query attention.
    encoder: Settings of the encoder; default `Encoder()`.
    init: Initial cross-attention. "copy": queries and outputs as the layer's
      own attention, keys and values by the first rows of its maps, as CEPE;
      "zero": as "copy", with outputs of zero, so that the model starts as its
      decoder.
    seed: Seed of the encoder's weights.
    rules: Rules that shard new weights over the decoder's mesh.

  Raises:
    InputTypeError: If the decoder is not a `Transformer`.
    OptionError: If `init` is unknown, or the decoder has latent attention,
      recurrent layers, or an encoder already.
  """
  encoder = Encoder() if encoder is None else encoder
  one_of("init", init, INITS)
  integer("seed", seed, least=0)
  _check_decoder(decoder)
  empty = _shapes(decoder, encoder, seed)
  arrays = _created(decoder, empty, encoder, init, seed, rules)
  return filled(empty, arrays_of(decoder) | arrays, decoder)


def _check_decoder(decoder: Any) -> None:
  if not isinstance(decoder, Transformer):
    raise InputTypeError(
      "decoder",
      type(decoder).__name__,
      "an rj.models.Transformer",
      "make one with rj.models.load",
    )
  if isinstance(decoder, CepeTransformer):
    raise OptionError(
      "decoder",
      "a model that has an encoder",
      "a decoder alone",
      "pass model.decoder",
    )
  refuse_predicting(decoder, "add an encoder")
  layers = [layer.attention for layer in decoder.config.layers]
  kinds = [type(x).__name__ for x in layers if type(x) is not Attention]
  if kinds:
    raise OptionError(
      "decoder",
      f"a {decoder.config.family} with {len(kinds)} layers of {kinds[0]}",
      "grouped-query attention in every layer",
      "use a decoder without latent attention and recurrent layers",
    )
  attends = [x for x in layers if isinstance(x, Attention)]
  if decoder.config.inputs is not None or any(x.reads for x in attends):
    raise OptionError(
      "decoder",
      f"a {decoder.config.family}, whose layers read each other's keys, or "
      "tokens' ids",
      "layers that read what the one before them made",
      "use another decoder",
    )
  if specs := [x for x in attends if x.value != x.head_dim]:
    raise OptionError(
      "decoder",
      f"a {decoder.config.family} whose values have {specs[0].value} numbers a "
      f"head and keys {specs[0].head_dim}",
      "keys and values of one width",
      "use another decoder",
    )


def _shapes(
  decoder: Transformer, encoder: Encoder, seed: int
) -> CepeTransformer:
  """The model with shapes only."""
  from ringjax.models.checkpoint import cast

  build = functools.partial(_build, decoder.config, encoder, _scanned(decoder))
  return jax.eval_shape(lambda: cast(build(seed), decoder.dtype))


def _build(
  config: TransformerConfig, encoder: Encoder, scan: bool, seed: int
) -> CepeTransformer:
  cross = CrossAttention(width=encoder.width)
  layers = tuple(
    dataclasses.replace(layer, cross=cross) for layer in config.layers
  )
  config = dataclasses.replace(config, layers=layers)
  return CepeTransformer(config, encoder, nnx.Rngs(seed), scan=scan)


def _created(
  decoder: Transformer,
  empty: CepeTransformer,
  encoder: Encoder,
  init: str,
  seed: int,
  rules: Rules | None,
) -> dict[str, jax.Array]:
  """Makes the arrays that the decoder does not have, by their paths."""
  old = arrays_of(decoder)
  form = {k: p for k, p in parameters(empty).items() if k not in old}
  mesh, rules = decoder.mesh, rules or Rules()
  sources = {k: _source_of(k, old) for k in form}
  used = {k: old[k] for k in {*sources.values()} if k is not None}
  config, scan = decoder.config, _scanned(decoder)

  def make(used: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    fresh = parameters(_build(config, encoder, scan, seed))
    arrays = {}
    for path, p in form.items():
      x = fresh[path].get_value()
      if (source := sources[path]) is not None:
        x = _first(used[source], x.shape)
      if init == "zero" and path.endswith("cross.o.weight"):
        x = jnp.zeros_like(x)
      arrays[path] = x.astype(p.get_value().dtype)
    return arrays

  if mesh is None:
    return jax.jit(make)(used)
  shardings = {k: rules.sharding(p, mesh) for k, p in form.items()}
  return jax.jit(make, out_shardings=shardings)(used)


def _source_of(path: str, old: Mapping[str, Any]) -> str | None:
  """Path of the decoder's parameter that a new one is copied from, or None."""
  block, cross, name = path.partition(".cross.")
  if not cross:
    return None
  names = [f"{block}.attention.{name}"]
  if name.startswith("norm."):
    # The norm of the feedforward's input.
    leaf = name.removeprefix("norm.")
    names = [f"{block}.pre_{x}.{leaf}" for x in ("feedforward", "attention")]
  return next((name for name in names if name in old), None)


def _first(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """The first elements of each axis, padded with zeros to a shape."""
  x = x[tuple(slice(0, n) for n in shape)]
  pad = [(0, n - have) for n, have in zip(shape, x.shape, strict=True)]
  return jnp.pad(x, pad)


def _scanned(model: Transformer) -> bool:
  return any(run.repeats > 1 for run in model.stack.runs)


# ---------------------------------------------------------------------------
# Contexts
# ---------------------------------------------------------------------------


@entering(lambda model, *_, **__: getattr(model, "mesh", None))
def encode(
  model: Transformer, chunks: Sequence[Any] | Int[Array | np.ndarray, "B C n"]
) -> EncoderStates:
  """Encodes the contexts of a batch, each chunk separately.

  Args:
    model: Model with an encoder.
    chunks: Chunks of each row, each the ids of some tokens: B sequences of
      sequences, or int32 [B, k, C]. Rows may have different numbers of chunks,
      and these different lengths; padding fills them up.

  Returns:
    The states, [B, S, E], sharded over the model's mesh. Pass them to the
    model's call, or to a cache: `session.cache.with_states(states)`.

  Raises:
    InputTypeError: If the model has no encoder.
    PromptError: If there is no row, a row without chunks, an empty chunk, one
      that is longer than the encoder reads, or an id out of range.
  """
  if not isinstance(model, CepeTransformer):
    raise InputTypeError(
      "model",
      type(model).__name__,
      "a model with an encoder",
      "make one with rj.models.cepe.with_encoder(decoder)",
    )
  rows = _chunks(chunks, model.config.vocab, model.encoder_config.chunk)
  mesh = model.mesh
  attend = ContextParallel(
    mesh=mesh, axis=None if mesh is None else sequence_axis(mesh)
  )
  longest = max(len(chunk) for row in rows for chunk in row)
  width = min(-(-longest // 8) * 8, model.encoder_config.chunk)
  # The number of chunks is rounded up so that all shards have as many states.
  unit = attend.size // math.gcd(attend.size, width)
  count = -(-max(map(len, rows)) // unit) * unit
  tokens = np.zeros((len(rows), count, width), np.int32)
  seg = np.zeros_like(tokens)
  for r, row in enumerate(rows):
    for n, chunk in enumerate(row):
      tokens[r, n, : len(chunk)] = chunk
      seg[r, n, : len(chunk)] = 1
  # Arrays of the host are the same on the devices of all processes.
  return _encode(model, attend, tokens, seg)


@bounded
@functools.partial(jax.jit, static_argnums=1)
def _encode(
  model: CepeTransformer,
  attend: ShardingContext,
  tokens: Int[ArrayLeaf, "B k C"],
  seg: Int[ArrayLeaf, "B k C"],
) -> EncoderStates:
  return model.read(tokens, seg, attend)


def _chunks(contexts: Any, vocab: int, most: int) -> list[list[np.ndarray]]:
  """Ids of each chunk of each row."""
  if isinstance(contexts, jax.Array):
    contexts = np.asarray(contexts)
  rows = [list(row) if np.iterable(row) else [row] for row in contexts]
  if not rows:
    raise PromptError(
      "chunks",
      "contexts of no row",
      "the chunks of one row at least",
      "call the model without states where there is no context",
    )
  return [
    [
      _ids(chunk, f"chunks[{r}][{n}]", vocab, most)
      for n, chunk in enumerate(row)
    ]
    or _empty(f"chunks[{r}]")
    for r, row in enumerate(rows)
  ]


def _empty(name: str) -> Any:
  raise PromptError(
    name,
    "an empty context",
    "one token at least",
    "leave it out, or call the model without states",
  )


def _ids(chunk: Any, name: str, vocab: int, most: int) -> np.ndarray:
  ids = np.asarray(chunk)
  if ids.size == 0:
    _empty(name)
  if ids.ndim != 1 or ids.dtype.kind not in "iu":
    raise PromptError(
      name,
      f"shape {ids.shape} and dtype {ids.dtype}",
      "integer ids [C] of one chunk",
      "pass for each row a list of chunks: encode(model, [[chunk]])",
    )
  if ids.size > most:
    raise PromptError(
      name,
      f"{ids.size} tokens",
      f"at most {most}, the longest chunk of this encoder",
      "cut the context into shorter chunks",
    )
  invalid = ids[(ids < 0) | (ids >= vocab)]
  if invalid.size:
    raise PromptError(
      name,
      f"id {int(invalid[0])}",
      f"ids from 0 to {vocab - 1}",
      "use the tokenizer that belongs to the model",
    )
  return ids.astype(np.int32)


# ---------------------------------------------------------------------------
# Folders
# ---------------------------------------------------------------------------


def split(
  model: Transformer,
) -> tuple[Transformer, Callable[[pathlib.Path], None]]:
  """The decoder, and a function that writes the encoder's files to a folder."""
  if not isinstance(model, CepeTransformer):
    return model, lambda folder: None
  decoder = model.decoder
  digest, decoder_arrays = model_digest(decoder), arrays_of(decoder)
  arrays = {
    k: x for k, x in arrays_of(model).items() if k not in decoder_arrays
  }
  gathered = {k: on_host(x) for k, x in arrays.items()}
  # A file is the same, whether the model's layers are a loop or not.
  groups = model.stack.runs
  gathered = regrouped(gathered, groups, looped(groups))
  config = {
    "decoder": digest,
    "dtype": jnp.dtype(model.dtype).name,
    "encoder": dataclasses.asdict(model.encoder_config),
    "tensors": tensors_digest(gathered),
  }

  def write(folder: pathlib.Path) -> None:
    write_tensors(folder / TENSORS, gathered, {"format": "pt"})
    text = json_text(config, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")

  return decoder, write


def attached(
  path: str | os.PathLike[str], decoder: Transformer, rules: Rules | None = None
) -> Transformer:
  """Adds a folder's encoder to its decoder; without one the decoder itself.

  Raises:
    CheckpointFormatError: If files are broken or not those that were saved.
    CheckpointMismatchError: If the encoder is for another decoder, or tensors
      differ.
  """
  if not (as_path(path) / CONFIG).exists():
    return decoder
  folder = pathlib.Path(local_path("path of a folder with an encoder", path))
  try:
    config = json.loads((folder / CONFIG).read_text("utf-8"))
    encoder = Encoder(**config["encoder"])
    stated_digest, stated_tensors = config["decoder"], config["tensors"]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise CheckpointFormatError(
      CONFIG, f"{error}"[:120], "what rj.models.save writes", _REMEDY
    ) from None
  decoder_digest = model_digest(decoder)
  if decoder_digest != stated_digest:
    raise CheckpointMismatchError(
      CONFIG,
      f"an encoder of another decoder, of digest {stated_digest}",
      f"that of this folder's decoder, {decoder_digest}",
      "put the files of one model together again",
    )
  arrays, _ = read_tensors(folder / TENSORS)
  if tensors_digest(arrays) != stated_tensors:
    raise CheckpointFormatError(
      TENSORS, "tensors of another digest than stated", "its own", _REMEDY
    )
  _check_decoder(decoder)
  empty = _shapes(decoder, encoder, 0)
  arrays = regrouped(arrays, looped(empty.stack.runs), empty.stack.runs)
  have = arrays_of(decoder)
  form = {k: p for k, p in parameters(empty).items() if k not in have}
  shapes = lambda x: {k: tuple(v.shape) for k, v in x.items()}
  if shapes(arrays) != shapes({k: p.get_value() for k, p in form.items()}):
    raise CheckpointMismatchError(
      TENSORS,
      "other names or shapes than the model's",
      "a tensor for each parameter of encoder and cross-attention",
      _REMEDY,
    )
  mesh, rules = decoder.mesh, rules or Rules()

  def put(path: str) -> jax.Array:
    p = form[path]
    x = arrays[path].astype(p.get_value().dtype)
    return jax.device_put(x, None if mesh is None else rules.sharding(p, mesh))

  return filled(empty, have | {k: put(k) for k in form}, decoder)
