"""Workloads, limits and modelled times on which elastic groups are compared.

Guarantees: everything is drawn from a seed; another rate only stretches time.
The model of times is a roofline (`GroupMachine`): it counts products, bytes of
weights and keys, and the traffic of tensor parallelism and rings. It is not a
measurement; its assumptions are its attributes.
Ref: Wu et al. 2024, LoongServe (SOSP), arXiv 2404.09526, section 7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from ringjax.checks import instance, number, positive_int
from ringjax.errors import OptionError
from ringjax.parallel.chips import CHIPS, Link, Machine
from ringjax.serve.cluster.loongserve.elastic_loop import ElasticResult
from ringjax.serve.cluster.loongserve.elastic_scheduler import (
  BETWEEN_INSTANCES,
  ElasticOptions,
  ElasticScheduler,
)
from ringjax.serve.cluster.loongserve.fixed_groups import FixedGroups
from ringjax.serve.cluster.simulate.elastic_simulator import simulate_elastic
from ringjax.serve.cluster.times.phase_times import QuadraticTimes
from ringjax.serve.cluster.times.request_times import Limits
from ringjax.serve.traces import TraceRequest

# ---------------------------------------------------------------------------
# The model of times
# ---------------------------------------------------------------------------


# Llama-2-7B reaches half of an A800's products and 8/10 of its memory's
# 2 TB/s; its NVLink is cut to 400 GB/s both ways.
REACHED_A800 = Machine(
  name="a800, reached",
  chip=dataclasses.replace(
    CHIPS["a100"],
    name="a800, reached",
    flops={"bfloat16": CHIPS["a100"].rate("bfloat16") * 0.5},
    hbm_bandwidth=2.0e12 * 0.8,
    source="an A100's products; shares that are assumed",
  ),
  links=Link(bandwidth=150e9, latency_s=15e-6, ports=1),
  island=2,
  between=dataclasses.replace(BETWEEN_INSTANCES, latency_s=20e-6),
  call_s=0.005,
  source="assumed",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupMachine:
  """A model on chips, from which times of groups follow.

  The defaults are Llama-2-7B in bfloat16 on A800s with NVLink.

  Attributes:
    parameters: Number of the model's parameters.
    layers: Number of layers.
    width: Width of the hidden states, D.
    heads_width: Total width of a layer's queries, N H.
    kv_width: Total width of a layer's keys, K H.
    machine: Chips with the FLOP/s that prefill reaches and the bandwidth of
      their memory that decode reaches; the link of an instance's chips, whose
      latency is the least time of an all-reduce; the link between instances,
      whose latency is the least time of an exchange.
  """

  parameters: int | float = 6.74e9
  layers: int = 32
  width: int = 4096
  heads_width: int = 4096
  kv_width: int = 4096
  machine: Machine = REACHED_A800

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      if field.name != "machine":
        number(field.name, getattr(self, field.name), above=0)
    instance("machine", self.machine, Machine)
    if self.machine.between is None:
      raise OptionError(
        "machine",
        f"{self.machine.name!r} without a link between instances",
        "a Machine with island and between",
        "pass e.g. Machine(..., island=2, between=Link(bandwidth=25e9))",
      )

  @property
  def token_bytes(self) -> int:
    """Bytes of a token's keys and values in all layers."""
    return self.layers * 2 * self.kv_width * 2

  def times(self, chips: int, instances: int = 1) -> QuadraticTimes:
    """Call times of a group.

    Prefill: products of weights and of half of all pairs, by all chips; two
    all-reduces a layer over an instance's chips. Key transfers overlap with
    products, except for the minimum time of each hop. Decode: the weights once
    on each instance, the keys by all chips, the rows' products by all; two
    all-reduces and, with several instances, an exchange of queries and of
    partial results a layer.

    Args:
      chips: Number of chips of an instance: its tensor parallelism.
      instances: Number of instances of the group: its sequence parallelism.
    """
    positive_int("chips", chips)
    positive_int("instances", instances)
    num_chips = chips * instances
    machine, between = self.machine, self.machine.between
    link, read_bytes_s = machine.link("model"), machine.chip.hbm_bandwidth
    chip_flops = machine.chip.rate("bfloat16")
    hop_s = 0.0 if between is None else between.latency_s
    sums = 2 * self.layers * (chips > 1)
    # An all-reduce sends its operand twice, except for a chip's own share.
    share = 2 * (chips - 1) / chips
    sum_token_s = sums * self.width * 2 * share / link.bandwidth
    hops = self.layers * (instances - 1)
    exchanges = 2 * self.layers * (instances > 1)
    token_flops = 2 * self.parameters
    pair_flops = 4 * self.layers * self.heads_width / 2
    overhead_s = machine.call_s + sums * link.latency_s
    return QuadraticTimes(
      prefill_fixed_s=overhead_s + hops * hop_s,
      prefill_token_s=token_flops / (chip_flops * num_chips)
      + sum_token_s / instances,
      prefill_pair_s=pair_flops / (chip_flops * num_chips),
      decode_fixed_s=overhead_s
      + exchanges * hop_s
      + 2 * self.parameters / (read_bytes_s * chips),
      decode_row_s=token_flops / (chip_flops * num_chips)
      + sum_token_s / instances,
      decode_token_s=self.token_bytes / (read_bytes_s * num_chips),
    )


