"""Attention beside the caches of other processes, for models that decode here.

Guarantees: tokens are those of `generate`, with any number of workers and any
assignment of rows to them; a worker that dies or says nothing for longer than
the workers' patience is named in a `PeerError`, and nothing waits longer.
Cost: a step sends q, k and v of each row and layer and gets one vector a head
back: (N + 2 K) H + N J numbers, whatever the context, and once the keys and
values of its prompt. Two mini-batches take turns: while workers attend for one
the weights' part of the other runs here.
Memory: here the weights and, while a prompt is read, its cache; keys and
values are on the workers.
Ref: He and Zhai 2024, FastDecode, arXiv 2403.11421. When sequences start, and
on how many CPUs: `rj.serve.cluster.LoadControl` and `choose_workers`.

The link to a worker is authenticated and not encrypted, see `transfer.wire`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import queue
import secrets
import selectors
import socket
import subprocess
import sys
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
from ringjax.infer.attention_wire import (
  ArrayMessage,
  receive_arrays,
  send_arrays,
)
from ringjax.infer.attention_worker import (
  LOAD_TOKENS,
  PATIENCE_S,
  AttentionServer,
)
from ringjax.infer.finite import NOT_FINITE, NotFiniteRows, or_not_finite
from ringjax.infer.first_line import first_line
from ringjax.infer.generate import Generated
from ringjax.infer.inputs import Prompts
from ringjax.infer.layerwise import LayerPrograms, TokenRows
from ringjax.infer.prefill import PrefillOptions
from ringjax.infer.prompt_reading import (
  check_call,
  check_context,
  planned,
  read_prompts,
)
from ringjax.infer.sampling import Sample, from_names, traced
from ringjax.infer.stopping import Stop, as_stop
from ringjax.json_text import json_text
from ringjax.kv import cache_kind as kinds
from ringjax.kv.cache_kind import CacheKind
from ringjax.models.checkpoint import abstract
from ringjax.models.transformer import Transformer
from ringjax.models.weight_placement import refuse_placed
from ringjax.parallel.programs import bounded
from ringjax.transfer.wire import PullConnection, checked_key

# How long a process may take until it listens.
_START_S = 120.0


@runtime_checkable
class StartRule(Protocol):
  """Says when sequences start, as `rj.serve.cluster.LoadControl` does."""

  def check(self, rows: int, steps: int, *, prompts: int) -> None:
    """Raises a `RingjaxError` if these could never start; see `start`."""
    ...

  def start(self, rows: int, steps: int, now: int, *, prompts: int) -> int:
    """The step from `now` on at which so many rows start.

    Args:
      rows: how many start together; they have places that are free.
      steps: tokens that are generated for each, at most.
      now: the step that comes next.
      prompts: tokens of all their prompts together.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerTraffic:
  """Bytes on the wire to and from workers, headers included.

  Attributes:
    prompt_bytes: keys and values of prompts.
    sent_bytes: of steps: queries, keys and values of new tokens.
    received_bytes: of steps: what attention made.
    steps: steps of single mini-batches.
    row_steps: rows of these.
  """

  prompt_bytes: int = 0
  sent_bytes: int = 0
  received_bytes: int = 0
  steps: int = 0
  row_steps: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkersReport:
  """What a call with workers did.

  Attributes:
    assignment: the worker of each place of a row.
    starts: the step at which each prompt's answer began.
    peak_tokens: cached at most, by all workers together.
    traffic: on the wire.
    waited_s: seconds in which nothing ran here, for workers attended.
    seconds: of all.
  """

  assignment: tuple[int, ...]
  starts: tuple[int, ...]
  peak_tokens: int
  traffic: WorkerTraffic
  waited_s: float
  seconds: float


