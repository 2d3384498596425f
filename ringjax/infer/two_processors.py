"""A prompt read on two devices at once: linear maps here, all else there.

Guarantees: whatever the order in which parts run, and whichever rule chooses
it, logits and cache are the same, to the bit.
Cost: of each chunk and layer the input of every map goes over, and its result
comes back.
Memory: the maps' weights on the first device; the cache, norms and residual
streams on the second. Of maps of integers that multiply outliers in floats it
also has the codes, and alone the float rows.
Ref: Xu et al. 2025, llm.npu, arXiv 2407.05858, whose first device multiplies
integers (`rj.infer.integer_model`) and whose second one is a CPU, which also
multiplies outliers in floats (shadow) while the first one multiplies.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.checks import positive_int
from ringjax.errors import ConfigError, OptionError, PromptError
from ringjax.infer import inputs
from ringjax.infer.inputs import Prompts
from ringjax.infer.layer_subgraphs import LayerSubgraphs, Result
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
    timeline: when each ran, by the host's clock; and on a third line, "shadow",
      when the second device multiplied outliers beside a part of the first.
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
  """Reads a prompt chunk by chunk, a device for maps and one for all else.

  What leaves 8 bits in a model of integers is multiplied on the second device
  while the first multiplies integers; only experts' is on the first.

  Args:
    model: the model, or one of integers; on one device.
    tokens: int32 [1, C], or a list of one prompt.
    devices: two different ones: of the maps, and of all else.
    chunk: tokens of a chunk.
    rule: which part a free device takes, see `rj.plan.subgraphs.RULES`.
    capacity: tokens of the session's cache; default: the prompt's, and 256.

  Raises:
    OptionError: other than two devices, no such rule, or too small a capacity.
    ConfigError: layers that keep more than keys and values, or that have no
      feedforward.
    PromptError: an empty prompt or unknown ids.
  """
  if len(devices) != 2 or devices[0] == devices[1]:
    raise OptionError(
      "devices",
      f"{[str(d) for d in devices]}",
      "two different ones, of maps and of all else",
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
    kinds = [
      LayerSubgraphs(spec, block, model.config.embed)
      for run, blocks in zip(model.stack.runs, model.stack.blocks, strict=True)
      for spec, block in zip(run.layers, blocks, strict=True)
    ]
    self.parts = [kinds[layer.kind] for layer in self.layers]
    self.weights, self.active = [], []
    for layer, parts in zip(self.layers, self.parts, strict=True):
      weights = self.programs.weights(layer)
      maps, rest = parts.split(weights)
      self.weights.append((maps, jax.device_put(rest, self.mixer)))
      self.active.append(parts.active(weights))
    spec = self.programs.cache_spec
    self.caches = [
      jax.device_put(
        KVCache.create((spec(layer),), 1, capacity, model.dtype, kind=DENSE),
        self.mixer,
      )
      for layer in self.layers
    ]
    # Of each chunk: its input to a layer, and what steps left for later ones.
    self.inputs: list[jax.Array] = [
      jax.device_put(self._embedded(span), self.mixer) for span in self.spans
    ]
    self.made: list[dict[str, Any]] = [{} for _ in self.spans]
    # Outliers are multiplied while the first device's thread waits for it.
    self.beside = futures.ThreadPoolExecutor(1)
    self.order: list[Subgraph] = []
    self._begun: dict[str, Subgraph] = {}
    self.records: list[Span] = []
    self.changed = threading.Condition()
    self.failure: BaseException | None = None
    self.start_s = time.perf_counter()

  def read(self) -> TwoProcessorReading:
    """Runs all parts, a thread for each device."""
    jax.block_until_ready((self.inputs, self.weights, self.caches))
    self.start_s = time.perf_counter()
    other = threading.Thread(target=self._work, args=(FLOAT,), daemon=True)
    other.start()
    self._work(INTEGER)
    other.join()
    self.beside.shutdown()
    if self.failure is not None:
      raise self.failure
    last = (self.ids.size - 1) % self.chunk
    x = jax.device_put(self._finished(len(self.spans) - 1, -1), self.maps)
    logits = self.programs.head(self.programs.outer, x, last)
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
    n, number, span = part.chunk, part.layer, self.spans[part.chunk]
    parts, made = self.parts[number], self.made[n]
    maps, rest = self.weights[number]
    if part.name == "norm":
      if number:
        self.inputs[n] = self._finished(n, number - 1)
      made["read"] = parts.norm(rest, self.inputs[n], span)
      made["sent"] = jax.device_put(made["read"], self.maps)
    elif part.name == "project":
      made["project"] = self._results(
        number, parts.inputs, made["sent"], made["read"]
      )
    elif part.name == "attend":
      made["read"], self.caches[number] = parts.attend(
        rest, made["project"], span, self.caches[number]
      )
      made["sent"] = jax.device_put(made["read"], self.maps)
    elif part.name == "output":
      (made["output"],) = self._results(
        number, parts.output, made["sent"], made["read"]
      )
    elif part.name == "second_norm":
      made["read"] = parts.second_norm(
        rest, self.inputs[n], made["output"], span
      )
      made["sent"] = jax.device_put(made["read"], self.maps)
    elif self._apart(number):
      sent = made["sent"]
      wide = self._results(number, parts.wide, sent, made["read"])
      between = parts.between(maps, sent, jax.device_put(wide, self.maps))
      (made["fed"],) = self._results(number, parts.narrow, between)
    else:
      fed = parts.feedforward(maps, made["sent"])
      made["fed"] = jax.device_put(fed, self.mixer), None
    return made, self.inputs[n]

  def _apart(self, number: int) -> bool:
    """Whether outliers of a layer's feedforward are multiplied beside."""
    parts = self.parts[number]
    return not self.active[number].isdisjoint((*parts.wide, *parts.narrow))

  def _finished(self, n: int, number: int) -> jax.Array:
    """A chunk's output of a layer all of whose parts are done."""
    parts, made = self.parts[number], self.made[n]
    return parts.finish(
      self.weights[number][1], self.inputs[n], made["output"], made["fed"],
      not self._apart(number), self.spans[n],
    )  # fmt: skip

  def _results(
    self,
    number: int,
    names: tuple[str, ...],
    x: jax.Array,
    there: jax.Array | None = None,
  ) -> tuple[Result, ...]:
    """What maps make, on the second device: integers here, outliers there.

    Args:
      number: of the layer.
      names: of its maps.
      x: what they read.
      there: the same on the second device; None: it is sent.
    """
    parts, (maps, rest) = self.parts[number], self.weights[number]
    shadowed = tuple(n for n in names if n in self.active[number])

    def beside() -> dict[str, jax.Array]:
      begin_s = time.perf_counter() - self.start_s
      read = jax.device_put(x, self.mixer) if there is None else there
      products = jax.block_until_ready(parts.beside(shadowed, rest, read))
      end_s = time.perf_counter() - self.start_s
      with self.changed:
        self.records.append(
          Span(
            f"shadow {number}", "shadow", "shadow",
            begin_s, begin_s, end_s, end_s,
          )
        )  # fmt: skip
      return dict(zip(shadowed, products, strict=True))

    later = self.beside.submit(beside) if shadowed else None
    products = jax.device_put(parts.products(names, maps, x), self.mixer)
    jax.block_until_ready(products)
    outliers = {} if later is None else later.result()
    return tuple(
      (product, outliers.get(name))
      for name, product in zip(names, products, strict=True)
    )

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
