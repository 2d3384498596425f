"""Cost model of offloading to three tiers: times and memory, as affine forms.

A policy places fractions of the weights, of the cache and of the hidden states
on device, host and disk: w, c, h, three fractions each. For a given block of
rows every time and every peak of memory is affine in these nine numbers, so
that the best placement is a linear program. A block is `rows` x `batches`: one
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

each at its bandwidth. The fifth time is compute: products, and attention where
the cache is. Two formulas combine the five:

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
from ringjax.kv.codecs import Floats, Integers
from ringjax.plan import files
from ringjax.plan.flexgen.offload_tiers import (
  TIERS,
  OffloadMachine,
  OffloadShape,
)

FORMS = ("paper", "code")
WORKING = ("largest", "sum")
PARTS = ("to_device", "from_device", "disk_read", "disk_write", "compute")
KINDS = ("weights", "cache", "hidden")
# Bytes of a number, by its bits: bfloat16, or codes in groups of 64 that have a
# scale and a minimum each.
BYTES = {
  16: Floats(format="bfloat16").width(64) / 64,
  4: Integers(bits=4, group=64).width(64) / 64,
}
# Nine coefficients, for `KINDS` by `TIERS`, and a constant.
Affine = Float[np.ndarray, " coefficients"]
Fractions = Float[np.ndarray, " fractions"]


# ---------------------------------------------------------------------------
# Tasks and policies
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadTask:
  """A generation task, and how its numbers are stored.

  Attributes:
    prompt: Tokens of each row's prompt, s.
    new: Tokens that each row generates, n.
    form: Model of how times overlap, one of `FORMS`.
    working: Memory of a layer's steps on the device, the "largest" or their
      "sum"; None: the largest with the form "paper", the sum with "code".
    weight_bits: Bits of a weight, 16 or 4.
    cache_bits: Bits of a cached number, 16 or 4; with 4 bits attention is on
      the device.
    host_attention: Whether new tokens attend on the host to the part of the
      cache that is not on the device; else that part is moved at each step.
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
  """Block size, and the fractions of weights, cache and states in each tier.

  Attributes:
    rows: Rows of a batch on the device.
    batches: Batches of a block, which share a layer's weights.
    weights: Fractions of the weights on device, host and disk; their sum is 1.
    cache: Fractions of keys and values on device, host and disk.
    hidden: Fractions of hidden states on device, host and disk.
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
      fractions = getattr(self, kind)
      for fraction in fractions:
        number(kind, fraction, least=0, most=1)
      if len(fractions) != 3 or not math.isclose(
        sum(fractions), 1.0, abs_tol=1e-6
      ):
        raise OptionError(
          kind,
          f"{fractions}",
          "fractions on device, host and disk that add up to 1",
          f"change {kind} so that the sum is 1",
        )

  @property
  def block(self) -> int:
    """Rows of a block."""
    return self.rows * self.batches

  def fractions(self) -> Fractions:
    """All fractions, in the order of `KINDS` by `TIERS`."""
    return np.array([*self.weights, *self.cache, *self.hidden], np.float64)

  @classmethod
  def parse(cls, text: str) -> OffloadPolicy:
    """Parse a policy: ROWSxBATCHES:WEIGHTS,CACHE,HIDDEN, e.g. 48x3:20/80,...

    Each of the three is the percentage on the device / on the host; the rest up
    to 100 is on the disk.

    Raises:
      OptionError: If the text has another form, or more than 100 %.
    """
    block, _, shares_text = text.partition(":")
    try:
      rows, batches = (int(size) for size in block.split("x"))
      shares = []
      for share_text in shares_text.split(","):
        device, host = (
          float(percentage) / 100 for percentage in share_text.split("/")
        )
        shares.append((device, host, max(0.0, 1 - device - host)))
      weights, cache, hidden = shares
    except ValueError:
      raise _unreadable(text) from None
    return cls(
      rows=rows, batches=batches, weights=weights, cache=cache, hidden=hidden
    )

  def __str__(self) -> str:
    percent = lambda fraction: f"{100 * fraction:.3g}"
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
  coefficients = np.zeros(10)
  for kind, tier_coefficients in shares.items():
    start = 3 * KINDS.index(kind)
    coefficients[start : start + 3] += tier_coefficients
  coefficients[9] = constant
  return coefficients


def value(form: Affine, fractions: Fractions) -> float:
  """Evaluate an affine form."""
  return float(form[:9] @ fractions + form[9])


@dataclasses.dataclass(frozen=True)
class OffloadForms:
  """Times and peaks of a block, affine in the fractions.

  Attributes:
    times: Seconds by phase ("prefill", "decode", "head") and part: of a layer
      over all rows of a block, for the prompt and for a token; of the head.
    peaks: (tier, phase, step, form): bytes that must be there at once.
    final_bytes: Total bytes at the end by kind, in all tiers.
  """

  times: Mapping[str, Mapping[str, Affine]]
  peaks: tuple[tuple[str, str, str, Affine], ...]
  final_bytes: Mapping[str, float]


def forms(
  shape: OffloadShape,
  machine: OffloadMachine,
  task: OffloadTask,
  rows: int,
  batches: int,
) -> OffloadForms:
  """Times and peaks of a block of `rows` x `batches`."""
  return OffloadForms(
    _times(shape, machine, task, rows, batches),
    _peaks(shape, task, rows, batches),
    _kept(shape, task, rows * batches),
  )


def _bytes(
  shape: OffloadShape, task: OffloadTask
) -> tuple[float, float, float]:
  """(W, C, E): bytes of a layer, of a token's keys in it, of a hidden state."""
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
  off_device = lambda x: (0.0, x, x)
  on_disk = lambda x: (0.0, 0.0, x)
  keys = (s + n / 2) * b  # that a token of each row sees, in the mean
  prefill = {
    "to_device": _affine(
      weights=off_device(W / m.to_device),
      hidden=off_device(s * E * b / m.to_device),
    ),
    "from_device": _affine(
      cache=off_device((s + 1) * C * b / m.from_device_cache),
      hidden=off_device(s * E * b / m.from_device_hidden),
    ),
    "disk_read": _affine(
      weights=on_disk(W / m.disk_read), hidden=on_disk(s * E * b / m.disk_read)
    ),
    "disk_write": _affine(
      cache=on_disk((s + 1) * C * b / m.disk_write_cache),
      hidden=on_disk(s * E * b / m.disk_write_hidden),
    ),
    "compute": _affine(
      2 * b * s * shape.active / m.prefill_flops
      + shape.attend * b * s**2 / m.prefill_attention_flops
    ),
  }
  read_bytes_s = m.disk_read * (
    m.weight_read_part if task.form == "code" else 1
  )
  on_device = shape.attend * keys / m.decode_attention_flops
  on_host = (
    shape.attend * keys / (m.host_flops * host_part(m, shape, task, rows))
  )
  moved_s = 0.0 if host else keys * C / m.to_device
  stored_s = 0.0 if host else C * b / m.from_device_cache
  off_device_s = on_host if host else on_device
  decode = {
    "to_device": _affine(
      weights=off_device(W / m.to_device),
      hidden=off_device(E * b / m.to_device),
      cache=off_device(moved_s),
    ),
    "from_device": _affine(
      hidden=off_device(E * b / m.from_device_hidden),
      cache=off_device(stored_s),
    ),
    "disk_read": _affine(
      weights=on_disk(W / read_bytes_s),
      cache=on_disk(keys * C / m.disk_read),
      hidden=on_disk(E * b / m.disk_read),
    ),
    "disk_write": _affine(
      cache=on_disk(C * b / m.disk_write_decode),
      hidden=on_disk(E * b / m.disk_write_decode),
    ),
    "compute": _affine(
      2 * b * shape.active / m.decode_flops,
      cache=(on_device, off_device_s, off_device_s),
    ),
  }
  table_bytes = shape.head * BYTES[task.weight_bits]
  head = {
    "to_device": _affine(weights=off_device(table_bytes / m.to_device)),
    "from_device": _affine(),
    "disk_read": _affine(weights=on_disk(table_bytes / read_bytes_s)),
    "disk_write": _affine(),
    "compute": _affine(2 * b * shape.head / m.decode_flops),
  }
  return {"prefill": prefill, "decode": decode, "head": head}


