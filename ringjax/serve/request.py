"""What an engine is asked, and what it answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ringjax.checks import integer, number, positive_int
from ringjax.data.special_tokens import TokenIds
from ringjax.errors import InputTypeError, OptionError, RingjaxError
from ringjax.infer.stopping import Stop, StopLike, as_stop
from ringjax.serve.row_sampler import TOP, RowSampling


@runtime_checkable
class Answers(Protocol):
  """What makes the answers of a `Handle`: an engine, or a cluster of them."""

  def advance(self, handle: Handle) -> None:
    """Gets a request on, or waits a moment for those who do."""
    ...

  def cancel(self, handle: Handle) -> None:
    """Gives a request up."""
    ...


class RejectedError(RingjaxError):
  """A request that is not taken because there is too much to do."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
  """A prompt, and how it is to be continued.

  Attributes:
    prompt: int32 [n], token ids.
    max_new_tokens: of the answer at most.
    sampling: how tokens are chosen.
    stop: ids behind which the answer ends, or texts, or both; or a `Stop`.
    n: how many answers; answer i draws as row i of a batch would.
    best_of: how many answers are made, of which the n with the largest mean
      log-probability are returned; default n.
    beams: width of a beam search, of whose hypotheses the n best are the
      answers, best first; None for no search. See `BeamSearch`.
    length_penalty: of a beam search: hypotheses are ranked by their
      `total_logprob` / tokens ** length_penalty.
    logprobs: how many log-probabilities of other tokens each token comes
      with, 0 for that of the token alone, None for none.
    priority: requests with a smaller one come first.
    deadline: seconds from its arrival after which it is given up, or None.
    salt: requests with another salt share no prefix with it, such as those of
      another tenant.
    adapter: the name of one of the engine's adapters, or "".
    share: whether blocks of its prompt may be shared at all.
    mask: called before each token with the tokens of the answer so far, int32
      [m]; returns bool [V], which may come, or None for all. Ids in its
      attribute `ends`, if it has one, end the answer as those of `stop` do.
    begun: of each answer the tokens that are known already, as of a request
      that another engine has begun; the answer goes on behind them, with the
      tokens that it would have had there. They are read again one by one, and
      have no log-probabilities.

  Raises:
    OptionError, SamplingError, InputTypeError: a value is out of its range.
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
    # What ends a grammar ends the answer: nothing may follow it.
    if ends := getattr(self.mask, "ends", ()):
      stop = Stop(ids=(*stop.ids, *ends), strings=stop.strings)
    object.__setattr__(self, "stop", stop)
    if self.begun:
      self._check_begun()
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
    # So many of the likeliest tokens hold what each hypothesis can give.
    many = beams + len(self.stops.ids)
    if many > TOP:
      raise OptionError(
        "beams",
        f"{beams}, with {len(self.stops.ids)} stop ids",
        f"at most {TOP} of both together",
        f"pass at most beams={max(0, TOP - len(self.stops.ids))}",
      )

  @property
  def answers(self) -> int:
    """How many are made."""
    return self.n if self.best_of is None else self.best_of

  @property
  def rows(self) -> int:
    """Rows of an engine that it takes: for each answer one, or each beam."""
    return self.answers if self.beams is None else self.beams

  @property
  def stops(self) -> Stop:
    """What ends an answer."""
    return as_stop(self.stop)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
  """Log-probabilities where a token was chosen.

  Attributes:
    token: its id.
    logprob: its own, of the model's distribution before any filter; in a beam
      search behind bias, mask and penalties.
    top: of the likeliest tokens, (id, logprob).
  """

  token: int
  logprob: float
  top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(kw_only=True, eq=False)
class Answer:
  """One answer, as far as it is known.

  Attributes:
    tokens: ids, the stop id included.
    text: what may be shown, if the engine has a tokenizer.
    logprobs: of each token, if they were asked for.
    finish: why it ended: "stop", "length", "cancelled", "deadline" or "error";
      None while it goes on.
    stopped: the id or the text that stopped it.
    total_logprob: the sum of the tokens' log-probabilities, if they are known;
      -inf of an answer for which a beam search found no hypothesis.
    error: what went wrong, if it did.
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
  """What became of a request.

  Attributes:
    answers: n of them.
    prompt_tokens: of the prompt.
    cached_tokens: of these, whose keys the first answer found.
    kept_tokens: Tokens of these that are read, of a request that reads the
      important part of a prefix; None: all of them.
    preemptions: how often a row of it had to make room.
    first_token: seconds from its arrival to the first token, or None.
    seconds: from its arrival to the end.
  """

  answers: tuple[Answer, ...]
  prompt_tokens: int
  cached_tokens: int
  preemptions: int
  first_token: float | None
  seconds: float
  kept_tokens: int | None = None

  @property
  def tokens(self) -> np.ndarray:
    """Of the first answer, int32 [m]."""
    return np.asarray(self.answers[0].tokens, np.int32)

  @property
  def finish(self) -> str | None:
    """Why the first answer ended."""
    return self.answers[0].finish


class Handle:
  """A request that was submitted.

  Iterating over it gives the tokens of its first answer as they come, and lets
  the engine work where no thread of its own does. Answers of a beam search
  are known at its end.
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
    answer, given = self.answers[0], 0
    while True:
      while given < len(answer.tokens):
        yield answer.tokens[given]
        given += 1
      if answer.finish is not None and given == len(answer.tokens):
        self._raise(answer)
        return
      self._engine.advance(self)

  def result(self) -> RequestResult:
    """Waits for the end.

    Raises:
      Exception: what the request's mask or the engine raised.
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
    """Gives it up; what is known so far stays in `answers`."""
    self._engine.cancel(self)

  def _raise(self, answer: Answer) -> None:
    if answer.error is not None:
      raise answer.error

  def __repr__(self) -> str:
    ends = [answer.finish for answer in self.answers]
    return f"Handle({len(self.request.prompt)} tokens, {ends})"
