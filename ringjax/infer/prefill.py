"""Prefill strategies: a prompt is read in chunks or all at once.

Guarantees: every method leaves a cache from which the same tokens follow, but
"sparse", which leaves out attention.
Memory: the cache is written in place, once; there is no second copy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from ringjax import plan as plans
from ringjax.checks import one_of, positive_int
from ringjax.config import Config, Flag, config, option
from ringjax.errors import OptionError
from ringjax.infer.tile_reading import check_layers
from ringjax.kv.base import CallCache
from ringjax.kv.cache_kind import WINDOWED, CacheConfig
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.kv.state import StateShape
from ringjax.models import work_profile
from ringjax.models.transformer import Transformer, forward
from ringjax.nn.attention_layers.choosing.indexed_attention import IndexKeys
from ringjax.nn.sharding_context import (
  CachedAttention,
  ChainParallel,
  ContextParallel,
  ShardingContext,
)
from ringjax.nn.sums.tile_sums import TileRecord
from ringjax.nn.tile_context import CachedTiles, TileParallel
from ringjax.ops.attention.dense import Dense as DenseLocal
from ringjax.ops.attention.strategies.chain import Chain
from ringjax.ops.attention.strategies.gather import Gather
from ringjax.ops.attention.strategies.nesting import coded, group_of
from ringjax.ops.attention.strategies.registry import PREFILLS, find
from ringjax.ops.attention.strategies.strategy import Strategy
from ringjax.ops.attention.strategies.wire_format import (
  DTYPES,
  Wire,
  WireLike,
  wire_of,
)
from ringjax.ops.attention.tiles.patterns import PATTERNS, pattern_of
from ringjax.ops.attention.tiles.tile_pattern import TilePattern
from ringjax.parallel.layout import Contiguous, Layout, Striped, Uneven
from ringjax.parallel.programs import bounded
from ringjax.plan import cost
from ringjax.plan.choice import KEEPS, Cluster
from ringjax.typing import Lengths

# Methods of one device, by their strategy on one shard.
_UNSHARDED: dict[str, Strategy] = {
  "dense": Gather(DenseLocal()),
  "blockwise": Gather(),
}
METHODS = ("auto", *_UNSHARDED, *PREFILLS, "kvr", "chunked")
# Prefix of the methods that read chosen tiles, before a pattern's text.
_SPARSE = "sparse"
# Methods of a sharded sequence that can read chosen tiles, the default first,
# and the strategy of `tile_attention`.
_TILED = {
  "striped": "ring",
  "ring": "ring",
  "zigzag": "ring",
  "ulysses": "ulysses",
}
# Largest part of a prompt's slots that may be padding of whole blocks.
_BLOCK_PADDING = 8
# FLOPs of a TPU v5p's chip in the time of a byte on one of its links, in one
# direction: 459e12 and 9e10 a second.
_FLOPS_OF_A_BYTE = 5_100
# Default number of tokens of a chunk.
_CHUNK = 4096
# A chain's parts of a sequence are multiples of this many tokens.
_TILE = 128


class PromptStrategy(NamedTuple):
  """Strategy with which a method reads a whole prompt.

  Fields:
    layout: Order of the tokens on the shards; that of the chain is planned for
      each prompt.
    strategy: Strategy, without its axis.
    sharded: Whether it shards the sequence.
    wired: Whether keys may be sent in a lossy format.
  """

  layout: Layout
  strategy: Strategy
  sharded: bool
  wired: bool


def strategy_of(method: str) -> PromptStrategy:
  """Find the strategy of a method in the table of strategies.

  Raises:
    OptionError: If the method reads no whole prompt.
  """
  if method in _UNSHARDED:
    return PromptStrategy(Contiguous(), _UNSHARDED[method], False, False)
  one_of("prefill", method, (*PREFILLS, "kvr"))
  entry = find("chain" if method == "kvr" else method)
  assert entry is not None
  return PromptStrategy(entry.layout, entry.strategy, True, entry.wired)


class PromptCall(NamedTuple):
  """A call's tokens of some prompts, in the order of the shards.

  Fields:
    tokens: Token ids, int32 [B, T].
    pos: Positions, int32 [B, T], or None for those of the layout.
    seg: Segments, int32 [B, T], 0 for padding.
    rows: Index of each prompt's last token among the T, int32 [B].
    ends: Whether a prompt's last token is among the T, bool [B].
    read_tokens: Number of tokens of the longest prompt that are read after this
      call.
  """

  tokens: np.ndarray
  pos: np.ndarray | None
  seg: np.ndarray
  rows: np.ndarray
  ends: np.ndarray
  read_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill:
  """Resolved strategy by which a prompt is read.

  Attributes:
    name: Method, one of `METHODS` but not "auto", or "sparse".
    attend: Sharding context that the model is called with.
    chunk: Number of tokens of a chunk, of which the last can have fewer; None
      for all at once.
    width: Number of tokens that the compiled calls read in all, with padding.
    slots: Number of cache slots that they fill on each shard at most.
    why: Reason for the choice, as text.
    layout: Distribution of a call's tokens over the shards. Chunks are striped,
      so that the tokens of a short row are spread evenly over the shards; for
      recurrent layers they are consecutive.
    pattern: Choice of the tiles that are read; None: all.
  """

  name: str
  attend: ShardingContext
  chunk: int | None
  width: int
  slots: int
  why: str
  layout: Layout
  pattern: TilePattern | None = None

  def slots_taken(
    self, lengths: Int[np.ndarray, " B"]
  ) -> Int[np.ndarray, "B R"]:
    """Count the slots that prompts of lengths [B] take per shard, [B, R]."""
    slots: Any = 0
    for first, order in self._orders():
      offsets = order.reshape(self.attend.size, -1)
      present = (offsets >= 0) & (first + offsets < lengths[:, None, None])
      slots = slots + np.max(present * np.arange(1, offsets.shape[1] + 1), 2)
    return slots

  def calls(
    self, prompts: Sequence[np.ndarray], start: np.ndarray
  ) -> Iterator[PromptCall]:
    """Yield the arguments of the calls of `read` that read prompts, in order.

    Args:
      prompts: Token ids of each prompt, int32 [T].
      start: Position of each prompt's first token, int [B].
    """
    lengths = np.array([prompt.size for prompt in prompts])
    longest = int(lengths.max())
    for first, order in self._orders():
      columns = np.flatnonzero(order >= 0)
      # Index, among the call's tokens, of each token in prompt order.
      column_of = np.zeros(order.size, np.int32)
      column_of[order[columns]] = columns
      index = first + order
      seg = (order >= 0) & (index < lengths[:, None])
      tokens = np.zeros(seg.shape, np.int32)
      for row, prompt, present in zip(tokens, prompts, seg, strict=True):
        row[present] = prompt[index[present]]
      last = lengths - 1 - first
      yield PromptCall(
        tokens=tokens,
        pos=None
        if self.chunk is None
        else (start[:, None] + index).astype(np.int32),
        seg=seg.astype(np.int32),
        rows=column_of[np.clip(last, 0, order.size - 1)],
        ends=(last >= 0) & (last < order.size),
        read_tokens=min(first + order.size, longest),
      )

  def _orders(self) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each call's first token and its tokens relative to it; -1: none."""
    step = self.chunk or self.width
    for first in range(0, self.width, step):
      size = min(step, self.width - first)
      yield first, self.layout.padded_order(size, self.attend.size)


