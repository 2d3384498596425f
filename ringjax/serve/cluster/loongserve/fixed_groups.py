"""Groups of instances that never change, a baseline for elastic ones.

Tensor parallelism over all chips is one group of one instance; sequence
parallelism is one group of all; replicas are groups of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ringjax.errors import OptionError
from ringjax.serve.cluster.loongserve.elastic_scheduler import (
  ClusterView,
  DecodeGroup,
  ElasticOptions,
  ElasticPlan,
  ElasticRequest,
  PrefillBatch,
)
from ringjax.serve.cluster.times.phase_times import PhaseTimes


@dataclasses.dataclass(kw_only=True)
class _Open:
  """A group that may prefill now.

  Attributes:
    room: Slots that are not reserved.
    instances: Numbers of the group's instances.
    answers: Requests that it decodes, or None.
    requests: Requests that it prefills next.
  """

  room: int
  instances: tuple[int, ...]
  answers: DecodeGroup | None
  requests: list[ElasticRequest]


class FixedGroups:
  """Fixed groups of instances, a baseline for elastic ones.

  Each group prefills with all its instances before it continues to decode, in
  the order of arrivals; a request goes to the group with the most free slots.

  Attributes:
    options: Constants of the scheduler.
    groups: Numbers of each group's instances.
  """

  shrinks = False

  def __init__(
    self,
    times: PhaseTimes,
    groups: Sequence[Sequence[int]],
    options: ElasticOptions | None = None,
  ):
    """Make a policy of fixed groups.

    Args:
      times: Call times of a group; all are of one size.
      groups: Numbers of each group's instances.
      options: Constants; default `ElasticOptions()`.
    """
    sizes = {len(group) for group in groups}
    if len(sizes) != 1 or sizes == {0}:
      raise OptionError(
        "groups",
        f"of {sorted(sizes)} instances",
        "groups of one size, one instance or more",
        "pass for instance [[0, 1], [2, 3]]",
      )
    self._times = times
    self.groups = tuple(tuple(group) for group in groups)
    self.options = options or ElasticOptions()

  def times(self, instances: int) -> PhaseTimes:
    """Call times of a group."""
    del instances
    return self._times

  def ended(self, request: ElasticRequest) -> None:
    """Do nothing: plans do not depend on past answers."""

  def stepped(self, seconds: float) -> None:
    """Do nothing: plans do not depend on past steps."""

  def refused(self, request: ElasticRequest, instances: int) -> str:
    """Refuse a request of more tokens than the slots of a group."""
    room = len(self.groups[0]) * self.options.slots
    if request.all_tokens <= room:
      return ""
    return f"{request.all_tokens} tokens for {room} slots of a group"

  def plan(self, view: ClusterView) -> ElasticPlan:
    """Plan a prefill batch for each group that takes waiting requests."""
    batches: list[PrefillBatch] = []
    paused: list[DecodeGroup] = []
    answering = {group.instances[0]: group for group in view.groups}
    open_: list[_Open] = []
    for group in self.groups:
      if view.reading & {*group}:
        continue
      decoding = answering.get(group[0])
      due = (
        sum(request.left_tokens for request in decoding.requests)
        if decoding
        else 0
      )
      room = sum(self.options.slots - view.used[n] for n in group) - due
      open_.append(
        _Open(room=room, instances=group, answers=decoding, requests=[])
      )
    for request in view.waiting:
      candidates = [
        group
        for group in open_
        if group.room >= request.all_tokens
        and (
          not group.requests
          or self._read_s([*group.requests, request])
          <= self.options.longest_prefill_s
        )
      ]
      if not candidates:
        break
      best = max(
        candidates, key=lambda group: group.room / (1 + len(group.requests))
      )
      best.room -= request.all_tokens
      best.requests.append(request)
    for candidate in open_:
      if not candidate.requests:
        continue
      if candidate.answers is not None:
        paused.append(candidate.answers)
      size = len(candidate.instances)
      batches.append(
        PrefillBatch(
          requests=tuple(candidate.requests),
          instances=candidate.instances,
          kept=tuple(
            _even_split(request.prompt_tokens, size)
            for request in candidate.requests
          ),
          stays=candidate.instances,
        )
      )
    return ElasticPlan(batches=tuple(batches), paused=tuple(paused))

  def _read_s(self, requests: Sequence[ElasticRequest]) -> float:
    return self._times.prefill_s(
      (request.prompt_tokens, 0) for request in requests
    )

  def grown(self, group: DecodeGroup, view: ClusterView) -> tuple[int, ...]:
    """No instances: groups never grow."""
    del group, view
    return ()


def _even_split(tokens: int, parts: int) -> tuple[int, ...]:
  """Split tokens into equal parts, up to rounding."""
  return tuple(tokens * (n + 1) // parts - tokens * n // parts
               for n in range(parts))  # fmt: skip
