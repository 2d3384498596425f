"""Decoding with attention in worker processes that keep the caches.

Guarantees: tokens are those of `generate`, with any number of workers and any
assignment of rows to them; a worker that dies or is silent for longer than the
workers' patience is named in a `PeerError`, and nothing waits longer.
Cost: a step sends q, k and v of each row and layer and gets one vector a head
back: (N + 2 K) H + N J numbers, whatever the context, and once the keys and
values of its prompt. Two mini-batches alternate: while workers attend for one,
this process computes the layers' weight part of the other.
Memory: this process has the weights and, while a prompt is read, its cache;
keys and values are on the workers.
Ref: He and Zhai 2024, FastDecode, arXiv 2403.11421. When sequences start, and
on how many CPUs: `rj.serve.cluster.LoadControl` and `choose_workers`.

The link to a worker is authenticated and not encrypted, see
`parallel.links.connection`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ringjax.checks import float_dtype, integer, number, positive_int
from ringjax.errors import ConfigError, OptionError, PeerError
from ringjax.infer import decode, inputs
from ringjax.infer.child_processes import (
  end_children,
  first_line,
  start_child,
)
from ringjax.infer.fastdecode.attention_worker import (
  LOAD_TOKENS,
  PATIENCE_S,
  AttentionServer,
)
from ringjax.infer.finite import NOT_FINITE, NotFiniteRows, or_not_finite
from ringjax.infer.generate import Generated
from ringjax.infer.inputs import Prompts
from ringjax.infer.layerwise import LayerPrograms, TokenRows
from ringjax.infer.prefill import PrefillConfig
from ringjax.infer.prompt_reading import (
  check_call,
  check_context,
  planned,
  read_prompts,
)
from ringjax.infer.sampling import Sample, from_names, traced
from ringjax.infer.stopping import Stop, as_stop
from ringjax.kv import cache_kind as kinds
from ringjax.kv.cache_kind import CacheConfig
from ringjax.models.checkpoint import abstract
from ringjax.models.transformer import Transformer
from ringjax.models.weights.weight_placement import refuse_placed
from ringjax.parallel.links.array_messages import ArrayMessage
from ringjax.parallel.links.connection import Connection, checked_key
from ringjax.parallel.links.link_group import LinkGroup
from ringjax.parallel.links.live_link import LiveLink
from ringjax.parallel.programs import bounded

# Maximum time until a started process listens.
_START_S = 120.0


@runtime_checkable
class StartRule(Protocol):
  """Rule for the start of sequences, such as `rj.serve.cluster.LoadControl`."""

  def check(self, rows: int, steps: int, *, prompts: int) -> None:
    """Raises a `RingjaxError` if such rows could never start; see `start`."""
    ...

  def start(self, rows: int, steps: int, now: int, *, prompts: int) -> int:
    """Returns the step, `now` or later, at which a group of rows starts.

    Args:
      rows: Number of rows that start together, in free places.
      steps: Maximum number of tokens generated for each.
      now: Number of the next step.
      prompts: Number of tokens in all their prompts together.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerTraffic:
  """Bytes on the wire to and from workers, headers included.

  Attributes:
    prompt_bytes: Bytes sent for keys and values of prompts.
    sent_bytes: Bytes sent in steps: queries, keys and values of new tokens.
    received_bytes: Bytes received in steps: attention outputs.
    steps: Number of steps, counted for each mini-batch.
    row_steps: Number of rows in these steps.
  """

  prompt_bytes: int = 0
  sent_bytes: int = 0
  received_bytes: int = 0
  steps: int = 0
  row_steps: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkersReport:
  """Placement, traffic and times of a call with workers.

  Attributes:
    assignment: Number of the worker of each place for a row.
    starts: Step at which each prompt's answer began.
    peak_tokens: Maximum number of cached tokens, all workers together.
    traffic: Bytes on the wire.
    waited_s: Seconds in which this process waited for workers.
    seconds: Seconds of the whole call.
  """

  assignment: tuple[int, ...]
  starts: tuple[int, ...]
  peak_tokens: int
  traffic: WorkerTraffic
  waited_s: float
  seconds: float


