"""Samplers: from the logits of a step to one token a row.

Guarantees: a sampler is a frozen value and a pure function. Its random number
for a token is a function of (seed, row of the batch, step, token id) alone, by
Threefry-2x32 written out below: the same on any mesh, however the batch is
split, and with any version of JAX. `generate` takes the token's position in its
row for the step: a row's draws depend neither on the lengths of other rows nor
on how a conversation is divided into turns. A row is drawn as

  argmax_i (l_i + g_i),   g_i = -log(-log(1 - u_i)),   u_i uniform in (0, 1),

which takes i with probability softmax(l)_i, exactly, also in the far tail: u
has a fine resolution near 0, where it decides. Ref: Gumbel-max; Salmon et al.
2011 (SC'11, Threefry).

Before that, in the order of transformers: penalty, temperature, top-k, top-p,
min-p. Each filter keeps the logits at or above a cutoff, so that equal logits
are kept or dropped together, never by their place in the vocabulary:

  top-k: at least the k-th largest;
  top-p: those whose strictly larger logits together have probability < p;
  min-p: probability at least min_p times the largest.

A sampler is also a pytree: its numbers are leaves, and its structure is the set
of numbers that are not None. So a jitted function that takes it as an argument
is compiled once for each choice of filters, whatever their numbers.

Every number of a sampler has a row in `PARAMETERS`: its range, the advice for
values out of range, its meaning, and the leaf that stands for it in a trace.

Cost: for V tokens about 100 integer operations a token for the draw; top-k and
top-p each 32 sums over V numbers, which find the cutoff bit by bit. Nothing is
sorted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ringjax.checks import integer, number, one_of
from ringjax.errors import DtypeError, OptionError, SamplingError, ShapeError
from ringjax.infer.stopping import StopLike
from ringjax.parallel.programs import bounded
from ringjax.typing import Index


class Parameter(NamedTuple):
  """A number of a sampler: its range, its meaning and its leaf in a trace.

  Fields:
    meaning: Effect of the number, in a sentence.
    least: Smallest value, or None.
    most: Largest value.
    above: Exclusive lower bound, in place of `least`.
    neutral: Value that filters nothing, which becomes None, so that both share
      a compiled program.
    remedy: Advice for a value out of range.
    leaf: Makes the array that stands for it in a trace.
    draws: Whether `generate` draws tokens where it is given by name.
  """

  meaning: str
  least: int | float | None = None
  most: int | float | None = None
  above: int | float | None = None
  neutral: int | float | None = None
  remedy: str = "leave it out to keep all"
  leaf: Callable[[Any], Any] = np.float32
  draws: bool = True

  @property
  def is_integer(self) -> bool:
    """Whether the number is an int."""
    return self.leaf is not np.float32

  def checked(self, name: str, value: object) -> float | int | None:
    """Check `value` and return it as a plain number, None if it is neutral.

    Raises:
      SamplingError: If it is out of range.
    """
    rule: dict[str, Any] = dict(
      most=self.most, error=SamplingError, remedy=self.remedy
    )
    if self.is_integer:
      minimum: Any = self.least
      return integer(name, value, least=minimum, **rule)
    checked = number(name, value, least=self.least, above=self.above, **rule)
    return None if checked == self.neutral else checked


def _words(seed: int | Array | np.ndarray) -> Array | np.ndarray:
  """Split an int seed into its low and high half, uint32 [2]."""
  if not isinstance(seed, int):
    return seed
  return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)


PARAMETERS = {
  "temperature": Parameter(
    "What logits are divided by; 0 is greedy, as is no sampling option at all.",
    least=0.01, most=100.0,
    remedy="for the most probable token take Greedy() (--temperature=0)"),
  "top_k": Parameter(
    "Keep the k likeliest tokens.", least=1, most=2**31 - 1, leaf=np.int32),
  "top_p": Parameter(
    "Keep the likeliest tokens up to this probability.",
    above=0.0, most=1.0, neutral=1.0),
  "min_p": Parameter(
    "Drop tokens below min_p x the top probability.",
    least=0.0, most=1.0, neutral=0.0),
  "repetition_penalty": Parameter(
    "Above 1, seen tokens get less likely.",
    least=0.01, most=100.0, neutral=1.0, draws=False,
    remedy="leave it out for no penalty"),
  "seed": Parameter(
    "Random seed: the same seed gives the same tokens.",
    least=0, most=2**63 - 1, leaf=_words, draws=False,
    remedy="take its last 63 bits"),
}  # fmt: skip


@runtime_checkable
class Sampler(Protocol):
  """Interface of samplers, as `generate` calls them.

  A sampler that is a pytree is a traced argument of jit; another one is static
  and must be hashable. `step` is the position of the token that is drawn.
  """

  @property
  def needs_seen(self) -> bool:
    """Whether `seen` must be given."""
    ...

  def __call__(
    self,
    logits: Float[Array, "B V"],
    step: Int[Array, " ..."],
    seen: Bool[Array, "B V"] | None = None,
  ) -> Int[Array, " B"]:
    """Choose one token per row."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Penalising:
  """Sampler that penalises seen tokens, then takes the largest score.

  Attributes:
    repetition_penalty: Penalty of seen tokens, see `Greedy`.
  """

  repetition_penalty: float | None = None

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value is not None or field.default is not None:
        value = PARAMETERS[field.name].checked(field.name, value)
      object.__setattr__(self, field.name, value)

  @property
  def needs_seen(self) -> bool:
    """Whether `seen` must be given."""
    return self.repetition_penalty is not None

  def __call__(
    self,
    logits: Float[Array, "B V"],
    step: Int[Array, " ..."],
    seen: Bool[Array, "B V"] | None = None,
    *,
    banned: Bool[Array, " ..."] | None = None,
    rows: Int[Array, " B"] | None = None,
  ) -> Int[Array, " B"]:
    """Choose one token per row.

    Args:
      logits: Logits, float32 [B, V].
      step: Number of the draw in its row, [] or [B]; `generate` passes the
        position of the token that is drawn. `Greedy` ignores it.
      seen: Mask of tokens that occurred in prompt and output, [B, V]. Only if
        `needs_seen`.
      banned: Mask of tokens that may not come, [V] or [B, V]. A row with all
        tokens banned gives 0.
      rows: Indices of the rows in the whole batch, int32 [B], if this is only a
        part of it; by default 0, 1, ... `Greedy` ignores it.

    Returns:
      Token ids, int32 [B].

    Raises:
      SamplingError: If `seen` is missing.
      ShapeError, DtypeError: If an operand has another shape or dtype.
    """
    logits = _penalised(self.repetition_penalty, logits, seen, banned)
    scores = self._scores(logits, step, rows)
    return first_largest(scores)

  def _scores(
    self, logits: Array, step: jax.Array, rows: jax.Array | None
  ) -> Array:
    """Scores [B, V]: the largest of each row is chosen."""
    del step, rows
    return logits


