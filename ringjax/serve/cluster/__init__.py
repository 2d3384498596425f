"""Many engines as one service: who reads a prompt, who answers, what moves."""

from ringjax.serve.cluster.cluster_simulator import (
  ClusterResult,
  ClusterSimulator,
  InstanceCounters,
  LoadPoint,
  SimulatedInstance,
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
  "ClusterResult",
  "ClusterSimulator",
  "InstanceCounters",
  "InstanceView",
  "Limits",
  "LoadPoint",
  "PhaseTimes",
  "QuadraticTimes",
  "Rejected",
  "Route",
  "RoutedRequest",
  "RoutingPolicy",
  "ServedRequest",
  "ShortestQueue",
  "SimulatedInstance",
  "attainment",
  "percentiles",
]
