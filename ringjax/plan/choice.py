"""Choice of the method of prefilling a prompt by the cost model, with reasons.

Striped ring attention waits least as long as links keep up: all ranks do the
same work in every hop. A chain (KV-Runahead) sends half as much, no rank waits
for a later one, and the last rank has all keys in the end. So it is chosen if
links are slow or noisy, or if one rank is to decode; and only if it saves at
least `least_gain` of the time.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

from ringjax.checks import number, one_of, positive_int
from ringjax.parallel.chips import Link
from ringjax.plan import cost
from ringjax.plan.cost import Profile, Prompt
from ringjax.plan.kv_runahead import partition, schedules
from ringjax.plan.kv_runahead.balance import most_ranks
from ringjax.plan.kv_runahead.schedules import Noise

KEEPS = ("sharded", "last")
# Number of noise draws that are averaged.
_DRAWS = 8
# Function from a noise to the time to the first token.
_Seconds = Callable[[Noise | None], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
  """Ranks with a model on them, and the links between them.

  Attributes:
    profile: Times of the model on a device, measured or stated.
    network: Links between neighbours.
    noise: Noise that slows links, or None.
    credits: Layers that may wait at each end of a link of the chain; None is
      any number.
  """

  profile: Profile
  network: Link
  noise: Noise | None = None
  credits: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillMethod:
  """A method of prefilling the prompt, with its predicted times.

  Attributes:
    method: "striped", "gather" or "kvr".
    lengths: Number of tokens of each rank.
    first_s: Seconds to the first token; with noise the mean.
    collect_s: Additional seconds until keys are where they are needed.
  """

  method: str
  lengths: tuple[int, ...]
  first_s: float
  collect_s: float

  @property
  def seconds(self) -> float:
    return self.first_s + self.collect_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillChoice:
  """The chosen method, all compared methods, and reasons in sentences."""

  way: PrefillMethod
  ways: tuple[PrefillMethod, ...]
  why: tuple[str, ...]


def choose(
  machine: Cluster,
  prompt: Prompt,
  ranks: int,
  *,
  keep: str = "sharded",
  tile: int = 1,
  least_gain: float = 0.05,
) -> PrefillChoice:
  """Choose the fastest method; KV-Runahead only if it saves enough.

  Args:
    machine: Devices, the model on them and the links.
    prompt: Prompt to prefill.
    ranks: Number of ranks.
    keep: Placement of the keys afterwards: "sharded" over the ranks, or
      all on the "last".
    tile: Tile size; the chain's parts are whole tiles.
    least_gain: Fraction of the time that the chain must save.

  Raises:
    OptionError: If a value is out of range.
  """
  positive_int("ranks", ranks)
  number("least_gain", least_gain, least=0, most=1)
  one_of("keep", keep, KEEPS)
  why = []
  profile, network = machine.profile, machine.network
  # The keys of every rank but the last, over the link into the last.
  share = prompt.tokens * (ranks - 1) / ranks
  nbytes = share * profile.kv_bytes * profile.layers
  collect = network.send_s(nbytes) if keep == "last" and ranks > 1 else 0.0
  case = profile, prompt, ranks, network
  # Name, tokens of each rank, time to the first token, time to collect.
  methods: list[tuple[str, tuple[int, ...], _Seconds, float]] = []
  if prompt.tokens >= ranks:
    even = cost.even(prompt.tokens, ranks)
    striped = lambda noise: schedules.ring(*case, noise=noise).seconds
    gather = lambda noise: schedules.flash_tsp(*case, noise=noise).seconds
    if prompt.window is None:
      methods.append(("striped", even, striped, collect))
    methods.append(("gather", even, gather, collect))
  use = most_ranks(prompt.tokens, ranks, tile)
  if use == ranks or not methods:
    chain_options = {"credits": machine.credits}
    partition_result = partition.find(
      profile, prompt, use, network, tile=tile, **chain_options
    )
    chain = lambda noise: schedules.kvr_seconds(
      profile,
      prompt,
      [partition_result.lengths],
      network,
      noise=noise,
      **chain_options,
    )[0]
    methods.append(("kvr", partition_result.lengths, chain, 0.0))
  else:
    why.append(
      f"no chain: {prompt.tokens} tokens give {ranks} ranks less than two "
      f"tiles of {tile} each"
    )
  ways = [
    PrefillMethod(
      method=name,
      lengths=lengths,
      first_s=_mean(seconds, machine.noise),
      collect_s=collect_s,
    )
    for name, lengths, seconds, collect_s in methods
  ]
  best = min(ways, key=lambda way: way.seconds)
  others = [way for way in ways if way.method != "kvr"]
  if best.method == "kvr" and others:
    second = min(others, key=lambda way: way.seconds)
    gain = 1 - best.seconds / second.seconds
    if gain < least_gain:
      why.append(
        f"kvr would save {100 * gain:.1f} % of {second.method}'s time, below "
        f"{100 * least_gain:.1f} %"
      )
      best = second
  times = [_as_text(way) for way in sorted(ways, key=lambda way: way.seconds)]
  return PrefillChoice(
    way=best,
    ways=tuple(ways),
    why=(*times, *why, *_grounds(machine, prompt, best, keep)),
  )


def _mean(seconds: _Seconds, noise: Noise | None) -> float:
  """Seconds to the first token; with noise the mean of some draws."""
  draws: list[Noise | None] = [None]
  if noise is not None:
    seeds = range(noise.seed, noise.seed + _DRAWS)
    draws = [dataclasses.replace(noise, seed=seed) for seed in seeds]
  return statistics.fmean(float(seconds(draw)) for draw in draws)


def _as_text(way: PrefillMethod) -> str:
  text = f"{way.method}: {way.first_s:.4g} s to the first token"
  if way.collect_s:
    text += f", {way.collect_s:.4g} s to bring the keys to one rank"
  return text


def _grounds(
  machine: Cluster, prompt: Prompt, best: PrefillMethod, keep: str
) -> list[str]:
  """Sentences on the machine's properties that explain the choice."""
  if len(best.lengths) == 1:
    return ["one rank reads all; nothing is sent"]
  profile, network = machine.profile, machine.network
  even = cost.even(prompt.tokens, len(best.lengths))
  # Neither a ring nor a chain has to compute masked pairs.
  causal_profile = dataclasses.replace(profile, kernel="causal")
  compute = float(cost.compute_s(causal_profile, prompt, even).mean())
  # A ring forwards all but one shard in each layer.
  sent_bytes = (prompt.tokens - min(even)) * profile.kv_bytes * profile.layers
  wire = sent_bytes / network.bandwidth
  reasons = [
    f"a rank computes {compute:.4g} s, an even link carries a ring's keys in "
    f"{wire:.4g} s"
  ]
  if machine.noise is not None:
    reasons.append(
      f"in each layer one link is {1 + machine.noise.slower:g} times slower: "
      "a chain waits for it once, a ring with every rank"
    )
  if keep == "last":
    reasons.append("one rank decodes: a chain leaves the keys there")
  return reasons
