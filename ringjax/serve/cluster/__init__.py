"""Many engines as one service: who reads a prompt, who answers, what moves."""

from ringjax.serve.cluster.block_index import (
  BlockEvent,
  BlockIndex,
  BlockLog,
  block_keys,
  tree_keys,
)
from ringjax.serve.cluster.cluster_simulator import (
  ClusterResult,
  ClusterSimulator,
  InstanceCounters,
  LoadPoint,
  SimulatedInstance,
)
from ringjax.serve.cluster.conductor import (
  Conductor,
  EarlyRejection,
  FastestDecode,
  LocalConductor,
  PredictiveRejection,
  PrefillChoice,
  RandomRoute,
  RoutingCosts,
  ShortestWait,
  fetch_bytes_per_flop,
  routing_policy,
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
  "BlockEvent",
  "BlockIndex",
  "BlockLog",
  "ClusterResult",
  "ClusterSimulator",
  "Conductor",
  "DistServeModel",
  "DistServeTimes",
  "EarlyRejection",
  "FastestDecode",
  "Goodput",
  "GpuCluster",
  "InstanceCounters",
  "InstanceFamily",
  "InstanceGroup",
  "InstanceView",
  "Limits",
  "LoadPoint",
  "LocalConductor",
  "MeasuredCall",
  "PhaseTimes",
  "PlacementSearch",
  "PredictiveRejection",
  "PrefillChoice",
  "QuadraticTimes",
  "RandomRoute",
  "Rejected",
  "Replanned",
  "Route",
  "RoutedRequest",
  "RoutingCosts",
  "RoutingPolicy",
  "ServedRequest",
  "ServingPlacement",
  "ShortestQueue",
  "ShortestWait",
  "SimulatedInstance",
  "SizedModel",
  "TensorTimes",
  "TrafficSummary",
  "as_distserve_counts",
  "at_rate",
  "attainment",
  "block_keys",
  "engine_times",
  "fetch_bytes_per_flop",
  "goodput",
  "percentiles",
  "read_calls",
  "read_capacities",
  "read_profile",
  "replan",
  "routing_policy",
  "share_met",
  "trace_rate",
  "tree_keys",
]
