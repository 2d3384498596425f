"""Requests to an engine, their answers and handles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from ringjax.checks import integer, number, positive_int
from ringjax.data.text.special_tokens import TokenIds
from ringjax.errors import InputTypeError, OptionError, RingjaxError
from ringjax.infer.stopping import Stop, StopLike, as_stop
from ringjax.serve.row_sampler import TOP, RowSampling


@runtime_checkable
class Answers(Protocol):
  """Source of a `Handle`'s answers: an engine, or a cluster of engines."""

  def advance(self, handle: Handle) -> None:
    """Advances a request, or waits a moment for the thread that does."""
    ...

  def cancel(self, handle: Handle) -> None:
    """Cancels a request."""
    ...


class RejectedError(RingjaxError):
  """The server is overloaded and rejects the request."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
  """A prompt and the settings of its answers.

  Attributes:
    prompt: Token ids, int32 [n].
    max_new_tokens: Maximum number of tokens of an answer.
    sampling: Sampling settings.
    stop: Ids after which the answer ends, or texts, or both; or a `Stop`.
    n: Number of answers; answer i draws as row i of a batch would.
    best_of: Number of answers to compute, of which the n with the largest mean
      log-probability are returned; default n.
    beams: Width of a beam search, of whose hypotheses the n best are the
      answers, best first; None for no search. See `BeamSearch`.
    length_penalty: Exponent in a beam search: hypotheses are ranked by
      `total_logprob` / tokens ** length_penalty.
    logprobs: Number of other tokens whose log-probabilities each token comes
      with; 0 for that of the token alone, None for none.
    tempered: Whether log-probabilities are those of the distribution that
      tokens are drawn from, of the logits over the temperature; else those of
      the model. Not with what cuts or shifts that distribution: top_k, top_p,
      min_p, penalties, biases, masks, beams.
    priority: Priority; requests with a smaller one come first.
    deadline: Seconds from its arrival after which it is cancelled, or None.
    salt: Salt of its prefixes; requests with another salt share no prefix with
      it, such as those of another tenant.
    adapter: Name of one of the engine's adapters, or "".
    share: Whether blocks of its prompt may be shared.
    mask: Called before each token with the tokens of the answer so far, int32
      [m]; returns the allowed tokens, bool [V], or None for all. Ids in its
      attribute `ends`, if it has one, end the answer as those of `stop` do.
    begun: First tokens of each answer, if another engine has begun the request;
      the answer continues after them with the tokens that it would have had
      there. They are computed again one by one, and have no log-probabilities.

  Raises:
    OptionError, SamplingError, InputTypeError: If a value is out of range.
  """

  prompt: TokenIds
  max_new_tokens: int
  sampling: RowSampling = RowSampling()
  stop: StopLike = None
  n: int = 1
  best_of: int | None = None
  beams: int | None = None
  length_penalty: int | float = 1.0
  logprobs: int | None = None
  tempered: bool = False
  priority: int = 0
  deadline: float | None = None
  salt: str = ""
  adapter: str = ""
  share: bool = True
  mask: Callable[[np.ndarray], Any] | None = None
  begun: tuple[tuple[int, ...], ...] = ()

  def __post_init__(self) -> None:
    positive_int("max_new_tokens", self.max_new_tokens)
    positive_int("n", self.n)
    if not isinstance(self.sampling, RowSampling):
      raise InputTypeError(
        "sampling",
        type(self.sampling).__name__,
        "an rj.serve.RowSampling",
        "pass rj.serve.RowSampling(temperature=0.7), for instance",
      )
    if self.best_of is not None:
      integer("best_of", self.best_of, least=self.n)
    if self.logprobs is not None:
      integer("logprobs", self.logprobs, least=0, most=TOP)
    integer("priority", self.priority)
    if self.deadline is not None:
      number("deadline", self.deadline, above=0.0)
    for name in ("salt", "adapter"):
      if not isinstance(getattr(self, name), str):
        raise InputTypeError(
          name, repr(getattr(self, name)), "a str", f"pass {name}='name'"
        )
    if self.mask is not None and not callable(self.mask):
      raise InputTypeError(
        "mask", type(self.mask).__name__, "a callable", "pass a function"
      )
    stop = as_stop(self.stop)
    # An end of the grammar is a stop id: no token is allowed after it.
    if ends := getattr(self.mask, "ends", ()):
      stop = Stop(ids=(*stop.ids, *ends), strings=stop.strings)
    object.__setattr__(self, "stop", stop)
    if self.begun:
      self._check_begun()
    if self.tempered:
      self._check_tempered()
    number("length_penalty", self.length_penalty, least=-10, most=10)
    if self.beams is not None:
      self._check_beams(self.beams)
    elif self.length_penalty != 1.0:
      raise OptionError(
        "length_penalty",
        f"{self.length_penalty}, without a beam search",
        "beams, or no length_penalty",
        "pass beams=4, for instance, or leave length_penalty out",
      )

  def _check_tempered(self) -> None:
    sampling = self.sampling
    others = {
      "top_k": sampling.top_k,
      "top_p": sampling.top_p not in (None, 1.0),
      "min_p": sampling.min_p,
      "logit_bias": sampling.logit_bias,
      "mask": self.mask,
      "beams": self.beams,
      "penalties": sampling.counts,
      "temperature=0": not sampling.temperature,
    }
    present = [name for name, value in others.items() if value]
    if present:
      raise OptionError(
        "tempered",
        f"it with {', '.join(present)}",
        "a temperature above 0 alone: the model has no log-probabilities of "
        "another distribution",
        f"leave {present[0]} out, or tempered",
      )

  def _check_begun(self) -> None:
    searched = self.beams is not None or self.best_of is not None
    if searched or len(self.begun) != self.answers:
      raise OptionError(
        "begun",
        f"{len(self.begun)} answers",
        f"{self.answers}, without beams or best_of",
        "pass the tokens of each answer",
      )
    for tokens in self.begun:
      for token in tokens:
        integer("begun", token, least=0)
      if len(tokens) >= self.max_new_tokens:
        raise OptionError(
          "begun",
          f"{len(tokens)} tokens of {self.max_new_tokens}",
          "fewer than max_new_tokens",
          "leave the last one out",
        )

  def _check_beams(self, beams: int) -> None:
    integer("beams", beams, least=self.n)
    if self.best_of is not None:
      raise OptionError(
        "best_of",
        f"{self.best_of}, with beams={beams}",
        "one of them",
        "leave best_of out: a search keeps as many hypotheses as beams",
      )
    if self.sampling.temperature:
      raise OptionError(
        "temperature",
        f"{self.sampling.temperature}, with beams={beams}",
        "0: a beam search draws nothing",
        "leave temperature out, or beams",
      )
    # Number of likeliest tokens that contain all successors of a hypothesis.
    num_candidates = beams + len(self.stops.ids)
    if num_candidates > TOP:
      raise OptionError(
        "beams",
        f"{beams}, with {len(self.stops.ids)} stop ids",
        f"at most {TOP} of both together",
        f"pass at most beams={max(0, TOP - len(self.stops.ids))}",
      )

  @property
  def answers(self) -> int:
    """Number of answers to compute."""
    return self.n if self.best_of is None else self.best_of

  @property
  def rows(self) -> int:
    """Number of engine rows that it takes: one for each answer or beam."""
    return self.answers if self.beams is None else self.beams

  @property
  def stops(self) -> Stop:
    """Stop conditions of an answer."""
    return as_stop(self.stop)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
  """Log-probabilities at the position of a chosen token.

  Attributes:
    token: Token id.
    logprob: Log-probability of the token in the model's distribution before any
      filter; in a beam search after bias, mask and penalties.
    top: Likeliest tokens as (id, logprob).
  """

  token: int
  logprob: float
  top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(kw_only=True, eq=False)
class Answer:
  """One answer, with its tokens so far.

  Attributes:
    tokens: Token ids, the stop id included.
    text: Text that may be shown, if the engine has a tokenizer.
    logprobs: Log-probabilities of each token, if requested.
    finish: Reason of its end: "stop", "length", "cancelled", "deadline" or
      "error"; None while it is running.
    stopped: Stop id or stop text that ended it, or None.
    total_logprob: Sum of the tokens' log-probabilities, if they are known; -inf
      for an answer for which a beam search found no hypothesis.
    error: Error that ended the answer, or None.
  """

  tokens: list[int] = dataclasses.field(default_factory=list)
  text: str = ""
  logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
  finish: str | None = None
  stopped: int | str | None = None
  total_logprob: float = 0.0
  error: Exception | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestResult:
  """Answers and times of a request that has ended.

  Attributes:
    answers: The n answers.
    prompt_tokens: Number of tokens of the prompt.
    cached_tokens: Number of these whose keys were cached for the first answer.
    kept_tokens: Tokens of these that are read, of a request that reads the
      important part of a prefix; None: all of them.
    preemptions: Number of times that a row of it had to make room.
    first_token: Seconds from its arrival to the first token, or None.
    seconds: Seconds from its arrival to the end.
  """

  answers: tuple[Answer, ...]
  prompt_tokens: int
  cached_tokens: int
  preemptions: int
  first_token: float | None
  seconds: float
  kept_tokens: int | None = None

  @property
  def tokens(self) -> Int[np.ndarray, " m"]:
    """Token ids of the first answer, int32 [m]."""
    return np.asarray(self.answers[0].tokens, np.int32)

  @property
  def finish(self) -> str | None:
    """Reason of the first answer's end."""
    return self.answers[0].finish


