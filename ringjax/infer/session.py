"""The cache of a conversation, kept between calls of `generate`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import Bool, Int

from ringjax.checks import positive_int
from ringjax.errors import MemoryEstimateError, MeshError, OptionError
from ringjax.infer import prefill
from ringjax.infer.tile_reading import TileReport
from ringjax.kv import cache_kind as kinds
from ringjax.kv.base import bytes_each
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.codecs import Codec
from ringjax.kv.composed.row_groups import RowGroups
from ringjax.kv.offload.cache_files import CacheFiles, TransferEvent
from ringjax.kv.offload.hot_pages import PageFetches
from ringjax.models.transformer import Transformer
from ringjax.models.weights.weight_placement import (
  WeightPlacement,
  refuse_placed,
)
from ringjax.nn.attention_layers.attention_function import (
  DenseFunction,
  FunctionAttention,
  check_function,
)
from ringjax.nn.sharding_context import CachedAttention, ShardingContext
from ringjax.nn.weights.placed_layers import naming_faults
from ringjax.parallel import memory
from ringjax.parallel.call_sharding import sequence_axis
from ringjax.parallel.local_arrays import here
from ringjax.parallel.memory import device_free_bytes
from ringjax.parallel.mesh import automatic, entering
from ringjax.parallel.programs import bounded

if TYPE_CHECKING:
  from ringjax.infer.contexts.behind_contexts import ContextReport
  from ringjax.infer.speculate.drafter import Drafter
  from ringjax.infer.speculate.paces import Paces
  from ringjax.infer.speculate.rounds import SpeculationReport

_KNOBS = (
  "shard the sequence over more devices, read the prompt in parts (chunk=), or "
  "make a smaller cache"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateReport:
  """Sizes, methods and memory of a call of `generate`.

  Attributes:
    prefill: Strategy that read the prompt.
    prompt_tokens: Number of tokens of the longest prompt.
    new_tokens: Number of decoding steps.
    shards: Number of shards of the sequence.
    cache_bytes: Bytes of the cache on each device.
    capacity: Number of tokens that the cache has room for.
    cache_kind: Kind of the cache.
    contexts: Report of the use of contexts, a `ContextReport`, or None.
    speculation: Report of speculative decoding, a `SpeculationReport`, or None.
    memory: Peak bytes by memory ("device": of each one; "host", "disk": in all)
      and by use: "weights", "cache", "hidden", and on devices "work"; buffers
      in transit included. See `CallMemory`.
    tiles: Tiles that were computed of the prompt, and the attention that they
      leave out, by layer, where a pattern chose them; or None.
    fetches: Pages of host memory that the answer's tokens chose, a
      `PageFetches`; None for kinds of caches without `hot`.
  """

  prefill: prefill.Prefill
  prompt_tokens: int
  new_tokens: int
  shards: int
  cache_bytes: int
  capacity: int
  cache_kind: kinds.CacheConfig
  contexts: ContextReport | None = None
  speculation: SpeculationReport | None = None
  memory: Mapping[str, Mapping[str, int]] = dataclasses.field(
    default_factory=dict
  )
  tiles: TileReport | None = None
  fetches: PageFetches | None = None


class Session:
  """A conversation: a cache, the last token of each row, and the ids seen.

  A session is bound to the weights that filled its cache: other weights cannot
  continue it, until `restart`. The number of tokens it holds is stored in the
  cache alone.

  After an interrupted call (Ctrl-C, an exception of `progress` or `stream`) the
  session holds the tokens read so far: `lengths` is their number, and the next
  call continues after them. A call that is interrupted while a program writes
  the cache loses the cache, and so does any interrupted call in a run of
  several processes: later calls raise an error, until `restart`. So do calls
  after one in which the logits of a row were not finite: its keys may be NaN.

  Rotations that depend on the length of the context (dynamic, longrope) are
  those of a context of `capacity` tokens, in every call, whatever the mesh and
  the kind of cache. A call without a session rotates by its prompt's length,
  see `generate`.

  Attributes:
    capacity: Number of tokens of the whole conversation, as requested.
    cache: Cache of keys and values, with room for a few tokens more.
    seen: Mask of the ids that each row has read or generated, bool [B, V], for
      a repetition penalty.
    ids: Token id at each position, int32 [B, n], -1 where unknown.
    last: Report of the last call.
    drafting: Draft model's state and cache of the last call, which the next
      call continues; or None.
    paces: Drafter of the last call and its `Paces`, or None.
    tiles: Tiles that the last prompt read, where a pattern chose them, or None.
    attention_fn: Attention function used in place of the library's, or None.
  """

  @entering(lambda _, *given, **options: _mesh_of(*given, **options))
  def __init__(
    self,
    model: Transformer,
    capacity: int,
    *,
    batch: int = 1,
    mesh: Mesh | None = None,
    axis: str | None = None,
    dtype: DTypeLike | None = None,
    cache_kind: CacheConfig | str = "dense",
    rows_at_once: int | None = None,
    cache_placement: WeightPlacement | str | None = None,
    hidden_placement: WeightPlacement | str | None = None,
    disk: str | os.PathLike[str] | None = None,
    attention_fn: DenseFunction | None = None,
    grow: int | None = None,
  ):
    """Makes an empty cache.

    Args:
      model: Model whose keys and values the cache will hold.
      capacity: Number of tokens of the whole conversation, generated ones
        included.
      batch: Number of rows, B.
      mesh: The mesh; default: the model's, else the current one.
      axis: Mesh axis that shards the sequence; default "seq" if the mesh has
        one.
      dtype: Dtype of the cache: bfloat16, float16, float32 or float64; default:
        the model's.
      cache_kind: Storage of keys and values, see `Transformer.init_cache`.
      rows_at_once: Number of rows that a layer computes at a time; default:
        all. Its weights are fetched once for all of them.
      cache_placement: Memory that keeps the keys of layers that do not run:
        "device", "host", "disk", or fractions of the layers as
        "device=.2,host=.8"; default: the devices. Keys are fetched when their
        layer runs; those of at most three layers are in flight or on a device.
      hidden_placement: Fraction of the groups of rows that do not run whose
        hidden states are in "host" memory; needs `rows_at_once`.
      disk: Folder for the layers of the cache that are on disk, in unnamed
        files that are gone when the process ends.
      attention_fn: Dense attention function, which `generate` and `read` call
        in each layer, under jit, in place of the library's: with queries
        [B, T, N, H], the cache's keys [B, S, K, H] and values [B, S, K, J] as
        plain arrays, mask=bool [B, 1, T, S] and scale=, as
        `jax.nn.dot_product_attention` takes them. Layers then keep whole rows.
      grow: Number of tokens by which the cache's memory grows as tokens come
        (vAttention): its arrays are copied into larger ones of few sizes, and
        programs are compiled for each size. S is then at most this many tokens
        more than a row has reached. Layers then keep whole rows. Default:
        memory for the whole capacity, from the start.

    Raises:
      OptionError: If capacity or batch is below 1, a dtype or kind is unknown,
        placements don't go with other options, `attention_fn` can't read the
        model's cache, or the cache can't grow.
      MeshError: If the mesh is not the model's.
      MemoryEstimateError: If the cache does not fit the memory.
    """
    positive_int("batch", batch)
    self.model = model
    self.mesh, self.axis = place_of(mesh, axis, model)
    sharding = ShardingContext(mesh=self.mesh, axis=self.axis)
    check_devices(model, self.mesh)
    if rows_at_once is not None:
      positive_int("rows_at_once", rows_at_once)
    self.rows_at_once = rows_at_once
    self.capacity = positive_int("capacity", capacity)
    capacity = prefill.padded(self.capacity, sharding.size)
    kind = kinds.cache_kind(cache_kind)
    self.attention_fn = attention_fn
    if attention_fn is not None or grow is not None:
      other_options = (rows_at_once, cache_placement, hidden_placement)
      kind = _whole_rows(
        model,
        kind,
        attention_fn,
        sharding.size,
        any(x is not None for x in other_options),
      )
    self._grow = None if grow is None else positive_int("grow", grow)
    if rows_at_once is not None and kind.repeats:
      raise OptionError(
        "cache_kind",
        f"{kind}, which repeats its context, beside rows_at_once",
        "rows in groups, or this",
        "leave one of them out",
      )
    # A cache that evicts grows as tokens come.
    self._limit = capacity if kind.evicting else None
    if kind.evicting:
      # Not the session's: the choice of layers with ring buffers depends on it.
      capacity = prefill.padded(kind.least, sharding.size)
    if self._grow is not None:
      self._limit, capacity = capacity, min(self._grow, capacity)
    self._make: dict[str, Any] = dict(
      batch=batch, capacity=capacity, dtype=dtype, kind=kind
    )
    self._hidden = 0.0
    if hidden_placement is not None:
      self._hidden = _hosted(hidden_placement, rows_at_once, self.mesh)
    if cache_placement is not None:
      placement = WeightPlacement.of(cache_placement, "cache_placement")
      self._make["placement"] = placement
    self.files = files_of(cache_placement, disk)
    _check_memory(model, sharding, self._make)
    self.seen = np.zeros((batch, model.config.vocab), bool)
    self.cache = self._empty(sharding)
    self.ids = np.full((batch, self._limit or capacity), -1, np.int32)
    self.last: GenerateReport | None = None
    self.drafting: object = None
    self.paces: tuple[Drafter, Paces] | None = None
    self.tiles: TileReport | None = None
    # Last generated token of each row, and its position. They stay on the host,
    # which sees every token anyway, so that no step waits for the cache.
    self._pending_ids = np.full(batch, -1, np.int64)
    self._pending_at = np.full(batch, -1, np.int64)
    self._device = None
    # State of the contexts in use, see `context_session`.
    self.contexts = None
    # Whether the cache's contents are lost, until a restart.
    self._invalid = False
    # Rows whose logits were not finite, until a restart.
    self._not_finite: tuple[int, ...] = ()
    self.bind(model)

  def transfers(self) -> tuple[TransferEvent, ...]:
    """Transfers of weights and cache from and to disk, by start time."""
    cache_events = () if self.files is None else tuple(self.files.events)
    events = (*self.model.transfers(), *cache_events)
    return tuple(sorted(events, key=lambda event: event.start))

  @property
  def batch(self) -> int:
    """Number of rows, B."""
    return self.seen.shape[0]

  @property
  def shards(self) -> int:
    """Number of shards of the sequence."""
    return self.cache.shards

  @property
  @entering(lambda session: session.mesh)
  def lengths(self) -> Int[np.ndarray, " B"]:
    """Number of tokens read so far according to the cache, int [B].

    Waits for the program that computes it; in a run of several processes all
    of them have to call it.
    """
    sharding = ShardingContext(mesh=self.mesh, axis=self.axis)
    return np.asarray(_lengths(sharding, self.cache)).astype(np.int64)

  @property
  def pending(self) -> Int[np.ndarray, " B"]:
    """Token of each row that was generated and not read yet, or -1, int [B].

    The next turn reads it first.
    """
    return np.where(self._pending_at == self.lengths, self._pending_ids, -1)

  @pending.setter
  def pending(self, tokens: np.ndarray) -> None:
    self._pending_ids, self._pending_at = (
      np.array(tokens, np.int64),
      self.lengths,
    )

  def say(self, tokens: np.ndarray, pos: np.ndarray, rows: np.ndarray) -> None:
    """Records generated tokens [B] at positions [B], of `rows`, bool [B]."""
    self._pending_ids[rows], self._pending_at[rows] = tokens[rows], pos[rows]
    self.seen[rows, tokens[rows]] = True
    for row in np.flatnonzero(rows & (pos < self.ids.shape[1])):
      self.ids[row, pos[row]] = tokens[row]

  def heard(self, row: int, ids: np.ndarray, start: int) -> None:
    """Records the ids of a prompt whose first token is at position `start`."""
    self.seen[row, ids] = True
    row_ids = self.ids[row, start : start + len(ids)]
    row_ids[:] = ids[: len(row_ids)]

  def texts(self) -> list[Int[np.ndarray, " _"]]:
    """Known ids of each row, in order, int32 [n]."""
    rows = zip(self.ids, self.lengths, strict=True)
    return [row[:size][row[:size] >= 0] for row, size in rows]

  def take_back(self, rows: np.ndarray, end: np.ndarray) -> None:
    """Truncates rows: removes the keys at positions from `end` on.

    Args:
      rows: Rows to truncate, bool [B]; the others stay whole.
      end: New length of each row, int [B].

    Raises:
      OptionError: If the model has recurrent layers, whose state can't be
        restored.
    """
    ends = np.where(rows, end, np.iinfo(np.int32).max)
    self.cache = self.cache.truncate(ends)

  def keep_slack(self, tokens: int) -> None:
    """Record queries so that `take_back` can remove up to `tokens` tokens.

    Only caches with a policy of eviction record queries.
    """
    self.cache = self.cache.with_slack(tokens)

  def make_room(
    self,
    rows: Bool[np.ndarray, " B"],
    ended: Bool[np.ndarray, " B"] | None = None,
  ) -> None:
    """Flush the cache of `rows`, bool [B], so that more tokens fit.

    Args:
      rows: Rows to evict from.
      ended: Rows whose prompt has been read, whose heads then keep what they
        chose, see `rj.kv.FastGen`; default: all.
    """
    policy = self.cache.kind.policy
    if policy is None or not policy.choices:
      self.cache = self.cache.flush(rows)
      return
    ended = np.ones_like(rows) if ended is None else ended
    # The queries that are released are gone before pages are allocated.
    self.cache, eviction = self.cache.choose(rows, ended)
    self.cache = self.cache.apply(eviction)

  def gather(self, device: jax.Device) -> None:
    """Moves the cache to one device of its mesh, where it then stays.

    Later calls run there, with that device's copy of the weights.

    Raises:
      MeshError: If weights are sharded, or the device is another process's.
      OptionError: If some layers of the model are not on the devices.
    """
    refuse_placed(self.model, "bring it to one device", "keep='sharded'")
    model = here(self.model, device)
    self.cache = self.cache.gathered(device)
    self.model = model
    self.mesh, self.axis, self._device = None, None, device

  def weights(self, model: Transformer) -> Transformer:
    """Return the model's copy on the devices where this session runs."""
    return model if self._device is None else here(model, self._device)

  def bind(self, model: Transformer) -> None:
    """Binds the session to the weights that will fill its empty cache."""
    self._weights = [weakref.ref(array) for array in jax.tree.leaves(model)]

  def bound_to(self, model: Transformer) -> bool:
    """Whether this model's weights filled the session's cache."""
    if self._device is not None and model is self.model:
      return True
    arrays = jax.tree.leaves(model)
    return len(arrays) == len(self._weights) and all(
      reference() is array
      for reference, array in zip(self._weights, arrays, strict=True)
    )

  def hand_over(self, model: Transformer) -> None:
    """Binds the session to other weights of the same shape.

    A quantized model may read a prompt and the unquantized one decode; the
    cache's keys stay those that were read.

    Raises:
      OptionError: If the model's config is another.
    """
    if model.config != self.model.config:
      raise OptionError(
        "model",
        f"a {model.config.family} of another config",
        f"one of the session's, a {self.model.config.family}",
        "pass the model that the session was made for, or one made of it",
      )
    self.bind(model)

  @property
  def empty(self) -> bool:
    """Whether the cache holds no token."""
    return not self.lengths.any()

  def room(self) -> int:
    """Number of tokens that still fit into every row."""
    return int(self.cache.free().sum(1).min())

  @entering(lambda session: session.mesh)
  def restart(self) -> None:
    """Empties the cache; its capacity, dtype and place stay the same."""
    sharding = ShardingContext(mesh=self.mesh, axis=self.axis)
    # The old arrays go first: there may be no room for both.
    self._invalid, self.cache, self.drafting = True, None, None
    if self.files is not None:
      self.files.clear()
    with jax.default_device(self._device):
      self.cache = self._empty(sharding)
    self._pending_at[:], self.seen[:], self._invalid = -1, False, False
    self.ids[:], self._not_finite = -1, ()

  def _empty(self, sharding: ShardingContext) -> Any:
    cache: Any
    make = self._make
    if self.files is not None:
      make = make | {"disk": self.files}
    if self.rows_at_once is None:
      cache = self.model.init_cache(sharding=sharding, **make)
    else:
      options = {name: value for name, value in make.items() if name != "batch"}
      cache = RowGroups.of(
        len(self.seen),
        self.rows_at_once,
        lambda batch: self.model.init_cache(
          batch, sharding=sharding, **options
        ),
        self._hidden,
      )
    if self._limit is None:
      return cache
    if self._grow is not None:
      return cache.growing(self._grow, self._limit)
    return cache.limited(self._limit)

  def attend(self, *, replicated: bool = True) -> CachedAttention:
    """Return the sharding context by which a call attends to the cache.

    Args:
      replicated: Whether the tokens are the same on all shards.
    """
    options = dict(mesh=self.mesh, axis=self.axis, replicated=replicated)
    if self.attention_fn is None:
      return CachedAttention(**options)
    return FunctionAttention(function=self.attention_fn, **options)

  @contextlib.contextmanager
  def running(self, doing: str) -> Iterator[None]:
    """Context for programs that write the cache: recovers it after an error.

    `doing` is their purpose, for the error where memory runs out.
    """
    try:
      faults = self.model.stack.faults
      with naming_faults(faults), memory.watched(doing, _KNOBS):
        yield
    except BaseException as error:
      self.recover()
      if self.files is not None and isinstance(error, Exception):
        # JAX replaces errors raised inside a program: raise the original.
        self._invalid = self._invalid or self.files.error is not None
        self.files.raise_fault()
      raise

  def recover(self) -> None:
    """Keeps the tokens that the cache holds after an interrupted call.

    In a run of several processes the cache is lost: they may no longer agree.
    """
    leaves = jax.tree.leaves(self.cache)
    self._invalid = not all(array.is_fully_addressable for array in leaves)

  def not_finite(self, rows: Iterable[int]) -> None:
    """Records rows whose logits were not finite: `check` then refuses."""
    self._not_finite = tuple(sorted({*self._not_finite, *rows}))

  def check(self) -> None:
    """Refuses a session with a lost cache or with logits that were not finite.

    Raises:
      OptionError: If the session can't continue.
    """
    if self._not_finite:
      raise OptionError(
        "cache",
        f"a session in which logits of row(s) {[*self._not_finite]} were not "
        "finite",
        "one whose keys are finite",
        "call session.restart() and read the conversation again",
      )
    try:
      sound = not self._invalid and not self.cache.lost
      if sound:
        # An error of the program that computes it comes up here.
        self.cache.free()
    except RuntimeError:
      sound = False
    if not sound:
      raise OptionError(
        "cache",
        "a session whose cache was lost when a call was interrupted",
        "one that holds its tokens",
        "call session.restart() and read the conversation again",
      )


