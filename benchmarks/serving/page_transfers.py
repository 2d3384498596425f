"""Pages on devices, pulled as bytes and by JAX's transfer server.

Guarantees: both ways deliver the published pages, or the row reports that they
do not; they run in turn, with new pages in each round, in one process.

  bytes   copied to the host when they are read, then over a socket
  arrays  from the devices, by `rj.transfer.DeviceServer`

A row has the median seconds from publication until all pages are in arrays of
the reader, for each way.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.shared import harness
from benchmarks.shared.harness import Report, Row, option
from ringjax import transfer

_KEY = bytes(range(32))
# Pages of an array, as an engine copies them.
_BATCH = 16
_SHAPE = 32, 16, 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class PullSettings(harness.BenchmarkSettings):
  """Settings: numbers of bfloat16 pages of 512 KiB, and ways to pull them."""

  contestants: tuple[str, ...] = option(
    ("bytes", "arrays"), ("bytes", "arrays")
  )
  pages: tuple[int, ...] = option((16, 256))
  rounds: int = option(7)


class PullBenchmark(harness.Benchmark):
  """Benchmark of pulling pages from devices; a row is a number of pages."""

  name = "pull"
  options = PullSettings
  columns = ("pages",)
  files = ("json",)
  quick = PullSettings(pages=(4,), rounds=1)
  summary_name = "bytes/s by the median"

  @property
  def cases(self) -> list[int]:
    return list(self.settings.pages)

  def row(self, case: int, report: Report) -> Row:
    s = self.settings
    devices = {
      way: transfer.DeviceServer() if way == "arrays" else None
      for way in s.contestants
    }
    reader_server = transfer.DeviceServer()
    leaf = transfer.PageLayout.of("kv", "bfloat16", _SHAPE, "layer token dim")
    into = {"kv": np.zeros((case, *_SHAPE), jnp.bfloat16)}
    seconds_by_way: dict[str, list[float]] = {way: [] for way in s.contestants}
    equal = True
    for n in range(-1, s.rounds):
      for way, server in devices.items():
        report((n + 1) / (s.rounds + 1), way)
        batches = _batches(case, n)
        with transfer.Publisher(_KEY, devices=server) as publisher:
          start = time.perf_counter()
          rows = [batch[r] for batch in batches for r in range(len(batch))]
          ticket = publisher.publish(dict(enumerate(rows)), leaf)
          pulled = transfer.pull(
            ticket,
            publisher.address,
            _KEY,
            into=into,
            patience_s=600,
            devices=None if server is None else reader_server,
          )
          seconds = time.perf_counter() - start
        equal &= pulled.array_reads == (server is not None)
        want = np.concatenate([x.on_host[0] for x in batches])
        equal &= bool((into["kv"] == want).all())
        if n >= 0:
          seconds_by_way[way].append(seconds)
    medians = {way: statistics.median(x) for way, x in seconds_by_way.items()}
    return {
      "pages": case, "bytes": into["kv"].nbytes, "ways": medians, "same": equal,
    }  # fmt: skip

  def table(self, case: int, row: Row) -> str:
    lines = [f"{case:,} pages; {'the same' if row['same'] else 'OTHER'} bytes"]
    lines += [
      f"  {way:7} {1e3 * x:9.1f} ms, {row['bytes'] / x / 1e9:6.2f} GB/s"
      for way, x in row["ways"].items()
    ]
    return "\n".join(lines)

  def summary(self, rows: Sequence[Row]) -> Row:
    return {
      str(row["pages"]): {
        way: round(row["bytes"] / x) for way, x in row["ways"].items()
      }
      for row in rows
    }


def _batches(pages: int, seed: int) -> list[transfer.PageBatch]:
  """Creates pages in batches on the first device."""
  device, batches = jax.local_devices()[0], []
  for first in range(0, pages, _BATCH):
    shape = _SHAPE[0], min(_BATCH, pages - first), *_SHAPE[1:]
    x = np.full(shape, seed + 2 + first, np.float32)
    x += np.arange(_SHAPE[-1], dtype=np.float32)
    batch = jax.device_put(x.astype(jnp.bfloat16), device)
    batches.append(transfer.PageBatch((batch.block_until_ready(),), 1))
  return batches
