"""Methods of prefilling a prompt on several ranks, as operations of a layer.

Each method has a time to the first token, the bytes on every link, the pairs
that every rank computes and a timeline. A layer on rank i:

  kvr        queries, keys and values of its c_i tokens | the prefix's come
             from rank i - 1 | all are sent to rank i + 1 | attention, the rest.
             Sending overlaps with attention, no rank waits for a later one
             but for buffers (`credits`), and the last rank ends with the cache.
  tsp        an even split, an all-gather of keys and values around a ring
             that ends for all ranks at once, attention of C/p queries to all
             C keys, masked, the rest.
  flash_tsp  the same with the tiles above the diagonal left out: the last
             rank has most to do, the others wait for it in the next layer.
  ring       keys go round while attention computes; contiguous or striped.

Times and timelines come from `ringjax.plan.kv_runahead.recurrence`; those of a
chain by its recurrence, for many partitions at once (`kvr_seconds`).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from ringjax.checks import integer, number, one_of, positive_int
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link
from ringjax.plan import cost
from ringjax.plan.cost import Profile, Prompt
from ringjax.plan.events import Span, Timeline
from ringjax.plan.kv_runahead import recurrence
from ringjax.plan.kv_runahead.recurrence import Edge, Numbers, Operation

LAYOUTS = ("contiguous", "striped")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
  """Noise that slows one random link between neighbours in each layer.

  Attributes:
    slower: x; the link's bandwidth is divided by 1 + x.
    seed: Seed of the draws.
  """

  slower: int | float = 20.0
  seed: int = 0

  def __post_init__(self) -> None:
    number("slower", self.slower, least=0)
    integer("seed", self.seed, least=0)

  def slowdowns(
    self, layers: int, links: int
  ) -> Float[np.ndarray, "layers links"]:
    """Factors of a message's seconds, by layer and link."""
    factors = np.ones((layers, links))
    if links:
      # `random` gives the same draws on all versions; NumPy's may change.
      draw = random.Random(self.seed)
      for layer in range(layers):
        factors[layer, draw.randrange(links)] += self.slower
    return factors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """Result of prefilling a prompt, simulated or measured.

  Attributes:
    method: Name of the method.
    lengths: Number of tokens of each rank.
    seconds: Time to the first token.
    work: Pairs of a query and a key that each rank computed, per layer.
    link_bytes: Bytes sent over each link in all layers, by name "0-1".
    timeline: Timeline of the operations.
  """

  method: str
  lengths: tuple[int, ...]
  seconds: int | float
  work: tuple[float, ...]
  link_bytes: dict[str, int | float]
  timeline: Timeline

  @property
  def sent_bytes(self) -> int | float:
    """Bytes sent over all links, in all layers."""
    return sum(self.link_bytes.values())

  def record(self) -> dict[str, Any]:
    """Fields as plain values, without the timeline."""
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
  network: Link,
  *,
  credits: int | None = None,
  noise: Noise | None = None,
  name: str = "kvr",
) -> Outcome:
  """Simulate KV-Runahead with a given partition.

  Args:
    profile: Times of the model on the devices.
    prompt: Prompt to prefill.
    lengths: Number of tokens of each rank; they add up to the prompt's.
    network: Links between ranks.
    credits: Layers that may wait at each end of a link, to be sent and to be
      used; None is any number.
    noise: Noise that slows links, or None.
    name: Name of the method, for the outcome.

  Raises:
    OptionError: If the partition does not fit the prompt.
  """
  lengths = cost.check_lengths(lengths, prompt.tokens)
  layer = _chain(profile, prompt, np.asarray(lengths), network, credits, noise)
  spans: list[Span] = []
  layer.first_s(spans)
  work = cost.pairs(prompt, lengths, profile.kernel)
  return layer.outcome(name, work, Timeline(tuple(spans)))


def kvr_seconds(
  profile: Profile,
  prompt: Prompt,
  partitions: Shaped[np.ndarray, " ..."] | Sequence[Any],
  network: Link,
  *,
  credits: int | None = None,
  noise: Noise | None = None,
) -> Float[np.ndarray, " K"]:
  """Time to first token of each of K partitions, ints [K, p].

  Raises:
    OptionError: If a partition does not fit the prompt.
  """
  c = np.asarray(partitions)
  if c.ndim != 2 or not np.issubdtype(c.dtype, np.integer) or not c.shape[1]:
    raise OptionError(
      "partitions",
      f"{c.dtype} of shape {c.shape}",
      "ints of shape [K, p]",
      "pass a list of partitions",
    )
  invalid = np.flatnonzero((c < 1).any(1) | (c.sum(1) != prompt.tokens))
  if invalid.size:
    cost.check_lengths([int(n) for n in c[invalid[0]]], prompt.tokens)
  return _chain(profile, prompt, c, network, credits, noise).first_s()


