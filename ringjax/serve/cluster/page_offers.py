"""Publication of an instance's pages, while prompts are prefilled and after.

Guarantees: pages of a prompt are published once and in its order, those of some
layers before the step that computes them has ended only if all of its layers
come; the last ones are followed by the message that the prompt is read. What
can't be copied is not published: the decode instance prefills it.
Cost: copies of pages in a thread of the worker's pool, for each part.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Mapping

import numpy as np

from ringjax.infer import inputs
from ringjax.kv.storage.page_pool import PagePool
from ringjax.serve.cluster.worker_task import WorkerTask
from ringjax.serve.engine import Engine
from ringjax.serve.prefix.prefix_transfer import (
  ExportedPrefix,
  LayerCopies,
  begin_layers,
  copied_pages,
  export_prefix,
)
from ringjax.serve.prefix.prefix_tree import OutOfPages
from ringjax.serve.scheduler import PromptPiece
from ringjax.transfer import DeviceServer, Publisher, Ticket

# Limit of published copies, in multiples of the engine's pool.
_PUBLISHED = 4
# Parts of a prompt are multiples of this, to be whole pages of any size.
_PART = 128


class PageOffers:
  """Publishes the pages of a worker's tasks.

  Attributes:
    device_bytes: Maximum bytes of copies of published pages on the devices.
    streams: Prompts in prefill whose parts are published, by task; the lock is
      held for changes.
  """

  def __init__(
    self,
    work: threading.Condition,
    engine: Engine,
    publisher: Publisher,
    tasks: Mapping[int, WorkerTask],
    copies: concurrent.futures.Executor,
    *,
    capacity: int,
    page_bytes: int,
    devices: DeviceServer | None,
    device_bytes: int,
  ):
    """Begin without published pages.

    Args:
      work: Lock of the worker's tasks, notified when pages are published.
      engine: Engine that has the pages.
      publisher: Publisher of the pages.
      tasks: Tasks of the worker by their numbers.
      copies: Threads that copy pages.
      capacity: Size of the engine's page pool, in tokens.
      page_bytes: Bytes of a page of all layers.
      devices: Sends pages from the engine's devices, or None.
      device_bytes: Maximum bytes of copies of published pages on the devices.
    """
    self._work, self._engine, self._publisher = work, engine, publisher
    self._tasks, self._copies = tasks, copies
    self._capacity, self._page_bytes = capacity, page_bytes
    self._devices, self.device_bytes = devices, device_bytes
    self.streams: dict[int, WorkerTask] = {}
    # Device bytes of prompts that are about to be published, by task.
    self._planned: dict[int, int] = {}

  def publish(self, task: WorkerTask) -> None:
    """Publish the rest of a prefilled or cached prompt, in another thread."""
    # The thread pool may have been closed.
    with contextlib.suppress(RuntimeError):
      self._copies.submit(self._publish_rest, task)

  def forget(self, number: int) -> None:
    """Forget a task; the lock is held."""
    self.streams.pop(number, None)
    self._planned.pop(number, None)

  def forget_all(self) -> None:
    """Forget all tasks; the lock is held."""
    self.streams.clear()
    self._planned.clear()

  def stepped(self) -> None:
    """Publish pages after a step of the engine, in the engine's thread."""
    for task in tuple(self.streams.values()):
      if task.handle is None or task.copying or task.published:
        continue
      if task.begun or self._due(task):
        task.copying = True
        with contextlib.suppress(RuntimeError):
          self._copies.submit(self._publish_part, task, task.begun)
      task.begun = 0

  def _due(self, task: WorkerTask, *, tail: bool = False) -> int:
    """Number of pages to publish with a step; 0 if there are too few.

    Args:
      task: Prompt in prefill.
      tail: Whether to include the rest at a long prompt's end.
    """
    page, size = self._engine.scheduler.tree.page, len(task.request.prompt)
    assert task.handle is not None
    ready = self._engine.prompt_progress(task.handle)
    count = ready // _PART * _PART // page - task.pages
    if count * page >= task.stream:
      return count
    ends = tail and ready == size and size >= task.stream
    return ready // page - task.pages if ends else 0

  def layers_begun(
    self, part: int, pieces: tuple[PromptPiece, ...], pool: PagePool
  ) -> None:
    """Copy pages of layers that a step has begun, in the engine's thread."""
    rows = {id(piece.row.owner.handle) for piece in pieces}
    for task in tuple(self.streams.values()):
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
      task.unpublished.append(copies)
      with self._work:
        submits, task.waits = not task.waits, True
      if submits:
        with contextlib.suppress(RuntimeError):
          self._copies.submit(self._publish_layers, task)

  def _layer_copies(
    self, task: WorkerTask, part: int, pool: PagePool
  ) -> LayerCopies | None:
    """Copies of the begun pages; None to publish them after the step."""
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
      # There is no memory for a copy; the step continues.
      return None
    # With fewer, some pages were evicted meanwhile.
    return copies if copies and copies.count == task.begun else None

  def _publish_rest(self, task: WorkerTask) -> None:
    """Publish the remaining pages of a prefilled or cached prompt."""
    cached = 0 if task.handle is None else task.handle.cached_tokens
    with task.publishes:
      ticket = self._publish_pages(task, last=True)
    if task.offers:
      tokens = task.pages * self._engine.scheduler.tree.page
      cached = min(tokens, len(task.request.prompt) - 1)
    task.link.tell(
      "read",
      id=task.number,
      ticket=None if ticket is None else ticket.to_json(),
      cached=cached,
    )

  def _publish_part(self, task: WorkerTask, begun: int) -> None:
    """Publish the pages that were prefilled since the last part.

    Args:
      task: Prompt in prefill.
      begun: Number of pages whose first layers were published before, or 0.
    """
    with task.publishes:
      self._offer_layers(task)
      if not task.published and not task.dropped:
        self._tell_part(task, self._publish_pages(task, begun, last=False))
      task.copying = False

  def _tell_part(self, task: WorkerTask, ticket: Ticket | None) -> None:
    if ticket is not None:
      task.link.tell("part", id=task.number, ticket=ticket.to_json())

  def _publish_layers(self, task: WorkerTask) -> None:
    """Publish layers of pages before their step has ended."""
    with self._work:
      task.waits = False
    with task.publishes:
      self._offer_layers(task)

  def _offer_layers(self, task: WorkerTask) -> None:
    """Publish the copied layers of a task; the lock `publishes` is held."""
    while task.unpublished:
      copies = task.unpublished.popleft()
      first, end = copies.layers
      published_before = (copies.count, first) if first else (0, 0)
      if first == 0:
        task.layered = 0, 0
      if task.published or task.dropped or task.layered != published_before:
        continue
      try:
        self._check_published(task)
        ticket = self._ticket(copies.result(), copies.count)
      except Exception:
        # Layers that are not published now are published after the step.
        continue
      self._record_ticket(task, ticket)
      task.layered = copies.count, end
      self._tell_part(task, ticket)

  def _publish_pages(
    self, task: WorkerTask, begun: int = 0, *, last: bool
  ) -> Ticket | None:
    """Publish the next pages of a prompt; the ticket, or None without pages.

    Args:
      task: Prompt in prefill, prefilled or cached.
      begun: Number of pages some of whose layers were published; 0 for all
        pages that are ready.
      last: Whether these are the last pages of the prompt.
    """
    request, ticket, count, layers = task.request, None, 0, None
    parts = self._engine.layer_parts
    if begun and task.layered == (begun, parts[-1][0]):
      layers = parts[-1]
    task.layered = 0, 0
    try:
      self._check_published(task)
      exported = export_prefix(
        self._engine,
        inputs.prompt(request.prompt, self._engine.vocab),
        salt=request.salt,
        adapter=request.adapter,
        first=task.pages,
        layers=layers,
        hashes=task.hashes,
        on_devices=self._on_devices(task),
      )
      count = len(exported.pages)
      if begun:
        # With fewer pages, the layers published before are useless.
        count = begun if count >= begun else 0
      elif not last:
        pages_per_part = _PART // self._engine.scheduler.tree.page
        count = (
          task.pages + count
        ) // pages_per_part * pages_per_part - task.pages
      if count > 0:
        ticket = self._ticket(exported, count)
    except Exception:
      # The pages were evicted, the engine is closed, or there is no memory for
      # a copy: the decode instance prefills the prompt, or the rest of it.
      ticket = None
    with self._work:
      task.pages += 0 if ticket is None else count
      task.published |= last
      self._work.notify_all()
    self._record_ticket(task, ticket)
    return ticket

  def _on_devices(self, task: WorkerTask) -> bool:
    """Whether a prompt's unpublished pages can stay on the devices."""
    if self._devices is None:
      return False
    page = self._engine.scheduler.tree.page
    count = len(task.request.prompt) // page - task.pages
    new_bytes = copied_pages(self._engine, count) * self._page_bytes
    with self._work:
      # Other tasks may be about to publish theirs.
      self._planned.pop(task.number, None)
      planned_bytes = self._publisher.device_bytes + sum(self._planned.values())
      has_room = planned_bytes + new_bytes <= self.device_bytes
      if has_room:
        self._planned[task.number] = new_bytes
    return has_room

  def _ticket(self, sent: ExportedPrefix, count: int) -> Ticket:
    """Publish the first `count` of the exported pages."""
    numbers = self._publisher.new_numbers(count)
    pages = dict(zip(numbers, sent.pages, strict=False))
    return self._publisher.publish(
      pages, sent.layout, labels=sent.labels[:count]
    )

  def _record_ticket(self, task: WorkerTask, ticket: Ticket | None) -> None:
    """Record a ticket; withdraw it if its task was dropped."""
    with self._work:
      self._planned.pop(task.number, None)
    if ticket is None:
      return
    with self._work:
      task.offers_made.append(ticket)
      dropped = task.dropped
    if dropped:
      self._publisher.withdraw(ticket)

  def _check_published(self, task: WorkerTask) -> None:
    """Limit published copies to a multiple of the engine's pool.

    Raises:
      OutOfPages: If too many published tokens wait to be pulled already.
    """
    with self._work:
      published_tokens = [
        len(another.request.prompt)
        for another in self._tasks.values()
        if another.offers_made and another is not task
      ]
    prompt_tokens = len(task.request.prompt)
    if sum(published_tokens) + prompt_tokens > _PUBLISHED * self._capacity:
      raise OutOfPages(f"{sum(published_tokens):,} tokens are published")
