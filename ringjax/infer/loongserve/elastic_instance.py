"""One elastic instance: a whole model, and slots for tokens of any requests.

A group of instances reads prompts by a ring: blocks of keys and values pass
from each to the next, and an instance keeps the passing tokens that a plan
assigns to it, so that the group may then be smaller without any transfer.
To decode, each row has a master in its group: the master runs the layers and
keeps the new tokens' keys; it sends queries to the instances that hold other
keys of the row, and gets partials back. Keys that do move (`move`) are counted.

Guarantees: a group computes the model's own attention, whichever instance keeps
which token; a message that does not arrive ends the call with a `PeerError`,
and the slots that were filled before are unchanged.
Cost: reading sends a ring's blocks, without padding, (k - 1) times each;
a step sends N H numbers of each row and layer to each other holder and gets
N (J + 2) float32 back.
Memory: the weights, and `slots` tokens of all layers: windows keep all tokens.
Ref: Wu et al. 2024, LoongServe (SOSP), arXiv 2404.09526, section 4.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from ringjax.checks import positive_int
from ringjax.errors import ConfigError, PeerError
from ringjax.infer.finite import or_not_finite
from ringjax.infer.layerwise import LayerPrograms, TokensAt
from ringjax.models.transformer import Transformer
from ringjax.models.weights.weight_placement import refuse_placed
from ringjax.ops.softmax import Partial
from ringjax.parallel.links.array_messages import ArrayMessage
from ringjax.parallel.links.connection import HostileMessageError

# Programs are compiled for sizes that are powers of two from these on.
_FEW_TOKENS, _FEW_ROWS = 16, 4


@runtime_checkable
class Post(Protocol):
  """Exchange of messages between the instances of a group during a call."""

  def send(
    self, target: int, kind: str, arrays: Sequence[np.ndarray], **fields: Any
  ) -> int:
    """Sends arrays to an instance; returns the bytes with the header."""
    ...

  def take(self, source: int, kind: str) -> ArrayMessage:
    """Waits for the next message of a kind from an instance.

    Raises:
      PeerError: If the instance is gone, or the call was abandoned.
    """
    ...


@dataclasses.dataclass(frozen=True)
class ReadPrompts:
  """A call that has a group read prompts.

  Attributes:
    group: Numbers of the instances, in the order of the ring.
    requests: Number of each prompt's request, int [R].
    lengths: Number of tokens in each prompt, int [R].
    tokens: Token ids of all prompts one after another, int32 [T].
    owners: Number of the instance that keeps each token, int32 [T].
  """

  group: tuple[int, ...]
  requests: Int[np.ndarray, " R"]
  lengths: Int[np.ndarray, " R"]
  tokens: Int[np.ndarray, " T"]
  owners: Int[np.ndarray, " T"]


@dataclasses.dataclass(frozen=True)
class StepRows:
  """A call that has a group decode rows.

  Attributes:
    group: Numbers of the instances.
    steps: Number of tokens to generate for each row.
    requests: Number of each row's request, int [R].
    masters: Number of the instance that computes each row and keeps its new
      tokens, int [R].
    tokens: Last token of each row, whose keys are not computed yet, int32 [R].
    pos: Position of that token, int32 [R].
    holds: 1 where an instance holds keys of a row, int32 [R, G].
  """

  group: tuple[int, ...]
  steps: int
  requests: Int[np.ndarray, " R"]
  masters: Int[np.ndarray, " R"]
  tokens: Int[np.ndarray, " R"]
  pos: Int[np.ndarray, " R"]
  holds: Int[np.ndarray, "R G"]


@dataclasses.dataclass(frozen=True)
class MoveKeys:
  """A call that moves keys away from an instance, in parts.

  Attributes:
    source: Number of the instance that sends the keys.
    targets: Number of the instance that takes each part, int [n].
    requests: Number of the request of each part's keys, int [n].
    counts: Number of tokens in each part, int [n]; lowest positions go first.
  """

  source: int
  targets: Int[np.ndarray, " n"]
  requests: Int[np.ndarray, " n"]
  counts: Int[np.ndarray, " n"]


class SlotPool:
  """Slots for tokens of any requests, in each layer.

  Attributes:
    pos: Position of each slot's token, int32 [S].
    seg: Number of its request plus 1, int32 [S]; 0 in free slots.
  """

  def __init__(self, programs: LayerPrograms, slots: int, dtype: DTypeLike):
    """Makes empty slots.

    Args:
      programs: Programs of the model's layers.
      slots: Number of slots, S.
      dtype: Dtype of keys and values.
    """
    self.pos, self.seg = np.zeros((2, slots), np.int32)
    self._layers: list[tuple[jax.Array, jax.Array]] = []
    for layer in programs.layers:
      spec: Any = layer.spec.attention
      shape = (1, spec.kv_heads, slots, spec.head_dim)
      k, v = (jnp.zeros(shape, dtype) for _ in range(2))
      self._layers.append((k, v))

  @property
  def size(self) -> int:
    """Number of slots."""
    return self.seg.size

  def __getitem__(
    self, layer: int
  ) -> tuple[Shaped[Array, "1 K S H"], Shaped[Array, "1 K S H"]]:
    """Keys and values [1, K, S, H] of a layer."""
    return self._layers[layer]

  def at(self) -> TokensAt:
    """Coordinates of the token in each slot."""
    return TokensAt(jnp.array(self.pos), jnp.array(self.seg), np.int32(1))

  def slots_of(self, request: int, first: int = 0) -> Int[np.ndarray, " n"]:
    """Slots of a request's tokens from a position on, in order of position."""
    slots = np.flatnonzero((self.seg == request + 1) & (self.pos >= first))
    return slots[np.argsort(self.pos[slots], kind="stable")]

  def place(
    self, seg: Int[np.ndarray, " n"], pos: Int[np.ndarray, " n"]
  ) -> Int[np.ndarray, " n"]:
    """Allocates a free slot for each token.

    Raises:
      PeerError: If there are too few free slots.
    """
    free = np.flatnonzero(self.seg == 0)[: seg.size]
    if free.size < seg.size:
      raise PeerError(f"{seg.size} tokens for {free.size} free slots")
    self.seg[free], self.pos[free] = seg, pos
    return free

  def free(self, slots: Int[np.ndarray, " n"]) -> None:
    """Marks slots as free."""
    self.seg[slots] = 0

  def write(
    self,
    layer: int,
    k: Shaped[Array | np.ndarray, "1 K T H"],
    v: Shaped[Array | np.ndarray, "1 K T H"],
    slots: Int[np.ndarray, " n"],
  ) -> None:
    """Writes keys and values of token t into `slots[t]`; the rest is padding.

    Tokens whose slot number is out of range are dropped.
    """
    place = np.full(k.shape[2], self.size, np.int32)
    place[: slots.size] = slots
    self._layers[layer] = _written(*self._layers[layer], k, v, place)

  def read(
    self, layer: int, slots: Int[np.ndarray, " n"]
  ) -> tuple[Shaped[np.ndarray, "1 K n H"], Shaped[np.ndarray, "1 K n H"]]:
    """Reads keys and values [1, K, n, H] of slots, as NumPy arrays."""
    index = np.zeros(_power(slots.size, _FEW_ROWS), np.int32)
    index[: slots.size] = slots
    k, v = jax.device_get(_taken(*self._layers[layer], index))
    return k[:, :, : slots.size], v[:, :, : slots.size]


