"""Load only the tokens of a stored prefix that a query attends to: IMPRESS.

Guarantees: with keep=1 the result is attention over the whole prefix. The order
in which tokens are stored only changes the chunks that are read. Counters count
the vectors that the algorithm needs, and the chunks that it read for them.
Cost: for each layer the keys of a few probe heads, then keys and values of the
kept tokens; or, where the probes do not agree, the keys of all heads. Where all
heads are probes, no keys are loaded twice.
Lossy: tokens that are not kept are left out of the softmax.

A prefix is a node: its tokens' keys and values, layer by layer, in chunks of
tokens, each of which is a block of a `Store`. The keys of the probe heads are
stored a second time, separately, and so is the order of each layer's tokens: a
node of the same name reads it, also after its process ended at any point.

  importance of a token for a head: the attention that the new tokens pay to
    it, summed over them (and over the queries that share the head's keys)
  similarity: the mean Jaccard index of the probes' sets of top k tokens
  threshold: t = j ** alpha with j = r / (2 - r), r = k / n; j is what two
    random sets have in common
  above it the tokens with most probes' votes are kept by all heads; otherwise
    each head keeps its own

Keys must be as attention reads them: with their rotation, decoded.
Ref: Chen et al. 2025, IMPRESS (FAST).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import threading
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError, ShapeError
from ringjax.store.prefix_store import Store
from ringjax.typing import Index


class MissingChunk(LookupError):
  """A chunk of a prefix is no longer in the store: compute it again."""


def overlap_threshold(part: int | float, alpha: int | float) -> float:
  """Similarity of probes above which their choice holds for all heads.

  Args:
    part: Fraction of tokens that are kept, k / n.
    alpha: Exponent: 1 gives the similarity of random sets, 0 requires equal
      sets.
  """
  return (part / (2 - part)) ** alpha


def mean_jaccard(sets: Shaped[np.ndarray, "P k"]) -> float:
  """Mean Jaccard index of all pairs of sets; 1 for a single set."""
  groups = [set(row.tolist()) for row in sets]
  overlaps = [
    len(a & b) / len(a | b) for a, b in itertools.combinations(groups, 2)
  ]
  return sum(overlaps) / len(overlaps) if overlaps else 1.0


def vectors_of_all(heads: int, tokens: int, kept: int) -> int:
  """Number of vectors to load where all heads' keys choose the tokens."""
  return heads * tokens + heads * kept


def vectors_of_probes(heads: int, tokens: int, kept: int, probes: int) -> int:
  """Number of vectors to load where probe heads' keys choose the tokens."""
  return probes * tokens + 2 * heads * kept


@dataclasses.dataclass(kw_only=True)
class ImpressCounters:
  """Counters of loaded vectors and chunks.

  Attributes:
    layers: Number of layers that were attended to.
    fallbacks: Number of these whose probes did not agree.
    vectors: Number of keys and values that the algorithm needs, of one head
      each.
    vector_bytes: Bytes of these vectors.
    chunks: Number of blocks read for them, with those of probe heads.
    chunk_bytes: Bytes of these blocks.
  """

  layers: int = 0
  fallbacks: int = 0
  vectors: int = 0
  vector_bytes: int = 0
  chunks: int = 0
  chunk_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptTokens:
  """Tokens of a prefix that a layer keeps.

  Attributes:
    tokens: Token numbers, int64 [K, k], rising in each head.
    similarity: Similarity of the probes.
    threshold: Threshold that the similarity was compared with.
    shared: Whether all heads keep the same tokens.
    importance: Importance of each token, float32 [m], the mean over the heads
      that were read.
    keys: Keys of the tokens as they are stored, [K, k, H].
    values: Values of the tokens, [K, k, J].
  """

  tokens: np.ndarray
  similarity: float
  threshold: float
  shared: bool
  importance: np.ndarray
  keys: np.ndarray
  values: np.ndarray


