"""Decides for live elastic instances: what each does next, and what if it dies.

`ElasticManager` is told what came and what ended, and says which calls begin:
a group reads prompts, a group makes tokens, keys move. `ElasticWorkers` carries
them to processes. Who reads what with how many and who answers decides an
`ElasticPolicy`, which is asked while no group makes tokens.

Guarantees: plain Python, without a clock. An instance has one call at a time. A
token is part of an answer when all members of its call have answered. A request
whose keys an instance had that is lost is read again, prompt and tokens so far,
or ends with an error that says so; others go on from the tokens that they had.
A group with too few slots lets idle instances join, which move nothing; where
there are none the request that came last is read again later.
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
from ringjax.serve.cluster.elastic_scheduler import (
  ClusterView,
  DecodeGroup,
  ElasticPolicy,
  ElasticRequest,
  Emptied,
  PrefillBatch,
)

# Calls of a request that failed although no instance was lost.
_MOST_FAILURES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveRow:
  """A request's part of a call.

  Attributes:
    request: its number.
    tokens: of its text so far: the prompt, and the answer's.
    kept: of a call that reads, the tokens that each instance keeps, in the
      order of the text; of others, that each holds.
    master: of a call that makes tokens, the instance that computes it.
  """

  request: int
  tokens: int
  kept: tuple[tuple[int, int], ...]
  master: int = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveCall:
  """Something that instances do together.

  Attributes:
    number: of the call, ascending.
    kind: "read", "step" or "move".
    members: the instances; of a ring in its order.
    rows: what is read or answered.
    striped: whether each member of a ring keeps what it computes, in place of
      what `kept` says: token t of all of a call's is of member t modulo their
      number.
    steps: tokens that each row gets.
    parts: of a move, (target, request, tokens); the source is the first member.
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
  """Members of a call give it up, and say so."""

  call: int
  members: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
  """An instance that was to leave holds nothing any more."""

  instance: int


LiveAction = LiveCall | DropKeys | Abandon | Release