@bounded
@functools.partial(jax.jit, static_argnums=0)
def _lengths(sharding: ShardingContext, cache: Any) -> jax.Array:
  return sharding.everywhere(cache.length)


def _mesh_of(
  model: Any, *_: Any, mesh: Mesh | None = None, cache: Any = None, **__: Any
) -> Any:
  """Return the mesh of a call's session, `mesh=` or model, or None."""
  if isinstance(cache, Session):
    return cache.mesh
  return mesh or (model.mesh if isinstance(model, Transformer) else None)


# For f(model, ..., mesh=, cache=).
on_its_mesh = entering(_mesh_of)


def place_of(
  mesh: Mesh | None, axis: str | None, model: Transformer
) -> tuple[Any, str | None]:
  """Choose the mesh and the sequence's axis of a call.

  The mesh is the given one, else the model's, else the current one.

  Raises:
    MeshError: If the mesh lacks the axis.
  """
  if mesh is None:
    mesh = model.mesh
  if mesh is None:
    context = jax.sharding.get_mesh()
    mesh = None if context.empty else context
  if mesh is None:
    if axis is not None:
      raise MeshError(
        "axis",
        f"{axis!r} without a mesh",
        "a mesh with that axis",
        "pass mesh=rj.make_mesh((-1,), ('seq',))",
      )
    return None, None
  mesh = automatic(mesh)
  if axis is None:
    axis = sequence_axis(mesh)
  if axis is not None and axis not in mesh.axis_names:
    raise MeshError(
      "axis",
      repr(axis),
      f"one of the mesh axes {mesh.axis_names}",
      "rename the axis or pass another mesh",
    )
  return mesh, axis


