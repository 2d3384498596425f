"""Dispatch of requests to instances: routes, moves of pages, and restarts.

Guarantees: a policy sees all instances that can ever take a request; requests
that wait for room are not overtaken; a request whose instance is lost begins
again elsewhere, after the tokens known so far, at most `attempts` times.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from ringjax.errors import OptionError, PeerError, RingjaxError
from ringjax.serve.cluster.dispatch.counters import RouterCounters
from ringjax.serve.cluster.dispatch.instances import (
  DOES,
  ClusterInstance,
  InstanceTable,
)
from ringjax.serve.cluster.dispatch.prefix_copies import PrefixCopies
from ringjax.serve.cluster.dispatch.request_state import (
  RequestStage,
  RoutedState,
)
from ringjax.serve.cluster.dispatch.request_table import (
  RequestTable,
  ticket_list,
)
from ringjax.serve.cluster.routing import (
  InstanceView,
  Rejected,
  Route,
  RoutedRequest,
  RoutingPolicy,
)


class RequestDispatcher:
  """Sends requests to instances; its user holds the router's lock.

  Attributes:
    policy: Decides where requests go.
    attempts: Number of instances that may be lost with a request.
  """

  def __init__(
    self,
    work: threading.Condition,
    instances: InstanceTable,
    requests: RequestTable,
    copies: PrefixCopies,
    counters: RouterCounters,
    *,
    policy: RoutingPolicy,
    attempts: int,
    patience_s: float,
    clock: Callable[[], float],
  ):
    """Begin without requests.

    Args:
      work: Lock of the router, notified when a request changes.
      instances: Instances of the cluster.
      requests: Requests in flight.
      copies: Copies of prefixes in flight.
      counters: Counters of the router.
      policy: Decides where requests go.
      attempts: Number of instances that may be lost with a request.
      patience_s: Seconds for which a request waits while there is no instance
        that could ever serve it.
      clock: Returns seconds.
    """
    self._work, self._instances = work, instances
    self._requests, self._copies = requests, copies
    self._counters, self._clock = counters, clock
    self.policy, self.attempts = policy, attempts
    self._patience_s = patience_s

  def dispatch(self) -> None:
    """Send requests to instances, oldest first; the lock is held."""
    for state in list(self._requests.states.values()):
      if state.stage is RequestStage.NEW:
        self._guarded(state, self._route)
    full = False
    for state in list(self._requests.states.values()):
      # A request that waits for room is not overtaken.
      stage_before = state.stage
      waits = stage_before is RequestStage.READ or (
        state.prefill_continues and stage_before is RequestStage.READING
      )
      if waits and full:
        # An instance exists and is full: the patience for a missing one ends.
        self._fitting(state, "decodes")
      elif waits:
        self._guarded(state, self._place)
        full = (
          state.stage is stage_before is RequestStage.READ
          and state.alone_since is None
        )
    self._work.notify_all()

  def _guarded(
    self, state: RoutedState, work: Callable[[RoutedState], None]
  ) -> None:
    """Run a decision about a request; an error of a policy ends the request."""
    try:
      work(state)
    except Exception as error:
      self._requests.finish(state, "error", error)

  # -------------------------------------------------------------------------
  # What policies see
  # -------------------------------------------------------------------------

  def sending(self) -> collections.Counter[str]:
    """Tokens whose pages others will pull, by the name of their owner."""
    tokens_by_instance = self._copies.sending()
    for state in self._requests.states.values():
      if state.stage is RequestStage.FETCHING and state.source is not None:
        tokens_by_instance[state.source.name] += state.fetch_tokens
      elif state.reader is not None and state.lends:
        tokens_by_instance[state.reader.name] += state.fetch_tokens
      elif state.reader is not None and state.stage is RequestStage.ANSWERING:
        tokens_by_instance[state.reader.name] += state.prompt.size
    return tokens_by_instance

  def _fitting(self, state: RoutedState, ability: str) -> list[InstanceView]:
    """Instances that can ever take a request, sorted by name.

    Where none of them has the ability, the request's patience begins.
    """
    request, prompt = state.handle.request, state.routed.prompt_tokens
    # An engine decodes several answers one after another if need be, but the
    # beams of a beam search occupy rows at the same time.
    new = request.max_new_tokens * (request.beams or 1)
    fitting = [
      view
      for view in self._instances.views()
      if self._instances.alive[view.name].capacity
      >= prompt + (1 if view.role == "prefill" else new)
    ]
    if any(getattr(view, ability) for view in fitting):
      state.alone_since = None
      return fitting
    if state.alone_since is None or state.alone_for != ability:
      state.alone_since, state.alone_for = self._clock(), ability
    return []

  def _moves_pages(self, view: InstanceView) -> bool:
    return self._instances.alive[view.name].moves_pages

  def _policy_request(
    self, state: RoutedState, views: list[InstanceView]
  ) -> RoutedRequest:
    """A request as a policy sees it, capped at the largest capacity.

    A request of several answers may need more: they then wait for each other.
    """
    routed = state.routed
    largest_capacity = max(
      self._instances.alive[view.name].capacity for view in views
    )
    new = max(
      1, min(routed.new_tokens, largest_capacity - routed.prompt_tokens)
    )
    return dataclasses.replace(
      routed, new_tokens=new, cached_tokens=self._requests.cached(state)
    )

  # -------------------------------------------------------------------------
  # From stage to stage
  # -------------------------------------------------------------------------

  def _route(self, state: RoutedState) -> None:
    """Route a new or restarted request."""
    views = self._fitting(state, "prefills")
    if not views:
      return
    if not any(view.decodes and self._moves_pages(view) for view in views):
      # Pages of a prompt that is read elsewhere would not reach who answers.
      whole = [view for view in views if not self._moves_pages(view)]
      views = whole or views
    sending = self.sending()
    views = [
      dataclasses.replace(view, sending_tokens=sending[view.name])
      for view in views
    ]
    route = self.policy.route(
      self._policy_request(state, views), views, self._clock()
    )
    if isinstance(route, Rejected):
      self._requests.reject(state, route)
      return
    if not isinstance(route, Route):
      raise OptionError(
        "policy", f"the route {route}", "a Route, or Rejected", "return one"
      )
    if route.copy is not None and state.attempts == 0:
      self._copies.begin(state, route.copy)
    reader = self._instances.named(route.prefill)
    decoder = (
      None if route.decode is None else self._instances.named(route.decode)
    )
    source = None
    if route.fetch_from not in (None, reader.name) and state.attempts == 0:
      # Only the first time: a restart must not depend on a third instance.
      source = self._instances.named(str(route.fetch_from))
    if not reader.moves_pages:
      # It answers what it reads.
      decoder = reader
    elif decoder is not None and not decoder.moves_pages:
      # Chosen once the prompt is read, among those that can pull its pages.
      decoder = None
    if source is not None and not (source.moves_pages and reader.moves_pages):
      source = None
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
      state.enter(RequestStage.READING)
      state.read_task = self._requests.offer(source, state)
      return
    state.reader, state.decoder, state.tickets = reader, decoder, []
    if state.prompt.size <= reader.page or not state.handle.request.share:
      # No page of it can move.
      state.enter(RequestStage.READ)
      state.reader = None
      return
    if source is not None:
      state.enter(RequestStage.FETCHING)
      state.source = source
      state.fetch_task = self._requests.offer(source, state)
      return
    self._begin_reading(state)

  def _begin_reading(self, state: RoutedState) -> None:
    """Send the prompt to its reader, with the tickets of a fetched prefix."""
    assert state.reader is not None
    state.enter(RequestStage.READING)
    state.read_task = self._requests.send(state.reader, state, reads=True)
    # The next tickets are those of the whole prompt.
    state.tickets = []

  def _published(
    self, state: RoutedState, ticket: str | None, *, last: bool
  ) -> None:
    """Handle newly published pages of a prompt."""
    state.tickets += ticket_list(ticket)
    state.prefill_continues = not last
    if state.stage is RequestStage.ANSWERING and state.decoder is not None:
      # The decode instance pulls already.
      state.decoder.link.tell("part", id=state.task, ticket=ticket, last=last)
      return
    state.enter(RequestStage.READ if last else RequestStage.READING)
    self.dispatch()

  def _place(self, state: RoutedState) -> None:
    """Choose a decode instance for a request and send the request there."""
    decoder = state.decoder
    if state.prefill_continues and decoder is state.reader:
      return  # The pages will be where they are needed when prefill ends.
    if (
      decoder is not None and decoder in self._instances and not decoder.leaving
    ):
      self._answer(state, decoder)
      return
    state.decoder = None
    views = self._fitting(state, "decodes")
    if state.prefill_continues:
      # Until prefill has ended, a missing decode instance does no harm.
      state.alone_since = None
    if not views:
      return
    moving = [view for view in views if self._moves_pages(view)]
    if any(view.decodes for view in moving):
      # The others would read the prompt again.
      views = moving
    policy_request = self._policy_request(state, views)
    name = self.policy.decode_instance(policy_request, views, self._clock())
    if isinstance(name, Rejected):
      self._requests.reject(state, name)
    elif name is not None:
      chosen = self._instances.named(name)
      if chosen is not state.reader or not state.prefill_continues:
        self._answer(state, chosen)

  def _answer(self, state: RoutedState, decoder: ClusterInstance) -> None:
    """Send a request to its decode instance."""
    state.enter(RequestStage.ANSWERING)
    state.decoder = decoder
    if state.reader is decoder or not state.tickets or not decoder.moves_pages:
      # The pages are where they are needed, or none exist, or none can come.
      self._requests.release_reader(state)
    state.task = self._requests.send(decoder, state, reads=False)

  def _restart(self, state: RoutedState, why: str) -> None:
    """Restart a request elsewhere, after the tokens known so far."""
    state.why = why
    self._counters.again += 1
    answered = state.stage is RequestStage.ANSWERING
    self._requests.release_decoder(state)
    if state.attempts >= self.attempts:
      self._requests.finish(
        state,
        "error",
        PeerError(
          f"{state.attempts} instances were lost with the request, the last "
          f"time: {why[:200]}"
        ),
      )
      return
    if state.reader in self._instances and state.tickets and answered:
      # Its pages are still there, or will come.
      state.enter(
        RequestStage.READING if state.prefill_continues else RequestStage.READ
      )
      state.attempts += 1
      return
    self._requests.release_reader(state)
    state.enter(RequestStage.NEW)
    state.cached, state.decoder_prefills = None, False

  # -------------------------------------------------------------------------
  # What instances say
  # -------------------------------------------------------------------------

  def hear(self, instance: ClusterInstance, fields: dict[str, Any]) -> None:
    """Handle a message of an instance.

    Messages about tasks of requests that have ended, or were restarted, are
    ignored.

    Raises:
      OptionError, KeyError, TypeError, ValueError: If it is malformed.
    """
    kind = fields["t"]
    if kind == "view":
      instance.hear_load(fields, self._expected)
      self.dispatch()
    elif kind == "blocks":
      self._instances.hear_blocks(instance, fields)
    elif kind == "leave":
      instance.leaving = True
      self.dispatch()
    elif (copy := self._copies.tasks.get(fields["id"])) is not None:
      self._copies.hear(copy, kind, fields)
    elif (state := self._requests.tasks.get(fields["id"])) is not None:
      self._hear_task(state, kind, fields)

  def _hear_task(
    self, state: RoutedState, kind: str, fields: dict[str, Any]
  ) -> None:
    """Handle a message about a task of a request."""
    if kind == "read" and fields["id"] == state.fetch_task:
      state.tickets = ticket_list(fields["ticket"])
      if not state.tickets:
        self._requests.drop_source(state)
      self._begin_reading(state)
    elif kind == "pulled" and fields["id"] == state.read_task:
      self._count_fetched(int(fields["nbytes"]))
      self._requests.drop_source(state)
    elif kind == "read":
      if not state.lends:
        state.cached = int(fields["cached"])
      self._published(state, fields["ticket"], last=True)
    elif kind == "part":
      self._published(state, fields["ticket"], last=False)
    elif kind == "pulled":
      if state.lends:
        self._count_fetched(int(fields["nbytes"]))
      else:
        self._counters.moved += 1
        self._counters.moved_bytes += int(fields["nbytes"])
      self._requests.release_reader(state)
    elif kind == "lost":
      # The ticket or its publisher may be gone, or the two instances cannot
      # reach each other: at the last attempt the decode instance prefills.
      self._requests.release_reader(state)
      self._restart(state, str(fields["why"]))
      last_attempt = state.attempts == self.attempts - 1
      if state.stage is RequestStage.NEW and last_attempt:
        state.enter(RequestStage.READ)
        state.attempts = self.attempts
      self.dispatch()
    elif kind == "failed":
      error = OptionError if fields["refused"] else RingjaxError
      self._requests.finish(state, "error", error(str(fields["error"])[:400]))
    elif kind == "tokens":
      self._requests.add_tokens(state, fields)
      if state.handle.done:
        self.dispatch()
    else:
      raise ValueError(f"a message {str(kind)[:40]!r}")

  def _expected(self, task: int) -> int:
    """Prompt tokens that should be cached where a task was sent."""
    copy = self._copies.tasks.get(task)
    if copy is not None:
      return copy.prompt.size - 1
    state = self._requests.tasks.get(task)
    return 0 if state is None else state.expected

  def _count_fetched(self, nbytes: int) -> None:
    """Count a pulled prefix; 0 bytes if the pull failed."""
    self._counters.fetched += nbytes > 0
    self._counters.fetched_bytes += nbytes

  def lost(self, instance: ClusterInstance, why: str) -> None:
    """Restart the work of an instance that is gone on other instances."""
    self._copies.end_at(instance)
    for state in list(self._requests.states.values()):
      answers = state.stage is RequestStage.ANSWERING
      if state.source is instance:
        # The reader computes what it would have fetched.
        self._requests.drop_source(state)
        fetches = state.stage is RequestStage.FETCHING
        if fetches and state.reader is not instance:
          self._begin_reading(state)
      pulls = (
        answers
        and state.decoder is not instance
        and not state.prefill_continues
      )
      if state.reader is instance and pulls:
        # The decode instance pulls now, or reports that it could not.
        self._requests.release_reader(state)
      elif instance in (state.reader, state.decoder if answers else None):
        self._restart(state, f"{instance.name}: {why}")
    self.dispatch()

  def end_overdue(self) -> None:
    """End requests whose deadline or patience is over."""
    now_s = self._clock()
    for state in list(self._requests.states.values()):
      deadline_s = state.handle.request.deadline
      if deadline_s is not None and now_s - state.handle.arrival > deadline_s:
        self._requests.finish(state, "deadline")
      elif (
        state.alone_since is not None
        and now_s - state.alone_since > self._patience_s
      ):
        is_new = state.stage is RequestStage.NEW
        does = DOES["prefills" if is_new else "decodes"]
        need = state.routed.prompt_tokens + state.routed.new_tokens
        error = PeerError(
          f"no instance that {does} and has room for {need:,} tokens for "
          f"{self._patience_s:g} s"
          + (f"; before: {state.why[:200]}" if state.why else "")
        )
        self._requests.finish(state, "error", error)
