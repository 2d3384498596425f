"""Serving: many requests at once over one pool of pages."""

import importlib as _importlib
from typing import Any as _Any

from ringjax.serve.api.http import OpenAIApp, app
from ringjax.serve.engine import Engine, EngineCounters
from ringjax.serve.engine_config import EngineConfig
from ringjax.serve.hosts.engine_group import EngineGroup
from ringjax.serve.prefix.important_link import ImportantShare
from ringjax.serve.prefix.prefix_transfer import (
  ExportedPrefix,
  LayerCopies,
  LayerParts,
  PrefixHashes,
  begin_layers,
  export_prefix,
  import_prefix,
  prefix_layout,
)
from ringjax.serve.prefix.prefix_tree import (
  GroupSpec,
  OutOfPages,
  PrefixBlock,
  PrefixTree,
)
from ringjax.serve.request import (
  Answer,
  Handle,
  RejectedError,
  Request,
  RequestResult,
  TokenLogprobs,
)
from ringjax.serve.row_sampler import RowSampling
from ringjax.serve.scheduler import Scheduler, ServedRow, StepLimits, StepPlan
from ringjax.serve.simulate import (
  ReplayResult,
  SimulatedEngine,
  StepCost,
  StepRecord,
  VaryingCost,
  measure_cost,
  record_steps,
  replay_live,
  replay_simulated,
)
from ringjax.serve.tenants import read_keys
from ringjax.serve.traces import TraceRequest, poisson_trace, read_trace
from ringjax.serve.vattention.row_space import (
  DoublingSpace,
  RowMemory,
  RowSpace,
  RowSpaceCounters,
)

__all__ = [
  "Answer",
  "DoublingSpace",
  "Engine",
  "EngineConfig",
  "EngineCounters",
  "EngineGroup",
  "ExportedPrefix",
  "GroupSpec",
  "Handle",
  "ImportantShare",
  "LayerCopies",
  "LayerParts",
  "OpenAIApp",
  "OutOfPages",
  "PrefixBlock",
  "PrefixHashes",
  "PrefixTree",
  "RejectedError",
  "ReplayResult",
  "Request",
  "RequestResult",
  "RowMemory",
  "RowSampling",
  "RowSpace",
  "RowSpaceCounters",
  "Scheduler",
  "ServedRow",
  "SimulatedEngine",
  "StepCost",
  "StepLimits",
  "StepPlan",
  "StepRecord",
  "TokenLogprobs",
  "TraceRequest",
  "VaryingCost",
  "app",
  "begin_layers",
  "export_prefix",
  "import_prefix",
  "measure_cost",
  "poisson_trace",
  "prefix_layout",
  "read_keys",
  "read_trace",
  "record_steps",
  "replay_live",
  "replay_simulated",
]


def __getattr__(name: str) -> _Any:
  """Imports `cluster` when it is first used: it needs more than an engine."""
  if name == "cluster":
    return _importlib.import_module("ringjax.serve.cluster")
  raise AttributeError(f"module 'ringjax.serve' has no attribute {name!r}")
