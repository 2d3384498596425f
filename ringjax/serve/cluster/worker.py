"""An engine as an instance of a cluster, for prefill, decode, or both.

Guarantees: an answer's tokens are those of the engine alone; pages of a
prefilled prompt stay published until a decode instance has them all (COMPLETE)
or until their lease is over, which is renewed only while the router wants them;
pages of another instance are pulled once there is room for the whole request,
never before. If the router is gone, all its tasks are cancelled, and the worker
joins again when it is back.
Cost: a thread for the link to the router, one that waits for room, and a few
that copy pages, in addition to the engine's steps (see
`serve/prefix/prefix_transfer.py`); between two steps, a walk through all blocks
for each heartbeat that follows new steps.
Memory: published and received pages, in the host's memory; with a
`DeviceServer` published pages stay on the devices, up to `device_bytes`.

For a prompt that is streamed, and an engine with `layer_parts`, pages are sent
in the middle of a step: each part of the layers while the next one computes,
the last part once the step is known to have succeeded.

Each instance can do both kinds of work. A role only decides what the router
sends to it, so a change of role interrupts no step and no request.
Ref: Zhong et al. 2024, DistServe (OSDI), arXiv 2401.09670; KVDirect, arXiv
2501.14743: the decode side pulls.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
import time
from typing import Any

from ringjax.checks import one_of, positive_int
from ringjax.errors import (
  InputTypeError,
  OptionError,
  RingjaxError,
)
from ringjax.infer import inputs
from ringjax.parallel.links.live_link import LiveLink
from ringjax.serve.cluster.answering_worker import AnsweringWorker
from ringjax.serve.cluster.block_index import (
  BlockEvent,
  BlockLog,
  short_key,
  tree_keys,
)
from ringjax.serve.cluster.membership import join_message
from ringjax.serve.cluster.page_offers import PageOffers
from ringjax.serve.cluster.routing import ROLES
from ringjax.serve.cluster.times.call_log import measure_calls
from ringjax.serve.cluster.times.fitted_times import instance_times
from ringjax.serve.cluster.times.phase_times import QuadraticTimes
from ringjax.serve.cluster.worker_task import WorkerTask
from ringjax.serve.engine import Engine
from ringjax.serve.prefix.prefix_transfer import (
  LayerParts,
  import_prefix,
  prefix_layout,
)
from ringjax.serve.request import Answer, Request
from ringjax.serve.request_fields import request_of
from ringjax.serve.sparse_prompts import pattern_of_prompts
from ringjax.serve.text_requests import TextPass
from ringjax.transfer import DeviceServer, Ticket, pull
from ringjax.transfer.client import Address

_COPIES = 4


def check_engine(engine: object) -> None:
  """Check that an object is an `Engine`, and not a `ChunkPipeline`, say.

  Raises:
    InputTypeError: If it is not an `Engine`.
    OptionError: If the engine reads parts of prefixes.
  """
  if not isinstance(engine, Engine):
    raise InputTypeError(
      "engine",
      type(engine).__name__,
      "an rj.serve.Engine, which has all layers and their pages in one process",
      "make one of the model, or give the last of the stages of an "
      "rj.infer.ChunkPipeline to rj.serve.cluster.PipelineWorker",
    )
  if engine.important is not None:
    raise OptionError(
      "engine",
      f"an engine with important={engine.important.share}, as an instance",
      "one whose pages are those of whole prefixes",
      "leave important out",
    )
  if pattern_of_prompts(engine.config.prefill) is not None:
    raise OptionError(
      "engine",
      f"an engine with prefill={engine.config.prefill!r}, as an instance",
      "one whose pages other instances compute alike",
      "leave prefill out",
    )


class ClusterWorker(AnsweringWorker):
  """Runs an engine as an instance that joins a router.

  Attributes:
    times: Times of the engine's calls, measured for a router that predicts with
      them; None until a router has asked.
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
    """Prepare the worker; `start` joins the router.

    Args:
      engine: Engine with a `store=`, and a `share` other than "nothing".
      key: Secret key that the whole cluster shares, at least 16 bytes.
      router: Host and port where instances join.
      role: "prefill", "decode" or "both".
      name: Unique name in the cluster; default: from role, host and process.
      host: Address of this machine where others pull pages; 0.0.0.0 for the
        address by which it reaches the router.
      port: Port for pulls; 0 takes a free one.
      lease_s: Seconds that pages stay published without renewal by the router,
        as when it is gone.
      silence_s: Seconds without a byte after which a router, or a publisher
        of pages, counts as lost.
      beat_s: Seconds between load reports to the router.
      devices: Sends pages from the engine's devices, and receives those of
        other instances into the host's memory, where both have one.
      device_bytes: Maximum bytes of copies of published pages on the devices,
        16 pages at least (`copied_pages`); prompts beyond these are copied to
        the host.

    Raises:
      OptionError: If the engine can't move pages, or a value is out of range.
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
    positive_int("device_bytes", device_bytes)
    self._layout = prefix_layout(engine)
    super().__init__(
      engine,
      engine,
      key=key,
      router=router,
      role=role,
      name=name,
      host=host,
      port=port,
      lease_s=lease_s,
      silence_s=silence_s,
      beat_s=beat_s,
      devices=devices,
    )
    self._key, self._silence_s = key, silence_s
    self._devices = devices
    self.times: QuadraticTimes | None = None
    # The block log that the router has, and the engine's step count at that
    # time.
    self._blocks: BlockLog | None = None
    self._reported_steps, self._reporting = -1, False
    self._copies = concurrent.futures.ThreadPoolExecutor(
      _COPIES, "ringjax worker copies"
    )
    self._offers = PageOffers(
      self._work,
      engine,
      self.publisher,
      self._tasks,
      self._copies,
      capacity=self._capacity,
      page_bytes=self._layout.nbytes,
      devices=devices,
      device_bytes=device_bytes,
    )

  # -------------------------------------------------------------------------
  # Start and stop
  # -------------------------------------------------------------------------

  def start(self) -> ClusterWorker:
    """Start the engine and join; join again whenever the router was gone."""
    self._engine.on_step = self._offers.stepped
    self._engine.on_layers = self._offers.layers_begun
    super().start()
    threading.Thread(
      target=self._wait_for_room,
      name=f"ringjax worker {self.name} room",
      daemon=True,
    ).start()
    return self

  def close(self) -> None:
    """Leave at once; the engine stays open."""
    super().close()
    self._copies.shutdown(wait=False, cancel_futures=True)

  def _begin_log(self, link: LiveLink) -> None:
    """Begin a log of block changes for a new link; the lock is held."""

    def send(event: BlockEvent) -> None:
      link.tell(
        "blocks",
        epoch=event.epoch,
        number=event.number,
        kind=event.kind,
        keys=list(event.keys),
      )

    self._blocks = BlockLog(self.name, epoch=time.time_ns(), most=1, send=send)
    self._reported_steps = -1

  def _notice_for(self, streams: bool) -> str:
    parts = len(self._engine.layer_parts)
    if parts == 1 or streams:
      return ""
    return (
      f"layer_parts={parts} only cuts programs: this router lets pages "
      "leave at a prompt's end (stream_tokens=0)"
    )

  def _measure(self, why: str) -> str:
    """Measure the engine's calls before it joins; why it can't join, or ""."""
    if self.times is not None:
      return why
    try:
      self.times = instance_times(measure_calls(self._engine))
      return ""
    except Exception as error:
      # A step failed, or work for a router that is gone has not ended.
      return f"its calls can't be measured: {error}"

  def _join_fields(self) -> dict[str, Any]:
    engine, leaf = self._engine, self._layout.leaves[0]
    return join_message(
      name=self.name,
      role=self.role,
      publisher=self.publisher,
      codec=leaf.codec,
      dtype=leaf.dtype,
      vocab=engine.vocab,
      longest=engine.longest,
      page=engine.scheduler.tree.page,
      capacity=self._capacity,
      rows=engine.rows,
      times=None if self.times is None else dataclasses.asdict(self.times),
      texts=True,
    )

  def _give_up(self) -> None:
    """Cancel all tasks; leases of published pages run out."""
    with self._work:
      self._offers.forget_all()
    super()._give_up()

  def _forget(self, number: int) -> None:
    self._offers.forget(number)

  # -------------------------------------------------------------------------
  # Messages from and to the router
  # -------------------------------------------------------------------------

  def _hear(self, fields: dict[str, Any]) -> None:
    """Handle a message of the router."""
    link = self._membership.link
    assert link is not None
    kind = fields["t"]
    if kind == "role":
      self.role = one_of("role", fields["role"], ROLES)
    elif kind in ("read", "answer", "offer"):
      with self._work:
        self._membership.tasks_taken += kind != "offer"
      try:
        self._begin_task(kind, fields, link)
      except RingjaxError as error:
        self._fail(int(fields["id"]), link, error)
    elif kind == "cancel":
      task = self._end(int(fields["id"]))
      if task is not None:
        self._drop(task)
        for offer in task.offers_made:
          # Reads that are under way keep their pages.
          self.publisher.withdraw(offer)
    elif kind == "texts":
      self._begin_texts(int(fields["id"]), TextPass.of(fields["texts"]), link)
    elif kind == "part":
      self._part(fields)
    else:
      raise ValueError(f"a message {str(kind)[:40]!r}")

  def _published_tickets(self) -> list[Ticket]:
    with self._work:
      tasks = list(self._tasks.values())
    return [ticket for task in tasks for ticket in tuple(task.offers_made)]

  def _view(self) -> dict[str, Any]:
    """Load report for the router; also lets the block log be sent."""
    with self._work:
      tell = (
        not self._reporting
        and self._reported_steps != self._engine.counters.steps
      )
      self._reporting |= tell
    if tell:
      # In another thread: a heartbeat must not wait for a step.
      with contextlib.suppress(RuntimeError):
        self._copies.submit(self._tell_blocks)
    return super()._view()

  def _tell_blocks(self) -> None:
    """Report the blocks that were added or evicted since the last report."""
    try:
      with self._engine.between_steps():
        steps, log = self._engine.counters.steps, self._blocks
        keys = tree_keys(self._engine.scheduler.tree)
      if log is not None:
        log.update([short_key(key) for key in keys])
    except OptionError:
      return  # The engine is closed.
    finally:
      self._reporting = False
    with self._work:
      # Unless the link has ended meanwhile.
      if log is self._blocks:
        self._reported_steps = steps

  # -------------------------------------------------------------------------
  # Tasks
  # -------------------------------------------------------------------------

  def _begin_task(
    self, kind: str, fields: dict[str, Any], link: LiveLink
  ) -> None:
    """Begin a task: a prompt to prefill or publish, or a request to decode."""
    request = request_of(fields["request"], self._grammars)
    prompt = inputs.prompt(request.prompt, self._engine.vocab)
    new, offers = request.max_new_tokens * request.rows, kind == "offer"
    reads = kind == "read" or offers
    if reads:
      # The sampled token is discarded: the decode instance samples it.
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
      task.more_tickets = bool(fields.get("more", False))
    with self._work:
      if self._membership.closed:
        link.close("it is leaving")
        return
      self._tasks[task.number] = task
      if task.stream:
        self._offers.streams[task.number] = task
      if task.tickets:
        self._pulls.append(task)
        self._work.notify_all()
        return
      task.admitted = True
    if offers:
      self._offers.publish(task)
      return
    self._submit(task)

  def _submit(self, task: WorkerTask) -> None:
    """Submit a task's request to the engine."""
    with self._engine.between_steps():
      if task.dropped:
        return
      # Between steps, so that no token comes before the handle is set.
      change = functools.partial(self._changed, task)
      task.handle = self._engine.submit(task.request, change)
      for n, answer in enumerate(task.handle.answers):
        # The text of known tokens is sent with the first new token: a client
        # may have passed tokens without text.
        task.sent[n] = len(answer.tokens), 0
    if task.dropped:
      # Dropped meanwhile by another thread, which saw no handle.
      task.handle.cancel()

  def _changed(self, task: WorkerTask, answer: Answer) -> None:
    """Handle new tokens of an answer, in the engine's thread."""
    if task.dropped:
      return
    if answer.finish not in (None, "stop", "length"):
      self._fail(task.number, task.link, answer.error or answer.finish)
    elif not task.reads:
      self._send(task, answer)
    elif answer.finish is not None:
      self._offers.publish(task)

  def _part(self, fields: dict[str, Any]) -> None:
    """Handle a further ticket of a prompt, or the end of its tickets."""
    with self._work:
      task = self._tasks.get(int(fields["id"]))
      if task is None:
        return
      if fields["ticket"] is not None:
        task.tickets.append(Ticket.from_json(fields["ticket"]))
      task.more_tickets = not fields["last"]
      begins = task.admitted and not task.pulling
      task.pulling |= begins
    if begins:
      with contextlib.suppress(RuntimeError):
        self._copies.submit(self._pull, task)

  def _wait_for_room(self) -> None:
    """Let tasks pull, in their order, once there is room for the first."""
    with self._work:
      while not self._membership.closed:
        task = self._pulls[0] if self._pulls else None
        if task is None or not self._has_room(task):
          self._work.wait()
          continue
        self._pulls.popleft()
        task.admitted = task.pulling = True
        self._copies.submit(self._pull, task)

  def _has_room(self, task: WorkerTask) -> bool:
    """Whether a request has room, if all admitted ones take their maximum."""
    others = [
      another
      for another in self._tasks.values()
      if another.admitted and another.holds
    ]
    rows = sum(another.request.rows for another in others) + task.request.rows
    tokens = sum(another.tokens for another in others) + task.tokens
    has_room = rows <= self._engine.rows and tokens <= self._capacity
    return has_room or not others

  def _pull(self, task: WorkerTask) -> None:
    """Pull the pages of a request, and submit it unless further pages come."""
    request = task.request
    try:
      while True:
        with self._work:
          if not task.tickets:
            task.pulling = False
            if task.more_tickets:
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
        complete = task.parts.add(ticket, pulled)
        if complete is None:
          continue
        import_prefix(
          self._engine,
          inputs.prompt(request.prompt, self._engine.vocab),
          *complete,
          salt=request.salt,
          adapter=request.adapter,
          first=pages,
          hashes=task.hashes,
        )
        task.pulled = pages + len(pulled.labels), task.pulled[1]
      task.link.tell("pulled", id=task.number, nbytes=task.pulled[1])
    except Exception as error:
      if task.reads:
        # The engine computes what could not be fetched.
        task.link.tell("pulled", id=task.number, nbytes=0)
      else:
        # The prompt is prefilled again.
        if self._end(task.number) is not None:
          task.link.tell("lost", id=task.number, why=str(error))
        return
    try:
      self._submit(task)
    except Exception as error:
      self._fail(task.number, task.link, error)
