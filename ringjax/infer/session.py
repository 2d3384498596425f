"""The cache of a conversation, kept between calls of `generate`."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ringjax.checks import positive_int
from ringjax.errors import (
  MemoryEstimateError,
  MeshError,
  OptionError,
  PromptError,
)
from ringjax.infer import prefill
from ringjax.kv import cache_kind as kinds
from ringjax.kv.base import bytes_each
from ringjax.models.checkpoint import free_bytes
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import ShardingContext
from ringjax.parallel import memory
from ringjax.parallel.local import here
from ringjax.parallel.mesh import automatic, entering
from ringjax.parallel.place import sequence_axis

_KNOBS = (
  "shard the sequence over more devices, read the prompt in parts (chunk=), or "
  "make a smaller cache"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """What a call of `generate` did.

  Attributes:
    prefill: how the prompt was read.
    prompt_tokens: of the longest prompt.
    new_tokens: steps that were taken.
    shards: of the sequence.
    cache_bytes: of the cache on each device.
    capacity: tokens that the cache has room for.
  """

  prefill: prefill.Prefill
  prompt_tokens: int
  new_tokens: int
  shards: int
  cache_bytes: int
  capacity: int


class Session:
  """A conversation: a cache and how many tokens of each example it holds.

  It is the weights' that read it: others cannot go on with it, until `restart`.

  A call that is interrupted (Ctrl-C, an exception of `progress` or `stream`)
  leaves here what it has read: `lengths` says how much of the prompt that is,
  and the next call goes on behind it. One that is interrupted while a program
  writes the cache takes it along: later calls say so, until `restart`.

  Rotations that depend on the length of the context (dynamic, longrope) turn
  as for a context of `capacity` tokens, in every call.

  Attributes:
    lengths: int [B], tokens read so far.
    pending: int [B], a token that was generated and not read yet, or -1; it
      is read before the next turn.
    seen: bool [B, V], ids that each example has read or said, which a
      repetition penalty is for.
    cache: the cache.
    last: the report of the last call.
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
    dtype: Any = None,
    cache_kind: Any = "dense",
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

    Raises:
      OptionError: a capacity, a batch or a dtype that is none.
      MeshError: a mesh that is not the model's.
      MemoryEstimateError: a cache that does not fit.
    """
    positive_int("batch", batch)
    self.model = model
    self.mesh, self.axis = place_of(mesh, axis, model)
    sharding = ShardingContext(mesh=self.mesh, axis=self.axis)
    _check_devices(model, self.mesh)
    capacity = prefill.padded(positive_int("capacity", capacity), sharding.size)
    make = dict(
      sharding=sharding, dtype=dtype, kind=kinds.cache_kind(cache_kind)
    )
    _check_memory(model, sharding, batch, capacity, make)
    self.cache = model.init_cache(batch, capacity, **make)
    self.lengths = np.zeros(batch, np.int64)
    self.pending = np.full(batch, -1, np.int64)
    self.seen = np.zeros((batch, model.config.vocab), bool)
    self.last: Report | None = None
    self._dtype = dtype
    self._device: Any = None
    self._readers: list[Any] = []
    self.reads(model)
    # Whether a call was interrupted and nothing was counted since.
    self._interrupted = False

  @property
  def shards(self) -> int:
    return self.cache.shards

  def gather(self, device: Any) -> None:
    """Brings the cache to one device of its mesh, where it then stays.

    Later calls run there, with that device's copy of the weights.

    Raises:
      MeshError: weights that are sharded, or a device of another process.
    """
    model = here(self.model, device)
    self.cache = self.cache.gathered(device)
    self.model = model
    self.mesh, self.axis, self._device = None, None, device

  def weights(self, model: Transformer) -> Transformer:
    """The model where this session's calls run."""
    return model if self._device is None else here(model, self._device)

  def read_by(self, model: Transformer) -> bool:
    """Whether what the session holds was read by this model's weights."""
    if self._device is not None and model is self.model:
      return True
    arrays = jax.tree.leaves(model)
    return len(arrays) == len(self._readers) and all(
      reader() is array
      for reader, array in zip(self._readers, arrays, strict=True)
    )

  def reads(self, model: Transformer) -> None:
    """Notes whose weights read what comes next, in an empty session."""
    self._readers = [weakref.ref(x) for x in jax.tree.leaves(model)]

  @property
  def empty(self) -> bool:
    """Whether it holds no token."""
    return not self.lengths.any()

  def free(self) -> np.ndarray:
    """Free slots of each example on each shard, int [B, R]."""
    free = self.cache.free()
    assert free is not None
    return free

  def room(self) -> int:
    """Tokens that still fit, whichever example they belong to."""
    return int(self.free().sum(1).min())

  @entering(lambda session: session.mesh)
  def restart(self) -> None:
    """Begins anew with an empty cache of the same capacity, dtype and place."""
    capacity, batch = self.cache.capacity, self.lengths.size
    sharding = ShardingContext(mesh=self.mesh, axis=self.axis)
    # The old arrays go first: there may be no room for both.
    self._interrupted = True
    self.cache = dataclasses.replace(self.cache, slots=())
    with jax.default_device(self._device):
      self.cache = self.model.init_cache(
        batch,
        capacity,
        sharding=sharding,
        dtype=self._dtype,
        kind=self.cache.kind,
      )
    self.lengths = np.zeros(batch, np.int64)
    self.pending = np.full(batch, -1, np.int64)
    self.seen = np.zeros_like(self.seen)
    self._interrupted = False

  def commit(self, cache: Any, lengths: np.ndarray) -> None:
    """Notes a cache with tokens of a prompt, and that a token is pending.

    Args:
      cache: takes the place of the one before.
      lengths: int [B], of the examples with them.
    """
    self.cache = cache
    self.lengths = lengths
    self.pending = np.full(lengths.size, -1, np.int64)

  def recover(self) -> None:
    """Counts what the cache holds, behind a call that was interrupted.

    It stays uncounted if a program took it along, or in a run of several
    processes, which then no longer agree.
    """
    self._interrupted = True
    cache = self.cache
    leaves = jax.tree.leaves(cache)
    here = all(x.is_fully_addressable for x in leaves)
    if cache.lost or not cache.slots or not here:
      return
    try:
      lengths = jax.device_get(cache.length)
    except RuntimeError:
      # What computed it failed.
      return
    # A token that was read is not pending.
    read = lengths > self.lengths
    self.pending = np.where(read, -1, self.pending)
    self.lengths = lengths.astype(np.int64)
    self._interrupted = False

  def check(self) -> None:
    """Refuses to go on with a cache that an interrupted call took along.

    Raises:
      OptionError: it did.
    """
    if self._interrupted:
      self.recover()
    if self._interrupted or self.cache.lost:
      raise OptionError(
        "cache",
        "a session whose cache was lost when a call was interrupted",
        "one that holds its tokens",
        "call session.restart() and read the conversation again",
      )


