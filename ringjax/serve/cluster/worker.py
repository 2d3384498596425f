"""An engine as an instance of a cluster: reads prompts, answers, or both.

Guarantees: an answer's tokens are those of the engine alone; pages of a prompt
that was read stay published until a reader has them all (COMPLETE) or until
their lease is over, which is renewed only while the router wants them; pages of
another instance are pulled once there is room for the whole request, never
before. If the router is gone, all that it asked for is given up, and the worker
joins again when it is back.
Cost: a thread for the link to the router, one that waits for room, and a few
that copy pages, beside the engine's steps (see `serve/prefix_transfer.py`); a
walk through all blocks for each beat in which there were steps, between two of
them.
Memory: pages that are published, and pages that came, in the host's memory;
with a `DeviceServer` those that are published stay on the devices, up to
`device_bytes`.

Of a prompt that is streamed, and an engine with `layer_parts`, pages leave in
the middle of a step: each part of the layers while the next one computes, the
last one when the step is known to be good.

Each instance can do both. A role only says what the router sends to it, so
that another role takes no step and no request away.
Ref: Zhong et al. 2024, DistServe (OSDI), arXiv 2401.09670; KVDirect, arXiv
2501.14743: the side that decodes pulls.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import socket
import threading
import time
from typing import Any

import numpy as np

from ringjax.checks import number, one_of, positive_int
from ringjax.errors import (
  InputTypeError,
  OptionError,
  PeerError,
  PromptError,
  RingjaxError,
)
from ringjax.infer import inputs
from ringjax.kv.page_pool import PagePool
from ringjax.serve.cluster.block_index import (
  BlockEvent,
  BlockLog,
  short_key,
  tree_keys,
)
from ringjax.serve.cluster.call_log import measure_calls
from ringjax.serve.cluster.control_link import (
  ControlLink,
  checked_beat,
  dial,
)
from ringjax.serve.cluster.fitted_times import instance_times
from ringjax.serve.cluster.phase_times import QuadraticTimes
from ringjax.serve.cluster.request_fields import request_of
from ringjax.serve.cluster.routing import MOST_QUEUED, ROLES
from ringjax.serve.engine import Engine
from ringjax.serve.grammar import GrammarCompiler
from ringjax.serve.prefix_transfer import (
  ExportedPrefix,
  LayerCopies,
  LayerParts,
  PrefixHashes,
  begin_layers,
  copied_pages,
  export_prefix,
  import_prefix,
  prefix_layout,
)
from ringjax.serve.prefix_tree import OutOfPages
from ringjax.serve.request import Answer, Handle, Request
from ringjax.serve.scheduler import PromptPiece
from ringjax.transfer import DeviceServer, Publisher, Ticket, pull
from ringjax.transfer.client import Address
from ringjax.transfer.wire import PullConnection

_COPIES = 4
# Copies of pages that wait for who answers, in sizes of the engine's pool.
_PUBLISHED = 4
# Parts of a prompt have whole pages of any size.
_PART = 128
# How long to wait before joining again.
_AGAIN_S = 0.5


def check_engine(engine: object) -> None:
  """Refuses what else reads prompts, such as a `ChunkPipeline`.

  Raises:
    InputTypeError: it is no engine.
    OptionError: it reads parts of prefixes.
  """
  if not isinstance(engine, Engine):
    raise InputTypeError(
      "engine",
      type(engine).__name__,
      "an rj.serve.Engine, which has all layers and their pages in one process",
      "make one of the model; rj.infer.ChunkPipeline reads a prompt through "
      "stages without a router",
    )
  if engine.important is not None:
    raise OptionError(
      "engine",
      f"an engine with important={engine.important.share}, as an instance",
      "one whose pages are those of whole prefixes",
      "leave important out",
    )


@dataclasses.dataclass(eq=False)
class WorkerTask:
  """What the router asked for: a prompt to read, or a request to answer.

  Attributes:
    number: of the task.
    request: of the engine.
    tokens: that it takes in the pool at most.
    reads: whether the prompt is to be read, and no more.
    offers: whether only pages of it are to be published that are there.
    link: of the router that asked.
    tickets: of pages to pull before it is answered, first ones first.
    more: whether others come, of a prompt that is still being read.
    pulled: pages that were pulled, of their publisher's size, and their bytes.
    pulling: whether a thread pulls.
    address: of their publisher.
    handle: once the engine has it.
    admitted: whether it may take its room.
    stream: of a prompt to read, after how many tokens pages are published; 0
      for all at its end.
    offers_made: the tickets of its own pages that are published.
    pages: how many these are.
    copying: whether a part is about to be published.
    begun: pages behind these of which layers leave in the step that computes
      them; 0 for none.
    early: copies of such layers that are not yet published.
    layered: of how many such pages layers are published, and up to which
      layer.
    waits: whether a thread is about to publish `early`.
    parts: of pages that come.
    publishes: held while pages are published, in their order.
    published: whether all were copied, or could not be.
    dropped: whether it is not wanted any more.
    hashes: of the prompt's pages, which its parts share.
    sent: of each answer, tokens and characters that the router knows.
  """

  number: int
  request: Request
  tokens: int
  reads: bool
  link: ControlLink
  offers: bool = False
  tickets: collections.deque[Ticket] = dataclasses.field(
    default_factory=collections.deque
  )
  more: bool = False
  pulled: tuple[int, int] = (0, 0)
  pulling: bool = False
  address: Address = ("", 0)
  handle: Handle | None = None
  admitted: bool = False
  stream: int = 0
  offers_made: list[Ticket] = dataclasses.field(default_factory=list)
  pages: int = 0
  copying: bool = False
  begun: int = 0
  early: collections.deque[LayerCopies] = dataclasses.field(
    default_factory=collections.deque
  )
  layered: tuple[int, int] = (0, 0)
  waits: bool = False
  parts: LayerParts | None = None
  publishes: threading.Lock = dataclasses.field(default_factory=threading.Lock)
  published: bool = False
  dropped: bool = False
  hashes: PrefixHashes = dataclasses.field(default_factory=PrefixHashes)
  sent: list[tuple[int, int]] = dataclasses.field(default_factory=list)

  @property
  def holds(self) -> bool:
    """Whether it needs the pool: pages that are published do not."""
    return not self.published and not self.offers


class ClusterWorker:
  """Joins a router with an engine, and does what it asks.

  Attributes:
    name: in the cluster.
    role: what the router sends to it, of `ROLES`.
    publisher: of pages that it has read.
    joined: set while the router has it.
    ended: set when it joins no more: it was closed, or its engine failed.
    refused: why the router did not take it, or "".
    notice: an option of the engine that does nothing with this router, or "".
    times: of the engine's calls, measured for a router that predicts with
      them; None until one has asked.
  """

  def __init__(
    self,
    engine: Engine,
    *,
    key: bytes,
    router: Address,
    role: str = "both",
    name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    lease_s: int | float = 30.0,
    silence_s: int | float = 10.0,
    beat_s: int | float = 0.25,
    devices: DeviceServer | None = None,
    device_bytes: int = 1 << 30,
  ):
    """Joins with `start`.

    Args:
      engine: with a `store=`, and a `share` other than "nothing".
      key: that all of the cluster have, at least 16 bytes.
      router: host and port where instances join.
      role: "prefill", "decode" or "both".
      name: unique in the cluster; default: of role, host and process.
      host: the address of this machine where others pull pages; 0.0.0.0 for
        the one by which it reaches the router.
      port: for this; 0 takes a free one.
      lease_s: seconds that pages stay published when the router does not ask
        for them any more, as when it is gone.
      silence_s: seconds without a byte after which a router, or a publisher
        of pages, is given up.
      beat_s: how often the router is told how much there is to do.
      devices: sends pages from the engine's devices, and takes those of other
        instances into the host's memory, where both have one.
      device_bytes: of copies of pages that are published and stay on the
        devices, 16 pages at least (`copied_pages`); prompts beyond these are
        copied to the host.

    Raises:
      OptionError: an engine that can't move pages, or values out of range.
    """
    check_engine(engine)
    if engine.store_link is None:
      raise OptionError(
        "engine",
        "an engine without a store",
        "one into whose store pages of others can go",
        "pass store=rj.store.Store(host=1 << 30) to it",
      )
    one_of("role", role, ROLES)
    self._lease_s = number("lease_s", lease_s, above=0)
    self._silence_s, self._beat_s = checked_beat(silence_s, beat_s)
    if lease_s < 4 * beat_s:
      raise OptionError(
        "lease_s",
        lease_s,
        f"at least {4 * beat_s:g}, four times beat_s, which renews it",
        "pass a longer one",
      )
    self._layout = prefix_layout(engine)
    tree = engine.scheduler.tree
    self._capacity = tree.groups[0].pages * tree.shards * tree.page
    self._engine, self._key, self._router = engine, key, router
    self._grammars = None
    if engine.tokenizer is not None:
      self._grammars = GrammarCompiler(engine.tokenizer, engine.vocab)
    self._devices = devices
    self._device_bytes = positive_int("device_bytes", device_bytes)
    self.publisher = Publisher(
      key,
      host=host,
      port=port,
      lease_s=lease_s,
      patience_s=silence_s,
      devices=devices,
    )
    where = f"{socket.gethostname()}-{os.getpid()}-{self.publisher.address[1]}"
    self.name, self.role = name or f"{role}-{where}", role
    self.joined, self.ended = threading.Event(), threading.Event()
    self.refused = self.notice = ""
    self.times: QuadraticTimes | None = None
    self._work = threading.Condition()
    self._tasks: dict[int, WorkerTask] = {}
    # Tasks that wait for room.
    self._pulls: collections.deque[WorkerTask] = collections.deque()
    # Bytes that prompts are about to have on the devices.
    self._planned: dict[int, int] = {}
    self._taken = 0
    self._renewed = 0.0
    self._link: ControlLink | None = None
    # What the router knows of the tree, and after how many steps of the engine.
    self._blocks: BlockLog | None = None
    self._told, self._telling = -1, False
    # Prompts that are being read of which parts are published.
    self._streams: dict[int, WorkerTask] = {}
    self._closed = False
    self._copies = concurrent.futures.ThreadPoolExecutor(
      _COPIES, "ringjax worker copies"
    )

  # -------------------------------------------------------------------------
  # Life
  # -------------------------------------------------------------------------

  def start(self) -> ClusterWorker:
    """Starts the engine and joins; again whenever the router was gone."""
    self._engine.on_step = self._stepped
    self._engine.on_layers = self._layers_begun
    self._engine.start()
    for work in (self._stay, self._wait_for_room):
      threading.Thread(
        target=work, name=f"ringjax worker {self.name}", daemon=True
      ).start()
    return self

  def leave(self, grace_s: int | float = 30.0) -> None:
    """Takes no new work, finishes what there is within `grace_s`, and closes;
    the router has the rest done by others."""
    link = self._link
    if link is not None:
      link.tell(t="leave")
    end = time.monotonic() + grace_s
    with self._work:
      self._work.wait_for(
        lambda: not self._tasks or not self.joined.is_set(),
        max(0.0, end - time.monotonic()),
      )
    self.close()

  def close(self) -> None:
    """Leaves at once; the engine stays open."""
    with self._work:
      self._closed = True
      self._work.notify_all()
    if self._link is not None:
      self._link.close("it is leaving")
    self._give_up()
    self._copies.shutdown(wait=False, cancel_futures=True)
    self.publisher.close()

  def __enter__(self) -> ClusterWorker:
    return self.start()

  def __exit__(self, *_: object) -> None:
    self.close()

  def _stay(self) -> None:
    """Joins again and again."""
    while not self._closed and self._engine.open:
      wire = self._join()
      if wire is not None:
        ended = threading.Event()
        link = ControlLink(
          wire,
          on_message=self._hear,
          on_end=lambda _, ended=ended: ended.set(),
          beat=self._view,
          beat_s=self._beat_s,
        )
        with self._work:
          if self._closed:
            wire.close()
            break
          self._taken, self._link, self.refused = 0, link, ""
          self._blocks, self._told = self._log(link), -1
        self.joined.set()
        link.start()
        ended.wait()
        self.joined.clear()
        self._give_up()
      with self._work:
        self._work.wait_for(lambda: self._closed, _AGAIN_S)
    self.ended.set()

  def _log(self, link: ControlLink) -> BlockLog:
    """What a router is told of blocks; with each link it begins anew."""

    def send(event: BlockEvent) -> None:
      link.tell(
        t="blocks",
        epoch=event.epoch,
        number=event.number,
        kind=event.kind,
        keys=list(event.keys),
      )

    return BlockLog(self.name, epoch=time.time_ns(), most=1, send=send)

  def _join(self) -> PullConnection | None:
    """A connection to a router that has taken it."""
    try:
      wire = dial(self._router, self._key, self._silence_s)
    except PeerError as error:
      self.refused = str(error)
      return None
    try:
      wire.tell_object(self._join_fields())
      answer = wire.hear_object(1 << 20) or {}
    except PeerError as error:
      answer = {"error": str(error)}
    if answer.get("t") == "welcome":
      parts = len(self._engine.layer_parts)
      self.notice = ""
      if parts > 1 and not answer.get("stream"):
        self.notice = (
          f"layer_parts={parts} only cuts programs: this router lets pages "
          "leave at a prompt's end (stream_tokens=0)"
        )
      return wire
    wire.close()
    if answer.get("t") == "measure" and self.times is None:
      return self._measure()
    self.refused = str(answer.get("error", "the router closed the connection"))
    return None

  def _measure(self) -> None:
    """Measures the engine's calls, before it joins."""
    try:
      self.times = instance_times(measure_calls(self._engine))
      self.refused = ""
    except Exception as error:
      # A step failed, or what it did for a router that is gone has not ended.
      self.refused = f"its calls can't be measured: {error}"

  def _join_fields(self) -> dict[str, Any]:
    engine = self._engine
    return {
      "t": "join",
      "name": self.name,
      "role": self.role,
      "address": self.publisher.address,
      "codec": self._layout.leaves[0].codec,
      "dtype": self._layout.leaves[0].dtype,
      "vocab": engine.vocab,
      "longest": engine.longest,
      "page": engine.scheduler.tree.page,
      "capacity": self._capacity,
      "rows": engine.rows,
      "times": self.times and dataclasses.asdict(self.times),
    }

  def _give_up(self) -> None:
    """Cancels all tasks; leases of what is published run out."""
    with self._work:
      tasks = list(self._tasks.values())
      self._tasks.clear()
      self._streams.clear()
      self._planned.clear()
      self._pulls.clear()
      self._work.notify_all()
    for task in tasks:
      self._drop(task)

  def _drop(self, task: WorkerTask) -> None:
    task.dropped = True
    if task.handle is not None and self._engine.open:
      task.handle.cancel()

  # -------------------------------------------------------------------------
  # What the router says, and is told
  # -------------------------------------------------------------------------

  def _hear(self, fields: dict[str, Any]) -> None:
    """One message of the router."""
    link = self._link
    assert link is not None
    kind = fields["t"]
    if kind == "beat":
      return
    if kind == "role":
      self.role = one_of("role", fields["role"], ROLES)
    elif kind in ("read", "answer", "offer"):
      with self._work:
        self._taken += kind != "offer"
      try:
        self._begin(kind, fields, link)
      except RingjaxError as error:
        self._fail(int(fields["id"]), link, error)
    elif kind == "cancel":
      task = self._end(int(fields["id"]))
      if task is not None:
        self._drop(task)
        for offer in task.offers_made:
          # Reads that are under way keep their pages.
          self.publisher.withdraw(offer)
    elif kind == "part":
      self._part(fields)
    else:
      raise ValueError(f"a message {str(kind)[:40]!r}")

  def _end(self, number: int) -> WorkerTask | None:
    """Forgets a task."""
    with self._work:
      task = self._tasks.pop(number, None)
      self._streams.pop(number, None)
      self._planned.pop(number, None)
      if task in self._pulls:
        self._pulls.remove(task)
      self._work.notify_all()
    return task

  def _fail(self, number: int, link: ControlLink, error: object) -> None:
    """A request can't be served, by any engine like this one."""
    if not self._engine.open:
      # Others can: the router finds that this one is gone.
      link.close("its engine failed")
      return
    # The router says "cancel", which ends what other answers there are.
    refused = isinstance(error, OptionError | PromptError)
    link.tell(t="failed", id=number, error=str(error), refused=refused)

  def _view(self) -> dict[str, Any]:
    """How much there is to do, for the router; leases go on with it."""
    now = time.monotonic()
    scheduler = self._engine.scheduler
    rows = [r for r in list(scheduler.running) if r is not None]
    decoding = [r for r in rows if not r.reading]
    with self._work:
      tasks, waiting = list(self._tasks.values()), list(self._pulls)
      taken = self._taken
      tell = not self._telling and self._told != self._engine.counters.steps
      self._telling |= tell
    if tell:
      # Not by this thread: a beat waits for no step.
      with contextlib.suppress(RuntimeError):
        self._copies.submit(self._tell_blocks)
    if now - self._renewed > self._lease_s / 3:
      self._renewed = now
      for task in tasks:
        for offer in tuple(task.offers_made):
          self.publisher.renew(offer)
    holding = [task for task in tasks if task.holds]
    fetching = [task for task in waiting if task.reads]
    used = sum(task.request.rows for task in holding)
    free = self._capacity - sum(task.tokens for task in holding)
    numbers = {id(task.handle): task.number for task in tasks if task.handle}
    # (task, tokens left, tokens computed) of each prompt.
    queue: list[tuple[int, int, int]] = []
    seen: set[int] = set()
    for row in (*rows, *list(scheduler.waiting)):
      # It may go on meanwhile.
      handle, computed = id(row.owner.handle), row.computed
      left = row.prompt.size - computed
      # Of several answers one reads what the others then find.
      if row.parked or handle in seen:
        continue
      if row.share:
        seen.add(handle)
      if left > 0:
        queue.append((numbers.get(handle, -1), left, computed))
    queue += [(task.number, len(task.request.prompt), 0) for task in fetching]
    return {
      "t": "view",
      "taken": taken,
      "queued_requests": len(queue),
      "queued_tokens": sum(left for _, left, _ in queue),
      "queue": queue[:MOST_QUEUED],
      "running_requests": len(decoding) + len(waiting) - len(fetching),
      "running_tokens": sum(r.computed for r in decoding),
      "free_tokens": max(0, free) if used < self._engine.rows else 0,
    }

  def _tell_blocks(self) -> None:
    """Says which blocks have come or gone since the last beat."""
    try:
      with self._engine.between_steps():
        steps, log = self._engine.counters.steps, self._blocks
        keys = tree_keys(self._engine.scheduler.tree)
      if log is not None:
        log.update([short_key(key) for key in keys])
    except OptionError:
      return  # The engine is closed.
    finally:
      self._telling = False
    with self._work:
      # Not of a link that has ended meanwhile.
      if log is self._blocks:
        self._told = steps

  # -------------------------------------------------------------------------
  # Work
  # -------------------------------------------------------------------------

  def _begin(
    self, kind: str, fields: dict[str, Any], link: ControlLink
  ) -> None:
    """A prompt to read, or a request to answer."""
    request = request_of(fields["request"], self._grammars)
    prompt = inputs.prompt(request.prompt, self._engine.vocab)
    new, offers = request.max_new_tokens * request.rows, kind == "offer"
    reads = kind == "read" or offers
    if reads:
      # The token that it chooses is thrown away: who answers chooses.
      new = 1
      request = Request(
        prompt=prompt,
        max_new_tokens=1,
        salt=request.salt,
        adapter=request.adapter,
        priority=request.priority,
      )
    task = WorkerTask(
      int(fields["id"]),
      request,
      0 if offers else prompt.size + new,
      reads,
      link,
      offers,
      sent=[(0, 0)] * request.answers,
    )
    if reads:
      task.stream = int(fields.get("stream", 0))
    if fields.get("tickets"):
      host, port = fields["address"]
      task.tickets.extend(map(Ticket.from_json, fields["tickets"]))
      task.address = str(host), int(port)
      task.more = bool(fields.get("more", False))
    with self._work:
      if self._closed:
        link.close("it is leaving")
        return
      self._tasks[task.number] = task
      if task.stream:
        self._streams[task.number] = task
      if task.tickets:
        self._pulls.append(task)
        self._work.notify_all()
        return
      task.admitted = True
    if offers:
      with contextlib.suppress(RuntimeError):
        self._copies.submit(self._publish, task)
      return
    self._submit(task)

  def _submit(self, task: WorkerTask) -> None:
    """Hands a task to the engine."""
    with self._engine.between_steps():
      if task.dropped:
        return
      # No token comes before the handle is known.
      change = functools.partial(self._changed, task)
      task.handle = self._engine.submit(task.request, change)
      for n, answer in enumerate(task.handle.answers):
        # The text of tokens that were known goes with the first new one: who
        # asked may have given tokens alone.
        task.sent[n] = len(answer.tokens), 0
    if task.dropped:
      # Meanwhile, by another thread, which saw no handle.
      task.handle.cancel()

  def _changed(self, task: WorkerTask, answer: Answer) -> None:
    """An answer has grown; the engine's thread says so."""
    if task.dropped:
      return
    if answer.finish not in (None, "stop", "length"):
      self._fail(task.number, task.link, answer.error or answer.finish)
    elif not task.reads:
      self._send(task, answer)
    elif answer.finish is not None:
      # It may have been closed.
      with contextlib.suppress(RuntimeError):
        self._copies.submit(self._publish, task)

  def _stepped(self) -> None:
    """The engine has made a step; its thread says so."""
    for task in tuple(self._streams.values()):
      if task.handle is None or task.copying or task.published:
        continue
      if task.begun or self._due(task):
        task.copying = True
        with contextlib.suppress(RuntimeError):
          self._copies.submit(self._publish_part, task, task.begun)
      task.begun = 0

  def _due(self, task: WorkerTask, *, tail: bool = False) -> int:
    """Pages that are to leave with a step, or 0: there are too few.

    Args:
      task: a prompt that is being read.
      tail: whether to look at what is left at a long prompt's end, too.
    """
    page, size = self._engine.scheduler.tree.page, len(task.request.prompt)
    assert task.handle is not None
    ready = self._engine.prompt_progress(task.handle)
    count = ready // _PART * _PART // page - task.pages
    if count * page >= task.stream:
      return count
    ends = tail and ready == size and size >= task.stream
    return ready // page - task.pages if ends else 0

  def _layers_begun(
    self, part: int, pieces: tuple[PromptPiece, ...], pool: PagePool
  ) -> None:
    """Some layers of a step are on their way; the engine's thread says so."""
    rows = {id(piece.row.owner.handle) for piece in pieces}
    for task in tuple(self._streams.values()):
      if task.copying or task.published or id(task.handle) not in rows:
        continue
      if part == 0:
        task.begun = self._due(task, tail=True)
      if not task.begun:
        continue
      copies = self._layer_copies(task, part, pool)
      if copies is None:
        task.begun = 0
        continue
      task.early.append(copies)
      with self._work:
        submits, task.waits = not task.waits, True
      if submits:
        with contextlib.suppress(RuntimeError):
          self._copies.submit(self._publish_layers, task)

  def _layer_copies(
    self, task: WorkerTask, part: int, pool: PagePool
  ) -> LayerCopies | None:
    """Copies of the pages that have begun; None: they leave behind the step."""
    request = task.request
    try:
      copies = begin_layers(
        self._engine,
        pool,
        np.asarray(request.prompt, np.int32),
        part,
        salt=request.salt,
        adapter=request.adapter,
        first=task.pages,
        most=task.begun,
        hashes=task.hashes,
        on_devices=self._on_devices(task),
      )
    except Exception:
      # There is no memory for a copy; the step goes on.
      return None
    # With fewer they had to make room.
    return copies if copies and copies.count == task.begun else None

  def _send(self, task: WorkerTask, answer: Answer) -> None:
    """Tells the router what of an answer is new."""
    assert task.handle is not None
    n = next(i for i, x in enumerate(task.handle.answers) if x is answer)
    tokens, chars = task.sent[n]
    task.sent[n] = len(answer.tokens), len(answer.text)
    # Tokens that were known before have no log-probabilities.
    before = len(task.request.begun[n]) if task.request.begun else 0
    task.link.tell(
      t="tokens",
      id=task.number,
      n=n,
      at=tokens,
      tokens=answer.tokens[tokens:],
      text_at=chars,
      text=answer.text[chars:],
      logprobs=[
        [x.token, x.logprob, x.top] for x in answer.logprobs[tokens - before :]
      ],
      total=answer.total_logprob,
      cached=task.handle.cached_tokens,
      finish=answer.finish,
      stopped=answer.stopped,
    )
    if task.handle.done:
      self._end(task.number)

  def _publish(self, task: WorkerTask) -> None:
    """Offers the pages of a prompt that was read, now or earlier, which are
    not yet published."""
    cached = 0 if task.handle is None else task.handle.cached_tokens
    with task.publishes:
      ticket = self._offered(task, last=True)
    if task.offers:
      tokens = task.pages * self._engine.scheduler.tree.page
      cached = min(tokens, len(task.request.prompt) - 1)
    task.link.tell(
      t="read",
      id=task.number,
      ticket=None if ticket is None else ticket.to_json(),
      cached=cached,
    )

  def _publish_part(self, task: WorkerTask, begun: int) -> None:
    """Offers what was read of a prompt since the last part.

    Args:
      task: the prompt.
      begun: pages of which layers have left before; 0 for none.
    """
    with task.publishes:
      self._offer_layers(task)
      if not task.published and not task.dropped:
        self._tell_part(task, self._offered(task, begun, last=False))
      task.copying = False

  def _tell_part(self, task: WorkerTask, ticket: Ticket | None) -> None:
    if ticket is not None:
      task.link.tell(t="part", id=task.number, ticket=ticket.to_json())

  def _publish_layers(self, task: WorkerTask) -> None:
    """Offers layers that leave before their step has ended."""
    with self._work:
      task.waits = False
    with task.publishes:
      self._offer_layers(task)

  def _offer_layers(self, task: WorkerTask) -> None:
    """See `_publish_layers`; `publishes` is held."""
    while task.early:
      copies = task.early.popleft()
      first, end = copies.layers
      before = (copies.count, first) if first else (0, 0)
      if first == 0:
        task.layered = 0, 0
      if task.published or task.dropped or task.layered != before:
        continue
      try:
        self._check_published(task)
        ticket = self._ticket(copies.result(), copies.count)
      except Exception:
        # What of them is not published leaves behind the step.
        continue
      self._kept(task, ticket)
      task.layered = copies.count, end
      self._tell_part(task, ticket)

  def _offered(
    self, task: WorkerTask, begun: int = 0, *, last: bool
  ) -> Ticket | None:
    """A ticket of the next pages of a prompt, or None if there are none.

    Args:
      task: the prompt.
      begun: how many, some layers of which have left; 0 for what there is.
      last: whether no others come.
    """
    request, ticket, count, layers = task.request, None, 0, None
    parts = self._engine.layer_parts
    if begun and task.layered == (begun, parts[-1][0]):
      layers = parts[-1]
    task.layered = 0, 0
    try:
      self._check_published(task)
      sent = export_prefix(
        self._engine,
        inputs.prompt(request.prompt, self._engine.vocab),
        salt=request.salt,
        adapter=request.adapter,
        first=task.pages,
        layers=layers,
        hashes=task.hashes,
        on_devices=self._on_devices(task),
      )
      count = len(sent.pages)
      if begun:
        # With fewer the layers that have left are of no use.
        count = begun if count >= begun else 0
      elif not last:
        some = _PART // self._engine.scheduler.tree.page
        count = (task.pages + count) // some * some - task.pages
      if count > 0:
        ticket = self._ticket(sent, count)
    except Exception:
      # They had to make room, it is closed, or there is no memory for a copy:
      # who answers reads the prompt, or what is left of it.
      ticket = None
    with self._work:
      task.pages += 0 if ticket is None else count
      task.published |= last
      self._work.notify_all()
    self._kept(task, ticket)
    return ticket

  def _on_devices(self, task: WorkerTask) -> bool:
    """Whether the pages of a prompt that are not yet published stay there."""
    if self._devices is None:
      return False
    page = self._engine.scheduler.tree.page
    count = len(task.request.prompt) // page - task.pages
    more = copied_pages(self._engine, count) * self._layout.nbytes
    with self._work:
      # Others may be about to publish theirs.
      self._planned.pop(task.number, None)
      held = self.publisher.device_bytes + sum(self._planned.values())
      fits = held + more <= self._device_bytes
      if fits:
        self._planned[task.number] = more
    return fits

  def _ticket(self, sent: ExportedPrefix, count: int) -> Ticket:
    """Publishes the first ones of some pages."""
    numbers = self.publisher.new_numbers(count)
    pages = dict(zip(numbers, sent.pages, strict=False))
    return self.publisher.publish(
      pages, sent.layout, labels=sent.labels[:count]
    )

  def _kept(self, task: WorkerTask, ticket: Ticket | None) -> None:
    """Notes a ticket; of a task that is not wanted any more it ends."""
    with self._work:
      self._planned.pop(task.number, None)
    if ticket is None:
      return
    with self._work:
      task.offers_made.append(ticket)
      dropped = task.dropped
    if dropped:
      self.publisher.withdraw(ticket)

  def _check_published(self, task: WorkerTask) -> None:
    """Refuses copies beyond some times what the engine's own pages hold.

    Raises:
      OutOfPages: as much waits for who answers already.
    """
    with self._work:
      some = [
        len(x.request.prompt)
        for x in self._tasks.values()
        if x.offers_made and x is not task
      ]
    more = len(task.request.prompt)
    if sum(some) + more > _PUBLISHED * self._capacity:
      raise OutOfPages(f"{sum(some):,} tokens are published")

  def _part(self, fields: dict[str, Any]) -> None:
    """Another part of a prompt can be pulled, or there is no other one."""
    with self._work:
      task = self._tasks.get(int(fields["id"]))
      if task is None:
        return
      if fields["ticket"] is not None:
        task.tickets.append(Ticket.from_json(fields["ticket"]))
      task.more = not fields["last"]
      begins = task.admitted and not task.pulling
      task.pulling |= begins
    if begins:
      with contextlib.suppress(RuntimeError):
        self._copies.submit(self._pull, task)

  def _wait_for_room(self) -> None:
    """Lets tasks pull, the first one first, once there is room for it."""
    with self._work:
      while not self._closed:
        task = self._pulls[0] if self._pulls else None
        if task is None or not self._room(task):
          self._work.wait()
          continue
        self._pulls.popleft()
        task.admitted = task.pulling = True
        self._copies.submit(self._pull, task)

  def _room(self, task: WorkerTask) -> bool:
    """Whether a request has room, whatever those before it still need."""
    others = [x for x in self._tasks.values() if x.admitted and x.holds]
    rows = sum(x.request.rows for x in others) + task.request.rows
    tokens = sum(x.tokens for x in others) + task.tokens
    fits = rows <= self._engine.rows and tokens <= self._capacity
    return fits or not others

  def _pull(self, task: WorkerTask) -> None:
    """Pulls the pages of a request, and lets the engine answer it, unless
    others are yet to come."""
    request = task.request
    try:
      while True:
        with self._work:
          if not task.tickets:
            task.pulling = False
            if task.more:
              return
            break
          ticket = task.tickets.popleft()
        pulled = pull(
          ticket,
          task.address,
          self._key,
          patience_s=self._silence_s,
          devices=self._devices,
        )
        if task.dropped:
          return
        pages, nbytes = task.pulled
        task.pulled = pages, nbytes + pulled.nbytes
        if task.parts is None:
          task.parts = LayerParts(self._engine)
        whole = task.parts.add(ticket, pulled)
        if whole is None:
          continue
        import_prefix(
          self._engine,
          inputs.prompt(request.prompt, self._engine.vocab),
          *whole,
          salt=request.salt,
          adapter=request.adapter,
          first=pages,
          hashes=task.hashes,
        )
        task.pulled = pages + len(pulled.labels), task.pulled[1]
      task.link.tell(t="pulled", id=task.number, nbytes=task.pulled[1])
    except Exception as error:
      if task.reads:
        # What it would have fetched it computes.
        task.link.tell(t="pulled", id=task.number, nbytes=0)
      else:
        # The prompt is read anew.
        if self._end(task.number) is not None:
          task.link.tell(t="lost", id=task.number, why=str(error))
        return
    try:
      self._submit(task)
    except Exception as error:
      self._fail(task.number, task.link, error)
