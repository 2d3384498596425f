"""Rounds of speculation: a draft, one call of the target, and acceptance.

Guarantees: see `verifiers`. A row's result depends on no other row. Rejected
tokens leave the cache as if they had never been read: by the cache's
`keep_first` or `keep`, or, where that is impossible (recurrent layers), by
`undo_call` and reading the accepted tokens again.
Cost: a call of the target for each round, which reads the cache once; with
recurrent layers a second one where some token was rejected. To keep a chain's
tokens moves none; of a tree only the accepted path's tokens move, in place.
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
from jaxtyping import Array, Bool, Float, Int

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
  TreeDrafter,
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
from ringjax.nn.sharding_context import CachedAttention
from ringjax.nn.weights.placed_layers import raise_fault
from ringjax.ops.ancestors import ancestor_matrix
from ringjax.parallel.compile_times import Compiling
from ringjax.parallel.joint_outcome import processes_of
from ringjax.parallel.programs import bounded
from ringjax.typing import Lengths

# Maximum tokens by which a row may be ahead of those shown to the caller.
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
  """Reads the last token and a draft, and keeps the accepted tokens.

  Args:
    model: Target model.
    attend: Cached attention over the shards of the target's cache.
    rule: Acceptance rule, a name of `VERIFIERS`.
    sampler: Sampler of the target, a pytree.
    cache: Cache of the target; donated.
    state: Decode state whose token was chosen and not read yet.
    draft: Drafted tokens of this round.
    left: Maximum new tokens of each row; 0: the row sits this round out.
    stops: Ids that end a row, see `decode.stop_ids`.
    length: Length of the whole context, for rotations.
  """
  batch, count = draft.tokens.shape
  target_cache: Any = cache
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
  finite = jnp.cumprod(tokens >= 0, 1, dtype=jnp.int32) > 0
  real, tokens = real & finite, jnp.maximum(tokens, 0)
  pos = state.pos[:, None] + depth
  state_before = (
    target_cache.call_state(count + 1) if target_cache.irreversible else None
  )
  tree = None if draft.parents is None else parents
  read = lambda cache, real: forward(
    model, attend, tokens, pos, real.astype(jnp.int32), cache, None, length,
    tree,
  )  # fmt: skip
  logits, target_cache = read(target_cache, real)
  nodes = Nodes(
    tokens, parents, real, pos, attend.everywhere(logits), draft.probs,
    state.seen,
  )  # fmt: skip
  outcome = concluded(VERIFIERS[rule](sampler, nodes), nodes, left, stops)
  if state_before is None:
    # Without drafted tokens there is only the root, which stays.
    if count and draft.parents is None:
      # The accepted tokens of a chain are its first ones: none moves.
      num_kept = jnp.sum(outcome.kept_nodes, 1, dtype=jnp.int32)
      target_cache = target_cache.keep_first(num_kept, count + 1)
    elif count:
      target_cache = target_cache.keep(outcome.kept_nodes)
  else:
    # The draft is a chain, and its first tokens stay.
    reread = lambda _, cache_after: read(
      cache_after.undo_call(state_before), outcome.kept_nodes
    )[1]
    # A loop of at most one step: a branch would copy the cache.
    times = jnp.any(outcome.kept_nodes != real).astype(jnp.int32)
    target_cache = lax.fori_loop(jnp.int32(0), times, reread, target_cache)
  last = jnp.maximum(outcome.count - 1, 0)[:, None]
  token = jnp.take_along_axis(outcome.new, last, 1)[:, 0]
  seen = state.seen
  if seen is not None:
    new_one_hot = jax.nn.one_hot(outcome.new, seen.shape[1], dtype=jnp.float32)
    new_one_hot = jnp.where(
      (index < outcome.count[:, None])[..., None], new_one_hot, 0
    )
    seen = seen | (jnp.sum(new_one_hot, 1) > 0)
  next_state = DecodeState(
    jnp.where(outcome.count > 0, token, state.token),
    state.pos + outcome.count,
    state.done | outcome.stopped,
    seen,
  )
  return attend.everywhere(next_state), attend.everywhere(outcome), target_cache


class SpeculationReport(NamedTuple):
  """Counts and costs of the speculation in a call.

  Fields:
    drafter: Drafter of the call.
    calls: Calls of the target, summed over the rows that took part.
    tokens: New tokens of all rows, without the first of each.
    drafted: Number of drafted tokens.
    accepted: Number of drafted tokens that were accepted.
    acceptance: Acceptance rate: the share of accepted tokens among the drafted
      ones whose predecessors were all accepted.
    predicted: Tokens per call that this rate and the drafts' lengths predict,
      (1 - a^(n + 1)) / (1 - a).
    by_position: For each position in a chain, the number of tokens offered
      after accepted ones and how many of these were accepted, int [n, 2].
    rounds: Number of rounds with drafts in this call.
    steps: Number of steps without drafts in this call.
    cost: Extra time of drafting over plain steps for the same tokens, as a
      share of the time of these steps; below 0 where it saved time. Measured
      over all calls of a session with this drafter, without compilation and
      without a draft model's reading of the prompt. 0 with adapt=False, which
      times no plain step.
    why: Reason why the last step had a draft, or none.
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
    """Mean number of new tokens of a row per call of the target."""
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
    """Counts a round: drafted and new tokens of the rows that took part.

    If m of a chain's n drafted tokens stayed, m + 1 of them were checked.
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
    """Makes the report of a call.

    Args:
      paces: Measurements that chose the drafts' lengths.
      rounds: Number of its rounds before this call.
      steps: Number of its steps without drafts before this call.
    """
    a = self.acceptance
    expected = [expected_tokens(a, n) for n in range(len(self._predicted))]
    predicted = float(np.dot(expected, self._predicted)) / max(self.calls, 1)
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
  """Stop rules that end rows early, and the padding id; see `generate`."""

  ids: Int[Array, " n"]
  pad_id: int
  watches: bool

  def told(
    self, tokens: Int[np.ndarray, " B"], ended: Bool[np.ndarray, " B"]
  ) -> Bool[np.ndarray, " B"]:
    """Shows tokens to the caller; returns the rows it ends, bool [B]."""
    ...


def check_speculation(
  drafter: Drafter,
  session: Session,
  sampler: Callable[..., Any],
  watches: bool = False,
) -> None:
  """Refuses a drafter that does not fit the session's cache or the sampler.

  Raises:
    OptionError: If the drafter refuses the model; a tree meets a cache that
      cannot remove single tokens or marks tokens; rows may end by something
      else than ids (`watches`) with a cache of sums over queries; a draft has
      more tokens than ring buffers can take back; or the sampler does not
      state its distribution.
  """
  cache = session.cache
  drafter.check(session.model)
  if isinstance(drafter, TreeDrafter):
    drafter.check_tree(session.model)
  marks = cache.kind.policy is not None and cache.kind.policy.marks
  if drafter.tree and (cache.irreversible or marks):
    cache_text = (
      "recurrent layers" if cache.recurrent else f"a cache of {cache.kind}"
    )
    raise OptionError(
      "speculate",
      f"a tree of drafted tokens, for a model with {cache_text}",
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
  slack = cache.kind.layout.slack
  if drafter.nodes >= slack:
    raise OptionError(
      "speculate",
      f"drafts of {drafter.nodes} tokens",
      f"fewer than the {slack} that windowed layers can take back",
      "pass a smaller count, or a cache kind with more slack",
    )
  states_law = isinstance(sampler, Greedy | Sample)
  if drafter.verify != "match" and not states_law:
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
  pos: Int[np.ndarray, " B"],
  ending: Ending,
  total: np.ndarray,
  count: int,
  drafter: Drafter,
  texts: Sequence[Int[np.ndarray, " _"]],
  marked: NotFiniteRows,
  undrafted: NotFiniteRows,
) -> tuple[Int[np.ndarray, "B _"], Int[np.ndarray, " B"], SpeculationReport]:
  """Decodes in rounds until all rows have ended; see `generate`.

  Args:
    model: Target model.
    session: Session of the target, which has read the texts.
    sampler: Sampler that chooses tokens.
    logits: Logits after the texts, [B, V].
    pos: Position of the first new token, int [B].
    ending: Stop rules that end rows early, and the padding id.
    total: Length of the context, for rotations.
    count: Maximum number of new tokens in a row.
    drafter: Drafter of the call.
    texts: Tokens that the session has read in each row, earlier turns included;
      the prompts alone after contexts. int32 [T].
    marked: Collects rows whose logits are not finite, which then end.
    undrafted: Collects rows for which the draft's logits are not finite, which
      continue without drafts.

  Returns:
    New tokens int32 [B, count], the number of them in each row, and the report.
  """
  attend = CachedAttention(mesh=session.mesh, axis=session.axis)
  batch, length = session.batch, jnp.asarray(total)
  needs_seen = getattr(sampler, "needs_seen", False)
  seen, sampler = (
    jnp.array(session.seen) if needs_seen else None,
    traced(sampler),
  )
  rows = _Rows(session, ending, pos, count, marked)
  target = Target(
    model, session, sampler, texts, drafter.verify != "match", count
  )
  drafting: Drafting = drafter.begin(target)
  tally, paces = _DraftTally(drafter, drafter.nodes), _paces(session, drafter)
  counts_before = paces.rounds, paces.steps
  compiling = Compiling()

  def clock() -> tuple[float, float]:
    """Current time, and seconds of compilation so far."""
    return time.monotonic(), compiling.seconds()

  def since(began: tuple[float, float]) -> float | None:
    """Seconds since `began`; None if something was compiled meanwhile."""
    time_now, compiled = clock()
    return time_now - began[0] if compiled == began[1] else None

  def plain(
    state: DecodeState,
    draft_limits: np.ndarray,
    steps: int,
    begun: tuple[float, float],
  ) -> tuple[DecodeState, np.ndarray]:
    """Runs steps without drafts, each dispatched before the last token is read.

    `begun` is the start time of the first one, which includes the empty draft.
    """
    ended = decode.ends(attend, state.done, ~rows.live)
    state, added = state._replace(done=ended), np.zeros(batch, int)
    no_drafts, began = np.zeros(batch, int), begun
    for n in range(steps + 1):
      next_state = None
      if n < steps:
        next_state, session.cache = decode.step(
          model, attend, sampler, session.cache, state, ending.ids, length
        )
      if n:
        token, rows_done = jax.device_get((state.token, state.done))
        raise_fault(model.stack.faults)
        counts = rows.live.astype(int)
        ended_by_caller = rows.add(token[:, None], counts, rows_done)
        paces.add(draft_limits, no_drafts, counts, since(began))
        tally.add(no_drafts, counts)
        began, added = clock(), added + counts
        if next_state is not None and ended_by_caller.any():
          ended = decode.ends(attend, next_state.done, ~rows.live)
          next_state = next_state._replace(done=ended)
      if next_state is None or not rows.live.any():
        break
      state = next_state
    return state, added

  with compiling, session.running("decoding"):
    state = decode.first(
      sampler, logits, jnp.asarray(pos.astype(np.int32)), seen, ending.ids
    )
    token, rows_done = jax.device_get((state.token, state.done))
    raise_fault(model.stack.faults)
    rows.add(token[:, None], np.ones(batch, int), rows_done)
    # Includes the tokens by which a row may be ahead of those shown.
    slack = drafter.nodes + ending.watches * (AHEAD + drafter.nodes + 1)
    session.keep_slack(slack)
    budget, used = session.cache.steps(), np.zeros(batch, int)
    while rows.live.any():
      remaining = np.minimum(rows.remaining(), budget - used)
      if not remaining.any():
        # No live row has room left; the cache of ended rows is not flushed.
        session.make_room(rows.live)
        session.keep_slack(slack)
        budget, used = session.cache.steps(), np.zeros(batch, int)
        continue
      draft_limits = np.minimum(
        paces.draft_lengths(), np.maximum(remaining - 1, 0)
      )
      draft_limits[[*undrafted.at]] = 0
      began, steps = clock(), max(1, paces.pause)
      draft = _nothing(batch)
      if draft_limits.any():
        draft, steps = drafting.draft(rows.fresh(), state, draft_limits), 1
      if not draft.tokens.shape[1] and remaining[rows.live].all():
        steps = min(steps, int(remaining[rows.live].min()))
        state, counts = plain(state, draft_limits, steps, began)
        used += counts
        continue
      if drafter.tree:
        room = draft.tokens.shape[1] + 1
        session.cache = session.cache.with_room(room)
      state, outcome, session.cache = verify(
        model, attend, drafter.verify, sampler, session.cache, state, draft,
        jnp.asarray(remaining, jnp.int32), ending.ids, length,
      )  # fmt: skip
      new, counts, rows_done, offered = jax.device_get(
        (outcome.new, outcome.count, state.done, draft.tokens)
      )
      raise_fault(model.stack.faults)
      drafted = np.minimum(np.asarray(draft.count), draft_limits)
      fault = offered.min(1, initial=0, where=offered == NOT_FINITE)
      undrafted.note(fault, pos + rows.sizes, drafted > 0)
      paces.add(draft_limits, drafted, counts, since(began))
      tally.add(drafted, counts)
      used += counts
      if rows.add(new, counts, rows_done).any():
        ended = decode.ends(attend, state.done, ~rows.live)
        state = state._replace(done=ended)
    session.keep_slack(0)
  return rows.out, rows.sizes, tally.report(paces, *counts_before)


def _paces(session: Session, drafter: Drafter) -> Paces:
  """The session's measurements for this drafter, which choose lengths."""
  measured = session.paces
  if measured is None or measured[0] != drafter:
    processes = max(1, len(processes_of(session.mesh)))
    paces = Paces(drafter, session.batch, processes=processes)
    measured = session.paces = drafter, paces
  return measured[1]


