"""What a placement over three tiers costs: times and memory, as affine forms.

A policy places fractions of the weights, of the cache and of the hidden states
on device, host and disk: w, c, h, three fractions each. For a given block of
rows every time and every peak of memory is affine in these nine, which is what
makes the best placement a linear program. A block is `rows` x `batches`: one
layer's weights serve all batches of a block before the next layer begins.

With W bytes of a layer, C bytes of a token's key and value in it, E = 2 D bytes
of a hidden state, b rows of a block, s tokens of the prompt and n new ones, a
layer moves for a prompt

  to_device    (w2 + w3) W + (h2 + h3) s E b
  from_device  (c2 + c3) (s + 1) C b + (h2 + h3) s E b
  disk_read    w3 W + h3 s E b
  disk_write   c3 (s + 1) C b + h3 s E b

bytes, and for a new token

  to_device    (w2 + w3) W + (h2 + h3) E b
  from_device  (h2 + h3) E b
  disk_read    w3 W + c3 (s + n / 2) C b + h3 E b
  disk_write   c3 C b + h3 E b

each at its rate. The fifth time is that of computing: products, and attention
where the cache is. Two forms join the five:

  "paper"         the largest of the five
  "code", prompt  max(to_device + disk_read, from_device + disk_write, compute)
  "code", token   to_device + max(from_device, disk_read, disk_write, compute)

"code" is the released cost model; it keeps hidden states off the disk.

Left out: latencies, the norms' weights, the cost of decoding 4-bit numbers.
Layers with a window count as if they saw and kept all tokens.

Ref: Sheng et al. 2023, FlexGen (arXiv 2303.06865), section 4.3 and appendix A.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from ringjax.checks import boolean, number, one_of, positive_int
from ringjax.errors import OptionError
from ringjax.plan import files
from ringjax.plan.offload_tiers import TIERS, OffloadMachine, OffloadShape

FORMS = ("paper", "code")
WORKING = ("largest", "sum")
PARTS = ("to_device", "from_device", "disk_read", "disk_write", "compute")
KINDS = ("weights", "cache", "hidden")
# Bytes of a number. In 4 bits each group of 64 has a scale and a minimum too.
BYTES = {16: 2.0, 4: 0.5 + 4 / 64}
# Nine coefficients, of `KINDS` by `TIERS`, and a constant.
Affine = Float[np.ndarray, " coefficients"]
Fractions = Float[np.ndarray, " fractions"]


# ---------------------------------------------------------------------------
# What is asked
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadTask:
  """What is to run, and how it is stored.

  Attributes:
    prompt: tokens of each row's prompt, s.
    new: tokens that each row generates, n.
    form: how times overlap, of `FORMS`.
    working: what of a layer's steps is in the device's memory at once, the
      "largest" or their "sum"; None: the largest with the form "paper", the sum
      with "code".
    weight_bits: 16 or 4.
    cache_bits: 16 or 4; of a cache in 4 bits attention is on the device.
    host_attention: whether new tokens attend on the host to the part of the
      cache that is not on the device; without it that part is moved each time.
  """

  prompt: int = 512
  new: int = 32
  form: str = "paper"
  working: str | None = None
  weight_bits: int = 16
  cache_bits: int = 16
  host_attention: bool = True

  def __post_init__(self) -> None:
    positive_int("prompt", self.prompt)
    positive_int("new", self.new)
    one_of("form", self.form, FORMS)
    one_of("working", self.working, (None, *WORKING))
    one_of("weight_bits", self.weight_bits, tuple(BYTES))
    one_of("cache_bits", self.cache_bits, tuple(BYTES))
    boolean("host_attention", self.host_attention)

  @property
  def adds_steps(self) -> bool:
    """Whether all steps of a layer are in memory at once."""
    default = "sum" if self.form == "code" else "largest"
    return (self.working or default) == "sum"

  @property
  def attends_on_host(self) -> bool:
    return self.host_attention and self.cache_bits == 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadPolicy:
  """A block of rows, and what part of everything is in which tier.

  Attributes:
    rows: of a batch on the device.
    batches: of a block, which share a layer's weights.
    weights: fractions on device, host and disk; they add up to 1.
    cache: the same of keys and values.
    hidden: the same of hidden states.
  """

  rows: int
  batches: int
  weights: tuple[int | float, int | float, int | float]
  cache: tuple[int | float, int | float, int | float]
  hidden: tuple[int | float, int | float, int | float]

  def __post_init__(self) -> None:
    positive_int("rows", self.rows)
    positive_int("batches", self.batches)
    for kind in KINDS:
      given = getattr(self, kind)
      for one in given:
        number(kind, one, least=0, most=1)
      if len(given) != 3 or not math.isclose(sum(given), 1.0, abs_tol=1e-6):
        raise OptionError(
          kind,
          f"{given}",
          "fractions on device, host and disk that add up to 1",
          f"change {kind} so that the sum is 1",
        )

  @property
  def block(self) -> int:
    """Rows of a block."""
    return self.rows * self.batches

  def fractions(self) -> Fractions:
    """All fractions, of `KINDS` by `TIERS`."""
    return np.array([*self.weights, *self.cache, *self.hidden], np.float64)

  @classmethod
  def parse(cls, text: str) -> OffloadPolicy:
    """A policy of text: ROWSxBATCHES:WEIGHTS,CACHE,HIDDEN, e.g. 48x3:20/80,...

    Each of the three is the percentage on the device / on the host; what is
    left of 100 is on the disk.

    Raises:
      OptionError: another form, or more than 100 %.
    """
    block, _, rest = text.partition(":")
    try:
      rows, batches = (int(x) for x in block.split("x"))
      shares = []
      for part in rest.split(","):
        device, host = (float(x) / 100 for x in part.split("/"))
        shares.append((device, host, max(0.0, 1 - device - host)))
      weights, cache, hidden = shares
    except ValueError:
      raise _unreadable(text) from None
    return cls(
      rows=rows, batches=batches, weights=weights, cache=cache, hidden=hidden
    )

  def __str__(self) -> str:
    percent = lambda x: f"{100 * x:.3g}"
    parts = (getattr(self, kind) for kind in KINDS)
    shares = ",".join(f"{percent(d)}/{percent(h)}" for d, h, _ in parts)
    return f"{self.rows}x{self.batches}:{shares}"


def _unreadable(text: str) -> OptionError:
  return OptionError(
    "policy",
    repr(text),
    "ROWSxBATCHES:WEIGHTS,CACHE,HIDDEN, each device/host in percent",
    "pass e.g. 48x3:20/80,0/100,0/100",
  )


# ---------------------------------------------------------------------------
# Affine forms
# ---------------------------------------------------------------------------


def _affine(
  constant: float = 0.0, **shares: tuple[float, float, float]
) -> Affine:
  """coefficients x fractions + constant; `shares` by kind, each by tier."""
  found = np.zeros(10)
  for kind, given in shares.items():
    at = 3 * KINDS.index(kind)
    found[at : at + 3] += given
  found[9] = constant
  return found


def value(form: Affine, fractions: Fractions) -> float:
  """The value of an affine form."""
  return float(form[:9] @ fractions + form[9])


@dataclasses.dataclass(frozen=True)
class OffloadForms:
  """Times and peaks of a block, affine in the fractions.

  Attributes:
    times: by phase ("prefill", "decode", "head") and part, seconds: of a layer
      over all rows of a block, for the prompt and for a token; of the head.
    peaks: (tier, phase, what, form): bytes that must be there at once.
    kept: by kind, bytes of all of it at the end, wherever they are.
  """

  times: Mapping[str, Mapping[str, Affine]]
  peaks: tuple[tuple[str, str, str, Affine], ...]
  kept: Mapping[str, float]


def forms(
  shape: OffloadShape,
  machine: OffloadMachine,
  task: OffloadTask,
  rows: int,
  batches: int,
) -> OffloadForms:
  """The times and peaks of a block of `rows` x `batches`."""
  return OffloadForms(
    _times(shape, machine, task, rows, batches),
    _peaks(shape, task, rows, batches),
    _kept(shape, task, rows * batches),
  )


def _bytes(
  shape: OffloadShape, task: OffloadTask
) -> tuple[float, float, float]:
  """(W, C, E): of a layer, of a token's keys in a layer, of a hidden state."""
  return (
    shape.weights * BYTES[task.weight_bits],
    shape.kv * BYTES[task.cache_bits],
    2.0 * shape.embed,
  )


