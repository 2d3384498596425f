"""Groups of instances that never change, which elastic ones are compared with.

Tensor parallelism over all chips is one group of one instance; sequence
parallelism one group of all; replicas are groups of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ringjax.errors import OptionError
from ringjax.serve.cluster.elastic_scheduler import (
  ClusterView,
  DecodeGroup,
  ElasticOptions,
  ElasticPlan,
  ElasticRequest,
  PrefillBatch,
)
from ringjax.serve.cluster.phase_times import PhaseTimes


@dataclasses.dataclass(kw_only=True)
class _Open:
  """A group that may read now.

  Attributes:
    room: slots that no one has been promised.
    instances: of the group.
    answers: what it answers, or None.
    requests: that it reads next.
  """

  room: int
  instances: tuple[int, ...]
  answers: DecodeGroup | None
  requests: list[ElasticRequest]


class FixedGroups:
  """Groups that never change: what elastic ones are compared with.

  Each group reads with all its instances before it answers on, in the order of
  arrivals; a request goes to the group with the most free slots.

  Attributes:
    options: constants.
    groups: instances of each.
  """

  shrinks = False

  def __init__(
    self,
    times: PhaseTimes,
    groups: Sequence[Sequence[int]],
    options: ElasticOptions | None = None,
  ):
    """Makes one.

    Args:
      times: of a group; all are of one size.
      groups: numbers of the instances of each.
      options: constants.
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
    """As `ElasticPolicy`."""
    del instances
    return self._times

  def ended(self, request: ElasticRequest) -> None:
    """As `ElasticScheduler`: nothing depends on it."""

  def stepped(self, seconds: float) -> None:
    """The same."""

  def refused(self, request: ElasticRequest, instances: int) -> str:
    """As `ElasticPolicy`: more tokens than the slots of a group."""
    room = len(self.groups[0]) * self.options.slots
    if request.all_tokens <= room:
      return ""
    return f"{request.all_tokens} tokens for {room} slots of a group"

  def plan(self, view: ClusterView) -> ElasticPlan:
    """As `ElasticPolicy`."""
    batches: list[PrefillBatch] = []
    paused: list[DecodeGroup] = []
    answering = {group.instances[0]: group for group in view.groups}
    open_: list[_Open] = []
    for group in self.groups:
      if view.reading & {*group}:
        continue
      found = answering.get(group[0])
      due = sum(r.left_tokens for r in found.requests) if found else 0
      room = sum(self.options.slots - view.used[n] for n in group) - due
      open_.append(
        _Open(room=room, instances=group, answers=found, requests=[])
      )
    for request in view.waiting:
      able = [
        one
        for one in open_
        if one.room >= request.all_tokens
        and (
          not one.requests
          or self._read_s([*one.requests, request])
          <= self.options.longest_prefill_s
        )
      ]
      if not able:
        break
      best = max(able, key=lambda one: one.room / (1 + len(one.requests)))
      best.room -= request.all_tokens
      best.requests.append(request)
    for one in open_:
      if not one.requests:
        continue
      if one.answers is not None:
        paused.append(one.answers)
      size = len(one.instances)
      batches.append(
        PrefillBatch(
          requests=tuple(one.requests),
          instances=one.instances,
          kept=tuple(_shared(r.prompt_tokens, size) for r in one.requests),
          stays=one.instances,
        )
      )
    return ElasticPlan(batches=tuple(batches), paused=tuple(paused))

  def _read_s(self, requests: Sequence[ElasticRequest]) -> float:
    return self._times.prefill_s((r.prompt_tokens, 0) for r in requests)

  def grown(self, group: DecodeGroup, view: ClusterView) -> tuple[int, ...]:
    """As `ElasticPolicy`: none."""
    del group, view
    return ()


def _shared(tokens: int, parts: int) -> tuple[int, ...]:
  """Tokens in equal parts."""
  return tuple(tokens * (n + 1) // parts - tokens * n // parts
               for n in range(parts))  # fmt: skip
