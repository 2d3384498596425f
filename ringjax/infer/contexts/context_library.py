"""Documents that are read once: their keys and values, ready for any prompt.

Guarantees: a document is encoded once for a model, a kind of cache and a
prefix, and comes back with the same bytes, from memory, a store or a file.
Documents do not see each other.
Cost: of a document, a prefill behind the prefix; documents of a call are read
together, over the mesh's data axes too, and long ones over the sequence's axis.
Memory: blocks are in host memory, or where a store puts them.
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
from jaxtyping import Array, Shaped

from ringjax.checks import positive_int
from ringjax.errors import CheckpointFormatError, OptionError, PromptError
from ringjax.infer import inputs
from ringjax.infer.prefill import padded
from ringjax.infer.prompt_reading import check_callable, read_context
from ringjax.infer.session import Session
from ringjax.json_text import json_text
from ringjax.kv.cache import Blocks, LayerCacheSpec
from ringjax.kv.cache_kind import CacheKind, cache_kind
from ringjax.kv.context_cache import PlacedContext, exported, placed
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import ShardingContext
from ringjax.ops.mask import Coords
from ringjax.store import Store, block_file


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EncodedContext:
  """A document whose keys and values are there.

  Attributes:
    tokens: int32 [n].
    prefix: ids that it was read behind.
    blocks: its keys and values in host memory, at the positions behind the
      prefix.
    prefix_blocks: those of the prefix, or None without one.
    origin: digest of the model and of all that its bytes depend on beside the
      tokens.
  """

  tokens: np.ndarray
  prefix: tuple[int, ...]
  blocks: Blocks
  prefix_blocks: Blocks | None
  origin: str

  @property
  def digest(self) -> bytes:
    """A digest of tokens and origin; contexts of one digest are equal."""
    return prefix_key(self.origin, self.prefix, self.tokens)

  @property
  def nbytes(self) -> int:
    """Bytes of its keys and values."""
    return sum(x.nbytes for x in jax.tree.leaves(self.blocks.parts))

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes it as a file, for `ContextLibrary.load`: whole or not at all.

    Raises:
      OSError: it cannot be written.
    """
    path = pathlib.Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
      part.write_bytes(b"".join(block_file.pack(self.digest, _to_bytes(self))))
      part.replace(path)
    finally:
      part.unlink(missing_ok=True)


@dataclasses.dataclass(kw_only=True)
class ContextCounters:
  """What a library has done.

  Attributes:
    encoded: documents that were read.
    tokens: that were computed for them.
    reused: documents that were asked for and there.
  """

  encoded: int = 0
  tokens: int = 0
  reused: int = 0