def _kept(
  shape: OffloadShape, task: OffloadTask, block: int
) -> dict[str, float]:
  W, C, E = _bytes(shape, task)
  tables = shape.tables * BYTES[task.weight_bits]
  tokens = task.prompt + task.new
  return {
    "weights": W * shape.layers + tables,
    "cache": tokens * C * block * shape.layers,
    "hidden": E * block,
  }


def _times(
  shape: OffloadShape,
  machine: OffloadMachine,
  task: OffloadTask,
  rows: int,
  batches: int,
) -> dict[str, dict[str, Affine]]:
  m, s, n, b = machine, task.prompt, task.new, rows * batches
  W, C, E = _bytes(shape, task)
  host = task.attends_on_host
  away = lambda x: (0.0, x, x)
  disk = lambda x: (0.0, 0.0, x)
  keys = (s + n / 2) * b  # that a token of each row sees, in the mean
  prefill = {
    "to_device": _affine(
      weights=away(W / m.to_device), hidden=away(s * E * b / m.to_device)
    ),
    "from_device": _affine(
      cache=away((s + 1) * C * b / m.from_device_cache),
      hidden=away(s * E * b / m.from_device_hidden),
    ),
    "disk_read": _affine(
      weights=disk(W / m.disk_read), hidden=disk(s * E * b / m.disk_read)
    ),
    "disk_write": _affine(
      cache=disk((s + 1) * C * b / m.disk_write_cache),
      hidden=disk(s * E * b / m.disk_write_hidden),
    ),
    "compute": _affine(
      2 * b * s * shape.active / m.prefill_flops
      + shape.attend * b * s**2 / m.prefill_attention_flops
    ),
  }
  reading = m.disk_read * (m.weight_read_part if task.form == "code" else 1)
  on_device = shape.attend * keys / m.decode_attention_flops
  on_host = (
    shape.attend * keys / (m.host_flops * host_part(m, shape, task, rows))
  )
  moved = 0.0 if host else keys * C / m.to_device
  stored = 0.0 if host else C * b / m.from_device_cache
  elsewhere = on_host if host else on_device
  decode = {
    "to_device": _affine(
      weights=away(W / m.to_device),
      hidden=away(E * b / m.to_device),
      cache=away(moved),
    ),
    "from_device": _affine(
      hidden=away(E * b / m.from_device_hidden), cache=away(stored)
    ),
    "disk_read": _affine(
      weights=disk(W / reading),
      cache=disk(keys * C / m.disk_read),
      hidden=disk(E * b / m.disk_read),
    ),
    "disk_write": _affine(
      cache=disk(C * b / m.disk_write_decode),
      hidden=disk(E * b / m.disk_write_decode),
    ),
    "compute": _affine(
      2 * b * shape.active / m.decode_flops,
      cache=(on_device, elsewhere, elsewhere),
    ),
  }
  table = shape.head * BYTES[task.weight_bits]
  head = {
    "to_device": _affine(weights=away(table / m.to_device)),
    "from_device": _affine(),
    "disk_read": _affine(weights=disk(table / reading)),
    "disk_write": _affine(),
    "compute": _affine(2 * b * shape.head / m.decode_flops),
  }
  return {"prefill": prefill, "decode": decode, "head": head}