class StoredNode:
  """Keys and values of a prefix in a store, in chunks of tokens.

  Attributes:
    store: Store of the chunks.
    layers, heads, tokens: Numbers of these: L, K, m.
    chunk: Number of tokens of a chunk.
    probes: Number of heads whose keys are also stored separately.
    probe_heads: Numbers of these heads, int64 [L, P], rising in each layer.
    order: Token number in each place, int64 [L, m].
    nbytes: Bytes of its blocks, which `reorder` does not exceed either.
  """

  def __init__(
    self,
    store: Store,
    name: bytes,
    keys: Shaped[np.ndarray, "L K m H"] | jax.ShapeDtypeStruct,
    values: Shaped[np.ndarray, "L K m J"] | jax.ShapeDtypeStruct,
    *,
    chunk: int = 32,
    probes: int | Int[np.ndarray, "*layers P"] = 3,
  ):
    """Write a prefix to a store, or the missing parts of a stored one.

    Args:
      store: Store with room for the prefix, see `nbytes`.
      name: Unique name of the prefix, e.g. a block's digest.
      keys: Keys of all layers; or their shape, with which nothing is written,
        see `whole`.
      values: Values of all layers, or their shape.
      chunk: Number of tokens of a chunk.
      probes: Number of heads, the first ones; of models with fewer, all. Or
        heads, int [P] of every layer or [L, P].

    Raises:
      OptionError: If probes are not heads of the layers.
    """
    self.store, self._name = store, bytes(name)
    self.layers, self.heads, self.tokens, self._key = keys.shape
    self._value = values.shape[-1]
    self._dtypes = {"k": keys.dtype, "v": values.dtype, "probe": keys.dtype}
    self.chunk = positive_int("chunk", chunk)
    self.probe_heads = heads_of_layers(probes, self.layers, self.heads)
    self.probes = self.probe_heads.shape[1]
    self.order = np.tile(np.arange(self.tokens), (self.layers, 1))
    self._lock = threading.Lock()
    of_keys, of_values = (
      math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in (keys, values)
    )
    of_probes = of_keys // self.heads * self.probes
    self.nbytes = of_keys + of_values + of_probes + 4 * self.order.size
    for layer in range(self.layers):
      self._recall(layer)
    if not isinstance(keys, np.ndarray) or not isinstance(values, np.ndarray):
      return
    # Mark the stored blocks as used now, or they would be evicted first.
    for layer in range(self.layers):
      store.request([*self._fixed(layer), *self._chunks(layer)])
    for layer in range(self.layers):
      heads = self.probe_heads[layer]
      self._put(self._id(layer, "probe"), keys[layer, heads])
      self._put(self._id(layer, "order"), self.order[layer].astype(np.int32))
      self._write(layer, keys[layer], values[layer])

  @property
  def whole(self) -> bool:
    """Whether the store has all of its blocks."""
    return all(
      key in self.store
      for layer in range(self.layers)
      for key in [*self._fixed(layer), *self._chunks(layer)]
    )

  def _recall(self, layer: int) -> None:
    """Read the order in which a layer's tokens are stored, if it is there."""
    payload = self.store.get(self._id(layer, "order"))
    if payload is not None and len(payload) == 4 * self.tokens:
      order = np.frombuffer(payload, np.int32).astype(np.int64)
      if (np.sort(order) == np.arange(self.tokens)).all():
        self.order[layer] = order

  def _write(self, layer: int, keys: np.ndarray, values: np.ndarray) -> None:
    """Put a layer's chunks, in its order."""
    for n in range(-(-self.tokens // self.chunk)):
      at = self.order[layer, n * self.chunk : (n + 1) * self.chunk]
      self._put(self._id(layer, "k", n), keys[:, at])
      self._put(self._id(layer, "v", n), values[:, at])

  def _fixed(self, layer: int) -> list[bytes]:
    """Keys of the probe and order blocks of a layer."""
    return [self._id(layer, part) for part in ("probe", "order")]

  def _chunks(self, layer: int) -> list[bytes]:
    """Keys of a layer's chunks in the current order."""
    every = range(-(-self.tokens // self.chunk))
    return [self._id(layer, part, n) for n in every for part in ("k", "v")]

  def _id(self, layer: int, part: str, n: int = 0) -> bytes:
    """Key of a block.

    A chunk's key includes its tokens and their order, so that it never stands
    for other content.
    """
    text = f"impress {self.layers} {self.heads} {self.tokens} "
    text += f"{self._dtypes} {self._key} {self._value} {layer} {part} {n} "
    if part == "probe":
      heads = self.probe_heads[layer].tolist()
      first = heads == list(range(self.probes))
      text += f"{self.probes} " if first else f"{heads} "
    at = b""
    if part in ("k", "v"):
      order = self.order[layer, n * self.chunk : (n + 1) * self.chunk]
      at = order.astype("<i4").tobytes()
    digest = hashlib.sha256(at).digest()
    return hashlib.sha256(text.encode() + digest + self._name).digest()

  def _put(self, key: bytes, x: np.ndarray) -> None:
    payload = np.ascontiguousarray(x).tobytes()
    self.store.put(key, payload)
    if key not in self.store:
      # The write queue was full: wait for it and try again.
      self.store.flush()
      self.store.put(key, payload)

  def _get(self, layer: int, part: str, n: int, heads: int) -> np.ndarray:
    payload = self.store.get(self._id(layer, part, n))
    if payload is None:
      raise MissingChunk(f"layer {layer}, {part} {n}")
    size = self._value if part == "v" else self._key
    flat = np.frombuffer(payload, self._dtypes[part])
    return flat.reshape(heads, -1, size)

  def probe_keys(
    self, layer: int, count: ImpressCounters
  ) -> Shaped[np.ndarray, "P m H"]:
    """Keys of the probe heads, [P, m, H]."""
    self.store.request(self._fixed(layer))
    keys = self._get(layer, "probe", 0, self.probes)
    self._count(count, self.probes * self.tokens, keys)
    count.chunks += 1
    count.chunk_bytes += keys.nbytes
    return keys

  def read(
    self,
    layer: int,
    part: str,
    tokens: Shaped[np.ndarray, "K k"],
    count: ImpressCounters,
    *,
    counted: int | None = None,
  ) -> Shaped[np.ndarray, "K _ H"]:
    """Read keys ("k") or values ("v") of tokens of each head, [K, k, H].

    Args:
      layer: Number of the layer.
      part: "k" or "v".
      tokens: Token numbers of each head, [K, k].
      count: Counters to update.
      counted: Number of heads to count; default: all.
    """
    with self._lock:
      return self._read(layer, part, tokens, count, counted)

  def _read(
    self,
    layer: int,
    part: str,
    tokens: Shaped[np.ndarray, "K k"],
    count: ImpressCounters,
    counted: int | None,
  ) -> np.ndarray:
    place = np.empty(self.tokens, np.int64)
    place[self.order[layer]] = np.arange(self.tokens)
    at = place[tokens]
    size = self._value if part == "v" else self._key
    vectors = np.empty((*tokens.shape, size), self._dtypes[part])
    head = np.arange(self.heads)[:, None]
    chunks = np.unique(at // self.chunk).tolist()
    self.store.request([self._id(layer, part, n) for n in chunks])
    for n in chunks:
      block = self._get(layer, part, n, self.heads)
      in_chunk = at // self.chunk == n
      chunk_vectors = block[
        np.broadcast_to(head, at.shape)[in_chunk], at[in_chunk] % self.chunk
      ]
      vectors[in_chunk] = chunk_vectors
      count.chunks += 1
      count.chunk_bytes += block.nbytes
    heads = self.heads if counted is None else counted
    self._count(count, heads * tokens.shape[1], vectors)
    return vectors

  def _count(self, count: ImpressCounters, vectors: int, x: np.ndarray) -> None:
    count.vectors += vectors
    count.vector_bytes += vectors * x.shape[-1] * x.itemsize

  def reorder(self, importance: Shaped[np.ndarray, "L m"]) -> None:
    """Packs important tokens into the same chunks, within this node.

    A layer at a time: its chunks are read, then removed, then written in the
    new order, so that the store never holds more than the node. Calls of
    other threads wait for a layer. A process that ends meanwhile leaves the
    node without some chunks of a layer, which the next one writes.

    Args:
      importance: Importance of each layer's tokens, [L, m], a mean over
        requests.

    Raises:
      ShapeError: If it is not of these layers and tokens.
      MissingChunk: If the store has evicted a part of the prefix. Layers before
        it are in their new order, the others in their old one.
    """
    importance = np.asarray(importance)
    if importance.shape != self.order.shape:
      raise ShapeError(
        "importance",
        importance.shape,
        f"{self.order.shape}: layers, tokens",
        "pass the importance of an Impress of this node",
      )
    orders = np.argsort(-importance, axis=1, kind="stable")
    for layer, order in enumerate(orders):
      with self._lock:
        if (order != self.order[layer]).any():
          self._move(layer, order)

  def _move(self, layer: int, order: np.ndarray) -> None:
    """Store a layer in another order."""
    every = np.tile(np.arange(self.tokens), (self.heads, 1))
    unused = ImpressCounters()
    keys, values = (
      self._read(layer, part, every, unused, None) for part in ("k", "v")
    )
    old_chunks = self._chunks(layer)
    self.order[layer] = order
    # A chunk with the same tokens as before stays.
    gone = set(old_chunks) - set(self._chunks(layer))
    note = self._id(layer, "order")
    self.store.remove([note, *gone])
    self._put(note, order.astype(np.int32))
    self.store.request([*self._fixed(layer), *self._chunks(layer)])
    self._write(layer, keys, values)


class NodeChain:
  """Chain of nodes that `Impress` reads as one prefix.

  A longer prefix shares the nodes of a shorter one.

  Attributes:
    nodes: Nodes with the same layers and heads, the first tokens' first.
    layers, heads, tokens: Numbers of these, as in a `StoredNode`.
    probes: Number of probe heads.
    probe_heads: Numbers of these heads, int64 [L, P], rising in each layer.
  """

  def __init__(self, nodes: Sequence[StoredNode]):
    """Chain nodes; nothing is read yet.

    Args:
      nodes: At least one, with the same layers, heads and probes.
    """
    self.nodes, first = tuple(nodes), nodes[0]
    self.layers, self.heads = first.layers, first.heads
    self.probes, self.probe_heads = first.probes, first.probe_heads
    self.tokens = sum(node.tokens for node in nodes)

  def probe_keys(
    self, layer: int, count: ImpressCounters
  ) -> Shaped[np.ndarray, "P m H"]:
    """Keys of the probe heads, [P, m, H]."""
    return np.concatenate([x.probe_keys(layer, count) for x in self.nodes], 1)

  def read(
    self,
    layer: int,
    part: str,
    tokens: Shaped[np.ndarray, "K k"],
    count: ImpressCounters,
    *,
    counted: int | None = None,
  ) -> Shaped[np.ndarray, "K _ H"]:
    """Read keys or values as `StoredNode.read`, for rising tokens of a head."""
    start, result = 0, None
    for node in self.nodes:
      inside = (tokens >= start) & (tokens < start + node.tokens)
      node_tokens = int(inside.sum(1).max())
      if node_tokens:
        # Pad heads that have fewer with a token that is read anyway.
        number = np.arange(node_tokens)
        at = np.minimum(inside.argmax(1)[:, None] + number, tokens.shape[1] - 1)
        right = number < inside.sum(1)[:, None]
        wanted = np.take_along_axis(tokens, at, 1)
        wanted = np.where(right, wanted, tokens[inside][0]) - start
        part_of_node = node.read(layer, part, wanted, count, counted=0)
        if result is None:
          shape = (*tokens.shape, part_of_node.shape[-1])
          result = np.empty(shape, part_of_node.dtype)
        result[inside] = part_of_node[right]
      start += node.tokens
    assert result is not None
    heads = self.heads if counted is None else counted
    vectors = heads * tokens.shape[1]
    count.vectors += vectors
    count.vector_bytes += vectors * result.shape[-1] * result.itemsize
    return result


class Impress:
  """Attention of new tokens over the kept part of a stored prefix.

  Attributes:
    node: Stored prefix.
    counters: Counts of loaded vectors and chunks.
    importance: Importance of tokens, float32 [L, m], a mean over all calls, for
      `reorder`.
  """

  def __init__(
    self,
    node: StoredNode | NodeChain,
    *,
    keep: int | float = 0.25,
    alpha: int | float = 0.6,
  ):
    """Set the share of tokens to keep.

    Args:
      node: Stored prefix.
      keep: Fraction of its tokens to keep, above 0, at most 1.
      alpha: Exponent of the threshold, see `overlap_threshold`.

    Raises:
      OptionError: If a value is out of range.
    """
    keep = number("keep", keep, above=0)
    if keep > 1:
      raise OptionError(
        "keep", keep, "a part, at most 1", "pass keep=1 for all tokens"
      )
    self.node = node
    self.keep, self.alpha = keep, number("alpha", alpha, least=0)
    # An excess of up to 1e-6 tokens is rounding, as in 0.1 * 30.
    self.kept = max(1, math.ceil(keep * node.tokens - 1e-6))
    self.counters = ImpressCounters()
    self.importance = np.zeros((node.layers, node.tokens), np.float32)
    self._seen = np.zeros(node.layers, np.int64)

  def attend(
    self,
    layer: int,
    q: Float[Array | np.ndarray, "T N H"],
    k: Float[Array | np.ndarray, "T K H"],
    v: Float[Array | np.ndarray, "T K J"],
    *,
    scale: int | float | None = None,
    real: int | None = None,
  ) -> tuple[Float[Array, "T N J"], KeptTokens]:
    """Attend from new tokens to the prefix's kept tokens and themselves.

    Args:
      layer: Number of the prefix's layer.
      q: Queries of the tokens after the prefix, rotated.
      k: Keys of these tokens, rotated.
      v: Values of these tokens.
      scale: Scale of the scores; default H ** -0.5.
      real: Number of tokens before padding, whose queries choose; default: all.

    Returns:
      The result [T, N, J], and the kept tokens.

    Raises:
      ShapeError: If the heads are not those of the prefix.
      MissingChunk: If the store has evicted a part of the prefix.
    """
    node, count = self.node, self.counters
    if k.shape[1] != node.heads or q.shape[1] % node.heads:
      raise ShapeError(
        "k",
        f"{k.shape[1]} heads, for {q.shape[1]} of queries",
        f"the prefix's {node.heads}, which divide those of queries",
        "pass the layer's own keys",
      )
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    groups = q.shape[1] // node.heads
    real = q.shape[0] if real is None else real
    heads = node.probe_heads[layer]
    of_probes = (heads[:, None] * groups + np.arange(groups)).ravel()
    probe_keys = node.probe_keys(layer, count)
    # If every head is a probe, all keys are loaded.
    keys = probe_keys if node.probes == node.heads else None
    sums = np.asarray(
      _column_sums(q[:, of_probes], probe_keys, k[:, heads], real, scale)
    )
    chosen = _top(sums, self.kept)
    similarity = mean_jaccard(chosen)
    threshold = overlap_threshold(self.kept / node.tokens, self.alpha)
    # If all tokens are kept, there is no choice.
    shared = similarity > threshold or self.kept == node.tokens
    if shared:
      votes = np.bincount(chosen.ravel(), minlength=node.tokens)
      # By votes, and among equals by importance.
      best = np.lexsort((-sums.sum(0), -votes))[: self.kept]
      tokens = np.tile(np.sort(best), (node.heads, 1))
    else:
      count.fallbacks += 1
      if keys is None:
        every = np.tile(np.arange(node.tokens), (node.heads, 1))
        keys = node.read(
          layer, "k", every, count, counted=node.heads - node.probes
        )
      sums = np.asarray(_column_sums(q, keys, k, real, scale))
      tokens = _top(sums, self.kept)
    if keys is None:
      old = node.read(layer, "k", tokens, count)
    else:
      old = np.take_along_axis(keys, tokens[..., None], 1)
    values = node.read(layer, "v", tokens, count)
    count.layers += 1
    mean = sums.mean(0)
    self._seen[layer] += 1
    self.importance[layer] += (mean - self.importance[layer]) / self._seen[
      layer
    ]
    kept_tokens = KeptTokens(
      tokens=tokens,
      similarity=similarity,
      threshold=threshold,
      shared=shared,
      importance=mean,
      keys=old,
      values=values,
    )
    return _attention(q, old, values, k, v, scale), kept_tokens


def heads_of_layers(
  probes: int | Int[np.ndarray, "*layers P"], layers: int, heads: int
) -> Int[np.ndarray, "L P"]:
  """Probe heads of each layer, int64 [L, P], rising.

  Args:
    probes: Number of heads, the first ones; of fewer, all. Or heads, int [P]
      of every layer or [L, P].
    layers: Number of layers, L.
    heads: Number of heads that keys have, K.

  Raises:
    OptionError: If probes are not heads of the layers.
  """
  if np.ndim(probes) == 0:
    count = min(positive_int("probes", probes), heads)
    return np.tile(np.arange(count), (layers, 1))
  head_numbers = np.sort(np.asarray(probes), axis=-1)
  if head_numbers.ndim == 1:
    head_numbers = np.tile(head_numbers, (layers, 1))
  right = (
    head_numbers.ndim == 2
    and len(head_numbers) == layers
    and head_numbers.shape[1] > 0
  )
  right = right and head_numbers.dtype.kind in "iu"
  if (
    not right
    or ((head_numbers < 0) | (head_numbers >= heads)).any()
    or (np.diff(head_numbers, axis=1) == 0).any()
  ):
    raise OptionError(
      "probes",
      f"{head_numbers.tolist()}",
      f"for each of {layers} layers different heads below {heads}",
      "pass heads of every layer, an array of layers and heads, or a number",
    )
  return head_numbers.astype(np.int64)


def _top(sums: np.ndarray, kept: int) -> np.ndarray:
  """Indices of the `kept` largest of each row, rising."""
  order = np.argsort(-sums, axis=1, kind="stable")[:, :kept]
  return np.sort(order, axis=1)


@functools.partial(jax.jit, static_argnums=4)
def _column_sums(
  q: Float[Array, "T N H"],
  old: Float[Array, "K m H"],
  new: Float[Array, "T K H"],
  real: Index,
  scale: float,
) -> jax.Array:
  """Importance [K, m] of the prefix's tokens, as the module defines it."""
  weights = _weights(q, old, new, scale)
  counts = jnp.arange(q.shape[0])[:, None] < real
  weights = jnp.where(counts, weights, 0.0)
  return weights[..., : old.shape[1]].sum((1, 2))


@functools.partial(jax.jit, static_argnums=5)
def _attention(
  q: Float[Array, "T N H"],
  old_k: Float[Array, "K m H"],
  old_v: Float[Array, "K m J"],
  k: Float[Array, "T K H"],
  v: Float[Array, "T K J"],
  scale: float,
) -> jax.Array:
  weights = _weights(q, old_k, k, scale)
  values = jnp.concatenate([old_v, jnp.swapaxes(v, 0, 1)], 1)
  attended = jnp.einsum(
    "kgts,ksj->tkgj", weights, values.astype(jnp.float32), precision="highest"
  )
  return attended.reshape(q.shape[0], q.shape[1], -1).astype(q.dtype)


def _weights(
  q: Float[Array, "T N H"],
  old: Float[Array, "K m H"],
  new: Float[Array, "T K H"],
  scale: float,
) -> jax.Array:
  """Softmax weights [K, G, T, m + T] over prefix and, causally, new tokens."""
  t, n, h = q.shape
  heads, m = old.shape[:2]
  keys = jnp.concatenate([old, jnp.swapaxes(new, 0, 1)], 1)
  q = q.reshape(t, heads, n // heads, h).astype(jnp.float32)
  scores = scale * jnp.einsum(
    "tkgh,ksh->kgts", q, keys.astype(jnp.float32), precision="highest"
  )
  seen = jnp.arange(m + t)[None] <= jnp.arange(m, m + t)[:, None]
  return jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), -1)