# ---------------------------------------------------------------------------
# Workloads
# ---------------------------------------------------------------------------


def zipf_lengths(
  count: int,
  exponent: int | float,
  *,
  seed: int = 0,
  offset: int | float = 10.0,
  least: int = 10,
  most: int = 199_999,
) -> Int[np.ndarray, " n"]:
  """Draw lengths with probability proportional to (length + offset)^-exponent.

  Args:
    count: Number of lengths.
    exponent: Exponent of the decay: 1.0 often has long texts, 1.4 seldom.
    seed: Seed of the draw.
    offset: Number of tokens that flattens the distribution of short texts.
    least: Minimum length in tokens.
    most: Maximum length in tokens.
  """
  lengths = np.arange(least, most + 1)
  weights = (lengths + float(offset)) ** -float(exponent)
  rng = np.random.default_rng(seed)
  return rng.choice(lengths, size=count, p=weights / weights.sum())


# Sources of prompts: (name, share, shortest, longest, median answer). Lengths
# are drawn log-uniformly between the two, as only the published ranges of
# these data sets are known here.
MIXED = (
  ("chat, as ShareGPT", 1 / 3, 4, 2_300, 200),
  ("documents, as L-Eval", 1 / 3, 2_700, 210_500, 100),
  ("long documents, as LV-Eval", 1 / 3, 15_100, 497_300, 20),
)


