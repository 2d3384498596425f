"""A router that dispatches requests to the instances of a serving cluster.

Guarantees: a request's tokens are those of a single engine, whichever instances
serve it and however often they are lost meanwhile: a lost prompt is prefilled
again elsewhere, and decoding continues after the tokens known so far.
A request ends: with its answer, or with an error that says why, at the latest
`patience_s` after there was no instance that could serve it, or after
`attempts` instances were lost with it. Instances join and leave at any time;
requests on other instances are not affected. A `RoutingPolicy` decides where
requests go from the load that instances report and the tasks that were sent to
them since; a `RolePlanner` may change the instances' roles.
Cost: a thread for each instance, one that checks deadlines and one that plans
roles; no arrays.

  client        router                 prefill             decode
  submit ->     route           read ->
                                       pages published
                            <- ticket
                decode_instance                 answer ->
                                             <- pull -    has room
                            <----------------- tokens
  <- tokens     COMPLETE went to the prefill instance

With `stream_tokens`, pages are published in parts while the prompt is
prefilled (for engines with `layer_parts`, some layers at a time), and the
decode instance pulls them meanwhile. A route may let the prefill instance first
fetch a prefix from another instance that has it cached, as found in the block
index that instances keep up to date.
`ClusterRouter` has the interface of an engine that `rj.serve.app` serves.
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
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import (
  InputTypeError,
  OptionError,
  PeerError,
  PromptError,
  RingjaxError,
)
from ringjax.infer import inputs
from ringjax.parallel.door import Door
from ringjax.serve.api.server_metrics import Figure
from ringjax.serve.cluster.block_index import (
  BlockEvent,
  BlockIndex,
  block_keys,
  short_key,
)
from ringjax.serve.cluster.control_link import ControlLink, checked_beat
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
from ringjax.serve.cluster.simulate.phase_times import (
  InstanceTimes,
  QuadraticTimes,
  QueuedPrompts,
)
from ringjax.serve.request import (
  Answer,
  Handle,
  RejectedError,
  Request,
  TokenLogprobs,
)
from ringjax.serve.traces import TraceRequest
from ringjax.transfer.wire import (
  PullConnection,
  as_json,
  checked_key,
  listening,
)

# Seconds for which requests wait for an instance that is missing: an instance
# that restarts must load weights and compile.
PATIENCE_S = 300.0
# Seconds for an unauthenticated peer to show the key and send a first message.
_GREETING_S = 5.0
_LOOK_S = 0.1
# Seconds from a copy's end until the same copy may be requested again: the
# target needs this time to report its new blocks.
_COPIED_S = 5.0
_MOST_LINKS = 512
# Requests of a window whose prompts are kept until the window ends.
_MOST_CAME = 1024
# Descriptions, in messages, of what an instance can do.
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
  """An instance joined without measured times, though the router needs them."""


class SentTask(NamedTuple):
  """A task that an instance was sent and that its report does not count yet.

  Fields:
    number: Sequence number among the tasks that were sent to this instance.
    queued: The prompt to prefill; None if the task is decoding.
    prompt: Prompt length in tokens.
    new: Maximum number of tokens to generate.
  """

  number: int
  queued: QueuedPrompts | None
  prompt: int
  new: int


@dataclasses.dataclass(eq=False)
class ClusterInstance:
  """An instance that has joined the cluster.

  Attributes:
    name: Name, unique among the instances that are alive.
    role: Kind of work that is sent to it, one of `ROLES`.
    link: Control connection to it.
    address: Host and port where other instances pull its pages.
    page: Page size of its engine, in tokens.
    capacity: Size of its page pool, in tokens.
    rows: Number of answers that it decodes at the same time.
    leaving: Whether it takes no new work.
    report: Load that it reported last.
    queue: Prompts waiting for prefill, as reported last.
    heard: Number of messages received from it.
    sent: Number of tasks that were sent to it.
    since: Sent tasks that its last report does not count yet.
    roles: Roles that it can have.
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
  roles: tuple[str, ...] = ROLES

  def view(self) -> InstanceView:
    """Load as policies see it: the report plus the tasks sent since."""
    load = {name: self.report.get(name, 0) for name in _REPORTED}
    queue = [*self.queue]
    for task in self.since:
      kind = "running" if task.queued is None else "queued"
      load[f"{kind}_requests"] += 1
      load[f"{kind}_tokens"] += task.prompt
      if task.queued is not None:
        queue.append(task.queued)
      need = task.prompt + task.new
      load["free_tokens"] = max(0, load["free_tokens"] - need)
    return InstanceView(
      name=self.name,
      role=self.role,
      capacity_tokens=self.capacity,
      max_rows=self.rows,
      queue=(*queue,),
      **load,
    )

  def hear_load(
    self, fields: Mapping[str, Any], expected: Callable[[int], int]
  ) -> None:
    """Update the load from a report of the instance.

    Args:
      fields: The message; `queue` holds (task, tokens left, tokens whose keys
        are cached) for the first prompts of the queue.
      expected: Function from a task's number to the prompt tokens that should
        be cached at the instance.

    Raises:
      OptionError: If a number is out of range.
      KeyError, TypeError, ValueError: If the message is malformed.
    """
    count = lambda name, x: integer(name, x, least=0, most=_MOST_NUMBER)
    report = {name: count(name, fields[name]) for name in _REPORTED}
    tasks_taken = count("taken", fields["taken"])
    queue_entries = fields["queue"]
    if not isinstance(queue_entries, list) or len(queue_entries) > MOST_QUEUED:
      raise ValueError(f"a queue of no list, or more than {MOST_QUEUED}")
    queue: list[QueuedPrompts] = []
    requests, tokens = report["queued_requests"], report["queued_tokens"]
    for task, tokens_left, computed in queue_entries:
      integer("task", task, least=-1, most=_MOST_NUMBER)
      integer("left", tokens_left, least=1, most=_MOST_NUMBER)
      # An engine looks up cached tokens only when it begins with a prompt.
      cached = count("computed", computed) or expected(task)
      queue.append(QueuedPrompts.of(tokens_left + computed, cached))
      requests, tokens = requests - 1, tokens - tokens_left
    if requests < 0 or tokens < requests or (tokens and not requests):
      raise ValueError("a queue with other sums than are said")
    if requests:
      # Prompts after the listed ones, as if they were equally long.
      queue.append(QueuedPrompts(-(-tokens // requests), count=requests))
    self.report, self.queue = report, (*queue,)
    while self.since and self.since[0].number <= tasks_taken:
      self.since.popleft()


@dataclasses.dataclass(kw_only=True)
class RouterCounters:
  """Counters of a router's work since it started.

  Attributes:
    requests: Number of submitted requests.
    finished: Requests that ended, for whatever reason.
    cancelled: Requests that were cancelled.
    failed: Requests that ended with an error.
    rejected: Failed requests that the policy had rejected.
    new_tokens: Generated tokens that were received.
    moved: Requests whose pages were pulled by a decode instance.
    moved_bytes: Bytes of these pages.
    fetched: Prefixes pulled before the rest of a prompt was prefilled.
    fetched_bytes: Bytes of these prefixes.
    copied: Prefixes that an instance pulled for later requests, while the
      instance that has them was busy.
    copied_bytes: Bytes of these copies.
    again: Number of restarts of requests on other instances.
    lost: Instances that disconnected without leaving.
    roles: Role changes made by the planner.
    unplanned: Windows whose roles could not be planned, see `role_error`.
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
  """State of a request in flight.

  Attributes:
    routed: Request as policies see it.
    handle: Handle that `submit` returned.
    prompt: Token ids, int32 [n].
    stage: "new", to be routed; "fetching", a prefix is pulled for prefill;
      "reading", in prefill; "read", to be decoded; "answering", in decode.
    reader: Prefill instance of the prompt, or None.
    lends: Whether the reader only offers a cached prefix, and the decode
      instance prefills the rest.
    read_task: Task number at the reader.
    tickets: Tickets of the pages at the reader, in the order of the prompt.
    prefill_continues: Whether prefill continues, and further tickets will come.
    decoder: Decode instance, current or planned by the route.
    task: Task number at the decoder.
    source: Instance from which the reader first fetches a prefix, or None.
    fetch_task: Task number at the source.
    keys: Keys of the prompt's blocks, by block size in tokens.
    attempts: Number of times that the request was begun.
    alone_since: Time since which no instance could take it; None if one can.
    alone_for: Work that no instance could do then, "prefills" or "decodes".
    why: Reason of the last restart.
    decoder_prefills: Whether the decode instance also prefills, by the route.
    fetch_tokens: Prompt tokens that the reader has after fetching.
    expected: Prompt tokens that should be cached at the instance that was sent
      the request last.
    cached: Prompt tokens that the prefill instance found cached; None if no
      separate instance prefilled it, and the decode instance reports it.
    totals: Log-probability of each answer's known tokens when decoding was
      begun the last time.
    had: (name, tokens) of cached prompt tokens per instance at arrival, if
      roles are planned.
  """

  routed: RoutedRequest
  handle: Handle
  prompt: np.ndarray
  stage: str = "new"
  reader: ClusterInstance | None = None
  lends: bool = False
  read_task: int = -1
  tickets: list[str] = dataclasses.field(default_factory=list)
  prefill_continues: bool = False
  decoder: ClusterInstance | None = None
  task: int = -1
  source: ClusterInstance | None = None
  fetch_task: int = -1
  keys: dict[int, list[str]] = dataclasses.field(default_factory=dict)
  attempts: int = 0
  alone_since: float | None = None
  alone_for: str = ""
  why: str = ""
  decoder_prefills: bool = False
  fetch_tokens: int = 0
  expected: int = 0
  cached: int | None = None
  totals: list[float] = dataclasses.field(default_factory=list)
  had: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(eq=False)
class CopyTask:
  """A prefix that an instance pulls for later requests.

  Attributes:
    source: Instance that has the prefix.
    target: Instance that pulls the prefix.
    request: Request of the prefix and one token after it, which the target
      prefills, so that it keeps the blocks as of any prefilled prompt.
    prompt: Token ids, int32 [n].
    key: Key of the prefix's last block.
    offer: Task number at the source.
    task: Task number at the target; -1 until the source has published.
    pulled: Whether the target has the pages.
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
  """Serves requests on the instances that join, with an engine's interface.

  Attributes:
    tokenizer: Tokenizer of the requests' texts, or None.
    vocab: Vocabulary size of the model.
    longest: Maximum total of prompt and generated tokens.
    address: Host and port where instances join.
    counters: Counters of the work so far.
    blocks: Index of the prompt blocks that each instance has, by `short_key`.
    role_changes: The last planned role changes, at most 1,024.
    role_error: Error of the last planning of roles, or "".
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
    """Open the port and begin to accept instances.

    Args:
      key: Secret key that the whole cluster shares, at least 16 bytes.
      vocab: Vocabulary size of the model that instances serve.
      longest: Maximum total of prompt and generated tokens, as in the engines.
      tokenizer: Tokenizer of texts, for `rj.serve.app`.
      policy: Decides where requests go; default: `ShortestQueue()`.
      roles: Planner that changes the instances' roles at the end of each of its
        windows; default: only `set_role` changes them.
      times: Gets the times of each instance, which measures its calls before
        it joins; the policy's, for example. Default: instances measure nothing.
      stream_tokens: Number of prefilled tokens after which pages are published
        and pulled while prefill continues; 0 publishes all at the end. The
        decode instance is then chosen, and has room, before prefill begins.
      host: Interface on which instances join.
      port: Port number; 0 takes a free one.
      patience_s: Seconds for which a request waits while there is no instance
        that could ever serve it.
      silence_s: Seconds without a byte after which an instance counts as lost.
      beat_s: Seconds between the router's heartbeats to instances.
      attempts: Number of instances that may be lost with a request before it
        fails.
      clock: Returns seconds, for deadlines and the patience of requests.

    Raises:
      OptionError: If a value is out of range, or the address is not free.
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
    # Model properties that all instances share, as the first one reported.
    self._model: tuple[Any, ...] | None = None
    self._requests: dict[Handle, RoutedState] = {}
    self._tasks: dict[int, RoutedState] = {}
    # By their task numbers at the sources and at the targets.
    self._copies: dict[int, CopyTask] = {}
    # When copies ended, by (target, key of the last block).
    self._copied: dict[tuple[str, str], float] = {}
    self.blocks = BlockIndex()
    # Requests of the current window, and those that roles are planned for.
    self._window_requests: collections.deque[RoutedState] = collections.deque()
    self._window_overflow: list[tuple[TraceRequest, int]] = []
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
    """Number of answers that all instances decode at once, at least 1."""
    with self._work:
      return max(1, sum(instance.rows for instance in self._able("decodes")))

  @property
  def adapters(self) -> tuple[str, ...]:
    """Always empty: the router does not know its instances' adapters."""
    return ()

  @property
  def open(self) -> bool:
    """Whether the router takes requests."""
    return not self._closed

  @property
  def missing(self) -> str:
    """Description of the roles that no instance serves now; "" if none.

    Requests are also accepted without instances, and then wait `patience_s`.
    """
    if self._closed:
      return "the router: it is closed"
    with self._work:
      lacks = [
        f"an instance that {does}"
        for ability, does in _DOES.items()
        if not self._able(ability)
      ]
    return " and ".join(lacks)

  def start(self) -> ClusterRouter:
    """Return the router itself: it works from its construction on."""
    return self

  def submit(
    self,
    request: Request,
    on_change: Callable[[Answer], None] | None = None,
  ) -> Handle:
    """Submit a request, as `Engine.submit` does.

    Raises:
      PromptError: If the prompt is invalid, or longer than instances serve.
      OptionError: If a mask is a function, or the router is closed.
      RejectedError: If the policy rejects the request.
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
    # Fails now, not at dispatch, for fields that can't be sent.
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
      arrival = self._clock()
      handle = Handle(self, request, arrival, on_change)
      for answer, begun in zip(handle.answers, request.begun, strict=False):
        answer.tokens.extend(begun)
      state = RoutedState(
        RoutedRequest(
          number=next(self._numbers),
          arrival_s=arrival,
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
        state.had = tuple(entry for entry in had if entry[1])
        self._window_requests.append(state)
        if len(self._window_requests) > _MOST_CAME:
          self._window_overflow.append(
            _as_traced(self._window_requests.popleft())
          )
      self._dispatch()
      if handle.done and isinstance(handle.answers[0].error, RejectedError):
        raise handle.answers[0].error
    return handle

  def cancel(self, handle: Handle, why: str = "cancelled") -> None:
    """Cancel a request."""
    with self._work:
      state = self._requests.get(handle)
      if state is None:
        return
      self.counters.cancelled += why == "cancelled"
      self._finish(state, why)

  def advance(self, handle: Handle) -> None:
    """Wait for the next change of any request, at most a second."""
    with self._work:
      if not handle.done:
        self._work.wait(timeout=1.0)

  def close(self) -> None:
    """Cancel the open requests and disconnect the instances."""
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
    for instance in instances:
      instance.link.close("the router was closed")

  def figures(self) -> list[Figure]:
    """Metrics that a server exports."""
    with self._work:
      figures = [
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
      stages = collections.Counter(
        state.stage for state in self._requests.values()
      )
      for stage in ("new", "fetching", "reading", "read", "answering"):
        text = f"Requests in the stage {stage!r}."
        figures.append(
          Figure("gauge", f"requests_{stage}", stages[stage], text)
        )
      roles = collections.Counter(
        instance.role for instance in self._instances.values()
      )
      for role in ROLES:
        text = f"Instances of the role {role!r}."
        figures.append(Figure("gauge", f"instances_{role}", roles[role], text))
    return figures

  # -------------------------------------------------------------------------
  # Instances
  # -------------------------------------------------------------------------

  def instances(self) -> list[InstanceView]:
    """Views of the instances that are alive, sorted by name."""
    with self._work:
      return self._views()

  def set_role(self, name: str, role: str) -> None:
    """Change an instance's role; tasks already begun are finished.

    Args:
      name: Name of an instance that is alive.
      role: New role, one of `ROLES`.

    Raises:
      OptionError: If there is no such instance, or no instance would be left
        that prefills or decodes.
    """
    one_of("role", role, ROLES)
    with self._work:
      if name not in self._instances:
        raise OptionError(
          "name", name, f"one of {sorted(self._instances)}", "pass its name"
        )
      self._change_roles({name: role})

  def _change_roles(self, changed: Mapping[str, str]) -> None:
    """Change roles of instances; the lock is held."""
    for name, role in changed.items():
      roles = self._instances[name].roles if name in self._instances else ROLES
      if role not in roles:
        raise OptionError(
          "role",
          f"{role} for {name}",
          f"{', '.join(roles)}: stages read prompts and do not answer",
          "leave its role, or let another instance join",
        )
    check_roles({view.name: view.role for view in self._views()}, changed)
    for name, role in changed.items():
      instance = self._instances[name]
      instance.role = role
      instance.link.tell(t="role", role=role)
    self._dispatch()

  def plan_roles(self) -> dict[str, str]:
    """Plan roles from the requests since the last planning.

    A thread calls this at the end of each window, too.

    Returns:
      The roles that have changed, by instance name.

    Raises:
      OptionError: If the router has no planner, or the planner raises.
    """
    if self._planner is None:
      raise OptionError(
        "roles", "no planner", "a RolePlanner", "pass roles=DriftingRoles(...)"
      )
    with self._planning:
      # Planning may simulate for a while: requests are served meanwhile.
      decision = self._planner.decide(
        self._recent_requests(), self.instances(), self._planned
      )
      self._planned = decision.planned
      with self._work:
        current_roles = {view.name: view.role for view in self._views()}
        changed = {
          name: role
          for name, role in sorted(decision.roles.items())
          if current_roles.get(name, role) != role
          # A planner does not know that stages only read prompts.
          and role in self._instances[name].roles
        }
        self._change_roles(changed)
        self.counters.roles += len(changed)
        self.role_changes += [
          RoleChange(
            time_s=self._clock(), name=name, role=role, why=decision.why
          )
          for name, role in changed.items()
        ]
    return changed

  def _plan_roles(self) -> None:
    """Plan roles at the end of each window."""
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
        # Requests are served with the current roles.
        self.counters.unplanned += 1
        self.role_error = str(error) or type(error).__name__

  def _recent_requests(self) -> list[TraceRequest]:
    """Requests since the last planning, as a trace.

    An unfinished answer is assumed to be as long as finished answers were on
    average, as its limit is only an upper bound.
    """
    with self._work:
      states, self._window_requests = self._window_requests, collections.deque()
      traced, self._window_overflow = self._window_overflow, []
      page = min(
        (instance.page for instance in self._instances.values()), default=0
      )
    traced += [_as_traced(state) for state in states]
    for n, state in enumerate(states, len(traced) - len(states)):
      if page and state.handle.request.share:
        keys = [int(key[:12], 16) for key in self._keys(state, page)]
        with_blocks = dataclasses.replace(
          traced[n][0], blocks=tuple(keys), block=page
        )
        traced[n] = with_blocks, traced[n][1]
    finished_lengths = [
      request.new_tokens for request, remaining in traced if not remaining
    ]
    mean_length = (
      sum(finished_lengths) // len(finished_lengths)
      if finished_lengths
      else math.inf
    )
    return [
      dataclasses.replace(
        request,
        new_tokens=int(
          min(
            max(1, mean_length, request.new_tokens),
            request.new_tokens + remaining,
          )
        ),
      )
      if remaining
      else request
      for request, remaining in traced
    ]

  def _able(self, ability: str) -> list[ClusterInstance]:
    """Instances that take new work of a kind ("prefills", "decodes")."""
    return [
      instance
      for instance in self._instances.values()
      if not instance.leaving and getattr(instance.view(), ability)
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
    """Authenticate an instance or a command client by its key."""
    wire = PullConnection(
      link, self._silence_s, f"instance {address[0]}:{address[1]}"
    )
    wire.greet_reader(self._key, min(_GREETING_S, self._silence_s))
    return wire, address[0]

  def _welcome(self, greeted: tuple[PullConnection, str]) -> None:
    """Let an instance join, or answer a command."""
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
      pass  # The peer knows the reason, or is unauthenticated.
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
    views = [dataclasses.asdict(view) for view in self.instances()]
    return {"t": "instances", "instances": views}

  def _join(
    self, fields: dict[str, Any], wire: PullConnection, host: str
  ) -> None:
    """Register an instance that asks to join."""
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
    instance = ClusterInstance(
      name=name,
      role=one_of("role", fields["role"], ROLES),
      link=ControlLink(
        wire,
        on_message=lambda message: self._hear(instance, message),
        on_end=lambda why: self._on_disconnect(instance, why),
        beat=lambda: {"t": "beat"},
        beat_s=self._beat_s,
      ),
      address=(str(address), integer("port", port, least=1, most=65535)),
      page=positive_int("page", fields["page"]),
      capacity=positive_int("capacity", fields["capacity"]),
      rows=positive_int("rows", fields["rows"]),
      roles=tuple(
        one_of("roles", role, ROLES) for role in fields.get("roles", ROLES)
      ),
    )
    if instance.role not in instance.roles:
      raise OptionError(
        "role", instance.role, f"one of {instance.roles}", "join with one"
      )
    instance.report = {"free_tokens": instance.capacity}
    common = fields["codec"], fields["dtype"], fields["vocab"]
    with self._work:
      if self._still_alive(name):
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
      if self._instances and common != self._model:
        raise OptionError(
          "model",
          f"{fields['dtype']}, {fields['codec']}",
          f"{self._model and self._model[1::-1]}, as of those that joined",
          "serve one model with one --cache and --dtype",
        )
      self._model = common
      if self._times is not None and times is not None:
        self._times.tell(name, times)
      self._instances[name] = instance
      instance.link.tell(t="welcome", stream=self._stream)
      instance.link.start()
      self._dispatch()

  def _still_alive(self, name: str) -> bool:
    """Whether an instance of this name exists and is still heard.

    An instance whose machine has died stays registered until it has been
    silent for too long: a process that restarts under its name waits for that.
    """
    old = self._instances.get(name)
    if old is None:
      return False
    # One message may have been in flight when the instance ended.
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

  def _on_disconnect(self, instance: ClusterInstance, why: str) -> None:
    """Remove an instance and restart its work on other instances."""
    with self._work:
      self._links -= 1
      if self._instances.get(instance.name) is not instance:
        return
      del self._instances[instance.name]
      self._work.notify_all()
      self.blocks.forget(instance.name)
      self.counters.lost += not instance.leaving
      for copy in {id(x): x for x in self._copies.values()}.values():
        if instance in (copy.source, copy.target):
          self._end_copy(copy)
      for state in list(self._requests.values()):
        answers = state.stage == "answering"
        if state.source is instance:
          # The reader computes what it would have fetched.
          self._drop_source(state)
          if state.stage == "fetching" and state.reader is not instance:
            self._begin_reading(state)
        pulls = (
          answers
          and state.decoder is not instance
          and not state.prefill_continues
        )
        if state.reader is instance and pulls:
          # The decode instance pulls now, or reports that it could not.
          self._release_reader(state)
        elif instance in (state.reader, state.decoder if answers else None):
          self._restart(state, f"{instance.name}: {why}")
      self._dispatch()

  def _hear(self, instance: ClusterInstance, fields: dict[str, Any]) -> None:
    """Handle a message of an instance."""
    kind = fields["t"]
    with self._work:
      instance.heard += 1
      self._work.notify_all()
      if kind == "view":
        instance.hear_load(fields, self._expected)
        self._dispatch()
        return
      if kind == "blocks":
        self.blocks.apply(
          BlockEvent(
            instance=instance.name,
            epoch=fields["epoch"],
            number=fields["number"],
            kind=fields["kind"],
            keys=tuple(map(str, fields["keys"])),
          )
        )
        return
      if kind == "leave":
        instance.leaving = True
        self._dispatch()
        return
      copy = self._copies.get(fields["id"])
      if copy is not None:
        self._hear_copy(copy, kind, fields)
        return
      state = self._tasks.get(fields["id"])
      if state is None:
        return  # For a request that has ended, or was restarted.
      if kind == "read" and fields["id"] == state.fetch_task:
        state.tickets = _ticket_list(fields["ticket"])
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
        self._release_reader(state)
      elif kind == "lost":
        # The ticket or its publisher may be gone, or the two instances cannot
        # reach each other: at the last attempt the decode instance prefills.
        self._release_reader(state)
        self._restart(state, str(fields["why"]))
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
    """Prompt tokens that should be cached where a task was sent."""
    copy = self._copies.get(task)
    if copy is not None:
      return copy.prompt.size - 1
    state = self._tasks.get(task)
    return 0 if state is None else state.expected

  def _fetched(self, nbytes: int) -> None:
    """Count a pulled prefix; 0 bytes if the pull failed."""
    self.counters.fetched += nbytes > 0
    self.counters.fetched_bytes += nbytes

  # -------------------------------------------------------------------------
  # Copies of prefixes
  # -------------------------------------------------------------------------

  def _begin_copy(self, state: RoutedState, wanted: PrefixCopy) -> None:
    """Let an instance pull a request's prefix, unless a copy is in flight."""
    source, target = (
      self._named(name) for name in (wanted.source, wanted.target)
    )
    keys, request = self._keys(state, source.page), state.handle.request
    count = min(int(wanted.tokens) // source.page, len(keys))
    if source is target or not count or not request.share:
      return
    size = count * source.page
    wanted_by, now_s = (target.name, keys[count - 1]), self._clock()
    ended = self._copied.get(wanted_by, -math.inf)
    under_way = any(
      (copy.target.name, copy.key) == wanted_by
      for copy in self._copies.values()
    )
    room = target.view().free_tokens >= size + 2
    if under_way or now_s - ended < _COPIED_S or not room:
      return
    # Any token may follow the prefix: a prompt's last token is always computed.
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
    """Handle a message from the source or the target of a copy."""
    if kind == "read" and fields["id"] == copy.offer:
      tickets = _ticket_list(fields["ticket"])
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
        # The target would compute a prefix that no request needs.
        self._end_copy(copy)
    elif kind in ("read", "lost", "failed"):
      self._end_copy(copy)
    else:
      raise ValueError(f"a message {str(kind)[:40]!r}")

  def _end_copy(self, copy: CopyTask) -> None:
    """Cancel a copy's tasks and record when it ended."""
    time_s = self._clock()
    self._copied = {
      ended_copy: ended
      for ended_copy, ended in self._copied.items()
      if time_s - ended < _COPIED_S
    }
    self._copied[copy.target.name, copy.key] = time_s
    for task, instance in ((copy.offer, copy.source), (copy.task, copy.target)):
      if self._copies.pop(task, None) is not None:
        instance.link.tell(t="cancel", id=task)

  # -------------------------------------------------------------------------
  # Dispatch
  # -------------------------------------------------------------------------

  def _dispatch(self) -> None:
    """Send requests to instances, oldest first; the lock is held."""
    for state in list(self._requests.values()):
      if state.stage == "new":
        self._guarded(state, self._route)
    full = False
    for state in list(self._requests.values()):
      # A request that waits for room is not overtaken.
      stage_before = state.stage
      waits = stage_before == "read" or (
        state.prefill_continues and stage_before == "reading"
      )
      if waits and full:
        # An instance exists and is full: the patience for a missing one ends.
        self._fitting(state, "decodes")
      elif waits:
        self._guarded(state, self._place)
        full = (
          state.stage == stage_before == "read" and state.alone_since is None
        )
    self._work.notify_all()

  def _guarded(
    self, state: RoutedState, work: Callable[[RoutedState], None]
  ) -> None:
    """Run a decision about a request; an error of a policy ends the request."""
    try:
      work(state)
    except Exception as error:
      self._finish(state, "error", error)

  def _sending(self) -> collections.Counter[str]:
    """Tokens whose pages others will pull, by the name of their owner."""
    tokens_by_instance = collections.Counter[str]()
    for copy in {id(x): x for x in self._copies.values()}.values():
      if not copy.pulled:
        tokens_by_instance[copy.source.name] += copy.prompt.size - 1
    for state in self._requests.values():
      if state.stage == "fetching" and state.source is not None:
        tokens_by_instance[state.source.name] += state.fetch_tokens
      elif state.reader is not None and state.lends:
        tokens_by_instance[state.reader.name] += state.fetch_tokens
      elif state.reader is not None and state.stage == "answering":
        tokens_by_instance[state.reader.name] += state.prompt.size
    return tokens_by_instance

  def _fitting(self, state: RoutedState, ability: str) -> list[InstanceView]:
    """Instances that can ever take a request, sorted by name.

    Where none of them does the work `what`, the request's patience begins.
    """
    request, prompt = state.handle.request, state.routed.prompt_tokens
    # An engine decodes several answers one after another if need be, but the
    # beams of a beam search occupy rows at the same time.
    new = request.max_new_tokens * (request.beams or 1)
    fitting = [
      view
      for view in self._views()
      if self._instances[view.name].capacity
      >= prompt + (1 if view.role == "prefill" else new)
    ]
    if any(getattr(view, ability) for view in fitting):
      state.alone_since = None
      return fitting
    if state.alone_since is None or state.alone_for != ability:
      state.alone_since, state.alone_for = self._clock(), ability
    return []

  def _policy_request(
    self, state: RoutedState, views: list[InstanceView]
  ) -> RoutedRequest:
    """A request as a policy sees it, capped at the largest capacity.

    A request of several answers may need more: they then wait for each other.
    """
    routed = state.routed
    largest_capacity = max(
      self._instances[view.name].capacity for view in views
    )
    new = max(
      1, min(routed.new_tokens, largest_capacity - routed.prompt_tokens)
    )
    return dataclasses.replace(
      routed, new_tokens=new, cached_tokens=self._cached(state)
    )

  def _cached(self, state: RoutedState) -> Callable[[str], int]:
    """Function from an instance's name to its cached tokens of a prompt."""
    request, blocks_by_page = state.handle.request, dict[int, dict[str, int]]()

    def tokens(name: str) -> int:
      instance = self._instances.get(name)
      if instance is None or not request.share:
        return 0
      page = instance.page
      if page not in blocks_by_page:
        blocks_by_page[page] = self.blocks.match(self._keys(state, page))
      # The last token is always computed.
      return min(
        page * blocks_by_page[page].get(name, 0), state.prompt.size - 1
      )

    return tokens

  def _keys(self, state: RoutedState, page: int) -> list[str]:
    """Short keys of a prompt's blocks, computed once per block size."""
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
    """Route a new or restarted request."""
    views = self._fitting(state, "prefills")
    if not views:
      return
    sending = self._sending()
    views = [
      dataclasses.replace(view, sending_tokens=sending[view.name])
      for view in views
    ]
    route = self._policy.route(
      self._policy_request(state, views), views, self._clock()
    )
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
      # Only the first time: a restart must not depend on a third instance.
      source = self._named(str(route.fetch_from))
    state.attempts += 1
    state.decoder_prefills = decoder is reader
    state.lends = state.decoder_prefills and source is not None
    state.fetch_tokens = int(route.fetch_tokens)
    if decoder is reader:
      if source is None:
        self._answer(state, reader)
        return
      # The prefix is treated as a prompt that `source` prefills separately.
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
    """Send the prompt to its reader, with the tickets of a fetched prefix."""
    assert state.reader is not None
    state.stage = "reading"
    state.read_task = self._send(state.reader, state, reads=True)
    # The next tickets are those of the whole prompt.
    state.tickets = []

  def _published(
    self, state: RoutedState, ticket: str | None, *, last: bool
  ) -> None:
    """Handle newly published pages of a prompt."""
    state.tickets += _ticket_list(ticket)
    state.prefill_continues = not last
    if state.stage == "answering" and state.decoder is not None:
      # The decode instance pulls already.
      state.decoder.link.tell(t="part", id=state.task, ticket=ticket, last=last)
      return
    state.stage = "read" if last else "reading"
    self._dispatch()

  def _offer(self, instance: ClusterInstance, state: RoutedState) -> int:
    """Let an instance publish its pages of a prompt; return the task number."""
    task = next(self._task_numbers)
    self._tasks[task] = state
    fields = request_fields(state.handle.request, state.prompt)
    instance.link.tell(t="offer", id=task, request=fields)
    return task

  def _drop_source(self, state: RoutedState) -> None:
    """Cancel the task of the instance that offers a prefix."""
    self._tasks.pop(state.fetch_task, None)
    if state.source is not None:
      state.source.link.tell(t="cancel", id=state.fetch_task)
    state.source, state.fetch_task = None, -1

  def _place(self, state: RoutedState) -> None:
    """Choose a decode instance for a request and send the request there."""
    decoder = state.decoder
    alive = decoder is not None and self._instances.get(decoder.name) is decoder
    if state.prefill_continues and decoder is state.reader:
      return  # The pages will be where they are needed when prefill ends.
    if decoder is not None and alive and not decoder.leaving:
      self._answer(state, decoder)
      return
    state.decoder = None
    views = self._fitting(state, "decodes")
    if state.prefill_continues:
      # Until prefill has ended, a missing decode instance does no harm.
      state.alone_since = None
    if not views:
      return
    policy_request = self._policy_request(state, views)
    name = self._policy.decode_instance(policy_request, views, self._clock())
    if isinstance(name, Rejected):
      self._reject(state, name)
    elif name is not None:
      chosen = self._named(name)
      if chosen is not state.reader or not state.prefill_continues:
        self._answer(state, chosen)

  def _named(self, name: str) -> ClusterInstance:
    instance = self._instances.get(name)
    if instance is None or instance.leaving:
      raise OptionError(
        "policy",
        f"the instance {name!r}",
        f"one of {[x.name for x in self._views()]}",
        "choose among those that it is shown",
      )
    return instance

  def _answer(self, state: RoutedState, decoder: ClusterInstance) -> None:
    """Send a request to its decode instance."""
    state.stage, state.decoder = "answering", decoder
    if state.reader is decoder or not state.tickets:
      # The pages are where they are needed, or no pages exist.
      self._release_reader(state)
    state.task = self._send(decoder, state, reads=False)

  def _send(
    self, instance: ClusterInstance, state: RoutedState, *, reads: bool
  ) -> int:
    """Send a task to an instance; return the task number."""
    task = next(self._task_numbers)
    request = state.handle.request
    if not reads:
      if request.beams is None and request.best_of is None:
        begun = tuple(_begun(state.handle))
        request = dataclasses.replace(request, begun=begun)
        state.totals = [x.total_logprob for x in state.handle.answers]
      else:
        for answer in state.handle.answers:
          # A search begins again from the prompt.
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
    # A copy: it is sent later, and tickets may be added meanwhile.
    fields["tickets"] = list(state.tickets)
    if reads:
      fields["stream"] = self._stream if request.share else 0
    else:
      fields["more"] = state.prefill_continues
    fields["address"] = owner and owner.address
    self._tasks[task] = state
    instance.sent += 1
    new = 1 if reads else state.routed.new_tokens
    size, queued = state.routed.prompt_tokens, None
    reads = reads or state.decoder_prefills
    state.expected = self._cached(state)(instance.name)
    if state.tickets:
      moved = state.fetch_tokens if reads else size
      state.expected = max(state.expected, moved)
    if reads:
      queued = QueuedPrompts.of(size, state.expected)
    instance.since.append(SentTask(instance.sent, queued, size, new))
    instance.link.tell(**fields)
    return task

  def _release_reader(self, state: RoutedState) -> None:
    """Cancel the tasks of the prefill instance and of the prefix source."""
    self._drop_source(state)
    self._tasks.pop(state.read_task, None)
    if state.reader is not None and state.read_task >= 0:
      state.reader.link.tell(t="cancel", id=state.read_task)
    state.reader, state.tickets, state.prefill_continues = None, [], False
    state.read_task = -1

  def _restart(self, state: RoutedState, why: str) -> None:
    """Restart a request elsewhere, after the tokens known so far."""
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
      # Its pages are still there, or will come.
      state.stage = "reading" if state.prefill_continues else "read"
      state.attempts += 1
      return
    self._release_reader(state)
    state.stage, state.cached, state.decoder_prefills = "new", None, False

  def _reject(self, state: RoutedState, why: Rejected) -> None:
    self.counters.rejected += 1
    self._finish(state, "error", RejectedError(why.reason))

  def _finish(
    self, state: RoutedState, why: str, error: Exception | None = None
  ) -> None:
    """End a request before its answers are complete."""
    if state.decoder is not None and state.task >= 0:
      state.decoder.link.tell(t="cancel", id=state.task)
    for answer in state.handle.answers:
      if answer.finish is None:
        answer.finish, answer.error = why, error
        self._changed(state, answer)
    self.counters.failed += error is not None
    self._ended(state)

  def _ended(self, state: RoutedState) -> None:
    """Remove a finished request."""
    self._release_reader(state)
    self._tasks.pop(state.task, None)
    state.handle.seconds = self._clock() - state.handle.arrival
    if self._requests.pop(state.handle, None) is not None:
      self.counters.finished += 1
    self._work.notify_all()

  def _changed(self, state: RoutedState, answer: Answer) -> None:
    if state.handle.on_change is not None:
      state.handle.on_change(answer)

  def _tokens(self, state: RoutedState, fields: dict[str, Any]) -> None:
    """Append newly decoded tokens to an answer."""
    handle = state.handle
    answer = handle.answers[integer("n", fields["n"], least=0)]
    if answer.finish is not None:
      return  # Its last token was decoded again only for the other answers.
    at, tokens = int(fields["at"]), [int(x) for x in fields["tokens"]]
    if at != len(answer.tokens):
      raise ValueError(f"tokens from {at} behind {len(answer.tokens)}")
    if tokens and handle.first_token is None:
      handle.first_token = self._clock() - handle.arrival
    self.counters.new_tokens += len(tokens)
    # The decode instance reports what it found cached.
    cached_tokens = fields["cached"] if state.cached is None else state.cached
    handle.cached_tokens = int(cached_tokens)
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
    # Other threads read an answer while it grows: `finish` comes last.
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
  # Deadlines
  # -------------------------------------------------------------------------

  def _watch(self) -> None:
    """End requests whose time is over, in a loop."""
    while True:
      with self._work:
        if self._closed:
          return
        self.look()
      time.sleep(_LOOK_S)

  def look(self) -> None:
    """End requests whose deadline or patience is over.

    A thread calls this regularly, too.
    """
    with self._work:
      now_s = self._clock()
      for state in list(self._requests.values()):
        deadline_s = state.handle.request.deadline
        if deadline_s is not None and now_s - state.handle.arrival > deadline_s:
          self.cancel(state.handle, "deadline")
        elif (
          state.alone_since is not None
          and now_s - state.alone_since > self._patience_s
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
  """A request as a trace entry, and the tokens that may still follow."""
  handle, routed = state.handle, state.routed
  num_tokens = sum(len(answer.tokens) for answer in handle.answers)
  return TraceRequest(
    arrival=float(routed.arrival_s),
    prompt_tokens=routed.prompt_tokens,
    new_tokens=max(1, num_tokens),
    number=routed.number,
    cached=state.had,
  ), 0 if handle.done else max(0, routed.new_tokens - num_tokens)


def _ticket_list(ticket: str | None) -> list[str]:
  return [] if ticket is None else [str(ticket)]


def _begun(handle: Handle) -> Iterator[tuple[int, ...]]:
  """Yield the known tokens of each answer to continue from.

  A finished answer omits its last token, which is decoded again.
  """
  for answer in handle.answers:
    tokens = answer.tokens[:-1] if answer.finish else answer.tokens
    yield tuple(tokens)


def _logprob(stated: int | float | None) -> float:
  """Log-probability from a message; None means -inf, which JSON lacks."""
  return -math.inf if stated is None else float(stated)
