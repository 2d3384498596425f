"""Prefill on two devices at once: linear maps on one, all else on the other.

Guarantees: logits and cache are the same, to the bit, in whatever order the
subgraphs run.
Cost: for each chunk and layer, the input of every map is sent to the first
device and its result comes back.
Memory: the maps' weights on the first device; the cache, norms and residual
streams on the second. For integer maps that multiply outliers in floats, the
second also has the codes, and it alone has the float rows.
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
from ringjax.infer.layerwise import LayerPrograms, StackedLayer, TokenSpan
from ringjax.infer.llm_npu.layer_subgraphs import LayerSubgraphs, Result
from ringjax.infer.session import Session
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import DENSE
from ringjax.models.transformer import Transformer
from ringjax.models.weights.weight_placement import refuse_placed
from ringjax.plan.events import Span, Timeline
from ringjax.plan.systems.subgraphs import (
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
    logits: Logits after the last token, float32 [1, V].
    session: Session with the cache, on the model's device.
    order: Subgraphs in the order in which they began.
    timeline: Span of each subgraph, by the host's clock; a third line has the
      spans, "shadow", in which the second device multiplied outliers.
  """

  logits: jax.Array
  session: Session
  order: tuple[Subgraph, ...]
  timeline: Timeline

  @property
  def waiting(self) -> float:
    """Fraction of the time in which the first device waited."""
    return self.timeline.idle(INTEGER)

  @property
  def seconds(self) -> float:
    """Seconds for the whole prompt, compiling included."""
    return float(self.timeline.finish_s)

  @property
  def step_seconds(self) -> dict[str, float]:
    """Median seconds of each of `rj.plan.subgraphs.STEPS`.

    With more than two chunks or layers they exclude compiling.
    """
    durations = lambda name: [
      span.end_s - span.start_s
      for span in self.timeline.spans
      if span.kind == name
    ]
    return {name: float(np.median(durations(name))) for name in STEPS}

  def simulated(self) -> dict[str, SubgraphSchedule]:
    """Simulate each rule with `step_seconds`, in the graph that ran."""
    chunks = 1 + max(part.chunk for part in self.order)
    layers = 1 + max(part.layer for part in self.order)
    schedules = compared((chunks,), layers, self.step_seconds, in_order=True)
    return schedules[chunks]


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

  In an integer model, activations that exceed 8 bits are multiplied on the
  second device while the first multiplies integers; those of experts are
  multiplied on the first.

  Args:
    model: Model of floats or of integers, on one device.
    tokens: Token ids, int32 [1, C], or a list of one prompt.
    devices: Two different devices: for the maps, and for all else.
    chunk: Number of tokens of a chunk.
    rule: Rule by which a free device takes a subgraph, see
      `rj.plan.subgraphs.RULES`.
    capacity: Tokens of the session's cache; default: the prompt's plus 256.

  Raises:
    OptionError: If there are not two devices, the rule is unknown, or the
      capacity is too small.
    ConfigError: If a layer keeps more than keys and values, or has no
      feedforward.
    PromptError: If the prompt is empty or has unknown ids.
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
  """Runs the subgraphs of one prompt on two devices."""

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
    # Attention appends keys to the cache: chunks must run in order.
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
    for layer, weights in self.programs.walk():
      parts = self.parts[layer.number]
      map_weights, other_weights = parts.split(weights)
      self.weights.append(
        (map_weights, jax.device_put(other_weights, self.mixer))
      )
      self.active.append(parts.active(weights))
    spec = self.programs.cache_spec
    self.caches = [
      jax.device_put(
        KVCache.create((spec(layer),), 1, capacity, model.dtype, kind=DENSE),
        self.mixer,
      )
      for layer in self.layers
    ]
    # Each chunk's input to the current layer, and results for later steps.
    self.inputs: list[jax.Array] = [
      jax.device_put(self._embedded(span), self.mixer) for span in self.spans
    ]
    self.results: list[dict[str, Any]] = [{} for _ in self.spans]
    # Outliers are multiplied while the first device's thread waits for it.
    self.beside = futures.ThreadPoolExecutor(1)
    self.order: list[Subgraph] = []
    self._begun: dict[str, Subgraph] = {}
    self.records: list[Span] = []
    self.changed = threading.Condition()
    self.failure: BaseException | None = None
    self.start_s = time.perf_counter()

  def read(self) -> TwoProcessorReading:
    """Runs all subgraphs, a thread for each device."""
    jax.block_until_ready((self.inputs, self.weights, self.caches))
    self.start_s = time.perf_counter()
    float_thread = threading.Thread(
      target=self._work, args=(FLOAT,), daemon=True
    )
    float_thread.start()
    self._work(INTEGER)
    float_thread.join()
    self.beside.shutdown()
    if self.failure is not None:
      raise self.failure
    last = (self.ids.size - 1) % self.chunk
    x = jax.device_put(self._finished(len(self.spans) - 1, -1), self.maps)
    logits = self.programs.head(x, last)
    return TwoProcessorReading(
      logits=logits,
      session=self._session(),
      order=tuple(self.order),
      timeline=Timeline(tuple(self.records)),
    )

  def _work(self, device: str) -> None:
    """Runs a device's subgraphs until all are done or one has failed."""
    try:
      while True:
        with self.changed:
          self.changed.wait_for(lambda: self._begin(device) or self._over())
          part = self._begun.pop(device, None)
          if part is None:
            return
        begin_s = time.perf_counter() - self.start_s
        jax.block_until_ready(self._run(part))
        end_s = time.perf_counter() - self.start_s
        name = f"{part.name} {part.layer}.{part.chunk}"
        with self.changed:
          self.records.append(
            Span(name, part.name, device, begin_s, begin_s, end_s, end_s)
          )
          self.plan.finish(part)
          self.changed.notify_all()
    except BaseException as error:
      with self.changed:
        self.failure = self.failure or error
        self.changed.notify_all()

  def _over(self) -> bool:
    return self.failure is not None or self.plan.finished

  def _begin(self, device: str) -> bool:
    """Takes a subgraph for a device: returns whether there was one."""
    if self._over():
      return False
    part = self.plan.take(device)
    if part is not None:
      self.order.append(part)
      self._begun[device] = part
    return part is not None

  def _run(self, part: Subgraph) -> Any:
    """Computes a subgraph and stores its results for the next ones."""
    n, number, span = part.chunk, part.layer, self.spans[part.chunk]
    parts, results = self.parts[number], self.results[n]
    map_weights, other_weights = self.weights[number]
    if part.name == "norm":
      if number:
        self.inputs[n] = self._finished(n, number - 1)
      results["read"] = parts.norm(other_weights, self.inputs[n], span)
      results["sent"] = jax.device_put(results["read"], self.maps)
    elif part.name == "project":
      results["project"] = self._results(
        number, parts.inputs, results["sent"], results["read"]
      )
    elif part.name == "attend":
      results["read"], self.caches[number] = parts.attend(
        other_weights, results["project"], span, self.caches[number]
      )
      results["sent"] = jax.device_put(results["read"], self.maps)
    elif part.name == "output":
      (results["output"],) = self._results(
        number, parts.output, results["sent"], results["read"]
      )
    elif part.name == "second_norm":
      results["read"] = parts.second_norm(
        other_weights, self.inputs[n], results["output"], span
      )
      results["sent"] = jax.device_put(results["read"], self.maps)
    elif self._apart(number):
      sent = results["sent"]
      wide_results = self._results(number, parts.wide, sent, results["read"])
      between = parts.between(
        map_weights, sent, jax.device_put(wide_results, self.maps)
      )
      (results["fed"],) = self._results(number, parts.narrow, between)
    else:
      fed = parts.feedforward(map_weights, results["sent"])
      results["fed"] = jax.device_put(fed, self.mixer), None
    return results, self.inputs[n]

  def _apart(self, number: int) -> bool:
    """Whether a layer's feedforward has outliers for the second device."""
    parts = self.parts[number]
    return not self.active[number].isdisjoint((*parts.wide, *parts.narrow))

  def _finished(self, n: int, number: int) -> jax.Array:
    """Computes a chunk's output of a layer whose subgraphs are all done."""
    parts, results = self.parts[number], self.results[n]
    return parts.finish(
      self.weights[number][1], self.inputs[n],
      results["output"], results["fed"],
      not self._apart(number), self.spans[n],
    )  # fmt: skip

  def _results(
    self,
    number: int,
    names: tuple[str, ...],
    x: jax.Array,
    there: jax.Array | None = None,
  ) -> tuple[Result, ...]:
    """Multiplies maps: integers on the first device, outliers on the second.

    Args:
      number: Number of the layer.
      names: Paths of its maps.
      x: Input of the maps.
      there: The input on the second device; None: `x` is sent there.

    Returns:
      Product and outliers' product, or None, of each map, on the second device.
    """
    parts, (map_weights, other_weights) = (
      self.parts[number],
      self.weights[number],
    )
    shadowed = tuple(name for name in names if name in self.active[number])

    def multiply_outliers() -> dict[str, jax.Array]:
      begin_s = time.perf_counter() - self.start_s
      read = jax.device_put(x, self.mixer) if there is None else there
      products = jax.block_until_ready(
        parts.beside(shadowed, other_weights, read)
      )
      end_s = time.perf_counter() - self.start_s
      with self.changed:
        self.records.append(
          Span(
            f"shadow {number}", "shadow", "shadow",
            begin_s, begin_s, end_s, end_s,
          )
        )  # fmt: skip
      return dict(zip(shadowed, products, strict=True))

    pending = self.beside.submit(multiply_outliers) if shadowed else None
    products = jax.device_put(parts.products(names, map_weights, x), self.mixer)
    jax.block_until_ready(products)
    outliers = {} if pending is None else pending.result()
    return tuple(
      (product, outliers.get(name))
      for name, product in zip(names, products, strict=True)
    )

  def _embedded(self, span: TokenSpan) -> jax.Array:
    tile_ids = np.zeros((1, self.chunk), np.int32)
    first, real = int(span.first), int(span.real)
    tile_ids[0, :real] = self.ids[first : first + real]
    tile_ids = jax.device_put(tile_ids, self.maps)
    return self.programs.embed(tile_ids)

  def _session(self) -> Session:
    """Joins the layers' caches to a session's, on the model's device."""
    session = Session(self.model, self.capacity, cache_kind=DENSE)
    home = self.model.embed.weight.get_value().sharding
    cache = session.cache
    for span in self.spans:
      at = span.at(self.chunk)
      cache = cache.allocate(at, replicated=False, sees=True)
      cache = cache.updated(cache.slots)
    by_kind: dict[int, list[tuple[StackedLayer, Any]]] = {}
    for layer, layer_cache in zip(self.layers, self.caches, strict=True):
      by_kind.setdefault(layer.kind, []).append((layer, layer_cache.slots[0]))
    slots = [
      jax.tree.map(
        lambda *x: jnp.concatenate(x),
        *(
          part for _, part in sorted(entries, key=lambda entry: entry[0].index)
        ),
      )
      for _, entries in sorted(by_kind.items())
    ]
    session.cache = cache.updated(tuple(jax.device_put(slots, home)))
    session.seen[0, self.ids] = True
    session.bind(self.model)
    return session
