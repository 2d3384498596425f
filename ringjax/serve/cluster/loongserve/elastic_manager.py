"""State machine of live elastic instances: next calls, recovery from losses.

`ElasticManager` gets events (requests, finished calls, lost instances) and
decides which calls begin: a group prefills, a group decodes, keys move.
`ElasticWorkers` carries the calls to processes. Which instances prefill and
decode which requests is decided by an `ElasticPolicy`, which is asked while no
group decodes.

Guarantees: plain Python, without a clock. An instance has one call at a time. A
token is part of an answer once all members of its call have finished. If keys
of a request are lost with an instance, its prompt and tokens so far are
prefilled again, or the request ends with an error that says so; other requests
continue from their tokens. A group with too few slots lets idle instances join,
which moves no keys; if no instance is idle the latest request is prefilled
again later.
Ref: Wu et al. 2024, LoongServe (SOSP), arXiv 2404.09526, sections 4 and 5.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from ringjax.checks import positive_int
from ringjax.infer.finite import NOT_FINITE
from ringjax.serve.cluster.loongserve.elastic_scheduler import (
  ClusterView,
  DecodeGroup,
  ElasticPolicy,
  ElasticRequest,
  Emptied,
  PrefillBatch,
)

# Failed calls of a request after which it ends, not counting lost instances.
_MOST_FAILURES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveRow:
  """A request's part of a call.

  request: Number of the request.
  tokens: Length of its prompt plus its answer so far, in tokens.
  tokens_by_instance: (instance, tokens): for prefill, the tokens that each
    instance is to keep, in the order of the text; for other calls, those that
    it holds.
  master: Instance that computes the row's decode steps; -1 for other calls.
  """

  request: int
  tokens: int
  tokens_by_instance: tuple[tuple[int, int], ...]
  master: int = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveCall:
  """A call that several instances execute together.

  Attributes:
    number: Number of the call, ascending.
    kind: "read" (prefill), "step" (decode) or "move".
    members: Numbers of the instances; of a ring in its order.
    rows: Requests that are prefilled or decoded.
    striped: Whether each member of a ring keeps what it computes, instead of
      following `tokens_by_instance`: token t of the call belongs to member t
      modulo their number.
    steps: Number of tokens that each row gets.
    parts: For a move, (target, request, tokens); the source is the first
      member.
  """

  number: int
  kind: Literal["read", "step", "move"]
  members: tuple[int, ...]
  rows: tuple[LiveRow, ...] = ()
  striped: bool = False
  steps: int = 0
  parts: tuple[tuple[int, int, int], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropKeys:
  """An instance forgets a request's tokens from position `first` on."""

  instance: int
  request: int
  first: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Abandon:
  """Members of a call should give it up, and reply that they did."""

  call: int
  members: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
  """An instance that was to leave holds nothing any more."""

  instance: int


LiveAction = LiveCall | DropKeys | Abandon | Release


@dataclasses.dataclass(kw_only=True)
class LiveAnswer:
  """A request, its answer so far, and its outcome.

  Attributes:
    number: Number of the request.
    prompt_tokens: Prompt length in tokens.
    new_tokens: Maximum number of tokens to generate.
    tokens: Token ids generated so far.
    error: Reason why it ended without its whole answer, or "".
    ended: Whether it has ended, with or without an error.
    reads: Number of times that its text was prefilled.
  """

  number: int
  prompt_tokens: int
  new_tokens: int
  tokens: list[int] = dataclasses.field(default_factory=list)
  error: str = ""
  ended: bool = False
  reads: int = 0

  @property
  def text_tokens(self) -> int:
    """Length of the prompt plus the answer so far."""
    return self.prompt_tokens + len(self.tokens)


@dataclasses.dataclass(kw_only=True)
class LiveCounts:
  """Counters of a manager's decisions.

  Attributes:
    kept_tokens: Tokens that prefill left where decode needs them, in batches
      that fewer instances decode: these tokens did not have to move.
    moved_tokens: Tokens whose keys were moved between instances.
    shrinks: Batches that fewer instances decoded than prefilled.
    grows: Instances that joined a decoding group.
    lost: Instances that were lost.
    reread: Number of texts that were prefilled again.
  """

  kept_tokens: int = 0
  moved_tokens: int = 0
  shrinks: int = 0
  grows: int = 0
  lost: int = 0
  reread: int = 0