def check_devices(model: Transformer, mesh: Mesh | None) -> None:
  """Refuses weights that are on other devices than those of a mesh."""
  devices = model.embed.weight.get_value().sharding.device_set
  if mesh is not None and devices != set(mesh.devices.flat):
    raise MeshError(
      "model",
      f"weights on {len(devices)} device(s)",
      f"the {mesh.devices.size} devices of the mesh",
      "load it with mesh=, or move it: rj.models.place(model, mesh)",
    )


def free_on(mesh: Mesh | AbstractMesh | None) -> tuple[int | None, int]:
  """Free bytes of a device, None if unknown, and the number of devices."""
  devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
  return device_free_bytes(devices[0], len(devices)), len(devices)


def _hosted(
  placement: WeightPlacement | str, rows: int | None, mesh: Mesh | None
) -> float:
  """Return the fraction of hidden states in host memory, after checks."""
  wanted = WeightPlacement.of(placement, "hidden_placement")
  host = float(wanted.host or 0.0)
  for refused, got, want, remedy in (
    (bool(wanted.disk), "hidden states on disk", "device and host",
     "place them in host memory: they are small"),
    (host and rows is None, "hidden states elsewhere, of all rows at once",
     "rows in groups", "pass rows_at_once="),
    (host and mesh is not None and mesh.devices.size > 1,
     "hidden states elsewhere, on a mesh", "one device",
     "leave hidden_placement out"),
  ):  # fmt: skip
    if refused:
      raise OptionError("hidden_placement", got, want, remedy)
  return host


