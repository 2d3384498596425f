"""Rounds of speculation: a draft, one call of the target, what stays of it.

Guarantees: see `verifiers`. A row's result depends on no other row. What was
rejected leaves the cache as if it had never been read: by the cache's `keep`,
or, where it can't, of recurrent layers for instance, by going back to before
the call and reading what stays.
Cost: a call of the target for each round, which reads the cache once; behind
recurrent layers a second one where some token was rejected.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ringjax.errors import OptionError
from ringjax.infer import decode
from ringjax.infer.decode import DecodeState
from ringjax.infer.finite import NOT_FINITE, NotFiniteRows
from ringjax.infer.sampling import Greedy, Sample, traced
from ringjax.infer.session import Session
from ringjax.infer.speculate.drafter import (
  Draft,
  Drafter,
  Drafting,
  Target,
  alike,
)
from ringjax.infer.speculate.paces import Paces, expected_tokens
from ringjax.infer.speculate.verifiers import (
  VERIFIERS,
  Nodes,
  Round,
  concluded,
)
from ringjax.kv.base import CallCache
from ringjax.models.transformer import Transformer, forward
from ringjax.nn.placed import raise_fault
from ringjax.nn.sharding_context import CachedAttention
from ringjax.ops.ancestors import ancestor_matrix
from ringjax.parallel.compile_times import Compiling
from ringjax.parallel.programs import bounded
from ringjax.typing import Lengths

# How many tokens a row may be ahead of what the caller has seen.
AHEAD = 32


@bounded
@functools.partial(jax.jit, static_argnums=(1, 2), donate_argnums=(4,))
def verify(
  model: Transformer,
  attend: CachedAttention,
  rule: str,
  sampler: Callable[..., Any],
  cache: CallCache,
  state: DecodeState,
  draft: Draft,
  left: Int[Array, " B"],
  stops: Int[Array, " n"],
  length: Lengths,
) -> tuple[DecodeState, Round, Any]:
  """Reads the last token and a draft, and keeps what is right.

  Args:
    model: the target.
    attend: over which shards its cache is.
    rule: one of `VERIFIERS`.
    sampler: a pytree.
    cache: the target's.
    state: whose token was chosen and not read.
    draft: of this round.
    left: tokens of each row that may come; 0: the row sits this round out.
    stops: see `decode.stop_ids`.
    length: of the whole context.
  """
  batch, count = draft.tokens.shape
  held: Any = cache
  index = jnp.arange(count + 1, dtype=jnp.int32)[None]
  if draft.parents is None:
    parents = jnp.broadcast_to(index - 1, (batch, count + 1))
    depth = index
  else:
    root = jnp.full((batch, 1), -1, jnp.int32)
    parents = jnp.concatenate([root, draft.parents + 1], 1)
    depth = jnp.sum(ancestor_matrix(parents), 2, dtype=jnp.int32) - 1
  tokens = jnp.concatenate([state.token[:, None], draft.tokens], 1)
  live = ~state.done & (left > 0)
  real = live[:, None] & (index <= draft.count[:, None])
  # A draft ends where its model's logits are not finite.
  sound = jnp.cumprod(tokens >= 0, 1, dtype=jnp.int32) > 0
  real, tokens = real & sound, jnp.maximum(tokens, 0)
  pos = state.pos[:, None] + depth
  before = held.snapshot() if held.irreversible else None
  tree = None if draft.parents is None else parents
  read = lambda cache, real: forward(
    model, attend, tokens, pos, real.astype(jnp.int32), cache, None, length,
    tree,
  )  # fmt: skip
  logits, held = read(held, real)
  nodes = Nodes(
    tokens, parents, real, pos, attend.everywhere(logits), draft.probs,
    state.seen,
  )  # fmt: skip
  found = concluded(VERIFIERS[rule](sampler, nodes), nodes, left, stops)
  if before is None:
    # A root alone stays where there is one.
    held = held.keep(found.kept) if count else held
  else:
    # A chain, of which the first tokens stay.
    again = lambda after: read(after.restore(before), found.kept)[1]
    held = lax.cond(jnp.all(found.kept == real), lambda x: x, again, held)
  last = jnp.maximum(found.count - 1, 0)[:, None]
  token = jnp.take_along_axis(found.new, last, 1)[:, 0]
  seen = state.seen
  if seen is not None:
    came = jax.nn.one_hot(found.new, seen.shape[1], dtype=jnp.float32)
    came = jnp.where((index < found.count[:, None])[..., None], came, 0)
    seen = seen | (jnp.sum(came, 1) > 0)
  after = DecodeState(
    jnp.where(found.count > 0, token, state.token),
    state.pos + found.count,
    state.done | found.stopped,
    seen,
  )
  return attend.everywhere(after), attend.everywhere(found), held


class SpeculationReport(NamedTuple):
  """What speculation did in a call.

  Fields:
    drafter: what drafted.
    calls: of the target, over rows that were not over.
    tokens: new ones of all rows, without the first of each.
    drafted: tokens that were offered.
    accepted: those of them that stayed.
    acceptance: the share of drafted tokens that stayed, of those that were
      behind tokens which stayed.
    predicted: tokens a call by that share and the drafts' lengths,
      (1 - a^(n + 1)) / (1 - a).
    by_position: for each place in a draft how many were offered behind right
      ones and how many of these stayed, int [n, 2]; of chains.
    rounds: rounds with drafts, of this call.
    steps: steps without.
    cost: what drafting cost more than plain steps for the same tokens, as a
      share of what these would have taken in all; below 0 where it saved time.
      Of all calls of a session with this drafter. Without what is compiled, and
      without a draft model's reading of the prompt. 0 with adapt=False, which
      times no plain step.
    why: why the last step had a draft, or none.
  """

  drafter: Drafter
  calls: int
  tokens: int
  drafted: int
  accepted: int
  acceptance: float
  predicted: float
  by_position: np.ndarray
  rounds: int = 0
  steps: int = 0
  cost: float = 0.0
  why: str = ""

  @property
  def tokens_per_call(self) -> float:
    """New tokens of a row for each call of the target."""
    return self.tokens / max(self.calls, 1)


class _DraftTally:
  """Counts for the report, and for the choice of lengths."""

  def __init__(self, drafter: Any, nodes: int):
    self._drafter, self._depth = drafter, drafter.depth
    self.calls = self.tokens = self.drafted = self.accepted = 0
    self._offered = np.zeros(nodes + 1, int)
    self._stayed = np.zeros(nodes + 1, int)
    self._predicted = np.zeros(nodes + 1, int)

  def add(self, drafted: np.ndarray, count: np.ndarray) -> None:
    """Counts a round: drafted tokens and new ones of the rows that took part.

    Of a chain's n drafted tokens of which m stayed, m + 1 were looked at.
    """
    live = count > 0
    self.calls += int(live.sum())
    self.tokens += int(count.sum())
    self.drafted += int(drafted[live].sum())
    stayed = np.minimum(count - 1, drafted)[live]
    self.accepted += int(stayed.sum())
    for n, m in zip(
      np.minimum(drafted[live], self._depth), stayed, strict=True
    ):
      self._offered[: min(n, m + 1)] += 1
      self._stayed[:m] += 1
      self._predicted[n] += 1

  @property
  def acceptance(self) -> float:
    return float(self._stayed.sum() / max(self._offered.sum(), 1))

  def report(self, paces: Paces, rounds: int, steps: int) -> SpeculationReport:
    """What came of it.

    Args:
      paces: which chose the lengths.
      rounds: its rounds before this call.
      steps: its steps without drafts before this call.
    """
    a = self.acceptance
    each = [expected_tokens(a, n) for n in range(len(self._predicted))]
    predicted = float(np.dot(each, self._predicted)) / max(self.calls, 1)
    return SpeculationReport(
      self._drafter,
      self.calls,
      self.tokens,
      self.drafted,
      self.accepted,
      a,
      predicted,
      np.stack([self._offered, self._stayed], 1)[:-1],
      paces.rounds - rounds,
      paces.steps - steps,
      paces.cost_s / paces.plain_s if paces.plain_s else 0.0,
      paces.why,
    )


@runtime_checkable
class Ending(Protocol):
  """What ends rows early, and what fills them up; see `generate`."""

  ids: Int[Array, " n"]
  pad_id: int
  watches: bool

  def told(self, tokens: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Which rows the caller ends at these tokens, bool [B]."""
    ...


