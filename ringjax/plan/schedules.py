"""Ways to read a prompt on several ranks, played on the simulator.

Each gives the time to the first token, the bytes on every link, the pairs
that every rank computes and the timeline. A layer on rank i:

  kvr        queries, keys and values of its c_i tokens | the prefix's come
             from rank i - 1 | all go on to rank i + 1 | attention, the rest.
             Sending overlaps with attention, no rank waits for a later one
             but for buffers (`credits`), and the last rank ends with the cache.
  tsp        an even split, an all-gather of keys and values around a ring
             that nobody leaves before all are served, attention of C/p
             queries to all C keys, masked, the rest.
  flash_tsp  the same with the tiles above the diagonal left out: the last
             rank has most to do, the others wait for it in the next layer.
  ring       keys go round while attention computes; contiguous or striped.

`kvr_seconds` is the recurrence behind `kvr`, for many partitions at once:

  ready = max(t + early, arrival from i - 1, send done credits layers ago)
  start = max(ready, link free, attention of i + 1 credits layers ago)
  t     = max(ready + attention and rest, t + floor)
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringjax.errors import OptionError
from ringjax.plan import cost
from ringjax.plan.cost import Network, Profile, Prompt
from ringjax.plan.events import Channel, Device, Op, Pool, Simulator, Timeline

LAYOUTS = ("contiguous", "striped")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
  """In each layer one link between neighbours, drawn anew, is slower.

  Attributes:
    slower: x; its bandwidth is divided by 1 + x.
    seed: of the draws.
  """

  slower: int | float = 20.0
  seed: int = 0

  def __post_init__(self) -> None:
    cost.check_number("slower", self.slower)
    cost.check_count("seed", self.seed, least=0)

  def slowdowns(self, layers: int, links: int) -> np.ndarray:
    """What a message's seconds are multiplied by, [layers, links]."""
    factors = np.ones((layers, links))
    if links:
      # `random` is the same on all machines; NumPy's draws may change.
      draw = random.Random(self.seed)
      for layer in range(layers):
        factors[layer, draw.randrange(links)] += self.slower
    return factors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """A prompt, read.

  Attributes:
    method: its name.
    lengths: tokens of each rank.
    seconds: time to the first token.
    work: pairs of a query and a key that each rank computed, a layer.
    link_bytes: sent over each link, all layers; links by name "0-1".
    timeline: what happened when.
  """

  method: str
  lengths: tuple[int, ...]
  seconds: int | float
  work: tuple[float, ...]
  link_bytes: dict[str, int | float]
  timeline: Timeline

  @property
  def sent_bytes(self) -> int | float:
    return sum(self.link_bytes.values())

  def record(self) -> dict[str, Any]:
    """Plain values, without the timeline."""
    return {
      "method": self.method,
      "partition": list(self.lengths),
      "seconds": self.seconds,
      "pairs_by_rank": list(self.work),
      "bytes_by_link": self.link_bytes,
    }


# ---------------------------------------------------------------------------
# The chain
# ---------------------------------------------------------------------------