@dataclasses.dataclass(kw_only=True)
class LiveAnswer:
  """A request and what became of it.

  Attributes:
    number: of the request.
    prompt_tokens: of its prompt.
    new_tokens: of its answer, at most.
    tokens: of its answer so far.
    error: why it ended without its whole answer; "" if it did not.
    ended: whether it did, in either way.
    reads: how often its text was read.
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
    """Of the prompt and the answer so far."""
    return self.prompt_tokens + len(self.tokens)


@dataclasses.dataclass(kw_only=True)
class LiveCounts:
  """What a manager decided.

  Attributes:
    kept_tokens: that stayed where a plan wanted them while more instances read
      them than then answered: that many did not move.
    moved_tokens: whose keys moved between instances.
    shrinks: batches that fewer instances answered than read.
    grows: instances that joined a group that answers.
    lost: instances that were lost.
    reread: texts that were read again.
  """

  kept_tokens: int = 0
  moved_tokens: int = 0
  shrinks: int = 0
  grows: int = 0
  lost: int = 0
  reread: int = 0


@dataclasses.dataclass(kw_only=True, eq=False)
class _OpenCall:
  """A call under way."""

  call: LiveCall
  waiting: set[int]
  batch: PrefillBatch | None = None
  group: DecodeGroup | None = None
  emptied: Emptied | None = None
  tokens: dict[int, list[int]] = dataclasses.field(default_factory=dict)
  broken: str = ""
  lost: bool = False


class ElasticManager:
  """What live instances do next.

  Attributes:
    answers: by the requests' numbers.
    counts: what was decided.
    used: tokens that each instance holds or has promised.
    live: instances that are there.
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
    """Nothing is under way.

    Args:
      policy: who reads and answers what; its `options.slots` are each
        instance's.
      instances: their numbers.
      stop_ids: tokens that end an answer.
      reserve: tokens of an answer that have slots when it begins, and again
        when these are full; default: all.
      proactive: whether keys stay during reading where they are needed later;
        else each instance keeps what it computes, and moves it then.
      first_call: number of the first call.
      note: gets each decision, as values for JSON.
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
    self._open: dict[int, _OpenCall] = {}
    self._busy: dict[int, int] = {}
    # To be released once they are empty, or only emptied.
    self._leaving: set[int] = set()
    self._emptying: set[int] = set()
    self._failures: collections.Counter[int] = collections.Counter()
    self._numbers = itertools.count(first_call)
    self._out: list[LiveAction] = []
    self._now = 0.0

  @property
  def idle(self) -> bool:
    """Whether all requests have ended, and nothing is under way."""
    ended = all(x.ended for x in self.answers.values())
    return ended and not (self._open or self._leaving or self._out)

  @property
  def groups(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(instances, requests) of each group that answers."""
    return [
      (tuple(g.instances), tuple(r.number for r in g.requests))
      for g in self._groups
    ]

  # -------------------------------------------------------------------------
  # What is told
  # -------------------------------------------------------------------------

  def submit(
    self, number: int, prompt_tokens: int, new_tokens: int, arrival_s: float = 0
  ) -> None:
    """A request has come."""
    positive_int("prompt_tokens", prompt_tokens)
    positive_int("new_tokens", new_tokens)
    answer = LiveAnswer(
      number=number, prompt_tokens=prompt_tokens, new_tokens=new_tokens
    )
    self.answers[number] = answer
    self._wait(answer, "", arrival_s)

  def join(self, instance: int) -> None:
    """An instance has come, with all its slots free."""
    self.used += [self.slots] * (instance + 1 - len(self.used))
    self.used[instance] = 0
    self.live.add(instance)
    self._note({"event": "join", "instance": instance})

  def leave(self, instance: int) -> None:
    """An instance is to leave: its keys are moved, then it is released."""
    if instance in self.live:
      self._leaving.add(instance)

  def lost(self, instance: int, why: str) -> None:
    """An instance is gone, with what it held."""
    if instance not in self.live:
      return
    self.live.discard(instance)
    self._leaving.discard(instance)
    self._emptying.discard(instance)
    self.used[instance] = self.slots
    self.counts.lost += 1
    self._note({"event": "lost", "instance": instance, "why": why})
    number = self._busy.get(instance)
    if number is not None:
      entry = self._open[number]
      entry.lost = True
      self._break(entry, f"instance {instance} was lost: {why}")
      self._answered(entry, instance)
    self._forget_lost()

  def answered(
    self,
    call: int,
    instance: int,
    tokens: Iterable[tuple[int, Sequence[int]]] = (),
    failure: str = "",
  ) -> None:
    """A member of a call has done its part, or failed.

    Args:
      call: its number.
      instance: the member.
      tokens: (request, tokens) that ended there.
      failure: why it failed; "" if it did not.
    """
    entry = self._open.get(call)
    if entry is None or instance not in entry.waiting:
      return
    for request, new in tokens:
      entry.tokens[request] = [*new]
    if failure:
      self._break(entry, f"instance {instance}: {failure}")
    self._answered(entry, instance)

  # -------------------------------------------------------------------------
  # What is decided
  # -------------------------------------------------------------------------

  def decide(self, now_s: float) -> list[LiveAction]:
    """What is to be done now, in this order."""
    self._now = now_s
    self._empty_leaving()
    stepping = any(x.call.kind != "read" for x in self._open.values())
    if self._waiting and not stepping:
      self._read()
    # While requests wait the groups' steps begin together, so that the policy
    # sees all of them at rest.
    if not (self._waiting and stepping):
      for group in [*self._groups]:
        if self._rests(group):
          self._step(group)
    if self._waiting and not (self._open or self._groups or self._out):
      head = self.answers[self._waiting.pop(0).number]
      head.error, head.ended = "no group of instances can take it", True
    out, self._out = self._out, []
    return out

  def _rests(self, group: DecodeGroup) -> bool:
    return not any(n in self._busy for n in group.instances)

  def _view(self) -> ClusterView:
    groups = [g for g in self._groups if self._rests(g)]
    away = {*range(len(self.used))} - self.live
    away |= self._leaving | {*self._busy}
    for group in self._groups:
      if not self._rests(group):
        away |= {*group.instances}
    # Groups with an instance that leaves go on, but take no part in reading.
    for group in [*groups]:
      if self._leaving & {*group.instances}:
        groups.remove(group)
        away |= {*group.instances}
    return ClusterView(
      now_s=self._now,
      waiting=self._waiting,
      groups=groups,
      reading=frozenset(away),
      used=self.used,
    )

  def _begin(self, kind: Any, members: Sequence[int], **what: Any) -> _OpenCall:
    """Starts a call; `what` are fields of it and of its entry."""
    fields = {f.name for f in dataclasses.fields(LiveCall)}
    own = {name: x for name, x in what.items() if name in fields}
    call = LiveCall(
      number=next(self._numbers), kind=kind, members=tuple(members), **own
    )
    rest = {name: x for name, x in what.items() if name not in fields}
    entry = _OpenCall(call=call, waiting={*members}, **rest)
    self._open[call.number] = entry
    self._busy |= dict.fromkeys(members, call.number)
    self._out.append(call)
    return entry

  # -- reading

  def _read(self) -> None:
    plan = self.policy.plan(self._view())
    for one in plan.emptied:
      parts = _parts(one.instance, one.group.requests, one.into)
      self._move(one.instance, parts, group=one.group, emptied=one)
    if plan.emptied:
      # Decided again when instances are empty.
      return
    for batch in plan.batches:
      self._begin_batch(batch)

  def _begin_batch(self, batch: PrefillBatch) -> None:
    taken = {r.number for r in batch.requests}
    self._waiting = [r for r in self._waiting if r.number not in taken]
    texts = [self.answers[r.number] for r in batch.requests]
    striped = not self._proactive and self._stripes(batch)
    rows = []
    for request, kept, text in zip(
      batch.requests, batch.kept, texts, strict=True
    ):
      if not striped:
        own = zip(batch.instances, kept, strict=True)
        request.kept = {n: tokens for n, tokens in own if tokens}
      self._use(request.kept)
      text.reads += 1
      rows.append(
        LiveRow(
          request=request.number,
          tokens=text.text_tokens,
          kept=tuple(request.kept.items()),
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
        "requests": [r.number for r in batch.requests],
      }
    )

  def _stripes(self, batch: PrefillBatch) -> bool:
    """Gives each instance what it computes, where it has slots for that."""
    size, at = len(batch.instances), 0
    total = dict.fromkeys(batch.instances, 0)
    each: list[dict[int, int]] = []
    for request in batch.requests:
      end = at + self.answers[request.number].text_tokens
      each.append(
        {
          n: len(range(at + (k - at) % size, end, size))
          for k, n in enumerate(batch.instances)
        }
      )
      for n, tokens in each[-1].items():
        total[n] += tokens
      at = end
    if any(total[n] > self.slots - self.used[n] for n in total):
      return False
    for request, kept in zip(batch.requests, each, strict=True):
      request.kept = {n: tokens for n, tokens in kept.items() if tokens}
    return True

  def _was_read(self, entry: _OpenCall) -> None:
    batch = entry.batch
    assert batch is not None
    holders = {n for r in batch.requests for n in r.kept}
    members = [n for n in batch.instances if n in holders | {*batch.stays}]
    if len(batch.stays) < len(batch.instances):
      self.counts.shrinks += 1
      if not entry.call.striped:
        self.counts.kept_tokens += sum(row.tokens for row in entry.call.rows)
    fresh = DecodeGroup(requests=[], instances=members)
    self._emptying |= {*members} - {*batch.stays}
    for request in batch.requests:
      request.done, request.started_s = 1, self._now
      fresh.requests.append(request)
    shared = [g for g in self._groups if {*g.instances} & {*members}]
    self._groups.append(fresh)
    for group in shared:
      self._merge(group, fresh)
    for request in batch.requests:
      self._take(request, entry.tokens.get(request.number, []))
    self._tidy(fresh)

  def _merge(self, group: DecodeGroup, target: DecodeGroup) -> None:
    """Makes one group of two."""
    target.requests += group.requests
    target.instances += [
      n for n in group.instances if n not in target.instances
    ]
    self._groups = [g for g in self._groups if g is not group]

  # -- answering

  def _step(self, group: DecodeGroup) -> None:
    for request in group.requests:
      # Its slots were for a part of its answer.
      if request.done >= request.new_tokens:
        answer = self.answers[request.number]
        left = answer.new_tokens - len(answer.tokens)
        request.new_tokens += min(left, self._reserve or left)
    self._grow(group)
    stays = {*group.instances} - self._leaving - self._emptying
    free = {n: self.slots - self.used[n] for n in group.instances if n in stays}
    while group.requests and sum(free.values()) < len(group.requests):
      # The last one that came is read again when there is room.
      last = max(group.requests, key=lambda r: (r.arrival_s, r.number))
      self._again(last, group, "its group has no slots left", counts=False)
      free = {n: self.slots - self.used[n] for n in free}
    if not group.requests:
      self._tidy(group)
      return
    count = min(
      self.policy.options.steps,
      *(r.new_tokens - r.done for r in group.requests),
    )
    chosen = _masters(len(group.requests), free, count)
    while chosen is None:
      count //= 2
      chosen = _masters(len(group.requests), free, count)
    rows = tuple(
      LiveRow(
        request=r.number,
        tokens=self.answers[r.number].text_tokens,
        kept=tuple(r.kept.items()),
        master=n,
      )
      for r, n in zip(group.requests, chosen, strict=True)
    )
    self._begin("step", group.instances, rows=rows, steps=count, group=group)
    self._note(
      {
        "event": "step",
        "group": [*group.instances],
        "masters": sorted({*chosen}),
        "requests": [r.number for r in group.requests],
        "tokens": count,
      }
    )

  def _grow(self, group: DecodeGroup) -> None:
    """Lets instances join for rows, as the policy says, or for slots."""
    joins = [*self.policy.grown(group, self._view())]
    joins = [n for n in joins if n in self.live and n not in group.instances]
    members = [*group.instances, *joins]
    due = sum(r.left_tokens for r in group.requests)
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
    """Instances of no group and no call, those with the most slots first."""
    taken = {n for g in self._groups for n in g.instances}
    taken |= {*self._busy} | self._leaving | self._emptying
    return sorted(self.live - taken, key=lambda n: (self.used[n], n))

  def _stepped(self, entry: _OpenCall) -> None:
    group, steps = entry.group, entry.call.steps
    assert group is not None
    rows = {row.request: row for row in entry.call.rows}
    for request in [*group.requests]:
      row = rows.get(request.number)
      if row is not None:
        request.kept[row.master] = request.kept.get(row.master, 0) + steps
        self._use({row.master: steps})
        request.done += steps
        self._take(request, entry.tokens.get(request.number, []))
    self._tidy(group)

  def _take(self, request: ElasticRequest, tokens: Sequence[int]) -> None:
    """Adds confirmed tokens to an answer, which may end."""
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

  def _tidy(self, group: DecodeGroup) -> None:
    """Lets go of requests that ended, and of instances that hold nothing."""
    for request in [*group.requests]:
      if self.answers[request.number].ended:
        group.requests.remove(request)
        self.policy.ended(request)
        self._free(request)
    if not group.requests:
      self._groups = [g for g in self._groups if g is not group]
      self._emptying -= {*group.instances}
      return
    holders = {n for r in group.requests for n in r.kept}
    due = sum(r.left_tokens for r in group.requests)
    stays = [n for n in group.instances if n not in self._leaving]
    room = sum(self.slots - self.used[n] for n in stays)
    for n in [*group.instances]:
      if n in holders:
        continue
      gone = n in self._leaving | self._emptying
      spare = room - (0 if gone else self.slots - self.used[n])
      wide = len(group.requests) > self.policy.options.wide_rows * (
        len(group.instances) - 1
      )
      if gone or (self.policy.shrinks and spare >= due and not wide):
        group.instances.remove(n)
        self._emptying.discard(n)
        room = spare

  # -- moving

  def _empty_leaving(self) -> None:
    """Moves keys off instances that leave, or that a batch gives up."""
    for n in sorted((self._leaving | self._emptying) - {*self._busy}):
      group = next((g for g in self._groups if n in g.instances), None)
      if group is None:
        self._emptying.discard(n)
        if n in self._leaving and not self.used[n]:
          self._leaving.discard(n)
          self.live.discard(n)
          self.used[n] = self.slots
          self._note({"event": "release", "instance": n})
          self._out.append(Release(instance=n))
          self._refuse_waiting(f"instance {n} has left")
        continue
      if not self._rests(group):
        continue
      tokens = sum(r.kept.get(n, 0) for r in group.requests)
      if not tokens:
        self._tidy(group)
        continue
      due = sum(r.left_tokens for r in group.requests)
      out = self._leaving | self._emptying
      into = [m for m in group.instances if m not in out]
      room = sum(self.slots - self.used[m] for m in into)
      for m in self._idle() if n in self._leaving else []:
        if room >= tokens + due:
          break
        into.append(m)
        room += self.slots - self.used[m]
      if room < tokens:
        continue  # When answers have ended.
      group.instances += [m for m in into if m not in group.instances]
      free = [(m, self.slots - self.used[m]) for m in into]
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

  def _moved(self, entry: _OpenCall) -> None:
    group, source = entry.group, entry.call.members[0]
    assert group is not None
    requests = {r.number: r for r in group.requests}
    for target, number, tokens in entry.call.parts:
      kept = requests[number].kept
      kept[source] -= tokens
      kept[target] = kept.get(target, 0) + tokens
      self.used[source] -= tokens
      self.counts.moved_tokens += tokens
      if not kept[source]:
        del kept[source]
    one = entry.emptied
    if one is not None:
      group.instances.remove(source)
      if one.joins is not None:
        self._merge(group, one.joins)
        group = one.joins
    self._tidy(group)

  # -------------------------------------------------------------------------
  # Calls that end
  # -------------------------------------------------------------------------

  def _break(self, entry: _OpenCall, why: str) -> None:
    """Notes that a call can't be done; the others give it up."""
    if not entry.broken:
      entry.broken = why
      rest = entry.waiting & self.live
      self._out.append(
        Abandon(call=entry.call.number, members=tuple(sorted(rest)))
      )

  def _answered(self, entry: _OpenCall, instance: int) -> None:
    entry.waiting.discard(instance)
    if entry.waiting:
      return
    call = entry.call
    del self._open[call.number]
    for n in call.members:
      self._busy.pop(n, None)
    if entry.broken:
      self._undo(entry)
    elif call.kind == "read":
      self._was_read(entry)
    elif call.kind == "step":
      self._stepped(entry)
    else:
      self._moved(entry)
    self._forget_lost()

  def _undo(self, entry: _OpenCall) -> None:
    """As if a call had not begun, but for what its instances lost."""
    call, counts = entry.call, not entry.lost
    self._note({"event": "broken", "call": call.kind, "why": entry.broken})
    if entry.batch is not None:
      for request in entry.batch.requests:
        for n in call.members:
          request.kept.setdefault(n, 0)
        self._again(request, None, entry.broken, counts=counts)
      return
    group = entry.group
    assert group is not None
    requests = {r.number: r for r in group.requests}
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
      self._again(requests[number], group, entry.broken, counts=counts)
    self._tidy(group)

  def _forget_lost(self) -> None:
    """What lost instances held is read again."""
    for group in [*self._groups]:
      if not self._rests(group):
        continue  # When its call has ended.
      lost = [n for n in group.instances if n not in self.live]
      if not lost:
        continue
      for request in [*group.requests]:
        gone = {n: request.kept[n] for n in lost if request.kept.get(n)}
        if gone:
          each = (f"{held} tokens of instance {n}" for n, held in gone.items())
          why = f"lost {', '.join(each)}"
          self._again(request, group, why, counts=False)
      group.instances = [n for n in group.instances if n in self.live]
      self._tidy(group)
    if self.counts.lost:
      self._refuse_waiting("instances were lost")

  def _again(
    self,
    request: ElasticRequest,
    group: DecodeGroup | None,
    why: str,
    *,
    counts: bool,
  ) -> None:
    """Reads a request's text again, or ends it; it is in no group then."""
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
    left = answer.new_tokens - len(answer.tokens)
    request = ElasticRequest(
      number=answer.number,
      arrival_s=arrival_s,
      prompt_tokens=answer.text_tokens,
      new_tokens=min(left, self._reserve or left),
    )
    self._waiting.append(request)
    self._waiting.sort(key=lambda r: (r.arrival_s, r.number))
    self._refuse(request, why)

  def _refuse(self, request: ElasticRequest, why: str) -> None:
    """Ends a request that no instances could ever hold."""
    answer = self.answers[request.number]
    whole = dataclasses.replace(
      request, new_tokens=answer.new_tokens - len(answer.tokens), kept={}
    )
    count = len(self.live - self._leaving)
    refused = (
      self.policy.refused(whole, count) if count else "no instance is left"
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
    """Has a request's keys forgotten, wherever they are."""
    for n, tokens in request.kept.items():
      if n in self.live:
        self.used[n] -= tokens
      self._drop(n, request.number, 0)
    request.kept = {}

  def _drop(self, instance: int, request: int, first: int) -> None:
    if instance in self.live:
      self._out.append(
        DropKeys(instance=instance, request=request, first=first)
      )


def _parts(
  source: int,
  requests: Sequence[ElasticRequest],
  into: Sequence[tuple[int, int]],
) -> tuple[tuple[int, int, int], ...]:
  """(target, request, tokens) of all that an instance holds of requests."""
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
  """A master with slots for `count` tokens of each row; None if too few.

  Rows are dealt in equal parts as far as slots allow.
  """
  left, dealt, chosen = {**free}, dict.fromkeys(free, 0), []
  for _ in range(rows):
    able = [n for n in free if left[n] >= count]
    if not able:
      return None
    n = min(able, key=lambda m: (dealt[m], -left[m]))
    left[n] -= count
    dealt[n] += 1
    chosen.append(n)
  return chosen
