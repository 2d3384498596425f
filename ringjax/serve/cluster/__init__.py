"""Many engines as one service: who reads a prompt, who answers, what moves."""

from ringjax.serve.cluster.control_link import ask_router
from ringjax.serve.cluster.phase_times import PhaseTimes, QuadraticTimes
from ringjax.serve.cluster.router import ClusterRouter, RouterCounters
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
from ringjax.serve.cluster.worker import ClusterWorker

__all__ = [
  "ClusterRouter",
  "ClusterWorker",
  "InstanceView",
  "Limits",
  "PhaseTimes",
  "QuadraticTimes",
  "Rejected",
  "Route",
  "RoutedRequest",
  "RouterCounters",
  "RoutingPolicy",
  "ServedRequest",
  "ShortestQueue",
  "ask_router",
  "attainment",
  "percentiles",
]