class _WorkerLink:
  """The connection to a worker, with a thread that receives."""

  def __init__(self, link: PullConnection):
    self.link = link
    self._came: queue.Queue[ArrayMessage | PeerError] = queue.Queue()
    threading.Thread(
      target=self._receive, name=f"ringjax {link.name}", daemon=True
    ).start()

  def _receive(self) -> None:
    # Unlike epoll it notices that the socket is closed by another thread.
    wait = selectors.PollSelector()
    try:
      wait.register(self.link.link, selectors.EVENT_READ)
      # A worker may say nothing while it is asked nothing: `next` counts. Its
      # socket keeps its patience, for what is sent and within a message.
      while wait.select() and (found := receive_arrays(self.link)) is not None:
        self._came.put(found)
      self._came.put(PeerError(f"{self.link.name} is gone: it closed"))
    except PeerError as error:
      self._came.put(error)
    except (OSError, ValueError) as error:
      self._came.put(PeerError(f"{self.link.name} is gone: {error}"))
    finally:
      wait.close()

  def send(self, kind: str, arrays: Sequence[Any] = (), **fields: Any) -> int:
    """As `send_arrays`."""
    return send_arrays(self.link, kind, arrays, **fields)

  def next(self, kind: str) -> ArrayMessage:
    """The answer that comes next.

    Raises:
      PeerError: it does not come in time, or the worker failed.
    """
    try:
      found = self._came.get(timeout=self.link.patience_s)
    except queue.Empty:
      raise PeerError(
        f"{self.link.name} has answered nothing for {self.link.patience_s:g} s"
      ) from None
    if isinstance(found, PeerError):
      # Others that wait for it are told too.
      self._came.put(found)
      raise found
    if found.kind == "failed":
      why = str(found.fields.get("why"))[:400]
      raise PeerError(f"{self.link.name} failed: {why}")
    if found.kind != kind:
      raise PeerError(f"{self.link.name} answered {found.kind}, not {kind}")
    return found


class AttentionWorkers:
  """Processes that attend: `start` makes some, `connect` finds others."""

  def __init__(
    self,
    addresses: Sequence[tuple[str, int]],
    key: bytes,
    *,
    patience_s: int | float = PATIENCE_S,
  ):
    """Connects.

    Args:
      addresses: host and port of each worker.
      key: the workers' key.
      patience_s: seconds for which a worker may be silent when it is asked
        something. The first answers take a compilation.

    Raises:
      PeerError: a worker is not there, or has another key.
      OptionError: no address, or a patience that is not above 0.
    """
    number("patience_s", patience_s, above=0)
    if not addresses:
      raise OptionError("addresses", "none", "one or more", "name workers")
    key = checked_key(key)
    self.patience_s = patience_s
    self.processes: tuple[subprocess.Popen[str], ...] = ()
    self._servers: tuple[AttentionServer, ...] = ()
    self._workers: list[_WorkerLink] = []
    self._busy = threading.Lock()
    self._last: tuple[Transformer, CacheKind, LayerPrograms] | None = None
    try:
      for n, (host, port) in enumerate(addresses):
        name = f"attention worker {n} ({host}:{port})"
        try:
          made = socket.create_connection((host, port), patience_s)
        except OSError as error:
          raise PeerError(f"{name} does not listen: {error}", n) from None
        link = PullConnection(made, patience_s, name)
        try:
          link.greet_publisher(key)
        except PeerError:
          link.close()
          raise
        self._workers.append(_WorkerLink(link))
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
    """Workers that run elsewhere; the arguments are those of the class."""
    return cls(addresses, key, patience_s=patience_s)

  @classmethod
  def start(
    cls, count: int, *, patience_s: int | float = PATIENCE_S
  ) -> AttentionWorkers:
    """Processes of this machine, which end with this one.

    Args:
      count: how many.
      patience_s: see the class.

    Raises:
      PeerError: one does not start.
    """
    positive_int("count", count)
    key = secrets.token_bytes(32)
    environ = {
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
    }
    made: list[subprocess.Popen[str]] = []
    try:
      for _ in range(count):
        made.append(
          subprocess.Popen(
            [sys.executable, "-m", "ringjax.infer.attention_worker"],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
          )
        )
        told = {"key": key.hex(), "patience_s": patience_s}
        assert made[-1].stdin is not None
        made[-1].stdin.write(json_text(told) + "\n")
        made[-1].stdin.flush()
      addresses = []
      for n, process in enumerate(made):
        host, port = first_line("attention worker", n, process, _START_S)
        addresses.append((host, port))
      self = cls(addresses, key, patience_s=patience_s)
    except BaseException:
      _end(made)
      raise
    self.processes = tuple(made)
    return self

  @classmethod
  def in_threads(
    cls, count: int, *, patience_s: int | float = PATIENCE_S
  ) -> AttentionWorkers:
    """Workers in threads of this process, to try things out."""
    positive_int("count", count)
    key = secrets.token_bytes(32)
    servers = [
      AttentionServer(key, patience_s=patience_s) for _ in range(count)
    ]
    for one in servers:
      threading.Thread(target=one.serve, daemon=True).start()
    self = cls([x.address for x in servers], key, patience_s=patience_s)
    self._servers = tuple(servers)
    return self

  def __enter__(self) -> AttentionWorkers:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def __len__(self) -> int:
    """How many workers there are."""
    return len(self._workers)

  def __getitem__(self, number: int) -> _WorkerLink:
    return self._workers[number]

  def close(self) -> None:
    """Ends the connections, and the processes that `start` made."""
    for one in self._workers:
      one.link.close()
    for server in self._servers:
      server.close()
    _end(self.processes)

  def _programs_of(self, model: Transformer, kind: CacheKind) -> LayerPrograms:
    """The programs of the last call, if its model was this one."""
    known = self._last
    if known is None or known[0] is not model or known[1] != kind:
      self._last = known = model, kind, LayerPrograms(model, kind=kind)
    return known[2]

  @contextlib.contextmanager
  def _alone(self):
    """One call at a time; after a failure the connections are of no use."""
    if not self._busy.acquire(blocking=False):
      raise OptionError(
        "workers",
        "some that attend for another call, or failed in one",
        "workers that are free",
        "start others",
      )
    yield
    # Of a call that failed answers may still come.
    self._busy.release()