def _chain(
  profile: Profile,
  prompt: Prompt,
  lengths: Int[np.ndarray, "*K p"],
  network: Link,
  credits: int | None,
  noise: Noise | None,
) -> _Layer:
  """Make a layer of the chain, for one partition or K of them."""
  if credits is not None:
    positive_int("credits", credits)
  layer = _Layer(profile, lengths, network, noise, closed=False)
  work = cost.pairs(prompt, lengths, profile.kernel)
  nbytes = cost.chain_tokens(prompt, lengths) * profile.kv_bytes
  arrived: tuple[Edge, ...] = ()
  last = layer.ranks - 1
  for i in range(layer.ranks):
    send_name, send_buffers, use_buffers = f"send {i}.{{}}", (), ()
    if credits is not None and i < last:
      # A buffer is free when its message has arrived, or was attended to.
      send_buffers = (Edge(send_name, credits),)
      use_buffers = (Edge(f"attend {i + 1}.{{}}", credits),)
    joined = layer.add(
      f"join {i}.{{}}",
      "join",
      after=(layer.project(i), *arrived),
      behind=send_buffers,
    )
    attend = layer.attend(i, work[..., i], (joined,))
    if i < last:
      arrived = (layer.send(send_name, i, nbytes[..., i], joined, use_buffers),)
    layer.end(i, attend)
  return layer


# ---------------------------------------------------------------------------
# Baselines
# ---------------------------------------------------------------------------


def tsp(
  profile: Profile,
  prompt: Prompt,
  ranks: int,
  network: Link,
  *,
  noise: Noise | None = None,
  causal: bool = False,
) -> Outcome:
  """Simulate tensor and sequence parallelism, the paper's baseline.

  Args:
    profile: Times of the model on the devices.
    prompt: Prompt to prefill.
    ranks: Number of ranks.
    network: Links between ranks.
    noise: Noise that slows links, or None.
    causal: Whether the kernel skips what the mask forbids. A pair costs what
      the profile says: the kernel is no faster, it does less.

  Raises:
    OptionError: If there are fewer tokens than ranks.
  """
  lengths = cost.even(prompt.tokens, ranks)
  work = np.asarray(lengths, np.float64) * (prompt.prefix + prompt.tokens)
  if causal:
    work = cost.pairs(prompt, lengths, "causal")
  layer = _Layer(profile, np.asarray(lengths), network, noise, closed=True)
  projections, arrived = layer.rotate()
  gathered = layer.add(
    "gathered {}",
    "join",
    after=(*projections, *(edge for edges in arrived for edge in edges)),
  )
  for i in range(ranks):
    layer.end(i, layer.attend(i, work[i], (gathered,)))
  return layer.outcome("flash_tsp" if causal else "tsp", work)


def flash_tsp(
  profile: Profile,
  prompt: Prompt,
  ranks: int,
  network: Link,
  *,
  noise: Noise | None = None,
) -> Outcome:
  """Simulate `tsp` with a causal kernel, which skips masked tiles."""
  return tsp(profile, prompt, ranks, network, noise=noise, causal=True)


def ring(
  profile: Profile,
  prompt: Prompt,
  ranks: int,
  network: Link,
  *,
  layout: str = "striped",
  noise: Noise | None = None,
) -> Outcome:
  """Simulate ring attention: a hop's keys travel while attention computes.

  Masked tiles are skipped. Contiguous shards have none, half or all of a hop's
  pairs to compute; striped ones half of them in every hop.

  Raises:
    OptionError: If the layout is unknown, the prompt has a window, or there
      are fewer tokens than ranks.
  """
  one_of("layout", layout, LAYOUTS)
  if prompt.window is not None:
    raise OptionError(
      "window", prompt.window, "None for a ring", "leave it out"
    )
  lengths = cost.even(prompt.tokens, ranks)
  layer = _Layer(profile, np.asarray(lengths), network, noise, closed=True)
  projections, arrived = layer.rotate()
  work = np.zeros(ranks)
  for i, n in enumerate(lengths):
    previous = projections[i]
    for hop in range(ranks):
      source = (i - hop) % ranks
      count = n * lengths[source] / 2
      if layout == "contiguous" and hop:
        count = float(n * lengths[source]) if source < i else 0.0
      if not hop:
        count += n * prompt.prefix
      work[i] += count
      dependencies = (previous, *arrived[i][hop - 1 : hop])
      previous = layer.attend(
        i, count, dependencies, hop, rest=hop == ranks - 1
      )
    layer.end(i, previous)
  return layer.outcome(f"ring_{layout}", work)


# ---------------------------------------------------------------------------
# A layer
# ---------------------------------------------------------------------------


