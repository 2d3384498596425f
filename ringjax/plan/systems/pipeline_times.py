"""Durations of a chunked prefill through a pipeline of stages.

A stage has 1 / X of the layers and the keys of the chunks before. Chunk j
enters a stage when chunk j - 1 has left it and when the stage before has sent
it. With equal stages, and transfers that take no time, chunks of t_j seconds
in all layers take

  sum(t_j) / X + (X - 1) max(t_j) / X

(a proportionate flow shop). Chunks of equal tokens take longer and longer;
chunks of equal time have the shortest longest chunk.
Ref: Qin et al. 2025, Mooncake (FAST), arXiv 2407.00079, section 5.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link
from ringjax.plan import cost
from ringjax.plan.cost import Profile, Prompt
from ringjax.plan.events import Op, Simulator, Timeline
from ringjax.plan.kv_runahead import balance

Seconds = Sequence[int | float] | Float[np.ndarray, " chunks"]


def chunk_seconds(
  profile: Profile, prompt: Prompt, chunks: Sequence[int]
) -> Float[np.ndarray, " chunks"]:
  """Seconds of each chunk in all layers, one after the other.

  Args:
    profile: Times of the model on the device of a stage.
    prompt: Prompt to prefill.
    chunks: Number of tokens of each chunk.

  Raises:
    OptionError: If they do not add up to the prompt.
  """
  lengths = cost.check_lengths(chunks, prompt.tokens)
  pairs = cost.pairs(prompt, lengths, profile.kernel)
  seconds = profile.fixed_s + profile.work_s(np.asarray(lengths), pairs)
  return np.maximum(np.asarray(seconds, np.float64), profile.floor_s)


def pipeline_seconds(chunk_s: Seconds, stages: int) -> float:
  """Seconds until the last chunk has left the last of equal stages.

  Args:
    chunk_s: Seconds of each chunk in all layers.
    stages: X, number of stages; each has 1 / X of the layers.
  """
  stages = positive_int("stages", stages)
  times = [number("chunk_s", float(seconds), least=0) for seconds in chunk_s]
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
  """Simulate a pipeline of unequal stages, with transfers between them.

  Args:
    chunk_s: Seconds of each chunk in all layers.
    shares: Fraction of the layers of each stage; they add up to 1.
    link: Link between neighbours; None for transfers that take no time.
    chunk_bytes: Bytes of each chunk's activations.

  Returns:
    Timeline of "stage 0", "stage 1", ..., and of links "0-1", ...
  """
  shares = [number("shares", share, least=0) for share in shares]
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
    inputs: tuple[Op, ...] = ()
    for x, share in enumerate(shares):
      # A stage runs its operations in the order of their description.
      chunk_op = events.op(
        f"chunk {j}.{x}",
        stages[x],
        float(seconds) * share,
        after=inputs,
        kind="chunk",
      )
      inputs = (chunk_op,)
      if links and x < len(links):
        send_op = events.send(
          f"send {j}.{x}", links[x], chunk_bytes[j], after=inputs, kind="send"
        )
        inputs = (send_op,)
  return events.run()


def equal_times(
  profile: Profile, prompt: Prompt, chunks: int, tile: int = 1
) -> tuple[int, ...]:
  """Lengths of chunks that take equally long, in whole tiles.

  They are KV-Runahead's partition, whose parts also attend to earlier parts.

  Args:
    profile: Times of the model on the device.
    prompt: Prompt to prefill.
    chunks: Maximum number of chunks; fewer if there are too few tiles.
    tile: Tile size in tokens.
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
  """Chunks of equal time, at most `most`, that a pipeline prefills fastest.

  Many chunks fill the stages sooner, but each costs a call's fixed time.
  """
  candidates = {
    equal_times(profile, prompt, n, tile): None
    for n in range(1, positive_int("most", most) + 1)
  }
  duration = lambda lengths: pipeline_seconds(
    chunk_seconds(profile, prompt, lengths), stages
  )
  return min(candidates, key=duration)
