"""Times of an instance's calls as seven constants, fitted or predicted.

On t devices that share every layer (tensor parallelism) a call takes

  prefill   f + a n / t + p sum(n (n + 2 c)) / t + s n (t - 1) / t
  decode    f + w / t + r rows / t + k cached / t + s rows (t - 1) / t

for n new tokens after c cached ones. The constants are not negative and hold
for all t: f of any call, a of a new token, p of a pair, s of a token's
all-reduces, w of reading the weights, r of a row, k of a cached token. They are
fitted to measured calls of any source (a profile of this machine, a table of
kernels, a compiler's estimates) by non-negative least squares on relative
errors; or predicted from a chip's data sheet.
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

import numpy as np

from ringjax.checks import integer, number, one_of, positive_int
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link, Machine, number_bytes
from ringjax.plan.flexgen.offload_tiers import OffloadShape
from ringjax.serve.cluster.times.phase_times import QuadraticTimes
from ringjax.serve.simulate import StepCost

PHASES = ("prefill", "decode")
_COLUMNS = ("phase", "devices", "tokens", "cached", "seconds")
# Columns of a file that a live engine writes.
CALL_COLUMNS = (*_COLUMNS, "prompts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredCall:
  """One call and its duration.

  Attributes:
    phase: "prefill" or "decode".
    devices: Number of devices that share every layer, t.
    tokens: For prefill, new tokens of each prompt; for decode, rows.
    cached: For prefill, cached tokens of each prompt; for decode, of all rows.
    seconds: Duration of the call in seconds.
    prompts: Number of equal prompts of a prefill call.
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
    """Factors of the constants f, a, p, s, w, r, k."""
    t, n = self.devices, self.tokens
    if self.phase == "prefill":
      new_tokens = self.prompts * n
      pairs = new_tokens * (n + 2 * self.cached)
      return (
        1.0,
        new_tokens / t,
        pairs / t,
        new_tokens * (t - 1) / t,
        0.0,
        0.0,
        0.0,
      )
    return (1.0, 0.0, 0.0, n * (t - 1) / t, 1 / t, n / t, self.cached / t)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorTimes:
  """The seven constants of call times, in seconds.

  Attributes:
    fixed_s: f, per call.
    token_s: a, per new token.
    pair_s: p, per unit of n (n + 2 c).
    reduce_s: s, per token that is all-reduced over devices.
    weights_s: w, for reading all weights once.
    row_s: r, per row.
    cached_s: k, per cached token.
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
    """Times of an instance with `devices` devices."""
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
    """Predicted seconds of a call."""
    return float(np.dot(dataclasses.astuple(self), call.features()))

  def errors(self, calls: Sequence[MeasuredCall]) -> list[float]:
    """Relative errors of the predictions, one for each call."""
    return [self.predict_s(call) / call.seconds - 1 for call in calls]

  @classmethod
  def fit(cls, calls: Sequence[MeasuredCall]) -> TensorTimes:
    """Fit the constants to measured calls, by relative errors.

    Args:
      calls: Calls of both phases; of several numbers of devices, else the time
        of all-reduces stays 0.

    Raises:
      OptionError: If there are fewer than 8 calls, or scipy is not installed.
    """
    if len(calls) < 8:
      raise OptionError(
        "calls", f"{len(calls)} of them", "at least 8", "measure more"
      )
    constants = _least_squares(
      [call.features() for call in calls], [call.seconds for call in calls]
    )
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**dict(zip(names, constants, strict=True)))

  @classmethod
  def on(
    cls, machine: Machine, shape: OffloadShape, *, dtype: str = "bfloat16"
  ) -> TensorTimes:
    """Predict the constants from the stated figures of a machine.

    Products run at the chip's rate, attention at its kernel's share of it;
    weights and cached tokens are read at the memory's bandwidth; each layer has
    two all-reduces. Work that could overlap is added up.

    Args:
      machine: Devices and links.
      shape: Sizes of the model.
      dtype: Dtype of weights and keys.
    """
    chip, width, layers = machine.chip, number_bytes(dtype), shape.layers
    rate, links = chip.rate(dtype), machine.links
    # Any of the axes, as tensor parallelism uses one axis alone.
    link = links if isinstance(links, Link) else next(
      iter(dict(links).values())
    )  # fmt: skip
    token_s = 2 * (layers * shape.active + shape.head) / rate
    pair_flops = layers * shape.attend / 2
    return cls(
      fixed_s=layers * (machine.hop_s + machine.call_s),
      token_s=2 * layers * shape.active / rate,
      pair_s=pair_flops / (rate * machine.part("kernel")[0]),
      reduce_s=layers * 4 * shape.embed * width / link.bandwidth,
      weights_s=layers * shape.weights * width / chip.hbm_bandwidth,
      row_s=token_s,
      cached_s=layers * shape.kv * width / chip.hbm_bandwidth,
    )


def _least_squares(
  features: Sequence[Sequence[int | float]], seconds: Sequence[int | float]
) -> list[float]:
  """Non-negative constants with the least relative errors."""
  try:
    optimize = importlib.import_module("scipy.optimize")
  except ModuleNotFoundError:
    raise OptionError(
      "fit",
      "a fit, but scipy is not installed",
      "scipy, or constants",
      "pip install 'ringjax[plan]'",
    ) from None
  rows = np.array(features, np.float64) / np.array(seconds)[:, None]
  # The columns have very different scales: solve with unit-norm columns.
  norms = np.linalg.norm(rows, axis=0)
  norms[norms == 0] = 1
  constants = optimize.nnls(rows / norms, np.ones(len(rows)))[0] / norms
  return constants.tolist()


def instance_times(calls: Sequence[MeasuredCall]) -> QuadraticTimes:
  """Fit the times of one instance to its measured calls.

  Each phase has separate constants, fitted to its own calls.

  Args:
    calls: Calls of both phases on one number of devices.

  Raises:
    OptionError: If a phase has no calls, or numbers of devices differ.
  """
  constants: list[float] = []
  devices = {call.devices for call in calls}
  for phase in PHASES:
    phase_calls = [call for call in calls if call.phase == phase]
    if not phase_calls or len(devices) > 1:
      raise OptionError(
        "calls",
        f"{len(phase_calls)} of {phase}, on {sorted(devices)} devices",
        "calls of prefill and decode of one instance",
        "measure both, or fit TensorTimes to several numbers of devices",
      )
    constants += _least_squares(
      [
        (
          1.0,
          call.prompts * call.tokens,
          call.prompts * call.tokens * (call.tokens + 2 * call.cached),
        )
        if phase == "prefill"
        else (1.0, call.tokens, call.cached)
        for call in phase_calls
      ],
      [call.seconds for call in phase_calls],
    )
  names = [field.name for field in dataclasses.fields(QuadraticTimes)]
  return QuadraticTimes(**dict(zip(names, constants, strict=True)))


def engine_times(cost: StepCost) -> QuadraticTimes:
  """Times of an engine whose steps were measured (`measure_cost`).

  The time that both phases share in a step counts for each of them.
  """
  return QuadraticTimes(
    prefill_fixed_s=cost.step + cost.prompts,
    # A query sees itself, too: n (n + 1) / 2 + n c keys.
    prefill_token_s=cost.token + cost.pair / 2,
    prefill_pair_s=cost.pair / 2,
    decode_fixed_s=cost.step + cost.answers,
    decode_row_s=cost.row,
    decode_token_s=cost.key,
  )


def read_calls(path: str | os.PathLike[str]) -> list[MeasuredCall]:
  """Read measured calls from a csv: phase, devices, tokens, cached, seconds.

  A column prompts is optional; see `MeasuredCall`. A last line that was
  truncated, with neither its line end nor its last column, is left out.

  Raises:
    OptionError: If the file cannot be read, or a line is malformed.
  """
  try:
    text = pathlib.Path(path).read_text("utf-8")
  except (OSError, ValueError) as error:
    raise OptionError("calls", error, "a csv file", "pass its path") from None
  lines, calls = text.splitlines(), []
  truncated = len(lines) > 1 and not text.endswith("\n")
  if truncated and lines[-1].count(",") < lines[0].count(","):
    del lines[-1]
  for n, row in enumerate(csv.DictReader(lines), 2):
    try:
      calls.append(
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
  return calls
