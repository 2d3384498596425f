"""Load only the tokens of a stored prefix that a query attends to: IMPRESS.

Guarantees: with keep=1 the result is attention over the whole prefix. In what
order tokens are stored changes nothing but the chunks that are read. Counters
are of vectors that the algorithm needs, and of chunks that it read for them.
Cost: of a layer the keys of a few probe heads, then keys and values of the
kept tokens; or, where the probes do not agree, the keys of all heads. Where all
heads are probes, no keys are loaded twice.
Lossy: what is not kept is left out of the softmax.

A prefix is a node: its tokens' keys and values, layer by layer, in chunks of
tokens, each of which is a block of a `Store`. The keys of the probe heads are
stored once more, on their own, and so is the order of each layer's tokens: a
node of the same name finds it again, whenever the process before it ended.

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError, ShapeError
from ringjax.store.prefix_store import Store


class MissingChunk(LookupError):
  """A chunk of a prefix is not in the store any more: compute it anew."""


def overlap_threshold(part: int | float, alpha: int | float) -> float:
  """Similarity above which probes are believed.

  Args:
    part: of the tokens that are kept, k / n.
    alpha: 1 is what random sets have in common, 0 is equality.
  """
  return (part / (2 - part)) ** alpha


def mean_jaccard(sets: Shaped[np.ndarray, "P k"]) -> float:
  """The mean Jaccard index of all pairs of sets; of one set it is 1."""
  groups = [set(row.tolist()) for row in sets]
  found = [
    len(a & b) / len(a | b) for a, b in itertools.combinations(groups, 2)
  ]
  return sum(found) / len(found) if found else 1.0


def vectors_of_all(heads: int, tokens: int, kept: int) -> int:
  """Vectors to load where all heads' keys choose: keys, and kept values."""
  return heads * tokens + heads * kept


def vectors_of_probes(heads: int, tokens: int, kept: int, probes: int) -> int:
  """The same where probes choose: theirs, then keys and values of the kept."""
  return probes * tokens + 2 * heads * kept