def kvr(
  profile: Profile,
  prompt: Prompt,
  lengths: Sequence[int],
  network: Network,
  *,
  credits: int | None = None,
  noise: Noise | None = None,
  name: str = "kvr",
) -> Outcome:
  """KV-Runahead with a given partition.

  Args:
    profile: the model and the devices.
    prompt: what is read.
    lengths: tokens of each rank; they add up to the prompt's.
    network: the links.
    credits: layers that may wait at each end of a link, to be sent and to be
      used; None is any number.
    noise: links that slow down.
    name: of the method, for the outcome.

  Raises:
    OptionError: the partition does not fit the prompt.
  """
  lengths = cost.check_lengths(lengths, prompt.tokens)
  _check_credits(credits)
  play = _Play(profile, len(lengths), network, noise, wrap=False)
  sim, ranks = play.sim, range(len(lengths))
  work = cost.pairs(prompt, lengths, profile.kernel)
  nbytes = cost.chain_tokens(prompt, lengths) * profile.kv_bytes
  out: list[Pool | None] = [None] * len(lengths)
  into: list[Pool | None] = [None] * len(lengths)
  if credits is not None:
    out = [sim.pool(f"out {i}", credits) for i in ranks]
    into = [sim.pool(f"in {i}", credits) for i in ranks]
  ends: list[list[Op]] = [[] for _ in ranks]
  for layer in range(profile.layers):
    came: Op | None = None
    for i in ranks:
      last = i == len(lengths) - 1
      project = play.project(i, layer, lengths[i], ends[i])
      holds = None if last else out[i]
      joined = sim.op(
        f"join {i}.{layer}",
        after=[project] if came is None else [project, came],
        take=_one(holds),
        kind="join",
      )
      used = into[i] if i else None
      attend = play.attend(
        i, layer, float(work[i]), lengths[i], [joined], give=_one(used)
      )
      if not last:
        came = sim.send(
          f"send {i}.{layer}",
          play.links[i],
          float(nbytes[i]),
          slowdown=float(play.slow[layer, i]),
          after=[joined],
          take=_one(into[i + 1]),
          give=_one(out[i]),
        )
      ends[i] = play.end(i, layer, attend, ends[i])
  return play.outcome(name, lengths, work, ends[-1])


def kvr_seconds(
  profile: Profile,
  prompt: Prompt,
  partitions: Any,
  network: Network,
  *,
  credits: int | None = None,
  noise: Noise | None = None,
) -> np.ndarray:
  """Time to first token of each of K partitions, ints [K, p] -> [K].

  What `kvr` gives, by recurrence instead of events; about a thousand
  partitions in the time of one simulation.

  Raises:
    OptionError: a partition does not fit the prompt.
  """
  c = np.asarray(partitions)
  if c.ndim != 2 or not np.issubdtype(c.dtype, np.integer) or not c.shape[1]:
    raise OptionError(
      "partitions",
      f"{c.dtype} of shape {c.shape}",
      "ints of shape [K, p]",
      "pass a list of partitions",
    )
  wrong = np.flatnonzero((c < 1).any(1) | (c.sum(1) != prompt.tokens))
  if wrong.size:
    cost.check_lengths([int(n) for n in c[wrong[0]]], prompt.tokens)
  _check_credits(credits)
  count, ranks = c.shape
  layers = profile.layers
  slow = (noise or Noise(slower=0.0)).slowdowns(layers, ranks - 1)
  linear = profile.token_s / layers * c
  early = profile.early * linear
  work = cost.pairs(prompt, c, profile.kernel)
  rest = (
    (1 - profile.early) * linear
    + profile.pair_s / layers * work
    + profile.fixed_s / layers
  )
  wire = cost.chain_tokens(prompt, c) * profile.kv_bytes / network.bandwidth
  floor = profile.floor_s / layers
  t = np.zeros((ranks, count))
  free = np.zeros((ranks, count))
  never = np.full(count, -np.inf)
  # Of each layer, by rank: when its message had arrived, attention had ended.
  arrived: list[list[np.ndarray]] = []
  attended: list[list[np.ndarray]] = []
  for layer in range(layers):
    arrived.append([never] * ranks)
    attended.append([never] * ranks)
    back = layer - credits if credits is not None else -1
    ready = t + early.T
    for i in range(ranks):
      here = ready[i]
      if i:
        here = np.maximum(here, arrived[layer][i - 1])
      if back >= 0 and i < ranks - 1:
        here = np.maximum(here, arrived[back][i])
      if i < ranks - 1:
        start = np.maximum(here, free[i])
        if back >= 0:
          start = np.maximum(start, attended[back][i + 1])
        free[i] = start + wire[:, i] * slow[layer, i]
        arrived[layer][i] = free[i] + network.latency_s
      attended[layer][i] = here + rest[:, i]
      t[i] = np.maximum(attended[layer][i], t[i] + floor)
  return t[-1]


# ---------------------------------------------------------------------------
# Baselines
# ---------------------------------------------------------------------------


