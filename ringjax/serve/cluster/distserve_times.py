"""DistServe's cost model and the rules of its own simulator, to compare with.

  prefill   (a + b sum(n) + c sum(n^2)) / stages + `stages` ms a stage
  decode    (a + b cached + c rows) / stages a stage, with other constants from
            95 rows on

and 2 ms + 1e-4 ms a token in the first stage of a call. Its simulator moves
caches in no time, reads as many prompts at once as the cache has tokens, and
makes all tokens of an answer after the prompt's (here: an answer is a token
longer). A step takes rows from the front of a queue up to 50,000 cached tokens
and as many rows as the cache has tokens; behind the step they go to the queue's
end, so that all rows take turns, at each stage of a pipeline. A row that no
step can take waits for ever there; here it is rejected. Live engines, the one
of DistServe too, keep a row in the steps until it ends. Profiles and capacities
are files of its format; one profile is stated in `distserve.toml`.
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
from ringjax.serve.cluster.cluster_simulator import SimulatedInstance
from ringjax.serve.traces import TraceRequest

# Cached tokens of a step at most; milliseconds of a first stage.
STEP_TOKENS = 50_000
_ENTRY_MS = (2.0, 1e-4)
# Capacity of an instance that counts no tokens.
_ENDLESS = 2**62
_WORDS = "[a, b, c] in ms as prefill, decoding_smallbs, decoding_largebs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistServeTimes:
  """Two regimes of decode, quadratic prefill; all in milliseconds.

  Attributes:
    prefill: a of a call, b of a token, c of a squared prompt.
    small: a of a step, b of a cached token, c of a row, below `split` rows.
    large: the same from `split` rows on.
    split: rows of the first large step.
  """

  prefill: tuple[float, float, float]
  small: tuple[float, float, float]
  large: tuple[float, float, float]
  split: int = 95

  def __post_init__(self) -> None:
    positive_int("split", self.split)
    for name in ("prefill", "small", "large"):
      for one in getattr(self, name):
        number(name, one, least=0)

  @classmethod
  def of(cls, body: Mapping[str, Any]) -> DistServeTimes:
    """From an entry of a profile file.

    Raises:
      OptionError: a key is missing or has no three numbers.
    """

    def three(key: str) -> tuple[float, float, float]:
      a, b, c = body[key]
      return float(a), float(b), float(c)

    try:
      return cls(
        prefill=three("prefill"),
        small=three("decoding_smallbs"),
        large=three("decoding_largebs"),
        split=int(body["decoding_large_small_bs_threshold"]),
      )
    except (KeyError, TypeError, ValueError) as error:
      raise OptionError(
        "profile", f"an entry with {error!r}", _WORDS, "pass such a file"
      ) from None

  def prefill_s(self, pieces: Iterable[tuple[int, int]]) -> float:
    """As `PhaseTimes`; a token before a piece makes a pair with each of it."""
    a, b, c = self.prefill
    tokens = pairs = 0
    for new, cached in pieces:
      tokens += new
      pairs += new * (new + 2 * cached)
    return (a + b * tokens + c * pairs) / 1e3

  def decode_s(self, rows: int, cached_tokens: int | float) -> float:
    """As `PhaseTimes`."""
    a, b, c = self.small if rows < self.split else self.large
    return float(a + b * cached_tokens + c * rows) / 1e3


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistServeModel:
  """A model with a profile for some numbers of devices; see `InstanceFamily`.

  Attributes:
    name: of the model.
    times: by the devices that share every layer.
    capacity_tokens: of the cache, by (devices, stages); what it lacks does not
      fit.
    kv_token_bytes: of a token in all layers.
    own_rules: whether instances follow the rules of DistServe's simulator;
      else those of this package, with the same times.
    max_prefill_tokens: of a batch, L_m, without `own_rules`.
  """

  name: str
  times: Mapping[int, DistServeTimes]
  capacity_tokens: Mapping[tuple[int, int], int]
  kv_token_bytes: int | float
  own_rules: bool = True
  max_prefill_tokens: int = 2048

  def shapes(self) -> list[tuple[int, int]]:
    """(devices, stages) that a model fits on and has a profile for."""
    return sorted(x for x in self.capacity_tokens if x[0] in self.times)

  def instance(
    self, name: str, role: str, tensor: int, stages: int
  ) -> SimulatedInstance:
    """An instance of `tensor` x `stages` devices."""
    room = self.capacity_tokens[tensor, stages]
    options: dict[str, Any] = {
      "name": name, "role": role, "times": self.times[tensor],
      "stages": stages,
    }  # fmt: skip
    if not self.own_rules:
      return SimulatedInstance(
        **options,
        capacity_tokens=room,
        max_prefill_tokens=self.max_prefill_tokens,
      )
    fixed, each = _ENTRY_MS
    return SimulatedInstance(
      **options,
      capacity_tokens=_ENDLESS,
      max_rows=room,
      max_prefill_tokens=room,
      max_prefill_rows=room,
      max_decode_tokens=STEP_TOKENS,
      decode="turns",
      stage_s=stages / 1e3,
      decode_stage_s=0.0,
      entry_s=fixed / 1e3,
      entry_token_s=each / 1e3,
    )


def as_distserve_counts(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
  """A trace whose answers are made as DistServe's simulator makes them.

  All tokens come after the prompt's, so that the time of a later token is that
  from the prompt's end to the last one by the number of them.
  """
  return [
    dataclasses.replace(one, new_tokens=one.new_tokens + 1) for one in trace
  ]


def read_profile(
  path: str | os.PathLike[str], model: str
) -> dict[int, DistServeTimes]:
  """The times of a model by devices, from a profile file of DistServe.

  Args:
    path: JSON of {model: {devices: {...}}}.
    model: its name, with or without its owner.

  Raises:
    OptionError: the file is none, or does not have the model.
  """
  try:
    body = json.loads(pathlib.Path(path).read_text("utf-8"))
  except (OSError, ValueError) as error:
    raise OptionError(
      "profile", error, "a JSON file of DistServe's format", "pass its path"
    ) from None
  known = body if isinstance(body, dict) else {}
  for name, by_devices in known.items():
    if _same(name, model) and isinstance(by_devices, dict):
      return {int(t): DistServeTimes.of(x) for t, x in by_devices.items()}
  raise OptionError(
    "profile",
    f"{pathlib.Path(path).name} without {model}",
    f"one of {', '.join(known) or 'its models'}",
    "pass --model as the file names it",
  )


def read_capacities(
  path: str | os.PathLike[str], model: str
) -> dict[tuple[int, int], int]:
  """Tokens of a model's cache by (devices, stages).

  Args:
    path: csv with columns model, tp, pp, max_num_tokens.
    model: its name, with or without its owner.

  Raises:
    OptionError: the file is none, or does not have the model.
  """
  try:
    lines = pathlib.Path(path).read_text("utf-8").splitlines()
    found = {
      (int(row["tp"]), int(row["pp"])): int(row["max_num_tokens"])
      for row in csv.DictReader(lines)
      if _same(row["model"], model)
    }
  except (OSError, KeyError, TypeError, ValueError) as error:
    raise OptionError(
      "capacity",
      repr(error),
      "a csv with columns model, tp, pp, max_num_tokens",
      "pass its path",
    ) from None
  if not found:
    raise OptionError(
      "capacity", f"no line of {model}", "one or more", "pass another file"
    )
  return found


def stated() -> dict[str, dict[int, DistServeTimes]]:
  """The published profiles that are part of the package, by model."""
  path = pathlib.Path(__file__).with_name("distserve.toml")
  body = tomllib.loads(path.read_text("utf-8"))
  return {
    name: {int(t): DistServeTimes.of(x) for t, x in one["devices"].items()}
    for name, one in body["models"].items()
  }


def _same(name: str, model: str) -> bool:
  plain = lambda text: text.rpartition("/")[2].replace("_", "-").lower()
  return plain(name) == plain(model)
