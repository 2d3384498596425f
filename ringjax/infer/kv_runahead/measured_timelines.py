"""Measured timelines of ranks, in the form of simulated ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ringjax.parallel.peers import Peers
from ringjax.plan.events import Span, Timeline
from ringjax.plan.kv_runahead.schedules import Outcome

_ON_DEVICE = ("project", "attend")


class SpanRecorder:
  """Records the spans of a rank's work, by rank 0's clock.

  Attributes:
    spans: (kind, layer, start, end, bytes) of each span, times in seconds.
  """

  def __init__(self, peers: Peers):
    self._peers = peers
    self.spans: list[tuple[str, int, float, float, int]] = []

  def now(self) -> float:
    """Seconds on rank 0's clock."""
    return time.monotonic() + self._peers.offset_s

  def add(self, kind: str, layer: int, start_s: float, nbytes: int = 0) -> None:
    """Records a span that ends now."""
    self.spans.append((kind, layer, start_s, self.now(), nbytes))


def measured(
  method: str,
  lengths: Sequence[int],
  parts: Sequence[dict[str, Any]],
  *,
  work: Float[np.ndarray, " ..."] | Sequence[float],
  end: int,
  sent: dict[str, float] | None = None,
) -> Outcome:
  """A measured run of all ranks, in the form of a simulated one.

  Args:
    method: Name of the method.
    lengths: Number of tokens of each rank.
    parts: Start, end and spans of each rank, under these keys.
    work: Number of pairs that each rank computed in a layer.
    end: Rank that ends with the first token.
    sent: Bytes by link, where they are known; None: those of the spans.
  """
  zero = min(part["start"] for part in parts)
  spans = []
  for rank, part in enumerate(parts):
    for kind, layer, start_s, end_s, nbytes in part["spans"]:
      device = f"rank {rank}" if kind in _ON_DEVICE else ""
      start_s, end_s = start_s - zero, end_s - zero
      spans.append(
        Span(
          name=f"{kind} {rank}.{layer}",
          kind=kind,
          resource=f"{rank}-{rank + 1}" if kind == "send" else device,
          ready_s=start_s,
          start_s=start_s,
          end_s=end_s,
          done_s=end_s,
          nbytes=nbytes,
        )
      )
  timeline = Timeline(tuple(spans))
  if sent is None:
    counted = timeline.sent_bytes()
    links = [f"{i}-{i + 1}" for i in range(len(lengths) - 1)]
    sent = {link: float(counted.get(link, 0.0)) for link in links}
  return Outcome(
    method=method,
    lengths=tuple(lengths),
    seconds=parts[end]["end"] - zero,
    work=tuple(float(w) for w in work),
    link_bytes=dict(sent),
    timeline=timeline,
  )