def check_speculation(
  drafter: Drafter,
  session: Session,
  sampler: Callable[..., Any],
  watches: bool = False,
) -> None:
  """Refuses a drafter that does not go with a cache or a sampler.

  Raises:
    OptionError: what the drafter itself refuses; a tree, and a cache that can
      only go back to before a call or that marks tokens; sums over queries,
      where something else than ids ends rows (`watches`); more tokens than
      ring buffers can take back; a sampler that does not state its law.
  """
  cache = session.cache
  drafter.check(session.model)
  marks = cache.kind.policy is not None and cache.kind.policy.marks
  if drafter.tree and (cache.irreversible or marks):
    what = "recurrent layers" if cache.recurrent else f"a cache of {cache.kind}"
    raise OptionError(
      "speculate",
      f"a tree of drafted tokens, for a model with {what}",
      "a chain: states, sums of queries and marks of tokens are of one text",
      "leave widths= out",
    )
  if watches and cache.irreversible and not cache.recurrent:
    raise OptionError(
      "speculate",
      f"drafts beside stop strings or stream, with a cache of {cache.kind}",
      "stop ids alone: sums over queries do not go back behind a row's end",
      "leave speculate= out, or stop=, or take another cache_kind",
    )
  slack = cache.kind.slack
  if drafter.nodes >= slack:
    raise OptionError(
      "speculate",
      f"drafts of {drafter.nodes} tokens",
      f"fewer than the {slack} that windowed layers can take back",
      "pass a smaller count, or a cache kind with more slack",
    )
  known = isinstance(sampler, Greedy | Sample)
  if drafter.verify != "match" and not known:
    raise OptionError(
      "verify",
      f"{drafter.verify!r} with a sampler of type {type(sampler).__name__}",
      "one that states its law: Greedy or Sample",
      "pass verify='match', which asks a sampler for tokens only",
    )