class _Layer:
  """Operations of a layer on ranks in a row or, if it is closed, a ring.

  Args:
    profile: Times of the model on the devices.
    lengths: Number of tokens of each rank, for one case or K.
    network: Links between ranks.
    noise: Noise that slows links, or None.
    closed: Whether the last rank sends to the first.
  """

  def __init__(
    self,
    profile: Profile,
    lengths: Int[np.ndarray, "*K p"],
    network: Link,
    noise: Noise | None,
    *,
    closed: bool,
  ) -> None:
    self._profile, self._network, self._lengths = profile, network, lengths
    self.ranks = ranks = lengths.shape[-1]
    self._operations: list[Operation] = []
    self._linear = profile.token_s / profile.layers * lengths
    slow = (noise or Noise(slower=0.0)).slowdowns(profile.layers, ranks - 1)
    self._links = [f"{i}-{i + 1}" for i in range(ranks - 1)]
    if closed and ranks > 1:
      # This link has no counterpart in a chain, hence no noise.
      self._links.append(f"{ranks - 1}-0")
      slow = np.pad(slow, ((0, 0), (0, 1)), constant_values=1.0)
    self._slow = slow.T.tolist()

  def add(self, name: str, kind: str, *given: Any, **more: Any) -> Edge:
    """Add an `Operation`; return the edge to wait for it."""
    self._operations.append(Operation(name, kind, *given, **more))
    return Edge(name)

  def project(self, i: int) -> Edge:
    """Add the linear work before keys and values can be sent."""
    return self.add(
      f"project {i}.{{}}",
      "project",
      f"rank {i}",
      self._profile.early * self._linear[..., i],
      (Edge(f"end {i}.{{}}", 1),),
    )

  def attend(
    self,
    i: int,
    pairs: Numbers,
    after: tuple[Edge, ...],
    hop: int | None = None,
    *,
    rest: bool = True,
  ) -> Edge:
    """Add attention over `pairs`, and the linear rest of the layer."""
    p = self._profile
    seconds = p.pair_s / p.layers * pairs
    if rest:
      rest_s = (1 - p.early) * self._linear[..., i]
      seconds = rest_s + seconds + p.fixed_s / p.layers
    name = f"attend {i}.{{}}" + ("" if hop is None else f".{hop}")
    return self.add(name, "attend", f"rank {i}", seconds, after)

  def end(self, i: int, attend: Edge) -> None:
    """Add the end of the layer: after attention, and after launching."""
    end_name, dependencies = f"end {i}.{{}}", (attend,)
    if self._profile.floor_s:
      # Launches follow each other, so that floors add up over the layers.
      launch = self.add(
        f"launch {i}.{{}}",
        "launch",
        seconds=self._profile.floor_s / self._profile.layers,
        after=(Edge(end_name, 1),),
      )
      dependencies = (attend, launch)
    self.add(end_name, "join", after=dependencies)

  def send(
    self,
    name: str,
    i: int,
    nbytes: Numbers,
    after: Edge,
    behind: tuple[Edge, ...] = (),
  ) -> Edge:
    """Add a message from rank i to the next."""
    seconds = nbytes / self._network.bandwidth
    return self.add(
      name, "send", self._links[i], seconds, (after,), behind, nbytes,
      self._network, self._slow[i],
    )  # fmt: skip

  def rotate(self) -> tuple[list[Edge], list[list[Edge]]]:
    """Add projections, and send every rank's keys all around the ring.

    Returns:
      Each rank's projection, and its arrivals, one per hop.
    """
    ranks = range(self.ranks)
    projections = [self.project(i) for i in ranks]
    arrived: list[list[Edge]] = [[] for _ in ranks]
    newest = projections
    for hop in range(self.ranks - 1):
      sends = [
        self.send(
          f"send {i}.{{}}.{hop}",
          i,
          self._lengths[(i - hop) % self.ranks] * self._profile.kv_bytes,
          newest[i],
        )
        for i in ranks
      ]
      newest = [sends[i - 1] for i in ranks]
      for i in ranks:
        arrived[i].append(newest[i])
    return projections, arrived

  def first_s(self, spans: list[Span] | None = None) -> Numbers:
    """Seconds to the first token, which the last rank computes."""
    done_s = recurrence.solve(self._operations, self._profile.layers, spans)
    return done_s[f"end {self.ranks - 1}.{{}}"]

  def outcome(
    self,
    name: str,
    work: Float[np.ndarray, " p"],
    timeline: Timeline | None = None,
  ) -> Outcome:
    """Outcome of a single case, simulated unless its timeline is given."""
    if timeline is None:
      timeline = recurrence.simulate(self._operations, self._profile.layers)
    sent_bytes = timeline.sent_bytes()
    return Outcome(
      method=name,
      lengths=tuple(self._lengths.tolist()),
      # The last operation is the end of the last rank.
      seconds=timeline.spans[-1].done_s,
      work=tuple(float(n) for n in work),
      link_bytes={link: sent_bytes.get(link, 0.0) for link in self._links},
      timeline=timeline,
    )