def tsp(
  profile: Profile,
  prompt: Prompt,
  ranks: int,
  network: Network,
  *,
  noise: Noise | None = None,
) -> Outcome:
  """Tensor and sequence parallel, as the paper's baseline: dense, masked.

  Raises:
    OptionError: fewer tokens than ranks.
  """
  lengths = cost.even(prompt.tokens, ranks)
  seen = prompt.prefix + prompt.tokens
  work = np.array([float(n * seen) for n in lengths])
  return _gathering("tsp", profile, lengths, work, network, noise)


def flash_tsp(
  profile: Profile,
  prompt: Prompt,
  ranks: int,
  network: Network,
  *,
  noise: Noise | None = None,
) -> Outcome:
  """The same with a kernel that leaves out what the mask forbids.

  A pair costs what the profile says: the kernel is no faster, it does less.

  Raises:
    OptionError: fewer tokens than ranks.
  """
  lengths = cost.even(prompt.tokens, ranks)
  work = cost.pairs(prompt, lengths, "causal")
  return _gathering("flash_tsp", profile, lengths, work, network, noise)


def _gathering(
  name: str,
  profile: Profile,
  lengths: tuple[int, ...],
  work: np.ndarray,
  network: Network,
  noise: Noise | None,
) -> Outcome:
  ranks = len(lengths)
  play = _Play(profile, ranks, network, noise, wrap=True)
  ends: list[list[Op]] = [[] for _ in lengths]
  for layer in range(profile.layers):
    projects = [
      play.project(i, layer, n, ends[i]) for i, n in enumerate(lengths)
    ]
    came = play.rotate(layer, lengths, projects)
    gathered = play.sim.op(
      f"gathered {layer}",
      after=[*projects, *(op for part in came for op in part)],
      kind="join",
    )
    for i, n in enumerate(lengths):
      attend = play.attend(i, layer, float(work[i]), n, [gathered])
      ends[i] = play.end(i, layer, attend, ends[i])
  return play.outcome(name, lengths, work, ends[-1])


def ring(
  profile: Profile,
  prompt: Prompt,
  ranks: int,
  network: Network,
  *,
  layout: str = "striped",
  noise: Noise | None = None,
) -> Outcome:
  """Ring attention: a hop's keys travel while those before are attended to.

  Tiles that the mask forbids are left out. Contiguous shards have none, half
  or all of a hop's pairs to do; striped ones half of them in every hop.

  Raises:
    OptionError: an unknown layout, a window, or fewer tokens than ranks.
  """
  if layout not in LAYOUTS:
    raise OptionError(
      "layout", repr(layout), f"one of {', '.join(LAYOUTS)}", "choose one"
    )
  if prompt.window is not None:
    raise OptionError(
      "window", prompt.window, "None for a ring", "leave it out"
    )
  lengths = cost.even(prompt.tokens, ranks)
  play = _Play(profile, ranks, network, noise, wrap=True)
  work = np.zeros(ranks)
  ends: list[list[Op]] = [[] for _ in lengths]
  for layer in range(profile.layers):
    projects = [
      play.project(i, layer, n, ends[i]) for i, n in enumerate(lengths)
    ]
    came = play.rotate(layer, lengths, projects)
    for i, n in enumerate(lengths):
      before: list[Op] = [projects[i]]
      for hop in range(ranks):
        source = (i - hop) % ranks
        count = n * lengths[source] / 2
        if layout == "contiguous" and hop:
          count = float(n * lengths[source]) if source < i else 0.0
        if not hop:
          count += n * prompt.prefix
        work[i] += count if layer == 0 else 0.0
        arrival = [came[i][hop - 1]] if hop else []
        last = hop == ranks - 1
        before = [
          play.attend(
            i,
            layer,
            count,
            n if last else 0,
            [*before, *arrival],
            fixed=last,
            name=f"attend {i}.{layer}.{hop}",
          )
        ]
      ends[i] = play.end(i, layer, before[0], ends[i])
  return play.outcome(f"ring_{layout}", lengths, work, ends[-1])


# ---------------------------------------------------------------------------
# Stage
# ---------------------------------------------------------------------------


