"""Reports of a cache's memory and of the decode speed that it allows.

Guarantees: the bytes of the parts add up to those of the arrays. Seconds come
from a roofline model with sourced hardware figures; nothing is measured.
Terms of a decode step, on each device:

  memory   read the slots that hold tokens, their coordinates, and the weights
           if given, once at the memory bandwidth; blocks from host memory are
           also written
  host link  copy the blocks in host memory, once for each step
  unpack   decode codes to numbers at the rate of the vector unit: on TPU the
           cycles of the kernel that decodes in registers; elsewhere 4
           operations per number and one for each level but the first, at half
           the float32 rate
  products 2 (H + J) FLOPs per pair and query head, and 2 per weight, at the
           rate of the matrix unit
  links    two gathers of each layer's partial sums, if tokens are sharded

These overlap, so the longest one is the time of a step. Not modelled: the
host, kernel launches, sampling.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ringjax.checks import integer, number
from ringjax.errors import OptionError
from ringjax.kv.base import HOST
from ringjax.kv.codecs import Codec, PerHead
from ringjax.kv.codecs.head_codecs import CacheCodec, HeadPlaces
from ringjax.kv.state import StateShape
from ringjax.kv.summaries.summary_spec import SummarySpec
from ringjax.ops.attention.cached.code_format import CodeFormat
from ringjax.ops.attention.kernels.decode_codes_tpu import decode_cycles
from ringjax.parallel import chips
from ringjax.typing import ArrayLeaf

if TYPE_CHECKING:
  from ringjax.kv.cache import KVCache
  from ringjax.kv.cache_kind import CacheConfig
  from ringjax.kv.codecs.codec import VectorCodec
  from ringjax.kv.layer_spec import LayerCacheSpec, LayerKV
  from ringjax.kv.model_cache import ModelCache
  from ringjax.kv.storage.pages import Pages

# Factor by which XLA's loops over codes on a TPU take more cycles than the
# kernel (v5e, int4, in compiled schedules).
_LOOPS = 41
_OPERATIONS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheReport:
  """Memory of a cache by part, and the modelled time of a decode step.

  Attributes:
    kind: Cache kind as text.
    batch: Number of rows.
    tokens: Maximum number of tokens of a row that a step reads.
    parts: Bytes by name, on all shards together.
    bits: Bits per scalar of keys and values, without recurrent states. Counts
      the stored tokens of a cache that evicts, if known, else all that fit.
    bytes_per_token: Total bytes by rows and tokens that fit.
    loss: Loss that the kind adds, in nats per token, or None if unknown.
    loss_from: Source of the loss, or how to measure it.
    machine: Name of the modelled machine.
    seconds: Seconds of a decode step on each device, by resource.
    notes: Assumptions of the model.
  """

  kind: str
  batch: int
  tokens: int
  parts: dict[str, int]
  bits: float
  bytes_per_token: float
  loss: float | None
  loss_from: str
  machine: str
  seconds: dict[str, float]
  notes: tuple[str, ...]

  @property
  def nbytes(self) -> int:
    """Total bytes of all shards."""
    return sum(self.parts.values())

  @property
  def binds(self) -> str:
    """Resource that limits a step."""
    return max(self.seconds, key=lambda name: self.seconds[name])

  @property
  def tokens_per_s(self) -> float:
    """New tokens per second, of all rows together."""
    return self.batch / self.seconds[self.binds]

  def record(self) -> dict[str, Any]:
    """Fields and derived figures as JSON."""
    derived = ("nbytes", "binds", "tokens_per_s")
    fields = dataclasses.asdict(self) | {"notes": list(self.notes)}
    return fields | {name: getattr(self, name) for name in derived}

  def __str__(self) -> str:
    """Format as a table."""
    total = self.nbytes
    loss = "" if self.loss is None else f"{self.loss:+.5f} nats a token, "
    parts = sorted(self.parts.items(), key=lambda x: -x[1])
    width = max(map(len, (*self.parts, "total")))
    times = ", ".join(f"{k} {1e3 * s:.4g} ms" for k, s in self.seconds.items())
    return "\n".join(
      [
        f"{self.kind}: {self.batch} row(s), {self.tokens:,} tokens each",
        *(f"  {k:<{width}}{x:>18,}{x / total:>8.1%}" for k, x in parts),
        f"  {'total':<{width}}{total:>18,}",
        f"bits a number: {self.bits:.2f}; bytes a token: "
        f"{self.bytes_per_token:,.1f}",
        f"expected loss: {loss}{self.loss_from}",
        f"decoding: {self.tokens_per_s:,.1f} tokens a second on "
        f"{self.machine}, by the model; {self.binds} binds",
        f"  a step: {times}",
        *(f"  {note}" for note in self.notes),
      ]
    )


def report(
  cache: ModelCache,
  machine: chips.Machine | str | None = None,
  tokens: int | None = None,
  weights: int | float = 0,
  host_bandwidth: int | float = chips.HOST_LINK.bandwidth,
  held: Mapping[int, int | float] | None = None,
) -> CacheReport:
  """Report a cache's memory and decode speed, for `ModelCache.explain`.

  `held` maps kinds of layers with pages to their number of tokens, of all rows,
  heads and layers together. Default: the tokens in the cache.
  """
  length = cache.capacity if tokens is None else tokens
  integer("tokens", length, least=1, most=cache.capacity)
  number("weights", weights, least=0)
  number("host_bandwidth", host_bandwidth, above=0)
  machine_spec = _machine(cache, machine)
  inner = cache.parts[0] if cache.parts else cache
  tally = _Tally(cache, inner, machine_spec.chip, length)
  tally.held = _held(cache) if held is None else held
  for n, shape in enumerate(cache.shapes):
    tally.layers(n, shape)
  tally.shared()
  loss, loss_from = _loss(cache.kind)
  shards, chip = cache.shards, machine_spec.chip
  numbers = float(weights) / jnp.dtype(inner.dtype).itemsize
  rate = chip.rate(jnp.dtype(inner.dtype).name)
  moved_bytes = (tally.read + tally.copied) / shards + weights
  seconds = {
    "memory": moved_bytes / chip.hbm_bandwidth,
    "unpack": tally.unpack / shards,
    "products": (tally.flops / shards + 2.0 * numbers * cache.batch) / rate,
  }
  notes = [
    f"memory: {moved_bytes / 1e6:,.1f} MB on each device, "
    f"{'of the cache alone' if not weights else 'the weights with it'}, at "
    f"{chip.hbm_bandwidth / 1e9:,.0f} GB/s",
    *tally.notes,
    f"figures of {chip.name}: {chip.source}",
  ]
  if tally.copied:
    seconds["host link"] = tally.copied / shards / host_bandwidth
    notes.append(
      f"host link: {tally.copied / shards / 1e6:,.1f} MB to each device, at "
      f"{host_bandwidth / 1e9:,.0f} GB/s (host_bandwidth=)"
    )
  device_bytes = (sum(tally.parts.values()) - tally.in_host) / shards + weights
  if device_bytes > chip.hbm_bytes:
    notes.append(
      f"more than a device has: {device_bytes / 1e9:,.1f} of "
      f"{chip.hbm_bytes / 1e9:,.1f} GB"
    )
  if shards > 1:
    assert cache.axis is not None
    link = machine_spec.link(cache.axis)
    seconds["links"] = sum(
      link.gather_s(4.0 * n, shards) + link.gather_s(4.0 * n, shards)
      for n in tally.sums
    )
  return CacheReport(
    kind=str(cache.kind),
    batch=cache.batch,
    tokens=length,
    parts=tally.parts,
    bits=8 * (sum(tally.parts.values()) - tally.states) / max(1, tally.numbers),
    bytes_per_token=sum(tally.parts.values()) / cache.batch / cache.capacity,
    loss=loss,
    loss_from=loss_from,
    machine=machine_spec.name,
    seconds=seconds,
    notes=tuple(notes),
  )


class _Tally:
  """Sums over the kinds of layers.

  Attributes:
    parts: Bytes by name.
    states: Bytes of recurrent states.
    numbers: Number of scalars that the stored keys and values represent.
    held: Tokens of kinds of layers with pages, if known.
    read: Bytes that a decode step reads, on all shards together.
    copied: Bytes of `read` that come from host memory.
    in_host: Bytes in host memory.
    unpack: Seconds of one device's vector unit to decode all codes.
    flops: FLOPs of the matrix products.
    sums: Number of scalars that each layer's reduction over shards sends.
    notes: Assumptions of the model.
  """

  def __init__(self, cache: Any, inner: Any, chip: chips.Chip, tokens: int):
    self.cache, self.inner, self.chip = cache, inner, chip
    self.tokens, self.parts = tokens, {}
    self.states, self.numbers = 0, 0.0
    self.held: Mapping[int, int | float] = {}
    self.read = self.unpack = self.flops = self.copied = 0.0
    self.in_host = 0
    self.sums: list[int] = []
    self.notes: list[str] = []

  def layers(
    self, n: int, shape: LayerCacheSpec | StateShape | SummarySpec
  ) -> None:
    """Add a kind of layers, including pages, blocks and contexts."""
    slots = self.inner.slots[n]
    if isinstance(shape, SummarySpec):
      self._add("summaries of keys", _bytes(slots))
      self.read += _bytes(slots) * self.tokens / self.inner.held.capacity
      return
    if isinstance(shape, StateShape):
      self._add("states", _bytes(slots))
      self.states += _bytes(slots)
      self.read += _bytes(slots)
      return
    apart = self.inner is not self.cache
    numbers = self.numbers
    codec = self.inner.kind.codec
    name = "open: " if apart else ""
    if self.cache.kind.exact:
      name = "open (first, recent, newest): "
    ring = self.inner._ring(n)
    slot_table = self.inner.held if ring is None else self.inner.rings[ring]
    filled = (
      slot_table.capacity if apart else min(self.tokens, slot_table.capacity)
    )
    self._slots(name, shape, codec, slots, slot_table.capacity, filled)
    groups = 1 if shape.reading is None else shape.reading.groups
    query_heads = self.cache.batch * shape.heads * groups
    self.sums += [query_heads * (shape.value or shape.key)] * shape.layers
    pages, blocks = (
      getattr(self.cache, part, (None,) * (n + 1))[n]
      for part in ("pages", "blocks")
    )
    if pages is not None:
      self._pages(shape, pages, groups)
      if self.held.get(n):
        self.numbers = numbers + self.held[n] * (shape.key + shape.value)
    if blocks is not None:
      self._blocks(n, shape, blocks)
    contexts = getattr(self.cache, "contexts", None)
    if contexts is not None:
      size = contexts.capacity
      part = contexts.slots[n]
      self._slots("contexts: ", shape, codec, part, size, size)

  def _slots(
    self,
    name: str,
    shape: LayerCacheSpec,
    codec: CacheCodec | None,
    held: LayerKV,
    size: int,
    filled: int | float,
  ) -> None:
    """Add slots of rows; a step reads `filled` of `size`."""
    self._arrays(name, shape, codec, held, filled / size)
    groups = 1 if shape.reading is None else shape.reading.groups
    num_slots = shape.layers * self.cache.batch * filled
    pair = 2.0 * (shape.key + (shape.value or shape.key))
    self.read += 8.0 * num_slots
    self.flops += pair * num_slots * shape.heads * groups

  def _blocks(self, n: int, shape: LayerCacheSpec, blocks: LayerKV) -> None:
    """Add blocks of older tokens, as rows of `tokens` tokens fill them."""
    cache = self.cache
    size = cache.held.capacity
    filled = min(size, max(0, self.tokens - (cache.kind.tier.device or 0)))
    if cache.kind.tier.hot is not None:
      landmarks = _bytes((cache.landmarks[n], cache.centres[n]))
      self._add("landmarks", landmarks)
      self._add("hot pages", _bytes(cache.hot[n]))
      self.read += landmarks * filled / size
      if cache.moments[n] is not None:
        self._add("queries noted", _bytes(cache.moments[n]))
      if cache.low_rank[n] is not None:
        self._add("low-rank keys", _bytes(cache.low_rank[n]))
      filled = cache.shards * cache.tokens_read(n, filled // cache.shards)
      note = "as if no chosen page were hot; PageFetches counts those that are"
      self.notes += [note] if note not in self.notes else []
    hosted = cache.memory == HOST
    name = "host: " if hosted else "blocks: "
    self._slots(name, shape, cache.kind.codec, blocks, size, filled)
    if hosted:
      self.in_host += _bytes(blocks)
      # With `rank` the keys of chosen pages are rebuilt on the devices.
      copied = blocks if cache.kind.tier.rank is None else blocks.v
      self.copied += _bytes(copied) * filled / size

  def _pages(self, shape: LayerCacheSpec, pages: Pages, groups: int) -> None:
    """Add the pages of the heads."""
    pair = 2.0 * (shape.key + (shape.value or shape.key))
    self._arrays("pages: ", shape, self.cache.kind.codec, pages, 1.0)
    coordinates = _bytes((pages.pos, pages.seg))
    self._add("pages: coordinates", coordinates)
    self._add("pages: tables", _bytes(pages.table))
    self._add("pages: sums, bounds", _bytes((pages.score, pages.bounds)))
    self.read += coordinates + _bytes((pages.table, pages.bounds))
    self.flops += pair * groups * pages.k.shape[0] * pages.slots
    if pages.bounds is not None:
      self.notes.append("all pages are counted; a query reads some of them")

  def shared(self) -> None:
    """Add what the kinds of layers share: coordinates, cursors, constants."""
    inner, cache = self.inner, self.cache
    owners = (inner.held, *inner.rings)
    at = _bytes(tuple(owner.at for owner in owners))
    self._add("coordinates", at)
    self._add("cursors", _bytes(owners) - at)
    self._add("constants of codecs", _bytes(inner.constants))
    if hasattr(cache, "blocks"):
      at = _bytes(cache.held.at)
      self._add("coordinates", at)
      self._add("cursors", _bytes(cache.held) - at)
    if hasattr(cache, "contexts"):
      self._contexts(cache.contexts, cache.weigh)
    if hasattr(cache, "pages"):
      self._add("constants of codecs", _bytes(cache.constants))
      self._add("queries noted", _bytes((cache.noted, cache.watch)))
      self._add("marked tokens", _bytes(cache.marks))
      self._add("cursors", _bytes(cache.ends) + _bytes(cache.stayed))

  def _contexts(self, contexts: KVCache, weigh: PyTree) -> None:
    """Add coordinates, cursors, constants and weights of contexts."""
    owners = (contexts.held, *contexts.rings)
    at = _bytes(tuple(owner.at for owner in owners))
    self._add("contexts: coordinates", at)
    self._add("cursors", _bytes(owners) - at)
    self._add("constants of codecs", _bytes(contexts.constants))
    self._add("contexts: weights", _bytes(weigh))
    if hasattr(weigh, "keep"):
      self._note("all contexts are counted; a query reads some of them")

  def _add(self, name: str, nbytes: int) -> None:
    if nbytes:
      self.parts[name] = self.parts.get(name, 0) + nbytes

  def _arrays(
    self,
    name: str,
    shape: LayerCacheSpec,
    codec: CacheCodec | None,
    held: LayerKV | Pages,
    filled: float,
  ) -> None:
    """Add arrays of keys and values; a step reads the share `filled`."""
    pairs = (held.k, "keys", shape.key), (held.v, "values", shape.value)
    for arrays, part, dim in pairs:
      if not dim:
        # Values that are part of the keys take no further decoding.
        continue
      codec_arrays = [(codec, arrays)]
      if isinstance(codec, PerHead):
        head_codecs = [
          codec.codecs[n] for n in HeadPlaces.of(codec, shape).ways
        ]
        codec_arrays = zip(head_codecs, arrays, strict=True)
      for head_codec, x in codec_arrays:
        kernel = head_codec is not None and _in_kernel(
          head_codec, shape, self.cache.kind.layout.unrotated
        )
        self._array(
          name, getattr(head_codec, part, None), dim, x, filled, kernel
        )

  def _array(
    self,
    name: str,
    vectors: VectorCodec | None,
    dim: int,
    x: ArrayLeaf,
    filled: float,
    kernel: bool,
  ) -> None:
    nbytes = _bytes(x)
    self.read += nbytes * filled
    if vectors is None:
      self.numbers += math.prod(x.shape)
      self._add(f"{name}numbers", nbytes)
      return
    width = x.shape[3 if x.dtype == jnp.int8 and x.ndim == 5 else -1]
    count = nbytes // width
    self.numbers += count * dim
    used = vectors.width(dim)
    for part, size in _byte_parts(vectors, dim).items():
      self._add(name + part, size * count)
    self._add(f"{name}filling up", (width - used) * count)
    self.unpack += self._unpack_s(vectors, dim, kernel) * count * filled

  def _unpack_s(self, vectors: VectorCodec, dim: int, kernel: bool) -> float:
    """Seconds to decode one vector."""
    form = _form(vectors, dim)
    if self.chip.platform == "tpu":
      core = chips.CORES.get(self.chip.name)
      if core is None:
        return 0.0
      cycles = 1.8 / 1024 if form is None else decode_cycles(form)
      cycles *= 1 if kernel else _LOOPS
      self._note(
        "unpack: a kernel in registers"
        if kernel
        else f"unpack: XLA's loops, taken as {_LOOPS} times a kernel's cycles"
      )
      return dim * cycles / core.clock_hz / core.cores
    # One choice for each level but the first.
    levels = 2**form.bits - 1 if form is not None and form.looked_up else 0
    rate = self.chip.rate("float32") / 2
    self._note(
      f"unpack: {_OPERATIONS} operations a number and one for each level but "
      f"the first, at {rate / 1e9:,.0f} G a second"
    )
    return dim * (_OPERATIONS + levels) / rate

  def _note(self, text: str) -> None:
    if text not in self.notes:
      self.notes.append(text)


def _form(vectors: VectorCodec, dim: int) -> CodeFormat | None:
  """Byte format of a vector's codes, or None if its codec has none."""
  format_of = getattr(vectors, "code_format", None)
  return None if format_of is None else format_of(dim)