def _end(processes: Iterable[subprocess.Popen[str]]) -> None:
  for one in processes:
    # First: a thread that reads its pipe holds the pipe's lock.
    one.kill()
    for pipe in (one.stdin, one.stdout):
      if pipe is not None:
        with contextlib.suppress(OSError):
          pipe.close()
    one.wait()


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
  cache_kind: CacheKind | str = "windowed",
  stream: Callable[[Int[np.ndarray, " B"]], Any] | None = None,
  report: Callable[[WorkersReport], Any] | None = None,
  pad_id: int = 0,
) -> Generated:
  """Continues prompts, with attention on workers.

  Args:
    model: on one device.
    tokens: int32 [B, T], or B sequences of ids of different lengths.
    workers: which attend.
    max_new_tokens: how many tokens to add at most.
    sampler: chooses a token from logits; default `Greedy()`.
    stop: ids behind which a row ends.
    rows: places for sequences, two mini-batches together; prompts beyond them
      wait until one is free. Default: all prompts at once.
    group: prompts that start together; default: all that have a place.
    starts: says when a group may start, for instance
      `rj.serve.cluster.LoadControl(limit)`; default: at once.
    assignment: the number of a worker for each place; default: in turn.
    cache_dtype: of keys and values; default: the model's.
    cache_kind: how workers store them; see `generate`.
    stream: called with each token that is chosen, int32 [B], -1 for rows
      without one.
    report: called with what was done, at the end.
    pad_id: fills up rows that stopped early.

  Returns:
    The new tokens, as `generate`.

  Raises:
    PeerError: a worker failed, died or is silent for too long; it is named,
      and the workers are of no use then.
    ConfigError: layers that keep more than keys and values (recurrent ones,
      latents), an encoder's states, or weights on a mesh.
    NotFiniteLogitsError: see `generate`.
    RingjaxError: as `generate`.
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
  made = _Decoding(
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
  group = made.places if group is None else positive_int("group", group)
  group = min(group, made.places)
  if starts is not None:
    # Before any is answered.
    for first in range(0, len(prompts), group):
      sizes = lengths[first : first + group]
      starts.check(sizes.size, max_new_tokens, prompts=int(sizes.sum()))
  with workers._alone():
    found = made.run(group, starts, stream)
  if report is not None:
    report(found)
  new = Generated(tokens=made.out, lengths=made.sizes)
  made.marked.check(model.dtype, new)
  return new


class _Half:
  """A mini-batch: places of rows, and what they are doing.

  Attributes:
    number: 0 or 1.
    places: numbers of its places among all.
    prompt: of each place, the number of its prompt; -1: it is free.
    token: int32 [b], chosen last.
    pos: int32 [b], their positions; -1 where there is none.
    length: int32 [b], of the prompts, for rotations.
    x: [b, 1, D], on its way through the layers.
    by_worker: the places of each worker, counted in this half.
  """

  def __init__(self, number: int, places: np.ndarray, owner: np.ndarray):
    b = places.size
    self.number, self.places = number, places
    self.prompt = np.full(b, -1)
    self.token = np.zeros(b, np.int32)
    self.pos = np.full(b, -1, np.int32)
    self.length = np.ones(b, np.int32)
    self.x: Any = None
    self.at: Any = None
    self.by_worker = {
      int(w): np.flatnonzero(owner == w) for w in np.unique(owner)
    }

  @property
  def active(self) -> np.ndarray:
    """Which places have a row, bool [b]."""
    return self.prompt >= 0


class _Decoding:
  """One call of `generate_beside`."""

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
    kind: CacheKind,
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
    """Refuses what workers do not attend over."""
    model = self.model
    got = None
    if any(layer.spec.cross is not None for layer in self.layers):
      got = "an encoder's states, which layers attend to"
    else:
      form = abstract(json.loads(model.source), dtype=model.dtype)
      size = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
      if form.config.layers != model.config.layers:
        got = "layers that its config.json does not describe"
      elif size(form) != size(model):
        got = "weights as codes, or with adapters"
    if self.kind.evicting or self.kind.unrotated or self.kind.codec:
      raise OptionError(
        "cache_kind",
        str(self.kind),
        "dense or windowed",
        "leave it out: workers keep keys and values as they are",
      )
    if got is not None:
      raise ConfigError(
        "model", got, "attention over its own keys alone", "use generate"
      )

  def run(
    self,
    group: int,
    starts: StartRule | None,
    stream: Callable[..., Any] | None,
  ) -> WorkersReport:
    """Takes steps until all prompts are answered."""
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
      # Both mini-batches grow alike.
      free.sort(key=lambda one: (one[1], one[0].number))
      while waiting:
        many = min(group, len(waiting))
        if many > len(free):
          # Asked for once it can start: an answer ends S steps later.
          break
        if reserved is None and starts is not None:
          reserved = starts.start(
            many,
            self.count,
            step,
            prompts=sum(sizes[n] for n in waiting[:many]),
          )
        if reserved is not None and reserved > step:
          break
        self._admit(waiting[:many], free[:many], step, fresh)
        del waiting[:many], free[:many]
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
    """Has the workers make their caches."""
    small = []
    for layer in self.layers:
      _, found = self.programs.mixing_weights(self.programs.weights(layer))
      small.append([None if x is None else np.asarray(x) for x in found])
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
      self.workers[n].next("opened")

  # -------------------------------------------------------------------------
  # Starts
  # -------------------------------------------------------------------------

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
    own = dict(
      mesh=None, axis=None, dtype=self.dtype, cache_kind=self.kind,
      rows_at_once=None,
    )  # fmt: skip
    start = np.zeros(len(prompts), np.int64)
    session, how, total = planned(
      self.model, None, PrefillOptions(), own, start, lengths, 1
    )
    logits = read_prompts(
      self.model, session, how, prompts, start, total, None, None
    )
    held = jax.device_get(session.cache.slots)
    for row, (half, n) in enumerate(places):
      # Of ring buffers the last tokens alone.
      end = int(lengths[row])
      slots, rings = session.cache.located(session.cache.at, row, 0, end)
      which = [slots if r is None else rings[r] for r in session.cache.ring_of]
      taken = [
        [x[:, row][:, :, index] for x in session.cache.unfilled(kind, kv)]
        for kind, (kv, index) in enumerate(zip(held, which, strict=True))
      ]
      self._ship(taken, end, half, n)
      half.prompt[n], half.length[n] = numbers[row], lengths[row]
      self.starts[numbers[row]] = step
      self.seen[numbers[row], prompts[row]] = True
    found = self._chosen(logits, lengths, np.array(numbers))
    for row, (half, n) in enumerate(places):
      half.token[n], half.pos[n] = found[0][row], lengths[row]
      self._take(half, n, found[0][row], found[1][row], fresh)

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
    """One token of each row: the two mini-batches in turn, layer by layer."""
    programs, layers = self.programs, self.layers
    halves = [half for half in self.halves if half.active.any()]
    held = 0
    for half in halves:
      half.at = TokenRows(half.pos, half.length)
      held += int(half.pos[half.active].sum()) + int(half.active.sum())
      self.traffic["steps"] += 1
      self.traffic["row_steps"] += int(half.active.sum())
      half.x = programs.embed(programs.outer, half.token[:, None])
    self.peak = max(self.peak, held)
    for n, layer in enumerate(layers):
      for half in halves:
        if n:
          self._finish(half, n - 1)
        made = programs.project(
          layer.spec, programs.in_stack(layer), half.x, half.at, self.dtype
        )
        self._ask(half, n, jax.device_get(made))
    for half in halves:
      self._finish(half, len(layers) - 1)
      logits = programs.head(programs.outer, half.x, np.int32(0))
      # Dispatched: the other mini-batch is finished meanwhile.
      half.x = self._choose(logits, half.pos + 1, half.prompt)
    for half in halves:
      token, done = jax.device_get(half.x)
      for n in map(int, np.flatnonzero(half.active)):
        half.token[n], half.pos[n] = token[n], half.pos[n] + 1
        self._take(half, n, token[n], done[n], fresh)

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
    """Collects what attention made, and runs the rest of a layer."""
    layer, mixed = self.layers[number], None
    begin_s = time.perf_counter()
    for worker, rows in half.by_worker.items():
      if not (half.pos[rows] >= 0).any():
        continue
      came = self.workers[worker].next("attended")
      self.traffic["received_bytes"] += came.nbytes
      (part,) = came.arrays
      if mixed is None:
        mixed = np.zeros((half.places.size, *part.shape[1:]), part.dtype)
      if part.shape != (rows.size, *mixed.shape[1:]):
        raise PeerError(
          f"{self.workers[worker].link.name} answered {part.shape} for "
          f"{rows.size} rows"
        )
      mixed[rows] = part
    self.waited_s += time.perf_counter() - begin_s
    half.x = self.programs.finish(
      layer.spec, self.programs.in_stack(layer), half.x, mixed, half.at
    )

  def _choose(self, logits: jax.Array, pos: Any, prompt: np.ndarray) -> Any:
    # Rows of free places choose something that is not looked at.
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
    """Notes a row's token; the row's place is free behind its last one."""
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
  """Tokens [B], and whether they end their rows."""
  more = {} if rows is None else {"rows": rows}
  token = or_not_finite(sampler(logits, pos, seen, **more), logits)
  return token, jnp.any(token[:, None] == stops[None], 1)


def _rounded(tokens: int) -> int:
  """Tokens of a block that are loaded at once, of few sizes."""
  size = LOAD_TOKENS
  while size < tokens:
    size *= 2
  return size


def _checked(
  assignment: Sequence[int], places: int, workers: int
) -> np.ndarray:
  found = np.asarray(assignment)
  good = found.shape == (places,) and np.issubdtype(found.dtype, np.integer)
  if not good or not ((found >= 0) & (found < workers)).all():
    raise OptionError(
      "assignment",
      f"{assignment}"[:80],
      f"{places} numbers of workers, 0 to {workers - 1}",
      "pass one for each place, or leave it out",
    )
  return found
