"""An engine in several processes: process 0 takes requests, the others follow.

Guarantees: the processes make the same calls in the same order, so that all an
engine has (prefixes, drafts, adapters, grammars, codecs, beams, preemption)
works as in one process, with the same tokens. A token reaches a client only
once all processes agree on it, see `GroupAgreement`. A process that dies, hangs
or is stopped is noticed within `timeout_s`; then every open request ends with a
`PeerError` that names it, also while a device call hangs, and no request is
taken any more: start all processes again.
Cost: a message to each process for each step, with the requests that came since
the last one, and its answer, see `GroupAgreement`. A text to score or to embed
is an input of a step, too: answers wait for its pass, and the first time that a
text of its length comes for the compiler.

Process 0 sends what came in before each step:

  step      number of the step, requests, cancellations and passes of texts
            since the last one, and whether the engine takes a step then
  choice    a choice that depends on measured times, during the step
  end       the group ends

Another process that has to end (`leave`) notifies process 0, which takes no
more requests, finishes those that are open, and ends the group.

Requests are sent as JSON, masks as their grammars. Deadlines are those of
process 0's clock. Whatever else a replica did with its own clock, memory or
files would make it differ, so contiguous rows and the transfer of pages are
refused in several processes.

Each process has a separate store, or none has one: a prefix counts as found as
far as all stores have it, by a message from each process to each while its row
is about to begin. Prefixes of answers that have ended are written at once, so
that processes that are started again find them (`StoreLink.early`); part of
them, `important=`, is refused.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ringjax.checks import number
from ringjax.errors import (
  InputTypeError,
  OptionError,
  PeerError,
  RingjaxError,
)
from ringjax.infer import inputs
from ringjax.parallel.joint_outcome import check_equal
from ringjax.parallel.peers import TOGETHER, WAITING, Peers
from ringjax.serve.api.grammar import GrammarCompiler
from ringjax.serve.api.server_metrics import Figure
from ringjax.serve.engine import Engine
from ringjax.serve.hosts.engine_facts import engine_facts
from ringjax.serve.hosts.group_agreement import GroupAgreement, group_error
from ringjax.serve.hosts.open_requests import OpenRequest, OpenRequests
from ringjax.serve.request import Answer, Handle, Request
from ringjax.serve.request_fields import request_fields, request_of
from ringjax.serve.text_requests import TextPass, TextRequests

# Seconds that a process may be silent, or stay behind the others.
TIMEOUT_S = 30.0
# Seconds between two looks at deadlines and failures.
_LOOK_S = 0.2


@dataclasses.dataclass(eq=False)
class _DriverCall:
  """A call of a client's thread, which the driving thread makes.

  Attributes:
    work: Function that makes the call; returns the fields to send, or None.
    together: Function that computes with the other processes once they have
      these fields, or None.
    ended: Event of its end.
    error: Error that it raised, or None.
  """

  work: Callable[[], dict[str, Any] | None]
  together: Callable[[], object] | None = None
  ended: threading.Event = dataclasses.field(default_factory=threading.Event)
  error: Exception | None = None


class EngineGroup:
  """An engine whose devices belong to several processes of `jax.distributed`.

  Each process makes the same `Engine` on the same mesh, and a group of it.
  Process 0 calls `submit`, as of an engine; the others call `follow`.

  Attributes:
    engine: Engine of this process; only the group may change it.
    peers: The processes.
    tokenizer: Tokenizer of the engine.
    vocab: Vocabulary size of the model.
    longest: Maximum number of tokens of a prompt and its answer together.
  """

  def __init__(
    self,
    engine: Engine,
    *,
    timeout_s: int | float = TIMEOUT_S,
    peers: Peers | None = None,
    on_failure: Callable[[PeerError], object] | None = None,
    on_leave: Callable[[int], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Meets the other processes, and checks that their engines are alike.

    Args:
      engine: Engine without requests; call its `warm_up` in all processes
        before, or the first requests wait for compilations.
      timeout_s: Seconds within which the failure of a process is noticed: it
        may be silent for so long, or behind the others in a step.
      peers: The processes of the group, which have another `timeout_s` then;
        default: those of `jax.distributed`. The group closes them.
      on_failure: Called once, by another thread, when a process has failed and
        the open requests have ended: to end this process, for example, which
        may hang in a call and can't join the others again.
      on_leave: Called in process 0, by another thread, with the number of a
        process that asks to end, see `leave`; it has to see to the end of the
        group. Default: the group takes no requests any more, and ends with the
        last open one.
      clock: Clock in seconds, for deadlines.

    Raises:
      OptionError: If the engine has requests, reads part of stored prefixes, or
        differs from that of another process.
      PeerError: If a process is missing.
    """
    number("timeout_s", timeout_s, above=0)
    if engine.busy or not engine.open:
      raise OptionError(
        "engine",
        "an engine with requests, or a closed one",
        "a new engine",
        "make the group before the first request",
      )
    if engine.important is not None:
      raise OptionError(
        "important",
        f"{engine.important} of an engine in a group of processes",
        "whole prefixes of a store",
        "leave important out",
      )
    self.engine, self.tokenizer = engine, engine.tokenizer
    self.vocab, self.longest = engine.vocab, engine.longest
    self.peers = peers or Peers.of_processes(timeout_s=timeout_s)
    self._on_leave, self._draining = on_leave, False
    self._requests = OpenRequests()
    self._thread: threading.Thread | None = None
    # Processes that ask to end before this one is ready; then None.
    self._early: list[int] | None = []
    self.peers.on_notice(lambda rank, _: self._asked_to_end(rank))
    try:
      check_equal(self.peers.gather(engine_facts(engine)))
    except Exception:
      self.peers.close()
      raise
    self._on_failure, self._clock = on_failure, clock
    self._calls: collections.deque[_DriverCall] = collections.deque()
    self._closed = False
    self._steps = self._open_texts = 0
    self._agreement = engine.agreement = GroupAgreement(self.peers)
    if engine.store_link is not None:
      engine.store_link.early = True
    self.peers.on_failure(self._failed)
    if self.peers.failure is not None:
      self._failed(self.peers.failure)
    with self._requests.changed:
      early, self._early = self._early, None
    for rank in early or ():
      self._asked_to_end(rank)

  @property
  def leads(self) -> bool:
    """Whether this is process 0, which takes requests."""
    return self.peers.rank == 0

  @property
  def failure(self) -> Exception | None:
    """Error with which the group has failed, or None."""
    return self._requests.failure

  # -------------------------------------------------------------------------
  # Process 0
  # -------------------------------------------------------------------------

  @property
  def rows(self) -> int:
    """Number of answers that are made at the same time."""
    return self.engine.rows

  @property
  def adapters(self) -> tuple[str, ...]:
    """Names of the adapters that requests may ask for."""
    return self.engine.adapters

  @functools.cached_property
  def texts(self) -> TextRequests:
    """Scores and embeddings of texts, which all processes compute."""
    return TextRequests(
      self._read_texts, self.vocab, around=self._texts_that_are_open
    )

  @property
  def open(self) -> bool:
    """Whether requests are taken."""
    return not (self._closed or self._draining) and self.failure is None

  @property
  def missing(self) -> str:
    """Reason for which no requests are taken; "" if they are."""
    if self.failure is not None:
      return f"the engine: {self.failure}"
    if self._closed:
      return "the engine: it is closed"
    return "the engine: a process of it is ending" if self._draining else ""

  def figures(self) -> list[Figure]:
    """Metrics of process 0's engine, and the number of processes."""
    text = "Processes of the engine."
    present = self.peers.size if self.failure is None else 0
    return [
      *self.engine.figures(),
      Figure("gauge", "engine_processes", present, text),
    ]

  def start(self) -> EngineGroup:
    """Starts the thread that drives all processes, until `close`.

    Raises:
      OptionError: If this is not process 0, or the group is closed.
      PeerError: If a process has failed.
    """
    self._check_leads("start")
    with self._requests.changed:
      self._check_open()
      if self._draining:
        raise _ended("a group that is ending")
      self._start_driving()
    return self

  def submit(
    self,
    request: Request,
    on_change: Callable[[Answer], None] | None = None,
  ) -> Handle:
    """Queues a request, as `Engine.submit` does, and starts the thread.

    Args:
      request: Request to serve; a mask must be that of a grammar.
      on_change: Called with an answer after each of its tokens and when it has
        ended; it has to be quick and may not raise.

    Raises:
      PromptError: If the prompt is invalid or longer than the engine serves.
      OptionError: If a mask is a function, the engine refuses the request, this
        is not process 0, or the group is closed.
      PeerError: If a process has failed.
    """
    self._check_thread("submit")
    if not isinstance(request, Request):
      raise InputTypeError(
        "request",
        type(request).__name__,
        "an rj.serve.Request",
        "make one with rj.serve.Request(prompt=..., max_new_tokens=...)",
      )
    self.start()
    prompt = inputs.prompt(request.prompt, self.vocab)
    fields = request_fields(request, prompt)
    entry = self._requests.add(self, request, self._clock(), on_change)
    # Process 0 enforces the deadline, and sends its end as a cancellation.
    timeless = dataclasses.replace(request, prompt=prompt, deadline=None)

    def work() -> dict[str, Any]:
      changed = functools.partial(self._requests.update, entry)
      engine_handle = self.engine.submit(timeless, changed)
      # Times count from the client's submission.
      engine_handle.arrival = entry.handle.arrival
      self._requests.accept(entry, engine_handle)
      return {"t": "submit", "n": entry.number, "request": fields}

    try:
      self._call(work)
    except BaseException:
      self._requests.drop(entry)
      raise
    return entry.handle

  def cancel(self, handle: Handle) -> None:
    """Cancels a request; its answers keep the tokens so far."""
    entry = self._requests.entry(handle)
    if entry is not None and self.failure is None:
      self._call(functools.partial(self._cancelled, entry, "cancelled"))

  def advance(self, handle: Handle) -> None:
    """Waits for the next change of any request, at most a second."""
    changed = self._requests.changed
    with changed:
      if not handle.done:
        changed.wait(timeout=1.0)

  @contextlib.contextmanager
  def unchanged(self) -> Iterator[None]:
    """Context in which no answer of a client changes; it has to be short."""
    with self._requests.changed:
      yield

  def leave(self) -> None:
    """Asks process 0 to end the group once its open requests have ended.

    For a process that has to end, from a signal handler, too: it still has to
    take part in the steps until `follow` returns. In process 0 the group takes
    no requests any more from now on.
    """
    if self.leads:
      self._drain()
    else:
      self.peers.notify(0, "leave")

  def close(self) -> None:
    """Cancels open requests and ends the group; the others' `follow` returns.

    Where the engine hangs in a call after a failure it is left in it.
    """
    with self._requests.changed:
      self._closed = True
      started = self._thread is not None
      self._requests.changed.notify_all()
    if not self.leads:
      # Without effect after `follow`.
      self.peers.abandon(RuntimeError("it closed its group before process 0"))
      self.peers.close()
    elif not started:
      self._end()
    elif self._thread is not None and self._thread.is_alive():
      while self.failure is None and self._thread.is_alive():
        self._thread.join(_LOOK_S)

  def __enter__(self) -> EngineGroup:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  @contextlib.contextmanager
  def _texts_that_are_open(self) -> Iterator[None]:
    """Context of a client's texts: the group does not end between passes."""
    self._check_thread("texts")
    # Before the start: the thread that drives may look at once.
    with self._requests.changed:
      self.start()
      self._open_texts += 1
    try:
      yield
    finally:
      with self._requests.changed:
        self._open_texts -= 1
        self._requests.changed.notify_all()

  def _read_texts(self, text_pass: TextPass) -> list[np.ndarray]:
    """Numbers of a pass, which all processes compute before the next step."""
    values: list[np.ndarray] = []

    def work() -> dict[str, Any]:
      # Refused here, and not in all processes.
      self.engine.adapter_number(text_pass.adapter)
      return {"t": "texts", "pass": text_pass.fields()}

    def together() -> None:
      values.extend(self._read_together(text_pass))

    self._call(work, together)
    return values

  def _read_together(self, text_pass: TextPass) -> Sequence[np.ndarray]:
    """Computes a pass with the other processes."""
    with self.peers.doing(TOGETHER):
      return self._agreement.read_texts(text_pass, self.engine.texts.read)

  def _asked_to_end(self, rank: int) -> None:
    """Handles a process that asks to end; called by another thread."""
    if not self.leads:
      return
    with self._requests.changed:
      if self._early is not None:
        self._early.append(rank)
        return
    if self._on_leave is None:
      self._drain()
    else:
      self._on_leave(rank)

  def _drain(self) -> None:
    """Takes no more requests, and ends the group after the open ones."""
    with self._requests.changed:
      if self._closed or self.failure is not None:
        return
      self._draining = True
      self._start_driving()
      self._requests.changed.notify_all()

  def _start_driving(self) -> None:
    """Starts the thread that drives all processes, unless it was started."""
    if self._thread is None:
      self._thread = threading.Thread(
        target=self._drive, name="ringjax engine group", daemon=True
      )
      self._thread.start()

  def _check_thread(self, what: str) -> None:
    if threading.current_thread() is self._thread:
      raise OptionError(
        what,
        "a call in an on_change",
        "calls in other threads: steps wait for an on_change",
        "let on_change wake another thread, which makes the call",
      )

  def _check_leads(self, what: str) -> None:
    if not self.leads:
      raise OptionError(
        "engine",
        f"{what} in process {self.peers.rank}",
        "requests in process 0",
        "call follow() here",
      )

  def _check_open(self) -> None:
    if self.failure is not None:
      raise self.failure
    if self._closed:
      raise _ended("a closed group")

  def _call(
    self,
    work: Callable[[], dict[str, Any] | None],
    together: Callable[[], object] | None = None,
  ) -> None:
    """Have the driving thread make a call between two steps.

    The driving thread itself, in an `on_change`, does not wait for it.

    Args:
      work: Function that makes the call, see `_DriverCall`.
      together: Function of all processes, see `_DriverCall`.

    Raises:
      Exception: The error of the call, or the failure of the group.
    """
    call = _DriverCall(work, together)
    if threading.current_thread() is self._thread:
      self._calls.append(call)
      return
    with self._requests.changed:
      self._check_open()
      self._calls.append(call)
      self._requests.changed.notify_all()
      self._requests.changed.wait_for(
        lambda: call.ended.is_set() or self.failure is not None
      )
    if call.error is not None:
      raise call.error
    if not call.ended.is_set():
      assert self.failure is not None
      raise self.failure

  def _cancelled(self, entry: OpenRequest, why: str) -> dict[str, Any] | None:
    """Cancel a request of the engine; the fields to send, if it was open."""
    handle = entry.engine_handle
    if handle is None or handle.done:
      return None
    self.engine.counters.expired += why == "deadline"
    self.engine.cancel(handle, why)
    return {"t": "cancel", "n": entry.number, "why": why}

  # -------------------------------------------------------------------------
  # The driving thread of process 0
  # -------------------------------------------------------------------------

  def _drive(self) -> None:
    """Take steps until the group is closed or has failed."""
    try:
      with self._agreement.driving():
        while self._wait() and not self._closed:
          self._take_step()
      if self.failure is None:
        self._end()
    except Exception as error:
      # Ends requests that wait to be submitted too; `step` has ended others.
      if self.peers.failure is None:
        self.peers.abandon(error)
      self._failed(self.peers.failure or PeerError(str(error), rank=0))

  def _wait(self) -> bool:
    """Wait for work; whether the group still works."""
    changed = self._requests.changed
    with changed, self.peers.doing(WAITING):
      while not (
        self._calls or self.engine.busy or self._closed or self.failure
      ):
        if self._draining and not (len(self._requests) or self._open_texts):
          self._closed = True
          break
        changed.wait(_LOOK_S)
        if self._requests.overdue(self._clock()):
          break
    return self.failure is None

  def _take_step(self) -> None:
    """Make the calls of clients, tell the others, and take a step."""
    inputs_of_step: list[dict[str, Any]] = []
    for entry in self._requests.overdue(self._clock()):
      fields = self._cancelled(entry, "deadline")
      inputs_of_step += [] if fields is None else [fields]
    together: list[_DriverCall] = []
    while self._calls:
      call = self._calls.popleft()
      try:
        fields = call.work()
        inputs_of_step += [] if fields is None else [fields]
      except Exception as error:
        call.error = error
      if call.together is not None and call.error is None:
        together.append(call)
      else:
        self._end_call(call)
    busy = self.engine.busy
    if not inputs_of_step and not busy:
      return
    self._steps += 1
    self.peers.post(["step", self._steps, inputs_of_step, busy])
    for call in together:
      assert call.together is not None
      try:
        call.together()
      except PeerError:
        raise
      except RingjaxError as error:
        call.error = error
      self._end_call(call)
    if busy:
      with self.peers.doing(TOGETHER):
        self.engine.step()

  def _end_call(self, call: _DriverCall) -> None:
    """Wakes the thread that waits for a call."""
    with self._requests.changed:
      call.ended.set()
      self._requests.changed.notify_all()

  def _end(self) -> None:
    """End the group without a failure."""
    with self._agreement.driving():
      # It cancels the requests of all clients.
      self.engine.close()
    self.peers.post(["end"])
    self.peers.close()
    while self._calls:
      call = self._calls.popleft()
      call.error = _ended("a closed group")
      call.ended.set()
    with self._requests.changed:
      self._requests.changed.notify_all()

  # -------------------------------------------------------------------------
  # The other processes
  # -------------------------------------------------------------------------

  def follow(self) -> None:
    """Takes the steps of process 0 until it closes the group.

    Raises:
      OptionError: If this is process 0.
      PeerError: If a process has failed. A call of this process's devices that
        hangs because of it does not return: `on_failure` is called then, too.
    """
    if self.leads:
      raise OptionError(
        "engine", "follow in process 0", "requests there", "call submit"
      )
    handles: dict[int, Handle] = {}
    grammars = None
    if self.tokenizer is not None:
      grammars = GrammarCompiler(self.tokenizer, self.vocab)
    try:
      with self._agreement.driving(), self.peers.abandoning():
        while self._follow_step(handles, grammars):
          pass
        self.engine.close()
    except Exception as error:
      failure = self.peers.failure
      if failure is None:
        raise
      raise group_error(failure, self.peers.size) from error
    finally:
      self._closed = True
      self.peers.close()

  def _follow_step(
    self, handles: dict[int, Handle], grammars: GrammarCompiler | None
  ) -> bool:
    """Take a step of process 0; whether there are more."""
    kind, *values = self.peers.receive(0)
    if kind == "end":
      return False
    steps, inputs_of_step, busy = values
    self._steps += 1
    if kind != "step" or steps != self._steps:
      raise PeerError(
        f"rank 0 sent {kind} {steps}; expected step {self._steps}", rank=0
      )
    passes: list[TextPass] = []
    for fields in inputs_of_step:
      if fields["t"] == "cancel":
        self.engine.cancel(handles[fields["n"]], fields["why"])
      elif fields["t"] == "texts":
        passes.append(TextPass.of(fields["pass"]))
      else:
        request = request_of(fields["request"], grammars)
        handles[fields["n"]] = self.engine.submit(request)
    for text_pass in passes:
      try:
        self._read_together(text_pass)
      except PeerError:
        raise
      except RingjaxError:
        # Of the texts: their client gets it from process 0.
        pass
    if busy:
      with self.peers.doing(TOGETHER):
        self.engine.step()
    for n in [n for n, handle in handles.items() if handle.done]:
      del handles[n]
    return True

  # -------------------------------------------------------------------------
  # Failures
  # -------------------------------------------------------------------------

  def _failed(self, failure: PeerError) -> None:
    """End all open requests; called once by another thread."""
    error = group_error(failure, self.peers.size)
    if self._requests.fail(error):
      self._tell_failure(error)

  def _tell_failure(self, error: PeerError) -> None:
    on_failure, self._on_failure = self._on_failure, None
    if on_failure is not None:
      on_failure(error)


def _ended(what: str) -> OptionError:
  """Error of a call of a group that takes none any more."""
  return OptionError("engine", what, "one that is open", "make another group")