def settled(doing: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """For f(model, session, ...), behind which the session is right in any case.

  `doing` is what f does, for who runs out of memory.
  """

  def around(f: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(f)
    def run(model: Transformer, session: Session, *more: Any) -> Any:
      try:
        with memory.watched(doing, _KNOBS):
          return f(model, session, *more)
      except BaseException:
        session.recover()
        raise

    return run

  return around


def _mesh_of(
  model: Any, *_: Any, mesh: Any = None, cache: Any = None, **__: Any
) -> Any:
  """The mesh of a call, as far as its arguments say."""
  if isinstance(cache, Session):
    return cache.mesh
  return mesh or (model.mesh if isinstance(model, Transformer) else None)


# For f(model, ..., mesh=, cache=).
on_its_mesh = entering(_mesh_of)


def place_of(
  mesh: Any, axis: str | None, model: Transformer
) -> tuple[Any, str | None]:
  """The mesh and the axis that are meant: given, the model's, the current."""
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


def _check_devices(model: Transformer, mesh: Any) -> None:
  have = model.embed.weight.get_value().sharding.device_set
  if mesh is not None and have != set(mesh.devices.flat):
    raise MeshError(
      "model",
      f"weights on {len(have)} device(s)",
      f"the {mesh.devices.size} devices of the mesh",
      "load it with mesh=, or move it: rj.models.place(model, mesh)",
    )


def check_session(
  session: Session,
  model: Transformer,
  batch: int,
  lengths: np.ndarray,
  count: int,
  how: prefill.Prefill,
) -> None:
  """Refuses a session that is another's, or that has too little room."""
  if session.model.config != model.config:
    raise OptionError(
      "cache",
      f"a session of another model, a {session.model.config.family}",
      "one that was made for this model",
      "make one with rj.infer.Session(model, capacity)",
    )
  if not session.empty and not session.read_by(model):
    raise OptionError(
      "model",
      "other weights than those that read what the session holds",
      "the same arrays",
      "pass that model, or call session.restart() and read it again",
    )
  if session.lengths.size != batch:
    raise PromptError(
      "tokens",
      f"{batch} prompts",
      f"{session.lengths.size}, as many as the session has examples",
      "make a session with batch=",
    )
  free = session.free()
  after = free - how.taken(lengths, session.shards)
  if after.min() < 0 or after.sum(1).min() < count - 1:
    tokens = int(lengths.max())
    raise PromptError(
      "tokens",
      f"{tokens} tokens, read by prefill={how.name!r} on {session.shards} "
      f"shard(s), and max_new_tokens={count}, of which "
      f"{count - 1} are read",
      f"at most {session.room()} together in this session of "
      f"{session.cache.capacity}",
      "make a session of larger capacity, or ask for fewer tokens",
    )


def free_on(mesh: Any) -> tuple[int | None, int]:
  """Free bytes of a device, if it says so, and how many devices share."""
  devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
  return free_bytes(devices[0], len(devices)), len(devices)


def _check_memory(
  model: Transformer,
  sharding: ShardingContext,
  batch: int,
  capacity: int,
  make: dict[str, Any],
) -> None:
  """Refuses a cache that cannot fit, before it is allocated."""
  each = bytes_each(model.init_cache_spec(batch, capacity, **make))
  free, devices = free_on(sharding.mesh)
  if free is not None and each > free:
    raise MemoryEstimateError(
      "cache",
      f"{each:,} bytes on each of {devices} device(s) for {batch} x "
      f"{capacity:,} tokens",
      f"at most the {free:,} that are free there",
      "shard the sequence over more devices, or shorten the prompt",
    )