@config
class PrefillConfig(Config):
  """Options for reading prompts.

  Raises:
    OptionError: If a name is unknown, or options contradict each other.
  """

  method: str = option(
    'Method that reads the prompt: "auto", "dense", "blockwise" (one device); '
    '"ring", "striped", "zigzag", "bidirectional", "gather", "ulysses", '
    '"hybrid", "kvr" (a sharded sequence; on one shard they all are '
    '"blockwise", and the report says so); "chunked" (either); '
    '"sparse:xattention,threshold=0.9", the tiles that a pattern chooses '
    "(`rj.tile_attention`), with a chunk on one device; on a sharded sequence "
    'striped, or as "sparse-ring:...", "sparse-zigzag:..." and '
    '"sparse-ulysses:..." say.',
    default="auto",
    override="prefill",
    flag=Flag(
      f"How the prompt is read: {', '.join(METHODS)}, or "
      f"{_SPARSE}:PATTERN,key=value of the patterns {', '.join(PATTERNS)} "
      f"({_SPARSE}-METHOD: on a sharded sequence, {', '.join(_TILED)})."
    ),
  )
  chunk: int | None = option(
    "Maximum number of tokens in a chunk of a chunked prefill.",
    default=None,
    flag=Flag("Tokens of a chunk, for --prefill=chunked.", kind="whole"),
  )
  partition: Sequence[int] | None = option(
    'Number of tokens of each shard for "kvr", KV-Runahead\'s chain (Cho et '
    "al. 2024, arXiv 2405.05329); default: shards have equal work.",
    default=None,
  )
  machine: Cluster | None = option(
    "The model's cost on these devices and their links, by which "
    'prefill="auto" then chooses (`rj.plan.choose`); the report has the '
    'reasons. Default: "striped" on a sharded sequence. Refused where only one '
    "method works, with a chunk or with recurrent layers on a sharded "
    "sequence.",
    default=None,
  )
  keep: str = option(
    'Location of the cache after the prompt is read: "sharded" over the '
    'sequence\'s axis, on which all devices decode, or on the "last" device '
    "of that axis, which then decodes alone, with its own copy of the weights.",
    default=KEEPS[0],
    flag=Flag(
      "Where the KV cache is kept: all devices, or the last, which decodes.",
      choices=KEEPS,
    ),
  )
  wire: WireLike | None = option(
    "Transfer format of keys and values while a prompt is read on several "
    'shards: "cache", the bytes that the cache stores, encoded once; a codec '
    "or a dtype, see `Ring`; None: unchanged. Each query sees the exact keys "
    "of its own shard.",
    default=None,
    flag=Flag(
      "How keys travel while shards read the prompt: cache: as what --cache "
      "stores; or as numbers of a dtype.",
      choices=("cache", *DTYPES),
    ),
  )

  def __post_init__(self) -> None:
    leave = "leave it out for the default, or pass one of these"
    if self.pattern is None:
      one_of("prefill", self.method, METHODS, remedy=leave)
    one_of("keep", self.keep, KEEPS, remedy=leave)
    if self.chunk is not None:
      object.__setattr__(self, "chunk", positive_int("chunk", self.chunk))
    if not self.sends_stored:
      _ = self.wire_format
    if isinstance(self.partition, list | np.ndarray):
      object.__setattr__(self, "partition", tuple(self.partition))
    machine = self.machine
    if machine is not None and not isinstance(machine, Cluster):
      raise OptionError(
        "machine",
        type(machine).__name__,
        "an rj.plan.Cluster",
        "pass rj.plan.Cluster(profile=..., network=...)",
      )
    for name, methods in (
      ("machine", ("auto",)),
      ("partition", ("kvr",)),
      ("chunk", ("chunked", "auto", _SPARSE)),
    ):
      value, method = getattr(self, name), self.method
      if self.pattern is not None:
        method = _SPARSE
      if value is not None and method not in methods:
        raise OptionError(
          name,
          f"{'one' if value is machine else value} with "
          f"prefill={self.method!r}",
          f"prefill={methods[0]!r}",
          f"leave {name}= or prefill= out",
        )
    if machine is not None and self.chunk is not None:
      raise OptionError(
        "machine",
        f"one with chunk={self.chunk!r}",
        "no chunk, which leaves it nothing to choose",
        "leave chunk= or machine= out",
      )

  @property
  def pattern(self) -> TilePattern | None:
    """Choice of the tiles that are read; None: all.

    Raises:
      OptionError: If there is no such pattern, or it has no such option.
    """
    name, _, text = str(self.method).partition(":")
    if self.tiled_method is None:
      return None
    return pattern_of(text, "prefill", f"{name}:")

  @property
  def tiled_method(self) -> str | None:
    """Method of a sharded sequence whose tiles are chosen; None: not "sparse".

    Raises:
      OptionError: If chosen tiles can't be read by that method.
    """
    name, _, _ = str(self.method).partition(":")
    prefix, dash, method = name.partition("-")
    if prefix != _SPARSE:
      return None
    if not dash:
      return next(iter(_TILED))
    return one_of(f"prefill={_SPARSE}-METHOD: METHOD", method, tuple(_TILED))

  @property
  def sends_stored(self) -> bool:
    """Whether keys and values travel as the cache stores them."""
    return isinstance(self.wire, str) and self.wire == "cache"

  @property
  def wire_format(self) -> Wire | None:
    """Transfer format of keys and values; None: unchanged.

    Raises:
      OptionError: If the wire is unknown.
    """
    return None if self.wire is None else wire_of(self.wire)

  def plan(
    self,
    tokens: int,
    model: Transformer,
    mesh: Mesh | None,
    axis: str | None,
    *,
    room: int | None = None,
    behind: bool = False,
    kind: CacheConfig = WINDOWED,
  ) -> Prefill:
    """Resolves the method for a prompt.

    On one shard there is nothing to send: every method that shards the
    sequence is then "blockwise", which computes the same, and `Prefill.why`
    says so.

    Args:
      tokens: Number of tokens of the longest prompt.
      model: Model that reads the prompt.
      mesh: Mesh, None for one device.
      axis: Mesh axis that shards the sequence, or None.
      room: Free tokens of the cache, if there is one already.
      behind: Whether the cache holds tokens, which the prompt has to see.
      kind: Kind of the cache. Where older tokens go to the hosts' memory,
        "auto" reads in chunks each prompt that is longer than the part that
        stays on the devices, and every prompt if they are stored by a codec: a
        row is read as if it were alone.

    Raises:
      OptionError: If the method does not fit the mesh, the model or the cache,
        or a machine is given where there is no choice.
    """
    size = 1
    if axis is not None:
      assert mesh is not None
      size = mesh.shape[axis]
    pattern = self.pattern
    if pattern is not None:
      check_layers(model)
      tiled = self.tiled_method
      assert tiled is not None
      if self.wire_format is not None and size > 1:
        raise OptionError(
          "wire",
          f"{self.wire_format} with prefill={self.method!r}",
          "a method that sends all keys in one format",
          "leave wire out, or pass prefill='striped'",
        )
      dense_method = "blockwise" if size == 1 else tiled
      if behind or self.chunk is not None:
        dense_method = "chunked"
        _check_chunks(size, kind)
      dense = dataclasses.replace(self, method=dense_method).plan(
        tokens, model, mesh, axis, room=room, behind=behind, kind=kind
      )
      return _with_tiles(dense, pattern, _TILED[tiled], room)
    recurrent = any(isinstance(kind, StateShape) for kind in model.kinds)
    width = padded(tokens, size, room)
    name, partition, why = self._resolved(
      width, model, size, recurrent, behind, kind
    )
    wired = name != "chunked" and strategy_of(name).wired
    if self.wire_format is not None and size > 1 and not wired:
      raise OptionError(
        "wire",
        f"{self.wire_format} with prefill={name!r} ({why})",
        "a method that sends keys from shard to shard",
        "pass prefill='striped', for instance, or leave wire out",
      )
    alone = self.wire_format is not None and size == 1
    note = "; one shard sends nothing" if alone else ""
    if name == "chunked":
      max_chunk = self.chunk
      if max_chunk is None and kind.tier.device is not None:
        max_chunk = min(_CHUNK, kind.tier.device)
      chunk, width = chunks(tokens, size, max_chunk, room)
      return Prefill(
        name=name,
        attend=CachedAttention(mesh=mesh, axis=axis, replicated=False),
        chunk=chunk,
        width=width,
        slots=width // size,
        why=why + note,
        layout=Contiguous() if recurrent else Striped(),
      )
    chain = name == "kvr"
    layout, strategy, sharded, _ = strategy_of(name)
    if recurrent and size > 1 and chain:
      raise OptionError(
        "prefill",
        f"{name!r} for a model with recurrent layers",
        "even shards, over which their state goes on",
        "pass prefill='ring' or 'striped', or leave it out",
      )
    slots, counts = width // size, (width,)
    if chain:
      counts = _partition(model, tokens, width, size, partition)
      width, slots = sum(counts), max(counts)
      if partition is None:
        why = f"parts of {counts} tokens, computed from FLOPs"
    if size == 1 and sharded:
      why = f"{name!r} was asked for, and on one shard it is this"
      name = "blockwise"
      layout, strategy, sharded, _ = strategy_of(name)
    if name == "kvr":
      attend: ContextParallel = ChainParallel(
        mesh=mesh,
        axis=axis,
        layout=Uneven(counts),
        strategy=Chain(wire=self.wire_format),
      )
    else:
      if not sharded and size > 1:
        raise OptionError(
          "prefill",
          f"{name!r} on a mesh whose {axis!r} has {size} shards",
          "a method that shards the sequence, or one device",
          "pass prefill='striped', or no mesh",
        )
      if name == "hybrid":
        _check_groups(model, strategy, size)
      if self.wire_format is not None and size > 1:
        strategy = coded(strategy, self.wire_format)
      attend = ContextParallel(
        mesh=mesh, axis=axis, layout=layout, strategy=strategy
      )
    return Prefill(
      name=name,
      attend=attend,
      chunk=None,
      width=width,
      slots=slots,
      why=why + note,
      layout=attend.layout,
    )

  def _resolved(
    self,
    width: int,
    model: Transformer,
    size: int,
    recurrent: bool,
    behind: bool,
    kind: CacheConfig,
  ) -> tuple[str, Sequence[int] | None, str]:
    """Resolve "auto": the method, its partition, and the reason as text."""
    name, machine = self.method, self.machine
    if machine is not None:
      machine.profile.check_layers(len(model.config.layers))
      if recurrent and size > 1:
        raise OptionError(
          "machine",
          "one for a model with recurrent layers",
          "none: on a sharded sequence 'auto' counts their FLOPs and bytes",
          "leave it out",
        )
    if behind and name not in ("auto", "chunked"):
      raise OptionError(
        "prefill",
        f"{name!r} into a cache that holds tokens",
        "'chunked', which sees them",
        "pass prefill='auto'",
      )
    if name != "auto":
      return name, self.partition, "as asked"
    if behind:
      return "chunked", None, "it continues a conversation"
    if self.chunk is not None:
      return "chunked", None, "a chunk size was given"
    device_tokens = kind.tier.device
    longer = device_tokens is not None and (
      width > device_tokens or kind.codec is not None
    )
    if longer and machine is None:
      return (
        "chunked",
        None,
        f"{device_tokens} tokens of a row stay on the devices",
      )
    if size > 1 and recurrent:
      return _ring_or_striped(model, width, size)
    if size == 1:
      why = "one shard"
      if machine is not None:
        why += ": the machine leaves nothing to choose"
      return "blockwise", None, why
    if machine is None:
      why = f"{size} shards: striped keeps all busy in every hop"
      return "striped", None, why
    choice = plans.choose(
      machine,
      cost.Prompt(tokens=width, window=work_profile.window(model)),
      size,
      keep=self.keep,
      tile=tile(width, size),
    )
    name = choice.way.method
    partition = choice.way.lengths if name == "kvr" else None
    return name, partition, "; ".join(choice.why)


