"""Many engines as one service: who reads a prompt, who answers, what moves."""

from ringjax.serve.cluster.cluster_simulator import (
  ClusterResult,
  ClusterSimulator,
  InstanceCounters,
  LoadPoint,
  SimulatedInstance,
)
from ringjax.serve.cluster.distserve_times import (
  DistServeModel,
  DistServeTimes,
  as_distserve_counts,
  read_capacities,
  read_profile,
)
from ringjax.serve.cluster.drift import (
  Replanned,
  TrafficSummary,
  replan,
)
from ringjax.serve.cluster.fitted_times import (
  MeasuredCall,
  TensorTimes,
  engine_times,
  read_calls,
)
from ringjax.serve.cluster.goodput import (
  Goodput,
  at_rate,
  goodput,
  share_met,
  trace_rate,
)
from ringjax.serve.cluster.instance_placement import (
  GpuCluster,
  InstanceFamily,
  InstanceGroup,
  PlacementSearch,
  ServingPlacement,
  SizedModel,
)
from ringjax.serve.cluster.phase_times import (
  PhaseTimes,
  QuadraticTimes,
)
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
  "DistServeModel",
  "DistServeTimes",
  "Goodput",
  "GpuCluster",
  "InstanceCounters",
  "InstanceFamily",
  "InstanceGroup",
  "InstanceView",
  "Limits",
  "LoadPoint",
  "MeasuredCall",
  "PhaseTimes",
  "PlacementSearch",
  "QuadraticTimes",
  "Rejected",
  "Replanned",
  "Route",
  "RoutedRequest",
  "RoutingPolicy",
  "ServedRequest",
  "ServingPlacement",
  "ShortestQueue",
  "SimulatedInstance",
  "SizedModel",
  "TensorTimes",
  "TrafficSummary",
  "as_distserve_counts",
  "at_rate",
  "attainment",
  "engine_times",
  "goodput",
  "percentiles",
  "read_calls",
  "read_capacities",
  "read_profile",
  "replan",
  "share_met",
  "trace_rate",
]