class AttentionWorkers:
  """Worker processes that attend, started here or running elsewhere."""

  def __init__(
    self,
    addresses: Sequence[tuple[str, int]],
    key: bytes,
    *,
    patience_s: int | float = PATIENCE_S,
  ):
    """Connects to running workers.

    Args:
      addresses: Host and port of each worker.
      key: Shared secret of the workers.
      patience_s: Maximum seconds until a worker answers. The first answers
        include a compilation.

    Raises:
      PeerError: If a worker does not listen, or has another key.
      OptionError: If there is no address, or the patience is not above 0.
    """
    number("patience_s", patience_s, above=0)
    if not addresses:
      raise OptionError("addresses", "none", "one or more", "name workers")
    key = checked_key(key)
    self.patience_s = patience_s
    self.processes: tuple[subprocess.Popen[str], ...] = ()
    self._servers: tuple[AttentionServer, ...] = ()
    self._workers: list[LiveLink] = []
    self._group: LinkGroup[int] = LinkGroup(together=True)
    self._busy = threading.Lock()
    self._last: tuple[Transformer, CacheConfig, LayerPrograms] | None = None
    try:
      for n, (host, port) in enumerate(addresses):
        name = f"attention worker {n} ({host}:{port})"
        wire = Connection.connect((host, port), key, patience_s, name, rank=n)
        link = LiveLink(wire, rank=n, kinds=("opened", "attended"))
        self._workers.append(link)
        self._group.add(n, link)
        link.start()
    except BaseException:
      self.close()
      raise

  @classmethod
  def connect(
    cls,
    addresses: Sequence[tuple[str, int]],
    key: bytes,
    *,
    patience_s: int | float = PATIENCE_S,
  ) -> AttentionWorkers:
    """Connects to workers that run elsewhere; for arguments see the class."""
    return cls(addresses, key, patience_s=patience_s)

  @classmethod
  def start(
    cls, count: int, *, patience_s: int | float = PATIENCE_S
  ) -> AttentionWorkers:
    """Starts worker processes on this machine, which end with this process.

    Args:
      count: Number of processes.
      patience_s: Maximum seconds until a worker answers, see the class.

    Raises:
      PeerError: If a process does not start.
    """
    positive_int("count", count)
    key = secrets.token_bytes(32)
    processes: list[subprocess.Popen[str]] = []
    try:
      for _ in range(count):
        processes.append(
          start_child(
            "ringjax.infer.fastdecode.attention_worker",
            {"key": key.hex(), "patience_s": patience_s},
            {"JAX_PLATFORMS": "cpu"},
          )
        )
      addresses = []
      for n, process in enumerate(processes):
        host, port = first_line("attention worker", n, process, _START_S)
        addresses.append((host, port))
      self = cls(addresses, key, patience_s=patience_s)
    except BaseException:
      end_children(processes)
      raise
    self.processes = tuple(processes)
    return self

  @classmethod
  def in_threads(
    cls, count: int, *, patience_s: int | float = PATIENCE_S
  ) -> AttentionWorkers:
    """Starts workers in threads of this process, for tests."""
    positive_int("count", count)
    key = secrets.token_bytes(32)
    servers = [
      AttentionServer(key, patience_s=patience_s) for _ in range(count)
    ]
    for server in servers:
      threading.Thread(target=server.serve, daemon=True).start()
    self = cls([x.address for x in servers], key, patience_s=patience_s)
    self._servers = tuple(servers)
    return self

  def __enter__(self) -> AttentionWorkers:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def __len__(self) -> int:
    """Number of workers."""
    return len(self._workers)

  def __getitem__(self, number: int) -> LiveLink:
    return self._workers[number]

  def close(self) -> None:
    """Closes the connections, and ends the processes that `start` made."""
    self._group.close("the model has ended")
    for server in self._servers:
      server.close()
    end_children(self.processes)

  def _programs_of(
    self, model: Transformer, kind: CacheConfig
  ) -> LayerPrograms:
    """Programs of a model and cache kind; those of the last call are reused."""
    cached = self._last
    if cached is None or cached[0] is not model or cached[1] != kind:
      self._last = cached = model, kind, LayerPrograms(model, kind=kind)
    return cached[2]

  @contextlib.contextmanager
  def _alone(self):
    """Admits one call at a time, and none after a call that failed."""
    if not self._busy.acquire(blocking=False):
      raise OptionError(
        "workers",
        "some that attend for another call, or failed in one",
        "workers that are free",
        "start others",
      )
    yield
    # Not released by a failed call, whose answers may still arrive.
    self._busy.release()