def _ring_or_striped(
  model: Transformer, width: int, size: int
) -> tuple[str, None, str]:
  """Method for recurrent layers beside attention, of prompts of `width`.

  Contiguous shards keep a recurrent layer's tokens in order, and the last one
  has twice the mean work of causal attention. Stripes have equal work; then the
  inputs and outputs of each recurrent layer are sent to another shard, over a
  quarter of a ring on average, whose links go both ways.
  """
  pair, sent = 0.0, 0
  for layer in model.config.layers:
    if layer.attention.reach is None:
      pair += layer.pair_flops
  for kind in model.kinds:
    if isinstance(kind, StateShape):
      # Inputs of convolutions, else queries, keys and values themselves.
      inputs = kind.convolved or (
        *((kind.heads, kind.key),) * 2,
        (kind.heads, kind.value),
      )
      # Outputs are as wide as the values, which come last.
      value_heads, dim = inputs[-1]
      numbers = sum(n * size for n, size in inputs) + value_heads * dim
      token_bytes = np.dtype(model.dtype).itemsize * numbers
      # Rates and gates are float32; those of single channels are not sent.
      token_bytes += 8 * kind.heads if kind.heads == value_heads else 0
      sent += kind.layers * token_bytes
  # Per token: the mean work is a query's half of the keys.
  saved = pair * width / 2
  if saved > sent * max(1, size / 8) * _FLOPS_OF_A_BYTE:
    return (
      "striped",
      None,
      f"stripes save {saved:.2g} FLOPs a token, and send {sent:,} bytes",
    )
  return (
    "ring",
    None,
    f"stripes would send {sent:,} bytes a token for recurrent layers, and "
    f"save {saved:.2g} FLOPs",
  )


