"""Reads prompts and continues them.

`generate` does a whole answer; a `Session` keeps the cache of a conversation
between calls, so that a new turn reads only what is new.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ringjax.errors import (
  InputTypeError,
  MemoryEstimateError,
  MeshError,
  OptionError,
  PromptError,
  message,
)
from ringjax.infer import decode, inputs, prefill
from ringjax.infer.prefill import check_machine, plan
from ringjax.infer.sampling import Greedy, traced
from ringjax.infer.stopping import Stop, as_stop, check_tokenizer
from ringjax.kv.base import bytes_each
from ringjax.models.checkpoint import free_bytes
from ringjax.models.transformer import Transformer
from ringjax.nn.spread import Spread, Visit
from ringjax.ops.inputs import float_dtype, positive_int
from ringjax.parallel import memory
from ringjax.parallel.local import here, last_device
from ringjax.parallel.mesh import check_auto
from ringjax.parallel.place import SEQ
from ringjax.plan.choice import KEEPS, Machine

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

  def __init__(
    self,
    model: Transformer,
    capacity: int,
    *,
    batch: int = 1,
    mesh: Mesh | None = None,
    axis: str | None = None,
    dtype: Any = None,
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

    Raises:
      OptionError: a capacity, a batch or a dtype that is none.
      MeshError: a mesh that is not the model's.
      MemoryEstimateError: a cache that does not fit.
    """
    positive_int("batch", batch)
    self.model = model
    self.mesh, self.axis = place_of(mesh, axis, model)
    spread = Spread(mesh=self.mesh, axis=self.axis)
    _check_devices(model, self.mesh)
    capacity = prefill.padded(positive_int("capacity", capacity), spread.size)
    _check_memory(model, spread, batch, capacity, dtype)
    self.cache = model.cache(batch, capacity, spread=spread, dtype=dtype)
    self.lengths = np.zeros(batch, np.int64)
    self.pending = np.full(batch, -1, np.int64)
    self.seen = np.zeros((batch, model.config.vocab), bool)
    # Slots in use, on the shard that has the most; lengths can be shorter.
    self.slots = 0
    self.last: Report | None = None
    self._dtype = dtype
    self._device: Any = None
    self._readers: list[Any] = []
    self.reads(model)
    # Whether a call was interrupted and nothing was counted since.
    self._torn = False

  @property
  def shards(self) -> int:
    return self.cache.shards

  def gather(self, device: Any) -> None:
    """Brings the cache to one device of its mesh, where it then stays.

    Later calls run there, with that device's copy of the weights.

    Raises:
      MeshError: weights that are sharded, or a device of another process.
    """
    model, shards = here(self.model, device), self.shards
    self.cache = self.cache.gathered(device, self.slots)
    self.model = model
    self.slots *= shards
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

  def room(self) -> int:
    """Tokens that still fit, whichever example they belong to."""
    return self.cache.capacity - self.slots * self.shards

  def restart(self) -> None:
    """Begins anew with an empty cache of the same capacity, dtype and place."""
    capacity, batch = self.cache.capacity, self.lengths.size
    spread = Spread(mesh=self.mesh, axis=self.axis)
    # The old arrays go first: there may be no room for both.
    self._torn = True
    self.cache = dataclasses.replace(self.cache, slots=())
    with jax.default_device(self._device):
      self.cache = self.model.cache(
        batch, capacity, spread=spread, dtype=self._dtype
      )
    self.lengths = np.zeros(batch, np.int64)
    self.pending = np.full(batch, -1, np.int64)
    self.seen = np.zeros_like(self.seen)
    self.slots, self._torn = 0, False

  def took(self, cache: Any, slots: int, lengths: np.ndarray) -> None:
    """Notes a cache with tokens of a prompt, and that a token is pending.

    Args:
      cache: takes the place of the one before.
      slots: that they took on each shard.
      lengths: int [B], of the examples with them.
    """
    self.cache = cache
    self.slots += slots
    self.lengths = lengths
    self.pending = np.full(lengths.size, -1, np.int64)

  def settle(self) -> None:
    """Counts what the cache holds, behind a call that was interrupted.

    It stays uncounted if a program took it along, or in a run of several
    processes, which then no longer agree.
    """
    self._torn = True
    cache = self.cache
    leaves = jax.tree.leaves(cache)
    here = all(x.is_fully_addressable for x in leaves)
    if cache.lost or not cache.slots or not here:
      return
    try:
      found = jax.device_get((cache.base, cache.tail, cache.length))
    except RuntimeError:
      # What computed it failed.
      return
    base, tail, lengths = found
    # A token that was read is not pending.
    read = lengths > self.lengths
    self.pending = np.where(read, -1, self.pending)
    self.lengths = lengths.astype(np.int64)
    self.slots = int(base) + -(-int(tail) // self.shards)
    self._torn = False

  def check(self) -> None:
    """Refuses to go on with a cache that an interrupted call took along.

    Raises:
      OptionError: it did.
    """
    if self._torn:
      self.settle()
    if self._torn or self.cache.lost:
      raise OptionError(
        message(
          "cache",
          "a session whose cache was lost when a call was interrupted",
          "one that holds its tokens",
          "call session.restart() and read the conversation again",
        )
      )


def generate(
  model: Transformer,
  tokens: Any,
  *,
  max_new_tokens: int,
  sampler: Any = None,
  prefill: str = "auto",
  mesh: Mesh | None = None,
  axis: str | None = None,
  chunk: int | None = None,
  partition: Sequence[int] | None = None,
  machine: Machine | None = None,
  keep: str = "sharded",
  cache: Session | None = None,
  cache_dtype: Any = None,
  stop: Stop | str | int | Iterable[int | str] | None = None,
  tokenizer: Any = None,
  stream: Callable[[np.ndarray], Any] | None = None,
  progress: Callable[[int], Any] | None = None,
  report: Callable[[Report], Any] | None = None,
  pad_id: int = 0,
) -> np.ndarray:
  """Continues prompts.

  What a sampler draws for a token is a function of its seed, of the number of
  the row and of the token's position in it: neither other rows, the turns of a
  conversation nor the mesh matter. Another seed or temperature compiles
  nothing, nor does any other number of a sampler.

  Rotations that depend on the length of the context (dynamic, longrope) turn
  as for the longest prompt of the batch and `max_new_tokens`, or with a
  session for its capacity: the same for all examples and steps.

  Args:
    model: made by `rj.models.load` or `create`.
    tokens: int32 [B, T], or B sequences of ids of different lengths.
    max_new_tokens: how many tokens to add at most.
    sampler: chooses a token from logits; default `Greedy()`.
    prefill: how the prompt is read: "auto", "dense", "blockwise" (one device);
      "ring", "striped", "zigzag", "bidirectional", "gather", "ulysses",
      "hybrid", "kvr" (a sharded sequence; on one shard they all are
      "blockwise", and the report says so); "chunked" (either).
    mesh: the mesh; default: the session's, the model's or the current one,
      else one device.
    axis: the axis that shards the sequence; default "seq" if there is one.
    chunk: most tokens of a chunk of a chunked prefill.
    partition: tokens of each shard for "kvr", KV-Runahead's chain (Cho et al.
      2024, arXiv 2405.05329); default: shards have equal work.
    machine: the model's cost on these devices and their links, which
      prefill="auto" then chooses by (`rj.plan.choose`); `Report` has the
      reasons. Default: "striped" on a sharded sequence. Refused where there is
      no choice: with a chunk, and for recurrent layers on a sharded sequence.
    keep: where the cache lies when the prompt is read: "sharded" over the
      sequence's axis, on which all devices decode, or on the "last" device of
      that axis, which then decodes alone, with its own copy of the weights.
    cache: a `Session`, to continue where it is and to leave it behind; the
      tokens are then what comes after those that it holds.
    cache_dtype: of the cache that is made: bfloat16, float16, float32 or
      float64; default: the model's.
    stop: ids behind which an example ends, or texts, or both; or a `Stop`.
    tokenizer: of the texts, which may span tokens.
    stream: called with each step's tokens, int32 [B]. Its answer True ends
      the generation, an array of bools [B] ends single examples, None and
      False end nothing; anything else is refused.
    progress: called with the number of prompt tokens read, after each chunk
      and when all are read.
    report: called with what was done, at the end.
    pad_id: fills the rows of examples that stopped early.

  Returns:
    int32 [B, max_new_tokens], the new tokens.

  Raises:
    PromptError: also for prompts that with `max_new_tokens` are longer than
      the context that the model's config states.
    RingjaxError: in Python, before anything is compiled; but for an answer of
      `stream`, with which the generation ends.
  """
  count = positive_int("max_new_tokens", max_new_tokens)
  sampler = Greedy() if sampler is None else sampler
  _check_calls(sampler=sampler, stream=stream, progress=progress, report=report)
  _check_pad(pad_id)
  _check_keep(keep)
  if cache_dtype is not None:
    float_dtype("cache_dtype", cache_dtype)
  if isinstance(cache, Session):
    cache.check()
  if machine is not None:
    check_machine(machine, prefill, model, chunk)
  prompts = inputs.prompts(tokens, model.config.vocab)
  stops, watches = _stops(stop, model.config.vocab, tokenizer, len(prompts))
  if isinstance(cache, Session) and len(prompts) == cache.pending.size:
    prompts = [
      p if last < 0 else np.concatenate([[np.int32(last)], p])
      for p, last in zip(prompts, cache.pending, strict=True)
    ]
  batch, lengths = len(prompts), np.array([len(p) for p in prompts])
  longest = int(lengths.max())
  session = cache
  _check_context(model, session, lengths, count)
  if session is None:
    found, over = place_of(mesh, axis, model)
    shards = 1 if over is None else found.shape[over]
    first = plan(
      prefill,
      longest,
      model,
      found,
      over,
      chunk=chunk,
      partition=partition,
      machine=machine,
      keep=keep,
    )
    _check_scores(model, first, batch)
    # A shard's last slot may stay empty behind an uneven prompt.
    need = first.slots * shards + count + shards
    session = Session(
      model, need, batch=batch, mesh=found, axis=over, dtype=cache_dtype
    )
  elif mesh is not None or axis is not None:
    raise OptionError(
      message(
        "mesh",
        "a mesh or an axis beside a session",
        "one of them",
        "leave mesh= and axis= out: the session has its own",
      )
    )
  elif cache_dtype is not None:
    raise OptionError(
      message(
        "cache_dtype",
        f"{cache_dtype} beside a session",
        "one of them",
        "leave it out: the session's cache has its dtype",
      )
    )
  elif not isinstance(session, Session):
    raise InputTypeError(
      message(
        "cache",
        type(session).__name__,
        "an rj.infer.Session",
        "make one with rj.infer.Session(model, capacity)",
      )
    )
  given, model = model, session.weights(model)
  last = None
  if keep == "last" and session.mesh is not None:
    # Refused before the prompt is read, and not behind it.
    last = last_device(session.mesh, session.axis)
    here(model, last)
  fresh = session.slots == 0
  # The last token is not read.
  left = session.room() - (count - 1)
  resolve = functools.partial(
    plan,
    tokens=longest,
    model=model,
    mesh=session.mesh,
    axis=session.axis,
    chunk=chunk,
    partition=partition,
    room=left,
    keep=keep,
  )
  how = _method(prefill, machine, fresh, resolve)
  _check_session(session, given, batch, longest, count, how, left)
  if fresh:
    session.reads(given)
  _check_scores(model, how, batch)
  start = session.lengths.copy()
  total = int(start.max()) + longest + count
  if not fresh or cache is not None:
    total = session.cache.capacity
  logits = _run(model, session, how, prompts, lengths, total, progress)
  if last is not None:
    session.gather(last)
    model, logits = session.weights(model), here(logits, last)
  # A copy: the session's goes on.
  needs = getattr(sampler, "needs_seen", False)
  seen, sampler = jnp.array(session.seen) if needs else None, traced(sampler)
  state = decode.first(
    sampler,
    logits,
    jnp.asarray(session.lengths.astype(np.int32)),
    seen,
    stops,
  )
  new = _continue(
    model,
    session,
    sampler,
    state,
    stops,
    total,
    count,
    _observer(stream, watches),
    pad_id,
  )
  session.last = Report(
    prefill=how,
    prompt_tokens=longest,
    new_tokens=int(new[1]),
    shards=session.shards,
    cache_bytes=bytes_each((session.cache.slots, session.cache.at)),
    capacity=session.cache.capacity,
  )
  if report is not None:
    report(session.last)
  return new[0]


def _settled(doing: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
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
        session.settle()
        raise

    return run

  return around


@_settled("reading the prompt")
def _run(
  model: Transformer,
  session: Session,
  how: prefill.Prefill,
  prompts: list[np.ndarray],
  lengths: np.ndarray,
  total: int,
  progress: Any,
) -> jax.Array:
  """Reads the prompts into the session: the logits behind them."""
  start = session.lengths
  longest = int(lengths.max())

  def read(cache: Any, done: int, slots: int) -> None:
    """Notes that so many tokens of each prompt are in the cache."""
    session.took(cache, slots, start + np.minimum(lengths, done))
    for row, prompt in zip(session.seen, prompts, strict=True):
      row[prompt[:done]] = True

  width = how.width if how.chunk is None else longest
  tokens = np.zeros((len(prompts), width), np.int32)
  for row, prompt in zip(tokens, prompts, strict=True):
    row[: prompt.size] = prompt
  if how.chunk is None:
    logits, cache = prefill.whole(
      model, how, tokens, lengths, session.cache, total
    )
    read(cache, longest, how.slots)
    if progress is not None:
      jax.block_until_ready(logits)
      progress(longest)
    return logits
  return prefill.chunked(
    model, how, tokens, lengths, start, session.cache, total, read, progress
  )


@_settled("decoding")
def _continue(
  model: Transformer,
  session: Session,
  sampler: Any,
  state: decode.State,
  stops: jax.Array,
  total: int,
  count: int,
  observe: Callable[[np.ndarray, np.ndarray], np.ndarray],
  pad_id: int,
) -> tuple[np.ndarray, int]:
  """Takes steps until all have stopped: (tokens, number of steps)."""
  spread = Visit(mesh=session.mesh, axis=session.axis)
  batch = session.lengths.size
  out = np.full((batch, count), pad_id, np.int32)
  ended = np.zeros(batch, bool)
  length = jnp.int32(total)
  taken = 0
  for n in range(count):
    # The next step is on its way while this one's tokens are read.
    after = None
    if n + 1 < count:
      after, session.cache = decode.step(
        model, spread, sampler, session.cache, state, stops, length
      )
      taken += 1
    token, done = jax.device_get((state.token, state.done))
    out[:, n] = np.where(ended, pad_id, token)
    session.seen[~ended, token[~ended]] = True
    read = ~done & (after is not None)
    session.lengths = session.lengths + read
    session.pending = np.where(
      ended, session.pending, np.where(read, -1, token)
    )
    told = observe(out[:, n], ended)
    ended = ended | done | told
    if after is None or ended.all():
      break
    state = after
    if told.any():
      # The device knows of stop ids only, those of the next tokens too.
      state = after._replace(done=decode.ends(spread, after.done, ended))
  session.slots += -(-taken // session.shards)
  return out, n + 1


def place_of(
  mesh: Any, axis: str | None, model: Transformer
) -> tuple[Any, str | None]:
  """The mesh and the axis that are meant: given, the model's, the current."""
  if mesh is None:
    own = model.embed.weight.get_value().sharding
    mesh = own.mesh if isinstance(own, NamedSharding) else None
  if mesh is None:
    context = jax.sharding.get_mesh()
    mesh = None if context.empty else context
  if mesh is None:
    if axis is not None:
      raise MeshError(
        message(
          "axis",
          f"{axis!r} without a mesh",
          "a mesh with that axis",
          "pass mesh=rj.make_mesh((-1,), ('seq',))",
        )
      )
    return None, None
  check_auto(mesh)
  if axis is None and SEQ in mesh.axis_names:
    axis = SEQ
  if axis is not None and axis not in mesh.axis_names:
    raise MeshError(
      message(
        "axis",
        repr(axis),
        f"one of the mesh axes {mesh.axis_names}",
        "rename the axis or pass another mesh",
      )
    )
  return mesh, axis


def _check_devices(model: Transformer, mesh: Any) -> None:
  have = model.embed.weight.get_value().sharding.device_set
  if mesh is not None and have != set(mesh.devices.flat):
    raise MeshError(
      message(
        "model",
        f"weights on {len(have)} device(s)",
        f"the {mesh.devices.size} devices of the mesh",
        "load it with mesh=, or move it: rj.models.place(model, mesh)",
      )
    )


def _method(
  name: str,
  machine: Machine | None,
  fresh: bool,
  resolve: Callable[..., prefill.Prefill],
) -> prefill.Prefill:
  if fresh:
    return resolve(name, machine=machine)
  if name == "auto":
    # What it sees lies in the cache already: no choice is left.
    why = "it continues a conversation"
    return dataclasses.replace(resolve("chunked"), why=why)
  if name != "chunked":
    raise OptionError(
      message(
        "prefill",
        f"{name!r} into a cache that holds tokens",
        "'chunked', which sees them",
        "pass prefill='auto'",
      )
    )
  return resolve(name, machine=machine)


def _check_session(
  session: Session,
  model: Transformer,
  batch: int,
  tokens: int,
  count: int,
  how: prefill.Prefill,
  left: int,
) -> None:
  """Refuses a session that is another's, or that has too little room."""
  if session.model.config != model.config:
    raise OptionError(
      message(
        "cache",
        f"a session of another model, a {session.model.config.family}",
        "one that was made for this model",
        "make one with rj.infer.Session(model, capacity)",
      )
    )
  if session.slots and not session.read_by(model):
    raise OptionError(
      message(
        "model",
        "other weights than those that read what the session holds",
        "the same arrays",
        "pass that model, or call session.restart() and read it again",
      )
    )
  if session.lengths.size != batch:
    raise PromptError(
      message(
        "tokens",
        f"{batch} prompts",
        f"{session.lengths.size}, as many as the session has examples",
        "make a session with batch=",
      )
    )
  if how.slots * session.shards > left:
    raise PromptError(
      message(
        "tokens",
        f"{tokens} tokens, read as {how.slots * session.shards} by prefill="
        f"{how.name!r}, and max_new_tokens={count}, of which "
        f"{count - 1} are read",
        f"at most {session.room()} together in this session of "
        f"{session.cache.capacity}",
        "make a session of larger capacity, or ask for fewer tokens",
      )
    )


def _check_context(
  model: Transformer, session: Any, lengths: np.ndarray, count: int
) -> None:
  """Refuses a text that is longer than the model was made for."""
  read = np.zeros_like(lengths)
  if isinstance(session, Session) and session.lengths.size == lengths.size:
    read = session.lengths
  row = int(np.argmax(read + lengths))
  before = f"{int(read[row]):,} tokens read before, " if read[row] else ""
  inputs.within_context(
    model.config,
    int(read[row] + lengths[row]) + count,
    f"{before}{int(lengths[row]):,} tokens in prompt {row} and "
    f"max_new_tokens={count:,}",
  )


def _check_scores(model: Transformer, how: prefill.Prefill, batch: int) -> None:
  """Refuses dense scores that cannot fit, before anything is allocated.

  They alone grow with the square of the prompt. Counted is one copy in
  float32, the least there is.
  """
  if how.name != "dense":
    return
  mesh = how.spread.mesh
  heads = max(
    getattr(layer.attention, "heads", 0) for layer in model.config.layers
  )
  shards = 1 if mesh is None else mesh.devices.size
  each = 4 * batch * heads * how.width**2 // shards
  free, _ = _free(mesh)
  if free is not None and each > free:
    raise MemoryEstimateError(
      message(
        "prefill",
        f"'dense', with {each:,} bytes of scores on each of {shards} "
        f"device(s) for {batch} x {how.width:,} tokens",
        f"at most the {free:,} that are free there",
        "pass prefill='blockwise', or leave it out",
      )
    )


def _free(mesh: Any) -> tuple[int | None, int]:
  """Free bytes of a device, if it says so, and how many devices share."""
  devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
  return free_bytes(devices[0], len(devices)), len(devices)


def _check_memory(
  model: Transformer, spread: Spread, batch: int, capacity: int, dtype: Any
) -> None:
  """Refuses a cache that cannot fit, before it is allocated."""
  each = bytes_each(
    model.cache_spec(batch, capacity, spread=spread, dtype=dtype)
  )
  free, devices = _free(spread.mesh)
  if free is not None and each > free:
    raise MemoryEstimateError(
      message(
        "cache",
        f"{each:,} bytes on each of {devices} device(s) for {batch} x "
        f"{capacity:,} tokens",
        f"at most the {free:,} that are free there",
        "shard the sequence over more devices, or shorten the prompt",
      )
    )


def _check_calls(**functions: Any) -> None:
  for name, f in functions.items():
    if f is not None and not callable(f):
      raise InputTypeError(
        message(name, type(f).__name__, "something to call", "see `generate`")
      )


def _check_keep(keep: Any) -> None:
  if keep not in KEEPS:
    raise OptionError(
      message("keep", repr(keep), f"one of {', '.join(KEEPS)}", "leave it out")
    )


def _check_pad(pad_id: Any) -> None:
  whole = isinstance(pad_id, int | np.integer) and not isinstance(pad_id, bool)
  if not whole or not -(2**31) <= pad_id < 2**31:
    raise OptionError(
      message("pad_id", repr(pad_id), "an int of 32 bits", "leave it out")
    )


def _stops(
  stop: Any, vocab: int, tokenizer: Any, batch: int
) -> tuple[jax.Array, list[Any]]:
  """Ids for the device to look at, and watches for stop strings."""
  stop = as_stop(stop)
  stop.check(vocab)
  if tokenizer is not None:
    check_tokenizer(tokenizer)
  if stop.strings and tokenizer is None:
    raise OptionError(
      message(
        "tokenizer",
        "None with stop strings",
        "the model's tokenizer",
        "pass tokenizer=, e.g. rj.data.Tokenizer.load(folder)",
      )
    )
  watches = [stop.watch(tokenizer) for _ in range(batch if stop.strings else 0)]
  return decode.stop_ids(stop.ids), watches


def _observer(
  stream: Any, watches: list[Any]
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
  """Shows a step's tokens to whoever asked: which examples end now, [B]."""

  def observe(tokens: np.ndarray, ended: np.ndarray) -> np.ndarray:
    told = np.zeros(tokens.size, bool)
    for row, watch in enumerate(watches):
      if not ended[row]:
        watch.feed(int(tokens[row]))
        told[row] = watch.stopped is not None
    if stream is not None:
      told = told | _told(stream(tokens), tokens.shape)
    return told

  return observe


def _told(answer: Any, shape: tuple[int, ...]) -> Any:
  """Who ends now, by what `stream` answered."""
  if answer is None or isinstance(answer, bool | np.bool_):
    return bool(answer)
  array = isinstance(answer, np.ndarray | jax.Array)
  if array and answer.dtype == bool and answer.shape in ((), shape):
    return np.asarray(answer)
  # A truth value would end it at the first `lambda t: file.write(...)`.
  what = f"{answer.dtype} {list(answer.shape)}" if array else repr(answer)
  raise InputTypeError(
    message(
      "stream",
      f"an answer of {type(answer).__name__}, {what}",
      f"None, True, False, or an array of bools {list(shape)}",
      "let it return nothing, or whether to end",
    )
  )
