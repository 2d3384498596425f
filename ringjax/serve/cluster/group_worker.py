"""An engine of several processes as one instance of a cluster.

Guarantees: an answer's tokens are those of the engine alone. A page of such an
engine is in parts, one on each host, so none leaves and none comes: the router
lets the instance answer what it reads (`moves_pages`), and its only role is
"both". If a process is lost, the instance leaves with all its requests, which
the router begins again elsewhere after the tokens known so far.
Cost: that of the group; process 0 alone speaks to the router, which does not
learn which prefixes the instance has.

All processes call `page_codec`, and make the group. Then process 0 has a
`GroupWorker`, the others call `EngineGroup.follow`.
"""

from __future__ import annotations

from typing import Any

from ringjax.errors import InputTypeError, OptionError, RingjaxError
from ringjax.infer import inputs
from ringjax.parallel.links.live_link import LiveLink
from ringjax.serve.cluster.answering_worker import AnsweringWorker
from ringjax.serve.cluster.membership import join_message
from ringjax.serve.cluster.worker_task import WorkerTask
from ringjax.serve.hosts.engine_group import EngineGroup
from ringjax.serve.request import Answer
from ringjax.serve.request_fields import request_of
from ringjax.serve.text_requests import TextPass
from ringjax.transfer.client import Address

_ROLE = "both"
_UNMEASURED = (
  "this router predicts by times that instances measure, and an engine of "
  "several processes measures none: give it --times or --chip, or "
  "--policy=shortest"
)


class GroupWorker(AnsweringWorker):
  """Process 0 of an `EngineGroup`, as an instance that joins a router."""

  roles = (_ROLE,)

  def __init__(
    self,
    group: EngineGroup,
    codec: tuple[str, str],
    *,
    key: bytes,
    router: Address,
    name: str | None = None,
    host: str = "127.0.0.1",
    silence_s: int | float = 10.0,
    beat_s: int | float = 0.25,
  ):
    """Prepare the worker; `start` joins the router.

    Args:
      group: Processes of one engine, in process 0.
      codec: Result of `page_codec`, which all processes have called before they
        made the group; the router compares instances by it.
      key: Secret key that the whole cluster shares, at least 16 bytes.
      router: Host and port where instances join.
      name: Unique name in the cluster; default: from role, host and process.
      host: Address of this machine.
      silence_s: Seconds without a byte after which a router counts as lost.
      beat_s: Seconds between load reports to the router.

    Raises:
      InputTypeError: If `group` is not an `EngineGroup`.
      OptionError: If this is not process 0, or a value is out of range.
    """
    if not isinstance(group, EngineGroup):
      raise InputTypeError(
        "group",
        type(group).__name__,
        "an rj.serve.EngineGroup",
        "make one of the engine in each process, or give an engine of one "
        "process to rj.serve.cluster.ClusterWorker",
      )
    if not group.leads:
      raise OptionError(
        "group",
        f"process {group.peers.rank} of {group.peers.size}",
        "process 0, which takes requests",
        "call follow() of the group here",
      )
    self._group, (self._codec, self._dtype) = group, codec
    super().__init__(
      group,
      group.engine,
      key=key,
      router=router,
      role=_ROLE,
      name=name,
      host=host,
      port=0,
      # Renewed by each beat, of no page.
      lease_s=max(30.0, 4 * beat_s),
      silence_s=silence_s,
      beat_s=beat_s,
    )

  def _join_fields(self) -> dict[str, Any]:
    engine = self._engine
    return join_message(
      name=self.name,
      role=_ROLE,
      roles=self.roles,
      publisher=self.publisher,
      codec=self._codec,
      dtype=self._dtype,
      vocab=engine.vocab,
      longest=engine.longest,
      page=engine.scheduler.tree.page,
      capacity=self._capacity,
      rows=engine.rows,
      texts=True,
      moves_pages=False,
    )

  def _view(self) -> dict[str, Any]:
    link = self._membership.link
    if self._group.failure is not None and link is not None:
      link.close("its engine failed")
    return super()._view()

  def _measure(self, why: str) -> str:
    del why
    return _UNMEASURED

  def _hear(self, fields: dict[str, Any]) -> None:
    """Handle a message of the router."""
    link, kind = self._membership.link, fields["t"]
    assert link is not None
    if kind == "answer":
      with self._work:
        self._membership.tasks_taken += 1
      try:
        self._answer(fields, link)
      except RingjaxError as error:
        self._fail(int(fields["id"]), link, error)
    elif kind == "texts":
      self._begin_texts(int(fields["id"]), TextPass.of(fields["texts"]), link)
    elif kind == "cancel":
      task = self._end(int(fields["id"]))
      if task is not None:
        self._drop(task)
    elif kind != "role" or fields["role"] != _ROLE:
      raise ValueError(f"a message {str(kind)[:40]!r}")

  def _answer(self, fields: dict[str, Any], link: LiveLink) -> None:
    """Submit a request of the router to the group."""
    request = request_of(fields["request"], self._grammars)
    prompt = inputs.prompt(request.prompt, self._engine.vocab)
    task = WorkerTask(
      int(fields["id"]),
      request,
      prompt.size + request.max_new_tokens * request.rows,
      False,
      link,
      admitted=True,
      # The router has the known tokens. Their text is sent with the first new
      # token: a client may have passed tokens without text.
      sent=[(len(tokens), 0) for tokens in request.begun]
      or [(0, 0)] * request.answers,
    )
    with self._work:
      if self._membership.closed:
        link.close("it is leaving")
        return
      self._tasks[task.number] = task
    handle = self._group.submit(
      request, lambda answer: self._changed(task, answer)
    )
    # The group's thread has this lock before that of the worker, too.
    with self._group.unchanged(), self._work:
      task.handle = handle
      # What came before the handle was known.
      for answer in handle.answers:
        if answer.finish is not None or answer.tokens:
          self._tell(task, answer)
    if task.dropped:
      self._drop(task)

  def _changed(self, task: WorkerTask, answer: Answer) -> None:
    """Handle new tokens of an answer, in the group's thread."""
    with self._work:
      if task.handle is not None and not task.dropped:
        self._tell(task, answer)

  def _tell(self, task: WorkerTask, answer: Answer) -> None:
    """Send what is new in an answer; the lock is held."""
    if answer.finish not in (None, "stop", "length"):
      self._fail(task.number, task.link, answer.error or answer.finish)
    elif task.number in self._tasks:
      self._send(task, answer)