def host_part(
  machine: OffloadMachine, shape: OffloadShape, task: OffloadTask, rows: int
) -> float:
  """Part of the host's rate of attention that a batch of `rows` reaches."""
  if task.form != "code":
    return 1.0
  c1, c2, c3 = machine.host_slope
  x = max(0.0, math.log2(64 / rows))
  y = max(0.0, math.log2(4096 / shape.embed))
  return max(0.1, 1 + c1 * x * y - c2 * x - c3 * y)


def joined(
  form: str, phase: str, times: Mapping[str, Affine]
) -> dict[str, Affine]:
  """The sums of which a phase takes the largest, by the names of their parts.

  The head goes by the rule of a token.
  """
  if form == "paper":
    return dict(times)
  if phase == "prefill":
    groups = [
      ("to_device", "disk_read"), ("from_device", "disk_write"), ("compute",)
    ]  # fmt: skip
  else:
    groups = [("to_device", part) for part in PARTS[1:]]
  return {
    " + ".join(group): np.sum([times[part] for part in group], 0)
    for group in groups
  }


# ---------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------


def _peaks(
  shape: OffloadShape, task: OffloadTask, rows: int, batches: int
) -> tuple[tuple[str, str, str, Affine], ...]:
  """Bytes that must be in each tier at once: what is kept there, and at work.

  Of the device: two layers' weights that stream in, a batch's hidden states
  and cache, and the largest step of a layer or all of them (`task.working`).
  """
  s, n, b = task.prompt, task.new, rows * batches
  W, C, E = _bytes(shape, task)
  total = _kept(shape, task, b)
  L, all_w, scores = shape.layers, total["weights"], int(shape.scores)
  found: list[tuple[str, str, str, Affine]] = []
  for phase, q, seen in (("prefill", s, s), ("decode", 1, s + n)):
    decode = phase == "decode"
    # Device and disk have room for the whole cache from the start; the host's
    # part grows while tokens are generated.
    token = C * b * L
    cache = {"device": (s + n) * token, "host": seen * token}
    cache["disk"] = cache["device"]
    kept = {
      tier: _only(tier, weights=all_w, hidden=q * E * b, cache=cache[tier])
      for tier in TIERS
    }
    # The device: what streams through it.
    passing = _affine(
      2 * W + q * E * rows,
      weights=(-2 * W, 0.0, 0.0),
      hidden=(-q * E * rows, 0.0, 0.0),
    )
    if decode:
      passing = passing + _seen(task, rows * (s + n) * C)
    for what, step in _steps(shape, task, rows, q, seen, scores).items():
      found.append(("device", phase, what, kept["device"] + passing + step))
    # The host: what passes through it.
    if decode:
      through = _affine(
        2 * shape.heads * (s + n) * rows * scores + E * rows,
        weights=(0.0, 0.0, W),
        hidden=(0.0, 0.0, 2 * E * rows),
        cache=(0.0, 0.0, 2 * (s + n) * C * rows),
      )
    else:
      through = _affine(
        W + s * E * rows,
        weights=(-W, 0.0, 0.0),
        hidden=(-s * E * rows, 0.0, 0.0),
      )
    found.append(("host", phase, "", kept["host"] + through))
    found.append(("disk", phase, "", kept["disk"]))
  return tuple(found)