class _Play:
  """Devices and links of `ranks`, and the operations that all ways share."""

  def __init__(
    self,
    profile: Profile,
    ranks: int,
    network: Network,
    noise: Noise | None,
    *,
    wrap: bool,
  ) -> None:
    self.profile = profile
    self.sim = Simulator()
    self.devices: list[Device] = [
      self.sim.device(f"rank {i}") for i in range(ranks)
    ]
    count = ranks - 1 + (wrap and ranks > 1)
    self.links: list[Channel] = [
      self.sim.link(
        f"{i}-{(i + 1) % ranks}", network.bandwidth, network.latency_s
      )
      for i in range(count)
    ]
    noise = noise or Noise(slower=0.0)
    slow = noise.slowdowns(profile.layers, ranks - 1)
    # The link that closes a ring has no counterpart in a chain.
    self.slow = np.pad(
      slow, ((0, 0), (0, count - ranks + 1)), constant_values=1.0
    )

  def project(self, i: int, layer: int, tokens: int, after: list[Op]) -> Op:
    """What comes before keys and values are there."""
    p = self.profile
    return self.sim.op(
      f"project {i}.{layer}",
      self.devices[i],
      p.early * (p.token_s / p.layers * tokens),
      after=after,
      kind="project",
    )

  def attend(
    self,
    i: int,
    layer: int,
    pairs: float,
    tokens: int,
    after: list[Op],
    *,
    give: dict[Pool, int] | None = None,
    fixed: bool = True,
    name: str | None = None,
  ) -> Op:
    """Attention over `pairs`, and the linear rest for `tokens`."""
    p = self.profile
    seconds = (
      (1 - p.early) * (p.token_s / p.layers * tokens)
      + p.pair_s / p.layers * pairs
      + (p.fixed_s / p.layers if fixed else 0.0)
    )
    return self.sim.op(
      name or f"attend {i}.{layer}",
      self.devices[i],
      seconds,
      after=after,
      kind="attend",
      give=give,
    )

  def end(self, i: int, layer: int, attend: Op, before: list[Op]) -> list[Op]:
    """What the next layer waits for: this one, and its launching."""
    if not self.profile.floor_s:
      return [attend]
    launched = self.sim.op(
      f"launch {i}.{layer}",
      None,
      self.profile.floor_s / self.profile.layers,
      after=before,
      kind="launch",
    )
    # One operation, so that floors add up over the layers.
    both = self.sim.op(
      f"end {i}.{layer}", after=[attend, launched], kind="join"
    )
    return [both]

  def rotate(
    self, layer: int, lengths: tuple[int, ...], projects: list[Op]
  ) -> list[list[Op]]:
    """Sends every part all the way round: for each rank its arrivals."""
    ranks = len(lengths)
    came: list[list[Op]] = [[] for _ in lengths]
    for hop in range(ranks - 1):
      sent = [
        self.sim.send(
          f"send {i}.{layer}.{hop}",
          self.links[i],
          lengths[(i - hop) % ranks] * self.profile.kv_bytes,
          slowdown=float(self.slow[layer, i]),
          after=[came[i][-1] if hop else projects[i]],
        )
        for i in range(ranks)
      ]
      for i, op in enumerate(sent):
        came[(i + 1) % ranks].append(op)
    return came

  def outcome(
    self,
    name: str,
    lengths: tuple[int, ...],
    work: np.ndarray,
    ends: list[Op],
  ) -> Outcome:
    """Runs it; `ends` are those of the last rank, which has the last token."""
    timeline = self.sim.run()
    sent = timeline.sent_bytes()
    return Outcome(
      method=name,
      lengths=lengths,
      seconds=max(timeline[op].done_s for op in ends),
      work=tuple(float(n) for n in work),
      link_bytes={link.name: sent.get(link.name, 0.0) for link in self.links},
      timeline=timeline,
    )


def _one(pool: Pool | None) -> dict[Pool, int] | None:
  return None if pool is None else {pool: 1}


def _check_credits(credits: int | None) -> None:
  if credits is not None:
    cost.check_count("credits", credits)
