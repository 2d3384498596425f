"""Many engines as one service: who reads a prompt, who answers, what moves."""

from ringjax.serve.cluster.load_control import (
  LoadControl,
  SequenceGroup,
  StageOutcome,
  StageTimes,
  TokenLimit,
  WorkerPlan,
  choose_workers,
  group_rows,
  joint_starts,
  level_peak,
  loads,
  simulate_stages,
  staggered_starts,
  swept_cpus,
)
from ringjax.serve.cluster.phase_times import PhaseTimes, QuadraticTimes
from ringjax.serve.cluster.routing import (
  InstanceView,
  Rejected,
  Route,
  RoutedRequest,
  RoutingPolicy,
  ShortestQueue,
)
from ringjax.serve.cluster.served import (
  Limits,
  ServedRequest,
  attainment,
  percentiles,
)

__all__ = [
  "InstanceView",
  "Limits",
  "LoadControl",
  "PhaseTimes",
  "QuadraticTimes",
  "Rejected",
  "Route",
  "RoutedRequest",
  "RoutingPolicy",
  "SequenceGroup",
  "ServedRequest",
  "ShortestQueue",
  "StageOutcome",
  "StageTimes",
  "TokenLimit",
  "WorkerPlan",
  "attainment",
  "choose_workers",
  "group_rows",
  "joint_starts",
  "level_peak",
  "loads",
  "percentiles",
  "simulate_stages",
  "staggered_starts",
  "swept_cpus",
]
