"""A pipeline of processes as one prefill instance of a cluster (Mooncake).

Guarantees: pages are those of one engine with the whole model, up to rounding;
an engine takes them only if its weights are the same in all layers. If a
process of the group is lost, the instance ends, with an error that names the
rank; nothing of the prompt that it read is published.
Cost: one prompt at a time, in the order of (priority, arrival); a cancelled one
is read to its end. Keys and values of earlier stages' layers are sent twice:
to the last rank, while the prompt is read, and to the decode instance.
Memory: on the last rank, in the host's memory, all layers' keys and values of
the prompt that is read, and of prompts whose pages wait for their readers.

The last rank has a `PipelineWorker`, the others run `serve_stage`. It reports
no prefixes to the router: a prompt is read from its first token. Pages leave at
a prompt's end.
Ref: Qin et al. 2025, Mooncake (FAST), arXiv 2407.00079, section 5.1.
"""

from __future__ import annotations

import base64
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringjax.checks import positive_int
from ringjax.errors import OptionError, PromptError, RingjaxError
from ringjax.infer import inputs
from ringjax.infer.mooncake.chunk_pipeline import ChunkPipeline
from ringjax.kv.cache_kind import CacheConfig
from ringjax.parallel.links.live_link import LiveLink
from ringjax.serve.cluster.membership import (
  Membership,
  default_name,
  join_message,
  load_report,
  tell_failure,
)
from ringjax.serve.prefix.stage_pages import (
  StagePages,
  weight_sums,
  whole_digest,
)
from ringjax.serve.request import Request
from ringjax.serve.request_fields import request_of
from ringjax.transfer import Ticket
from ringjax.transfer.client import Address

# Limit of published copies, in multiples of the capacity.
_PUBLISHED = 4
_ROLE = "prefill"
_UNMEASURED = (
  "this router predicts by times that instances measure, and stages "
  "measure none: give it --times or --chip, or --policy=shortest"
)


def gather_pages(
  stage: ChunkPipeline, *, longest: int, page: int, kind: CacheConfig
) -> StagePages:
  """Pages that the stages' engines take; all ranks call it once, at first.

  Args:
    stage: This rank of the pipeline, with the layers of this rank alone.
    longest: Maximum number of tokens of a prompt and its answer.
    page: Number of tokens in a page.
    kind: Kind of cache of the decode instances.

  Raises:
    ConfigError, OptionError: See `StagePages` and `whole_digest`.
    PeerError: If a rank failed.
  """
  sums = stage.peers.gather(weight_sums(stage.own_weights()))
  return StagePages(
    stage.whole,
    weights=whole_digest(stage.whole, sums),
    longest=longest,
    page=page,
    dtype=stage.dtype,
    kind=kind,
  )


def serve_stage(stage: ChunkPipeline) -> int:
  """Reads prompts with the other ranks until the last one ends the group.

  Returns:
    Number of prompts.

  Raises:
    PeerError: If a rank failed.
  """
  count = 0
  while (job := stage.peers.gather(None)[-1]) is not None:
    ids = np.frombuffer(base64.b64decode(job["prompt"]), "<i4")
    stage.read(ids.astype(np.int32), job["chunks"], keep="blocks")
    count += 1
  return count


@dataclasses.dataclass(eq=False)
class PipelineTask:
  """A prompt that the router has sent.

  Attributes:
    number: Task number.
    prompt: Token ids, int32 [n].
    priority: Priority; smaller ones come first.
    link: Connection to the router that sent it.
    ticket: Ticket of its pages, once they are published.
    read: Whether it has been read.
    computed: Number of tokens in the chunks before the current one.
    dropped: Whether the router has cancelled it.
  """

  number: int
  prompt: np.ndarray
  priority: int
  link: LiveLink
  ticket: Ticket | None = None
  read: bool = False
  computed: int = 0
  dropped: bool = False