def host_part(
  machine: OffloadMachine, shape: OffloadShape, task: OffloadTask, rows: int
) -> float:
  """Fraction of the host's attention rate that a batch of `rows` reaches."""
  if task.form != "code":
    return 1.0
  c1, c2, c3 = machine.host_slope
  x = max(0.0, math.log2(64 / rows))
  y = max(0.0, math.log2(4096 / shape.embed))
  return max(0.1, 1 + c1 * x * y - c2 * x - c3 * y)


def joined(
  form: str, phase: str, times: Mapping[str, Affine]
) -> dict[str, Affine]:
  """Sums of which a phase takes the largest, by the names of their parts.

  The head follows the rule of a token.
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
  """Bytes that each tier needs at once: kept data, and data at work.

  On the device: two layers' weights that stream in, a batch's hidden states
  and cache, and the largest step of a layer or all steps (`task.working`).
  """
  s, n, b = task.prompt, task.new, rows * batches
  W, C, E = _bytes(shape, task)
  total = _kept(shape, task, b)
  L, all_w, scores = shape.layers, total["weights"], int(shape.scores)
  peaks: list[tuple[str, str, str, Affine]] = []
  for phase, q, keys_seen in (("prefill", s, s), ("decode", 1, s + n)):
    decode = phase == "decode"
    # Device and disk have room for the whole cache from the start; the host's
    # part grows while tokens are generated.
    token = C * b * L
    cache = {"device": (s + n) * token, "host": keys_seen * token}
    cache["disk"] = cache["device"]
    kept_by_tier = {
      tier: _kept_in_tier(
        tier, weights=all_w, hidden=q * E * b, cache=cache[tier]
      )
      for tier in TIERS
    }
    # The device: data that streams through it.
    passing = _affine(
      2 * W + q * E * rows,
      weights=(-2 * W, 0.0, 0.0),
      hidden=(-q * E * rows, 0.0, 0.0),
    )
    if decode:
      passing = passing + _keys_at_work(task, rows * (s + n) * C)
    for step_name, step in _steps(
      shape, task, rows, q, keys_seen, scores
    ).items():
      peaks.append(
        ("device", phase, step_name, kept_by_tier["device"] + passing + step)
      )
    # The host: data that passes through it.
    if decode:
      passing_host = _affine(
        2 * shape.heads * (s + n) * rows * scores + E * rows,
        weights=(0.0, 0.0, W),
        hidden=(0.0, 0.0, 2 * E * rows),
        cache=(0.0, 0.0, 2 * (s + n) * C * rows),
      )
    else:
      passing_host = _affine(
        W + s * E * rows,
        weights=(-W, 0.0, 0.0),
        hidden=(-s * E * rows, 0.0, 0.0),
      )
    peaks.append(("host", phase, "", kept_by_tier["host"] + passing_host))
    peaks.append(("disk", phase, "", kept_by_tier["disk"]))
  return tuple(peaks)


def _kept_in_tier(tier: str, **totals: float) -> Affine:
  """Affine form of the bytes kept in one tier."""
  index = TIERS.index(tier)
  shares: Any = {
    kind: tuple(total if i == index else 0.0 for i in range(3))
    for kind, total in totals.items()
  }
  return _affine(**shares)


def _keys_at_work(task: OffloadTask, nbytes: float) -> Affine:
  """Bytes of keys that attention uses on the device: its part, or all."""
  if task.attends_on_host:
    return _affine(cache=(nbytes, 0.0, 0.0))
  return _affine(nbytes)


def _steps(
  shape: OffloadShape,
  task: OffloadTask,
  rows: int,
  q: int,
  keys_seen: int,
  scores: int,
) -> dict[str, Affine]:
  """Bytes at work in a layer's steps on the device, by step or in all."""
  D, N, F = shape.embed, shape.queries, shape.hidden
  matrix = 2.0 * rows * shape.heads * q * keys_seen * scores
  half_bytes = rows * keys_seen * shape.kv  # keys, or values, in 16 bits
  query = 2.0 * rows * q * N
  qkv = _affine(2.0 * rows * q * (D + N + shape.kv))
  out = _affine(2.0 * rows * q * (N + D))
  attends = lambda x: _keys_at_work(task, x) if q == 1 else _affine(x)
  if not task.adds_steps:
    return {
      "projections": qkv,
      "attention": attends(2 * query + half_bytes + matrix),
      "output": out,
      "feedforward": _affine(2.0 * rows * q * (D + F)),
    }
  # With whole prompts, the released model counts queries instead of keys.
  key_bytes = half_bytes if q == 1 else 0.0
  steps = (
    qkv + attends(2 * query + 2 * key_bytes + matrix) + out
    + _affine(2.0 * rows * q * (F + D))
  )  # fmt: skip
  return {"all steps": steps}