def files_of(
  cache_placement: WeightPlacement | str | None,
  disk: str | os.PathLike[str] | None,
) -> CacheFiles | None:
  """Describe the files of a cache on disk, or None; no file is created yet.

  Raises:
    OptionError: If the folder is missing, or no layer of the cache is on disk.
  """
  placement = None
  if cache_placement is not None:
    placement = WeightPlacement.of(cache_placement, "cache_placement")
  if placement is None or not placement.disk:
    if disk is None:
      return None
    raise OptionError(
      "disk",
      f"{os.fspath(disk)!r} without a cache on disk",
      "cache_placement with a fraction on disk",
      'pass cache_placement="disk" too, or leave disk out',
    )
  if disk is None:
    raise OptionError(
      "disk",
      "None, with layers of the cache on disk",
      "a folder for its files",
      "pass disk=DIR, or place them in host memory",
    )
  return CacheFiles(disk)


def _whole_rows(
  model: Transformer,
  kind: CacheConfig,
  function: DenseFunction | None,
  shards: int,
  elsewhere: bool,
) -> CacheConfig:
  """Return a kind that keeps whole rows, for `grow` or `attention_fn`.

  Args:
    model: Model whose layers call the function.
    kind: Requested kind of the cache.
    function: Attention function, or None for a cache that grows.
    shards: Number of shards of the sequence.
    elsewhere: Whether rows are in groups, or layers of the cache not on the
      devices.

  Raises:
    InputTypeError: If `function` is not a function.
    OptionError: If the model, the cache or the mesh does not support this.
  """
  name = "grow" if function is None else "attention_fn"
  if function is not None:
    check_function(function, model.config.layers)
  plain = isinstance(kind.codec, Codec | None)
  for refused, got, want in (
    (shards > 1, f"a sequence over {shards} shards", "one shard"),
    (elsewhere, "rows in groups, or layers of the cache elsewhere",
     "a cache that is all on the devices"),
    (kind.evicting or kind.tier.device is not None or not plain,
     f"a cache of {kind}", "a cache that keeps each token in one array"),
  ):  # fmt: skip
    if refused:
      raise OptionError(
        name, f"a value with {got}", want, f"leave {name} out, or the other"
      )
  return kind.replace(windowed=False)


def _check_memory(
  model: Transformer, sharding: ShardingContext, make: dict[str, Any]
) -> None:
  """Refuses a cache that cannot fit, before it is allocated."""
  nbytes = bytes_each(model.init_cache_spec(sharding=sharding, **make))
  free, devices = free_on(sharding.mesh)
  if free is not None and nbytes > free:
    raise MemoryEstimateError(
      "cache",
      f"{nbytes:,} bytes on each of {devices} device(s) for {make['batch']} x "
      f"{make['capacity']:,} tokens",
      f"at most the {free:,} that are free there",
      "shard the sequence over more devices, or shorten the prompt",
    )