class PipelineWorker:
  """The last rank of a pipeline, as a prefill instance that joins a router.

  Attributes:
    name: Name in the cluster.
    publisher: Publisher of pages that the pipeline has computed.
    joined: Event, set while the worker is connected to the router.
    ended: Event, set when it was closed or the group has failed.
    error: The group's failure, or None.
    prompts: Number of prompts that were read.
  """

  def __init__(
    self,
    stage: ChunkPipeline,
    pages: StagePages,
    *,
    key: bytes,
    router: Address,
    longest: int,
    capacity: int | None = None,
    name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    lease_s: int | float = 30.0,
    silence_s: int | float = 10.0,
    beat_s: int | float = 0.25,
  ):
    """Prepare the worker; `start` joins the router.

    Args:
      stage: Last rank of the pipeline.
      pages: Layout and labels of its pages, from `gather_pages`.
      key: Secret key that the whole cluster shares, at least 16 bytes.
      router: Host and port where instances join.
      longest: Maximum number of tokens of a prompt and its answer.
      capacity: Maximum number of tokens of a prompt, and a fourth of the tokens
        whose pages may wait for readers; default: `longest`.
      name: Unique name in the cluster; default: from host and process.
      host: Address of this machine where others pull pages; 0.0.0.0 for the
        address by which it reaches the router.
      port: Port for pulls; 0 takes a free one.
      lease_s: Seconds that pages stay published without renewal by the router.
      silence_s: Seconds without a byte after which a router counts as lost.
      beat_s: Seconds between load reports to the router.

    Raises:
      OptionError: If this is not the last rank, or a value is out of range.
    """
    peers = stage.peers
    if peers.rank != peers.size - 1:
      raise OptionError(
        "stage",
        f"rank {peers.rank} of {peers.size}",
        f"rank {peers.size - 1}, which gets all layers' keys",
        "run serve_stage on the others",
      )
    self._stage, self._pages = stage, pages
    self._longest = positive_int("longest", longest)
    self._capacity = positive_int(
      "capacity", longest if capacity is None else capacity
    )
    self._work = threading.Condition()
    self._tasks: dict[int, PipelineTask] = {}
    self._membership = Membership(
      self._work,
      router=router,
      key=key,
      host=host,
      port=port,
      lease_s=lease_s,
      silence_s=silence_s,
      beat_s=beat_s,
      tickets=self._published_tickets,
      join_fields=self._join_fields,
      notice=self._notice_for,
      measure=lambda _: _UNMEASURED,
      on_message=self._hear,
      load=self._view,
      on_join=lambda _: None,
      on_lost=self._drop_all,
    )
    self.publisher = self._membership.publisher
    self.name = name or default_name("stages", self.publisher)
    self.joined, self.ended = self._membership.joined, threading.Event()
    self.error: BaseException | None = None
    self.prompts = 0
    self._reader = threading.Thread(
      target=self._read_loop, name=f"ringjax worker {self.name}", daemon=True
    )
    peers.on_failure(self._fail)

  @property
  def refused(self) -> str:
    """Reason why the router refused the worker, or ""."""
    return self._membership.refused

  @property
  def notice(self) -> str:
    """Hint at an option of the router without effect here, or ""."""
    return self._membership.notice

  def start(self) -> PipelineWorker:
    """Join the router, again whenever it was gone, and read its prompts."""
    self._reader.start()
    threading.Thread(
      target=self._membership.run,
      name=f"ringjax worker {self.name}",
      daemon=True,
    ).start()
    return self

  def leave(self, grace_s: int | float = 30.0) -> None:
    """Take no new prompts, finish current work within `grace_s`, and close."""
    self._membership.leave(grace_s, idle=lambda: not self._tasks)
    self.close()

  def close(self) -> None:
    """Leave at once, and end the group after the prompt that is being read."""
    self._membership.close()
    if self._reader.ident is not None:
      self._reader.join()
    self.publisher.close()
    self.ended.set()

  def __enter__(self) -> PipelineWorker:
    return self.start()

  def __exit__(self, *_: object) -> None:
    self.close()

  def _fail(self, error: BaseException) -> None:
    """End the instance: a rank of the group is lost."""
    with self._work:
      self.error = self.error or error
    self._membership.close(str(error))
    self.ended.set()

  # -------------------------------------------------------------------------
  # Prompts
  # -------------------------------------------------------------------------

  def _read_loop(self) -> None:
    """Read prompts with the other ranks, one after another."""
    peers = self._stage.peers
    try:
      while (task := self._next_task()) is not None:
        chunks = self._stage.chunks(task.prompt.size)
        data = np.ascontiguousarray(task.prompt, "<i4").tobytes()
        prompt = base64.b64encode(data).decode()
        peers.gather({"prompt": prompt, "chunks": list(chunks)})
        reading = self._stage.read(
          task.prompt,
          chunks,
          keep="blocks",
          pause=lambda n, task=task, chunks=chunks: setattr(
            task, "computed", sum(chunks[:n])
          ),
        )
        assert reading.blocks is not None
        self.prompts += 1
        sound = bool(np.isfinite(np.asarray(reading.logits)).all())
        # Without pages the decode instance reads the prompt, and says what its
        # logits are.
        self._publish(task, reading.blocks if sound else None)
      if self.error is None:
        peers.gather(None)
    except BaseException as error:
      self._fail(error)

  def _next_task(self) -> PipelineTask | None:
    """Wait for the next prompt; None once the worker is closed."""
    with self._work:
      while not self._membership.closed:
        waiting = [task for task in self._tasks.values() if not task.read]
        if waiting:
          # Tasks are in the order of their arrival.
          return min(waiting, key=lambda task: task.priority)
        self._work.wait()
    return None

  def _publish(
    self,
    task: PipelineTask,
    blocks: Sequence[tuple[np.ndarray, np.ndarray]] | None,
  ) -> None:
    """Publish the whole pages of a prompt, and tell the router."""
    ticket, count = None, task.prompt.size // self._pages.page
    with self._work:
      dropped = task.dropped
      published_tokens = sum(
        published.prompt.size
        for published in self._tasks.values()
        if published.ticket is not None
      )
    has_room = (
      published_tokens + task.prompt.size <= _PUBLISHED * self._capacity
    )
    if blocks is not None and count and has_room and not dropped:
      numbers = self.publisher.new_numbers(count)
      ticket = self.publisher.publish(
        dict(zip(numbers, self._pages.cut(blocks), strict=True)),
        self._pages.layout,
        labels=self._pages.labels(task.prompt, count),
      )
    with self._work:
      task.ticket, task.read = ticket, True
      dropped = task.dropped
      self._work.notify_all()
    if dropped and ticket is not None:
      self.publisher.withdraw(ticket)
    task.link.tell(
      "read",
      id=task.number,
      ticket=None if ticket is None else ticket.to_json(),
      cached=0,
    )

  # -------------------------------------------------------------------------
  # The router
  # -------------------------------------------------------------------------

  def _join_fields(self) -> dict[str, Any]:
    leaf = self._pages.layout.leaves[0]
    return join_message(
      name=self.name,
      role=_ROLE,
      roles=[_ROLE],
      publisher=self.publisher,
      codec=leaf.codec,
      dtype=leaf.dtype,
      vocab=self._stage.config.vocab,
      longest=self._longest,
      page=self._pages.page,
      capacity=self._capacity,
      rows=1,
    )

  def _notice_for(self, streams: bool) -> str:
    if not streams:
      return ""
    return (
      "pages leave at a prompt's end: the router's --stream has no effect "
      "on this instance"
    )

  def _hear(self, fields: dict[str, Any]) -> None:
    """Handle a message of the router."""
    link, kind = self._membership.link, fields["t"]
    assert link is not None
    if kind == "read":
      with self._work:
        self._membership.tasks_taken += 1
      if fields.get("tickets"):
        # The prefix is computed with the rest.
        link.tell("pulled", id=int(fields["id"]), nbytes=0)
      try:
        self._take(fields, link)
      except RingjaxError as error:
        tell_failure(link, int(fields["id"]), error)
    elif kind == "offer":
      link.tell("read", id=int(fields["id"]), ticket=None, cached=0)
    elif kind == "cancel":
      with self._work:
        task = self._tasks.pop(int(fields["id"]), None)
        self._work.notify_all()
      if task is not None:
        self._drop(task)
    elif kind == "role":
      if fields["role"] != _ROLE:
        raise OptionError(
          "role",
          str(fields["role"])[:40],
          f"{_ROLE!r}: stages read prompts and do not answer",
          "leave its role",
        )
    elif kind != "part":
      raise ValueError(f"a message {str(kind)[:40]!r}")

  def _take(self, fields: dict[str, Any], link: LiveLink) -> None:
    """Queue a prompt to read."""
    # Masks and stops are for the instance that answers.
    request: Request = request_of(fields["request"] | {"grammar": None}, None)
    if request.adapter:
      raise OptionError(
        "adapter",
        repr(request.adapter),
        "none: stages have a model's own weights",
        "ask for the model, or use an instance with --adapters",
      )
    prompt = inputs.prompt(request.prompt, self._stage.config.vocab)
    if prompt.size > min(self._capacity, self._longest):
      raise PromptError(
        "prompt",
        f"{prompt.size:,} tokens",
        f"at most {min(self._capacity, self._longest):,}",
        "start the stages with a larger --longest and --capacity",
      )
    task = PipelineTask(
      int(fields["id"]),
      prompt,
      request.priority,
      link,
    )
    with self._work:
      if self._membership.closed:
        link.close("it is leaving")
        return
      self._tasks[task.number] = task
      self._work.notify_all()

  def _drop(self, task: PipelineTask) -> None:
    with self._work:
      task.dropped = True
      ticket = task.ticket
    if ticket is not None:
      # Reads that are under way keep their pages.
      self.publisher.withdraw(ticket)

  def _drop_all(self) -> None:
    """Forget all tasks; leases of published pages run out."""
    with self._work:
      tasks = list(self._tasks.values())
      self._tasks.clear()
      self._work.notify_all()
    for task in tasks:
      task.dropped = True

  def _published_tickets(self) -> list[Ticket]:
    with self._work:
      tickets = [task.ticket for task in self._tasks.values()]
    return [ticket for ticket in tickets if ticket is not None]

  def _view(self) -> dict[str, Any]:
    """Load report for the router."""
    with self._work:
      tasks_taken = self._membership.tasks_taken
      waiting = [task for task in self._tasks.values() if not task.read]
    return load_report(
      tasks_taken=tasks_taken,
      queue=[
        (task.number, task.prompt.size - task.computed, task.computed)
        for task in waiting
      ],
      free_tokens=self._capacity - sum(task.prompt.size for task in waiting),
    )
