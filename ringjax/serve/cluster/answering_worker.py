"""Membership, texts and tokens of instances of a cluster that answer.

Guarantees: an answer's tokens are sent in their order, each once; a change of
role interrupts no request. If the router is gone, all its tasks are cancelled,
and the worker joins again when it is back.
Cost: a thread for the link to the router, and one that reads texts.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from ringjax.parallel.links.live_link import LiveLink
from ringjax.serve.api.grammar import GrammarCompiler
from ringjax.serve.cluster.membership import (
  Membership,
  default_name,
  load_report,
  tell_failure,
)
from ringjax.serve.cluster.routing import ROLES
from ringjax.serve.cluster.worker_task import WorkerTask
from ringjax.serve.engine import Engine
from ringjax.serve.hosts.engine_group import EngineGroup
from ringjax.serve.request import Answer
from ringjax.serve.text_requests import TextPass
from ringjax.transfer import DeviceServer, Ticket
from ringjax.transfer.client import Address


class AnsweringWorker:
  """An instance that joins a router and sends it answers, without pages.

  Attributes:
    name: Name in the cluster.
    role: Kind of work that the router sends, one of `roles`.
    roles: Roles that it can have.
    publisher: Publisher of pages that this instance has prefilled.
    joined: Event, set while the worker is connected to the router.
    ended: Event, set when the worker stops joining: it was closed, or its
      engine failed.
  """

  roles: Sequence[str] = ROLES

  def __init__(
    self,
    served: Engine | EngineGroup,
    engine: Engine,
    *,
    key: bytes,
    router: Address,
    role: str,
    name: str | None,
    host: str,
    port: int,
    lease_s: int | float,
    silence_s: int | float,
    beat_s: int | float,
    devices: DeviceServer | None = None,
  ):
    """Prepare the worker; `start` joins the router.

    Args:
      served: Engine, or group of one, that takes the requests.
      engine: Engine of this process.
      key: Secret key that the whole cluster shares, at least 16 bytes.
      router: Host and port where instances join.
      role: Role to begin with.
      name: Unique name in the cluster; default: from role, host and process.
      host: Address of this machine where others pull pages; 0.0.0.0 for the
        address by which it reaches the router.
      port: Port for pulls; 0 takes a free one.
      lease_s: Seconds that pages stay published without renewal by the router.
      silence_s: Seconds without a byte after which a peer counts as lost.
      beat_s: Seconds between load reports to the router.
      devices: Sends pages from the engine's devices, or None.
    """
    tree = engine.scheduler.tree
    self._capacity = tree.groups[0].pages * tree.shards * tree.page
    self._served, self._engine = served, engine
    self._grammars = None
    if engine.tokenizer is not None:
      self._grammars = GrammarCompiler(engine.tokenizer, engine.vocab)
    self._work = threading.Condition()
    self._membership = Membership(
      self._work,
      router=router,
      key=key,
      host=host,
      port=port,
      lease_s=lease_s,
      silence_s=silence_s,
      beat_s=beat_s,
      devices=devices,
      tickets=self._published_tickets,
      join_fields=self._join_fields,
      notice=self._notice_for,
      measure=self._measure,
      on_message=self._hear,
      load=self._view,
      on_join=self._begin_log,
      on_lost=self._give_up,
    )
    self.publisher = self._membership.publisher
    self.name = name or default_name(role, self.publisher)
    self.role = role
    self.joined, self.ended = self._membership.joined, threading.Event()
    self._tasks: dict[int, WorkerTask] = {}
    # Tasks that wait for room.
    self._pulls: collections.deque[WorkerTask] = collections.deque()
    # Passes of texts, one after another, and their number.
    self._readers = concurrent.futures.ThreadPoolExecutor(
      1, "ringjax worker texts"
    )
    self._passes = 0

  @property
  def refused(self) -> str:
    """Reason why the router refused the worker, or ""."""
    return self._membership.refused

  @property
  def notice(self) -> str:
    """Hint at an engine option without effect for this router, or ""."""
    return self._membership.notice

  def leave(self, grace_s: int | float = 30.0) -> None:
    """Take no new work, finish current work within `grace_s`, and close.

    The router lets other instances do the rest.
    """
    self._membership.leave(
      grace_s, idle=lambda: not (self._tasks or self._passes)
    )
    self.close()

  def close(self) -> None:
    """Leave at once; the engine stays open."""
    self._membership.close()
    self._give_up()
    self._readers.shutdown(wait=False, cancel_futures=True)
    self.publisher.close()

  def start(self) -> AnsweringWorker:
    """Start the engine and join; join again whenever the router was gone."""
    self._served.start()
    threading.Thread(
      target=self._join_loop, name=f"ringjax worker {self.name}", daemon=True
    ).start()
    return self

  def __enter__(self) -> AnsweringWorker:
    return self.start()

  def __exit__(self, *_: object) -> None:
    self.close()

  def _join_loop(self) -> None:
    self._membership.run(alive=lambda: self._served.open)
    self.ended.set()

  def _give_up(self) -> None:
    """Cancel all tasks."""
    with self._work:
      tasks = list(self._tasks.values())
      self._tasks.clear()
      self._pulls.clear()
      self._work.notify_all()
    for task in tasks:
      self._drop(task)

  def _drop(self, task: WorkerTask) -> None:
    task.dropped = True
    if task.handle is not None and self._served.open:
      task.handle.cancel()

  # -------------------------------------------------------------------------
  # What kinds of instances do in their own way
  # -------------------------------------------------------------------------

  def _join_fields(self) -> dict[str, Any]:
    """Message that asks to join, of `join_message`."""
    raise NotImplementedError

  def _hear(self, fields: dict[str, Any]) -> None:
    """Handle a message of the router."""
    raise NotImplementedError

  def _measure(self, why: str) -> str:
    """Measure for a router that needs times; why it can't join, or ""."""
    return why

  def _notice_for(self, streams: bool) -> str:
    """Notice about an option without effect for this router, or ""."""
    del streams
    return ""

  def _begin_log(self, link: LiveLink) -> None:
    """Begin with a new link to the router; the lock is held."""

  def _published_tickets(self) -> list[Ticket]:
    """Tickets of published pages, whose leases are renewed."""
    return []

  def _forget(self, number: int) -> None:
    """Forget the pages of a task that has ended; the lock is held."""

  # -------------------------------------------------------------------------
  # Texts, answers and load
  # -------------------------------------------------------------------------

  def _begin_texts(
    self, number: int, text_pass: TextPass, link: LiveLink
  ) -> None:
    """Read texts in a thread, between two steps, and send their numbers."""

    def read() -> None:
      try:
        values = text_pass.joined(self._served.texts.read(text_pass))
        link.tell("texts", [values], id=number)
      except Exception as error:
        self._fail(number, link, error)
      finally:
        with self._work:
          self._passes -= 1
          self._work.notify_all()

    # A worker that was closed has no threads; the router asks another one.
    with self._work, contextlib.suppress(RuntimeError):
      self._readers.submit(read)
      self._passes += 1

  def _end(self, number: int) -> WorkerTask | None:
    """Forget a task."""
    with self._work:
      task = self._tasks.pop(number, None)
      self._forget(number)
      if task in self._pulls:
        self._pulls.remove(task)
      self._work.notify_all()
    return task

  def _fail(self, number: int, link: LiveLink, error: object) -> None:
    """Report that a request can't be served by any engine like this one."""
    if not (self._served.open and self._engine.open):
      # Others can: the router will notice that this instance is gone.
      link.close("its engine failed")
      return
    # The router replies with "cancel", which ends the request's other answers.
    tell_failure(link, number, error)

  def _send(self, task: WorkerTask, answer: Answer) -> None:
    """Send an answer's new tokens to the router."""
    assert task.handle is not None
    n = next(
      i for i, another in enumerate(task.handle.answers) if another is answer
    )
    tokens, chars = task.sent[n]
    task.sent[n] = len(answer.tokens), len(answer.text)
    # Tokens known before this task have no log-probabilities.
    known_tokens = len(task.request.begun[n]) if task.request.begun else 0
    task.link.tell(
      "tokens",
      id=task.number,
      n=n,
      at=tokens,
      tokens=answer.tokens[tokens:],
      text_at=chars,
      text=answer.text[chars:],
      logprobs=[
        [entry.token, entry.logprob, entry.top]
        for entry in answer.logprobs[tokens - known_tokens :]
      ],
      total=answer.total_logprob,
      cached=task.handle.cached_tokens,
      finish=answer.finish,
      stopped=answer.stopped,
    )
    if task.handle.done:
      self._end(task.number)

  def _view(self) -> dict[str, Any]:
    """Load report for the router."""
    scheduler = self._engine.scheduler
    rows = [row for row in list(scheduler.running) if row is not None]
    decoding = [row for row in rows if not row.reading]
    with self._work:
      tasks, waiting = list(self._tasks.values()), list(self._pulls)
      tasks_taken = self._membership.tasks_taken
    holding = [task for task in tasks if task.holds]
    fetching = [task for task in waiting if task.reads]
    used = sum(task.request.rows for task in holding)
    free = self._capacity - sum(task.tokens for task in holding)
    numbers = {id(task.handle): task.number for task in tasks if task.handle}
    # (task, tokens left, tokens computed) of each prompt.
    queue: list[tuple[int, int, int]] = []
    seen_handles: set[int] = set()
    for row in (*rows, *list(scheduler.waiting)):
      # The row may advance meanwhile: read its state once.
      handle, computed = id(row.owner.handle), row.computed
      tokens_left = row.prompt.size - computed
      # Of several answers only the first prefills; the others share its pages.
      if row.parked or handle in seen_handles:
        continue
      if row.share:
        seen_handles.add(handle)
      if tokens_left > 0:
        queue.append((numbers.get(handle, -1), tokens_left, computed))
    queue += [(task.number, len(task.request.prompt), 0) for task in fetching]
    return load_report(
      tasks_taken=tasks_taken,
      queue=queue,
      running_requests=len(decoding) + len(waiting) - len(fetching),
      running_tokens=sum(r.computed for r in decoding),
      free_tokens=free if used < self._engine.rows else 0,
    )
