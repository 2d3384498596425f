"""Beam search: the likeliest continuations of a prompt, k at a time.

Guarantees: the search of transformers' `generate(num_beams=k, do_sample=False,
early_stopping=False)`. In each step all next tokens of all k hypotheses are
ranked by the sum of log-probabilities. Of the first k of them, those that end
(by a stop id, a stop text, or the length) are set aside with a score, the sum
divided by tokens ** length_penalty, if it is among the k best. The first k that
do not end continue. The search ends at the length, or when k are set aside and
the best running one, scored at its current length, is no better than the worst
of them. Equal sums are ranked by hypothesis, then by token.
Cost: the host waits for a step's candidates before it plans the next one. A
step is k rows of a call; forks share full pages and copy the partly filled one.

Log-probabilities, also those of the answers, are those after the bias, the mask
and the penalties of a request; their probabilities sum to 1 (transformers with
`renormalize_logits=True`).
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
  """A running hypothesis.

  Attributes:
    answer: Tokens of the hypothesis; its lists are never changed.
    watch: Stop detector of its text, or None.
    row: Row that computes its next token.
  """

  answer: Answer
  watch: Watch | None
  row: ServedRow


class BeamSearch:
  """Hypotheses of one request, and the rows that continue them.

  Attributes:
    ended: Whether the search has ended: no better hypothesis is expected.
  """

  def __init__(
    self,
    request: Request,
    rows: list[ServedRow],
    scheduler: Scheduler,
    watch: Watch | None,
  ):
    """Start a search without tokens.

    Args:
      request: Request with `beams`.
      rows: Rows of the search, one for each beam; the list may be filled until
        the first `offer`. The first row always has a hypothesis.
      scheduler: Scheduler of the rows.
      watch: Stop detector of an empty text, or None without a tokenizer.
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
    """Take a row's candidates; whether those of all rows are complete.

    If so, all hypotheses get one more token and the rows that continue them.

    Args:
      row: Row that has a hypothesis.
      tokens: Likeliest next tokens, int32 [n].
      logprobs: Log-probabilities of the tokens, float32 [n]; -inf for masked
        ones.
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
    """Next running hypotheses, best first; sets aside those that end."""
    offers = [self._offers[beam.row] for beam in running]
    ranked = sorted(
      (-beam.answer.total_logprob - float(x), n, int(token))
      for n, (beam, (tokens, logprobs)) in enumerate(
        zip(running, offers, strict=True)
      )
      for token, x in zip(tokens, logprobs, strict=True)
      if x > -np.inf
    )
    num_tokens = len(running[0].answer.tokens) + 1
    full = num_tokens == self._request.max_new_tokens
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
    """Hypothesis with one more token, which may have ended it."""
    previous, request = beam.answer, self._request
    token_logprob = float(logprobs[np.flatnonzero(tokens == token)[0]])
    answer = Answer(
      tokens=[*previous.tokens, token],
      text=previous.text,
      logprobs=previous.logprobs,
      total_logprob=previous.total_logprob + token_logprob,
    )
    if request.logprobs is not None:
      pairs = list(zip(tokens, logprobs, strict=True))[: request.logprobs]
      top = tuple((int(i), float(x)) for i, x in pairs)
      token_logprobs = TokenLogprobs(
        token=token, logprob=token_logprob, top=top
      )
      answer.logprobs = [*previous.logprobs, token_logprobs]
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
    """Assign rows: the first successor keeps the row, others fork it."""
    kept_rows = {running[n].row for n, _, _ in picked}
    free = [row for row in self._rows if row not in kept_rows]
    beams = []
    for n, answer, watch in picked:
      row = source = running[n].row
      if source in kept_rows:
        kept_rows.remove(source)
      else:
        row = free.pop()
        self._scheduler.park(row, source)
      row.answer, row.chosen = answer.tokens, len(answer.tokens)
      beams.append(_Beam(answer=answer, watch=watch, row=row))
    for row in free:
      self._scheduler.park(row)
      row.answer, row.chosen = [], 0
    self._rows.sort(key=lambda row: not row.chosen)
    return beams

  def _score(self, answer: Answer) -> float:
    size = len(answer.tokens)
    return answer.total_logprob / size**self._request.length_penalty

  def answer(self, answers: Sequence[Answer], why: str) -> None:
    """Fill in the answers of the request, best first.

    Args:
      answers: The n answers.
      why: "stop" if the search has ended; otherwise the reason of its end, and
        hypotheses that did not end are included.
    """
    best = [*self._found]
    if why != "stop":
      best += [b.answer for b in self._running or () if b.answer.tokens]
    best.sort(key=self._score, reverse=True)
    for n, target in enumerate(answers):
      hypothesis = Answer(total_logprob=-math.inf)
      if n < len(best):
        hypothesis = best[n]
      fields: dict[str, Any] = vars(hypothesis) | dict(error=target.error)
      # Set `finish` last: a thread that waits for it reads the other fields.
      finish = fields.pop("finish") or "stop"
      vars(target).update(fields)
      target.finish = finish if why == "stop" else why
