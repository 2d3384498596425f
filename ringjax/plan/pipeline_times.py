"""How long a prompt takes in chunks through a pipeline of stages.

A stage has 1 / X of the layers and the keys of the chunks before. Chunk j
enters a stage when chunk j - 1 has left it and when the stage before has sent
it. With equal stages, and boundaries that take no time, chunks of t_j seconds
on one stage's worth of all layers take

  sum(t_j) / X + (X - 1) max(t_j) / X

(a proportionate flow shop). Chunks of equal tokens take longer and longer;
chunks of equal time have the least longest one.
Ref: Qin et al. 2025, Mooncake (FAST), arXiv 2407.00079, section 5.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link
from ringjax.plan import balance, cost
from ringjax.plan.cost import Profile, Prompt
from ringjax.plan.events import Op, Simulator, Timeline

Seconds = Sequence[int | float] | Float[np.ndarray, " chunks"]


def chunk_seconds(
  profile: Profile, prompt: Prompt, chunks: Sequence[int]
) -> Float[np.ndarray, " chunks"]:
  """Seconds of each chunk in all layers, one behind the other.

  Args:
    profile: the model and the device of a stage.
    prompt: what is read.
    chunks: tokens of each.

  Raises:
    OptionError: they do not add up to the prompt.
  """
  lengths = cost.check_lengths(chunks, prompt.tokens)
  pairs = cost.pairs(prompt, lengths, profile.kernel)
  seconds = profile.fixed_s + profile.work_s(np.asarray(lengths), pairs)
  return np.maximum(np.asarray(seconds, np.float64), profile.floor_s)


def pipeline_seconds(chunk_s: Seconds, stages: int) -> float:
  """Seconds until the last chunk has left the last of equal stages.

  Args:
    chunk_s: seconds of each chunk in all layers.
    stages: X; each takes an X-th of them.
  """
  stages = positive_int("stages", stages)
  times = [number("chunk_s", float(t), least=0) for t in chunk_s]
  if not times:
    raise OptionError("chunk_s", "none", "at least one chunk", "pass some")
  return (sum(times) + (stages - 1) * max(times)) / stages


def pipeline_timeline(
  chunk_s: Seconds,
  shares: Sequence[int | float],
  *,
  link: Link | None = None,
  chunk_bytes: Sequence[int | float] = (),
) -> Timeline:
  """The same as a simulation, for stages that differ and boundaries that cost.

  Args:
    chunk_s: seconds of each chunk in all layers.
    shares: of each stage, its part of the layers; they add up to 1.
    link: between neighbours; None for boundaries without a cost.
    chunk_bytes: of each chunk's activations.

  Returns:
    What happened on "stage 0", "stage 1", and on links "0-1".
  """
  shares = [number("shares", one, least=0) for one in shares]
  if not shares or abs(sum(shares) - 1) > 1e-9:
    raise OptionError(
      "shares",
      tuple(shares),
      "parts of the layers that add up to 1",
      "pass (0.5, 0.5) for two equal stages",
    )
  if link is not None and len(chunk_bytes) != len(chunk_s):
    raise OptionError(
      "chunk_bytes",
      f"{len(chunk_bytes)} numbers",
      f"one for each of the {len(chunk_s)} chunks",
      "pass tokens x width x bytes of a number",
    )
  events = Simulator()
  stages = [events.device(f"stage {x}") for x in range(len(shares))]
  links = [
    events.link(f"{x}-{x + 1}", link.bandwidth, link.latency_s)
    for x in range(len(shares) - 1)
    if link is not None
  ]
  for j, seconds in enumerate(chunk_s):
    came: tuple[Op, ...] = ()
    for x, share in enumerate(shares):
      # A stage takes its operations in the order of their description.
      done = events.op(
        f"chunk {j}.{x}",
        stages[x],
        float(seconds) * share,
        after=came,
        kind="chunk",
      )
      came = (done,)
      if links and x < len(links):
        sent = events.send(
          f"send {j}.{x}", links[x], chunk_bytes[j], after=came, kind="send"
        )
        came = (sent,)
  return events.run()


def equal_times(
  profile: Profile, prompt: Prompt, chunks: int, tile: int = 1
) -> tuple[int, ...]:
  """Lengths of chunks that take equally long, in whole tiles.

  They are KV-Runahead's partition, whose parts are behind each other too.

  Args:
    profile: the model and the device.
    prompt: what is read.
    chunks: how many, at most; fewer where tiles do not suffice.
    tile: tokens of a tile.
  """
  count = balance.most_ranks(prompt.tokens, chunks, tile)
  shares = balance.balanced(profile, prompt, count)
  return balance.round_to_tiles(shares, prompt.tokens, tile)


def best_chunks(
  profile: Profile,
  prompt: Prompt,
  stages: int,
  *,
  most: int = 64,
  tile: int = 1,
) -> tuple[int, ...]:
  """The chunks of equal time, up to `most`, that a pipeline reads fastest.

  Many chunks fill the stages sooner, and cost a call's fixed time each.
  """
  found = {
    equal_times(profile, prompt, n, tile): None
    for n in range(1, positive_int("most", most) + 1)
  }
  takes = lambda lengths: pipeline_seconds(
    chunk_seconds(profile, prompt, lengths), stages
  )
  return min(found, key=takes)
