"""Times of an instance's calls by seven constants, fitted or predicted.

On t devices that share every layer (tensor parallelism) a call takes

  prefill   f + a n / t + p sum(n (n + 2 c)) / t + s n (t - 1) / t
  decode    f + w / t + r rows / t + k cached / t + s rows (t - 1) / t

n new tokens behind c cached ones. The constants are not negative and hold for
all t: f of any call, a of a new token, p of a pair, s of a token's sums over
devices, w of reading the weights, r of a row, k of a cached token. They are
fitted to measured calls, wherever these are from (a profile of this machine, a
table of kernels, a compiler's estimates), by non-negative least squares on
relative errors; or predicted from what a data sheet says of a chip.
Ref: Zhong et al. 2024, DistServe (OSDI), arXiv 2401.09670, appendix A; Lawson
and Hanson 1974 for the fit.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringjax.checks import integer, number, one_of, positive_int
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link, Machine, number_bytes
from ringjax.plan.offload_tiers import OffloadShape
from ringjax.serve.cluster.phase_times import QuadraticTimes
from ringjax.serve.simulate import StepCost

PHASES = ("prefill", "decode")
_COLUMNS = ("phase", "devices", "tokens", "cached", "seconds")
# Of a file that a live engine writes.
CALL_COLUMNS = (*_COLUMNS, "prompts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredCall:
  """One call and how long it took.

  Attributes:
    phase: of `PHASES`.
    devices: that share every layer, t.
    tokens: of prefill the new ones of each prompt; of decode the rows.
    cached: of prefill before each prompt; of decode of all rows together.
    seconds: of the call.
    prompts: of a call of prefill, which are alike.
  """

  phase: str
  devices: int
  tokens: int
  cached: int | float
  seconds: int | float
  prompts: int = 1

  def __post_init__(self) -> None:
    one_of("phase", self.phase, PHASES)
    for name in ("devices", "tokens", "prompts"):
      positive_int(name, getattr(self, name))
    number("cached", self.cached, least=0)
    number("seconds", self.seconds, above=0)

  def features(self) -> tuple[float, ...]:
    """What the constants f, a, p, s, w, r, k are multiplied with."""
    t, n = self.devices, self.tokens
    if self.phase == "prefill":
      new = self.prompts * n
      pairs = new * (n + 2 * self.cached)
      return (1.0, new / t, pairs / t, new * (t - 1) / t, 0.0, 0.0, 0.0)
    return (1.0, 0.0, 0.0, n * (t - 1) / t, 1 / t, n / t, self.cached / t)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorTimes:
  """The seven constants, in seconds.

  Attributes:
    fixed_s: f, of a call.
    token_s: a, of a new token.
    pair_s: p, of n (n + 2 c).
    reduce_s: s, of a token whose sums cross devices.
    weights_s: w, of a step's reading all weights.
    row_s: r, of a row.
    cached_s: k, of a cached token.
  """

  fixed_s: int | float = 0.0
  token_s: int | float = 0.0
  pair_s: int | float = 0.0
  reduce_s: int | float = 0.0
  weights_s: int | float = 0.0
  row_s: int | float = 0.0
  cached_s: int | float = 0.0

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      number(field.name, getattr(self, field.name), least=0)

  def at(self, devices: int) -> QuadraticTimes:
    """The times of an instance of so many devices."""
    t = positive_int("devices", devices)
    shared = self.reduce_s * (t - 1) / t
    return QuadraticTimes(
      prefill_fixed_s=self.fixed_s,
      prefill_token_s=self.token_s / t + shared,
      prefill_pair_s=self.pair_s / t,
      decode_fixed_s=self.fixed_s + self.weights_s / t,
      decode_row_s=self.row_s / t + shared,
      decode_token_s=self.cached_s / t,
    )

  def predict_s(self, call: MeasuredCall) -> float:
    """Seconds that a call is expected to take."""
    return float(np.dot(dataclasses.astuple(self), call.features()))

  def errors(self, calls: Sequence[MeasuredCall]) -> list[float]:
    """Relative errors of the predictions, one for each call."""
    return [self.predict_s(one) / one.seconds - 1 for one in calls]

  @classmethod
  def fit(cls, calls: Sequence[MeasuredCall]) -> TensorTimes:
    """The constants that explain measured calls best, relative to their times.

    Args:
      calls: of both phases; of several numbers of devices, else what sums over
        devices take stays 0.

    Raises:
      OptionError: fewer than 8 calls, or scipy is not installed.
    """
    if len(calls) < 8:
      raise OptionError(
        "calls", f"{len(calls)} of them", "at least 8", "measure more"
      )
    found = _least_squares(
      [one.features() for one in calls], [one.seconds for one in calls]
    )
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**dict(zip(names, found, strict=True)))

  @classmethod
  def on(
    cls, machine: Machine, shape: OffloadShape, *, dtype: str = "bfloat16"
  ) -> TensorTimes:
    """Predicts the constants from the stated figures of a machine.

    Products at the stated rate, attention at its kernel's part of it, weights
    and cached tokens at the rate of the memory, two sums over devices a layer.
    What could overlap is added up.

    Args:
      machine: the devices.
      shape: of the model.
      dtype: of weights and keys.
    """
    chip, width, layers = machine.chip, number_bytes(dtype), shape.layers
    rate, links = chip.rate(dtype), machine.links
    # Any of the axes: a call of tensor parallelism has one of its own.
    link = links if isinstance(links, Link) else next(
      iter(dict(links).values())
    )  # fmt: skip
    token_s = 2 * (layers * shape.active + shape.head) / rate
    half = layers * shape.attend / 2
    return cls(
      fixed_s=layers * (machine.hop_s + machine.call_s),
      token_s=2 * layers * shape.active / rate,
      pair_s=half / (rate * machine.part("kernel")[0]),
      reduce_s=layers * 4 * shape.embed * width / link.bandwidth,
      weights_s=layers * shape.weights * width / chip.hbm_bandwidth,
      row_s=token_s,
      cached_s=layers * shape.kv * width / chip.hbm_bandwidth,
    )


def _least_squares(
  features: Sequence[Sequence[int | float]], seconds: Sequence[int | float]
) -> list[float]:
  """Constants that are not negative, by relative errors."""
  try:
    optimize: Any = importlib.import_module("scipy.optimize")
  except ModuleNotFoundError:
    raise OptionError(
      "fit",
      "a fit, but scipy is not installed",
      "scipy, or constants",
      "pip install 'ringjax[plan]'",
    ) from None
  rows = np.array(features, np.float64) / np.array(seconds)[:, None]
  # Constants are of very different sizes: columns of norm one are solved.
  norms = np.linalg.norm(rows, axis=0)
  norms[norms == 0] = 1
  found = optimize.nnls(rows / norms, np.ones(len(rows)))[0] / norms
  return found.tolist()


def instance_times(calls: Sequence[MeasuredCall]) -> QuadraticTimes:
  """The times of the one instance whose calls were measured.

  Each phase has constants of its own, fitted to its own calls.

  Args:
    calls: of both phases and one number of devices.

  Raises:
    OptionError: calls of one phase only, or of several numbers of devices.
  """
  found: list[float] = []
  devices = {one.devices for one in calls}
  for phase in PHASES:
    some = [one for one in calls if one.phase == phase]
    if not some or len(devices) > 1:
      raise OptionError(
        "calls",
        f"{len(some)} of {phase}, on {sorted(devices)} devices",
        "calls of prefill and decode of one instance",
        "measure both, or fit TensorTimes to several numbers of devices",
      )
    found += _least_squares(
      [
        (
          1.0,
          one.prompts * one.tokens,
          one.prompts * one.tokens * (one.tokens + 2 * one.cached),
        )
        if phase == "prefill"
        else (1.0, one.tokens, one.cached)
        for one in some
      ],
      [one.seconds for one in some],
    )
  names = [field.name for field in dataclasses.fields(QuadraticTimes)]
  return QuadraticTimes(**dict(zip(names, found, strict=True)))


def engine_times(cost: StepCost) -> QuadraticTimes:
  """The times of an engine whose steps were measured (`measure_cost`).

  What its two calls share counts for each, as if they came in steps apart.
  """
  return QuadraticTimes(
    prefill_fixed_s=cost.step + cost.prompts,
    # A query sees itself too: n (n + 1) / 2 + n c keys.
    prefill_token_s=cost.token + cost.pair / 2,
    prefill_pair_s=cost.pair / 2,
    decode_fixed_s=cost.step + cost.answers,
    decode_row_s=cost.row,
    decode_token_s=cost.key,
  )


def read_calls(path: str | os.PathLike[str]) -> list[MeasuredCall]:
  """Measured calls of a csv: phase, devices, tokens, cached, seconds.

  A column prompts is optional; see `MeasuredCall`. A last line that a process
  or a disk has cut, without its end and its last column, is left out.

  Raises:
    OptionError: it cannot be read, or a line is not of the format.
  """
  try:
    text = pathlib.Path(path).read_text("utf-8")
  except (OSError, ValueError) as error:
    raise OptionError("calls", error, "a csv file", "pass its path") from None
  lines, found = text.splitlines(), []
  cut = len(lines) > 1 and not text.endswith("\n")
  if cut and lines[-1].count(",") < lines[0].count(","):
    del lines[-1]
  for n, row in enumerate(csv.DictReader(lines), 2):
    try:
      found.append(
        MeasuredCall(
          phase=row["phase"],
          devices=int(row["devices"]),
          tokens=int(row["tokens"]),
          cached=integer("cached", int(row["cached"]), least=0),
          seconds=float(row["seconds"]),
          prompts=int(row.get("prompts") or 1),
        )
      )
    except (KeyError, TypeError, ValueError) as error:
      raise OptionError(
        "calls",
        f"line {n}: {error}",
        f"columns {', '.join(_COLUMNS)}",
        "see MeasuredCall for what each means",
      ) from None
  return found