def _only(tier: str, **totals: float) -> Affine:
  """Bytes kept in one tier."""
  at = TIERS.index(tier)
  shares: Any = {
    kind: tuple(total if i == at else 0.0 for i in range(3))
    for kind, total in totals.items()
  }
  return _affine(**shares)


def _seen(task: OffloadTask, nbytes: float) -> Affine:
  """Bytes of keys at work on the device: of its part, or of all."""
  if task.attends_on_host:
    return _affine(cache=(nbytes, 0.0, 0.0))
  return _affine(nbytes)


def _steps(
  shape: OffloadShape,
  task: OffloadTask,
  rows: int,
  q: int,
  seen: int,
  scores: int,
) -> dict[str, Affine]:
  """Bytes at work in a layer's steps on the device, or in all of them."""
  D, N, F = shape.embed, shape.queries, shape.hidden
  matrix = 2.0 * rows * shape.heads * q * seen * scores
  half = rows * seen * shape.kv  # keys, or values, in 16 bits
  query = 2.0 * rows * q * N
  qkv = _affine(2.0 * rows * q * (D + N + shape.kv))
  out = _affine(2.0 * rows * q * (N + D))
  attends = lambda x: _seen(task, x) if q == 1 else _affine(x)
  if not task.adds_steps:
    return {
      "projections": qkv,
      "attention": attends(2 * query + half + matrix),
      "output": out,
      "feedforward": _affine(2.0 * rows * q * (D + F)),
    }
  # Whole prompts: the released model counts queries in place of keys.
  held = half if q == 1 else 0.0
  steps = (
    qkv + attends(2 * query + 2 * held + matrix) + out
    + _affine(2.0 * rows * q * (F + D))
  )  # fmt: skip
  return {"all steps": steps}