def _nothing(batch: int) -> Draft:
  return Draft(np.zeros((batch, 0), np.int32), np.zeros(batch, np.int32))


class _Rows:
  """New tokens of all rows, on the host; takes back tokens after an end."""

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
    # Number of new tokens of each row, in the result.
    self.sizes = np.zeros(batch, np.int32)
    self.live = np.ones(batch, bool)
    # Columns shown to the caller, and tokens of each row given to the drafter.
    self._shown, self._known = 0, np.zeros(batch, int)

  def remaining(self) -> np.ndarray:
    """Maximum tokens still to come per row, int [B]; 0 for a waiting row."""
    remaining = np.where(self.live, self._count - self.sizes, 0)
    if self._ending.watches:
      remaining = np.where(self.sizes - self._shown > AHEAD, 0, remaining)
    return remaining

  def fresh(self) -> list[np.ndarray]:
    """New tokens of each row since the last call."""
    new_tokens = [
      self.out[row, start:stop]
      for row, (start, stop) in enumerate(
        zip(self._known, self.sizes, strict=True)
      )
    ]
    self._known = self.sizes.copy()
    return new_tokens

  def add(
    self, new: np.ndarray, count: np.ndarray, stopped: np.ndarray
  ) -> np.ndarray:
    """Adds new tokens; returns the rows that the caller then ends, bool [B]."""
    last = new[np.arange(len(count)), np.maximum(count - 1, 0)]
    at = self._pos + self.sizes + count - 1
    not_finite = self._marked.note(last, at, count > 0)
    count, stopped = count - not_finite, stopped | not_finite
    for n in range(int(count.max())):
      rows = n < count
      at = self.sizes[rows] + n
      self.out[rows, at] = new[rows, n]
      token = np.where(rows, new[:, n], 0)
      self._session.say(token, self._pos + self.sizes + n, rows)
    self.sizes += count.astype(np.int32)
    self.live &= ~stopped & (self.sizes < self._count)
    ended_by_caller = np.zeros(len(count), bool)
    if self._ending.watches:
      sizes_before = self.sizes.copy()
      ended_by_caller = self._show()
      shortened = (sizes_before > self.sizes).any()
      if ended_by_caller.any() and (
        shortened or not self._session.cache.recurrent
      ):
        # The last token shown becomes the last one chosen.
        end = self._pos + self.sizes - 1
        last = self.out[np.arange(len(end)), self.sizes - 1]
        self._session.take_back(ended_by_caller, end)
        self._session.say(last, end, ended_by_caller)
    return ended_by_caller

  def _show(self) -> np.ndarray:
    """Shows the columns that are complete: each row has them or has ended."""
    ended_by_caller = np.zeros(len(self.sizes), bool)
    while True:
      over = ~self.live & (self.sizes <= self._shown)
      ready = over | (self.sizes > self._shown)
      if not ready.all() or over.all():
        return ended_by_caller
      column = self.out[:, self._shown]
      ends = self._ending.told(column, over) & ~over
      self._shown += 1
      for row in np.flatnonzero(ends):
        self.out[row, self._shown :] = self._ending.pad_id
        self.sizes[row], self.live[row] = self._shown, False
        ended_by_caller[row] = True
