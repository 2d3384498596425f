"""What elastic groups are compared on: times, lengths and limits.

Guarantees: everything is drawn from a seed; another rate only stretches time.
The model of times is a roofline (`GroupMachine`): it counts products, bytes of
weights and keys, and what tensor parallelism and rings send. It is no
measurement; what it assumes are its attributes.
Ref: Wu et al. 2024, LoongServe (SOSP), arXiv 2404.09526, section 7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from ringjax.checks import number, positive_int
from ringjax.serve.cluster.elastic_loop import ElasticResult
from ringjax.serve.cluster.elastic_scheduler import (
  ElasticOptions,
  ElasticScheduler,
)
from ringjax.serve.cluster.elastic_simulator import simulate_elastic
from ringjax.serve.cluster.fixed_groups import FixedGroups
from ringjax.serve.cluster.phase_times import QuadraticTimes
from ringjax.serve.cluster.served import Limits
from ringjax.serve.traces import TraceRequest

# ---------------------------------------------------------------------------
# The model of times
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupMachine:
  """A model on chips, from which times of groups follow.

  The defaults are Llama-2-7B in bfloat16 on A800s with NVLink.

  Attributes:
    parameters: of the model.
    layers: of the model.
    width: of the hidden states, D.
    heads_width: of the queries of a layer, N H.
    kv_width: of the keys of a layer, K H.
    flops: of a chip, a second, as prefill reaches them.
    bytes_s: of a chip's memory, a second, as decoding reaches them.
    link_bytes_s: between chips of an instance, a second, as sums reach them.
    sum_s: the least time of a sum over the chips of an instance.
    hop_s: the least time of an exchange between instances.
    call_s: of a call, beside all that.
  """

  parameters: int | float = 6.74e9
  layers: int = 32
  width: int = 4096
  heads_width: int = 4096
  kv_width: int = 4096
  flops: int | float = 312e12 * 0.5
  bytes_s: int | float = 2.0e12 * 0.8
  link_bytes_s: int | float = 150e9
  sum_s: int | float = 15e-6
  hop_s: int | float = 20e-6
  call_s: int | float = 0.005

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      number(field.name, getattr(self, field.name), above=0)

  @property
  def token_bytes(self) -> int:
    """Of a token's keys and values."""
    return self.layers * 2 * self.kv_width * 2

  def times(self, chips: int, instances: int = 1) -> QuadraticTimes:
    """Of a group.

    Reading: products of weights and of half of all pairs, by all chips; two
    sums a layer over an instance's chips. Keys travel while products run, but
    for the least time of each hop. Decoding: the weights once on each
    instance, the keys by all chips, the rows' products by all; two sums and,
    with several instances, an exchange of queries and of partials a layer.

    Args:
      chips: of an instance: its tensor parallelism.
      instances: of the group: its sequence parallelism.
    """
    positive_int("chips", chips)
    positive_int("instances", instances)
    every = chips * instances
    sums = 2 * self.layers * (chips > 1)
    # An all-reduce sends its operand twice, but for a chip's own part.
    share = 2 * (chips - 1) / chips
    summed = sums * self.width * 2 * share / self.link_bytes_s
    hops = self.layers * (instances - 1)
    exchanges = 2 * self.layers * (instances > 1)
    token_flops = 2 * self.parameters
    pair_flops = 4 * self.layers * self.heads_width / 2
    wait = self.call_s + sums * self.sum_s
    return QuadraticTimes(
      prefill_fixed_s=wait + hops * self.hop_s,
      prefill_token_s=token_flops / (self.flops * every) + summed / instances,
      prefill_pair_s=pair_flops / (self.flops * every),
      decode_fixed_s=wait
      + exchanges * self.hop_s
      + 2 * self.parameters / (self.bytes_s * chips),
      decode_row_s=token_flops / (self.flops * every) + summed / instances,
      decode_token_s=self.token_bytes / (self.bytes_s * every),
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
  """Lengths whose probability falls as 1 / (length + offset)^exponent.

  Args:
    count: how many.
    exponent: 1.0 has long texts often, 1.4 seldom.
    seed: of the draw.
    offset: flattens the shortest.
    least: the shortest.
    most: the longest.
  """
  lengths = np.arange(least, most + 1)
  weights = (lengths + float(offset)) ** -float(exponent)
  chance = np.random.default_rng(seed)
  return chance.choice(lengths, size=count, p=weights / weights.sum())


# Of prompts and answers: (share, shortest, longest, median answer). Lengths are
# log-uniform between the two, as the published ranges of these sets of texts
# are all that is known of them here.
MIXED = (
  ("chat, as ShareGPT", 1 / 3, 4, 2_300, 200),
  ("documents, as L-Eval", 1 / 3, 2_700, 210_500, 100),
  ("long documents, as LV-Eval", 1 / 3, 15_100, 497_300, 20),
)


def mixed_lengths(
  count: int, *, seed: int = 0, most: int | None = None
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
  """(tokens of prompts, of answers): chats and long documents in equal parts.

  See `MIXED`.

  Args:
    count: how many.
    seed: of the draw.
    most: longer prompts are cut to it; None cuts none.
  """
  chance = np.random.default_rng(seed)
  which = chance.choice(len(MIXED), size=count, p=[one[1] for one in MIXED])
  shortest, longest, median = (
    np.array([one[n] for one in MIXED], float)[which] for n in (2, 3, 4)
  )
  drawn = chance.uniform(np.log(shortest), np.log(longest))
  answers = np.exp(chance.normal(np.log(median), 0.8))
  return (
    np.minimum(np.exp(drawn), np.inf if most is None else most).astype(int),
    np.clip(answers, 1, 2048).astype(np.int64),
  )


def random_trace(
  prompts: Int[np.ndarray, " n"],
  answers: Int[np.ndarray, " n"],
  rate: int | float,
  *,
  seed: int = 0,
) -> list[TraceRequest]:
  """Requests that come at random, `rate` a second.

  Another rate only stretches time: the same gaps in the same order.

  Args:
    prompts: tokens of each.
    answers: the same.
    rate: requests a second.
    seed: of the gaps.
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
  """Log-normal lengths of answers, 1 to 2,048.

  Args:
    count: how many.
    median: of them.
    seed: of the draw.
  """
  drawn = np.random.default_rng(seed).normal(np.log(median), 0.8, count)
  return np.clip(np.exp(drawn), 1, 2048).astype(np.int64)


# ---------------------------------------------------------------------------
# Systems
# ---------------------------------------------------------------------------

# Tokens that an instance has room for, by its chips (80 GB each).
SLOTS = {1: 110_000, 2: 210_000, 4: 500_000, 8: 900_000}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedSystem:
  """A way to use eight chips.

  Attributes:
    name: for people.
    instances: of the cluster.
    policy: makes the policy of a run.
  """

  name: str
  instances: int
  policy: Callable[[], ElasticScheduler | FixedGroups]

  def run(self, trace: Sequence[TraceRequest]) -> ElasticResult:
    """Serves a trace."""
    return simulate_elastic(trace, self.policy(), self.instances)


def compared_systems(
  machine: GroupMachine | None = None,
) -> list[ComparedSystem]:
  """Elastic groups of four instances of two chips, and three fixed ways.

  The last is elastic too, with an instance that the longest prompts leave to
  others, and these may overtake.

  Args:
    machine: the model of times; default: Llama-2-7B on A800s.
  """
  made = machine or GroupMachine()
  two = ElasticOptions(slots=SLOTS[2], token_bytes=made.token_bytes)
  eight = dataclasses.replace(two, slots=SLOTS[8])
  groups = [made.times(2, n) for n in range(1, 5)]
  fixed = lambda times, groups, options: (
    lambda: FixedGroups(times, groups, options)
  )
  return [
    ComparedSystem(
      name="elastic, 4 x TP2",
      instances=4,
      policy=lambda: ElasticScheduler(groups, two),
    ),
    ComparedSystem(
      name="TP8", instances=1, policy=fixed(made.times(8), [[0]], eight)
    ),
    ComparedSystem(
      name="SP4 x TP2",
      instances=4,
      policy=fixed(made.times(2, 4), [[0, 1, 2, 3]], two),
    ),
    ComparedSystem(
      name="4 replicas of TP2",
      instances=4,
      policy=fixed(made.times(2), [[0], [1], [2], [3]], two),
    ),
    ComparedSystem(
      name="elastic, 1 spare",
      instances=4,
      policy=lambda: ElasticScheduler(
        groups, dataclasses.replace(two, spare=1, window=64)
      ),
    ),
  ]


# ---------------------------------------------------------------------------
# Limits
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledLimits(Limits):
  """Limits that grow with a prompt: so many times what it takes alone.

  Attributes:
    ttft_s: seconds that the first token of any prompt may take.
    tpot_s: seconds for each later token.
    alone: the times of all chips as one group, with nothing else to do; None
      for the limits of all prompts alike.
    scale: how many times that the first token may take.
  """

  ttft_s: int | float = 15.0
  tpot_s: int | float = 0.05
  alone: QuadraticTimes | None = None
  scale: int | float = 25.0

  def of(self, prompt_tokens: int) -> Limits:
    """The limits of a request with a prompt of so many tokens."""
    if self.alone is None:
      return self
    least = self.alone.prefill_s([(prompt_tokens, 0)])
    return Limits(
      ttft_s=max(self.ttft_s, self.scale * least),
      tpot_s=self.tpot_s,
      share=self.share,
    )