# ---------------------------------------------------------------------------
# Generation
# ---------------------------------------------------------------------------


def generate_beside(
  model: Transformer,
  tokens: Prompts,
  *,
  workers: AttentionWorkers,
  max_new_tokens: int,
  sampler: Callable[..., Any] | None = None,
  stop: Stop | str | int | Iterable[int | str] | None = None,
  rows: int | None = None,
  group: int | None = None,
  starts: StartRule | None = None,
  assignment: Sequence[int] | None = None,
  cache_dtype: DTypeLike | None = None,
  cache_kind: CacheConfig | str = "windowed",
  stream: Callable[[Int[np.ndarray, " B"]], Any] | None = None,
  report: Callable[[WorkersReport], Any] | None = None,
  pad_id: int = 0,
) -> Generated:
  """Continues prompts, with attention on workers.

  Args:
    model: Model on one device.
    tokens: Token ids, int32 [B, T], or B sequences of different lengths.
    workers: Workers that keep the caches and attend.
    max_new_tokens: Maximum number of tokens to add to each row.
    sampler: Sampler that chooses a token from logits; default `Greedy()`.
    stop: Token ids after which a row ends.
    rows: Number of places for sequences, in both mini-batches together; more
      prompts wait until a place is free. Default: all prompts at once.
    group: Number of prompts that start together; default: all that have a
      place.
    starts: Rule for the start of a group, for instance
      `rj.serve.cluster.LoadControl(limit)`; default: at once.
    assignment: Number of the worker for each place; default: round-robin.
    cache_dtype: Dtype of keys and values; default: the model's.
    cache_kind: Storage format of keys and values on workers; see `generate`.
    stream: Callback that gets each chosen token, int32 [B], -1 for rows
      without a token.
    report: Callback that gets the call's report, at the end.
    pad_id: Id that pads rows that stopped early.

  Returns:
    The new tokens, as from `generate`.

  Raises:
    PeerError: If a worker failed, died or is silent for too long; the error
      names it, and these workers cannot be used again.
    ConfigError: If layers keep more than keys and values (recurrent ones,
      latents), read an encoder's states, or the weights are on a mesh.
    NotFiniteLogitsError: If logits of a row are not finite, see `generate`.
    RingjaxError: If `generate` would refuse an argument.
  """
  check_call(model, tokens)
  positive_int("max_new_tokens", max_new_tokens)
  sampler, stop = from_names(sampler, stop, {})
  ending = as_stop(stop)
  if ending.strings:
    raise OptionError(
      "stop", "texts", "ids of tokens", "pass ids, or use generate"
    )
  ending.check(model.config.vocab)
  prompts = inputs.prompts(tokens, model.config.vocab)
  lengths = np.array([p.size for p in prompts])
  check_context(model, np.zeros_like(lengths), lengths, max_new_tokens)
  if not isinstance(workers, AttentionWorkers):
    raise OptionError(
      "workers",
      type(workers).__name__,
      "an AttentionWorkers",
      "make some with rj.infer.AttentionWorkers.start(4)",
    )
  refuse_placed(
    model, "decode beside workers", "load it without placement= and memory="
  )
  if model.mesh is not None:
    raise ConfigError(
      "model",
      f"weights on a mesh {dict(model.mesh.shape)}",
      "weights on one device",
      "load it without a mesh",
    )
  decoding = _Decoding(
    model=model,
    prompts=prompts,
    count=max_new_tokens,
    workers=workers,
    places=len(prompts) if rows is None else positive_int("rows", rows),
    sampler=sampler,
    stops=decode.stop_ids(ending.ids),
    cache_dtype=model.dtype
    if cache_dtype is None
    else float_dtype("cache_dtype", cache_dtype),
    kind=kinds.cache_kind(cache_kind),
    assignment=assignment,
    pad_id=integer("pad_id", pad_id, least=-(2**31), most=2**31 - 1),
  )
  group = decoding.places if group is None else positive_int("group", group)
  group = min(group, decoding.places)
  if starts is not None:
    # All groups are checked before the first one starts.
    for first in range(0, len(prompts), group):
      sizes = lengths[first : first + group]
      starts.check(sizes.size, max_new_tokens, prompts=int(sizes.sum()))
  with workers._alone():
    workers_report = decoding.run(group, starts, stream)
  if report is not None:
    report(workers_report)
  new = Generated(tokens=decoding.out, lengths=decoding.sizes)
  decoding.marked.check(model.dtype, new)
  return new