def first_largest(scores: Float[Array, "B V"]) -> Int[Array, " B"]:
  """Index of each row's first largest score or first NaN, as `jnp.argmax`.

  XLA's CPU compiler turns argmax into a loop over single numbers, several times
  slower than these two reductions.
  """
  maximum = jnp.max(scores, -1, keepdims=True)
  ids = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
  is_largest = (scores == maximum) | jnp.isnan(scores)
  return jnp.min(jnp.where(is_largest, ids, scores.shape[1]), -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy(_Penalising):
  """Chooses the most probable token; of equal ones that with the smallest id.

  Attributes:
    repetition_penalty: Divisor of the logits of seen tokens (negative ones are
      multiplied). None or 1 for no penalty.

  Raises:
    SamplingError: If the penalty is out of its range.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(_Penalising):
  """Draws a token at random, after filters.

  Attributes:
    temperature: Divisor of the logits, 0.01 to 100.
    top_k: Number of the largest logits to keep, or None for all.
    top_p: Total probability of the tokens to keep, in (0, 1], or None for all.
    min_p: Smallest probability to keep, relative to the largest, in [0, 1], or
      None.
    repetition_penalty: Penalty of seen tokens, see `Greedy`.
    seed: Random seed, 0 to 2^63 - 1; the same seed gives the same tokens.

  Raises:
    SamplingError: If one of them is out of its range.
  """

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  seed: int = 0

  def _scores(
    self, logits: Array, step: jax.Array, rows: jax.Array | None
  ) -> Array:
    logits = self.filtered(logits)
    batch, step = logits.shape[:1], jnp.asarray(step)
    rows = jnp.arange(batch[0]) if rows is None else rows
    _check_shape("rows", rows, (batch,), "pass one for each row of logits")
    remedy = "pass the number of tokens drawn before"
    _check_shape("step", step, ((), batch), remedy)
    return logits + noise(self, rows, step, logits.shape[1])

  def filtered(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Divide logits by the temperature; -inf where a filter drops a token."""
    logits = logits / self.temperature
    vocab = logits.shape[-1]
    if self.top_k is not None:
      count = jnp.minimum(jnp.asarray(self.top_k, jnp.int32), vocab)
      ones = jnp.ones_like(logits, dtype=jnp.int32)
      logits = _from(logits, _cutoff(logits, ones, count))
    if self.top_p is not None:
      top = jnp.max(logits, -1, keepdims=True)
      # A row of only -inf stays so: -inf - -inf would be NaN.
      top = jnp.where(top == -jnp.inf, jnp.zeros_like(top), top)
      mass = jnp.exp(logits - top)
      target = self.top_p * jnp.sum(mass, -1, keepdims=True)
      logits = _from(logits, _cutoff(logits, mass, target))
    if self.min_p is not None:
      top = jnp.max(logits, -1, keepdims=True)
      log_min = jnp.log(jnp.asarray(self.min_p, jnp.float32))
      logits = _from(logits, top + log_min)
    return logits


def log_weights(
  sampler: Callable[..., Any],
  logits: Float[Array, "B V"],
  seen: Bool[Array, "B V"] | None,
) -> Float[Array, "B V"]:
  """Log probabilities after a sampler's penalty and filters."""
  penalty = getattr(sampler, "repetition_penalty", None)
  logits = _penalised(penalty, logits, seen, None)
  if isinstance(sampler, Sample):
    logits = sampler.filtered(logits)
  return jax.nn.log_softmax(logits, -1)


def law(
  sampler: Callable[..., Any],
  logits: Float[Array, "B V"],
  seen: Bool[Array, "B V"] | None,
) -> Float[Array, "B V"]:
  """Probabilities by which a sampler of this module chooses a token."""
  weights = log_weights(sampler, logits, seen)
  if isinstance(sampler, Sample):
    return jnp.exp(weights)
  return jax.nn.one_hot(first_largest(weights), logits.shape[1])


def _from(logits: Array, cutoff: Array) -> Array:
  return jnp.where(logits >= cutoff, logits, -jnp.inf)


# Jitted for callers outside of jit: they would compile the loop at each call.
@bounded
@jax.jit
def _cutoff(logits: Array, weights: Array, want: Array) -> Array:
  """Largest cutoff whose logits' weights sum to at least `want`, [B, 1].

  It is a logit of the row: its largest one, where all weights are too little.
  `weights` [B, V] must be non-negative. It is found by bisection of the 2^32
  floats, as a sum of fewer weights, in the same order, is never larger.
  """
  low = jnp.full_like(logits[:, :1], -jnp.inf)
  bounds = (_ordered(low), _ordered(jnp.max(logits, -1, keepdims=True)))

  def halve(_: Index, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
    low, high = bounds
    middle = high - ((high - low) >> jnp.uint32(1))
    part = jnp.where(logits >= _float_of(middle), weights, 0)
    enough = jnp.sum(part, -1, keepdims=True, dtype=weights.dtype) >= want
    return (
      jnp.where(enough, middle, low),
      jnp.where(enough, high, jnp.maximum(middle, low + 1) - 1),
    )

  return _float_of(lax.fori_loop(0, 32, halve, bounds)[0])


_SIGN = 0x80000000


def _ordered(x: Array) -> Array:
  """Map floats to uint32 of the same order."""
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  sign = jnp.uint32(_SIGN)
  return jnp.where(bits >= sign, ~bits, bits | sign)


def _float_of(ordered: Array) -> Array:
  sign = jnp.uint32(_SIGN)
  bits = jnp.where(ordered >= sign, ordered ^ sign, ~ordered)
  return lax.bitcast_convert_type(bits, jnp.float32)


def _penalised(
  penalty: Array | float | None,
  logits: Array,
  seen: Array | None,
  banned: Array | None,
) -> Array:
  """Logits with the penalty, -inf where banned; refuses wrong operands."""
  if getattr(logits, "ndim", None) != 2 or 0 in logits.shape:
    raise ShapeError(
      "logits",
      f"shape {getattr(logits, 'shape', None)}",
      "[B, V]",
      "take the last position of each row: logits[:, -1]",
    )
  if logits.dtype != jnp.float32:
    raise DtypeError("logits", logits.dtype, "float32", "cast them to float32")
  if penalty is not None:
    if seen is None:
      raise SamplingError(
        "seen",
        "None beside a repetition_penalty",
        "bool [B, V], which tokens occurred",
        "pass it where sampler.needs_seen",
      )
    _check_mask("seen", seen, (logits.shape,))
    scaled = jnp.where(logits < 0, logits * penalty, logits / penalty)
    logits = jnp.where(seen, scaled, logits)
  if banned is not None:
    _check_mask("banned", banned, (logits.shape, logits.shape[1:]))
    mask = jnp.broadcast_to(banned, logits.shape)
    logits = jnp.where(mask, -jnp.inf, logits)
  return logits


def _check_mask(name: str, mask: Array, shapes: tuple[Any, ...]) -> None:
  remedy = "give it one entry a token of the vocabulary"
  _check_shape(name, mask, shapes, remedy)
  dtype = getattr(mask, "dtype", None)
  if dtype != jnp.bool_:
    raise DtypeError(name, dtype, "bool", "compare it with 0")


def _check_shape(
  name: str, x: Array, shapes: tuple[Any, ...], remedy: str
) -> None:
  shape = getattr(x, "shape", None)
  if shape not in shapes:
    want = " or ".join(map(str, shapes))
    raise ShapeError(name, f"shape {shape}", want, remedy)


# ---------------------------------------------------------------------------
# Random numbers
# ---------------------------------------------------------------------------


def noise(
  sampler: Callable[..., Any],
  rows: Int[Array, " B"],
  step: Int[Array, " ..."] | int,
  vocab: int,
  stream: int = 0,
) -> Float[Array, "B V"]:
  """Gumbel noise of (seed, row, step, id); 0 for a sampler without a seed.

  Args:
    sampler: Sampler with the seed.
    rows: Indices of the rows in the whole batch, int [B].
    step: Number of the draw, int [] or [B].
    vocab: Size of the vocabulary, V.
    stream: Number of an independent stream; the sampler itself draws by 0.
  """
  if not hasattr(sampler, "seed"):
    return jnp.zeros((rows.shape[0], vocab), jnp.float32)
  return _gumbel(*_counters(sampler, rows, step, stream), vocab)


def uniform(
  sampler: Callable[..., Any],
  rows: Int[Array, " B"],
  step: Int[Array, " ..."] | int,
  number: Int[Array, ""] | int,
  stream: int,
) -> Float[Array, " B"]:
  """Uniform numbers in (0, 1) of (seed, row, step, number); see `noise`.

  For a sampler without a seed they are 0.5.
  """
  if not hasattr(sampler, "seed"):
    return jnp.full(rows.shape, 0.5)
  words, rows, steps = _counters(sampler, rows, step, stream)
  key = _threefry((words[0], words[1]), (rows, steps))
  number = jnp.broadcast_to(jnp.asarray(number, jnp.uint32), rows.shape)
  bits, _ = _threefry(key, (number, jnp.zeros_like(number)))
  return (bits.astype(jnp.float32) + 0.5) * 2.0**-32


def _counters(
  sampler: Any, rows: Array, step: Any, stream: int
) -> tuple[Array, Array, Array]:
  """Words of the seed, rows and steps as counters, uint32."""
  words = jnp.asarray(_words(sampler.seed))
  if stream:
    # Rows are below 2^31: no row has this counter.
    word = _threefry(
      (words[0], words[1]), (jnp.uint32((1 << 31) + stream), jnp.uint32(0))
    )
    words = jnp.stack(word)
  steps = jnp.broadcast_to(jnp.asarray(step).astype(jnp.uint32), rows.shape)
  return words, rows.astype(jnp.uint32), steps


# Jitted for callers outside of jit: it is a hundred operations.
@bounded
@functools.partial(jax.jit, static_argnums=3)
def _gumbel(words: Array, rows: Array, steps: Array, vocab: int) -> Array:
  """Gumbel noise [B, V] of (seed, row, step, id); `words` are the seed's."""
  key = _threefry((words[0], words[1]), (rows, steps))
  ids = lax.broadcasted_iota(jnp.uint32, (rows.shape[0], vocab), 1)
  bits, _ = _threefry(
    (key[0][:, None], key[1][:, None]), (ids, jnp.zeros_like(ids))
  )
  # In (0, 1): float32 has 24 bits for large u, and all 32 for small u, where
  # it makes the large noise of unlikely tokens.
  u = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
  u = jnp.minimum(u, 1 - 2.0**-24)
  return -jnp.log(-jnp.log1p(-u))


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _threefry(
  key: tuple[Array, Array], counter: tuple[Array, Array]
) -> tuple[Array, Array]:
  """Threefry-2x32 with 20 rounds, elementwise in uint32."""
  keys = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
  x, y = counter[0] + keys[0], counter[1] + keys[1]
  for group in range(5):
    for bits in _ROTATIONS[group % 2]:
      x = x + y
      y = (y << jnp.uint32(bits)) | (y >> jnp.uint32(32 - bits))
      y = y ^ x
    x = x + keys[(group + 1) % 3]
    y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
  return x, y


# ---------------------------------------------------------------------------
# As pytrees
# ---------------------------------------------------------------------------


def _register(kind: type) -> None:
  names = tuple(field.name for field in dataclasses.fields(kind))
  flatten = lambda sampler: (
    tuple(_leaf(name, getattr(sampler, name)) for name in names),
    None,
  )

  def unflatten(_: None, leaves: Iterable[Any]) -> Any:
    # Leaves may be anything that JAX puts there: nothing is checked.
    instance = object.__new__(kind)
    for name, leaf in zip(names, leaves, strict=True):
      object.__setattr__(instance, name, leaf)
    return instance

  jax.tree_util.register_pytree_node(kind, flatten, unflatten)


def _leaf(name: str, value: Any) -> Any:
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  return PARAMETERS[name].leaf(value) if is_number else value


_register(Greedy)
_register(Sample)


def traced(sampler: Callable[..., Any]) -> Any:
  """Make a sampler an argument of jit; one that is no pytree becomes static."""
  if jax.tree_util.all_leaves([sampler]):
    return jax.tree_util.Partial(sampler)
  return jax.tree.map(jnp.asarray, sampler)


# ---------------------------------------------------------------------------
# Names of transformers
# ---------------------------------------------------------------------------

REMEDIES = {
  "attention_mask": "pass prompts as a list of rows of different lengths",
  "generation_config": "pass its numbers by name, e.g. temperature=0.7",
  "input_ids": "pass them as tokens, the second argument",
  "logits_processor": "pass a sampler=, see rj.infer.sampling.Sampler",
  "max_length": "pass max_new_tokens=, which does not count the prompt",
  "num_beams": "pass beams= to rj.serve.Request and submit it to an Engine",
  "num_return_sequences": "repeat the prompt: each row draws its own tokens",
  "pad_token_id": "pass pad_id=",
  "past_key_values": "pass cache=rj.infer.Session(model, capacity)",
  "stop_strings": "pass stop= and tokenizer=",
  "stopping_criteria": "pass stream=, whose answer True ends the generation",
  "streamer": "pass stream=, a function of each step's tokens",
}


def from_names(
  sampler: Callable[..., Any] | None, stop: StopLike, given: dict[str, Any]
) -> tuple[Any, Any]:
  """Build the sampler and the stop from transformers' names for `generate`.

  None is the same as leaving a name out. A temperature of 0 is greedy, as is
  no name at all.

  Args:
    sampler: Argument `sampler` of `generate`, or None.
    stop: Argument `stop` of `generate`, or None.
    given: Other arguments, by their names in transformers.

  Returns:
    (sampler, stop).

  Raises:
    OptionError: If a name is unknown, or set along with the `sampler` or `stop`
      that it stands for.
    SamplingError: If a number is out of its range.
  """
  for name in given:
    if name not in (*PARAMETERS, "do_sample", "eos_token_id"):
      remedy = REMEDIES.get(name, "leave it out; see help(rj.infer.generate)")
      raise OptionError(
        name, repr(given[name]), "an argument of generate", remedy
      )
  options = {name: value for name, value in given.items() if value is not None}
  if (end := options.pop("eos_token_id", None)) is not None:
    if stop is not None:
      raise _clash("eos_token_id", "stop=", "put the id into stop=")
    stop = end
  names = ", ".join(options)
  if sampler is not None:
    if options:
      remedy = "pass rj.infer.Sample(...) with all of it"
      raise _clash(names, "sampler=", remedy)
    return sampler, stop
  draws = options.pop("do_sample", None)
  remedy = "pass do_sample=True to draw, or leave it out"
  one_of("do_sample", draws, (None, True, False), remedy=remedy)
  if options.get("temperature") == 0 and not draws:
    draws = False
    del options["temperature"]
  filters = any(PARAMETERS[name].draws for name in options)
  if draws or (draws is None and filters):
    return Sample(**options), stop
  if filters or "seed" in options:
    raise _clash(names, "greedy choice", "pass do_sample=True, or leave it out")
  return Greedy(**options), stop


def _clash(name: str, beside: str, remedy: str) -> OptionError:
  return OptionError(name, f"a value beside {beside}", "one of them", remedy)