class ElasticInstance:
  """An instance, which runs its part of a group's calls.

  Attributes:
    number: Number of the instance.
    pool: Slots of the instance.
    sent: Bytes sent to other instances, with headers, by kind: "ring", "query",
      "partial" and "moved".
  """

  def __init__(
    self,
    model: Transformer,
    number: int,
    slots: int,
    *,
    programs: LayerPrograms | None = None,
  ):
    """Makes empty slots.

    Args:
      model: Model on one device.
      number: Number of this instance.
      slots: Number of tokens that it has room for.
      programs: Programs of the model from another instance of this process;
        default: new ones.

    Raises:
      ConfigError: If layers keep more than keys and values, or rotations depend
        on a context's length.
    """
    self.number = number
    self.programs = instance_programs(model) if programs is None else programs
    self.pool = SlotPool(
      self.programs, positive_int("slots", slots), model.dtype
    )
    self.sent: collections.Counter[str] = collections.Counter()
    self._dtype, self._embed = model.dtype, model.config.embed

  def drop(self, requests: Sequence[int], first: Sequence[int]) -> None:
    """Frees the slots of requests' tokens from the given positions on."""
    for request, start in zip(requests, first, strict=True):
      self.pool.free(self.pool.slots_of(request, start))

  # -------------------------------------------------------------------------
  # Reading
  # -------------------------------------------------------------------------

  def read(self, call: ReadPrompts, post: Post) -> dict[int, int]:
    """Reads this instance's part of the prompts.

    Returns:
      First new token by request, for the prompts whose last token is in this
      part.
    """
    group, size = call.group, len(call.group)
    rank, total = group.index(self.number), call.tokens.size
    seg = np.repeat(call.requests, call.lengths).astype(np.int32) + 1
    ends = np.cumsum(call.lengths)
    pos = np.arange(total, dtype=np.int32)
    pos -= np.repeat(ends - call.lengths, call.lengths).astype(np.int32)
    width = _power(-(-total // size), _FEW_TOKENS)
    counts = [len(range(n, total, size)) for n in range(size)]
    spans, slots = [], []
    for n in range(size):
      part = slice(n, total, size)
      spans.append(_span(pos[part], seg[part], width))
      keep_mask = call.owners[part] == self.number
      place = np.full(counts[n], self.pool.size)
      place[keep_mask] = self.pool.place(
        seg[part][keep_mask], pos[part][keep_mask]
      )
      slots.append(place)
    programs = self.programs
    ids = np.zeros((1, width), np.int32)
    ids[0, : counts[rank]] = call.tokens[rank::size]
    x = programs.embed(ids)
    next_instance, previous_instance = group[(rank + 1) % size], group[rank - 1]
    for layer, weights in programs.walk(stacked=True):
      number = layer.number
      q, k, v = programs.project(
        layer.spec, weights, x, spans[rank], self._dtype
      )
      partial = None
      for hop in range(size):
        source = (rank - hop) % size
        if hop + 1 < size:
          block = [np.asarray(y)[:, :, : counts[source]] for y in (k, v)]
          self.sent["ring"] += post.send(
            next_instance, "block", block, layer=number
          )
        # Tokens of this instance are stored as their block passes by.
        self.pool.write(number, k, v, slots[source])
        partial = programs.partial(
          layer.spec, weights, q, k, v, spans[rank], spans[source], partial
        )
        if hop + 1 < size:
          message = post.take(previous_instance, "block")
          shape = (*k.shape[:2], counts[(source - 1) % size], k.shape[3])
          k, v = (
            _padded(y, width) for y in _checked(message, number, shape, 2)
          )
      x = programs.finish_partial(
        layer.spec, weights, x, (partial,), spans[rank]
      )
    last = ends - 1
    local_prompts = np.flatnonzero(last % size == rank)
    tokens = self._chosen(x, last[local_prompts] // size)
    return dict(zip(call.requests[local_prompts].tolist(), tokens, strict=True))

  # -------------------------------------------------------------------------
  # Answering
  # -------------------------------------------------------------------------

  def step(self, call: StepRows, post: Post) -> dict[int, list[int]]:
    """Decodes the rows of this master, and attends for other masters.

    Returns:
      New tokens by request, for the rows of which this instance is the master.
    """
    group, rank = call.group, call.group.index(self.number)
    # Rows of each master, and whether an instance holds keys of such rows.
    rows = {m: np.flatnonzero(call.masters == m) for m in group}
    helps = lambda g, m: bool(call.holds[rows[m], group.index(g)].any())
    # Each instance begins with the next one, so that their work is spread.
    others = [*group[rank + 1 :], *group[:rank]]
    masters = [m for m in others if helps(self.number, m)]
    helpers = [g for g in others if helps(g, self.number)]
    local_rows = rows[self.number]
    seg = call.requests.astype(np.int32) + 1
    token, tokens_by_step = call.tokens[local_rows], []
    programs, pool = self.programs, self.pool
    for step in range(call.steps):
      pos = (call.pos + step).astype(np.int32)
      spans = {
        m: _span(pos[rows[m]], seg[rows[m]], _power(rows[m].size, _FEW_ROWS))
        for m in (self.number, *masters)
      }
      span, x = spans[self.number], None
      slots = pool.place(seg[local_rows], pos[local_rows])
      if local_rows.size:
        ids = np.zeros((1, span.pos.size), np.int32)
        ids[0, : local_rows.size] = np.maximum(token, 0)
        x = programs.embed(ids)
      keys = pool.at()
      for layer, weights in programs.walk(stacked=True):
        number = layer.number
        run = functools.partial(programs.partial, layer.spec, weights)
        parts = []
        q = None
        if local_rows.size:
          q, k, v = programs.project(layer.spec, weights, x, span, self._dtype)
          pool.write(number, k, v, slots)
          query = [np.asarray(q)[:, : local_rows.size]]
          for g in helpers:
            self.sent["query"] += post.send(g, "query", query, layer=number)
          parts.append(run(q, *pool[number], span, keys, None))
        spec: Any = layer.spec.attention
        heads = spec.kv_heads, spec.heads // spec.kv_heads
        for m in masters:
          message = post.take(m, "query")
          shape = (1, rows[m].size, spec.heads, spec.head_dim)
          (peer_queries,) = _checked(message, number, shape, 1)
          peer_queries = _padded(peer_queries, spans[m].pos.size, 1)
          part = jax.device_get(
            run(peer_queries, *pool[number], spans[m], keys, None)
          )
          self.sent["partial"] += post.send(
            m, "partial", [y[:, :, :, : rows[m].size] for y in part],
            layer=number,
          )  # fmt: skip
        for g in helpers:
          message = post.take(g, "partial")
          acc = (1, *heads, local_rows.size, spec.head_dim)
          parts.append(_partial(message, number, acc, span.pos.size))
        if local_rows.size:
          x = programs.finish_partial(
            layer.spec, weights, x, tuple(parts), span
          )
      if local_rows.size:
        token = self._chosen(x, np.arange(local_rows.size))
        tokens_by_step.append(token)
    tokens = (
      np.array(tokens_by_step, np.int32)
      .reshape(len(tokens_by_step), local_rows.size)
      .T.tolist()
    )
    return dict(zip(call.requests[local_rows].tolist(), tokens, strict=True))

  def _chosen(self, x: Any, rows: Int[np.ndarray, " n"]) -> list[int]:
    """Most probable token after each of the given rows of x [1, T, D]."""
    index = np.zeros(_power(rows.size, _FEW_ROWS), np.int32)
    index[: rows.size] = rows
    logits = self.programs.head(_last(x, index), np.int32(0))
    return np.asarray(_greedy(logits))[: rows.size].tolist()

  # -------------------------------------------------------------------------
  # Moving
  # -------------------------------------------------------------------------

  def move(self, call: MoveKeys, post: Post) -> None:
    """Sends or takes keys; the source frees slots once the keys are stored."""
    layers = range(len(self.programs.layers))
    if self.number != call.source:
      message = post.take(call.source, "keys")
      seg, pos, *keys = message.arrays
      flat = seg.ndim == 1 and seg.shape == pos.shape
      if not flat or len(keys) != 2 * len(layers):
        raise HostileMessageError("keys of another model")
      slots = self.pool.place(seg, pos)
      width = _power(seg.size, _FEW_ROWS)
      for n in layers:
        k, v = (_padded(y, width) for y in keys[2 * n : 2 * n + 2])
        self.pool.write(n, k, v, slots)
      post.send(call.source, "stored", [])
      return
    slots_by_target: dict[int, list[np.ndarray]] = {}
    num_moved: collections.Counter[int] = collections.Counter()
    for target, request, count in zip(
      call.targets.tolist(),
      call.requests.tolist(),
      call.counts.tolist(),
      strict=True,
    ):
      slots = self.pool.slots_of(request)[num_moved[request] :][:count]
      if slots.size < count:
        raise PeerError(f"{slots.size} of {count} tokens of request {request}")
      num_moved[request] += count
      slots_by_target.setdefault(target, []).append(slots)
    for target, parts in slots_by_target.items():
      slots = np.concatenate(parts)
      arrays = [self.pool.seg[slots], self.pool.pos[slots]]
      for n in layers:
        arrays += self.pool.read(n, slots)
      self.sent["moved"] += post.send(target, "keys", arrays)
    for target, parts in slots_by_target.items():
      post.take(target, "stored")
      self.pool.free(np.concatenate(parts))


def instance_programs(model: Transformer) -> LayerPrograms:
  """Makes the programs of an instance.

  Raises:
    ConfigError: If layers keep more than keys and values, or rotations depend
      on a context's length.
  """
  refuse_placed(model, "use it in groups", "load it onto the devices")
  if any(rope.scaling.by_length for rope in model.config.ropes):
    raise ConfigError(
      "model",
      f"{model.config.family}, whose rotations depend on a text's length",
      "rotations by position alone",
      "use rj.infer.generate, or rj.infer.ElasticSession",
    )
  programs = LayerPrograms(model)
  if any(layer.spec.cross is not None for layer in programs.layers):
    raise ConfigError(
      "model",
      f"{model.config.family}, whose layers attend to an encoder's states",
      "attention over its own keys alone",
      "use rj.infer.generate",
    )
  return programs


def block_bytes(
  programs: LayerPrograms, dtype: DTypeLike, tokens: int, instances: int
) -> int:
  """Bytes of keys and values that a ring sends for tokens, without headers."""
  token_bytes = sum(layer.token_bytes(dtype) for layer in programs.layers)
  return token_bytes * tokens * (instances - 1)


def _power(count: int, least: int) -> int:
  """The least power of two that is at least `count` and `least`."""
  return max(least, 1 << max(0, count - 1).bit_length())


def _span(
  pos: Int[np.ndarray, " n"], seg: Int[np.ndarray, " n"], width: int
) -> TokensAt:
  fill = lambda x: np.pad(x, (0, width - x.size)).astype(np.int32)
  return TokensAt(fill(pos), fill(seg), np.int32(1))


def _padded(x: np.ndarray, width: int, axis: int = 2) -> np.ndarray:
  pad = [(0, 0)] * x.ndim
  pad[axis] = (0, width - x.shape[axis])
  return np.pad(x, pad)


def _checked(
  came: ArrayMessage, layer: int, shape: tuple[int, ...], count: int
) -> tuple[np.ndarray, ...]:
  """Checks a message; returns its `count` arrays of the given shape.

  Raises:
    HostileMessageError: If number, shapes or layer differ.
  """
  shapes = [x.shape for x in came.arrays]
  if came.fields.get("layer") != layer or shapes != [shape] * count:
    raise HostileMessageError(
      f"{came.kind} of layer {came.fields.get('layer')}, {shapes}, where layer "
      f"{layer} has {count} of {shape}"
    )
  return came.arrays


def _partial(
  came: ArrayMessage, layer: int, shape: tuple[int, ...], width: int
) -> Partial:
  """Checks a message; returns its partial, padded to `width` queries."""
  shapes = [x.shape for x in came.arrays]
  if came.fields.get("layer") != layer or shapes != [
    shape, shape[:-1], shape[:-1]
  ]:  # fmt: skip
    raise HostileMessageError(f"partials of layer {layer}: {shapes}")
  acc, m, total = (jnp.asarray(_padded(x, width, 3)) for x in came.arrays)
  return Partial(acc, m, total)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _written(
  k: Shaped[Array, "1 K S H"],
  v: Shaped[Array, "1 K S H"],
  new_k: Shaped[Array, "1 K T H"],
  new_v: Shaped[Array, "1 K T H"],
  slots: Int[Array, " T"],
) -> tuple[jax.Array, jax.Array]:
  put = lambda old, new: old.at[:, :, slots].set(
    new.astype(old.dtype), mode="drop"
  )
  return put(k, new_k), put(v, new_v)


@jax.jit
def _taken(
  k: Shaped[Array, "1 K S H"],
  v: Shaped[Array, "1 K S H"],
  slots: Int[Array, " n"],
) -> tuple[jax.Array, jax.Array]:
  return k[:, :, slots], v[:, :, slots]


@jax.jit
def _last(x: Float[Array, "1 T D"], rows: Int[Array, " n"]) -> jax.Array:
  """Rows of x [1, T, D] as a batch [n, 1, D]."""
  return x[0, rows][:, None]


@jax.jit
def _greedy(logits: Float[Array, "n V"]) -> jax.Array:
  return or_not_finite(jnp.argmax(logits, -1).astype(jnp.int32), logits)
