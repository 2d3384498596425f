"""Memory of an engine's rows by layout: what is wasted, resident, mapped.

Guarantees: all layouts answer the same requests with the same tokens, or the
row says that they differ; resident bytes are what the system reports.

  waste     tokens of room at most that a row held and did not use, and that no
            other row could have
  resident  bytes of the keys and values in memory, at most
  reserved  bytes of address space
  address   64 rows of a million tokens: what is resident before and after some
            of them are written, in place
  dense     contiguous rows that `jax.nn.dot_product_attention` reads
  step      processor time of a step that computes something, the median
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringjax as rj
from ringjax.bench import harness
from ringjax.bench.harness import Report, Row, option

PARTS = ("pages", "contiguous", "doubling", "address", "dense")
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowMemorySettings(harness.BenchmarkSettings):
  """Requests by chance, rows of the engine; without `model` one of ours."""

  rows: int = option(8)
  requests: int = option(24)
  prompt_tokens: int = option(160)
  new_tokens: int = option(96)
  capacity: int = option(16384)
  longest: int = option(4096)
  page: int = option(32)
  model: str | None = option(None, ())
  parts: tuple[str, ...] = option(PARTS[:-1], PARTS)


class RowMemoryBenchmark(harness.Benchmark):
  """Memory of each layout; a row is a layout, or the address space alone."""

  name = "rows"
  options = RowMemorySettings
  columns = ("kind",)
  parts = PARTS
  files = ("json",)
  quick = RowMemorySettings(
    rows=2, requests=3, prompt_tokens=20, new_tokens=8, longest=256, page=16
  )
  summary_name = "waste"

  def __init__(self, settings: Any):
    super().__init__(settings)
    self._answers: list[Any] | None = None

  @property
  def cases(self) -> list[str]:
    return [part for part in PARTS if part in self.settings.parts]

  def row(self, case: str, report: Report) -> Row:
    report(0.1, case)
    if case == "address":
      return {"kind": case, **address_space()}
    found, answers = served(case, self.settings)
    if self._answers is None:
      self._answers = answers
    return {"kind": case, **found, "same": answers == self._answers}

  def table(self, case: str, row: Row) -> str:
    if case == "address":
      return (
        f"address     {row['reserved'] / _MIB:8,.0f} MiB reserved, "
        f"{row['before'] / _MIB:.1f} MiB resident; "
        f"{row['written'] / _MIB:.1f} MiB written, "
        f"{row['after'] / _MIB:.1f} MiB resident; "
        f"{row['released'] / _MIB:.1f} MiB once released"
      )
    return (
      f"{case:11} {row['waste']:5} tokens wasted in a row; "
      f"{row['resident'] / _MIB:7.1f} of {row['reserved'] / _MIB:8.1f} MiB; "
      f"{row['maps']:4} maps, {row['background']:4} ahead, "
      f"{row['waited']} waited for; {row['reused']:3} reused, "
      f"{row['moves']:2} moves, {row['preemptions']:2} preemptions; "
      f"{1e3 * row['step']:.2f} ms of processors a step; "
      f"{'the same' if row['same'] else 'OTHER'} answers"
    )

  def summary(self, rows: Sequence[Row]) -> Row:
    return {row["kind"]: row.get("waste") for row in rows}


def served(layout: str, settings: RowMemorySettings) -> tuple[Row, list[Any]]:
  """What rows of a layout take while requests are served, and the answers.

  Args:
    layout: of an engine.
    settings: of requests and rows.
  """
  from ringjax.models import small

  s, rng = settings, np.random.default_rng(0)
  model = rj.models.load(small.path() if s.model is None else s.model)
  dense = layout == "dense"
  engine = rj.serve.Engine(
    model,
    rows=s.rows,
    capacity=s.capacity,
    longest=s.longest,
    page=s.page,
    layout="contiguous" if dense else layout,
    share="nothing",
    preempt="recompute",
    attention_fn=jax.nn.dot_product_attention if dense else None,
  )
  engine.warm_up()
  handles = []
  for _ in range(s.requests):
    size = int(rng.integers(1, 2 * s.prompt_tokens))
    prompt = rng.integers(0, model.config.vocab, size).astype(np.int32)
    most = int(rng.integers(1, 2 * s.new_tokens))
    request = rj.serve.Request(prompt=prompt, max_new_tokens=most)
    handles.append(engine.submit(request))
  waste, resident, more, space = 0, 0, True, engine.space
  steps: list[float] = []
  while more:
    begin = time.process_time()
    more = engine.step()
    steps.append(time.process_time() - begin)
    for row in engine.scheduler.running:
      if row is None or row.slot is None or not row.computed:
        continue
      groups = len(row.pages[0]) if space is None else space.kept(row.slot)
      waste = max(waste, groups * s.page - row.computed)
    resident = max(resident, engine.resident() or 0)
  total = engine.reserved()
  found: Row = {
    "waste": waste,
    "resident": resident or total,
    "reserved": total,
    "preemptions": engine.counters.preemptions,
    "step": float(np.median(steps)),
  }
  counters = rj.serve.RowSpaceCounters()
  if space is not None:
    counters = space.space_counters
  found |= {
    "maps": counters.maps,
    "background": counters.background_maps,
    "waited": counters.decode_maps,
    "reused": counters.reused,
    "moves": counters.moves,
  }
  engine.close()
  return found, [handle.result().tokens.tolist() for handle in handles]


def address_space() -> Row:
  """What is resident of 64 reserved rows of a million tokens."""
  from ringjax.kv.reserved import ReservedRows, reserved_zeros

  page, each, rows = 128, 1 << 13, 64
  shape = jax.ShapeDtypeStruct((2, rows * each, 1, page, 8), jnp.float32)
  x = reserved_zeros(shape)
  memory = ReservedRows(x, each)
  before = memory.resident()

  def write(x: jax.Array, n: jax.Array) -> jax.Array:
    return x.at[:, n].set(1.0)

  put = jax.jit(write, donate_argnums=0)
  many = 256
  for n in range(many):
    # Of all rows in turn the first pages.
    x = put(x, jnp.int32(n % rows * each + n // rows))
  jax.block_until_ready(x)
  after = memory.resident()
  for slot in range(rows):
    memory.unmap(slot, 0, many // rows)
  return {
    "reserved": memory.reserved(),
    "before": before,
    "written": many * memory.group_bytes,
    "after": after,
    "released": memory.resident(),
  }