# ---------------------------------------------------------------------------
# Estimate of a given policy
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadEstimate:
  """Predicted times and memory of a policy.

  Attributes:
    tokens_s: New tokens per second, of all rows.
    prefill_s: Seconds of a block's prompts.
    decode_s: Seconds of its tokens after the first.
    prefill: Seconds of a layer by part, for prompts.
    decode: Seconds of a layer by part, for a token of each row.
    binds: Limiting parts of each phase, "prefill" and "decode".
    final_bytes: Bytes by tier and kind at the end, with hidden states of one
      token of each row.
    peak: Largest bytes by tier.
    limit: Bytes that may be filled, by tier.
  """

  tokens_s: float
  prefill_s: float
  decode_s: float
  prefill: Mapping[str, float]
  decode: Mapping[str, float]
  binds: Mapping[str, str]
  final_bytes: Mapping[str, Mapping[str, float]]
  peak: Mapping[str, float]
  limit: Mapping[str, float]

  @property
  def fits(self) -> bool:
    """Whether every tier's peak is within its limit."""
    return all(
      self.peak[tier] <= self.limit[tier] * (1 + 1e-6) for tier in TIERS
    )

  @property
  def seconds(self) -> float:
    """Seconds of a block, from its prompts to its last tokens."""
    return self.prefill_s + self.decode_s

  def record(self) -> dict[str, Any]:
    """Fields and properties as a dict for JSON."""
    return files.record(self, "fits", "seconds")


