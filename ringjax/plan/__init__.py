"""Planning without devices: cost model, event simulator, partition search."""

from ringjax.parallel import chips
from ringjax.parallel.chips import Link, Machine
from ringjax.plan.choice import Cluster, PrefillChoice, PrefillMethod, choose
from ringjax.plan.compiler import aot, overlap
from ringjax.plan.cost import Profile, Prompt, Shape
from ringjax.plan.events import Simulator, Timeline
from ringjax.plan.flexgen import offload, offload_measured
from ringjax.plan.kv_runahead.balance import balanced, round_to_tiles
from ringjax.plan.kv_runahead.grid import (
  SearchResult,
  measured,
  search,
  simulated,
)
from ringjax.plan.kv_runahead.partition import (
  PartitionPlan,
  find,
  plan,
  tabulate,
)
from ringjax.plan.kv_runahead.schedules import (
  Noise,
  Outcome,
  flash_tsp,
  kvr,
  kvr_seconds,
  ring,
  tsp,
)
from ringjax.plan.kv_runahead.table import PartitionTable, TableKey
from ringjax.plan.machines import load as machine
from ringjax.plan.profiles import load as profile
from ringjax.plan.systems import subgraphs
from ringjax.plan.systems.pipeline_times import (
  best_chunks,
  chunk_seconds,
  equal_times,
  pipeline_seconds,
  pipeline_timeline,
)

__all__ = [
  "Cluster",
  "Link",
  "Machine",
  "Noise",
  "Outcome",
  "PartitionPlan",
  "PartitionTable",
  "PrefillChoice",
  "PrefillMethod",
  "Profile",
  "Prompt",
  "SearchResult",
  "Shape",
  "Simulator",
  "TableKey",
  "Timeline",
  "aot",
  "balanced",
  "best_chunks",
  "chips",
  "choose",
  "chunk_seconds",
  "equal_times",
  "find",
  "flash_tsp",
  "kvr",
  "kvr_seconds",
  "machine",
  "measured",
  "offload",
  "offload_measured",
  "overlap",
  "pipeline_seconds",
  "pipeline_timeline",
  "plan",
  "profile",
  "ring",
  "round_to_tiles",
  "search",
  "simulated",
  "subgraphs",
  "tabulate",
  "tsp",
]
