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

from ringjax.checks import positive_int
from ringjax.errors import MemoryEstimateError, MeshError, OptionError
from ringjax.infer import prefill
from ringjax.kv import cache_kind as kinds
from ringjax.kv.base import bytes_each
from ringjax.kv.cache_files import CacheFiles, TransferEvent
from ringjax.kv.cache_kind import CacheKind
from ringjax.kv.codecs import Codec
from ringjax.kv.row_groups import RowGroups
from ringjax.models.checkpoint import free_bytes
from ringjax.models.transformer import Transformer
from ringjax.models.weight_placement import WeightPlacement, refuse_placed
from ringjax.nn.attention_function import (
  DenseFunction,
  FunctionAttention,
  check_function,
)
from ringjax.nn.placed import naming_faults
from ringjax.nn.sharding_context import CachedAttention, ShardingContext
from ringjax.parallel import memory
from ringjax.parallel.local import here
from ringjax.parallel.mesh import automatic, entering
from ringjax.parallel.place import sequence_axis
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
  """What a call of `generate` did.

  Attributes:
    prefill: how the prompt was read.
    prompt_tokens: of the longest prompt.
    new_tokens: steps that were taken.
    shards: of the sequence.
    cache_bytes: of the cache on each device.
    capacity: tokens that the cache has room for.
    cache_kind: how the cache stores keys and values.
    contexts: what was done with contexts, a `ContextReport`, or None.
    speculation: what drafts were worth, a `SpeculationReport`, or None.
    memory: bytes by memory ("device": of each one; "host", "disk": in all) and
      by what they are: "weights", "cache", "hidden", and on devices "work"; at
      most, what passes through counted. See `CallMemory`.
  """

  prefill: prefill.Prefill
  prompt_tokens: int
  new_tokens: int
  shards: int
  cache_bytes: int
  capacity: int
  cache_kind: kinds.CacheKind
  contexts: ContextReport | None = None
  speculation: SpeculationReport | None = None
  memory: Mapping[str, Mapping[str, int]] = dataclasses.field(
    default_factory=dict
  )