class Handle:
  """Handle of a submitted request.

  Iterating over it gives the tokens of its first answer as they come, and takes
  steps of an engine that was not started. Answers of a beam search are known at
  its end.
  """

  def __init__(
    self,
    engine: Answers,
    request: Request,
    arrival: float,
    on_change: Callable[[Answer], None] | None = None,
  ):
    self.request = request
    self.on_change = on_change
    self.arrival = arrival
    self.answers = [Answer() for _ in range(request.answers)]
    self.cached_tokens = self.preemptions = 0
    self.kept_tokens: int | None = None
    self.first_token: float | None = None
    self.seconds: float | None = None
    self._engine = engine

  @property
  def done(self) -> bool:
    """Whether all answers have ended."""
    return all(answer.finish is not None for answer in self.answers)

  def __iter__(self) -> Iterator[int]:
    """Tokens of the first answer, as they are chosen."""
    answer, num_yielded = self.answers[0], 0
    while True:
      while num_yielded < len(answer.tokens):
        yield answer.tokens[num_yielded]
        num_yielded += 1
      if answer.finish is not None and num_yielded == len(answer.tokens):
        self._raise(answer)
        return
      self._engine.advance(self)

  def result(self) -> RequestResult:
    """Waits for the end of all answers.

    Raises:
      Exception: Any error that the request's mask or the engine raised.
    """
    while not self.done:
      self._engine.advance(self)
    for answer in self.answers:
      self._raise(answer)
    best = self.answers
    if self.request.best_of is not None:
      mean = lambda a: a.total_logprob / max(1, len(a.tokens))
      best = sorted(self.answers, key=mean, reverse=True)[: self.request.n]
    return RequestResult(
      answers=tuple(best),
      prompt_tokens=len(self.request.prompt),
      cached_tokens=self.cached_tokens,
      preemptions=self.preemptions,
      first_token=self.first_token,
      seconds=self.seconds or 0.0,
      kept_tokens=self.kept_tokens,
    )

  def cancel(self) -> None:
    """Cancels the request; `answers` keeps the tokens so far."""
    self._engine.cancel(self)

  def _raise(self, answer: Answer) -> None:
    if answer.error is not None:
      raise answer.error

  def __repr__(self) -> str:
    ends = [answer.finish for answer in self.answers]
    return f"Handle({len(self.request.prompt)} tokens, {ends})"
