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

import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from ringjax.checks import integer, number, one_of, positive_int
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import InputTypeError, OptionError, PromptError
from ringjax.infer import inputs
from ringjax.parallel.links.array_messages import ArrayMessage
from ringjax.parallel.links.connection import as_json
from ringjax.serve.api.server_metrics import Figure
from ringjax.serve.cluster.control_link import checked_beat
from ringjax.serve.cluster.dispatch.admission import Admission
from ringjax.serve.cluster.dispatch.counters import (
  RouterCounters,
  router_figures,
)
from ringjax.serve.cluster.dispatch.dispatcher import RequestDispatcher
from ringjax.serve.cluster.dispatch.instances import (
  DOES,
  ClusterInstance,
  InstanceTable,
)
from ringjax.serve.cluster.dispatch.prefix_copies import PrefixCopies
from ringjax.serve.cluster.dispatch.request_table import RequestTable
from ringjax.serve.cluster.dispatch.role_control import RoleControl
from ringjax.serve.cluster.dispatch.text_tasks import TextTasks
from ringjax.serve.cluster.role_planner import RolePlanner
from ringjax.serve.cluster.routing import (
  ROLES,
  InstanceView,
  RoutingPolicy,
  ShortestQueue,
)
from ringjax.serve.cluster.times.phase_times import InstanceTimes
from ringjax.serve.request import Answer, Handle, RejectedError, Request
from ringjax.serve.request_fields import request_fields
from ringjax.serve.text_requests import TextRequests

# Seconds for which requests wait for an instance that is missing: an instance
# that restarts must load weights and compile.
PATIENCE_S = 300.0
_LOOK_S = 0.1


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
    self.tokenizer = tokenizer
    self.vocab = positive_int("vocab", vocab)
    self.longest = positive_int("longest", longest)
    stream_tokens = integer("stream_tokens", stream_tokens, least=0)
    patience_s = number("patience_s", patience_s, above=0)
    silence_s, beat_s = checked_beat(silence_s, beat_s)
    attempts = positive_int("attempts", attempts)
    integer("port", port, least=0, most=65535)
    self.counters, self._clock = RouterCounters(), clock
    # The parts do their work under this lock.
    self._work, self._closed = threading.Condition(), False
    self._instances = InstanceTable()
    self.blocks = self._instances.blocks
    self._requests = RequestTable(
      self._work,
      self._instances,
      self.counters,
      stream_tokens=stream_tokens,
      clock=clock,
    )
    self._copies = PrefixCopies(
      self._instances, self._requests, self.counters, clock
    )
    self._dispatcher = RequestDispatcher(
      self._work,
      self._instances,
      self._requests,
      self._copies,
      self.counters,
      policy=policy or ShortestQueue(),
      attempts=attempts,
      patience_s=patience_s,
      clock=clock,
    )
    self._texts = TextTasks(
      self._work,
      self._instances,
      new_task=self._requests.new_task,
      attempts=attempts,
      patience_s=patience_s,
      closed=lambda: self._closed,
      clock=clock,
    )
    self._roles = RoleControl(
      roles,
      self._work,
      self._instances,
      self._requests,
      self.counters,
      dispatch=self._dispatcher.dispatch,
      clock=clock,
    )
    self.role_changes = self._roles.changes
    self._admission = Admission(
      self._work,
      self._instances,
      key=key,
      host=host,
      port=port,
      vocab=self.vocab,
      longest=self.longest,
      stream_tokens=stream_tokens,
      times=times,
      silence_s=silence_s,
      beat_s=beat_s,
      closed=lambda: self._closed,
      on_join=self._dispatcher.dispatch,
      on_message=self._hear,
      on_lost=self._lost,
      on_command=self._command,
    )
    self.address = self._admission.address
    self._start_thread("watch", self._watch)
    if roles is not None:
      self._start_thread("roles", lambda: self._roles.run(lambda: self._closed))

  def _start_thread(self, name: str, work: Callable[[], object]) -> None:
    threading.Thread(
      target=work, name=f"ringjax router {name}", daemon=True
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
      return max(1, sum(x.rows for x in self._instances.able("decodes")))

  @property
  def adapters(self) -> tuple[str, ...]:
    """Always empty: the router does not know its instances' adapters."""
    return ()

  @functools.cached_property
  def texts(self) -> TextRequests:
    """Scores and embeddings of texts, by the instances."""
    return TextRequests(self._texts.read, self.vocab)

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
        for ability, does in DOES.items()
        if not self._instances.able(ability)
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
      handle = Handle(self, request, self._clock(), on_change)
      self._roles.count(self._requests.add(handle, prompt))
      self._dispatcher.dispatch()
      if handle.done and isinstance(handle.answers[0].error, RejectedError):
        raise handle.answers[0].error
    return handle

  def cancel(self, handle: Handle, why: str = "cancelled") -> None:
    """Cancel a request."""
    with self._work:
      state = self._requests.states.get(handle)
      if state is None:
        return
      self.counters.cancelled += why == "cancelled"
      self._requests.finish(state, why)

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
      for handle in list(self._requests.states):
        self.cancel(handle)
      self._work.notify_all()
    self._admission.close()

  def figures(self) -> list[Figure]:
    """Metrics that a server exports."""
    with self._work:
      return router_figures(
        self.counters,
        [state.stage for state in self._requests.states.values()],
        [instance.role for instance in self._instances.alive.values()],
      )

  # -------------------------------------------------------------------------
  # Instances
  # -------------------------------------------------------------------------

  def instances(self) -> list[InstanceView]:
    """Views of the instances that are alive, sorted by name."""
    with self._work:
      return self._instances.views()

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
      alive = self._instances.alive
      if name not in alive:
        raise OptionError(
          "name", name, f"one of {sorted(alive)}", "pass its name"
        )
      self._instances.change_roles({name: role})
      self._dispatcher.dispatch()

  def plan_roles(self) -> dict[str, str]:
    """Plan roles from the requests since the last planning.

    A thread calls this at the end of each window, too.

    Returns:
      The roles that have changed, by instance name.

    Raises:
      OptionError: If the router has no planner, or the planner raises.
    """
    return self._roles.plan()

  @property
  def role_error(self) -> str:
    """Error of the last planning of roles, or ""."""
    return self._roles.error

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

  def _hear(self, instance: ClusterInstance, message: ArrayMessage) -> None:
    """Handle a message of an instance."""
    with self._work:
      instance.heard += 1
      self._work.notify_all()
      of_texts = message.fields.get("id") in self._texts.tasks
      if message.kind == "texts" or (message.kind == "failed" and of_texts):
        self._texts.hear(instance, message)
      else:
        self._dispatcher.hear(instance, message.as_object)

  def _lost(self, instance: ClusterInstance, why: str) -> None:
    """Count the loss of an instance, and do its work elsewhere."""
    self.counters.lost += not instance.leaving
    self._dispatcher.lost(instance, why)

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
      self._dispatcher.end_overdue()