class ContextLibrary:
  """Encoded documents of a model, by their tokens.

  Attributes:
    model: which reads them.
    prefix: ids that all are read behind.
    kind: how keys and values are stored.
    counters: what was done.
    options: of the sessions in which they are read.
    shards: over which a document is spread.
  """

  def __init__(
    self,
    model: Transformer,
    *,
    prefix: Sequence[int] = (),
    cache_kind: CacheKind | str = "dense",
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    axis: str | None = None,
    store: Store | None = None,
    rows: int = 8,
  ):
    """Makes an empty library.

    Args:
      model: made by `rj.models.load` or `create`.
      prefix: ids that all documents are read behind and see.
      cache_kind: how keys and values are stored, see `Transformer.init_cache`:
        a kind that keeps all tokens on the devices. Keys that are stored
        before their rotation ("unrotated", "nuq3") can be moved.
      dtype: of keys and values; default: the model's.
      mesh: see `Session`.
      axis: see `Session`.
      store: where blocks are kept, an `rj.store.Store`; default: in a dict.
      rows: how many documents are read together at most.

    Raises:
      OptionError: a kind that evicts or moves tokens to the host, or a model
        with recurrent layers.
    """
    positive_int("rows", rows)
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
    self._held: dict[bytes, EncodedContext] = {}
    self._prefix_blocks: Blocks | None = None
    self.counters = ContextCounters()
    # Of an empty session: dtype and mesh as they are.
    made = Session(model, 1, **self.options)
    sharding = ShardingContext(mesh=made.mesh, axis=made.axis)
    self._data, self.shards = sharding.data_size, made.shards
    self._structure = jax.tree.structure(made.cache.slots)
    self.origin = context_origin(model, self.kind, made.cache.dtype)

  def encode(
    self,
    documents: Sequence[Any],
    *,
    progress: Callable[[int], Any] | None = None,
  ) -> list[EncodedContext]:
    """The documents' keys and values; those that are there are not read again.

    Args:
      documents: ids of each, int [n].
      progress: called with the number of documents that are there.

    Raises:
      PromptError: an empty document, ids that the model does not have, or one
        that is longer than the model's context.
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
    found: dict[bytes, EncodedContext] = {}
    for key, text in by_key.items():
      there = self._there(key, text)
      if there is not None:
        found[key] = there
    new = {key: text for key, text in by_key.items() if key not in found}
    self.counters.reused += len(texts) - len(new)
    order = sorted(new, key=lambda key: new[key].size)
    done = len(texts) - len(new)
    if progress is not None and done:
      progress(done)
    for start in range(0, len(order), self._rows):
      batch = order[start : start + self._rows]
      read = self._read([new[key] for key in batch])
      for key, made in zip(batch, read, strict=True):
        found[key] = made
        self._keep(key, made)
      done += len(batch)
      if progress is not None:
        progress(done)
    return [found[key] for key in keys]

  def load(self, path: str | os.PathLike[str]) -> EncodedContext:
    """Reads a file of `EncodedContext.save`; it is then among its documents.

    Raises:
      CheckpointFormatError: another file, or a damaged one.
      OptionError: one of another model, kind of cache, dtype or prefix.
    """
    try:
      data = pathlib.Path(path).read_bytes()
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
    self._keep(context.digest, context)
    return context

  def _there(self, key: bytes, text: np.ndarray) -> EncodedContext | None:
    if self._store is None:
      return self._held.get(key)
    data = self._store.get(key)
    if data is None:
      return None
    found = _from_bytes(bytes(data), self.kind, self._structure)
    whole = found.origin == self.origin and np.array_equal(found.tokens, text)
    return found if whole else None

  def _keep(self, key: bytes, made: EncodedContext) -> None:
    if self._store is None:
      self._held[key] = made
    else:
      self._store.put(key, _to_bytes(made))

  def _read(self, texts: list[np.ndarray]) -> list[EncodedContext]:
    """Reads documents together."""
    rows = 1 << (len(texts) - 1).bit_length()
    rows = -(-rows // self._data) * self._data
    # Rows that fill the batch up read a token.
    prompts = texts + [texts[0][:1]] * (rows - len(texts))
    prefix = self._prefix()
    session = self._session(rows, max(text.size for text in texts))
    if prefix is not None:
      at = np.arange(len(self.prefix))
      empty = cache_spec(self.model, session, rows, session.cache.capacity)
      one = [PlacedContext(prefix, at)]
      session.cache, _ = placed(empty, [one] * rows)
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
    """Keys and values of the prefix, read once."""
    if self.prefix and self._prefix_blocks is None:
      session = Session(self.model, len(self.prefix), **self.options)
      read_context(self.model, [list(self.prefix)], cache=session)
      self.counters.tokens += len(self.prefix)
      (self._prefix_blocks,) = exported(
        session.cache, [(0, 0, len(self.prefix))]
      )
    return self._prefix_blocks

  def _session(self, rows: int, longest: int) -> Session:
    # Of padded prompts, and a part of the prefix on each shard.
    size = len(self.prefix) + self.shards + padded(longest, self.shards)
    capacity = padded(size, self.shards)
    return Session(self.model, capacity, batch=rows, **self.options)


def cache_spec(
  model: Transformer, session: Session, batch: int, capacity: int
) -> Any:
  """Shapes and shardings of a cache such as a session's, of another size."""
  return model.init_cache_spec(
    batch,
    capacity,
    sharding=ShardingContext(mesh=session.mesh, axis=session.axis),
    dtype=session.cache.dtype,
    kind=session.cache.kind,
  )