def speculated(
  model: Transformer,
  session: Session,
  sampler: Callable[..., Any],
  logits: Float[Array, "B V"],
  pos: np.ndarray,
  ending: Ending,
  total: np.ndarray,
  count: int,
  drafter: Drafter,
  texts: Sequence[np.ndarray],
  marked: NotFiniteRows,
  undrafted: NotFiniteRows,
) -> tuple[np.ndarray, np.ndarray, SpeculationReport]:
  """Rounds until all rows have ended; see `generate`.

  Args:
    model: the target.
    session: which has read the texts.
    sampler: which chooses tokens.
    logits: [B, V] behind the texts.
    pos: int [B], the position of the first new token.
    ending: what ends rows early, and what fills them up.
    total: length of the context, for rotations.
    count: new tokens of a row at most.
    drafter: a `Drafter`.
    texts: int32 [T], the prompt of each row.
    marked: takes rows whose logits are not finite, which are then over.
    undrafted: takes rows for which the draft's logits are not finite, which go
      on without drafts.

  Returns:
    tokens int32 [B, count], how many of each row there are, and the report.
  """
  attend = CachedAttention(mesh=session.mesh, axis=session.axis)
  batch, length = session.batch, jnp.asarray(total)
  needs = getattr(sampler, "needs_seen", False)
  seen, sampler = jnp.array(session.seen) if needs else None, traced(sampler)
  rows = _Rows(session, ending, pos, count, marked)
  target = Target(
    model, session, sampler, texts, drafter.verify != "match", count
  )
  drafting: Drafting = drafter.begin(target)
  tally, paces = _DraftTally(drafter, drafter.nodes), _paces(session, drafter)
  before = paces.rounds, paces.steps
  compiling = Compiling()

  def clock() -> tuple[float, float]:
    """The time, and seconds of compiling before it."""
    return time.monotonic(), compiling.seconds()

  def since(began: tuple[float, float]) -> float | None:
    """Seconds since then; None where something was compiled."""
    now, compiled = clock()
    return now - began[0] if compiled == began[1] else None

  def plain(
    state: DecodeState, most: np.ndarray, steps: int, begun: tuple[float, float]
  ) -> tuple[DecodeState, np.ndarray]:
    """Steps without drafts; each is on its way before the last one's token.

    `begun` is when the first one began, with the draft that was empty.
    """
    ended = decode.ends(attend, state.done, ~rows.live)
    state, taken = state._replace(done=ended), np.zeros(batch, int)
    none, began = np.zeros(batch, int), begun
    for n in range(steps + 1):
      after = None
      if n < steps:
        after, session.cache = decode.step(
          model, attend, sampler, session.cache, state, ending.ids, length
        )
      if n:
        token, done = jax.device_get((state.token, state.done))
        raise_fault(model.stack.faults)
        came = rows.live.astype(int)
        told = rows.add(token[:, None], came, done)
        paces.add(most, none, came, since(began))
        tally.add(none, came)
        began, taken = clock(), taken + came
        if after is not None and told.any():
          ended = decode.ends(attend, after.done, ~rows.live)
          after = after._replace(done=ended)
      if after is None or not rows.live.any():
        break
      state = after
    return state, taken

  with compiling, session.running("decoding"):
    state = decode.first(
      sampler, logits, jnp.asarray(pos.astype(np.int32)), seen, ending.ids
    )
    token, done = jax.device_get((state.token, state.done))
    raise_fault(model.stack.faults)
    rows.add(token[:, None], np.ones(batch, int), done)
    # Also what a row may be ahead of what the caller has seen.
    slack = drafter.nodes + ending.watches * (AHEAD + drafter.nodes + 1)
    session.keep_slack(slack)
    budget, taken = session.cache.steps(), np.zeros(batch, int)
    while rows.live.any():
      left = np.minimum(rows.left(), budget - taken)
      if not left.any():
        # No row that goes on has room left; those that are over stay.
        session.cache = session.cache.flush(rows.live)
        session.keep_slack(slack)
        budget, taken = session.cache.steps(), np.zeros(batch, int)
        continue
      most = np.minimum(paces.most(), np.maximum(left - 1, 0))
      most[[*undrafted.at]] = 0
      began, steps = clock(), max(1, paces.pause)
      draft = _nothing(batch)
      if most.any():
        draft, steps = drafting.draft(rows.fresh(), state, most), 1
      if not draft.tokens.shape[1] and left[rows.live].all():
        steps = min(steps, int(left[rows.live].min()))
        state, came = plain(state, most, steps, began)
        taken += came
        continue
      if drafter.tree:
        room = draft.tokens.shape[1] + 1
        session.cache = session.cache.with_room(room)
      state, found, session.cache = verify(
        model, attend, drafter.verify, sampler, session.cache, state, draft,
        jnp.asarray(left, jnp.int32), ending.ids, length,
      )  # fmt: skip
      new, came, done, offered = jax.device_get(
        (found.new, found.count, state.done, draft.tokens)
      )
      raise_fault(model.stack.faults)
      drafted = np.minimum(np.asarray(draft.count), most)
      least = offered.min(1, initial=0, where=offered == NOT_FINITE)
      undrafted.note(least, pos + rows.sizes, drafted > 0)
      paces.add(most, drafted, came, since(began))
      tally.add(drafted, came)
      taken += came
      if rows.add(new, came, done).any():
        ended = decode.ends(attend, state.done, ~rows.live)
        state = state._replace(done=ended)
    session.keep_slack(0)
  return rows.out, rows.sizes, tally.report(paces, *before)