def _with_tiles(
  dense: Prefill, pattern: TilePattern, strategy: str, room: int | None
) -> Prefill:
  """Plan that reads the tiles of a pattern, from the one that reads all.

  Args:
    dense: Plan that reads all tiles.
    pattern: Choice of the tiles.
    strategy: Strategy of `tile_attention` on a sharded sequence.
    room: Free tokens of the cache, if there is one already.
  """
  if pattern.keeps_all:
    return dataclasses.replace(
      dense, why=f"{_SPARSE!r} was asked for, with all tiles: it is this"
    )
  place = dict(mesh=dense.attend.mesh, axis=dense.attend.axis)
  why = f"by {pattern}"
  if dense.chunk is not None:
    attend: TileParallel | CachedTiles = CachedTiles(pattern=pattern, **place)
    return dataclasses.replace(
      dense, name=_SPARSE, attend=attend, pattern=pattern, why=why
    )
  if strategy == "ring" and dense.attend.size > 1:
    dense = _in_blocks(dense, pattern.block, room)
    why += f", {dense.name} over {dense.layout}"
  attend = TileParallel(
    pattern=pattern, layout=dense.layout, tile_strategy=strategy, **place
  )
  return dataclasses.replace(
    dense, name=_SPARSE, attend=attend, pattern=pattern, why=why
  )


