"""A router: takes requests, and has instances of a cluster serve them.

Guarantees: a request's tokens are those of one engine, whichever instances
serve it and however often they are lost meanwhile: what was read is read again
elsewhere, and an answer goes on behind the tokens that are known already.
A request ends: with its answer, or with an error that says why, at the latest
`patience_s` after there was no instance that could serve it, or after
`attempts` instances were lost with it. Instances join and leave at any time;
requests of others do not notice. Where requests go is decided by a
`RoutingPolicy`, which sees what instances report and what was sent to them
since; what instances do may be changed by a `RolePlanner`.
Cost: a thread for each instance, one that looks at times and one that plans
roles; no arrays.

  client        router                 who reads          who answers
  submit ->     route           read ->
                                       pages published
                            <- ticket
                decode_instance                 answer ->
                                             <- pull -    has room
                            <----------------- tokens
  <- tokens     COMPLETE went to who reads

With `stream_tokens` pages are published in parts while the prompt is read, of
engines with `layer_parts` some layers at a time, and who answers pulls them
meanwhile. A route may let who reads fetch a prefix first
from an instance that has it, by what instances tell of their blocks.
`ClusterRouter` has the surface of an engine that `rj.serve.app` serves.
Ref: Zhong et al. 2024, DistServe (OSDI), arXiv 2401.09670.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ringjax.checks import integer, number, one_of, positive_int
from ringjax.data.tokenizer import AnyTokenizer
from ringjax.errors import (
  InputTypeError,
  OptionError,
  PeerError,
  PromptError,
  RingjaxError,
)
from ringjax.infer import inputs
from ringjax.parallel.door import Door
from ringjax.serve.cluster.block_index import (
  BlockEvent,
  BlockIndex,
  block_keys,
  short_key,
)
from ringjax.serve.cluster.control_link import ControlLink, checked_beat
from ringjax.serve.cluster.phase_times import (
  InstanceTimes,
  QuadraticTimes,
  QueuedPrompts,
)
from ringjax.serve.cluster.request_fields import request_fields
from ringjax.serve.cluster.role_planner import (
  RoleChange,
  RolePlanner,
  TrafficSummary,
)
from ringjax.serve.cluster.routing import (
  MOST_QUEUED,
  ROLES,
  InstanceView,
  PrefixCopy,
  Rejected,
  Route,
  RoutedRequest,
  RoutingPolicy,
  ShortestQueue,
  check_roles,
)
from ringjax.serve.request import (
  Answer,
  Handle,
  RejectedError,
  Request,
  TokenLogprobs,
)
from ringjax.serve.server_metrics import Figure
from ringjax.serve.traces import TraceRequest
from ringjax.transfer.wire import (
  PullConnection,
  as_json,
  checked_key,
  listening,
)

# Seconds for which requests wait for an instance that is missing: one that is
# started again loads weights and compiles.
PATIENCE_S = 300.0
# Seconds for a stranger to show the key and say what it wants.
_GREETING_S = 5.0
_LOOK_S = 0.1
# Until an instance has told of the blocks that it was to get, and until it is
# asked again for those that it did not.
_COPIED_S = 5.0
_MOST_LINKS = 512
# Requests of a window whose prompts are kept until it ends.
_MOST_CAME = 1024
# What is said of an instance that may do something.
_DOES = {"prefills": "reads prompts", "decodes": "answers"}
_MOST_NUMBER = 1 << 53
_REPORTED = (
  "queued_requests",
  "queued_tokens",
  "running_requests",
  "running_tokens",
  "free_tokens",
)


class UnmeasuredInstance(OptionError):
  """An instance that has not measured its calls, where the router asks."""


class SentTask(NamedTuple):
  """A task that an instance was sent and that its report does not count yet.

  Fields:
    number: of the tasks that were sent to this instance.
    queued: its prompt, if it is to be read there; None if it is answered.
    prompt: tokens of it.
    new: of the answer, at most.
  """

  number: int
  queued: QueuedPrompts | None
  prompt: int
  new: int


@dataclasses.dataclass(eq=False)
class ClusterInstance:
  """An instance that has joined.

  Attributes:
    name: unique among those that are alive.
    role: what is sent to it, of `ROLES`.
    link: to it.
    address: where others pull its pages.
    page: tokens of a page of its engine.
    capacity: tokens of its pool.
    rows: answers that it makes at the same time.
    leaving: whether it takes nothing new.
    report: what it said last of its load.
    queue: the same, of the prompts that it has to read.
    heard: Messages that have come from it.
    sent: tasks that were sent to it.
    since: those that its report does not count yet.
  """

  name: str
  role: str
  link: ControlLink
  address: tuple[str, int]
  page: int
  capacity: int
  rows: int
  leaving: bool = False
  report: dict[str, int] = dataclasses.field(default_factory=dict)
  queue: tuple[QueuedPrompts, ...] = ()
  heard: int = 0
  sent: int = 0
  since: collections.deque[SentTask] = dataclasses.field(
    default_factory=collections.deque
  )

  def view(self) -> InstanceView:
    """What a policy sees: the report, and what was sent since."""
    found = {name: self.report.get(name, 0) for name in _REPORTED}
    queue = [*self.queue]
    for task in self.since:
      what = "running" if task.queued is None else "queued"
      found[f"{what}_requests"] += 1
      found[f"{what}_tokens"] += task.prompt
      if task.queued is not None:
        queue.append(task.queued)
      need = task.prompt + task.new
      found["free_tokens"] = max(0, found["free_tokens"] - need)
    return InstanceView(
      name=self.name,
      role=self.role,
      capacity_tokens=self.capacity,
      max_rows=self.rows,
      queue=(*queue,),
      **found,
    )

  def hear_load(
    self, fields: Mapping[str, Any], expected: Callable[[int], int]
  ) -> None:
    """Takes a report of its load.

    Args:
      fields: the message; `queue` has (task, tokens left, tokens whose keys are
        there) of the prompts that are read first.
      expected: of a task, how much of its prompt was to be found there.

    Raises:
      OptionError: numbers out of range.
      KeyError, TypeError, ValueError: it is none.
    """
    count = lambda name, x: integer(name, x, least=0, most=_MOST_NUMBER)
    report = {name: count(name, fields[name]) for name in _REPORTED}
    taken = count("taken", fields["taken"])
    told = fields["queue"]
    if not isinstance(told, list) or len(told) > MOST_QUEUED:
      raise ValueError(f"a queue of no list, or more than {MOST_QUEUED}")
    queue: list[QueuedPrompts] = []
    requests, tokens = report["queued_requests"], report["queued_tokens"]
    for task, left, computed in told:
      integer("task", task, least=-1, most=_MOST_NUMBER)
      integer("left", left, least=1, most=_MOST_NUMBER)
      # An engine looks what it has when it begins with a prompt.
      have = count("computed", computed) or expected(task)
      queue.append(QueuedPrompts.of(left + computed, have))
      requests, tokens = requests - 1, tokens - left
    if requests < 0 or tokens < requests or (tokens and not requests):
      raise ValueError("a queue with other sums than are said")
    if requests:
      # Those behind, as if they were equally long.
      queue.append(QueuedPrompts(-(-tokens // requests), count=requests))
    self.report, self.queue = report, (*queue,)
    while self.since and self.since[0].number <= taken:
      self.since.popleft()


@dataclasses.dataclass(kw_only=True)
class RouterCounters:
  """What a router has done.

  Attributes:
    requests: that were submitted.
    finished: that ended, for whatever reason.
    cancelled: that were given up.
    failed: that ended with an error.
    rejected: of these, by the policy.
    new_tokens: that came.
    moved: requests whose pages were pulled.
    moved_bytes: bytes of these pages.
    fetched: prefixes that were pulled before the rest of a prompt was read.
    fetched_bytes: bytes of these.
    copied: prefixes that an instance pulled for later requests, while the one
      that has them was busy.
    copied_bytes: bytes of these.
    again: requests that began again elsewhere, each time.
    lost: instances that ended without leaving.
    roles: that were changed by the planner.
    unplanned: windows whose roles could not be planned, see `role_error`.
  """

  requests: int = 0
  finished: int = 0
  cancelled: int = 0
  failed: int = 0
  rejected: int = 0
  new_tokens: int = 0
  moved: int = 0
  moved_bytes: int = 0
  fetched: int = 0
  fetched_bytes: int = 0
  copied: int = 0
  copied_bytes: int = 0
  again: int = 0
  lost: int = 0
  roles: int = 0
  unplanned: int = 0


@dataclasses.dataclass(eq=False)
class RoutedState:
  """A request on its way.

  Attributes:
    routed: as policies see it.
    handle: of whom submitted it.
    prompt: int32 [n].
    stage: "new", to be routed; "fetching", a prefix for who reads; "reading";
      "read", to be answered; "answering".
    reader: who reads the prompt, or has read it; None if nobody does.
    lends: whether that one only offers a prefix that it has, and who answers
      reads the rest.
    read_task: its number there.
    tickets: of the pages there, first ones first.
    more: whether it is still being read, and others come.
    decoder: who answers, or is to answer by the route.
    task: its number there.
    source: who has a prefix that who reads fetches first, or None.
    fetch_task: its number there.
    keys: of the prompt's blocks, by the tokens of a block.
    attempts: how often it was begun.
    alone_since: since when no instance could take it; None if one can.
    alone_for: Work that no instance could do then, "prefills" or "decodes".
    why: it was begun again the last time.
    whole: whether who answers also reads, as its route says.
    fetch_tokens: of the prompt, that who reads it has once it has fetched.
    expected: of the prompt, that who was sent it last was to find there.
    cached: tokens of the prompt that who read it had found; None if nobody has
      read it apart, and who answers knows.
    totals: of each answer, the log-probability of what was known when it was
      begun the last time.
    had: (name, tokens) of the prompt that instances had when it came, if roles
      are planned.
  """

  routed: RoutedRequest
  handle: Handle
  prompt: np.ndarray
  stage: str = "new"
  reader: ClusterInstance | None = None
  lends: bool = False
  read_task: int = -1
  tickets: list[str] = dataclasses.field(default_factory=list)
  more: bool = False
  decoder: ClusterInstance | None = None
  task: int = -1
  source: ClusterInstance | None = None
  fetch_task: int = -1
  keys: dict[int, list[str]] = dataclasses.field(default_factory=dict)
  attempts: int = 0
  alone_since: float | None = None
  alone_for: str = ""
  why: str = ""
  whole: bool = False
  fetch_tokens: int = 0
  expected: int = 0
  cached: int | None = None
  totals: list[float] = dataclasses.field(default_factory=list)
  had: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(eq=False)
class CopyTask:
  """A prefix that an instance pulls for later requests.

  Attributes:
    source: who has it.
    target: who gets it.
    request: of the prefix and a token behind it, which the target reads: its
      blocks are then those of any prompt that it has read.
    prompt: int32 [n].
    key: of the prefix's last block.
    offer: the task's number at the source.
    task: the same at the target; -1 until the source has published.
    pulled: whether the target has the pages.
  """

  source: ClusterInstance
  target: ClusterInstance
  request: Request
  prompt: np.ndarray
  key: str
  offer: int = -1
  task: int = -1
  pulled: bool = False


class ClusterRouter:
  """Serves requests by instances that join; `submit`, as of an engine.

  Attributes:
    tokenizer: of the texts of requests.
    vocab: ids that the model has.
    longest: tokens of a prompt and its answer together at most.
    address: host and port where instances join.
    counters: what was done.
    blocks: which instances have which blocks of prompts, by `short_key`.
    role_changes: the last ones that were planned, at most 1,024.
    role_error: why roles could not be planned the last time; "" if they were.
  """

  def __init__(
    self,
    *,
    key: bytes,
    vocab: int,
    longest: int,
    tokenizer: AnyTokenizer | None = None,
    policy: RoutingPolicy | None = None,
    roles: RolePlanner | None = None,
    times: InstanceTimes | None = None,
    stream_tokens: int = 0,
    host: str = "127.0.0.1",
    port: int = 0,
    patience_s: int | float = PATIENCE_S,
    silence_s: int | float = 10.0,
    beat_s: int | float = 0.25,
    attempts: int = 4,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Waits for instances at once.

    Args:
      key: that all of the cluster have, at least 16 bytes.
      vocab: ids of the model that instances serve.
      longest: tokens of a prompt and its answer, as of their engines.
      tokenizer: of texts, for `rj.serve.app`.
      policy: decides where requests go; default: `ShortestQueue()`.
      roles: changes what instances do, at the end of each of its windows;
        default: only `set_role` does.
      times: gets the times of each instance, which measures its calls before
        it joins; the policy's, for example. Default: they measure nothing.
      stream_tokens: of prompts, after how many tokens that were read pages are
        published and pulled, while others are read; 0 for all at the end. Who
        answers is then chosen, and has room for it, before a prompt is read.
      host: of the interface where instances join.
      port: 0 takes a free one.
      patience_s: seconds for which a request waits while no instance is there
        that could ever serve it.
      silence_s: seconds without a byte after which an instance is given up.
      beat_s: how often instances hear of the router.
      attempts: instances that may be lost with a request before it fails.
      clock: seconds, for deadlines and the patience of requests.

    Raises:
      OptionError: values out of range, or an address that is not free.
    """
    self._key = checked_key(key)
    self.tokenizer = tokenizer
    self.vocab = positive_int("vocab", vocab)
    self.longest = positive_int("longest", longest)
    self._policy = policy or ShortestQueue()
    self._planner, self._times = roles, times
    self._stream = integer("stream_tokens", stream_tokens, least=0)
    self._patience_s = number("patience_s", patience_s, above=0)
    self._silence_s, self._beat_s = checked_beat(silence_s, beat_s)
    self._attempts = positive_int("attempts", attempts)
    integer("port", port, least=0, most=65535)
    self.counters, self._clock = RouterCounters(), clock
    self._work = threading.Condition()
    self._instances: dict[str, ClusterInstance] = {}
    # What all instances have in common, as the first one said.
    self._common: tuple[Any, ...] | None = None
    self._requests: dict[Handle, RoutedState] = {}
    self._tasks: dict[int, RoutedState] = {}
    # By their numbers at the sources and at the targets.
    self._copies: dict[int, CopyTask] = {}
    # When copies ended, by (target, key of the last block).
    self._copied: dict[tuple[str, str], float] = {}
    self.blocks = BlockIndex()
    # Requests of the window under way, and those that roles are planned for.
    self._came: collections.deque[RoutedState] = collections.deque()
    self._came_before: list[tuple[TraceRequest, int]] = []
    self._planned: TrafficSummary | None = None
    self._planning = threading.Lock()
    self.role_changes: collections.deque[RoleChange] = collections.deque(
      maxlen=1024
    )
    self.role_error = ""
    self._numbers, self._task_numbers = itertools.count(), itertools.count()
    self._links, self._closed = 0, False
    self._server = listening(host, port)
    self.address: tuple[str, int] = (host, self._server.getsockname()[1])
    planning = [] if roles is None else [self._plan_roles]
    self._door = Door(
      self._server, self._greet, self._welcome, name="ringjax router"
    )
    for work in (self._watch, *planning):
      threading.Thread(
        target=work, name=f"ringjax router {work.__name__}", daemon=True
      ).start()

  def __enter__(self) -> ClusterRouter:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  # -------------------------------------------------------------------------
  # Requests
  # -------------------------------------------------------------------------

  @property
  def rows(self) -> int:
    """Answers that instances make at the same time; 1 if there is none."""
    with self._work:
      return max(1, sum(one.rows for one in self._able("decodes")))

  @property
  def adapters(self) -> tuple[str, ...]:
    """None: it does not know those of its instances."""
    return ()

  @property
  def open(self) -> bool:
    """Whether it takes requests."""
    return not self._closed

  @property
  def missing(self) -> str:
    """What it lacks to serve a request now; "" if nothing.

    It takes requests without instances too, which then wait `patience_s`.
    """
    if self._closed:
      return "the router: it is closed"
    with self._work:
      lacks = [
        f"an instance that {does}"
        for what, does in _DOES.items()
        if not self._able(what)
      ]
    return " and ".join(lacks)

  def start(self) -> ClusterRouter:
    """Itself: it works since it was made."""
    return self

  def submit(
    self,
    request: Request,
    on_change: Callable[[Answer], None] | None = None,
  ) -> Handle:
    """Takes a request; see `Engine.submit`.

    Raises:
      PromptError: a prompt that is none, or longer than instances serve.
      OptionError: a mask that is a function, or a closed router.
      RejectedError: the policy does not take it.
    """
    if not isinstance(request, Request):
      raise InputTypeError(
        "request",
        type(request).__name__,
        "an rj.serve.Request",
        "make one with rj.serve.Request(prompt=..., max_new_tokens=...)",
      )
    prompt = inputs.prompt(request.prompt, self.vocab)
    request.stops.check(self.vocab)
    total = prompt.size + request.max_new_tokens
    if total > self.longest:
      raise PromptError(
        "prompt",
        f"{prompt.size:,} tokens and max_new_tokens={request.max_new_tokens:,}",
        f"{self.longest:,} tokens of a row at most",
        "ask for fewer, or serve it with a larger longest=",
      )
    for token in dict(request.sampling.logit_bias):
      integer("logit_bias token", token, least=0, most=self.vocab - 1)
    # Raises for what can't be sent.
    try:
      as_json(request_fields(request, prompt))
    except (AttributeError, TypeError, ValueError) as error:
      raise OptionError(
        "request",
        str(error),
        "numbers and texts in all of its fields",
        "pass plain Python or NumPy numbers",
      ) from None
    with self._work:
      if self._closed:
        raise OptionError(
          "router", "a closed one", "one that is open", "make another one"
        )
      now = self._clock()
      handle = Handle(self, request, now, on_change)
      for answer, begun in zip(handle.answers, request.begun, strict=False):
        answer.tokens.extend(begun)
      state = RoutedState(
        RoutedRequest(
          number=next(self._numbers),
          arrival_s=now,
          prompt_tokens=prompt.size,
          new_tokens=request.max_new_tokens * request.rows,
        ),
        handle,
        prompt,
      )
      self.counters.requests += 1
      self._requests[handle] = state
      if self._planner is not None:
        cached = self._cached(state)
        had = ((name, cached(name)) for name in sorted(self._instances))
        state.had = tuple(x for x in had if x[1])
        self._came.append(state)
        if len(self._came) > _MOST_CAME:
          self._came_before.append(_as_traced(self._came.popleft()))
      self._dispatch()
      if handle.done and isinstance(handle.answers[0].error, RejectedError):
        raise handle.answers[0].error
    return handle

  def cancel(self, handle: Handle, why: str = "cancelled") -> None:
    """Gives a request up."""
    with self._work:
      state = self._requests.get(handle)
      if state is None:
        return
      self.counters.cancelled += why == "cancelled"
      self._finish(state, why)

  def advance(self, handle: Handle) -> None:
    """Waits for what comes next."""
    with self._work:
      if not handle.done:
        self._work.wait(timeout=1.0)

  def close(self) -> None:
    """Gives up what is left, and leaves the instances."""
    with self._work:
      if self._closed:
        return
      self._closed = True
      for handle in list(self._requests):
        self.cancel(handle)
      instances = list(self._instances.values())
      self._work.notify_all()
    self._door.close()
    self._server.close()
    for one in instances:
      one.link.close("the router was closed")

  def figures(self) -> list[Figure]:
    """What a server shows of it."""
    with self._work:
      found = [
        Figure("counter", name, getattr(self.counters, field), text)
        for name, field, text in (
          ("requests_total", "requests", "Requests to the router."),
          ("requests_finished_total", "finished", "Requests that ended."),
          ("requests_cancelled_total", "cancelled", "Requests given up."),
          ("requests_failed_total", "failed", "Requests that raised an error."),
          ("requests_rejected_total", "rejected", "Requests not taken."),
          ("requests_again_total", "again", "Requests that began again."),
          ("requests_moved_total", "moved", "Requests whose pages moved."),
          ("moved_bytes_total", "moved_bytes", "Bytes of pages that moved."),
          ("prefixes_fetched_total", "fetched", "Prefixes that were fetched."),
          ("fetched_bytes_total", "fetched_bytes", "Bytes of prefixes."),
          ("prefixes_copied_total", "copied", "Hot prefixes that were copied."),
          ("copied_bytes_total", "copied_bytes", "Bytes of copied prefixes."),
          ("new_tokens_total", "new_tokens", "Tokens of answers."),
          ("instances_lost_total", "lost", "Instances that were lost."),
          ("roles_changed_total", "roles", "Roles that the planner changed."),
          ("roles_unplanned_total", "unplanned", "Windows without a plan."),
        )
      ]
      stages = collections.Counter(x.stage for x in self._requests.values())
      for stage in ("new", "fetching", "reading", "read", "answering"):
        text = f"Requests in the stage {stage!r}."
        found.append(Figure("gauge", f"requests_{stage}", stages[stage], text))
      roles = collections.Counter(x.role for x in self._instances.values())
      for role in ROLES:
        text = f"Instances of the role {role!r}."
        found.append(Figure("gauge", f"instances_{role}", roles[role], text))
    return found

  # -------------------------------------------------------------------------
  # Instances
  # -------------------------------------------------------------------------

  def instances(self) -> list[InstanceView]:
    """Those that are alive, in the order of their names."""
    with self._work:
      return self._views()

  def set_role(self, name: str, role: str) -> None:
    """Gives an instance another role; what it has begun it finishes.

    Args:
      name: of an instance that is alive.
      role: of `ROLES`.

    Raises:
      OptionError: no such instance, or none is left that reads or answers.
    """
    one_of("role", role, ROLES)
    with self._work:
      if name not in self._instances:
        raise OptionError(
          "name", name, f"one of {sorted(self._instances)}", "pass its name"
        )
      self._change_roles({name: role})

  def _change_roles(self, changed: Mapping[str, str]) -> None:
    """Gives instances other roles; the lock is held."""
    check_roles({one.name: one.role for one in self._views()}, changed)
    for name, role in changed.items():
      one = self._instances[name]
      one.role = role
      one.link.tell(t="role", role=role)
    self._dispatch()

  def plan_roles(self) -> dict[str, str]:
    """Asks the planner about the requests since the last time.

    A thread does so at the end of each window too.

    Returns:
      The roles that have changed.

    Raises:
      OptionError: a router without a planner, or what the planner raises.
    """
    if self._planner is None:
      raise OptionError(
        "roles", "no planner", "a RolePlanner", "pass roles=DriftingRoles(...)"
      )
    with self._planning:
      # It may simulate for a while: requests are served meanwhile.
      found = self._planner.decide(
        self._taken(), self.instances(), self._planned
      )
      self._planned = found.planned
      with self._work:
        there = {one.name: one.role for one in self._views()}
        changed = {
          name: role
          for name, role in sorted(found.roles.items())
          if there.get(name, role) != role
        }
        self._change_roles(changed)
        self.counters.roles += len(changed)
        self.role_changes += [
          RoleChange(time_s=self._clock(), name=name, role=role, why=found.why)
          for name, role in changed.items()
        ]
    return changed

  def _plan_roles(self) -> None:
    """Plans roles at the end of each window."""
    assert self._planner is not None
    while True:
      with self._work:
        self._work.wait_for(
          lambda: self._closed, timeout=float(self._planner.window_s)
        )
        if self._closed:
          return
      try:
        self.plan_roles()
        self.role_error = ""
      except Exception as error:
        # Requests are served with the roles that there are.
        self.counters.unplanned += 1
        self.role_error = str(error) or type(error).__name__

  def _taken(self) -> list[TraceRequest]:
    """The requests since the last time, as of a trace.

    An answer that goes on counts as long as those that have ended were on
    average: what it may have at most says little.
    """
    with self._work:
      states, self._came = self._came, collections.deque()
      found, self._came_before = self._came_before, []
      page = min((one.page for one in self._instances.values()), default=0)
    found += [_as_traced(one) for one in states]
    for n, state in enumerate(states, len(found) - len(states)):
      if page and state.handle.request.share:
        keys = [int(key[:12], 16) for key in self._keys(state, page)]
        one = dataclasses.replace(found[n][0], blocks=tuple(keys), block=page)
        found[n] = one, found[n][1]
    ended = [one.new_tokens for one, left in found if not left]
    usual = sum(ended) // len(ended) if ended else math.inf
    return [
      dataclasses.replace(
        one,
        new_tokens=int(
          min(max(1, usual, one.new_tokens), one.new_tokens + left)
        ),
      )
      if left
      else one
      for one, left in found
    ]

  def _able(self, what: str) -> list[ClusterInstance]:
    """Instances that take new work of a kind."""
    return [
      one
      for one in self._instances.values()
      if not one.leaving and getattr(one.view(), what)
    ]

  def _views(self) -> list[InstanceView]:
    return [
      self._instances[name].view()
      for name in sorted(self._instances)
      if not self._instances[name].leaving
    ]

  def _greet(
    self, link: socket.socket, address: Any
  ) -> tuple[PullConnection, str]:
    """Let an instance or a command show its key."""
    wire = PullConnection(
      link, self._silence_s, f"instance {address[0]}:{address[1]}"
    )
    wire.greet_reader(self._key, min(_GREETING_S, self._silence_s))
    return wire, address[0]

  def _welcome(self, greeted: tuple[PullConnection, str]) -> None:
    """Lets an instance join, or answers a command."""
    wire, host = greeted
    with self._work:
      full = self._closed or self._links >= _MOST_LINKS
      self._links += not full
    if full:
      wire.close()
      return
    try:
      fields = wire.hear_object(1 << 20) or {}
      try:
        if fields.get("t") == "command":
          wire.tell_object(self._command(fields))
          wire.close()
        else:
          self._join(fields, wire, host)
          return
      except UnmeasuredInstance as error:
        wire.tell_object({"t": "measure", "error": str(error)})
      except OptionError as error:
        wire.tell_object({"t": "refused", "error": str(error)})
      except (KeyError, TypeError, ValueError) as error:
        raise wire.hostile(error) from None
    except PeerError:
      pass  # It knows why, or is a stranger.
    wire.close()
    with self._work:
      self._links -= 1

  def _command(self, fields: dict[str, Any]) -> dict[str, Any]:
    if fields["what"] == "set_role":
      self.set_role(str(fields["name"]), str(fields["role"]))
    elif fields["what"] != "instances":
      raise OptionError(
        "command",
        repr(fields["what"])[:60],
        "instances or set_role",
        "pass one of them",
      )
    views = [dataclasses.asdict(one) for one in self.instances()]
    return {"t": "instances", "instances": views}

  def _join(
    self, fields: dict[str, Any], wire: PullConnection, host: str
  ) -> None:
    """An instance joins."""
    if fields["t"] != "join":
      raise ValueError("neither join nor command")
    address, port = fields["address"]
    if address in ("0.0.0.0", "::"):
      address = host
    if str(address).startswith("127.") and not host.startswith("127."):
      raise OptionError(
        "host",
        f"{address}, for an instance at {host}",
        "an address that the other instances reach",
        "start it with --host=0.0.0.0, or with its address",
      )
    name, times = str(fields["name"])[:256], None
    if self._times is not None:
      if fields.get("times") is None:
        raise UnmeasuredInstance(
          "times",
          f"none of {name}",
          "an instance that has measured its calls",
          "join with a worker of this version, or give the router times",
        )
      times = QuadraticTimes(**fields["times"])
    one = ClusterInstance(
      name=name,
      role=one_of("role", fields["role"], ROLES),
      link=ControlLink(
        wire,
        on_message=lambda message: self._hear(one, message),
        on_end=lambda why: self._gone(one, why),
        beat=lambda: {"t": "beat"},
        beat_s=self._beat_s,
      ),
      address=(str(address), integer("port", port, least=1, most=65535)),
      page=positive_int("page", fields["page"]),
      capacity=positive_int("capacity", fields["capacity"]),
      rows=positive_int("rows", fields["rows"]),
    )
    one.report = {"free_tokens": one.capacity}
    common = fields["codec"], fields["dtype"], fields["vocab"]
    with self._work:
      if self._lives(name):
        raise OptionError(
          "name", name, "one that no other instance has", "pass another name"
        )
      if self._closed:
        raise OptionError("the router was closed")
      if fields["vocab"] != self.vocab or fields["longest"] != self.longest:
        raise OptionError(
          "model",
          f"vocab {fields['vocab']}, longest {fields['longest']}",
          f"{self.vocab} and {self.longest}, as of the router",
          "serve one model with one --longest",
        )
      if self._instances and common != self._common:
        raise OptionError(
          "model",
          f"{fields['dtype']}, {fields['codec']}",
          f"{self._common and self._common[1::-1]}, as of those that joined",
          "serve one model with one --cache and --dtype",
        )
      self._common = common
      if self._times is not None and times is not None:
        self._times.tell(name, times)
      self._instances[name] = one
      one.link.tell(t="welcome", stream=self._stream)
      one.link.start()
      self._dispatch()

  def _lives(self, name: str) -> bool:
    """Whether an instance of this name is there, and says so twice more.

    One whose machine has died is there until it has been silent for too long:
    who starts again under its name waits for that.
    """
    old = self._instances.get(name)
    if old is None:
      return False
    # The next message may have been on its way when the instance ended.
    enough = old.heard + 2
    self._work.wait_for(
      lambda: (
        self._closed
        or self._instances.get(name) is not old
        or old.heard >= enough
      ),
      self._silence_s,
    )
    return name in self._instances

  def _gone(self, one: ClusterInstance, why: str) -> None:
    """An instance is not there any more: others do what it had to do."""
    with self._work:
      self._links -= 1
      if self._instances.get(one.name) is not one:
        return
      del self._instances[one.name]
      self._work.notify_all()
      self.blocks.forget(one.name)
      self.counters.lost += not one.leaving
      for copy in {id(x): x for x in self._copies.values()}.values():
        if one in (copy.source, copy.target):
          self._end_copy(copy)
      for state in list(self._requests.values()):
        answers = state.stage == "answering"
        if state.source is one:
          # Who reads computes what it would have fetched.
          self._drop_source(state)
          if state.stage == "fetching" and state.reader is not one:
            self._begin_reading(state)
        pulls = answers and state.decoder is not one and not state.more
        if state.reader is one and pulls:
          # Who answers pulls now, or says that it could not.
          self._let_go(state)
        elif one in (state.reader, state.decoder if answers else None):
          self._again(state, f"{one.name}: {why}")
      self._dispatch()

  def _hear(self, one: ClusterInstance, fields: dict[str, Any]) -> None:
    """One message of an instance."""
    kind = fields["t"]
    with self._work:
      one.heard += 1
      self._work.notify_all()
      if kind == "view":
        one.hear_load(fields, self._expected)
        self._dispatch()
        return
      if kind == "blocks":
        self.blocks.apply(
          BlockEvent(
            instance=one.name,
            epoch=fields["epoch"],
            number=fields["number"],
            kind=fields["kind"],
            keys=tuple(map(str, fields["keys"])),
          )
        )
        return
      if kind == "leave":
        one.leaving = True
        self._dispatch()
        return
      copy = self._copies.get(fields["id"])
      if copy is not None:
        self._hear_copy(copy, kind, fields)
        return
      state = self._tasks.get(fields["id"])
      if state is None:
        return  # Of a request that has ended, or has begun again.
      if kind == "read" and fields["id"] == state.fetch_task:
        state.tickets = _some(fields["ticket"])
        if not state.tickets:
          self._drop_source(state)
        self._begin_reading(state)
      elif kind == "pulled" and fields["id"] == state.read_task:
        self._fetched(int(fields["nbytes"]))
        self._drop_source(state)
      elif kind == "read":
        if not state.lends:
          state.cached = int(fields["cached"])
        self._published(state, fields["ticket"], last=True)
      elif kind == "part":
        self._published(state, fields["ticket"], last=False)
      elif kind == "pulled":
        if state.lends:
          self._fetched(int(fields["nbytes"]))
        else:
          self.counters.moved += 1
          self.counters.moved_bytes += int(fields["nbytes"])
        self._let_go(state)
      elif kind == "lost":
        # Its ticket may have ended, or its publisher; or those two do not reach
        # each other: the last time, who answers reads the prompt.
        self._let_go(state)
        self._again(state, str(fields["why"]))
        if state.stage == "new" and state.attempts == self._attempts - 1:
          state.stage, state.attempts = "read", self._attempts
        self._dispatch()
      elif kind == "failed":
        kind = OptionError if fields["refused"] else RingjaxError
        self._finish(state, "error", kind(str(fields["error"])[:400]))
      elif kind == "tokens":
        self._tokens(state, fields)
      else:
        raise ValueError(f"a message {str(kind)[:40]!r}")

  def _expected(self, task: int) -> int:
    """Tokens of a task's prompt that who reads it was to find."""
    copy = self._copies.get(task)
    if copy is not None:
      return copy.prompt.size - 1
    state = self._tasks.get(task)
    return 0 if state is None else state.expected

  def _fetched(self, nbytes: int) -> None:
    """A prefix was pulled, or could not be: 0 bytes."""
    self.counters.fetched += nbytes > 0
    self.counters.fetched_bytes += nbytes

  # -------------------------------------------------------------------------
  # Copies of prefixes
  # -------------------------------------------------------------------------

  def _begin_copy(self, state: RoutedState, wanted: PrefixCopy) -> None:
    """Lets an instance pull a prefix of a request, if none is on its way."""
    source, target = (
      self._named(name) for name in (wanted.source, wanted.target)
    )
    keys, request = self._keys(state, source.page), state.handle.request
    count = min(int(wanted.tokens) // source.page, len(keys))
    if source is target or not count or not request.share:
      return
    size = count * source.page
    wanted_by, now = (target.name, keys[count - 1]), self._clock()
    ended = self._copied.get(wanted_by, -math.inf)
    under_way = any(
      (copy.target.name, copy.key) == wanted_by
      for copy in self._copies.values()
    )
    room = target.view().free_tokens >= size + 2
    if under_way or now - ended < _COPIED_S or not room:
      return
    # Any token stands behind the prefix, for the last one is computed.
    prompt = np.append(state.prompt[:size], np.int32(0)).astype(np.int32)
    copy = CopyTask(
      source=source,
      target=target,
      request=Request(
        prompt=prompt,
        max_new_tokens=1,
        salt=request.salt,
        adapter=request.adapter,
        priority=request.priority,
      ),
      prompt=prompt,
      key=keys[count - 1],
      offer=next(self._task_numbers),
    )
    self._copies[copy.offer] = copy
    source.link.tell(
      t="offer", id=copy.offer, request=request_fields(copy.request, prompt)
    )

  def _hear_copy(
    self, copy: CopyTask, kind: str, fields: dict[str, Any]
  ) -> None:
    """One message of the source or the target of a copy."""
    if kind == "read" and fields["id"] == copy.offer:
      tickets = _some(fields["ticket"])
      if not tickets or copy.target.leaving:
        self._end_copy(copy)
        return
      target, size = copy.target, copy.prompt.size
      copy.task = next(self._task_numbers)
      self._copies[copy.task] = copy
      target.sent += 1
      queued = QueuedPrompts.of(size, size - 1)
      target.since.append(SentTask(target.sent, queued, size, 1))
      target.link.tell(
        t="read",
        id=copy.task,
        request=request_fields(copy.request, copy.prompt),
        tickets=tickets,
        stream=0,
        address=copy.source.address,
      )
    elif kind == "pulled":
      nbytes = int(fields["nbytes"])
      self.counters.copied += nbytes > 0
      self.counters.copied_bytes += nbytes
      copy.pulled = True
      copy.source.link.tell(t="cancel", id=copy.offer)
      if not nbytes:
        # It would compute what nobody has asked for.
        self._end_copy(copy)
    elif kind in ("read", "lost", "failed"):
      self._end_copy(copy)
    else:
      raise ValueError(f"a message {str(kind)[:40]!r}")

  def _end_copy(self, copy: CopyTask) -> None:
    """Nothing is wanted any more for a copy."""
    now = self._clock()
    self._copied = {
      wanted: ended
      for wanted, ended in self._copied.items()
      if now - ended < _COPIED_S
    }
    self._copied[copy.target.name, copy.key] = now
    for task, one in ((copy.offer, copy.source), (copy.task, copy.target)):
      if self._copies.pop(task, None) is not None:
        one.link.tell(t="cancel", id=task)

  # -------------------------------------------------------------------------
  # Where requests are
  # -------------------------------------------------------------------------

  def _dispatch(self) -> None:
    """Sends requests on, the first ones first; the lock is held."""
    for state in list(self._requests.values()):
      if state.stage == "new":
        self._guarded(state, self._route)
    full = False
    for state in list(self._requests.values()):
      # One that waits for room is not overtaken.
      before = state.stage
      waits = before == "read" or (state.more and before == "reading")
      if waits and full:
        # It waits for room: its patience with a missing instance is over.
        self._fitting(state, "decodes")
      elif waits:
        self._guarded(state, self._place)
        full = state.stage == before == "read" and state.alone_since is None
    self._work.notify_all()

  def _guarded(
    self, state: RoutedState, work: Callable[[RoutedState], None]
  ) -> None:
    """A decision about a request; what a policy raises ends the request."""
    try:
      work(state)
    except Exception as error:
      self._finish(state, "error", error)

  def _sending(self) -> collections.Counter[str]:
    """Tokens whose pages others are to pull, by the name of who has them."""
    found = collections.Counter[str]()
    for copy in {id(x): x for x in self._copies.values()}.values():
      if not copy.pulled:
        found[copy.source.name] += copy.prompt.size - 1
    for state in self._requests.values():
      if state.stage == "fetching" and state.source is not None:
        found[state.source.name] += state.fetch_tokens
      elif state.reader is not None and state.lends:
        found[state.reader.name] += state.fetch_tokens
      elif state.reader is not None and state.stage == "answering":
        found[state.reader.name] += state.prompt.size
    return found

  def _fitting(self, state: RoutedState, what: str) -> list[InstanceView]:
    """Instances that can ever take a request, in the order of their names;
    where none does what is to be done its patience begins."""
    request, prompt = state.handle.request, state.routed.prompt_tokens
    # Of several answers an engine lets some wait; those of a beam search are
    # rows at the same time.
    new = request.max_new_tokens * (request.beams or 1)
    found = [
      view
      for view in self._views()
      if self._instances[view.name].capacity
      >= prompt + (1 if view.role == "prefill" else new)
    ]
    if any(getattr(view, what) for view in found):
      state.alone_since = None
      return found
    if state.alone_since is None or state.alone_for != what:
      state.alone_since, state.alone_for = self._clock(), what
    return []

  def _seen(
    self, state: RoutedState, views: list[InstanceView]
  ) -> RoutedRequest:
    """A request as a policy sees it: no larger than what has most room, where
    several of its answers would be, which then wait for each other."""
    routed = state.routed
    most = max(self._instances[view.name].capacity for view in views)
    new = max(1, min(routed.new_tokens, most - routed.prompt_tokens))
    return dataclasses.replace(
      routed, new_tokens=new, cached_tokens=self._cached(state)
    )

  def _cached(self, state: RoutedState) -> Callable[[str], int]:
    """How much of a prompt each instance has, as of now."""
    request, found = state.handle.request, dict[int, dict[str, int]]()

    def tokens(name: str) -> int:
      one = self._instances.get(name)
      if one is None or not request.share:
        return 0
      page = one.page
      if page not in found:
        found[page] = self.blocks.match(self._keys(state, page))
      # The last token is always computed.
      return min(page * found[page].get(name, 0), state.prompt.size - 1)

    return tokens

  def _keys(self, state: RoutedState, page: int) -> list[str]:
    """Of the blocks of a prompt."""
    request = state.handle.request
    if page not in state.keys:
      state.keys[page] = [
        short_key(key)
        for key in block_keys(
          state.prompt, page, salt=request.salt, adapter=request.adapter
        )
      ]
    return state.keys[page]

  def _route(self, state: RoutedState) -> None:
    """A new request, or one that begins again."""
    views = self._fitting(state, "prefills")
    if not views:
      return
    sending = self._sending()
    views = [
      dataclasses.replace(view, sending_tokens=sending[view.name])
      for view in views
    ]
    route = self._policy.route(self._seen(state, views), views, self._clock())
    if isinstance(route, Rejected):
      self._reject(state, route)
      return
    if not isinstance(route, Route):
      raise OptionError(
        "policy", f"the route {route}", "a Route, or Rejected", "return one"
      )
    if route.copy is not None and state.attempts == 0:
      self._begin_copy(state, route.copy)
    reader = self._named(route.prefill)
    decoder = None if route.decode is None else self._named(route.decode)
    source = None
    if route.fetch_from not in (None, reader.name) and state.attempts == 0:
      # Once: what begins again does not depend on a third instance.
      source = self._named(str(route.fetch_from))
    state.attempts += 1
    state.whole = decoder is reader
    state.lends = state.whole and source is not None
    state.fetch_tokens = int(route.fetch_tokens)
    if decoder is reader:
      if source is None:
        self._answer(state, reader)
        return
      # As if the prefix were all that is read apart from the answer.
      state.reader, state.decoder, state.tickets = source, decoder, []
      state.stage = "reading"
      state.read_task = self._offer(source, state)
      return
    state.reader, state.decoder, state.tickets = reader, decoder, []
    if state.prompt.size <= reader.page or not state.handle.request.share:
      # No page of it can move.
      state.stage, state.reader = "read", None
      return
    if source is not None:
      state.stage, state.source = "fetching", source
      state.fetch_task = self._offer(source, state)
      return
    self._begin_reading(state)

  def _begin_reading(self, state: RoutedState) -> None:
    """Has an instance read, behind what it fetches."""
    assert state.reader is not None
    state.stage = "reading"
    state.read_task = self._send(state.reader, state, reads=True)
    # The next tickets are those of the whole prompt.
    state.tickets = []

  def _published(
    self, state: RoutedState, ticket: str | None, *, last: bool
  ) -> None:
    """Pages of a prompt are there, the last ones or others."""
    state.tickets += _some(ticket)
    state.more = not last
    if state.stage == "answering" and state.decoder is not None:
      # Who answers pulls already.
      state.decoder.link.tell(t="part", id=state.task, ticket=ticket, last=last)
      return
    state.stage = "read" if last else "reading"
    self._dispatch()

  def _offer(self, one: ClusterInstance, state: RoutedState) -> int:
    """Has an instance publish what it has of a prompt; the task's number."""
    task = next(self._task_numbers)
    self._tasks[task] = state
    fields = request_fields(state.handle.request, state.prompt)
    one.link.tell(t="offer", id=task, request=fields)
    return task

  def _drop_source(self, state: RoutedState) -> None:
    """Nothing is wanted any more of who has a prefix."""
    self._tasks.pop(state.fetch_task, None)
    if state.source is not None:
      state.source.link.tell(t="cancel", id=state.fetch_task)
    state.source, state.fetch_task = None, -1

  def _place(self, state: RoutedState) -> None:
    """A request whose prompt has been read."""
    one = state.decoder
    here = one is not None and self._instances.get(one.name) is one
    if state.more and one is state.reader:
      return  # It has the pages where they are needed, at the end.
    if one is not None and here and not one.leaving:
      self._answer(state, one)
      return
    state.decoder = None
    views = self._fitting(state, "decodes")
    if state.more:
      # It is being read: until that has ended nobody is missed.
      state.alone_since = None
    if not views:
      return
    seen = self._seen(state, views)
    name = self._policy.decode_instance(seen, views, self._clock())
    if isinstance(name, Rejected):
      self._reject(state, name)
    elif name is not None:
      decoder = self._named(name)
      if decoder is not state.reader or not state.more:
        self._answer(state, decoder)

  def _named(self, name: str) -> ClusterInstance:
    one = self._instances.get(name)
    if one is None or one.leaving:
      raise OptionError(
        "policy",
        f"the instance {name!r}",
        f"one of {[x.name for x in self._views()]}",
        "choose among those that it is shown",
      )
    return one

  def _answer(self, state: RoutedState, decoder: ClusterInstance) -> None:
    """Has an instance answer."""
    state.stage, state.decoder = "answering", decoder
    if state.reader is decoder or not state.tickets:
      # It has the pages where they are needed, or there are none.
      self._let_go(state)
    state.task = self._send(decoder, state, reads=False)

  def _send(
    self, one: ClusterInstance, state: RoutedState, *, reads: bool
  ) -> int:
    """A task for an instance; its number."""
    task = next(self._task_numbers)
    request = state.handle.request
    if not reads:
      if request.beams is None and request.best_of is None:
        begun = tuple(_begun(state.handle))
        request = dataclasses.replace(request, begun=begun)
        state.totals = [x.total_logprob for x in state.handle.answers]
      else:
        for answer in state.handle.answers:
          # Searched for anew.
          answer.tokens.clear()
          answer.logprobs.clear()
          answer.text, answer.finish, answer.total_logprob = "", None, 0.0
        state.totals = [0.0] * len(state.handle.answers)
    fields: dict[str, Any] = {
      "t": "read" if reads else "answer",
      "id": task,
      "request": request_fields(request, state.prompt),
    }
    owner = state.source if reads else state.reader
    # A copy: it is sent later, and others may come meanwhile.
    fields["tickets"] = list(state.tickets)
    if reads:
      fields["stream"] = self._stream if request.share else 0
    else:
      fields["more"] = state.more
    fields["address"] = owner and owner.address
    self._tasks[task] = state
    one.sent += 1
    new = 1 if reads else state.routed.new_tokens
    size, queued = state.routed.prompt_tokens, None
    reads = reads or state.whole
    state.expected = self._cached(state)(one.name)
    if state.tickets:
      moved = state.fetch_tokens if reads else size
      state.expected = max(state.expected, moved)
    if reads:
      queued = QueuedPrompts.of(size, state.expected)
    one.since.append(SentTask(one.sent, queued, size, new))
    one.link.tell(**fields)
    return task

  def _let_go(self, state: RoutedState) -> None:
    """Nothing is wanted any more of who has read the prompt."""
    self._drop_source(state)
    self._tasks.pop(state.read_task, None)
    if state.reader is not None and state.read_task >= 0:
      state.reader.link.tell(t="cancel", id=state.read_task)
    state.reader, state.tickets, state.more = None, [], False
    state.read_task = -1

  def _again(self, state: RoutedState, why: str) -> None:
    """Begins a request again, elsewhere, behind what is known of it."""
    state.why = why
    self.counters.again += 1
    answered = state.stage == "answering"
    if state.decoder is not None and state.task >= 0:
      state.decoder.link.tell(t="cancel", id=state.task)
    self._tasks.pop(state.task, None)
    state.task, state.decoder = -1, None
    if state.attempts >= self._attempts:
      self._finish(
        state,
        "error",
        PeerError(
          f"{state.attempts} instances were lost with the request, the last "
          f"time: {why[:200]}"
        ),
      )
      return
    reader = state.reader
    alive = reader and self._instances.get(reader.name) is reader
    if alive and state.tickets and answered:
      # Its pages are still there, or come.
      state.stage = "reading" if state.more else "read"
      state.attempts += 1
      return
    self._let_go(state)
    state.stage, state.cached, state.whole = "new", None, False

  def _reject(self, state: RoutedState, why: Rejected) -> None:
    self.counters.rejected += 1
    self._finish(state, "error", RejectedError(why.reason))

  def _finish(
    self, state: RoutedState, why: str, error: Exception | None = None
  ) -> None:
    """Ends a request before its answers are complete."""
    if state.decoder is not None and state.task >= 0:
      state.decoder.link.tell(t="cancel", id=state.task)
    for answer in state.handle.answers:
      if answer.finish is None:
        answer.finish, answer.error = why, error
        self._changed(state, answer)
    self.counters.failed += error is not None
    self._ended(state)

  def _ended(self, state: RoutedState) -> None:
    """A request is over."""
    self._let_go(state)
    self._tasks.pop(state.task, None)
    state.handle.seconds = self._clock() - state.handle.arrival
    if self._requests.pop(state.handle, None) is not None:
      self.counters.finished += 1
    self._work.notify_all()

  def _changed(self, state: RoutedState, answer: Answer) -> None:
    if state.handle.on_change is not None:
      state.handle.on_change(answer)

  def _tokens(self, state: RoutedState, fields: dict[str, Any]) -> None:
    """What of an answer is new."""
    handle = state.handle
    answer = handle.answers[integer("n", fields["n"], least=0)]
    if answer.finish is not None:
      return  # Its last token is made again for the sake of the others.
    at, tokens = int(fields["at"]), [int(x) for x in fields["tokens"]]
    if at != len(answer.tokens):
      raise ValueError(f"tokens from {at} behind {len(answer.tokens)}")
    if tokens and handle.first_token is None:
      handle.first_token = self._clock() - handle.arrival
    self.counters.new_tokens += len(tokens)
    # Who answers finds what was read for it.
    found = fields["cached"] if state.cached is None else state.cached
    handle.cached_tokens = int(found)
    if handle.request.logprobs is not None:
      for token, logprob, top in fields["logprobs"]:
        logprob = _logprob(logprob)
        answer.total_logprob += logprob
        pairs = tuple((int(i), _logprob(x)) for i, x in top)
        answer.logprobs.append(
          TokenLogprobs(token=int(token), logprob=logprob, top=pairs)
        )
    else:
      n = handle.answers.index(answer)
      answer.total_logprob = state.totals[n] + _logprob(fields["total"])
    # The host's threads read an answer while it grows: `finish` comes last.
    answer.tokens.extend(tokens)
    answer.text = answer.text[: int(fields["text_at"])] + str(fields["text"])
    answer.stopped = fields["stopped"]
    answer.finish = fields["finish"]
    self._changed(state, answer)
    if handle.done:
      state.decoder = None
      self._ended(state)
      self._dispatch()
    else:
      self._work.notify_all()

  # -------------------------------------------------------------------------
  # Time
  # -------------------------------------------------------------------------

  def _watch(self) -> None:
    """Ends requests whose time is over."""
    while True:
      with self._work:
        if self._closed:
          return
        self.look()
      time.sleep(_LOOK_S)

  def look(self) -> None:
    """Ends requests whose deadline or patience is over; a thread does so by
    itself too."""
    with self._work:
      now = self._clock()
      for state in list(self._requests.values()):
        most = state.handle.request.deadline
        if most is not None and now - state.handle.arrival > most:
          self.cancel(state.handle, "deadline")
        elif (
          state.alone_since is not None
          and now - state.alone_since > self._patience_s
        ):
          does = "reads prompts" if state.stage == "new" else "answers"
          need = state.routed.prompt_tokens + state.routed.new_tokens
          error = PeerError(
            f"no instance that {does} and has room for {need:,} tokens for "
            f"{self._patience_s:g} s"
            + (f"; before: {state.why[:200]}" if state.why else "")
          )
          self._finish(state, "error", error)


def _as_traced(state: RoutedState) -> tuple[TraceRequest, int]:
  """A request with the tokens that it has, and how many may still come."""
  handle, routed = state.handle, state.routed
  made = sum(len(one.tokens) for one in handle.answers)
  return TraceRequest(
    arrival=float(routed.arrival_s),
    prompt_tokens=routed.prompt_tokens,
    new_tokens=max(1, made),
    number=routed.number,
    cached=state.had,
  ), 0 if handle.done else max(0, routed.new_tokens - made)


def _some(ticket: str | None) -> list[str]:
  return [] if ticket is None else [str(ticket)]


def _begun(handle: Handle) -> Iterator[tuple[int, ...]]:
  """Of each answer the tokens that are known; of one that has ended all but
  the last one, which is made again."""
  for answer in handle.answers:
    tokens = answer.tokens[:-1] if answer.finish else answer.tokens
    yield tuple(tokens)


def _logprob(stated: int | float | None) -> float:
  """A log-probability of a message: JSON has no infinity."""
  return -math.inf if stated is None else float(stated)
