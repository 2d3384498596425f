"""A prompt read on two devices at once: linear maps here, attention there.

Guarantees: whatever the order in which parts run, and whichever rule chooses
it, logits and cache are the same, to the bit.
Cost: of each chunk and layer queries, keys and values go over, and what
attention makes of them comes back.
Memory: the weights on the first device, the cache on the second.
Ref: Xu et al. 2025, llm.npu, arXiv 2407.05858, whose first device multiplies
integers (`rj.infer.integer_model`) and whose second one is a CPU.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.checks import positive_int
from ringjax.errors import ConfigError, OptionError, PromptError
from ringjax.infer import inputs
from ringjax.infer.inputs import Prompts
from ringjax.infer.layerwise import LayerPrograms, StackedLayer, TokenSpan
from ringjax.infer.session import Session
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import DENSE
from ringjax.models.transformer import Transformer
from ringjax.models.weight_placement import refuse_placed
from ringjax.plan.events import Span, Timeline
from ringjax.plan.subgraphs import (
  FLOAT,
  INTEGER,
  RULES,
  STEPS,
  Dispatcher,
  Subgraph,
  SubgraphSchedule,
  compared,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoProcessorReading:
  """A prompt that was read on two devices.

  Attributes:
    logits: float32 [1, V] behind the last token.
    session: the cache, on the model's own device.
    order: the parts as they began.
    timeline: when each ran, by the host's clock.
  """

  logits: jax.Array
  session: Session
  order: tuple[Subgraph, ...]
  timeline: Timeline

  @property
  def waiting(self) -> float:
    """Part of the time in which the first device waited."""
    return self.timeline.idle(INTEGER)

  @property
  def seconds(self) -> float:
    """Of the whole prompt, compiling included."""
    return float(self.timeline.finish_s)

  @property
  def step_seconds(self) -> dict[str, float]:
    """Median seconds of each of `rj.plan.subgraphs.STEPS`.

    With more than two chunks or layers compiling is not in it.
    """
    of = lambda name: [
      x.end_s - x.start_s for x in self.timeline.spans if x.kind == name
    ]
    return {name: float(np.median(of(name))) for name in STEPS}

  def simulated(self) -> dict[str, SubgraphSchedule]:
    """What each rule comes to by `step_seconds`, in the graph that ran."""
    chunks = 1 + max(part.chunk for part in self.order)
    layers = 1 + max(part.layer for part in self.order)
    found = compared((chunks,), layers, self.step_seconds, in_order=True)
    return found[chunks]


def read_on_two(
  model: Transformer,
  tokens: Prompts,
  *,
  devices: Sequence[jax.Device],
  chunk: int = 256,
  rule: str = RULES[0],
  capacity: int | None = None,
) -> TwoProcessorReading:
  """Reads a prompt chunk by chunk, a device each for maps and for attention.

  Args:
    model: the model, or one of integers; on one device.
    tokens: int32 [1, C], or a list of one prompt.
    devices: two different ones: of the maps, and of attention.
    chunk: tokens of a chunk.
    rule: which part a free device takes, see `rj.plan.subgraphs.RULES`.
    capacity: tokens of the session's cache; default: the prompt's, and 256.

  Raises:
    OptionError: other than two devices, no such rule, or too small a capacity.
    ConfigError: layers that keep more than keys and values.
    PromptError: an empty prompt or unknown ids.
  """
  if len(devices) != 2 or devices[0] == devices[1]:
    raise OptionError(
      "devices",
      f"{[str(d) for d in devices]}",
      "two different ones, of maps and of attention",
      "pass jax.devices()[:2], for instance",
    )
  positive_int("chunk", chunk)
  refuse_placed(
    model, "read by two devices", "load it without placement= and memory="
  )
  if model.mesh is not None:
    raise ConfigError(
      "model",
      f"weights on a mesh {dict(model.mesh.shape)}",
      "weights on one device",
      "load it without a mesh",
    )
  prompts = inputs.prompts(tokens, model.config.vocab)
  if len(prompts) != 1:
    raise PromptError(
      "tokens", f"{len(prompts)} prompts", "one", "read each by itself"
    )
  ids = prompts[0]
  count = -(-ids.size // chunk)
  room = count * chunk
  default = room + 256
  capacity = positive_int("capacity", default if capacity is None else capacity)
  if capacity < room:
    raise OptionError(
      "capacity",
      capacity,
      f"{room} or more, for {count} chunks of {chunk} tokens",
      "leave it out, or pass a smaller chunk",
    )
  return _Reader(model, ids, tuple(devices), chunk, rule, capacity).read()


class _Reader:
  """One prompt on its way through the layers."""

  def __init__(
    self,
    model: Transformer,
    ids: np.ndarray,
    devices: tuple[Any, ...],
    chunk: int,
    rule: str,
    capacity: int,
  ):
    self.model, self.ids, self.chunk, self.capacity = (
      model,
      ids,
      chunk,
      capacity,
    )
    self.maps, self.mixer = devices
    self.spans = [
      TokenSpan(first, min(chunk, ids.size - first), ids.size)
      for first in range(0, ids.size, chunk)
    ]
    self.programs = LayerPrograms(jax.device_put(model, self.maps))
    self.layers = self.programs.layers
    # Attention appends keys: chunk by chunk.
    self.plan = Dispatcher(
      len(self.spans), len(self.layers), rule=rule, in_order=True
    )
    self.weights = [self.programs.weights(layer) for layer in self.layers]
    small = [self.programs.mixing_weights(w) for w in self.weights]
    self.mixing = [(s, jax.device_put(w, self.mixer)) for s, w in small]
    spec = self.programs.cache_spec
    self.caches = [
      jax.device_put(
        KVCache.create((spec(layer),), 1, capacity, model.dtype, kind=DENSE),
        self.mixer,
      )
      for layer in self.layers
    ]
    # Of each chunk: its input to a layer, and what a step left for the next.
    self.inputs: list[Any] = [self._embedded(span) for span in self.spans]
    self.made: list[Any] = [None] * len(self.spans)
    self.order: list[Subgraph] = []
    self._begun: dict[str, Subgraph] = {}
    self.records: list[Span] = []
    self.changed = threading.Condition()
    self.failure: BaseException | None = None
    self.start_s = time.perf_counter()

  def read(self) -> TwoProcessorReading:
    """Runs all parts, a thread for each device."""
    jax.block_until_ready((self.inputs, self.weights, self.mixing, self.caches))
    self.start_s = time.perf_counter()
    other = threading.Thread(target=self._work, args=(FLOAT,), daemon=True)
    other.start()
    self._work(INTEGER)
    other.join()
    if self.failure is not None:
      raise self.failure
    last = (self.ids.size - 1) % self.chunk
    logits = self.programs.head(self.programs.outer, self.inputs[-1], last)
    return TwoProcessorReading(
      logits=logits,
      session=self._session(),
      order=tuple(self.order),
      timeline=Timeline(tuple(self.records)),
    )

  def _work(self, where: str) -> None:
    """Runs a device's parts until all are done or one has failed."""
    try:
      while True:
        with self.changed:
          self.changed.wait_for(lambda: self._begin(where) or self._over())
          part = self._begun.pop(where, None)
          if part is None:
            return
        begin_s = time.perf_counter() - self.start_s
        jax.block_until_ready(self._run(part))
        end_s = time.perf_counter() - self.start_s
        name = f"{part.name} {part.layer}.{part.chunk}"
        with self.changed:
          self.records.append(
            Span(name, part.name, where, begin_s, begin_s, end_s, end_s)
          )
          self.plan.done(part)
          self.changed.notify_all()
    except BaseException as error:
      with self.changed:
        self.failure = self.failure or error
        self.changed.notify_all()

  def _over(self) -> bool:
    return self.failure is not None or self.plan.finished

  def _begin(self, where: str) -> bool:
    """Takes a part for a device; whether there was one."""
    if self._over():
      return False
    part = self.plan.take(where)
    if part is not None:
      self.order.append(part)
      self._begun[where] = part
    return part is not None

  def _run(self, part: Subgraph) -> Any:
    """What a part computes, put where the next one finds it."""
    n, layer = part.chunk, self.layers[part.layer]
    programs, span = self.programs, self.spans[part.chunk]
    weights, x = self.weights[part.layer], self.inputs[part.chunk]
    if part.name == "project":
      made = programs.project(layer.spec, weights, x, span, self.model.dtype)
      self.made[n] = jax.device_put(made, self.mixer)
    elif part.name == "attend":
      shapes, small = self.mixing[part.layer]
      mixed, self.caches[part.layer] = programs.mix(
        layer.spec, 0, shapes, small, self.made[n], span,
        self.caches[part.layer], 0,
      )  # fmt: skip
      self.made[n] = jax.device_put(mixed, self.maps)
    else:
      self.inputs[n] = programs.finish(
        layer.spec, weights, x, self.made[n], span
      )
      self.made[n] = None
      return self.inputs[n]
    return self.made[n]

  def _embedded(self, span: TokenSpan) -> jax.Array:
    part = np.zeros((1, self.chunk), np.int32)
    first, real = int(span.first), int(span.real)
    part[0, :real] = self.ids[first : first + real]
    part = jax.device_put(part, self.maps)
    return self.programs.embed(self.programs.outer, part)

  def _session(self) -> Session:
    """The layers' caches as that of the model, where the model is."""
    session = Session(self.model, self.capacity, cache_kind=DENSE)
    home = self.model.embed.weight.get_value().sharding
    cache = session.cache
    for span in self.spans:
      at = span.at(self.chunk)
      cache = cache.allocate(at, replicated=False, sees=True)
      cache = cache.updated(cache.slots)
    by_kind: dict[int, list[tuple[StackedLayer, Any]]] = {}
    for layer, own in zip(self.layers, self.caches, strict=True):
      by_kind.setdefault(layer.kind, []).append((layer, own.slots[0]))
    slots = [
      jax.tree.map(
        lambda *x: jnp.concatenate(x),
        *(part for _, part in sorted(found, key=lambda one: one[0].index)),
      )
      for _, found in sorted(by_kind.items())
    ]
    session.cache = cache.updated(tuple(jax.device_put(slots, home)))
    session.seen[0, self.ids] = True
    session.bind(self.model)
    return session