def mixed_lengths(
  count: int, *, seed: int = 0, most: int | None = None
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
  """(prompt lengths, answer lengths) of chats and long documents.

  The sources in `MIXED` have equal shares.

  Args:
    count: Number of requests.
    seed: Seed of the draw.
    most: Maximum prompt length, to which longer prompts are cut; None cuts
      none.
  """
  rng = np.random.default_rng(seed)
  source_ids = rng.choice(
    len(MIXED), size=count, p=[source[1] for source in MIXED]
  )
  shortest, longest, median = (
    np.array([source[n] for source in MIXED], float)[source_ids]
    for n in (2, 3, 4)
  )
  log_lengths = rng.uniform(np.log(shortest), np.log(longest))
  answers = np.exp(rng.normal(np.log(median), 0.8))
  return (
    np.minimum(np.exp(log_lengths), np.inf if most is None else most).astype(
      int
    ),
    np.clip(answers, 1, 2048).astype(np.int64),
  )


def random_trace(
  prompts: Int[np.ndarray, " n"],
  answers: Int[np.ndarray, " n"],
  rate: int | float,
  *,
  seed: int = 0,
) -> list[TraceRequest]:
  """Make requests that arrive at random, at `rate` per second.

  Another rate only stretches time: the same gaps in the same order.

  Args:
    prompts: Prompt lengths in tokens.
    answers: Answer lengths in tokens.
    rate: Requests per second.
    seed: Seed of the gaps.
  """
  gaps = np.random.default_rng(seed).exponential(size=len(prompts))
  times: Float[np.ndarray, " n"] = np.cumsum(gaps) / float(rate)
  return [
    TraceRequest(
      arrival=float(times[n]),
      prompt_tokens=int(prompts[n]),
      new_tokens=int(answers[n]),
      number=n,
    )
    for n in range(len(times))
  ]


def answer_lengths(
  count: int, median: int | float = 150, *, seed: int = 0
) -> Int[np.ndarray, " n"]:
  """Draw log-normal answer lengths, clipped to 1 to 2,048 tokens.

  Args:
    count: Number of answers.
    median: Median length in tokens.
    seed: Seed of the draw.
  """
  log_lengths = np.random.default_rng(seed).normal(np.log(median), 0.8, count)
  return np.clip(np.exp(log_lengths), 1, 2048).astype(np.int64)


# ---------------------------------------------------------------------------
# Systems
# ---------------------------------------------------------------------------

# Token capacity of an instance, by its number of chips (80 GB each).
SLOTS = {1: 110_000, 2: 210_000, 4: 500_000, 8: 900_000}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedSystem:
  """A way to use eight chips.

  name: Name for tables.
  instances: Number of instances of the cluster.
  policy: Function that makes the policy of a run.
  """

  name: str
  instances: int
  policy: Callable[[], ElasticScheduler | FixedGroups]

  def run(self, trace: Sequence[TraceRequest]) -> ElasticResult:
    """Simulate a trace."""
    return simulate_elastic(trace, self.policy(), self.instances)


def compared_systems(
  machine: GroupMachine | None = None,
) -> list[ComparedSystem]:
  """Elastic groups of four instances of two chips, and three fixed layouts.

  The last system is elastic, too, but keeps an instance free of the longest
  prompts, and lets requests overtake.

  Args:
    machine: Model of times; default: Llama-2-7B on A800s.
  """
  chips_model = machine or GroupMachine()
  options_2_chips = ElasticOptions(
    slots=SLOTS[2], token_bytes=chips_model.token_bytes
  )
  options_8_chips = dataclasses.replace(options_2_chips, slots=SLOTS[8])
  groups = [chips_model.times(2, n) for n in range(1, 5)]
  fixed = lambda times, groups, options: (
    lambda: FixedGroups(times, groups, options)
  )
  return [
    ComparedSystem(
      name="elastic, 4 x TP2",
      instances=4,
      policy=lambda: ElasticScheduler(groups, options_2_chips),
    ),
    ComparedSystem(
      name="TP8",
      instances=1,
      policy=fixed(chips_model.times(8), [[0]], options_8_chips),
    ),
    ComparedSystem(
      name="SP4 x TP2",
      instances=4,
      policy=fixed(chips_model.times(2, 4), [[0, 1, 2, 3]], options_2_chips),
    ),
    ComparedSystem(
      name="4 replicas of TP2",
      instances=4,
      policy=fixed(chips_model.times(2), [[0], [1], [2], [3]], options_2_chips),
    ),
    ComparedSystem(
      name="elastic, 1 spare",
      instances=4,
      policy=lambda: ElasticScheduler(
        groups, dataclasses.replace(options_2_chips, spare=1, window=64)
      ),
    ),
  ]


# ---------------------------------------------------------------------------
# Limits
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledLimits(Limits):
  """Limits that scale with the time a prompt would take alone.

  Attributes:
    ttft_s: Seconds to the first token that are always allowed.
    tpot_s: Seconds for each later token.
    alone: Times of all chips as one idle group; None for the same limits for
      all prompts.
    scale: Multiple of the time alone that the first token may take.
  """

  ttft_s: int | float = 15.0
  tpot_s: int | float = 0.05
  alone: QuadraticTimes | None = None
  scale: int | float = 25.0

  def of(self, prompt_tokens: int) -> Limits:
    """Limits of a request with a prompt of `prompt_tokens` tokens."""
    if self.alone is None:
      return self
    alone_s = self.alone.prefill_s([(prompt_tokens, 0)])
    return Limits(
      ttft_s=max(self.ttft_s, self.scale * alone_s),
      tpot_s=self.tpot_s,
      share=self.share,
    )
