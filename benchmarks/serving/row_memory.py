"""Memory of an engine's rows by layout: wasted, resident and mapped.

Guarantees: all layouts answer the same requests with the same tokens, or the
row reports that they differ; the system reports the resident bytes.

  waste     largest number of unused slots that a row held and that no other
            row could use
  resident  largest number of bytes of keys and values in memory
  reserved  bytes of address space
  address   64 rows of a million tokens: resident bytes before and after some
            of them are written, in place
  dense     contiguous rows that `jax.nn.dot_product_attention` reads
  step      median processor time of a step
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
from benchmarks.shared import harness
from benchmarks.shared.harness import Report, Row, option

PARTS = ("pages", "contiguous", "doubling", "address", "dense")
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowMemorySettings(harness.BenchmarkSettings):
  """Settings: random requests, rows of the engine, model (default: small)."""

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
  """Benchmark of memory; a row is a layout, or the address space alone."""

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
    figures, answers = served(case, self.settings)
    if self._answers is None:
      self._answers = answers
    return {"kind": case, **figures, "same": answers == self._answers}

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
  """Serves requests; returns the memory of a layout's rows and the answers.

  Args:
    layout: Layout of the engine's rows.
    settings: Settings of requests and rows.
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
    new_tokens = int(rng.integers(1, 2 * s.new_tokens))
    request = rj.serve.Request(prompt=prompt, max_new_tokens=new_tokens)
    handles.append(engine.submit(request))
  waste, resident, running, space = 0, 0, True, engine.space
  steps: list[float] = []
  while running:
    begin = time.process_time()
    running = engine.step()
    steps.append(time.process_time() - begin)
    for row in engine.scheduler.running:
      if row is None or row.slot is None or not row.computed:
        continue
      groups = len(row.pages[0]) if space is None else space.kept(row.slot)
      waste = max(waste, groups * s.page - row.computed)
    resident = max(resident, engine.resident() or 0)
  total = engine.reserved()
  figures: Row = {
    "waste": waste,
    "resident": resident or total,
    "reserved": total,
    "preemptions": engine.counters.preemptions,
    "step": float(np.median(steps)),
  }
  counters = rj.serve.RowSpaceCounters()
  if space is not None:
    counters = space.space_counters
  figures |= {
    "maps": counters.maps,
    "background": counters.background_maps,
    "waited": counters.decode_maps,
    "reused": counters.reused,
    "moves": counters.moves,
  }
  engine.close()
  return figures, [handle.result().tokens.tolist() for handle in handles]


def address_space() -> Row:
  """Measures resident bytes of 64 reserved rows of a million tokens."""
  from ringjax.kv.storage.reserved import ReservedRows, reserved_zeros

  page, row_pages, rows = 128, 1 << 13, 64
  shape = jax.ShapeDtypeStruct((2, rows * row_pages, 1, page, 8), jnp.float32)
  x = reserved_zeros(shape)
  memory = ReservedRows(x, row_pages)
  resident_before = memory.resident()

  def write(x: jax.Array, n: jax.Array) -> jax.Array:
    return x.at[:, n].set(1.0)

  put = jax.jit(write, donate_argnums=0)
  num_pages = 256
  for n in range(num_pages):
    # Write the first pages of all rows, in turn.
    x = put(x, jnp.int32(n % rows * row_pages + n // rows))
  jax.block_until_ready(x)
  resident_after = memory.resident()
  for slot in range(rows):
    memory.unmap(slot, 0, num_pages // rows)
  return {
    "reserved": memory.reserved(),
    "before": resident_before,
    "written": num_pages * memory.group_bytes,
    "after": resident_after,
    "released": memory.resident(),
  }