class Session:
  """A conversation: a cache, the last token of each row, and the ids seen.

  It is bound to the weights that filled its cache: others cannot continue it,
  until `restart`. How many tokens it holds, only the cache knows.

  A call that is interrupted (Ctrl-C, an exception of `progress` or `stream`)
  leaves here what it has read: `lengths` says how much of the prompt that is,
  and the next call goes on behind it. One that is interrupted while a program
  writes the cache loses the cache, and so does any interrupted call in a run
  of several processes: later calls say so, until `restart`. So do calls behind
  one in which the logits of a row were not finite: its keys may be NaN.

  Rotations that depend on the length of the context (dynamic, longrope) are
  those of a context of `capacity` tokens, in every call, whatever the mesh and
  the kind of cache: what is asked without a session rotates by its prompt, see
  `generate`.

  Attributes:
    capacity: tokens of the whole conversation, as they were asked for.
    cache: the cache, with room for some more.
    seen: bool [B, V], ids that each row has read or generated, for a repetition
      penalty.
    ids: int32 [B, n], the token at each position, -1 where none is known.
    last: the report of the last call.
    drafting: what drafted for the last call by a model, with a cache of its
      own, which goes on in the next one; or None.
    paces: the last call's drafter and its `Paces`, or None.
    attention_fn: what reads the keys in place of the library's attention, or
      None.
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
    cache_kind: CacheKind | str = "dense",
    rows_at_once: int | None = None,
    cache_placement: WeightPlacement | str | None = None,
    hidden_placement: WeightPlacement | str | None = None,
    disk: str | os.PathLike[str] | None = None,
    attention_fn: DenseFunction | None = None,
    grow: int | None = None,
  ):
    """Makes an empty cache.

    Args:
      model: whose keys it will hold.
      capacity: tokens of the whole conversation, what is generated too.
      batch: B.
      mesh: the mesh; default: the model's, else the current one.
      axis: the axis that shards the sequence; default "seq" if the mesh has
        one.
      dtype: of the cache: bfloat16, float16, float32 or float64; default: the
        model's.
      cache_kind: how keys and values are stored, see `Transformer.init_cache`.
      rows_at_once: rows that a layer computes at a time; default: all. Its
        weights are fetched once for all of them.
      cache_placement: where the keys of a layer are that does not run:
        "device", "host", "disk", or fractions of the layers as
        "device=.2,host=.8"; default: on the devices. They are fetched when
        the layer runs, and at most three layers' are on their way or there.
      hidden_placement: of the groups of rows that do not run, the fraction
        whose hidden states are in "host" memory; needs `rows_at_once`.
      disk: a folder for the layers of the cache that are on disk, in files
        without names, of which none is left behind.
      attention_fn: a dense attention function, which `generate` and `read`
        call in each layer, under jit, in place of the library's: with queries
        [B, T, N, H], the cache's keys [B, S, K, H] and values [B, S, K, J] as
        plain arrays, mask=bool [B, 1, T, S] and scale=, as
        `jax.nn.dot_product_attention` takes them. Layers then keep whole rows.
      grow: tokens by which the cache's memory grows as they come (vAttention):
        its arrays are copied into larger ones, of which there are few sizes,
        each with programs of its own. S is then what a row has reached and at
        most this more. Layers then keep whole rows. Default: memory for the
        whole capacity, from the start.

    Raises:
      OptionError: a capacity or a batch below 1, an unknown dtype or kind,
        placements that something else does not go with, or a model or a cache
        whose keys `attention_fn` can't read or which can't grow.
      MeshError: a mesh that is not the model's.
      MemoryEstimateError: a cache that does not fit.
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
      beside = (rows_at_once, cache_placement, hidden_placement)
      kind = _whole_rows(
        model,
        kind,
        attention_fn,
        sharding.size,
        any(x is not None for x in beside),
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
      # Whatever the session's: which layers have ring buffers depends on it.
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
      wanted = WeightPlacement.of(cache_placement, "cache_placement")
      self._make["placement"] = wanted
    self.files = files_of(cache_placement, disk)
    _check_memory(model, sharding, self._make)
    self.seen = np.zeros((batch, model.config.vocab), bool)
    self.cache: Any = self._empty(sharding)
    self.ids = np.full((batch, self._limit or capacity), -1, np.int32)
    self.last: GenerateReport | None = None
    self.drafting: object = None
    self.paces: tuple[Drafter, Paces] | None = None
    # Each row's last generated token and its position: kept on the host, which
    # sees every token anyway, so that no step waits for the cache.
    self._said = np.full(batch, -1, np.int64)
    self._said_at = np.full(batch, -1, np.int64)
    self._device: Any = None
    # What was done with contexts, see `context_session`.
    self.contexts: Any = None
    # Whether no one knows what the cache holds, until a restart.
    self._invalid = False
    # Rows whose logits were not finite, until a restart.
    self._not_finite: tuple[int, ...] = ()
    self.bind(model)

  def transfers(self) -> tuple[TransferEvent, ...]:
    """Transfers of weights and cache from and to disk, by their start."""
    own = () if self.files is None else tuple(self.files.events)
    both = (*self.model.transfers(), *own)
    return tuple(sorted(both, key=lambda event: event.start))

  @property
  def batch(self) -> int:
    """Rows, B."""
    return self.seen.shape[0]

  @property
  def shards(self) -> int:
    """Shards of the sequence."""
    return self.cache.shards

  @property
  @entering(lambda session: session.mesh)
  def lengths(self) -> np.ndarray:
    """Tokens read so far, int [B]: what the cache says.

    Waits for the program that computes it; in a run of several processes all
    of them have to ask.
    """
    sharding = ShardingContext(mesh=self.mesh, axis=self.axis)
    return np.asarray(_lengths(sharding, self.cache)).astype(np.int64)

  @property
  def pending(self) -> np.ndarray:
    """A token that was generated and not read yet, or -1: int [B].

    It is read before the next turn.
    """
    return np.where(self._said_at == self.lengths, self._said, -1)

  @pending.setter
  def pending(self, tokens: np.ndarray) -> None:
    self._said, self._said_at = np.array(tokens, np.int64), self.lengths

  def say(self, tokens: np.ndarray, pos: np.ndarray, rows: np.ndarray) -> None:
    """Notes generated tokens [B] at positions [B], of `rows`, bool [B]."""
    self._said[rows], self._said_at[rows] = tokens[rows], pos[rows]
    self.seen[rows, tokens[rows]] = True
    for row in np.flatnonzero(rows & (pos < self.ids.shape[1])):
      self.ids[row, pos[row]] = tokens[row]

  def heard(self, row: int, ids: np.ndarray, start: int) -> None:
    """Notes the ids of a prompt, of which the first is at position `start`."""
    self.seen[row, ids] = True
    part = self.ids[row, start : start + len(ids)]
    part[:] = ids[: len(part)]

  def texts(self) -> list[np.ndarray]:
    """The ids of each row as far as they are known, int32 [n]."""
    rows = zip(self.ids, self.lengths, strict=True)
    return [row[:size][row[:size] >= 0] for row, size in rows]

  def take_back(self, rows: np.ndarray, end: np.ndarray) -> None:
    """Makes rows forget what was read at positions from `end` on.

    Args:
      rows: bool [B]; of the others all stays.
      end: int [B].

    Raises:
      OptionError: recurrent layers, whose state does not go back.
    """
    ends = np.where(rows, end, np.iinfo(np.int32).max)
    self.cache = self.cache.truncate(ends)

  def keep_slack(self, tokens: int) -> None:
    """Note queries so that so many tokens may be taken back.

    Only caches with a policy note queries.
    """
    if self.cache.kind.policy is not None:
      self.cache = self.cache.with_slack(tokens)

  def gather(self, device: jax.Device) -> None:
    """Brings the cache to one device of its mesh, where it then stays.

    Later calls run there, with that device's copy of the weights.

    Raises:
      MeshError: weights that are sharded, or a device of another process.
      OptionError: a model whose layers are not all on the devices.
    """
    refuse_placed(self.model, "bring it to one device", "keep='sharded'")
    model = here(self.model, device)
    self.cache = self.cache.gathered(device)
    self.model = model
    self.mesh, self.axis, self._device = None, None, device

  def weights(self, model: Transformer) -> Transformer:
    """The model where this session's calls run."""
    return model if self._device is None else here(model, self._device)

  def bind(self, model: Transformer) -> None:
    """Notes whose weights fill the cache, while it is empty."""
    self._weights = [weakref.ref(x) for x in jax.tree.leaves(model)]

  def bound_to(self, model: Transformer) -> bool:
    """Whether what the session holds was read by this model's weights."""
    if self._device is not None and model is self.model:
      return True
    arrays = jax.tree.leaves(model)
    return len(arrays) == len(self._weights) and all(
      known() is array
      for known, array in zip(self._weights, arrays, strict=True)
    )

  def hand_over(self, model: Transformer) -> None:
    """Lets other weights of the same shape answer about what is held.

    A model of integers may read a prompt that the model itself answers about;
    the answers are those of the keys that were read.

    Raises:
      OptionError: a model of another config.
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
    """Whether it holds no token."""
    return not self.lengths.any()

  def room(self) -> int:
    """Tokens that still fit into every row."""
    return int(self.cache.free().sum(1).min())

  @entering(lambda session: session.mesh)
  def restart(self) -> None:
    """Begins anew with an empty cache of the same capacity, dtype and place."""
    sharding = ShardingContext(mesh=self.mesh, axis=self.axis)
    # The old arrays go first: there may be no room for both.
    self._invalid, self.cache, self.drafting = True, None, None
    if self.files is not None:
      self.files.clear()
    with jax.default_device(self._device):
      self.cache = self._empty(sharding)
    self._said_at[:], self.seen[:], self._invalid = -1, False, False
    self.ids[:], self._not_finite = -1, ()

  def _empty(self, sharding: ShardingContext) -> Any:
    made: Any
    make = self._make
    if self.files is not None:
      make = make | {"disk": self.files}
    if self.rows_at_once is None:
      made = self.model.init_cache(sharding=sharding, **make)
    else:
      options: Any = {k: x for k, x in make.items() if k != "batch"}
      made = RowGroups.create(
        len(self.seen),
        self.rows_at_once,
        lambda n: self.model.init_cache(n, sharding=sharding, **options),
        self._hidden,
      )
    if self._limit is None:
      return made
    if self._grow is not None:
      return made.growing(self._grow, self._limit)
    return made.limited(self._limit)

  def attend(self, *, replicated: bool = True) -> CachedAttention:
    """How the tokens of a call find the keys of the cache.

    Args:
      replicated: whether the tokens are the same on all shards.
    """
    where: Any = dict(mesh=self.mesh, axis=self.axis, replicated=replicated)
    if self.attention_fn is None:
      return CachedAttention(**where)
    return FunctionAttention(function=self.attention_fn, **where)

  @contextlib.contextmanager
  def running(self, doing: str) -> Iterator[None]:
    """Around programs that write the cache: says what an interruption leaves.

    `doing` is what they do, for the error where memory runs out.
    """
    try:
      faults = self.model.stack.faults
      with naming_faults(faults), memory.watched(doing, _KNOBS):
        yield
    except BaseException as error:
      self.recover()
      if self.files is not None and isinstance(error, Exception):
        # A program can raise no error of ours.
        self._invalid = self._invalid or self.files.error is not None
        self.files.raise_fault()
      raise

  def recover(self) -> None:
    """After an interrupted call: goes on with what the cache says it holds.

    In a run of several processes it is lost: they may no longer agree.
    """
    leaves = jax.tree.leaves(self.cache)
    self._invalid = not all(x.is_fully_addressable for x in leaves)

  def not_finite(self, rows: Iterable[int]) -> None:
    """Notes rows whose logits were not finite: `check` then refuses."""
    self._not_finite = tuple(sorted({*self._not_finite, *rows}))

  def check(self) -> None:
    """Refuses a session whose cache an interrupted call has lost, or of which
    a row has had logits that are not finite.

    Raises:
      OptionError: it can't go on.
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
  """The mesh that a call's arguments name, or None."""
  if isinstance(cache, Session):
    return cache.mesh
  return mesh or (model.mesh if isinstance(model, Transformer) else None)


# For f(model, ..., mesh=, cache=).
on_its_mesh = entering(_mesh_of)


def place_of(
  mesh: Mesh | None, axis: str | None, model: Transformer
) -> tuple[Any, str | None]:
  """The mesh and the sequence's axis of a call.

  The mesh is the given one, else the model's, else the current one.

  Raises:
    MeshError: an axis that the mesh does not have.
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
  have = model.embed.weight.get_value().sharding.device_set
  if mesh is not None and have != set(mesh.devices.flat):
    raise MeshError(
      "model",
      f"weights on {len(have)} device(s)",
      f"the {mesh.devices.size} devices of the mesh",
      "load it with mesh=, or move it: rj.models.place(model, mesh)",
    )


def free_on(mesh: Mesh | AbstractMesh | None) -> tuple[int | None, int]:
  """Free bytes of a device, None if unknown, and how many devices share."""
  devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
  return free_bytes(devices[0], len(devices)), len(devices)


def _hosted(
  placement: WeightPlacement | str, rows: int | None, mesh: Mesh | None
) -> float:
  """The fraction of the hidden states that is in the host's memory."""
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
  """The files of a cache that is on disk, of which nothing is made yet.

  Raises:
    OptionError: no such folder, or one for nothing.
  """
  wanted = None
  if cache_placement is not None:
    wanted = WeightPlacement.of(cache_placement, "cache_placement")
  if wanted is None or not wanted.disk:
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
  kind: CacheKind,
  function: DenseFunction | None,
  shards: int,
  elsewhere: bool,
) -> CacheKind:
  """The kind of a cache that grows or that a function reads: of whole rows.

  Args:
    model: the model.
    kind: what was asked for.
    function: the function, or None.
    shards: of the sequence.
    elsewhere: whether rows or layers of the cache are in groups or elsewhere.

  Raises:
    InputTypeError: no function.
    OptionError: a model, a cache or a mesh for which this is not done.
  """
  name = "grow" if function is None else "attention_fn"
  if function is not None:
    check_function(function, model.config.layers)
  plain = isinstance(kind.codec, Codec | None)
  for refused, got, want in (
    (shards > 1, f"a sequence over {shards} shards", "one shard"),
    (elsewhere, "rows in groups, or layers of the cache elsewhere",
     "a cache that is all on the devices"),
    (kind.evicting or kind.device is not None or not plain,
     f"a cache of {kind}", "a cache that keeps each token in one array"),
  ):  # fmt: skip
    if refused:
      raise OptionError(
        name, f"a value with {got}", want, f"leave {name} out, or the other"
      )
  return dataclasses.replace(kind, windowed=False)


def _check_memory(
  model: Transformer, sharding: ShardingContext, make: dict[str, Any]
) -> None:
  """Refuses a cache that cannot fit, before it is allocated."""
  each = bytes_each(model.init_cache_spec(sharding=sharding, **make))
  free, devices = free_on(sharding.mesh)
  if free is not None and each > free:
    raise MemoryEstimateError(
      "cache",
      f"{each:,} bytes on each of {devices} device(s) for {make['batch']} x "
      f"{make['capacity']:,} tokens",
      f"at most the {free:,} that are free there",
      "shard the sequence over more devices, or shorten the prompt",
    )
