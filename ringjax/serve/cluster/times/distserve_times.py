"""DistServe's cost model and its simulator's rules, as a baseline.

  prefill   (a + b sum(n) + c sum(n^2)) / stages + `stages` ms a stage
  decode    (a + b cached + c rows) / stages a stage, with other constants from
            95 rows on

and 2 ms + 1e-4 ms a token in the first stage of a call. Its simulator moves
caches in no time, prefills as many prompts at once as the cache has tokens, and
generates all tokens of an answer after the prompt's (here: an answer is a token
longer). A step takes rows from the front of a queue up to 50,000 cached tokens
and as many rows as the cache has tokens; after the step they go to the queue's
end, so that all rows take turns, at each stage of a pipeline. A row that no
step can take waits for ever there; here it is rejected. Live engines, including
DistServe's, keep a row in the steps until it ends. Profiles and capacities
are files of its format; one profile is included in `distserve.toml`.
Ref: Zhong et al. 2024, DistServe (OSDI), arXiv 2401.09670, and its simulator
(github.com/LLMServe/DistServe, simdistserve, Apache-2.0).
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import pathlib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError
from ringjax.serve.cluster.simulate.cluster_simulator import SimulatedInstance
from ringjax.serve.traces import TraceRequest

# Maximum cached tokens of a step; milliseconds of a call's first stage.
STEP_TOKENS = 50_000
_ENTRY_MS = (2.0, 1e-4)
# Capacity of an instance that does not limit its tokens.
_ENDLESS = 2**62
_WORDS = "[a, b, c] in ms as prefill, decoding_smallbs, decoding_largebs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistServeTimes:
  """Two regimes of decode, quadratic prefill; all in milliseconds.

  Attributes:
    prefill: a per call, b per token, c per squared prompt length.
    small: a per step, b per cached token, c per row, below `split` rows.
    large: The same constants from `split` rows on.
    split: Number of rows from which `large` is used.
  """

  prefill: tuple[float, float, float]
  small: tuple[float, float, float]
  large: tuple[float, float, float]
  split: int = 95

  def __post_init__(self) -> None:
    positive_int("split", self.split)
    for name in ("prefill", "small", "large"):
      for constant in getattr(self, name):
        number(name, constant, least=0)

  @classmethod
  def of(cls, body: Mapping[str, Any]) -> DistServeTimes:
    """Make the times from an entry of a profile file.

    Raises:
      OptionError: If a key is missing or does not have three numbers.
    """

    def constants(key: str) -> tuple[float, float, float]:
      a, b, c = body[key]
      return float(a), float(b), float(c)

    try:
      return cls(
        prefill=constants("prefill"),
        small=constants("decoding_smallbs"),
        large=constants("decoding_largebs"),
        split=int(body["decoding_large_small_bs_threshold"]),
      )
    except (KeyError, TypeError, ValueError) as error:
      raise OptionError(
        "profile", f"an entry with {error!r}", _WORDS, "pass such a file"
      ) from None

  def prefill_s(self, pieces: Iterable[tuple[int, int]]) -> float:
    """Seconds of a prefill call; a token pairs with each cached one, too."""
    a, b, c = self.prefill
    tokens = pairs = 0
    for new, cached in pieces:
      tokens += new
      pairs += new * (new + 2 * cached)
    return (a + b * tokens + c * pairs) / 1e3

  def decode_s(self, rows: int, cached_tokens: int | float) -> float:
    """Seconds of a decode step."""
    a, b, c = self.small if rows < self.split else self.large
    return float(a + b * cached_tokens + c * rows) / 1e3


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistServeModel:
  """A model with DistServe profiles; an `InstanceFamily`.

  Attributes:
    name: Name of the model.
    times: Times by the number of devices that share every layer.
    capacity_tokens: Cache capacity in tokens by (devices, stages); shapes
      without an entry do not fit.
    kv_token_bytes: Bytes of a token's keys and values in all layers.
    own_rules: Whether instances follow the rules of DistServe's simulator;
      else those of this package, with the same times.
    max_prefill_tokens: Maximum tokens of a prefill batch, L_m, without
      `own_rules`.
  """

  name: str
  times: Mapping[int, DistServeTimes]
  capacity_tokens: Mapping[tuple[int, int], int]
  kv_token_bytes: int | float
  own_rules: bool = True
  max_prefill_tokens: int = 2048

  def shapes(self) -> list[tuple[int, int]]:
    """Shapes (devices, stages) in which the model fits and has a profile."""
    return sorted(
      shape for shape in self.capacity_tokens if shape[0] in self.times
    )

  def instance(
    self, name: str, role: str, tensor: int, stages: int
  ) -> SimulatedInstance:
    """Make an instance of `tensor` x `stages` devices."""
    capacity = self.capacity_tokens[tensor, stages]
    options: dict[str, Any] = {
      "name": name, "role": role, "times": self.times[tensor],
      "stages": stages,
    }  # fmt: skip
    if not self.own_rules:
      return SimulatedInstance(
        **options,
        capacity_tokens=capacity,
        max_prefill_tokens=self.max_prefill_tokens,
      )
    fixed, per_token = _ENTRY_MS
    return SimulatedInstance(
      **options,
      capacity_tokens=_ENDLESS,
      max_rows=capacity,
      max_prefill_tokens=capacity,
      max_prefill_rows=capacity,
      max_decode_tokens=STEP_TOKENS,
      decode="turns",
      stage_s=stages / 1e3,
      decode_stage_s=0.0,
      entry_s=fixed / 1e3,
      entry_token_s=per_token / 1e3,
    )


def as_distserve_counts(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
  """Change a trace to DistServe's count of answer tokens: one more each.

  Its simulator generates all tokens after the prompt's, so that TPOT is the
  time from the prompt's end to the last token, divided by their number.
  """
  return [
    dataclasses.replace(request, new_tokens=request.new_tokens + 1)
    for request in trace
  ]


def read_profile(
  path: str | os.PathLike[str], model: str
) -> dict[int, DistServeTimes]:
  """Read a model's times by devices from a profile file of DistServe.

  Args:
    path: JSON file of {model: {devices: {...}}}.
    model: Name of the model, with or without its owner.

  Raises:
    OptionError: If the file is invalid, or does not have the model.
  """
  try:
    body = json.loads(pathlib.Path(path).read_text("utf-8"))
  except (OSError, ValueError) as error:
    raise OptionError(
      "profile", error, "a JSON file of DistServe's format", "pass its path"
    ) from None
  profiles = body if isinstance(body, dict) else {}
  for name, by_devices in profiles.items():
    if _same_model(name, model) and isinstance(by_devices, dict):
      return {
        int(t): DistServeTimes.of(entry) for t, entry in by_devices.items()
      }
  raise OptionError(
    "profile",
    f"{pathlib.Path(path).name} without {model}",
    f"one of {', '.join(profiles) or 'its models'}",
    "pass --model as the file names it",
  )


def read_capacities(
  path: str | os.PathLike[str], model: str
) -> dict[tuple[int, int], int]:
  """Read a model's cache capacities in tokens, by (devices, stages).

  Args:
    path: Csv file with columns model, tp, pp, max_num_tokens.
    model: Name of the model, with or without its owner.

  Raises:
    OptionError: If the file is invalid, or does not have the model.
  """
  try:
    lines = pathlib.Path(path).read_text("utf-8").splitlines()
    capacities = {
      (int(row["tp"]), int(row["pp"])): int(row["max_num_tokens"])
      for row in csv.DictReader(lines)
      if _same_model(row["model"], model)
    }
  except (OSError, KeyError, TypeError, ValueError) as error:
    raise OptionError(
      "capacity",
      repr(error),
      "a csv with columns model, tp, pp, max_num_tokens",
      "pass its path",
    ) from None
  if not capacities:
    raise OptionError(
      "capacity", f"no line of {model}", "one or more", "pass another file"
    )
  return capacities


def stated() -> dict[str, dict[int, DistServeTimes]]:
  """Load the published profiles that are part of the package, by model."""
  path = pathlib.Path(__file__).with_name("distserve.toml")
  body = tomllib.loads(path.read_text("utf-8"))
  return {
    name: {
      int(t): DistServeTimes.of(entry) for t, entry in model["devices"].items()
    }
    for name, model in body["models"].items()
  }


def _same_model(name: str, model: str) -> bool:
  plain = lambda text: text.rpartition("/")[2].replace("_", "-").lower()
  return plain(name) == plain(model)