# ---------------------------------------------------------------------------
# A given policy
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadEstimate:
  """What a policy takes.

  Attributes:
    tokens_s: new tokens a second, of all rows.
    prefill_s: seconds of a block's prompts.
    decode_s: seconds of its tokens after the first.
    prefill: seconds of each part, of a layer.
    decode: the same, of a token of each row.
    binds: the parts that a phase waits for, "prefill" and "decode".
    held: bytes by tier and kind, at the end, when hidden states are those of
      one token of each row.
    peak: largest bytes by tier.
    limit: bytes by tier that may be filled.
  """

  tokens_s: float
  prefill_s: float
  decode_s: float
  prefill: Mapping[str, float]
  decode: Mapping[str, float]
  binds: Mapping[str, str]
  held: Mapping[str, Mapping[str, float]]
  peak: Mapping[str, float]
  limit: Mapping[str, float]

  @property
  def fits(self) -> bool:
    """Whether every tier's peak is within what may be filled."""
    return all(
      self.peak[tier] <= self.limit[tier] * (1 + 1e-6) for tier in TIERS
    )

  @property
  def seconds(self) -> float:
    """Of a block, from its prompts to its last tokens."""
    return self.prefill_s + self.decode_s

  def record(self) -> dict[str, Any]:
    """As JSON has it."""
    return files.record(self, "fits", "seconds")


def estimate(
  shape: OffloadShape,
  machine: OffloadMachine,
  task: OffloadTask,
  policy: OffloadPolicy,
) -> OffloadEstimate:
  """The times and the memory of a policy, whether it fits or not.

  Raises:
    OptionError: hidden states on disk with the form "code".
  """
  if task.form == "code" and policy.hidden[2] > 1e-6:
    raise OptionError(
      "hidden",
      f"{100 * policy.hidden[2]:.3g} % on disk with form='code'",
      "hidden states on device and host",
      "place them there, or pass form='paper'",
    )
  x = policy.fractions()
  made = forms(shape, machine, task, policy.rows, policy.batches)
  found, binds = {}, {}
  for phase, times in made.times.items():
    sums = joined(task.form, phase, times)
    binds[phase] = max(sums, key=lambda name: value(sums[name], x))
    found[phase] = value(sums[binds[phase]], x)
  prefill_s = shape.layers * found["prefill"] + found["head"]
  decode_s = (task.new - 1) * (shape.layers * found["decode"] + found["head"])
  peak = dict.fromkeys(TIERS, 0.0)
  for tier, _, _, form in made.peaks:
    peak[tier] = max(peak[tier], value(form, x))
  parts = {
    phase: {part: value(form, x) for part, form in made.times[phase].items()}
    for phase in ("prefill", "decode")
  }
  return OffloadEstimate(
    tokens_s=policy.block * task.new / (prefill_s + decode_s),
    prefill_s=prefill_s,
    decode_s=decode_s,
    prefill=parts["prefill"],
    decode=parts["decode"],
    binds={phase: binds[phase] for phase in ("prefill", "decode")},
    held={
      tier: {kind: made.kept[kind] * getattr(policy, kind)[i] for kind in KINDS}
      for i, tier in enumerate(TIERS)
    },
    peak=peak,
    limit=machine.tier_bytes(),
  )