def _in_blocks(dense: Prefill, block: int, room: int | None) -> Prefill:
  """Plan whose shards hold whole blocks of tokens, if there is room for it.

  Else `tile_attention` exchanges tokens in each layer.
  """
  size, layout, width = dense.attend.size, dense.layout, dense.width
  if isinstance(layout, Striped):
    layout = Striped(block)
  else:
    multiple = size * block * (1 if isinstance(layout, Contiguous) else 2)
    width = -(-width // multiple) * multiple
  slots = layout.local_length(width, size)
  max_slots = dense.width + dense.width // _BLOCK_PADDING
  if slots * size > (max_slots if room is None else min(max_slots, room)):
    return dense
  return dataclasses.replace(dense, layout=layout, width=width, slots=slots)


def _check_chunks(size: int, kind: CacheConfig) -> None:
  """Refuses chunks of chosen tiles where a shard or a tier has some keys."""
  got = None
  if size > 1:
    got = f"after keys on {size} shards, each of which has some"
  elif kind.tier.device is not None:
    got = f"after keys in host memory, as of {kind}"
  if got is not None:
    raise OptionError(
      "prefill",
      f"{_SPARSE!r} {got}",
      "one device with all keys, or a whole prompt without chunk=",
      "pass prefill='chunked'",
    )


def _check_groups(model: Transformer, strategy: Any, size: int) -> None:
  """Refuses a number of shards without groups that divide the KV heads."""
  mixers = (mixer for layer in model.config.layers for mixer in layer.mixers)
  for mixer in mixers:
    # An index's keys are scored where they are, or gathered.
    if isinstance(mixer, IndexKeys):
      continue
    if not isinstance(mixer.cache_shape(1), LayerCacheSpec):
      continue
    spec: Any = mixer
    # Latent attention is expanded where keys travel.
    heads = getattr(spec, "kv_heads", spec.heads)
    try:
      group_of(strategy, size, heads)
    except OptionError:
      raise OptionError(
        "prefill",
        f"'hybrid' on {size} shards for {heads} kv heads",
        "groups of two shards or more, but not all, which share the heads",
        "pass prefill='striped' or 'ulysses', or use another mesh",
      ) from None


def _partition(
  model: Transformer,
  tokens: int,
  width: int,
  shards: int,
  given: Sequence[int] | None,
) -> tuple[int, ...]:
  """Partition a prompt over a chain's shards, as given or by FLOPs."""
  if given is None:
    shares = plans.balanced(
      work_profile.profile(model, width), cost.Prompt(tokens=width), shards
    )
    return plans.round_to_tiles(shares, width, tile(width, shards))
  are_counts = isinstance(given, Sequence | np.ndarray) and all(
    isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0
    for n in given
  )
  if not are_counts or len(given) != shards or sum(given) < tokens:
    raise OptionError(
      "partition",
      f"{given}, in all {sum(given) if are_counts else '?'}",
      f"{shards} positive ints that add up to at least {tokens}",
      "leave it out, or see python -m ringjax.launch.plan kvr",
    )
  return tuple(int(n) for n in given)


def tile(tokens: int, shards: int) -> int:
  """Tile size in tokens, of which a chain's parts are multiples."""
  return max(1, min(_TILE, tokens // (4 * shards)))


def chunks(
  tokens: int, shards: int, most: int | None, room: int | None = None
) -> tuple[int, int]:
  """Tokens of a chunk, a multiple of the shards, and of all chunks together.

  A chunk has as many tokens as `most` allows, however long the prompt is: each
  row of a batch is cut as if it were alone. The last chunk has one of few
  sizes, so that turns share programs; it is shorter if the room is too small.
  """

  def round_up(n: int) -> int:
    return -(-n // shards) * shards

  chunk = round_up(_CHUNK if most is None else most)
  earlier_tokens = max(0, tokens - 1) // chunk * chunk
  last = min(chunk, padded(tokens - earlier_tokens, shards))
  if room is not None and earlier_tokens + last > room:
    last = max(
      round_up(tokens - earlier_tokens),
      (room - earlier_tokens) // shards * shards,
    )
  return min(chunk, earlier_tokens + last), earlier_tokens + last


def padded(tokens: int, shards: int, room: int | None = None) -> int:
  """Round a length up to one of 8 per octave, so that few are compiled.

  The result is a multiple of 8 tokens per shard. Where the room is smaller than
  that, it is the room, or what the tokens take at least.
  """
  multiple = 8 * shards
  step = max(multiple, 1 << max(0, tokens.bit_length() - 4))
  step = -(-step // multiple) * multiple
  length = -(-max(tokens, 1) // step) * step
  if room is None or length <= room:
    return length
  # Two tokens a shard suit every layout.
  unit = 2 * shards if shards > 1 else 1
  return max(-(-tokens // unit), room // unit) * unit


@bounded
@functools.partial(
  jax.jit, static_argnums=(1,), donate_argnums=(5,), keep_unused=True
)
def read(
  model: Transformer,
  attend: ShardingContext,
  tokens: Int[Array, "B T"],
  pos: Int[Array, "B T"] | None,
  seg: Int[Array, "B T"],
  cache: CallCache,
  rows: Int[Array, " B"],
  length: Lengths,
) -> tuple[Float[Array, "B V"], Any]:
  """Compiled call: logits after the tokens at `rows`, and the cache.

  `length` is that of the whole context or of each row's prompt, for rotations
  that depend on it.
  """
  logits, cache = forward(
    model, attend, tokens, pos, seg, cache, rows[:, None], length
  )
  return attend.everywhere(logits[:, 0]), cache


@bounded
@functools.partial(
  jax.jit, static_argnums=(1,), donate_argnums=(5,), keep_unused=True
)
def read_tiles(
  model: Transformer,
  attend: TileParallel | CachedTiles,
  tokens: Int[Array, "B T"],
  pos: Int[Array, "B T"] | None,
  seg: Int[Array, "B T"],
  cache: CallCache,
  rows: Int[Array, " B"],
  length: Lengths,
) -> tuple[Float[Array, "B V"], Any, Any]:
  """Compiled call as `read`, which also returns `Tokens.recorded`."""
  sums: list[Any] = []
  logits, cache = forward(
    model, attend, tokens, pos, seg, cache, rows[:, None], length,
    record=(TileRecord, sums),
  )  # fmt: skip
  return attend.everywhere(logits[:, 0]), cache, attend.everywhere(sums)
