"""Library of documents whose keys and values are computed once and reused.

Guarantees: a document is encoded once for a model, a kind of cache and a
prefix, and comes back with the same bytes, from memory, a store or a file.
Documents do not see each other.
Cost: a prefill of each document after the prefix; documents of a call are read
together, over the mesh's data axes too, and long ones over the sequence's axis.
Memory: blocks are in host memory, or where a store puts them.

On a mesh of several processes all make the same calls, and each has all blocks.
With stores, a document is reused if the stores of all processes have it: each
may have its own, or all open one folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Shaped

from ringjax.checks import local_path, positive_int
from ringjax.errors import CheckpointFormatError, OptionError, PromptError
from ringjax.infer import inputs
from ringjax.infer.prefill import padded
from ringjax.infer.prompt_reading import check_callable, read_context
from ringjax.infer.session import Session
from ringjax.json_text import json_text
from ringjax.kv.cache_kind import CacheConfig, cache_kind
from ringjax.kv.composed.context_cache import PlacedContext, exported, placed
from ringjax.kv.layer_spec import LayerCacheSpec, LayerKV
from ringjax.kv.storage.exported_blocks import Blocks
from ringjax.models.grouping import kind_rows
from ringjax.models.transformer import Transformer
from ringjax.nn.attention_layers.choosing.choosing_attention import (
  refuse_sparse,
)
from ringjax.nn.attention_layers.folded_attention import refuse_folded
from ringjax.nn.sharding_context import ShardingContext
from ringjax.nn.stack import runs
from ringjax.ops.mask import Coords
from ringjax.parallel.joint_outcome import exchanged, processes_of
from ringjax.store import Store, block_file


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EncodedContext:
  """A document with its computed keys and values.

  Attributes:
    tokens: Token ids of the document, int32 [n].
    prefix: Token ids of the prefix before the document.
    blocks: Keys and values of the document in host memory, at the positions
      after the prefix.
    prefix_blocks: Keys and values of the prefix, or None without one.
    origin: JSON text with the model's digest and everything else, except the
      tokens, that the bytes depend on.
  """

  tokens: np.ndarray
  prefix: tuple[int, ...]
  blocks: Blocks
  prefix_blocks: Blocks | None
  origin: str

  @property
  def digest(self) -> bytes:
    """Digest of tokens and origin; contexts with the same digest are equal."""
    return prefix_key(self.origin, self.prefix, self.tokens)

  @property
  def nbytes(self) -> int:
    """Bytes of the document's keys and values."""
    return sum(x.nbytes for x in jax.tree.leaves(self.blocks.parts))

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the context to a file atomically, for `ContextLibrary.load`.

    Raises:
      OSError: If the file cannot be written.
    """
    path = pathlib.Path(local_path("path", path))
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
      part.write_bytes(b"".join(block_file.pack(self.digest, _to_bytes(self))))
      part.replace(path)
    finally:
      part.unlink(missing_ok=True)


@dataclasses.dataclass(kw_only=True)
class ContextCounters:
  """Counters of a library's work.

  Attributes:
    encoded: Number of documents that were encoded.
    tokens: Number of tokens computed to encode them and the prefix.
    reused: Number of requested documents that were encoded already.
  """

  encoded: int = 0
  tokens: int = 0
  reused: int = 0


class ContextLibrary:
  """Encoded documents of a model, by their tokens.

  Attributes:
    model: Model that encodes the documents.
    prefix: Token ids of the prefix before every document.
    kind: Storage format of keys and values.
    counters: Counters of the library's work.
    options: Keyword arguments of the sessions that encode documents.
    shards: Number of shards over which a document is spread.
  """

  def __init__(
    self,
    model: Transformer,
    *,
    prefix: Sequence[int] = (),
    cache_kind: CacheConfig | str = "dense",
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    axis: str | None = None,
    store: Store | None = None,
    rows: int = 8,
  ):
    """Makes an empty library.

    Args:
      model: Model made by `rj.models.load` or `create`.
      prefix: Token ids of a prefix that all documents follow and see.
      cache_kind: Storage format of keys and values, one that keeps all tokens
        on the devices, see `Transformer.init_cache`. Keys that are stored
        before their rotation ("unrotated", "nuq3") can be moved.
      dtype: Dtype of keys and values; default: the model's.
      mesh: Mesh of the sessions, see `Session`.
      axis: Mesh axis that shards the sequence, see `Session`.
      store: An `rj.store.Store` that keeps the blocks; default: a dict.
      rows: Maximum number of documents that are encoded together.

    Raises:
      OptionError: If the kind evicts tokens or moves them to the host, or the
        model has recurrent layers.
    """
    positive_int("rows", rows)
    refuse_folded(
      model.config.layers,
      "model",
      "contexts that are encoded apart",
      "read them as one prompt",
    )
    refuse_sparse(
      model.config.layers,
      "model",
      "contexts that are encoded apart",
      "read them as one prompt",
    )
    self.model, self.kind = model, context_kind(model, cache_kind)
    self.prefix = tuple(int(n) for n in prefix)
    if self.prefix:
      inputs.prompts([list(self.prefix)], model.config.vocab)
    if store is not None and not isinstance(store, Store):
      raise OptionError(
        "store",
        type(store).__name__,
        "an rj.store.Store",
        "make one with rj.store.Store(host=1 << 30)",
      )
    self.options: dict[str, Any] = dict(
      mesh=mesh, axis=axis, dtype=dtype, cache_kind=self.kind
    )
    self._store, self._rows = store, rows
    self._contexts: dict[bytes, EncodedContext] = {}
    self._prefix_blocks: Blocks | None = None
    self.counters = ContextCounters()
    # An empty session resolves the default dtype and mesh.
    empty_session = Session(model, 1, **self.options)
    sharding = ShardingContext(mesh=empty_session.mesh, axis=empty_session.axis)
    self._data, self.shards = sharding.data_size, empty_session.shards
    self._ranks = processes_of(empty_session.mesh)
    self._structure = jax.tree.structure(empty_session.cache.slots)
    self.origin = context_origin(model, self.kind, empty_session.cache.dtype)

  def encode(
    self,
    documents: Sequence[Any],
    *,
    progress: Callable[[int], Any] | None = None,
  ) -> list[EncodedContext]:
    """Encodes documents, except those that are encoded already.

    Args:
      documents: Token ids of each document, int [n].
      progress: Callback that gets the number of documents ready so far.

    Raises:
      PromptError: If a document is empty, has ids outside the vocabulary, or
        exceeds the model's context.
    """
    check_callable(progress=progress)
    texts = context_tokens(documents, self.model.config.vocab)
    for number, text in enumerate(texts):
      total = len(self.prefix) + text.size
      inputs.within_context(
        self.model.config, total, f"{total:,} tokens in context {number}"
      )
    keys = [prefix_key(self.origin, self.prefix, text) for text in texts]
    by_key = dict(zip(keys, texts, strict=True))
    contexts = self._stored_contexts(by_key)
    new = {key: text for key, text in by_key.items() if key not in contexts}
    self.counters.reused += len(texts) - len(new)
    order = sorted(new, key=lambda key: new[key].size)
    num_ready = len(texts) - len(new)
    if progress is not None and num_ready:
      progress(num_ready)
    for start in range(0, len(order), self._rows):
      batch = order[start : start + self._rows]
      read = self._read([new[key] for key in batch])
      for key, context in zip(batch, read, strict=True):
        contexts[key] = context
        self._add(key, context)
      num_ready += len(batch)
      if progress is not None:
        progress(num_ready)
    return [contexts[key] for key in keys]

  def load(self, path: str | os.PathLike[str]) -> EncodedContext:
    """Reads a file written by `EncodedContext.save` and adds its document.

    Raises:
      CheckpointFormatError: If the file is damaged or of another format.
      OptionError: If the model, kind of cache, dtype or prefix differs.
    """
    try:
      data = pathlib.Path(local_path("path", path)).read_bytes()
      payload = bytes(block_file.unpack(data[8:40], data))
      context = _from_bytes(payload, self.kind, self._structure)
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as e:
      raise CheckpointFormatError(
        str(path),
        f"{type(e).__name__}: {e}",
        "a file that EncodedContext.save wrote",
        "encode the document again",
      ) from None
    check_origin(context, self.origin, self.prefix, str(path))
    context = self.of_kinds(context)
    self._add(context.digest, context)
    return context

  def of_kinds(self, context: EncodedContext) -> EncodedContext:
    """A context of this model whose layers are grouped as this model's are."""
    convert = lambda x: None if x is None else _of_kinds(x, self.model)
    blocks: Any = convert(context.blocks)
    if blocks is context.blocks:
      return context
    prefix_blocks = convert(context.prefix_blocks)
    return dataclasses.replace(
      context, blocks=blocks, prefix_blocks=prefix_blocks
    )

  def _stored_contexts(
    self, texts: dict[bytes, np.ndarray]
  ) -> dict[bytes, EncodedContext]:
    """Contexts that all processes of the mesh have, by their keys."""
    contexts = {
      key: context
      for key, text in texts.items()
      if (context := self._stored_context(key, text)) is not None
    }
    if not self._ranks:
      return contexts
    present = [key in contexts for key in texts]
    in_all = np.all(exchanged(present, self._ranks, channel="contexts"), 0)
    return {
      key: contexts[key]
      for key, in_all_processes in zip(texts, in_all, strict=True)
      if in_all_processes
    }

  def _stored_context(
    self, key: bytes, text: np.ndarray
  ) -> EncodedContext | None:
    if self._store is None:
      return self._contexts.get(key)
    data = self._store.get(key)
    if data is None:
      return None
    context = _from_bytes(bytes(data), self.kind, self._structure)
    matches = context.origin == self.origin and np.array_equal(
      context.tokens, text
    )
    return self.of_kinds(context) if matches else None

  def _add(self, key: bytes, context: EncodedContext) -> None:
    if self._store is None:
      self._contexts[key] = context
    else:
      self._store.put(key, _to_bytes(context))

  def _read(self, texts: list[np.ndarray]) -> list[EncodedContext]:
    """Encodes documents as the rows of one batch."""
    rows = 1 << (len(texts) - 1).bit_length()
    rows = -(-rows // self._data) * self._data
    # Padding rows of the batch read a single token.
    prompts = texts + [texts[0][:1]] * (rows - len(texts))
    prefix = self._prefix()
    session = self._session(rows, max(text.size for text in texts))
    if prefix is not None:
      at = np.arange(len(self.prefix))
      empty = cache_spec(self.model, session, rows, session.cache.capacity)
      prefix_row = [PlacedContext(prefix, at)]
      session.cache, _ = placed(empty, [prefix_row] * rows)
    read_context(self.model, prompts, cache=session)
    first = len(self.prefix)
    spans = [(n, first, first + t.size) for n, t in enumerate(texts)]
    blocks = exported(session.cache, spans)
    self.counters.encoded += len(texts)
    self.counters.tokens += sum(text.size for text in texts)
    return [
      EncodedContext(
        tokens=text,
        prefix=self.prefix,
        blocks=block,
        prefix_blocks=prefix,
        origin=self.origin,
      )
      for text, block in zip(texts, blocks, strict=True)
    ]

  def _prefix(self) -> Blocks | None:
    """Keys and values of the prefix, computed once."""
    if self.prefix and self._prefix_blocks is None:
      session = Session(self.model, len(self.prefix), **self.options)
      read_context(self.model, [list(self.prefix)], cache=session)
      self.counters.tokens += len(self.prefix)
      (self._prefix_blocks,) = exported(
        session.cache, [(0, 0, len(self.prefix))]
      )
    return self._prefix_blocks

  def _session(self, rows: int, longest: int) -> Session:
    # Room for padded prompts, with a part of the prefix on each shard.
    size = len(self.prefix) + self.shards + padded(longest, self.shards)
    capacity = padded(size, self.shards)
    return Session(self.model, capacity, batch=rows, **self.options)


def cache_spec(
  model: Transformer, session: Session, batch: int, capacity: int
) -> Any:
  """Shapes and shardings of a cache like a session's, with another size."""
  return model.init_cache_spec(
    batch,
    capacity,
    sharding=ShardingContext(mesh=session.mesh, axis=session.axis),
    dtype=session.cache.dtype,
    kind=session.cache.kind,
  )


def context_tokens(
  documents: Sequence[Any] | Shaped[Array | np.ndarray, "N _"], vocab: int
) -> list[Int[np.ndarray, " _"]]:
  """Token ids of documents, int32 [n] each.

  Raises:
    PromptError: If `documents` is not a list, a document is empty, or ids are
      outside the vocabulary.
  """
  is_list = isinstance(documents, Sequence | np.ndarray | jax.Array)
  if not is_list or isinstance(documents, str | bytes):
    raise PromptError(
      "contexts",
      f"a {type(documents).__name__}",
      "a list of documents, each its ids or an EncodedContext",
      "encode the texts first",
    )
  for number, document in enumerate(documents):
    if np.size(np.asarray(document, object)) == 0:
      raise PromptError(
        "contexts",
        f"context {number} without tokens",
        "at least one in each",
        "leave it out",
      )
  return inputs.prompts([np.asarray(document) for document in documents], vocab)


def context_kind(model: Transformer, kind: CacheConfig | str) -> CacheConfig:
  """Cache kind for contexts: one that keeps all tokens on the devices.

  Raises:
    OptionError: If the kind evicts tokens or moves them to the host, or the
      model has recurrent layers.
  """
  resident_kind = model.cache_kind(cache_kind(kind)).resident("contexts")
  if not all(isinstance(shape, LayerCacheSpec) for shape in model.kinds):
    raise OptionError(
      "model",
      f"{model.config.family} with recurrent layers, whose states are of one "
      "text",
      "keys and values in every layer",
      "pass combine='full', or read the contexts into a session",
    )
  return resident_kind.replace(windowed=False)


def check_origin(
  context: EncodedContext, origin: str, prefix: tuple[int, ...], what: str
) -> None:
  """Refuses a context of another model, kind, dtype or prefix.

  Raises:
    OptionError: If one of them differs.
  """
  expected, actual = json.loads(origin), json.loads(context.origin)
  mismatched = [name for name in expected if expected[name] != actual.get(name)]
  if mismatched:
    raise OptionError(
      what,
      ", ".join(f"of {name} {actual.get(name)}" for name in mismatched),
      ", ".join(f"{name} {expected[name]}" for name in mismatched),
      "encode the document with this model and kind of cache",
    )
  if context.prefix != prefix:
    raise OptionError(
      what,
      f"read after a prefix of {len(context.prefix)} tokens",
      f"the same prefix for all, here one of {len(prefix)} tokens",
      "encode the document after this prefix",
    )


def context_origin(
  model: Transformer, kind: CacheConfig, dtype: DTypeLike
) -> str:
  """JSON of all that a context's bytes depend on except tokens and prefix."""
  rope = hashlib.sha256(repr(model.config).encode()).hexdigest()[:16]
  # Codes are stored with tokens last on a TPU.
  platform = model.embed.weight.get_value().devices()
  return json_text(
    {
      "model": model.digest,
      "config": rope,
      "vocabulary": model.config.vocab,
      "cache kind": repr(kind),
      "dtype": str(np.dtype(dtype)),
      "platform": next(iter(platform)).platform if kind.codec else "any",
    }
  )


def prefix_key(
  origin: str, prefix: tuple[int, ...], tokens: np.ndarray
) -> bytes:
  """SHA-256 digest of tokens, the prefix before them, and `origin`."""
  hasher = hashlib.sha256(origin.encode())
  hasher.update(np.asarray(prefix, np.int32).tobytes() + b"|")
  hasher.update(np.asarray(tokens, np.int32).tobytes())
  return hasher.digest()


# ---------------------------------------------------------------------------
# As bytes
# ---------------------------------------------------------------------------


def _to_bytes(context: EncodedContext) -> bytes:
  """Serializes a context as safetensors, with shapes in the header."""
  arrays: dict[str, np.ndarray] = {
    "tokens": np.asarray(context.tokens, np.int32),
    "prefix": np.asarray(context.prefix, np.int32),
  }
  shapes: dict[str, Any] = {}
  parts = {"own": context.blocks, "before": context.prefix_blocks}
  for name, blocks in parts.items():
    leaves = [] if blocks is None else jax.tree.leaves(blocks[:2])
    for n, x in enumerate(leaves):
      x = np.ascontiguousarray(x)
      arrays[f"{name}.{n}"] = x.reshape(-1).view(np.uint8)
      shapes[f"{name}.{n}"] = [str(x.dtype), list(x.shape)]
  header = {"origin": context.origin, "shapes": json_text(shapes)}
  return safetensors.numpy.save(arrays, header)


def _of_kinds(blocks: Blocks, model: Transformer) -> Blocks:
  """Exported tokens by the kinds of layers of a model.

  Raises:
    ValueError: If they are of other layers.
  """
  rows = kind_rows(model.stack.runs)
  if len(blocks.parts) == len(rows):
    return blocks
  layers = model.config.layers
  groupings = [kind_rows(runs(layers, scan=scan)) for scan in (True, False)]
  matching = [x for x in groupings if len(x) == len(blocks.parts)]
  if not matching:
    raise ValueError(f"{len(blocks.parts)} kinds of layers of {len(rows)}")
  by_place = {
    place: jax.tree.map(lambda x, n=n: x[n], part)
    for part, places in zip(blocks.parts, matching[0], strict=True)
    for n, place in enumerate(places)
  }
  stacked = lambda places: jax.tree.map(
    lambda *x: np.stack(x), *(by_place[place] for place in places)
  )
  return blocks._replace(parts=tuple(map(stacked, rows)))


def _from_bytes(
  data: bytes, kind: CacheConfig, structure: Any
) -> EncodedContext:
  """Deserializes a context; `structure` is the tree of a cache's slots.

  Raises:
    ValueError, KeyError, SafetensorError: If `_to_bytes` did not write them.
  """
  size = int.from_bytes(data[:8], "little")
  header = json.loads(data[8 : 8 + size])["__metadata__"]
  arrays, shapes = safetensors.numpy.load(data), json.loads(header["shapes"])

  def unpack_blocks(name: str) -> Blocks | None:
    leaves = []
    while (key := f"{name}.{len(leaves)}") in shapes:
      dtype, shape = shapes[key]
      leaves.append(arrays[key].view(jnp.dtype(dtype)).reshape(shape))
    if not leaves:
      return None
    if len(leaves) - 2 == structure.num_leaves:
      parts = jax.tree.unflatten(structure, leaves[2:])
    else:
      # Layers are grouped in another way, see `_of_kinds`.
      pairs = zip(leaves[2::2], leaves[3::2], strict=True)
      parts = tuple(LayerKV(*pair) for pair in pairs)
    return Blocks(Coords(*leaves[:2]), parts, kind)

  document_blocks = unpack_blocks("own")
  if document_blocks is None:
    raise ValueError("no keys and values")
  return EncodedContext(
    tokens=arrays["tokens"],
    prefix=tuple(int(n) for n in arrays["prefix"]),
    blocks=document_blocks,
    prefix_blocks=unpack_blocks("before"),
    origin=header["origin"],
  )
