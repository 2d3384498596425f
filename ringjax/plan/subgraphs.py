"""Parts of a chunked prefill on two processors, out of order (llm.npu).

Guarantees: a `Dispatcher` gives out a part when all that it needs is done, and
each part once, by whatever rule; the same one serves the simulator below and
live devices.
Ref: Xu et al. 2025, llm.npu, arXiv 2407.05858: products of integers on one
processor, norms and attention in floats on another; of the parts that may
begin, that one which keeps the integer processor from waiting.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ringjax.checks import number, one_of, positive_int
from ringjax.errors import OptionError
from ringjax.plan.events import Device, Simulator, Span, Timeline

INTEGER, FLOAT = "integer", "float"
# What a layer does of a chunk, and where: the six of the paper. What a part on
# the integer processor multiplies beside, in floats, is within its time.
STEPS = {
  "norm": FLOAT,
  "project": INTEGER,
  "attend": FLOAT,
  "output": INTEGER,
  "second_norm": FLOAT,
  "feedforward": INTEGER,
}
_PROJECT, _ATTEND = 1, 2
# serial: chunk by chunk. fifo: what could begin first. waits: the paper's: a
# part on the float processor counts the integer seconds that it lets begin, one
# on the integer processor loses the float seconds that it lets begin. That
# begins the first chunk, which all others need, behind them: fifo was as short
# or shorter in all settings tried (docs/how/integers.md).
RULES = ("fifo", "waits", "serial")


@dataclasses.dataclass(frozen=True, order=True)
class Subgraph:
  """One step of one layer for one chunk.

  Attributes:
    chunk: of the prompt, from 0.
    layer: of the model, from 0.
    step: index into `STEPS`.
  """

  chunk: int
  layer: int
  step: int

  @property
  def name(self) -> str:
    """What it does."""
    return tuple(STEPS)[self.step]

  @property
  def where(self) -> str:
    """The processor that runs it."""
    return STEPS[self.name]


class Dispatcher:
  """Which part of a prefill a free processor runs next.

  A part needs the one before it in its chunk. Attention also needs the keys of
  all earlier chunks in its layer: their projections, or `in_order` their
  attention, where that is what appends keys to a cache.
  """

  def __init__(
    self,
    chunks: int,
    layers: int,
    *,
    rule: str = RULES[0],
    seconds: Mapping[str, int | float] | None = None,
    in_order: bool = False,
  ):
    """Nothing has begun yet.

    Args:
      chunks: of the prompt.
      layers: of the model.
      rule: one of `RULES`.
      seconds: what each of `STEPS` takes, for "waits"; default: the same.
      in_order: see above.

    Raises:
      OptionError: an argument out of range.
    """
    self.chunks = positive_int("chunks", chunks)
    self.layers = positive_int("layers", layers)
    self.rule = one_of("rule", rule, RULES)
    self.in_order = in_order
    self.seconds = _checked({} if seconds is None else seconds)
    self._done: set[Subgraph] = set()
    # In the order in which they could begin.
    self._ready: list[Subgraph] = []
    self._given: set[Subgraph] = set()
    for chunk in range(chunks):
      self._offer(Subgraph(chunk, 0, 0))

  @property
  def finished(self) -> bool:
    """Whether all is done."""
    return len(self._done) == self.chunks * self.layers * len(STEPS)

  def take(self, where: str) -> Subgraph | None:
    """What the free processor `where` runs now; None: it waits."""
    found = [x for x in self._ready if x.where == where]
    if self.rule == "serial":
      # Chunk by chunk: none overtakes an earlier chunk.
      first = min((x.chunk for x in self._open()), default=0)
      found = [x for x in found if x.chunk == first]
    if not found:
      return None
    chosen = found[0] if self.rule == "fifo" else min(found)
    if self.rule == "waits":
      # Of equals the earlier chunk: its keys are what others wait for.
      chosen = max(found, key=lambda x: (self._worth(x), -x.chunk, -x.layer))
    self._ready.remove(chosen)
    self._given.add(chosen)
    return chosen

  def done(self, part: Subgraph) -> None:
    """Tells that a part is done.

    Raises:
      OptionError: a part that was not given out, or is done already.
    """
    if part not in self._given:
      raise OptionError(
        "part", part, "one that take() returned", "tell each part once"
      )
    self._given.discard(part)
    self._done.add(part)
    for one in self._behind(part):
      self._offer(one)

  def needs(self, part: Subgraph) -> tuple[Subgraph, ...]:
    """What has to be done before a part."""
    found = []
    if part.step:
      found.append(Subgraph(part.chunk, part.layer, part.step - 1))
    elif part.layer:
      found.append(Subgraph(part.chunk, part.layer - 1, len(STEPS) - 1))
    if part.name == "attend" and part.chunk:
      before = range(part.chunk)
      if self.in_order:
        found.append(dataclasses.replace(part, chunk=part.chunk - 1))
      else:
        found += [Subgraph(n, part.layer, _PROJECT) for n in before]
    return tuple(found)

  def _behind(self, part: Subgraph) -> list[Subgraph]:
    """Parts that need this one."""
    found = []
    if part.step + 1 < len(STEPS):
      found.append(Subgraph(part.chunk, part.layer, part.step + 1))
    elif part.layer + 1 < self.layers:
      found.append(Subgraph(part.chunk, part.layer + 1, 0))
    later = range(part.chunk + 1, self.chunks)
    if self.in_order and part.name == "attend":
      found += [Subgraph(n, part.layer, part.step) for n in later[:1]]
    elif not self.in_order and part.name == "project":
      found += [Subgraph(n, part.layer, _ATTEND) for n in later]
    return found

  def _offer(self, part: Subgraph) -> None:
    """Lets a part begin if all that it needs is done."""
    known = part in self._done or part in self._given or part in self._ready
    if not known and all(x in self._done for x in self.needs(part)):
      self._ready.append(part)

  def _open(self) -> list[Subgraph]:
    return [*self._ready, *self._given]

  def _worth(self, part: Subgraph) -> float:
    """Seconds on the other processor that this part lets begin."""
    lets = [
      x
      for x in self._behind(part)
      if x.where != part.where
      and x not in self._done
      and all(y == part or y in self._done for y in self.needs(x))
    ]
    total = math.fsum(self.seconds[x.name] for x in lets)
    return total if part.where == FLOAT else -total


@dataclasses.dataclass(frozen=True)
class SubgraphSchedule:
  """How long a prefill takes on two processors.

  Attributes:
    timeline: of both.
    order: of the parts, as they began.
  """

  timeline: Timeline
  order: tuple[Subgraph, ...]

  @property
  def seconds(self) -> float:
    """Of the whole prefill."""
    return float(self.timeline.finish_s)

  @property
  def waiting(self) -> float:
    """Part of the time in which the integer processor waits."""
    return self.timeline.idle(INTEGER)


def simulated(
  chunks: int,
  layers: int,
  seconds: Mapping[str, int | float],
  *,
  rule: str = RULES[0],
  growing: int | float = 0.0,
  in_order: bool = False,
) -> SubgraphSchedule:
  """A prefill in the simulator.

  Args:
    chunks: of the prompt.
    layers: of the model.
    seconds: what each of `STEPS` takes.
    rule: one of `RULES`.
    growing: how much longer attention takes with each chunk before it, as a
      part of what it takes for the first.
    in_order: see `Dispatcher`.

  Raises:
    OptionError: an argument out of range.
  """
  number("growing", growing, least=0)
  plan = Dispatcher(
    chunks, layers, rule=rule, seconds=seconds, in_order=in_order
  )
  simulator = Simulator()
  free = {where: simulator.device(where) for where in (INTEGER, FLOAT)}
  order: list[Subgraph] = []

  def begin() -> None:
    for where in list(free):
      part = plan.take(where)
      if part is not None:
        order.append(part)
        run(part, free.pop(where))

  def run(part: Subgraph, device: Device) -> None:
    def after(span: Span) -> None:
      del span
      plan.done(part)
      free[part.where] = device
      simulator.at(simulator.now_s, begin)

    more = growing * part.chunk if part.name == "attend" else 0
    simulator.op(
      f"{part.name} {part.layer}.{part.chunk}",
      device,
      plan.seconds[part.name] * (1 + more),
      kind=part.name,
      then=after,
    )

  simulator.at(0.0, begin)
  return SubgraphSchedule(simulator.run(), tuple(order))


def compared(
  chunks: Sequence[int],
  layers: int,
  seconds: Mapping[str, int | float],
  *,
  growing: int | float = 0.0,
  in_order: bool = False,
) -> dict[int, dict[str, SubgraphSchedule]]:
  """Every rule, by the number of chunks: {chunks: {rule: schedule}}."""
  return {
    n: {
      rule: simulated(
        n, layers, seconds, rule=rule, growing=growing, in_order=in_order
      )
      for rule in RULES
    }
    for n in chunks
  }


def _checked(seconds: Mapping[str, int | float]) -> dict[str, float]:
  wrong = [name for name in seconds if name not in STEPS]
  if wrong:
    raise OptionError(
      "seconds",
      ", ".join(map(str, wrong)),
      f"some of {', '.join(STEPS)}",
      "write seconds={'project': 1, 'attend': 2, 'output': 3}, for instance",
    )
  for name, value in seconds.items():
    number(f"seconds[{name!r}]", value, above=0)
  return {name: float(seconds.get(name, 1.0)) for name in STEPS}