@dataclasses.dataclass(kw_only=True)
class ImpressCounters:
  """What was loaded.

  Attributes:
    layers: that were attended to.
    fallbacks: of these, layers whose probes did not agree.
    vectors: keys and values that the algorithm needs, of one head each.
    vector_bytes: theirs.
    chunks: blocks that were read for them, those of probe heads too.
    chunk_bytes: theirs.
  """

  layers: int = 0
  fallbacks: int = 0
  vectors: int = 0
  vector_bytes: int = 0
  chunks: int = 0
  chunk_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptTokens:
  """Which tokens of the prefix a layer keeps.

  Attributes:
    tokens: int64 [K, k], rising in each head.
    similarity: of the probes.
    threshold: that it was compared with.
    shared: whether all heads keep the same.
    importance: float32 [m], of each token, the mean of the heads that were
      looked at.
    keys: [K, k, H], those of the tokens, as they are stored.
    values: [K, k, J], theirs.
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
    store: where the chunks are.
    layers, heads, tokens: L, K, m.
    chunk: tokens of a chunk.
    probes: heads whose keys are stored on their own too.
    probe_heads: int64 [L, P], which ones, rising in each layer.
    order: int64 [L, m], which token is in which place.
    nbytes: bytes of its blocks, which `reorder` does not exceed either.
  """

  def __init__(
    self,
    store: Store,
    name: bytes,
    keys: Shaped[np.ndarray, "L K m H"] | jax.ShapeDtypeStruct,
    values: Shaped[np.ndarray, "L K m J"] | jax.ShapeDtypeStruct,
    *,
    chunk: int = 32,
    probes: int | Int[np.ndarray, "L P"] = 3,
  ):
    """Writes a prefix to a store, or what is missing of one that is there.

    Args:
      store: large enough for it, see `nbytes`.
      name: what tells it from other prefixes, e.g. a block's digest.
      keys: of all layers; their shape alone writes nothing, see `whole`.
      values: of all layers, or their shape.
      chunk: tokens of a chunk.
      probes: Number of heads, the first ones; of models with fewer, all. Or
        the heads of each layer.

    Raises:
      OptionError: probes that are no heads of the layers.
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
    # What is there already counts as used now, or it would go before the rest.
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
    """Takes the order in which a layer's tokens are in the store already."""
    payload = self.store.get(self._id(layer, "order"))
    if payload is not None and len(payload) == 4 * self.tokens:
      order = np.frombuffer(payload, np.int32).astype(np.int64)
      if (np.sort(order) == np.arange(self.tokens)).all():
        self.order[layer] = order

  def _write(self, layer: int, keys: np.ndarray, values: np.ndarray) -> None:
    """Puts a layer's chunks, in its order."""
    for n in range(-(-self.tokens // self.chunk)):
      at = self.order[layer, n * self.chunk : (n + 1) * self.chunk]
      self._put(self._id(layer, "k", n), keys[:, at])
      self._put(self._id(layer, "v", n), values[:, at])

  def _fixed(self, layer: int) -> list[bytes]:
    """Keys of the blocks that every call needs, or every process."""
    return [self._id(layer, part) for part in ("probe", "order")]

  def _chunks(self, layer: int) -> list[bytes]:
    """Keys of a layer's chunks in the order of now."""
    every = range(-(-self.tokens // self.chunk))
    return [self._id(layer, part, n) for n in every for part in ("k", "v")]

  def _id(self, layer: int, part: str, n: int = 0) -> bytes:
    """The key of a block. That of a chunk tells its tokens, and their order,
    so that no other content is ever found under it."""
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
      # Too much was waiting to be written.
      self.store.flush()
      self.store.put(key, payload)

  def _get(self, layer: int, part: str, n: int, heads: int) -> np.ndarray:
    found = self.store.get(self._id(layer, part, n))
    if found is None:
      raise MissingChunk(f"layer {layer}, {part} {n}")
    size = self._value if part == "v" else self._key
    flat = np.frombuffer(found, self._dtypes[part])
    return flat.reshape(heads, -1, size)

  def probe_keys(self, layer: int, count: ImpressCounters) -> np.ndarray:
    """Keys of the probe heads, [P, m, H]."""
    self.store.request(self._fixed(layer))
    found = self._get(layer, "probe", 0, self.probes)
    self._count(count, self.probes * self.tokens, found)
    count.chunks += 1
    count.chunk_bytes += found.nbytes
    return found

  def read(
    self,
    layer: int,
    part: str,
    tokens: Shaped[np.ndarray, "K k"],
    count: ImpressCounters,
    *,
    counted: int | None = None,
  ) -> np.ndarray:
    """Keys ("k") or values ("v") of tokens of each head, [K, k, H].

    Args:
      layer: which one.
      part: "k" or "v".
      tokens: of each head.
      count: gets what was loaded.
      counted: heads that are counted; default: all.
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
    found = np.empty((*tokens.shape, size), self._dtypes[part])
    head = np.arange(self.heads)[:, None]
    chunks = np.unique(at // self.chunk).tolist()
    self.store.request([self._id(layer, part, n) for n in chunks])
    for n in chunks:
      block = self._get(layer, part, n, self.heads)
      mine = at // self.chunk == n
      taken = block[
        np.broadcast_to(head, at.shape)[mine], at[mine] % self.chunk
      ]
      found[mine] = taken
      count.chunks += 1
      count.chunk_bytes += block.nbytes
    heads = self.heads if counted is None else counted
    self._count(count, heads * tokens.shape[1], found)
    return found

  def _count(self, count: ImpressCounters, vectors: int, x: np.ndarray) -> None:
    count.vectors += vectors
    count.vector_bytes += vectors * x.shape[-1] * x.itemsize

  def reorder(self, importance: Shaped[np.ndarray, "L m"]) -> None:
    """Packs tokens that matter into the same chunks, inside of this node.

    A layer at a time: its chunks are read, then removed, then written in the
    new order, so that the store never holds more than the node. Calls of
    other threads wait for a layer. A process that ends meanwhile leaves the
    node without some chunks of a layer, which the next one writes.

    Args:
      importance: of each layer's tokens, a mean over requests.

    Raises:
      ShapeError: it is not of these layers and tokens.
      MissingChunk: the store has let a part of the prefix go. Layers before
        it are in their new order, the others in the one that they had.
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
    """Stores a layer in another order."""
    every = np.tile(np.arange(self.tokens), (self.heads, 1))
    unused = ImpressCounters()
    keys, values = (
      self._read(layer, part, every, unused, None) for part in ("k", "v")
    )
    before = self._chunks(layer)
    self.order[layer] = order
    # A chunk that has the same tokens as before stays.
    gone = set(before) - set(self._chunks(layer))
    note = self._id(layer, "order")
    self.store.remove([note, *gone])
    self._put(note, order.astype(np.int32))
    self.store.request([*self._fixed(layer), *self._chunks(layer)])
    self._write(layer, keys, values)


class NodeChain:
  """Nodes one behind another, which `Impress` reads as one prefix.

  A longer prefix shares the nodes of a shorter one.

  Attributes:
    nodes: Nodes with the same layers and heads, the first tokens' first.
    layers, heads, tokens: Numbers of these, as of a `StoredNode`.
    probes: Number of probe heads.
    probe_heads: int64 [L, P], which ones, rising in each layer.
  """

  def __init__(self, nodes: Sequence[StoredNode]):
    """Reads nothing yet.

    Args:
      nodes: At least one, with the same layers, heads and probes.
    """
    self.nodes, first = tuple(nodes), nodes[0]
    self.layers, self.heads = first.layers, first.heads
    self.probes, self.probe_heads = first.probes, first.probe_heads
    self.tokens = sum(node.tokens for node in nodes)

  def probe_keys(self, layer: int, count: ImpressCounters) -> np.ndarray:
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
  ) -> np.ndarray:
    """See `StoredNode.read`; the tokens of a head are rising."""
    start, result = 0, None
    for node in self.nodes:
      inside = (tokens >= start) & (tokens < start + node.tokens)
      most = int(inside.sum(1).max())
      if most:
        # Heads with fewer name one that is read anyhow.
        number = np.arange(most)
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
    node: the prefix.
    counters: what was loaded.
    importance: float32 [L, m], a mean over all calls, for `reorder`.
  """

  def __init__(
    self,
    node: StoredNode | NodeChain,
    *,
    keep: int | float = 0.25,
    alpha: int | float = 0.6,
  ):
    """Without calls yet.

    Args:
      node: the prefix.
      keep: part of its tokens, above 0, at most 1.
      alpha: see `overlap_threshold`.

    Raises:
      OptionError: a value is out of its range.
    """
    keep = number("keep", keep, above=0)
    if keep > 1:
      raise OptionError(
        "keep", keep, "a part, at most 1", "pass keep=1 for all tokens"
      )
    self.node = node
    self.keep, self.alpha = keep, number("alpha", alpha, least=0)
    # Less than a token above a whole number is rounding, as of 0.1 * 30.
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
  ) -> tuple[jax.Array, KeptTokens]:
    """Attention of new tokens over the prefix's kept ones and themselves.

    Args:
      layer: of the prefix.
      q: queries of the tokens behind the prefix, rotated.
      k: their keys, rotated.
      v: their values.
      scale: of the scores; default H ** -0.5.
      real: Tokens before padding, by whose queries is chosen; default: all.

    Returns:
      The result [T, N, J], and what was kept.

    Raises:
      ShapeError: heads that are not those of the prefix.
      MissingChunk: the store has let a part of the prefix go.
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
    # Where every head is a probe, all keys are there.
    keys = probe_keys if node.probes == node.heads else None
    sums = np.asarray(
      _column_sums(q[:, of_probes], probe_keys, k[:, heads], real, scale)
    )
    chosen = _top(sums, self.kept)
    similarity = mean_jaccard(chosen)
    threshold = overlap_threshold(self.kept / node.tokens, self.alpha)
    # Of all tokens nothing has to be chosen.
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
    kept = KeptTokens(
      tokens=tokens,
      similarity=similarity,
      threshold=threshold,
      shared=shared,
      importance=mean,
      keys=old,
      values=values,
    )
    return _attention(q, old, values, k, v, scale), kept


def heads_of_layers(
  probes: int | Int[np.ndarray, "L P"], layers: int, heads: int
) -> np.ndarray:
  """The probe heads of each layer, int64 [L, P], rising.

  Args:
    probes: Number of heads, the first ones; of fewer, all. Or those of each
      layer.
    layers: Number of layers, L.
    heads: Number of heads that keys have, K.

  Raises:
    OptionError: probes that are no heads of the layers.
  """
  if np.ndim(probes) == 0:
    count = min(positive_int("probes", probes), heads)
    return np.tile(np.arange(count), (layers, 1))
  given = np.sort(np.asarray(probes), axis=-1)
  right = given.ndim == 2 and len(given) == layers and given.shape[1] > 0
  right = right and given.dtype.kind in "iu"
  if (
    not right
    or ((given < 0) | (given >= heads)).any()
    or (np.diff(given, axis=1) == 0).any()
  ):
    raise OptionError(
      "probes",
      f"{given.tolist()}",
      f"for each of {layers} layers different heads below {heads}",
      "pass an array of layers and heads, or their number",
    )
  return given.astype(np.int64)


def _top(sums: np.ndarray, kept: int) -> np.ndarray:
  """The `kept` largest of each row, by their numbers, rising."""
  order = np.argsort(-sums, axis=1, kind="stable")[:, :kept]
  return np.sort(order, axis=1)


@functools.partial(jax.jit, static_argnums=4)
def _column_sums(
  q: Any, old: Any, new: Any, real: Any, scale: float
) -> jax.Array:
  """Importance [K, m] of the prefix's tokens, see the top of the file."""
  weights = _weights(q, old, new, scale)
  counts = jnp.arange(q.shape[0])[:, None] < real
  weights = jnp.where(counts, weights, 0.0)
  return weights[..., : old.shape[1]].sum((1, 2))


@functools.partial(jax.jit, static_argnums=5)
def _attention(
  q: Any, old_k: Any, old_v: Any, k: Any, v: Any, scale: float
) -> jax.Array:
  weights = _weights(q, old_k, k, scale)
  values = jnp.concatenate([old_v, jnp.swapaxes(v, 0, 1)], 1)
  found = jnp.einsum(
    "kgts,ksj->tkgj", weights, values.astype(jnp.float32), precision="highest"
  )
  return found.reshape(q.shape[0], q.shape[1], -1).astype(q.dtype)


def _weights(q: Any, old: Any, new: Any, scale: float) -> jax.Array:
  """[K, G, T, m + T]: over prefix and, causally, the new tokens."""
  t, n, h = q.shape
  heads, m = old.shape[:2]
  keys = jnp.concatenate([old, jnp.swapaxes(new, 0, 1)], 1)
  q = q.reshape(t, heads, n // heads, h).astype(jnp.float32)
  scores = scale * jnp.einsum(
    "tkgh,ksh->kgts", q, keys.astype(jnp.float32), precision="highest"
  )
  seen = jnp.arange(m + t)[None] <= jnp.arange(m, m + t)[:, None]
  return jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), -1)
