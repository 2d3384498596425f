"""Times the attention of a decode step: by kind of cache, and by sharing.

Guarantees: contestants read the same keys, of one layer, on one device. In part
"kinds" each kind of cache stores them, and a kind whose result is nothing like
that of the dense cache is WRONG; in part "sharing" the results are equal.

  kinds    one row over `tokens` keys, as `dense`, `int4`, ... store them
  sharing  `rows` rows over `shared` keys in common and `own` keys each, read
           row by row ("apart") or once for all ("together")
  host     one row over `tokens` keys, the older ones in host memory, of which
           a step copies all ("tiered") or the chosen pages that are not hot
           ("chosen"). Each query is near the one before it, and keys that it
           looks at are on a few pages; otherwise a choice would lose most of
           the attention
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from benchmarks.shared import harness
from benchmarks.shared.harness import Contestant, Report, Row, Runnable, option
from ringjax.kv.base import CacheSpec
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import KINDS, CacheConfig
from ringjax.kv.codecs import Calibrated, Codec
from ringjax.kv.kind_parts import TierConfig
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.kv.offload.chosen_tiered import ChosenTieredCache
from ringjax.kv.offload.tiered import TieredCache
from ringjax.kv.policies import Select
from ringjax.kv.query_reading import KeyReading
from ringjax.ops.attention.cached.cached_attention import ShardedDecode
from ringjax.ops.attention.cached.pooled import (
  PooledView,
  SharedTiles,
  pool_tile,
)
from ringjax.ops.attention.scores import Scores, Terms
from ringjax.ops.mask import Causal, Coords
from ringjax.ops.rope import Rotation

# Kinds that need no calibration and keep all tokens in one place.
_NAMES = tuple(
  name
  for name, kind in KINDS.items()
  if isinstance(kind.codec, Codec | None)
  and not isinstance(kind.codec, Calibrated)
  and not kind.evicting
  and name not in ("windowed", "unrotated")
)
_WAYS = ("apart", "together")
_PAGE = 32
# Older keys in host memory: the newest 512 stay on the device.
_HOSTED = {
  "tiered": (TieredCache, CacheConfig(tier=TierConfig(device=512))),
  "chosen": (
    ChosenTieredCache,
    CacheConfig(
      policy=Select(budget=2048),
      tier=TierConfig(device=512, hot=4096, block=_PAGE),
    ),
  ),
}
# Queries of consecutive steps, and pages whose keys each looks at.
_QUERIES, _LOOKS_AT = 64, 16
# As a fraction of the dense cache's largest number; codes of 2 bits need it.
_TOLERANCE = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSettings(harness.BenchmarkSettings):
  """Settings of the benchmark of decode steps."""

  parts: tuple[str, ...] = option(
    ("kinds", "sharing", "host"), ("kinds", "sharing", "host")
  )
  tokens: tuple[int, ...] = option((65536,))
  rows: int = option(32, flag=None)
  shared: tuple[int, ...] = option((4096, 0), (), flag=None)
  own: int = option(128, flag=None)
  heads: int = option(8)
  kv_heads: int = option(4)
  head_dim: int = option(128, flag=None)
  dtype: str = option("float32", ("float32", "bfloat16", "float16"), flag=None)
  contestants: tuple[str, ...] = option(
    (*_NAMES, *_WAYS, *_HOSTED), (*_NAMES, *_WAYS, *_HOSTED)
  )
  rounds: int = option(9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCase:
  """A row of the table.

  Attributes:
    part: "kinds", "sharing" or "host".
    tokens: Number of keys of a row.
    shared: Number of these keys that all rows share.
    rows: Number of rows of the batch.
  """

  part: str
  tokens: int
  shared: int
  rows: int

  def __str__(self) -> str:
    if self.part == "host":
      return f"one row, {self.tokens:,} keys, in host memory"
    if self.part == "kinds":
      return f"one row, {self.tokens:,} keys"
    own_keys = self.tokens - self.shared
    return f"{self.rows} rows, {self.shared:,} shared keys and {own_keys:,} own"


def _attend(
  q: Shaped[Array, " ..."], views: Any, at: Coords, scale: float
) -> jax.Array:
  return ShardedDecode()(Scores(scale=scale), q, views, Terms(), at, Causal())


def _queries(
  s: DecodeSettings, rows: int, last: int
) -> tuple[jax.Array, Coords]:
  draw = np.random.default_rng(1).standard_normal
  groups = s.heads // s.kv_heads
  q = draw((rows, s.kv_heads, groups, 1, s.head_dim), np.float32)
  at = np.full((rows, 1), last, np.int32)
  ones = jnp.ones((rows, 1), jnp.int32)
  return jnp.asarray(q, s.dtype), Coords(jnp.asarray(at), ones)


def _by_kind(name: str, case: DecodeCase, s: DecodeSettings) -> Runnable:
  """Builds a step over a cache of a kind that holds random keys."""
  shape = LayerCacheSpec(1, s.kv_heads, s.head_dim, s.head_dim)
  cache = KVCache.create((shape,), 1, case.tokens, s.dtype, kind=KINDS[name])
  draw = np.random.default_rng(0).standard_normal
  at = Coords(
    jnp.arange(case.tokens, dtype=jnp.int32)[None],
    jnp.ones((1, case.tokens), jnp.int32),
  )
  k, v = (
    jnp.asarray(
      draw((1, s.kv_heads, case.tokens, s.head_dim), np.float32), s.dtype
    )
    for _ in range(2)
  )

  @functools.partial(jax.jit, donate_argnums=0)
  def fill(
    cache: KVCache, k: Shaped[Array, " ..."], v: Shaped[Array, " ..."]
  ) -> KVCache:
    cache = cache.allocate(at, replicated=False, sees=False)
    layer = cache.layer(0, cache.slots[0], jnp.int32(0))
    return cache.updated((layer.append(k, v, at, Rotation()).slots,))

  cache = jax.block_until_ready(fill(cache, k, v))
  q, q_at = _queries(s, 1, case.tokens)

  @jax.jit
  def step(q: Shaped[Array, " ..."], cache: KVCache) -> jax.Array:
    layer = cache.layer(0, cache.slots[0], jnp.int32(0))
    return _attend(q, (layer.view(Rotation()),), q_at, s.head_dim**-0.5)

  run = lambda: jax.block_until_ready(step(q, cache))
  return Runnable(run, run)


def _by_sharing(name: str, case: DecodeCase, s: DecodeSettings) -> Runnable:
  """Builds a step of many rows over pages of a pool."""
  platform = jax.default_backend()
  tile = pool_tile(_PAGE, platform)
  up = lambda n: -(-n // tile) * tile // _PAGE
  shared_pages, own_pages = up(case.shared), up(case.tokens - case.shared)
  table = np.concatenate(
    [
      np.broadcast_to(np.arange(shared_pages), (case.rows, shared_pages)),
      shared_pages
      + np.arange(case.rows * own_pages).reshape(case.rows, own_pages),
    ],
    1,
  )
  pages = shared_pages + case.rows * own_pages
  room = CacheSpec(batch=pages, capacity=_PAGE, dtype=s.dtype)
  shape = LayerCacheSpec(1, s.kv_heads, s.head_dim, s.head_dim)
  page_spec = shape.slots(room).k
  draw = np.random.default_rng(0).standard_normal
  k, v = (
    jnp.asarray(draw(page_spec.shape, np.float32), s.dtype) for _ in range(2)
  )
  pos = np.broadcast_to(
    np.arange(table.shape[1] * _PAGE, dtype=np.int32),
    (case.rows, table.shape[1] * _PAGE),
  )
  at = Coords(jnp.asarray(pos), jnp.asarray((pos < case.tokens) * np.int32(1)))
  q, q_at = _queries(s, case.rows, case.tokens)
  tiles = shared_pages * _PAGE // tile if name == "together" else 0
  num_tiles = max(1, tiles)
  plan = SharedTiles(
    jnp.zeros((1, num_tiles), jnp.int32),
    jnp.arange(num_tiles, dtype=jnp.int32)[None],
    jnp.ones((1, num_tiles, case.rows), bool),
    jnp.full((1,), tiles, jnp.int32),
    jnp.full((1, case.rows), tiles, jnp.int32),
  )
  table = jnp.asarray(table, jnp.int32)

  @jax.jit
  def step(
    q: Shaped[Array, " ..."],
    k: Shaped[Array, " ..."],
    v: Shaped[Array, " ..."],
    plan: SharedTiles,
  ) -> jax.Array:
    view = PooledView(k, v, at, table, jnp.int32(0), shared=plan)
    return _attend(q, (view,), q_at, s.head_dim**-0.5)

  run = lambda: jax.block_until_ready(step(q, k, v, plan))
  return Runnable(run, run)


def _in_host(name: str, case: DecodeCase, s: DecodeSettings) -> Runnable:
  """Builds a step over a cache whose older keys are in host memory."""
  storage, kind = _HOSTED[name]
  groups = s.heads // s.kv_heads
  reading = KeyReading(groups=groups, scores=Scores(scale=s.head_dim**-0.5))
  shape = LayerCacheSpec(
    1, s.kv_heads, s.head_dim, s.head_dim, reading=reading, which=(0,)
  )
  cache: Any = storage.create((shape,), 1, case.tokens + 1, s.dtype, kind=kind)
  draw = np.random.default_rng(0)
  k, v = (
    draw.standard_normal((1, s.kv_heads, case.tokens, s.head_dim), np.float32)
    for _ in range(2)
  )
  # Each query is a mean of the keys of some pages, of which one is another than
  # before; these keys have the largest products.
  pages = draw.integers(0, case.tokens // _PAGE, _QUERIES + _LOOKS_AT)
  directions = draw.standard_normal((len(pages), s.head_dim), np.float32)
  for page, direction in zip(pages, directions, strict=True):
    k[0, :, page * _PAGE + 7] = 3 * direction
  queries = [
    jnp.broadcast_to(
      jnp.asarray(directions[n : n + _LOOKS_AT].sum(0), s.dtype),
      (1, 1, s.heads, s.head_dim),
    )
    for n in range(_QUERIES)
  ]
  ones = lambda n: jnp.ones((1, n), jnp.int32)
  at = Coords(jnp.arange(case.tokens, dtype=jnp.int32)[None], ones(case.tokens))
  k, v = jnp.asarray(k, s.dtype), jnp.asarray(v, s.dtype)

  @jax.jit
  def fill(cache: Any, k: jax.Array, v: jax.Array) -> Any:
    cache = cache.allocate(at, replicated=False, sees=False)
    layer = cache.layer(0, cache.slots[0], jnp.int32(0))
    return cache.updated((layer.append(k, v, at, Rotation()).slots,))

  cache = fill(cache.with_room(case.tokens), k, v).evict()
  token_at = Coords(jnp.full((1, 1), case.tokens, jnp.int32), ones(1))
  token = jnp.zeros((1, s.kv_heads, 1, s.head_dim), s.dtype)

  @functools.partial(jax.jit, donate_argnums=0)
  def step(hot: Any, cache: Any, q: jax.Array) -> tuple[jax.Array, Any]:
    if hot:
      cache = dataclasses.replace(cache, hot=hot)
    call = cache.allocate(token_at, replicated=True, sees=True)
    layer = call.layer(0, call.slots[0], jnp.int32(0))
    layer = layer.append(token, token, token_at, Rotation())
    layer = layer.observe(lambda: q, lambda: q)
    by_head = q.reshape(1, s.kv_heads, groups, 1, s.head_dim)
    output = _attend(by_head, layer.views(), token_at, s.head_dim**-0.5)
    return output, (layer.hot,) if hot else ()

  # Of the chosen pages those that are hot stay, and nothing else changes.
  state = [jax.tree.map(jnp.copy, getattr(cache, "hot", ())), 0]

  def run() -> jax.Array:
    hot, n = state
    output, hot = step(hot, cache, queries[n % _QUERIES])
    state[:] = hot, n + 1
    return jax.block_until_ready(output)

  return Runnable(run, run)


class DecodeBenchmark(harness.Benchmark):
  """Benchmark of decode attention by kind of cache, and by sharing."""

  name = "decode"
  options = DecodeSettings
  quick = DecodeSettings(tokens=(16384,), shared=(2048, 0), rounds=5)
  contestants: ClassVar[dict[str, Contestant]] = {
    **{
      n: Contestant(functools.partial(_by_kind, n), ours=True) for n in _NAMES
    },
    **{
      n: Contestant(functools.partial(_by_sharing, n), ours=True) for n in _WAYS
    },
    **{
      n: Contestant(functools.partial(_in_host, n), ours=True) for n in _HOSTED
    },
  }
  columns = ("part", "tokens", "shared")
  parts = ("kinds", "sharing", "host")
  files = ("json", "append")

  @property
  def cases(self) -> list[DecodeCase]:
    s, cases = self.settings, []
    if "kinds" in s.parts:
      cases += [
        DecodeCase(part="kinds", tokens=n, shared=0, rows=1) for n in s.tokens
      ]
    if "host" in s.parts:
      cases += [
        DecodeCase(part="host", tokens=n, shared=0, rows=1) for n in s.tokens
      ]
    if "sharing" in s.parts:
      for shared in s.shared:
        # Rows have the same length however many keys they share.
        tokens = max(s.shared) + s.own
        cases.append(
          DecodeCase(part="sharing", tokens=tokens, shared=shared, rows=s.rows)
        )
    return cases

  def row(self, case: DecodeCase, report: Report) -> Row:
    s = self.settings
    available = {"kinds": _NAMES, "sharing": _WAYS, "host": (*_HOSTED,)}[
      case.part
    ]
    first = available[0]
    names = [first] + [
      n for n in s.contestants if n in available and n != first
    ]
    expected: list[Any] = []

    def build(name: str) -> Any:
      return self.contestants[name].trial(case, s)

    def compare(output: Any) -> tuple[float | None, bool]:
      arrays = [np.asarray(output, np.float32)]
      if not expected:
        expected.extend(arrays)
      return harness.compare(arrays, expected, _TOLERANCE)

    results, _ = self.measure(names, build, compare, report, warmup=1)
    return {**dataclasses.asdict(case), "results": results}

  def table(self, case: DecodeCase, row: Row) -> str:
    first = next(iter(row["results"].values()))["median_s"]

    def relative_time(result: Row) -> str:
      return f"{result['median_s'] / first:8.2f}" if first else ""

    return "\n".join(
      [str(case), *harness.lines(row, relative_time, digits=2), ""]
    )

  def summary(self, rows: Sequence[Row]) -> Row:
    times = {}
    for row in rows:
      names = list(row["results"])
      name = f"{row['part']} {row['tokens']} {row['shared']}"
      times[name] = {n: harness.ratio(row, [n], names[:1]) for n in names[1:]}
    return {"time_of_the_first": times}

  def closing(self, result: Row) -> str:
    del result
    return (
      "Medians; after them the part of the first one's time. Runs are "
      "interleaved.\n"
    )
