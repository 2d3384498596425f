"""Beam search: the likeliest continuations of a prompt, k at a time.

Guarantees: the search of transformers' `generate(num_beams=k, do_sample=False,
early_stopping=False)`. In each step all tokens behind all k hypotheses are
ranked by the sum of log-probabilities. Of the first k of them, those that end
(by a stop id, a stop text, or the length) are set aside with a score, the sum
divided by tokens ** length_penalty, if it is among the k best. The first k that
do not end go on. The search is over at the length, or when k are set aside and
the best that goes on has no better score than the worst of them, were it as
long as it is now. Equal sums are ranked by hypothesis, then by token.
Cost: the host knows a step's candidates before it plans the next one. A step is
k rows of a call; forks share whole pages and copy one that is filled in part.

Log-probabilities, also those of the answers, are those behind the bias, the
mask and the penalties of a request; their probabilities sum to 1 (transformers
with `renormalize_logits=True`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringjax.infer.stopping import Watch
from ringjax.serve.request import Answer, Request, TokenLogprobs
from ringjax.serve.scheduler import Scheduler, ServedRow


@dataclasses.dataclass(eq=False, kw_only=True)
class _Beam:
  """A hypothesis that goes on.

  Attributes:
    answer: what it says; none of its lists is changed.
    watch: of its text, or None.
    row: that computes what follows.
  """

  answer: Answer
  watch: Watch | None
  row: ServedRow


class BeamSearch:
  """The hypotheses of one request, and the rows that continue them.

  Attributes:
    ended: whether no better one is to be expected.
  """

  def __init__(
    self,
    request: Request,
    rows: list[ServedRow],
    scheduler: Scheduler,
    watch: Watch | None,
  ):
    """Before the first token.

    Args:
      request: with `beams`.
      rows: a team of as many; may be filled until the first `offer`. Its first
        row always has a hypothesis.
      scheduler: of the rows.
      watch: of an empty text, or None without a tokenizer.
    """
    self.ended = False
    self._request, self._rows, self._scheduler = request, rows, scheduler
    self._width = request.beams or 1
    self._watch = watch
    self._running: list[_Beam] | None = None
    self._found: list[Answer] = []
    self._offers: dict[ServedRow, tuple[np.ndarray, np.ndarray]] = {}

  def offer(
    self, row: ServedRow, tokens: np.ndarray, logprobs: np.ndarray
  ) -> bool:
    """Takes the likeliest next tokens of a row; whether all rows' are there.

    Then all hypotheses have one token more, and rows are where they go on.

    Args:
      row: one that has a hypothesis.
      tokens: int32 [n], the likeliest tokens.
      logprobs: float32 [n], theirs; -inf of those that may not come.
    """
    if self._running is None:
      self._running = [_Beam(answer=Answer(), watch=self._watch, row=row)]
    self._offers[row] = tokens, logprobs
    if len(self._offers) < len(self._running):
      return False
    self._running = self._advanced(self._running)
    self._offers.clear()
    return True

  def _advanced(self, running: list[_Beam]) -> list[_Beam]:
    """The hypotheses that go on, best first; sets aside those that end."""
    offers = [self._offers[beam.row] for beam in running]
    ranked = sorted(
      (-beam.answer.total_logprob - float(x), n, int(token))
      for n, (beam, (tokens, logprobs)) in enumerate(
        zip(running, offers, strict=True)
      )
      for token, x in zip(tokens, logprobs, strict=True)
      if x > -np.inf
    )
    many = len(running[0].answer.tokens) + 1
    full = many == self._request.max_new_tokens
    picked: list[tuple[int, Answer, Watch | None]] = []
    for rank, (_, n, token) in enumerate(ranked):
      if len(picked) == self._width or (full and rank == self._width):
        break
      answer, watch = self._grown(running[n], *offers[n], token)
      if answer.finish is None and not full:
        picked.append((n, answer, watch))
      elif rank < self._width:
        if answer.finish is None:
          answer.finish = "length"
          answer.text += "" if watch is None else watch.flush()
        self._found.append(answer)
    self._found.sort(key=self._score, reverse=True)
    del self._found[self._width :]
    self.ended = not picked or (
      len(self._found) == self._width
      and self._score(picked[0][1]) <= self._score(self._found[-1])
    )
    return [] if self.ended else self._seated(running, picked)

  def _grown(
    self, beam: _Beam, tokens: np.ndarray, logprobs: np.ndarray, token: int
  ) -> tuple[Answer, Watch | None]:
    """A hypothesis with one token more, which may have ended it."""
    before, request = beam.answer, self._request
    own = float(logprobs[np.flatnonzero(tokens == token)[0]])
    answer = Answer(
      tokens=[*before.tokens, token],
      text=before.text,
      logprobs=before.logprobs,
      total_logprob=before.total_logprob + own,
    )
    if request.logprobs is not None:
      pairs = list(zip(tokens, logprobs, strict=True))[: request.logprobs]
      top = tuple((int(i), float(x)) for i, x in pairs)
      one = TokenLogprobs(token=token, logprob=own, top=top)
      answer.logprobs = [*before.logprobs, one]
    watch = None
    if beam.watch is not None:
      watch = beam.watch.copy()
      answer.text += watch.feed(token)
      answer.stopped = watch.stopped
    elif token in request.stops.ids:
      answer.stopped = token
    if answer.stopped is not None:
      answer.finish = "stop"
    return answer, watch

  def _seated(
    self,
    running: list[_Beam],
    picked: Sequence[tuple[int, Answer, Watch | None]],
  ) -> list[_Beam]:
    """Gives rows to hypotheses: the first behind one keeps its row, others
    are forks."""
    kept = {running[n].row for n, _, _ in picked}
    free = [row for row in self._rows if row not in kept]
    made = []
    for n, answer, watch in picked:
      row = source = running[n].row
      if source in kept:
        kept.remove(source)
      else:
        row = free.pop()
        self._scheduler.park(row, source)
      row.answer, row.chosen = answer.tokens, len(answer.tokens)
      made.append(_Beam(answer=answer, watch=watch, row=row))
    for row in free:
      self._scheduler.park(row)
      row.answer, row.chosen = [], 0
    self._rows.sort(key=lambda row: not row.chosen)
    return made

  def _score(self, answer: Answer) -> float:
    size = len(answer.tokens)
    return answer.total_logprob / size**self._request.length_penalty

  def answer(self, answers: Sequence[Answer], why: str) -> None:
    """Fills in the answers of the request, best first.

    Args:
      answers: n of them.
      why: "stop" if the search has ended; otherwise why it was given up, and
        then hypotheses that did not end are among them.
    """
    best = [*self._found]
    if why != "stop":
      best += [b.answer for b in self._running or () if b.answer.tokens]
    best.sort(key=self._score, reverse=True)
    for n, mine in enumerate(answers):
      one = Answer(total_logprob=-math.inf)
      if n < len(best):
        one = best[n]
      fields: dict[str, Any] = vars(one) | dict(error=mine.error)
      # Who waits for the end finds everything else in place.
      finish = fields.pop("finish") or "stop"
      vars(mine).update(fields)
      mine.finish = finish if why == "stop" else why