def context_tokens(
  documents: Sequence[Any] | Shaped[Array | np.ndarray, "N _"], vocab: int
) -> list[np.ndarray]:
  """The ids of documents, int32 [n] each.

  Raises:
    PromptError: no document, an empty one, or ids that the model does not have.
  """
  given = isinstance(documents, Sequence | np.ndarray | jax.Array)
  if not given or isinstance(documents, str | bytes):
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


def context_kind(model: Transformer, kind: CacheKind | str) -> CacheKind:
  """A kind of cache for contexts: it keeps all tokens where they are read.

  Raises:
    OptionError: it evicts or moves tokens to the host, or the model has
      recurrent layers.
  """
  found = model.cache_kind(cache_kind(kind)).resident("contexts")
  if not all(isinstance(shape, LayerCacheSpec) for shape in model.kinds):
    raise OptionError(
      "model",
      f"{model.config.family} with recurrent layers, whose states are of one "
      "text",
      "keys and values in every layer",
      "pass combine='full', or read the contexts into a session",
    )
  return dataclasses.replace(found, windowed=False)


def check_origin(
  context: EncodedContext, origin: str, prefix: tuple[int, ...], what: str
) -> None:
  """Refuses a context of another model, kind, dtype or prefix.

  Raises:
    OptionError: it is one.
  """
  mine, theirs = json.loads(origin), json.loads(context.origin)
  other = [name for name in mine if mine[name] != theirs.get(name)]
  if other:
    raise OptionError(
      what,
      ", ".join(f"of {name} {theirs.get(name)}" for name in other),
      ", ".join(f"{name} {mine[name]}" for name in other),
      "encode the document with this model and kind of cache",
    )
  if context.prefix != prefix:
    raise OptionError(
      what,
      f"read behind a prefix of {len(context.prefix)} tokens",
      f"the same prefix for all, here one of {len(prefix)} tokens",
      "encode the document behind this prefix",
    )


def context_origin(
  model: Transformer, kind: CacheKind, dtype: DTypeLike
) -> str:
  """All that the bytes of a context depend on beside tokens and prefix."""
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
  """A digest of tokens, of what they are read behind, and of `origin`."""
  found = hashlib.sha256(origin.encode())
  found.update(np.asarray(prefix, np.int32).tobytes() + b"|")
  found.update(np.asarray(tokens, np.int32).tobytes())
  return found.digest()


# ---------------------------------------------------------------------------
# As bytes
# ---------------------------------------------------------------------------


def _to_bytes(context: EncodedContext) -> bytes:
  """A context as safetensors: arrays as bytes, what they are in the header."""
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


def _from_bytes(data: bytes, kind: CacheKind, structure: Any) -> EncodedContext:
  """What `_to_bytes` made bytes of; `structure` is that of a cache's slots.

  Raises:
    ValueError, KeyError, SafetensorError: other bytes.
  """
  size = int.from_bytes(data[:8], "little")
  header = json.loads(data[8 : 8 + size])["__metadata__"]
  arrays, shapes = safetensors.numpy.load(data), json.loads(header["shapes"])

  def blocks(name: str) -> Blocks | None:
    leaves = []
    while (at := f"{name}.{len(leaves)}") in shapes:
      dtype, shape = shapes[at]
      leaves.append(arrays[at].view(jnp.dtype(dtype)).reshape(shape))
    if not leaves:
      return None
    parts = jax.tree.unflatten(structure, leaves[2:])
    return Blocks(Coords(*leaves[:2]), parts, kind)

  own = blocks("own")
  if own is None:
    raise ValueError("no keys and values")
  return EncodedContext(
    tokens=arrays["tokens"],
    prefix=tuple(int(n) for n in arrays["prefix"]),
    blocks=own,
    prefix_blocks=blocks("before"),
    origin=header["origin"],
  )
