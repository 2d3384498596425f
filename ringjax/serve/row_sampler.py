"""Sampling for rows with separate settings.

Guarantees: a row's token is what `Greedy` or `Sample` with its settings choose
for it alone, or, at temperatures too low for `Sample`, a draw at that
temperature; settings of other rows, and whether there are any, do not matter.
One program serves all settings.
Cost: filters are computed only in steps in which some row has them.

A row's `logit_bias` is added before its penalties, and tokens that its mask
forbids are left out. Presence and frequency penalties are OpenAI's: they count
tokens of the answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from ringjax.checks import integer, number
from ringjax.errors import OptionError, SamplingError
from ringjax.infer.finite import or_not_finite
from ringjax.infer.sampling import PARAMETERS, Sample, first_largest, noise
from ringjax.typing import ArrayLeaf

# Temperatures: below the first, the largest logit is subtracted before the
# division; lower ones than the second (a float32) behave like it.
_LOW, _LEAST = 0.01, 1e-30
# Maximum entries of a row's logit bias; maximum logprobs of one token.
BIASES, TOP = 64, 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSampling:
  """Sampling settings of one request.

  Attributes:
    temperature: Divisor of the logits, at most 100; 0 takes the likeliest
      token.
    top_k: Keep the k likeliest tokens; None keeps all.
    top_p: Keep the likeliest tokens up to this probability; None keeps all.
    min_p: Drop tokens below min_p times the top probability.
    repetition_penalty: Above 1, tokens of prompt and answer get less likely.
    presence_penalty: Subtracted from the logits of tokens of the answer, -2 to
      2.
    frequency_penalty: Subtracted once for each time that a token is in the
      answer, -2 to 2.
    seed: Random seed.
    logit_bias: Values to add to logits, by token id.

  Raises:
    SamplingError, OptionError: If a number is out of range.
  """

  temperature: float = 0.0
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  repetition_penalty: float | None = None
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  seed: int = 0
  logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()

  def __post_init__(self) -> None:
    number(
      "temperature",
      self.temperature,
      least=0,
      most=PARAMETERS["temperature"].most,
      error=SamplingError,
      remedy="pass 0 for the most probable token",
    )
    for name in ("top_k", "top_p", "min_p", "repetition_penalty"):
      if getattr(self, name) is not None:
        PARAMETERS[name].checked(name, getattr(self, name))
    PARAMETERS["seed"].checked("seed", self.seed)
    for name in ("presence_penalty", "frequency_penalty"):
      number(
        name,
        getattr(self, name),
        least=-2.0,
        most=2.0,
        error=SamplingError,
        remedy="leave it out for none",
      )
    bias = dict(self.logit_bias)
    if len(bias) > BIASES:
      raise OptionError(
        "logit_bias",
        f"{len(bias)} tokens",
        f"at most {BIASES}",
        "leave out the smallest ones, or pass a mask",
      )
    for token, value in bias.items():
      integer("logit_bias token", token, least=0)
      number("logit_bias", value)
    object.__setattr__(self, "logit_bias", tuple(sorted(bias.items())))

  @property
  def counts(self) -> bool:
    """Whether penalties need the tokens so far."""
    return bool(
      (self.repetition_penalty or 1) != 1
      or self.presence_penalty
      or self.frequency_penalty
    )


class RowNumbers(NamedTuple):
  """Sampling settings of B rows, as arrays.

  Fields:
    temperature: Temperature, float32 [B]; 0 is greedy.
    top_k: Number of tokens to keep, int32 [B]; the vocabulary size for all.
    top_p: Probability to keep, float32 [B]; 1 for all.
    min_p: Fraction of the top probability, float32 [B]; 0 for all.
    repetition: Repetition penalty, float32 [B]; 1 for none.
    presence: Presence penalty, float32 [B].
    frequency: Frequency penalty, float32 [B].
    seed: Low and high words of the seed, uint32 [2, B].
    draw: Row number of the draws, int32 [B].
    bias_ids: Token ids of the logit bias, int32 [B, n]; the vocabulary size for
      none.
    bias: Values of the logit bias, float32 [B, n].
    logprobs: Whether log-probabilities are requested, bool [B].
    search: Whether they are those after biases, masks and penalties, by which a
      beam search ranks tokens, bool [B]; else those of the model.
    divisor: Divisor of the logits of log-probabilities, float32 [B]: 1, or the
      temperature.
  """

  temperature: Float[ArrayLeaf, " B"]
  top_k: Int[ArrayLeaf, " B"]
  top_p: Float[ArrayLeaf, " B"]
  min_p: Float[ArrayLeaf, " B"]
  repetition: Float[ArrayLeaf, " B"]
  presence: Float[ArrayLeaf, " B"]
  frequency: Float[ArrayLeaf, " B"]
  seed: Shaped[ArrayLeaf, "2 B"]
  draw: Int[ArrayLeaf, " B"]
  bias_ids: Int[ArrayLeaf, "B n"]
  bias: Float[ArrayLeaf, "B n"]
  logprobs: Bool[ArrayLeaf, " B"]
  search: Bool[ArrayLeaf, " B"]
  divisor: Float[ArrayLeaf, " B"]

  @classmethod
  def empty(cls, rows: int, vocab: int) -> RowNumbers:
    """Greedy settings for all rows, on the host."""
    full: Any = lambda value, dtype: np.full(rows, value, dtype)
    full_shape: Any = lambda shape, value, dtype: np.full(shape, value, dtype)
    return cls(
      temperature=full(0, np.float32),
      top_k=full(vocab, np.int32),
      top_p=full(1, np.float32),
      min_p=full(0, np.float32),
      repetition=full(1, np.float32),
      presence=full(0, np.float32),
      frequency=full(0, np.float32),
      seed=full_shape((2, rows), 0, np.uint32),
      draw=full(0, np.int32),
      bias_ids=full_shape((rows, BIASES), vocab, np.int32),
      bias=full_shape((rows, BIASES), 0, np.float32),
      logprobs=full(False, bool),
      search=full(False, bool),
      divisor=full(1, np.float32),
    )

  def put(
    self,
    row: int,
    how: RowSampling,
    draw: int,
    logprobs: bool,
    search: bool,
    vocab: int,
    tempered: bool = False,
  ) -> None:
    """Write the settings of one row in place."""
    pick = lambda value, neutral: neutral if value is None else value
    self.temperature[row] = how.temperature
    self.top_k[row] = min(pick(how.top_k, vocab), vocab)
    self.top_p[row] = pick(how.top_p, 1.0)
    self.min_p[row] = pick(how.min_p, 0.0)
    self.repetition[row] = pick(how.repetition_penalty, 1.0)
    self.presence[row] = how.presence_penalty
    self.frequency[row] = how.frequency_penalty
    self.seed[:, row] = how.seed & 0xFFFFFFFF, how.seed >> 32
    self.draw[row] = draw
    self.bias_ids[row], self.bias[row] = vocab, 0
    for n, (token, value) in enumerate(dict(how.logit_bias).items()):
      self.bias_ids[row, n], self.bias[row, n] = token, value
    self.logprobs[row], self.search[row] = logprobs, search
    self.divisor[row] = how.temperature if tempered else 1.0

  def of(self, slots: Int[Array | np.ndarray, " B"]) -> RowNumbers:
    """Settings of the given rows, int [B]."""
    return RowNumbers(
      *(x[:, slots] if x is self.seed else x[slots] for x in self)
    )


class Choice(NamedTuple):
  """Chosen tokens and their log-probabilities.

  Fields:
    token: Token ids, int32 [B]; `finite.NOT_FINITE` for rows whose logits are
      not finite, or whose allowed tokens have no finite logit.
    logprob: Log-probability of the token, float32 [B]; 0 where it is not
      requested.
    top: Likeliest tokens, int32 [B, n].
    top_logprobs: Log-probabilities of `top`, float32 [B, n].
  """

  token: Int[ArrayLeaf, " B"]
  logprob: Float[ArrayLeaf, " B"]
  top: Int[ArrayLeaf, "B n"]
  top_logprobs: Float[ArrayLeaf, "B n"]


def choose(
  logits: Float[Array, "B V"],
  how: RowNumbers,
  pos: Int[Array, " B"],
  seen: Bool[Array, "B V"],
  counts: Int[Array, "B V"],
  allowed: Bool[Array, "B V"],
  log_softmax: Callable[[Array], Array] = jax.nn.log_softmax,
) -> Choice:
  """Choose a token for each row.

  Args:
    logits: Logits of the model.
    how: Sampling settings.
    pos: Positions of the tokens that are chosen.
    seen: Whether a token occurred in prompt or answer.
    counts: Number of times that a token occurred in the answer.
    allowed: Mask of allowed tokens.
    log_softmax: Function of logits [B, V] that gives log-probabilities.
  """
  batch, vocab = logits.shape
  column = lambda x: x[:, None]
  logits_ = _penalised(logits, how, seen, counts, allowed)
  drawn = how.temperature > 0

  def sampled() -> jax.Array:
    scores = _filtered(logits_, how) + _noise(how, pos, vocab)
    return jnp.where(column(drawn), scores, logits_)

  scores = lax.cond(jnp.any(drawn), sampled, lambda: logits_)
  token = first_largest(scores)
  # A mask may hide logits that are not finite, or leave no finite one.
  sound = or_not_finite(or_not_finite(token, logits), logits_)
  top = min(TOP, vocab)

  def reported() -> tuple[jax.Array, ...]:
    ranked = jnp.where(column(how.search), logits_, logits)
    ranked = ranked / column(how.divisor)
    log_probs = log_softmax(ranked)
    best, ids = lax.top_k(log_probs, top)
    chosen = jnp.take_along_axis(log_probs, column(token), 1)[:, 0]
    return chosen, ids.astype(jnp.int32), best

  none = (
    jnp.zeros((batch,), jnp.float32),
    jnp.zeros((batch, top), jnp.int32),
    jnp.zeros((batch, top), jnp.float32),
  )
  logprob, ids, best = lax.cond(jnp.any(how.logprobs), reported, lambda: none)
  return Choice(sound, logprob, ids, best)


def ranked(
  logits: Float[Array, "B V"],
  how: RowNumbers,
  pos: Int[Array, " B"],
  seen: Bool[Array, "B V"],
  counts: Int[Array, "B V"],
  allowed: Bool[Array, "B V"],
) -> Float[Array, "B V"]:
  """Log-probabilities, with Gumbel noise for the rows that draw.

  `choose` takes the largest one; the arguments are the same. Sums over tokens
  rank paths.
  """
  penalised, drawn = (
    _penalised(logits, how, seen, counts, allowed),
    how.temperature,
  )

  def sampled() -> jax.Array:
    draws = (drawn > 0)[:, None]
    log_probs = jax.nn.log_softmax(
      jnp.where(draws, _filtered(penalised, how), penalised)
    )
    return log_probs + jnp.where(draws, _noise(how, pos, logits.shape[1]), 0)

  plain = lambda: jax.nn.log_softmax(penalised)
  return lax.cond(jnp.any(drawn > 0), sampled, plain)


def _penalised(
  logits: Float[Array, "B V"],
  how: RowNumbers,
  seen: Bool[Array, "B V"],
  counts: Int[Array, "B V"],
  allowed: Bool[Array, "B V"],
) -> Float[Array, "B V"]:
  """Logits after biases, masks and penalties."""
  rows = jnp.arange(logits.shape[0])[:, None]
  column = lambda x: x[:, None]

  def biased() -> jax.Array:
    biased_logits = logits.at[rows, how.bias_ids].add(how.bias, mode="drop")
    biased_logits = jnp.where(allowed, biased_logits, -jnp.inf)
    penalty = column(how.repetition)
    scaled = jnp.where(
      biased_logits < 0, biased_logits * penalty, biased_logits / penalty
    )
    biased_logits = jnp.where(seen, scaled, biased_logits)
    times = counts.astype(jnp.float32)
    biased_logits = biased_logits - column(how.frequency) * times
    return biased_logits - jnp.where(counts > 0, column(how.presence), 0)

  plain = (
    jnp.all(how.bias == 0)
    & jnp.all(allowed)
    & jnp.all(how.repetition == 1)
    & jnp.all(how.presence == 0)
    & jnp.all(how.frequency == 0)
  )
  return lax.cond(plain, lambda: logits, biased)


def _filtered(
  logits: Float[Array, "B V"], how: RowNumbers
) -> Float[Array, "B V"]:
  """Logits over the temperature, -inf where a row's filters drop a token."""
  column, vocab = lambda x: x[:, None], logits.shape[1]
  low = (how.temperature > 0) & (how.temperature < _LOW)

  def from_top() -> jax.Array:
    top = jnp.max(logits, -1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0)
    return jnp.where(column(low), logits - top, logits)

  # Large quotients would absorb the noise, or overflow to infinity.
  scaled = lax.cond(jnp.any(low), from_top, lambda: logits)
  divisor = jnp.maximum(how.temperature, _LEAST)
  scaled = scaled / column(jnp.where(how.temperature > 0, divisor, 1))
  filters = (
    (how.top_k < vocab, dict(top_k=column(how.top_k))),
    (how.top_p < 1, dict(top_p=column(how.top_p))),
    (how.min_p > 0, dict(min_p=column(how.min_p))),
  )
  for has_filter, options in filters:
    sampler = _with_arrays(**options)
    cut = lambda found=scaled, sampler=sampler: sampler.filtered(found)
    filtered = lax.cond(jnp.any(has_filter), cut, lambda found=scaled: found)
    scaled = jnp.where(column(has_filter), filtered, scaled)
  return scaled


def _noise(
  how: RowNumbers, pos: Int[Array, " B"], vocab: int
) -> Float[Array, "B V"]:
  """Gumbel noise of each row at these positions."""
  return noise(_with_arrays(seed=how.seed), how.draw, pos, vocab)


def _with_arrays(**numbers: Any) -> Sample:
  """Make a `Sample` whose numbers are arrays, one for each row."""
  plain = dict(temperature=np.float32(1), seed=np.zeros(2, np.uint32))
  sampler = object.__new__(Sample)
  for field in dataclasses.fields(Sample):
    value = {**plain, **numbers}.get(field.name)
    object.__setattr__(sampler, field.name, value)
  return sampler