class _Half:
  """A mini-batch: places for rows, and the state of their decoding.

  Attributes:
    number: Number of the mini-batch, 0 or 1.
    places: Numbers of its places among all places, int [b].
    prompt: Number of the prompt in each place, int [b]; -1: the place is free.
    token: Last chosen token of each place, int32 [b].
    pos: Position of that token, int32 [b]; -1 in free places.
    length: Length of each prompt, int32 [b], for rotations.
    x: Hidden states between layers, [b, 1, D].
    by_worker: Indices of each worker's places in this mini-batch.
  """

  def __init__(self, number: int, places: np.ndarray, owner: np.ndarray):
    b = places.size
    self.number, self.places = number, places
    self.prompt = np.full(b, -1)
    self.token = np.zeros(b, np.int32)
    self.pos = np.full(b, -1, np.int32)
    self.length = np.ones(b, np.int32)
    self.x = None
    self.at = None
    self.by_worker = {
      int(w): np.flatnonzero(owner == w) for w in np.unique(owner)
    }

  @property
  def active(self) -> np.ndarray:
    """Mask of the places that have a row, bool [b]."""
    return self.prompt >= 0


class _Decoding:
  """State of one call of `generate_beside`."""

  def __init__(
    self,
    *,
    model: Transformer,
    prompts: list[np.ndarray],
    count: int,
    workers: AttentionWorkers,
    places: int,
    sampler: Any,
    stops: jax.Array,
    cache_dtype: np.dtype,
    kind: CacheConfig,
    assignment: Sequence[int] | None,
    pad_id: int,
  ):
    self.model, self.prompts, self.count = model, prompts, count
    self.workers, self.places = workers, min(places, len(prompts))
    self.sampler, self.stops = sampler, stops
    self.dtype = cache_dtype
    self.kind = kind.resident("attention workers")
    self.programs = workers._programs_of(model, self.kind)
    self.layers = self.programs.layers
    self._refuse()
    owner = np.arange(self.places) % len(workers)
    if assignment is not None:
      owner = _checked(assignment, self.places, len(workers))
    self.owner, self.marked = owner, NotFiniteRows()
    split = -(-self.places // 2)
    self.halves = [
      _Half(n, part, owner[part])
      for n, part in enumerate(
        (np.arange(split), np.arange(split, self.places))
      )
      if part.size
    ]
    longest = max(p.size for p in prompts)
    self.capacity = _rounded(longest) + count
    self.out = np.full((len(prompts), count), pad_id, np.int32)
    self.sizes = np.zeros(len(prompts), np.int32)
    self.needs_seen = getattr(sampler, "needs_seen", False)
    self.seen = np.zeros((len(prompts), model.config.vocab), bool)
    self.starts = np.full(len(prompts), -1)
    self.traffic: collections.Counter[str] = collections.Counter()
    self.waited_s, self.peak = 0.0, 0
    self.traced = traced(sampler)

  def _refuse(self) -> None:
    """Refuses models and cache kinds that workers do not support."""
    model = self.model
    unsupported = None
    if any(layer.spec.cross is not None for layer in self.layers):
      unsupported = "an encoder's states, which layers attend to"
    else:
      form = abstract(json.loads(model.source), dtype=model.dtype)
      size = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
      if form.config.layers != model.config.layers:
        unsupported = "layers that its config.json does not describe"
      elif size(form) != size(model):
        unsupported = "weights as codes, or with adapters"
    if self.kind.evicting or self.kind.layout.unrotated or self.kind.codec:
      raise OptionError(
        "cache_kind",
        str(self.kind),
        "dense or windowed",
        "leave it out: workers keep keys and values as they are",
      )
    if unsupported is not None:
      raise ConfigError(
        "model",
        unsupported,
        "attention over its own keys alone",
        "use generate",
      )

  def run(
    self,
    group: int,
    starts: StartRule | None,
    stream: Callable[..., Any] | None,
  ) -> WorkersReport:
    """Runs steps until all prompts are answered."""
    begin_s = time.perf_counter()
    sizes = [p.size for p in self.prompts]
    self._open()
    waiting = list(range(len(self.prompts)))
    reserved: int | None = None
    step = 0
    while waiting or any(half.active.any() for half in self.halves):
      fresh = np.full(len(self.prompts), -1, np.int32)
      free = [
        (half, int(n))
        for half in self.halves
        for n in np.flatnonzero(~half.active)
      ]
      # Places alternate, so that both mini-batches grow equally.
      free.sort(key=lambda place: (place[1], place[0].number))
      while waiting:
        group_size = min(group, len(waiting))
        if group_size > len(free):
          # The rule is asked when places are free: it plans from that step.
          break
        if reserved is None and starts is not None:
          reserved = starts.start(
            group_size,
            self.count,
            step,
            prompts=sum(sizes[n] for n in waiting[:group_size]),
          )
        if reserved is not None and reserved > step:
          break
        self._admit(waiting[:group_size], free[:group_size], step, fresh)
        del waiting[:group_size], free[:group_size]
        reserved = None
      if any(half.active.any() for half in self.halves):
        self._step(fresh)
      if stream is not None and (fresh >= 0).any():
        stream(fresh)
      step += 1
    return WorkersReport(
      assignment=tuple(map(int, self.owner)),
      starts=tuple(map(int, self.starts)),
      peak_tokens=self.peak,
      traffic=WorkerTraffic(**self.traffic),
      waited_s=self.waited_s,
      seconds=time.perf_counter() - begin_s,
    )

  def _open(self) -> None:
    """Makes the workers allocate their caches."""
    small = []
    for layer in self.layers:
      _, small_weights = self.programs.mixing_weights(
        self.programs.weights(layer)
      )
      small.append(
        [None if x is None else np.asarray(x) for x in small_weights]
      )
    flat = [x for layer in small for x in layer if x is not None]
    for n in range(len(self.workers)):
      self.workers[n].send(
        "open",
        flat,
        config=self.model.source,
        dtype=self.model.dtype.name,
        cache_dtype=np.dtype(self.dtype).name,
        cache_kind=str(self.kind),
        capacity=self.capacity,
        rows=[int(half.by_worker.get(n, np.zeros(0)).size)
              for half in self.halves],
        small=[[x is not None for x in layer] for layer in small],
      )  # fmt: skip
    for n in range(len(self.workers)):
      self._answer_of(n, "opened")

  # -------------------------------------------------------------------------
  # Starts
  # -------------------------------------------------------------------------

  def _answer_of(self, worker: int, kind: str) -> ArrayMessage:
    """Wait for a worker's next answer; one that is stuck beats all the same."""
    patience_s = self.workers.patience_s
    return self.workers[worker].take(kind, within_s=patience_s)

  def _admit(
    self,
    numbers: list[int],
    places: list[tuple[_Half, int]],
    step: int,
    fresh: np.ndarray,
  ) -> None:
    """Reads prompts, ships their keys and chooses their first tokens."""
    prompts = [self.prompts[n] for n in numbers]
    lengths = np.array([p.size for p in prompts])
    session_options = dict(
      mesh=None, axis=None, dtype=self.dtype, cache_kind=self.kind,
      rows_at_once=None,
    )  # fmt: skip
    start = np.zeros(len(prompts), np.int64)
    session, reading, total = planned(
      self.model, None, PrefillConfig(), session_options, start, lengths, 1
    )
    logits = read_prompts(
      self.model, session, reading, prompts, start, total, None, None
    )
    host_slots = jax.device_get(session.cache.slots)
    for row, (half, n) in enumerate(places):
      # Ring buffers have only the last tokens.
      end = int(lengths[row])
      slots, rings = session.cache.located(session.cache.at, row, 0, end)
      slots_by_kind = [
        slots if r is None else rings[r] for r in session.cache.ring_of
      ]
      kinds_kv = [
        [x[:, row][:, :, index] for x in session.cache.unfilled(kind, kv)]
        for kind, (kv, index) in enumerate(
          zip(host_slots, slots_by_kind, strict=True)
        )
      ]
      self._ship(kinds_kv, end, half, n)
      half.prompt[n], half.length[n] = numbers[row], lengths[row]
      self.starts[numbers[row]] = step
      self.seen[numbers[row], prompts[row]] = True
    first_tokens = self._chosen(logits, lengths, np.array(numbers))
    for row, (half, n) in enumerate(places):
      half.token[n], half.pos[n] = first_tokens[0][row], lengths[row]
      self._take(half, n, first_tokens[0][row], first_tokens[1][row], fresh)

  def _ship(
    self, kinds: list[list[np.ndarray]], end: int, half: _Half, n: int
  ) -> None:
    """Sends a prompt's keys and values [L, K, S, H] to the place's worker."""
    worker = int(self.owner[half.places[n]])
    row = int(np.searchsorted(half.by_worker[worker], n))
    for at, layer in enumerate(self.layers):
      k, v = (x[layer.index] for x in kinds[layer.kind])
      pad = [(0, 0), (0, _rounded(k.shape[1]) - k.shape[1]), (0, 0)]
      self.traffic["prompt_bytes"] += self.workers[worker].send(
        "load",
        [np.pad(x, pad)[None] for x in (k, v)],
        half=half.number,
        layer=at,
        row=row,
        first=end - k.shape[1],
        end=end,
      )

  # -------------------------------------------------------------------------
  # Steps
  # -------------------------------------------------------------------------

  def _step(self, fresh: np.ndarray) -> None:
    """Decodes a token of each row by layers, alternating mini-batches."""
    programs, layers = self.programs, self.layers
    halves = [half for half in self.halves if half.active.any()]
    cached_tokens = 0
    for half in halves:
      half.at = TokenRows(half.pos, half.length)
      cached_tokens += int(half.pos[half.active].sum()) + int(half.active.sum())
      self.traffic["steps"] += 1
      self.traffic["row_steps"] += int(half.active.sum())
      half.x = programs.embed(half.token[:, None])
    self.peak = max(self.peak, cached_tokens)
    for layer, weights in programs.walk(layers, stacked=True):
      n = layer.number
      for half in halves:
        if n:
          self._finish(half, n - 1)
        projected = programs.project(
          layer.spec, weights, half.x, half.at, self.dtype
        )
        self._ask(half, n, jax.device_get(projected))
    for half in halves:
      self._finish(half, len(layers) - 1)
      assert half.x is not None
      logits = programs.head(half.x, np.int32(0))
      # Asynchronous: the other mini-batch is finished meanwhile.
      half.x = self._choose(logits, half.pos + 1, half.prompt)
    for half in halves:
      token, ended = jax.device_get(half.x)
      for n in map(int, np.flatnonzero(half.active)):
        half.token[n], half.pos[n] = token[n], half.pos[n] + 1
        self._take(half, n, token[n], ended[n], fresh)

  def _ask(self, half: _Half, layer: int, made: Any) -> None:
    """Sends queries, keys and values of a layer to the rows' workers."""
    q, k, v = made
    for worker, rows in half.by_worker.items():
      if (half.pos[rows] >= 0).any():
        self.traffic["sent_bytes"] += self.workers[worker].send(
          "attend",
          [q[rows], k[rows], v[rows], half.pos[rows]],
          half=half.number,
          layer=layer,
        )

  def _finish(self, half: _Half, number: int) -> None:
    """Collects the attention outputs, and runs the rest of a layer."""
    layer, mixed = self.layers[number], None
    begin_s = time.perf_counter()
    for worker, rows in half.by_worker.items():
      if not (half.pos[rows] >= 0).any():
        continue
      answer = self._answer_of(worker, "attended")
      self.traffic["received_bytes"] += answer.nbytes
      (part,) = answer.arrays
      if mixed is None:
        mixed = np.zeros((half.places.size, *part.shape[1:]), part.dtype)
      if part.shape != (rows.size, *mixed.shape[1:]):
        raise PeerError(
          f"{self.workers[worker].name} answered {part.shape} for "
          f"{rows.size} rows"
        )
      mixed[rows] = part
    self.waited_s += time.perf_counter() - begin_s
    half.x = self.programs.finish(
      layer.spec, self.programs.in_stack(layer), half.x, mixed, half.at
    )

  def _choose(self, logits: jax.Array, pos: Any, prompt: np.ndarray) -> Any:
    # Free places get a token, too, which is ignored.
    number = np.maximum(prompt, 0)
    seen = self.seen[number] if self.needs_seen else None
    rows = number.astype(np.int32) if isinstance(self.sampler, Sample) else None
    return _next_tokens(
      self.traced, logits, pos.astype(np.int32), seen, rows, self.stops
    )

  def _chosen(self, logits: jax.Array, pos: Any, prompt: np.ndarray) -> Any:
    return jax.device_get(self._choose(logits, pos, prompt))

  def _take(
    self, half: _Half, n: int, token: Any, done: Any, fresh: np.ndarray
  ) -> None:
    """Records a row's token; frees the row's place after its last one."""
    prompt = half.prompt[n]
    if token == NOT_FINITE:
      self.marked.at[int(prompt)] = int(half.pos[n])
      half.prompt[n], half.pos[n], half.token[n] = -1, -1, 0
      return
    self.out[prompt, self.sizes[prompt]] = fresh[prompt] = token
    self.sizes[prompt] += 1
    self.seen[prompt, token] = True
    if done or self.sizes[prompt] == self.count:
      half.prompt[n], half.pos[n] = -1, -1


@bounded
@jax.jit
def _next_tokens(
  sampler: Callable[..., Any],
  logits: Float[Array, "B V"],
  pos: Int[Array, " B"],
  seen: Bool[Array, "B V"] | None,
  rows: Int[Array, " B"] | None,
  stops: Int[Array, " n"],
) -> tuple[jax.Array, jax.Array]:
  """Chooses tokens [B]; also returns whether they end their rows."""
  row_numbers = {} if rows is None else {"rows": rows}
  token = or_not_finite(sampler(logits, pos, seen, **row_numbers), logits)
  return token, jnp.any(token[:, None] == stops[None], 1)


def _rounded(tokens: int) -> int:
  """Padded size of a prompt's block, so that few sizes are compiled."""
  size = LOAD_TOKENS
  while size < tokens:
    size *= 2
  return size


def _checked(
  assignment: Sequence[int], places: int, workers: int
) -> np.ndarray:
  owners = np.asarray(assignment)
  valid = owners.shape == (places,) and np.issubdtype(owners.dtype, np.integer)
  if not valid or not ((owners >= 0) & (owners < workers)).all():
    raise OptionError(
      "assignment",
      f"{assignment}"[:80],
      f"{places} numbers of workers, 0 to {workers - 1}",
      "pass one for each place, or leave it out",
    )
  return owners
