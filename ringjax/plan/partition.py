"""How many tokens each rank of a chain reads.

Two wishes conflict: early ranks should be done soon, since later ones wait
for their keys; and late ranks see more keys, so that they should have fewer
tokens. Three answers, after Cho et al. 2024 (arXiv 2405.05329), section 4.2:

  even      the same for all                                          (KVR-E)
  search    a grid around a start, finer and finer, with any objective: one
            that simulates, or one that measures                      (KVR-S)
  table     found partitions by length, interpolated                  (KVR-P)

The start is `balance.balanced`. It is the optimum as long as no link binds;
where one does, early prefixes are what travels and the optimum lies far off, so
that a start is searched from, not shipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ringjax.checks import number
from ringjax.errors import OptionError
from ringjax.plan import cost
from ringjax.plan.balance import balanced, most_ranks, round_to_tiles
from ringjax.plan.cost import Network, Profile, Prompt
from ringjax.plan.grid import SearchResult, search, simulated
from ringjax.plan.table import PartitionTable, TableKey

# Between tabled lengths, as the paper has them.
SPACING = 4096
# Part of the time from which on links are what binds.
_BOUND = 0.05


def find(
  profile: Profile,
  prompt: Prompt,
  ranks: int,
  network: Network,
  *,
  tile: int = 1,
  starts: Iterable[Sequence[int]] = (),
  **options: Any,
) -> SearchResult:
  """Searches with the simulator, from the balanced and the even partition.

  Args:
    profile: the model and the devices.
    prompt: what is read.
    ranks: of the chain; each gets a tile at least.
    network: the links.
    tile: boundaries are multiples of it.
    starts: further partitions to begin with.
    **options: `credits` and `noise` of `kvr_seconds`.

  Raises:
    OptionError: fewer tiles than ranks.
  """
  start = balanced(profile, prompt, ranks)
  level = np.ones(ranks)
  mine = [round_to_tiles(s, prompt.tokens, tile) for s in (start, level)]
  return search(
    simulated(profile, prompt, network, **options), [*mine, *starts], tile=tile
  )


def tabulate(
  profile: Profile,
  lengths: Iterable[int],
  ranks: int,
  network: Network,
  *,
  tile: int = 1,
  on_entry: Callable[[int], None] = lambda tokens: None,
) -> PartitionTable:
  """A table of searched partitions.

  They are searched without the profile's floor: below it all partitions are
  the same, and what lies between two of them would not be.

  Args:
    profile: the model and the devices.
    lengths: of the prompts, tokens.
    ranks: of the chain.
    network: the links.
    tile: of the search.
    on_entry: called before each search.
  """
  entries = {}
  bare = dataclasses.replace(profile, floor_s=0.0)
  for tokens in lengths:
    on_entry(tokens)
    prompt = Prompt(tokens=tokens)
    entries[tokens] = find(bare, prompt, ranks, network, tile=tile).shares
  return PartitionTable(TableKey.of(profile, network, ranks), entries)


def neighbours(tokens: int, ranks: int, tile: int = 1) -> tuple[int, ...]:
  """The tabled lengths below and above, which are not `tokens` itself.

  Raises:
    OptionError: no length below `tokens` and above has a tile a rank.
  """
  below = (tokens - 1) // SPACING * SPACING
  above = (tokens // SPACING + 1) * SPACING
  least = ranks * tile
  found = tuple(n for n in (below, above) if n >= least)
  if not found:
    raise OptionError(
      "ranks",
      f"{ranks}, tiles of {tile} tokens",
      f"{above} tokens to give each a tile",
      "use fewer ranks or smaller tiles",
    )
  return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionPlan:
  """The partition of a prompt, with reasons.

  Attributes:
    found: the partition, and its predicted seconds.
    why: in sentences, what was decided and on what grounds.
  """

  found: SearchResult
  why: tuple[str, ...]

  @property
  def ranks(self) -> int:
    """Ranks that take part."""
    return len(self.found.lengths)


def plan(
  profile: Profile,
  prompt: Prompt,
  ranks: int,
  network: Network,
  *,
  tile: int = 1,
  least_gain: float = 0.05,
  **options: Any,
) -> PartitionPlan:
  """Chooses how many of `ranks` take part, and the tokens of each.

  A rank with less than two tiles is dropped. Then half of the ranks are tried,
  and taken as long as they cost less than `least_gain` of the time.

  Args:
    profile: the model and the devices.
    prompt: what is read.
    ranks: the most to use.
    network: the links.
    tile: boundaries are multiples of it.
    least_gain: part of the time that twice the ranks must save.
    **options: `credits` and `noise` of `kvr_seconds`.

  Raises:
    OptionError: a number out of its range.
  """
  number("least_gain", least_gain, least=0, most=1)
  use = most_ranks(prompt.tokens, ranks, tile)
  why = []
  if use < ranks:
    why.append(
      f"{prompt.tokens} tokens give {ranks} ranks less than two tiles of "
      f"{tile} each: {_many(use, 'rank')}"
    )
  found = find(profile, prompt, use, network, tile=tile, **options)
  while use > 1:
    half = use // 2
    other = find(profile, prompt, half, network, tile=tile, **options)
    gain = 1 - found.seconds / other.seconds
    if gain >= least_gain:
      why.append(
        f"{_many(use, 'rank')}: {found.seconds:.4g} s, {100 * gain:.1f} % less "
        f"than with {half}"
      )
      break
    why.append(
      f"{_many(use, 'rank')} would take {found.seconds:.4g} s, "
      f"{_many(half, 'rank')} {other.seconds:.4g} s: a gain of "
      f"{100 * gain:.1f} % is below {100 * least_gain:.1f} %, {half} will do"
    )
    use, found = half, other
  why += _reasons(profile, prompt, network, found)
  return PartitionPlan(found=found, why=tuple(why))


def _reasons(
  profile: Profile, prompt: Prompt, network: Network, found: SearchResult
) -> list[str]:
  """What decides the partition."""
  ranks = len(found.lengths)
  if ranks == 1:
    return ["one rank reads all; nothing is sent"]
  work = cost.compute_s(profile, prompt, found.lengths)
  wires = cost.chain_tokens(prompt, found.lengths) * profile.kv_bytes
  wire = float(wires.max()) * profile.layers / network.bandwidth
  first = round_to_tiles(balanced(profile, prompt, ranks), prompt.tokens)
  both = np.asarray([first, cost.even(prompt.tokens, ranks)])
  start, level = simulated(profile, prompt, network)(both).tolist()
  # The balance is the optimum over links that cost nothing.
  free = simulated(profile, prompt, Network(bandwidth=1e300))(both)[0]
  lost = 1 - float(free) / found.seconds
  bound = "compute" if lost < _BOUND else "a link"
  said = [
    f"{bound} binds: ranks compute {work.min():.4g} to {work.max():.4g} s, the "
    f"busiest link sends for {wire:.4g} s; links that cost nothing would save "
    f"{100 * max(lost, 0.0):.1f} %",
    f"the closed-form balance would take {start:.4g} s, an even partition "
    f"{level:.4g} s; {found.tried} partitions were tried",
  ]
  bare = max(float(work.max()), wire)
  if profile.floor_s >= bare:
    said.append(
      f"launching takes {profile.floor_s:.4g} s whatever the partition: "
      "only longer prompts gain"
    )
  return said


def _many(count: int, thing: str) -> str:
  return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