@dataclasses.dataclass(kw_only=True, eq=False)
class _OpenCall:
  """A call in flight."""

  call: LiveCall
  waiting: set[int]
  batch: PrefillBatch | None = None
  group: DecodeGroup | None = None
  emptied: Emptied | None = None
  tokens: dict[int, list[int]] = dataclasses.field(default_factory=dict)
  broken: str = ""
  lost: bool = False


class ElasticManager:
  """Decides the next calls of live instances.

  Attributes:
    answers: Answers by request number.
    counts: Counters of the decisions.
    used: Tokens that each instance holds or has reserved.
    live: Numbers of the instances that are alive.
  """

  def __init__(
    self,
    policy: ElasticPolicy,
    instances: Iterable[int],
    *,
    stop_ids: Sequence[int] = (),
    reserve: int | None = None,
    proactive: bool = True,
    first_call: int = 0,
    note: Callable[[dict[str, Any]], object] = lambda event: None,
  ):
    """Make a manager without requests.

    Args:
      policy: Decides which instances prefill and decode what; its
        `options.slots` is the capacity of each instance.
      instances: Numbers of the instances.
      stop_ids: Token ids that end an answer.
      reserve: Number of an answer's tokens that get slots at its beginning, and
        again when these are full; default: all.
      proactive: Whether prefill leaves keys where decode needs them; else each
        instance keeps what it computes, and moves it afterwards.
      first_call: Number of the first call.
      note: Function that gets each decision, as values for JSON.
    """
    self.policy, self.live = policy, {*instances}
    self.slots = policy.options.slots
    self.used = [self.slots] * (max(self.live, default=-1) + 1)
    for n in self.live:
      self.used[n] = 0
    self.answers: dict[int, LiveAnswer] = {}
    self.counts = LiveCounts()
    self._stops = frozenset(stop_ids)
    self._reserve = (
      None if reserve is None else positive_int("reserve", reserve)
    )
    self._proactive, self._note = proactive, note
    self._waiting: list[ElasticRequest] = []
    self._groups: list[DecodeGroup] = []
    self._open_calls: dict[int, _OpenCall] = {}
    self._call_of_instance: dict[int, int] = {}
    # Instances to be released once empty, and instances only to be emptied.
    self._leaving: set[int] = set()
    self._emptying: set[int] = set()
    self._failures: collections.Counter[int] = collections.Counter()
    self._numbers = itertools.count(first_call)
    self._actions: list[LiveAction] = []
    self._now = 0.0

  @property
  def idle(self) -> bool:
    """Whether all requests have ended, and no call is in flight."""
    ended = all(answer.ended for answer in self.answers.values())
    return ended and not (self._open_calls or self._leaving or self._actions)

  @property
  def groups(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(instances, requests) of each decoding group."""
    return [
      (
        tuple(group.instances),
        tuple(request.number for request in group.requests),
      )
      for group in self._groups
    ]

  # -------------------------------------------------------------------------
  # Events
  # -------------------------------------------------------------------------

  def submit(
    self, number: int, prompt_tokens: int, new_tokens: int, arrival_s: float = 0
  ) -> None:
    """Add a request."""
    positive_int("prompt_tokens", prompt_tokens)
    positive_int("new_tokens", new_tokens)
    answer = LiveAnswer(
      number=number, prompt_tokens=prompt_tokens, new_tokens=new_tokens
    )
    self.answers[number] = answer
    self._wait(answer, "", arrival_s)

  def join(self, instance: int) -> None:
    """Add an instance, with all its slots free."""
    self.used += [self.slots] * (instance + 1 - len(self.used))
    self.used[instance] = 0
    self.live.add(instance)
    self._note({"event": "join", "instance": instance})

  def leave(self, instance: int) -> None:
    """Let an instance leave: its keys are moved, then it is released."""
    if instance in self.live:
      self._leaving.add(instance)

  def lost(self, instance: int, why: str) -> None:
    """Handle the loss of an instance and its keys."""
    if instance not in self.live:
      return
    self.live.discard(instance)
    self._leaving.discard(instance)
    self._emptying.discard(instance)
    self.used[instance] = self.slots
    self.counts.lost += 1
    self._note({"event": "lost", "instance": instance, "why": why})
    number = self._call_of_instance.get(instance)
    if number is not None:
      entry = self._open_calls[number]
      entry.lost = True
      self._abandon_call(entry, f"instance {instance} was lost: {why}")
      self._member_done(entry, instance)
    self._forget_lost()

  def answered(
    self,
    call: int,
    instance: int,
    tokens: Iterable[tuple[int, Sequence[int]]] = (),
    failure: str = "",
  ) -> None:
    """Handle the reply of a member of a call.

    Args:
      call: Number of the call.
      instance: Number of the member.
      tokens: (request, tokens) of the rows for which it is the master.
      failure: Error message, or "" on success.
    """
    entry = self._open_calls.get(call)
    if entry is None or instance not in entry.waiting:
      return
    for request, new in tokens:
      entry.tokens[request] = [*new]
    if failure:
      self._abandon_call(entry, f"instance {instance}: {failure}")
    self._member_done(entry, instance)

  # -------------------------------------------------------------------------
  # Decisions
  # -------------------------------------------------------------------------

  def decide(self, now_s: float) -> list[LiveAction]:
    """Decide the next actions, to be executed in this order."""
    self._now = now_s
    self._empty_leaving()
    decoding = any(
      entry.call.kind != "read" for entry in self._open_calls.values()
    )
    if self._waiting and not decoding:
      self._plan_prefill()
    # While requests wait, the groups' steps begin at the same time, so that the
    # policy sees all groups at rest.
    if not (self._waiting and decoding):
      for group in [*self._groups]:
        if self._is_resting(group):
          self._step(group)
    if self._waiting and not (
      self._open_calls or self._groups or self._actions
    ):
      head = self.answers[self._waiting.pop(0).number]
      head.error, head.ended = "no group of instances can take it", True
    out, self._actions = self._actions, []
    return out

  def _is_resting(self, group: DecodeGroup) -> bool:
    return not any(n in self._call_of_instance for n in group.instances)

  def _view(self) -> ClusterView:
    groups = [group for group in self._groups if self._is_resting(group)]
    unavailable = {*range(len(self.used))} - self.live
    unavailable |= self._leaving | {*self._call_of_instance}
    for group in self._groups:
      if not self._is_resting(group):
        unavailable |= {*group.instances}
    # A group with a leaving instance continues, but takes no part in prefill.
    for group in [*groups]:
      if self._leaving & {*group.instances}:
        groups.remove(group)
        unavailable |= {*group.instances}
    return ClusterView(
      now_s=self._now,
      waiting=self._waiting,
      groups=groups,
      reading=frozenset(unavailable),
      used=self.used,
    )

  def _begin(self, kind: Any, members: Sequence[int], **what: Any) -> _OpenCall:
    """Start a call from the fields of the call and of its entry."""
    fields = {field.name for field in dataclasses.fields(LiveCall)}
    call_fields = {
      name: value for name, value in what.items() if name in fields
    }
    call = LiveCall(
      number=next(self._numbers),
      kind=kind,
      members=tuple(members),
      **call_fields,
    )
    entry_fields = {
      name: value for name, value in what.items() if name not in fields
    }
    entry = _OpenCall(call=call, waiting={*members}, **entry_fields)
    self._open_calls[call.number] = entry
    self._call_of_instance |= dict.fromkeys(members, call.number)
    self._actions.append(call)
    return entry

  # -- prefill

  def _plan_prefill(self) -> None:
    plan = self.policy.plan(self._view())
    for emptied in plan.emptied:
      parts = _parts(emptied.instance, emptied.group.requests, emptied.into)
      self._move(emptied.instance, parts, group=emptied.group, emptied=emptied)
    if plan.emptied:
      # The plan is made again when these instances are empty.
      return
    for batch in plan.batches:
      self._begin_batch(batch)

  def _begin_batch(self, batch: PrefillBatch) -> None:
    batch_numbers = {request.number for request in batch.requests}
    self._waiting = [
      request
      for request in self._waiting
      if request.number not in batch_numbers
    ]
    texts = [self.answers[request.number] for request in batch.requests]
    striped = not self._proactive and self._stripe_keys(batch)
    rows = []
    for request, counts, text in zip(
      batch.requests, batch.kept, texts, strict=True
    ):
      if not striped:
        kept_tokens = zip(batch.instances, counts, strict=True)
        request.kept = {n: tokens for n, tokens in kept_tokens if tokens}
      self._use(request.kept)
      text.reads += 1
      rows.append(
        LiveRow(
          request=request.number,
          tokens=text.text_tokens,
          tokens_by_instance=tuple(request.kept.items()),
        )
      )
    self._begin(
      "read", batch.instances, rows=tuple(rows), striped=striped, batch=batch
    )
    self._note(
      {
        "event": "read",
        "group": [*batch.instances],
        "answers": [*batch.stays],
        "requests": [request.number for request in batch.requests],
      }
    )

  def _stripe_keys(self, batch: PrefillBatch) -> bool:
    """Assign to each instance the keys that it computes, if all have slots."""
    size, at = len(batch.instances), 0
    total = dict.fromkeys(batch.instances, 0)
    shares: list[dict[int, int]] = []
    for request in batch.requests:
      end = at + self.answers[request.number].text_tokens
      shares.append(
        {
          n: len(range(at + (k - at) % size, end, size))
          for k, n in enumerate(batch.instances)
        }
      )
      for n, tokens in shares[-1].items():
        total[n] += tokens
      at = end
    if any(total[n] > self.slots - self.used[n] for n in total):
      return False
    for request, counts in zip(batch.requests, shares, strict=True):
      request.kept = {n: tokens for n, tokens in counts.items() if tokens}
    return True

  def _on_prefilled(self, entry: _OpenCall) -> None:
    batch = entry.batch
    assert batch is not None
    holders = {n for request in batch.requests for n in request.kept}
    members = [n for n in batch.instances if n in holders | {*batch.stays}]
    if len(batch.stays) < len(batch.instances):
      self.counts.shrinks += 1
      if not entry.call.striped:
        self.counts.kept_tokens += sum(row.tokens for row in entry.call.rows)
    new_group = DecodeGroup(requests=[], instances=members)
    self._emptying |= {*members} - {*batch.stays}
    for request in batch.requests:
      request.done, request.started_s = 1, self._now
      new_group.requests.append(request)
    shared = [
      group for group in self._groups if {*group.instances} & {*members}
    ]
    self._groups.append(new_group)
    for group in shared:
      self._merge(group, new_group)
    for request in batch.requests:
      self._append_tokens(request, entry.tokens.get(request.number, []))
    self._remove_ended(new_group)

  def _merge(self, group: DecodeGroup, target: DecodeGroup) -> None:
    """Merge a group into another one."""
    target.requests += group.requests
    target.instances += [
      n for n in group.instances if n not in target.instances
    ]
    self._groups = [
      remaining for remaining in self._groups if remaining is not group
    ]

  # -- decode

  def _step(self, group: DecodeGroup) -> None:
    for request in group.requests:
      # Its slots were reserved for a part of its answer only.
      if request.done >= request.new_tokens:
        answer = self.answers[request.number]
        tokens_left = answer.new_tokens - len(answer.tokens)
        request.new_tokens += min(tokens_left, self._reserve or tokens_left)
    self._grow(group)
    stays = {*group.instances} - self._leaving - self._emptying
    free = {n: self.slots - self.used[n] for n in group.instances if n in stays}
    while group.requests and sum(free.values()) < len(group.requests):
      # The latest request is prefilled again when there is room.
      latest = max(
        group.requests, key=lambda request: (request.arrival_s, request.number)
      )
      self._restart(latest, group, "its group has no slots left", counts=False)
      free = {n: self.slots - self.used[n] for n in free}
    if not group.requests:
      self._remove_ended(group)
      return
    count = min(
      self.policy.options.steps,
      *(request.new_tokens - request.done for request in group.requests),
    )
    masters = _masters(len(group.requests), free, count)
    while masters is None:
      count //= 2
      masters = _masters(len(group.requests), free, count)
    rows = tuple(
      LiveRow(
        request=request.number,
        tokens=self.answers[request.number].text_tokens,
        tokens_by_instance=tuple(request.kept.items()),
        master=n,
      )
      for request, n in zip(group.requests, masters, strict=True)
    )
    self._begin("step", group.instances, rows=rows, steps=count, group=group)
    self._note(
      {
        "event": "step",
        "group": [*group.instances],
        "masters": sorted({*masters}),
        "requests": [request.number for request in group.requests],
        "tokens": count,
      }
    )

  def _grow(self, group: DecodeGroup) -> None:
    """Let instances join for rows, as the policy says, or for slots."""
    joins = [*self.policy.grown(group, self._view())]
    joins = [n for n in joins if n in self.live and n not in group.instances]
    members = [*group.instances, *joins]
    due = sum(request.left_tokens for request in group.requests)
    stays = lambda: [n for n in members if n not in self._leaving]
    for n in self._idle():
      if sum(self.slots - self.used[m] for m in stays()) >= due:
        break
      if n not in members:
        members.append(n)
        joins.append(n)
    if joins:
      group.instances += joins
      self.counts.grows += len(joins)
      self._note({"event": "grow", "group": [*group.instances]})

  def _idle(self) -> list[int]:
    """Instances without a group or call, most free slots first."""
    unavailable = {n for group in self._groups for n in group.instances}
    unavailable |= {*self._call_of_instance} | self._leaving | self._emptying
    return sorted(self.live - unavailable, key=lambda n: (self.used[n], n))

  def _on_stepped(self, entry: _OpenCall) -> None:
    group, steps = entry.group, entry.call.steps
    assert group is not None
    rows = {row.request: row for row in entry.call.rows}
    for request in [*group.requests]:
      row = rows.get(request.number)
      if row is not None:
        request.kept[row.master] = request.kept.get(row.master, 0) + steps
        self._use({row.master: steps})
        request.done += steps
        self._append_tokens(request, entry.tokens.get(request.number, []))
    self._remove_ended(group)

  def _append_tokens(
    self, request: ElasticRequest, tokens: Sequence[int]
  ) -> None:
    """Append confirmed tokens to an answer, which may end it."""
    answer = self.answers[request.number]
    for token in tokens:
      if token == NOT_FINITE:
        answer.error = (
          f"its logits at position {answer.text_tokens - 1} are not finite"
        )
        break
      answer.tokens.append(token)
      if token in self._stops or len(answer.tokens) == answer.new_tokens:
        answer.ended = True
        break
    if not tokens:
      answer.error = "no instance told its tokens"
    answer.ended = answer.ended or bool(answer.error)

  def _remove_ended(self, group: DecodeGroup) -> None:
    """Remove ended requests, and instances that hold nothing."""
    for request in [*group.requests]:
      if self.answers[request.number].ended:
        group.requests.remove(request)
        self.policy.ended(request)
        self._free(request)
    if not group.requests:
      self._groups = [
        remaining for remaining in self._groups if remaining is not group
      ]
      self._emptying -= {*group.instances}
      return
    holders = {n for request in group.requests for n in request.kept}
    due = sum(request.left_tokens for request in group.requests)
    stays = [n for n in group.instances if n not in self._leaving]
    room = sum(self.slots - self.used[n] for n in stays)
    for n in [*group.instances]:
      if n in holders:
        continue
      goes = n in self._leaving | self._emptying
      spare = room - (0 if goes else self.slots - self.used[n])
      decodes_wide = len(group.requests) > self.policy.options.wide_rows * (
        len(group.instances) - 1
      )
      if goes or (self.policy.shrinks and spare >= due and not decodes_wide):
        group.instances.remove(n)
        self._emptying.discard(n)
        room = spare

  # -- moving

  def _empty_leaving(self) -> None:
    """Move keys away from instances that leave or are to be emptied."""
    for n in sorted(
      (self._leaving | self._emptying) - {*self._call_of_instance}
    ):
      group = next(
        (group for group in self._groups if n in group.instances), None
      )
      if group is None:
        self._emptying.discard(n)
        if n in self._leaving and not self.used[n]:
          self._leaving.discard(n)
          self.live.discard(n)
          self.used[n] = self.slots
          self._note({"event": "release", "instance": n})
          self._actions.append(Release(instance=n))
          self._refuse_waiting(f"instance {n} has left")
        continue
      if not self._is_resting(group):
        continue
      tokens = sum(request.kept.get(n, 0) for request in group.requests)
      if not tokens:
        self._remove_ended(group)
        continue
      due = sum(request.left_tokens for request in group.requests)
      outgoing = self._leaving | self._emptying
      targets = [m for m in group.instances if m not in outgoing]
      room = sum(self.slots - self.used[m] for m in targets)
      for m in self._idle() if n in self._leaving else []:
        if room >= tokens + due:
          break
        targets.append(m)
        room += self.slots - self.used[m]
      if room < tokens:
        continue  # Later, when answers have ended.
      group.instances += [m for m in targets if m not in group.instances]
      free = [(m, self.slots - self.used[m]) for m in targets]
      self._move(n, _parts(n, group.requests, free), group=group)

  def _move(
    self,
    source: int,
    parts: tuple[tuple[int, int, int], ...],
    *,
    group: DecodeGroup,
    emptied: Emptied | None = None,
  ) -> None:
    for target, _, tokens in parts:
      self._use({target: tokens})
    targets = sorted({target for target, _, _ in parts})
    self._begin(
      "move", (source, *targets), parts=parts, group=group, emptied=emptied
    )
    self._note(
      {
        "event": "move",
        "source": source,
        "targets": targets,
        "tokens": sum(tokens for _, _, tokens in parts),
      }
    )

  def _on_moved(self, entry: _OpenCall) -> None:
    group, source = entry.group, entry.call.members[0]
    assert group is not None
    requests = {request.number: request for request in group.requests}
    for target, number, tokens in entry.call.parts:
      tokens_of = requests[number].kept
      tokens_of[source] -= tokens
      tokens_of[target] = tokens_of.get(target, 0) + tokens
      self.used[source] -= tokens
      self.counts.moved_tokens += tokens
      if not tokens_of[source]:
        del tokens_of[source]
    emptied = entry.emptied
    if emptied is not None:
      group.instances.remove(source)
      if emptied.joins is not None:
        self._merge(group, emptied.joins)
        group = emptied.joins
    self._remove_ended(group)

  # -------------------------------------------------------------------------
  # Calls that end
  # -------------------------------------------------------------------------

  def _abandon_call(self, entry: _OpenCall, why: str) -> None:
    """Mark a call as failed, and let its other members give it up."""
    if not entry.broken:
      entry.broken = why
      unfinished = entry.waiting & self.live
      self._actions.append(
        Abandon(call=entry.call.number, members=tuple(sorted(unfinished)))
      )

  def _member_done(self, entry: _OpenCall, instance: int) -> None:
    entry.waiting.discard(instance)
    if entry.waiting:
      return
    call = entry.call
    del self._open_calls[call.number]
    for n in call.members:
      self._call_of_instance.pop(n, None)
    if entry.broken:
      self._undo(entry)
    elif call.kind == "read":
      self._on_prefilled(entry)
    elif call.kind == "step":
      self._on_stepped(entry)
    else:
      self._on_moved(entry)
    self._forget_lost()

  def _undo(self, entry: _OpenCall) -> None:
    """Undo a failed call, except for what its instances lost."""
    call, counts = entry.call, not entry.lost
    self._note({"event": "broken", "call": call.kind, "why": entry.broken})
    if entry.batch is not None:
      for request in entry.batch.requests:
        for n in call.members:
          request.kept.setdefault(n, 0)
        self._restart(request, None, entry.broken, counts=counts)
      return
    group = entry.group
    assert group is not None
    requests = {request.number: request for request in group.requests}
    if call.kind == "step" and entry.lost:
      for row in call.rows:
        for n in call.members:
          self._drop(n, row.request, row.tokens - 1)
      return
    moved = {number for _, number, _ in call.parts}
    for target, _, tokens in call.parts:
      if target in self.live:
        self.used[target] -= tokens
    for row in call.rows:
      moved.add(row.request)
    for number in sorted(moved):
      for n in call.members:
        requests[number].kept.setdefault(n, 0)
      self._restart(requests[number], group, entry.broken, counts=counts)
    self._remove_ended(group)

  def _forget_lost(self) -> None:
    """Prefill again what lost instances held."""
    for group in [*self._groups]:
      if not self._is_resting(group):
        continue  # Later, when its call has ended.
      lost = [n for n in group.instances if n not in self.live]
      if not lost:
        continue
      for request in [*group.requests]:
        lost_tokens = {n: request.kept[n] for n in lost if request.kept.get(n)}
        if lost_tokens:
          lost_texts = (
            f"{tokens} tokens of instance {n}"
            for n, tokens in lost_tokens.items()
          )
          why = f"lost {', '.join(lost_texts)}"
          self._restart(request, group, why, counts=False)
      group.instances = [n for n in group.instances if n in self.live]
      self._remove_ended(group)
    if self.counts.lost:
      self._refuse_waiting("instances were lost")

  def _restart(
    self,
    request: ElasticRequest,
    group: DecodeGroup | None,
    why: str,
    *,
    counts: bool,
  ) -> None:
    """Prefill a request's text again, or end it; it leaves its group."""
    if group is not None:
      group.requests.remove(request)
    self._free(request)
    answer = self.answers[request.number]
    self._failures[answer.number] += counts
    if self._failures[answer.number] >= _MOST_FAILURES:
      answer.error, answer.ended = f"failed {_MOST_FAILURES} times: {why}", True
      return
    self.counts.reread += 1
    self._note({"event": "again", "request": answer.number, "why": why})
    self._wait(answer, why, request.arrival_s)

  def _wait(self, answer: LiveAnswer, why: str, arrival_s: float) -> None:
    tokens_left = answer.new_tokens - len(answer.tokens)
    request = ElasticRequest(
      number=answer.number,
      arrival_s=arrival_s,
      prompt_tokens=answer.text_tokens,
      new_tokens=min(tokens_left, self._reserve or tokens_left),
    )
    self._waiting.append(request)
    self._waiting.sort(key=lambda request: (request.arrival_s, request.number))
    self._refuse(request, why)

  def _refuse(self, request: ElasticRequest, why: str) -> None:
    """End a request that no instances could ever hold."""
    answer = self.answers[request.number]
    full_request = dataclasses.replace(
      request, new_tokens=answer.new_tokens - len(answer.tokens), kept={}
    )
    count = len(self.live - self._leaving)
    refused = (
      self.policy.refused(full_request, count)
      if count
      else "no instance is left"
    )
    if refused:
      self._waiting.remove(request)
      answer.ended = True
      answer.error = f"{why}; {refused}" if why else refused

  def _refuse_waiting(self, why: str) -> None:
    for request in [*self._waiting]:
      self._refuse(request, why)

  # -- slots

  def _use(self, kept: dict[int, int]) -> None:
    for n, tokens in kept.items():
      self.used[n] += tokens

  def _free(self, request: ElasticRequest) -> None:
    """Drop a request's keys on all instances."""
    for n, tokens in request.kept.items():
      if n in self.live:
        self.used[n] -= tokens
      self._drop(n, request.number, 0)
    request.kept = {}

  def _drop(self, instance: int, request: int, first: int) -> None:
    if instance in self.live:
      self._actions.append(
        DropKeys(instance=instance, request=request, first=first)
      )


def _parts(
  source: int,
  requests: Sequence[ElasticRequest],
  into: Sequence[tuple[int, int]],
) -> tuple[tuple[int, int, int], ...]:
  """(target, request, tokens) for all keys that an instance holds."""
  room = [[n, tokens] for n, tokens in into if tokens]

  def cut() -> Iterator[tuple[int, int, int]]:
    for request in requests:
      tokens = request.kept.get(source, 0)
      while tokens:
        part = min(tokens, room[0][1])
        yield room[0][0], request.number, part
        tokens -= part
        room[0][1] -= part
        if not room[0][1]:
          room.pop(0)

  return tuple(cut())


def _masters(rows: int, free: dict[int, int], count: int) -> list[int] | None:
  """Choose a master with `count` free slots for each row; None if too few.

  Rows are dealt evenly as far as slots allow.
  """
  slots_left, rows_dealt, chosen = {**free}, dict.fromkeys(free, 0), []
  for _ in range(rows):
    candidates = [n for n in free if slots_left[n] >= count]
    if not candidates:
      return None
    n = min(candidates, key=lambda m: (rows_dealt[m], -slots_left[m]))
    slots_left[n] -= count
    rows_dealt[n] += 1
    chosen.append(n)
  return chosen