def estimate(
  shape: OffloadShape,
  machine: OffloadMachine,
  task: OffloadTask,
  policy: OffloadPolicy,
) -> OffloadEstimate:
  """Estimate the times and the memory of a policy, whether it fits or not.

  Raises:
    OptionError: If hidden states are on disk with the form "code".
  """
  if task.form == "code" and policy.hidden[2] > 1e-6:
    raise OptionError(
      "hidden",
      f"{100 * policy.hidden[2]:.3g} % on disk with form='code'",
      "hidden states on device and host",
      "place them there, or pass form='paper'",
    )
  fractions = policy.fractions()
  affine_forms = forms(shape, machine, task, policy.rows, policy.batches)
  phase_s, binds = {}, {}
  for phase, times in affine_forms.times.items():
    sums = joined(task.form, phase, times)
    binds[phase] = max(sums, key=lambda name: value(sums[name], fractions))
    phase_s[phase] = value(sums[binds[phase]], fractions)
  prefill_s = shape.layers * phase_s["prefill"] + phase_s["head"]
  decode_s = (task.new - 1) * (
    shape.layers * phase_s["decode"] + phase_s["head"]
  )
  peak = dict.fromkeys(TIERS, 0.0)
  for tier, _, _, form in affine_forms.peaks:
    peak[tier] = max(peak[tier], value(form, fractions))
  parts = {
    phase: {
      part: value(form, fractions)
      for part, form in affine_forms.times[phase].items()
    }
    for phase in ("prefill", "decode")
  }
  return OffloadEstimate(
    tokens_s=policy.block * task.new / (prefill_s + decode_s),
    prefill_s=prefill_s,
    decode_s=decode_s,
    prefill=parts["prefill"],
    decode=parts["decode"],
    binds={phase: binds[phase] for phase in ("prefill", "decode")},
    final_bytes={
      tier: {
        kind: affine_forms.final_bytes[kind] * getattr(policy, kind)[i]
        for kind in KINDS
      }
      for i, tier in enumerate(TIERS)
    },
    peak=peak,
    limit=machine.tier_bytes(),
  )
