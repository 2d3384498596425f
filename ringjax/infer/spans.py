"""What ranks did when, as measured, in the form of what is simulated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ringjax.parallel.peers import Peers
from ringjax.plan.events import Span, Timeline
from ringjax.plan.schedules import Outcome

_ON_DEVICE = ("project", "attend")


class SpanRecorder:
  """Records what a rank does when, by rank 0's clock.

  Attributes:
    spans: kind, layer, start and end in seconds, bytes.
  """

  def __init__(self, peers: Peers):
    self._peers = peers
    self.spans: list[tuple[str, int, float, float, int]] = []

  def now(self) -> float:
    """Seconds."""
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
    method: its name.
    lengths: tokens of each rank.
    parts: of each rank its start, its end and its spans.
    work: pairs that each rank computed, a layer.
    end: the rank whose end is the first token.
    sent: bytes by link, where they are known and not measured.
  """
  zero = min(p["start"] for p in parts)
  spans = []
  for rank, part in enumerate(parts):
    for kind, layer, start_s, end_s, nbytes in part["spans"]:
      where = f"rank {rank}" if kind in _ON_DEVICE else ""
      start_s, end_s = start_s - zero, end_s - zero
      spans.append(
        Span(
          name=f"{kind} {rank}.{layer}",
          kind=kind,
          where=f"{rank}-{rank + 1}" if kind == "send" else where,
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