def _paces(session: Session, drafter: Drafter) -> Paces:
  """What chooses lengths: what a session's last call with it has measured."""
  before = session.paces
  if before is None or not alike(before[0], drafter):
    before = session.paces = drafter, Paces(drafter, session.batch)
  return before[1]


def _nothing(batch: int) -> Draft:
  return Draft(np.zeros((batch, 0), np.int32), np.zeros(batch, np.int32))


class _Rows:
  """New tokens of all rows, on the host; also takes back what is too many."""

  def __init__(
    self,
    session: Any,
    ending: Any,
    pos: np.ndarray,
    count: int,
    marked: NotFiniteRows,
  ):
    self._session, self._ending, self._pos = session, ending, pos
    self._marked = marked
    self._count = count
    batch = len(pos)
    self.out = np.full((batch, count), ending.pad_id, np.int32)
    # Tokens of each row; of those that are over how many the result has.
    self.sizes = np.zeros(batch, np.int32)
    self.live = np.ones(batch, bool)
    # Columns that were shown, and tokens that the drafter knows.
    self._shown, self._known = 0, np.zeros(batch, int)

  def left(self) -> np.ndarray:
    """How many tokens of each row may come, int [B]; 0 for one that waits."""
    left = np.where(self.live, self._count - self.sizes, 0)
    if self._ending.watches:
      left = np.where(self.sizes - self._shown > AHEAD, 0, left)
    return left

  def fresh(self) -> list[np.ndarray]:
    """Of each row the tokens since the last call."""
    found = [
      self.out[row, known:size]
      for row, (known, size) in enumerate(
        zip(self._known, self.sizes, strict=True)
      )
    ]
    self._known = self.sizes.copy()
    return found

  def add(
    self, new: np.ndarray, count: np.ndarray, done: np.ndarray
  ) -> np.ndarray:
    """Takes new tokens; bool [B], which rows the caller ends by them."""
    last = new[np.arange(len(count)), np.maximum(count - 1, 0)]
    at = self._pos + self.sizes + count - 1
    none = self._marked.note(last, at, count > 0)
    count, done = count - none, done | none
    for n in range(int(count.max())):
      rows = n < count
      at = self.sizes[rows] + n
      self.out[rows, at] = new[rows, n]
      token = np.where(rows, new[:, n], 0)
      self._session.say(token, self._pos + self.sizes + n, rows)
    self.sizes += count.astype(np.int32)
    self.live &= ~done & (self.sizes < self._count)
    told = np.zeros(len(count), bool)
    if self._ending.watches:
      before = self.sizes.copy()
      told = self._show()
      ahead = (before > self.sizes).any()
      if told.any() and (ahead or not self._session.cache.recurrent):
        # As if the last token had been the last that was chosen.
        end = self._pos + self.sizes - 1
        last = self.out[np.arange(len(end)), self.sizes - 1]
        self._session.take_back(told, end)
        self._session.say(last, end, told)
    return told

  def _show(self) -> np.ndarray:
    """Shows columns that all rows have, or are over before."""
    told = np.zeros(len(self.sizes), bool)
    while True:
      over = ~self.live & (self.sizes <= self._shown)
      there = over | (self.sizes > self._shown)
      if not there.all() or over.all():
        return told
      column = self.out[:, self._shown]
      ends = self._ending.told(column, over) & ~over
      self._shown += 1
      for row in np.flatnonzero(ends):
        self.out[row, self._shown :] = self._ending.pad_id
        self.sizes[row], self.live[row] = self._shown, False
        told[row] = True
