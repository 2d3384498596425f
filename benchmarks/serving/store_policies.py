"""Replays a trace of prompts over the policies of a store's tiers: a table.

Guarantees: hits of whole prefixes are counted with the policies that serve
(`rj.store`); the only times are those of the policies and of look-ups in the
prefix tree, on the current machine.

  hits     blocks that were in the tier with all blocks before them
  written  blocks that the tier admitted
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.shared import harness
from benchmarks.shared.harness import Report, Row, option
from ringjax import store
from ringjax.errors import OptionError

POLICIES = (
  "lru",
  "lfu",
  "once_used_first",
  "second_hit",
  "predicted_reuse",
  "belady",
)
PARTS = ("tree", *POLICIES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreBenchmarkSettings(harness.BenchmarkSettings):
  """Settings: the trace and a tier of `capacity` tokens."""

  trace: str | None = option(None, ())
  capacity: int = option(3_000_000)
  block: int = option(512)
  parts: tuple[str, ...] = option(PARTS, PARTS)


class StoreBenchmark(harness.Benchmark):
  """Benchmark of hits on a trace; a row is a policy, or the tree."""

  name = "store"
  options = StoreBenchmarkSettings
  columns = ("kind",)
  parts = PARTS
  files = ("json",)
  summary_name = "hits"

  @property
  def cases(self) -> list[str]:
    if self.settings.trace is None:
      raise OptionError(
        "trace",
        "none",
        "a file of prompts as Mooncake publishes them",
        "pass --trace=conversation_trace.jsonl",
      )
    return [part for part in PARTS if part in self.settings.parts]

  def row(self, case: str, report: Report) -> Row:
    s = self.settings
    requests = store.read_trace(s.trace)
    report(0.1, case)
    if case == "tree":
      blocks, seconds = lookups(requests, s.block)
      return {"kind": case, "blocks": blocks, "seconds": seconds}
    start = time.perf_counter()
    policy = (
      store.Belady(requests) if case == "belady" else store.tier_policy(case)
    )
    result = store.replay(requests, max(1, s.capacity // s.block), policy)
    return {
      "kind": case,
      "blocks": result.blocks,
      "hits": result.hits,
      "hit_percent": result.rate,
      "written": result.admitted,
      "seconds": time.perf_counter() - start,
    }

  def table(self, case: str, row: Row) -> str:
    if case == "tree":
      return (
        f"tree             {row['blocks']:,} look-ups of PrefixTree.match in "
        f"{row['seconds']:.2f} s"
      )
    return (
      f"{case:16} {row['hits']:9,} of {row['blocks']:,} hit "
      f"({row['hit_percent']:5.2f} %) {row['written']:9,} written "
      f"{row['seconds']:6.1f} s"
    )

  def summary(self, rows: Sequence[Row]) -> Row:
    return {row["kind"]: row.get("hits") for row in rows}

  def closing(self, result: Row) -> str:
    del result
    s = self.settings
    max_hits = store.most_hits(store.read_trace(s.trace))
    return (
      f"without limits   {max_hits:9,} hit; a tier is "
      f"{s.capacity // s.block:,} blocks of {s.block} tokens"
    )


def lookups(requests: Sequence[Sequence[int]], block: int) -> tuple[int, float]:
  """Times look-ups in an unlimited prefix tree; returns (blocks, seconds).

  Args:
    requests: Block ids of each prompt, which determine its tokens.
    block: Tokens of a block.
  """
  # `rj.serve` needs flax, which the other policies don't need.
  from ringjax.serve.prefix.prefix_tree import GroupSpec, PrefixTree

  num_pages = sum(map(len, requests)) + 1
  tree = PrefixTree([GroupSpec(pages=num_pages)], block)
  root = tree.root()
  blocks, seconds = 0, 0.0
  for ids in requests:
    tokens = np.repeat(np.asarray(ids, np.int32), block)
    start = time.perf_counter()
    nodes = tree.match(root, tokens)
    seconds += time.perf_counter() - start
    blocks += len(ids)
    at = nodes[-1] if nodes else root
    for data in tree.pieces(tokens)[len(nodes) :]:
      number = at.depth + 1
      page = tree.allocate(0, number)
      at = tree.extend(at, data)
      tree.finish(at, [page])
      tree.release(at, [0])
  return blocks, seconds