def _in_kernel(codec: Any, shape: LayerCacheSpec, unrotated: bool) -> bool:
  """Whether a TPU kernel decodes the codes of a codec in registers.

  The kernel supports unrotated keys only with per-channel scales.
  """
  keys = values = _form(codec.keys, shape.key)
  if shape.value:
    values = _form(codec.values, shape.value)
  if keys is None or values is None or values.by_channel:
    return False
  aligned = not shape.key % 64 and not shape.value % 64
  return aligned and (keys.by_channel or not unrotated)


def _byte_parts(vectors: VectorCodec, dim: int) -> dict[str, int]:
  """Bytes of a vector: codes, scales, outliers."""
  byte_parts = getattr(vectors, "byte_parts", None)
  return (
    {"codes": vectors.width(dim)} if byte_parts is None else byte_parts(dim)
  )


def _bytes(tree: PyTree) -> int:
  """Total bytes of arrays or their specs, on all devices."""
  array_bytes = lambda x: math.prod(x.shape) * x.dtype.itemsize
  return sum(map(array_bytes, jax.tree.leaves(tree)))


def _held(cache: Any) -> dict[int, float]:
  """Tokens of all rows and heads by kind of layers; {} for a spec."""
  if not hasattr(cache, "pages") or not isinstance(cache.ends, jax.Array):
    return {}
  counts = enumerate(cache.tokens())
  return {n: float(count.sum()) for n, count in counts if count is not None}


def _loss(kind: CacheConfig) -> tuple[float | None, str]:
  """Loss in nats per token, if known, and its source."""
  if kind.codec is None and kind.policy is None:
    return 0.0, "for all tokens are kept as numbers"
  if isinstance(kind.codec, PerHead) and kind.codec.loss is not None:
    return kind.codec.loss, "measured by allocate_bits"
  if isinstance(kind.codec, Codec | None):
    return (
      None,
      "not measured; run python -m ringjax.launch.evaluate caches "
      f"--cache={kind}",
    )
  return None, "not measured; pass the kind to ringjax.eval.compare_caches"


def _machine(cache: Any, given: chips.Machine | str | None) -> chips.Machine:
  """The named machine, or that of the cache's devices."""
  if isinstance(given, chips.Machine):
    return given
  if isinstance(given, str):
    return chips.machine(given)
  if given is not None:
    raise OptionError(
      "machine",
      repr(given),
      f"one of {', '.join(chips.MACHINES)}, or a Machine",
      "pass machine='tpu-v5e', for instance",
    )
  devices = jax.devices() if cache.mesh is None else cache.mesh.devices.flat
  return chips.machine_of(devices[0].device_kind, devices[0].platform)
