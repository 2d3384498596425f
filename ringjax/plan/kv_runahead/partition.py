"""Search for the number of tokens that each rank of a chain prefills.

Two aims conflict: early ranks should be done soon, since later ones wait
for their keys; and late ranks see more keys, so that they should have fewer
tokens. Three methods, after Cho et al. 2024 (arXiv 2405.05329), section 4.2:

  even      the same for all                                          (KVR-E)
  search    a grid around a start, finer and finer, with any objective: one
            that simulates, or one that measures                      (KVR-S)
  table     searched partitions by length, interpolated               (KVR-P)

The start is `balance.balanced`. It is the optimum as long as no link is the
bottleneck; otherwise early prefixes dominate the traffic and the optimum is far
from it, so that it only starts a search.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ringjax.checks import number
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link
from ringjax.plan import cost
from ringjax.plan.cost import Profile, Prompt
from ringjax.plan.kv_runahead.balance import (
  balanced,
  most_ranks,
  round_to_tiles,
)
from ringjax.plan.kv_runahead.grid import SearchResult, search, simulated
from ringjax.plan.kv_runahead.table import PartitionTable, TableKey

# Distance of tabled lengths, as in the paper.
SPACING = 4096
# Fraction of the time from which on links count as the bottleneck.
_BOUND = 0.05


def find(
  profile: Profile,
  prompt: Prompt,
  ranks: int,
  network: Link,
  *,
  tile: int = 1,
  starts: Iterable[Sequence[int]] = (),
  **options: Any,
) -> SearchResult:
  """Search with the simulator, from the balanced and the even partition.

  Args:
    profile: Times of the model on the devices.
    prompt: Prompt to prefill.
    ranks: Number of ranks of the chain; each gets a tile at least.
    network: Links between ranks.
    tile: Tile size in tokens; boundaries are multiples of it.
    starts: Further partitions to begin with.
    **options: `credits` and `noise` of `kvr_seconds`.

  Raises:
    OptionError: If there are fewer tiles than ranks.
  """
  start = balanced(profile, prompt, ranks)
  level = np.ones(ranks)
  start_lengths = [
    round_to_tiles(s, prompt.tokens, tile) for s in (start, level)
  ]
  return search(
    simulated(profile, prompt, network, **options),
    [*start_lengths, *starts],
    tile=tile,
  )


def tabulate(
  profile: Profile,
  lengths: Iterable[int],
  ranks: int,
  network: Link,
  *,
  tile: int = 1,
  on_entry: Callable[[int], None] = lambda tokens: None,
) -> PartitionTable:
  """Make a table of searched partitions.

  They are searched without the profile's floor: below it all partitions take
  the same time, and interpolation between two of them would not.

  Args:
    profile: Times of the model on the devices.
    lengths: Prompt lengths in tokens.
    ranks: Number of ranks of the chain.
    network: Links between ranks.
    tile: Tile size of the search, in tokens.
    on_entry: Function called with the length before each search.
  """
  entries = {}
  bare = dataclasses.replace(profile, floor_s=0.0)
  for tokens in lengths:
    on_entry(tokens)
    prompt = Prompt(tokens=tokens)
    entries[tokens] = find(bare, prompt, ranks, network, tile=tile).shares
  return PartitionTable(TableKey.of(profile, network, ranks), entries)


def neighbours(tokens: int, ranks: int, tile: int = 1) -> tuple[int, ...]:
  """Nearest tabled lengths below and above, other than `tokens` itself.

  Raises:
    OptionError: If neither length has a tile for each rank.
  """
  below = (tokens - 1) // SPACING * SPACING
  above = (tokens // SPACING + 1) * SPACING
  min_tokens = ranks * tile
  lengths = tuple(length for length in (below, above) if length >= min_tokens)
  if not lengths:
    raise OptionError(
      "ranks",
      f"{ranks}, tiles of {tile} tokens",
      f"{above} tokens to give each a tile",
      "use fewer ranks or smaller tiles",
    )
  return lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionPlan:
  """The partition of a prompt, with reasons.

  Attributes:
    found: Partition, and its predicted seconds.
    why: Reasons of the decisions, in sentences.
  """

  found: SearchResult
  why: tuple[str, ...]

  @property
  def ranks(self) -> int:
    """Number of ranks that take part."""
    return len(self.found.lengths)


def plan(
  profile: Profile,
  prompt: Prompt,
  ranks: int,
  network: Link,
  *,
  tile: int = 1,
  least_gain: float = 0.05,
  **options: Any,
) -> PartitionPlan:
  """Choose how many of `ranks` take part, and the tokens of each.

  A rank with less than two tiles is dropped. Then half of the ranks are tried,
  and taken as long as they lose less than `least_gain` of the time.

  Args:
    profile: Times of the model on the devices.
    prompt: Prompt to prefill.
    ranks: Maximum number of ranks.
    network: Links between ranks.
    tile: Tile size in tokens; boundaries are multiples of it.
    least_gain: Fraction of the time that twice the ranks must save.
    **options: `credits` and `noise` of `kvr_seconds`.

  Raises:
    OptionError: If a number is out of range.
  """
  number("least_gain", least_gain, least=0, most=1)
  use = most_ranks(prompt.tokens, ranks, tile)
  why = []
  if use < ranks:
    why.append(
      f"{prompt.tokens} tokens give {ranks} ranks less than two tiles of "
      f"{tile} each: {_count(use, 'rank')}"
    )
  best = find(profile, prompt, use, network, tile=tile, **options)
  while use > 1:
    half = use // 2
    half_result = find(profile, prompt, half, network, tile=tile, **options)
    gain = 1 - best.seconds / half_result.seconds
    if gain >= least_gain:
      why.append(
        f"{_count(use, 'rank')}: {best.seconds:.4g} s, {100 * gain:.1f} % less "
        f"than with {half}"
      )
      break
    why.append(
      f"{_count(use, 'rank')} would take {best.seconds:.4g} s, "
      f"{_count(half, 'rank')} {half_result.seconds:.4g} s: a gain of "
      f"{100 * gain:.1f} % is below {100 * least_gain:.1f} %, {half} will do"
    )
    use, best = half, half_result
  why += _reasons(profile, prompt, network, best)
  return PartitionPlan(found=best, why=tuple(why))


def _reasons(
  profile: Profile, prompt: Prompt, network: Link, found: SearchResult
) -> list[str]:
  """Sentences on what decides the partition."""
  ranks = len(found.lengths)
  if ranks == 1:
    return ["one rank reads all; nothing is sent"]
  work = cost.compute_s(profile, prompt, found.lengths)
  wires = cost.chain_tokens(prompt, found.lengths) * profile.kv_bytes
  wire = float(wires.max()) * profile.layers / network.bandwidth
  first = round_to_tiles(balanced(profile, prompt, ranks), prompt.tokens)
  partitions = np.asarray([first, cost.even(prompt.tokens, ranks)])
  start, level = simulated(profile, prompt, network)(partitions).tolist()
  # The balance is the optimum for links that take no time.
  free = simulated(profile, prompt, Link(bandwidth=1e300))(partitions)[0]
  link_share = 1 - float(free) / found.seconds
  bound = "compute" if link_share < _BOUND else "a link"
  sentences = [
    f"{bound} binds: ranks compute {work.min():.4g} to {work.max():.4g} s, the "
    f"busiest link sends for {wire:.4g} s; links that cost nothing would save "
    f"{100 * max(link_share, 0.0):.1f} %",
    f"the closed-form balance would take {start:.4g} s, an even partition "
    f"{level:.4g} s; {found.tried} partitions were tried",
  ]
  bare = max(float(work.max()), wire)
  if profile.floor_s >= bare:
    sentences.append(
      f"launching takes {profile.floor_s:.4g} s whatever the partition: "
      "only longer prompts gain"
    )
  return sentences


def _count(count: int, noun: str) -> str:
  return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
