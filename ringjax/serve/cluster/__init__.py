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
from ringjax.serve.cluster.elastic_batches import (
  batch_cost,
  best_batches,
  even_parts,
  fewest_instances,
)
from ringjax.serve.cluster.elastic_scheduler import (
  ClusterView,
  DecodeGroup,
  ElasticOptions,
  ElasticPlan,
  ElasticPolicy,
  ElasticRequest,
  ElasticScheduler,
  Emptied,
  PrefillBatch,
)
from ringjax.serve.cluster.elastic_simulator import (
  ElasticResult,
  simulate_elastic,
)
from ringjax.serve.cluster.elastic_workloads import (
  ComparedSystem,
  GroupMachine,
  ScaledLimits,
  answer_lengths,
  compared_systems,
  mixed_lengths,
  random_trace,
  zipf_lengths,
)
from ringjax.serve.cluster.fitted_times import (
  MeasuredCall,
  TensorTimes,
  engine_times,
  read_calls,
)
from ringjax.serve.cluster.fixed_groups import (
  FixedGroups,
)
from ringjax.serve.cluster.goodput import (
  Goodput,
  GoodputSearch,
  at_rate,
  goodput,
  repeated,
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
  "ClusterView",
  "ComparedSystem",
  "DecodeGroup",
  "DistServeModel",
  "DistServeTimes",
  "ElasticOptions",
  "ElasticPlan",
  "ElasticPolicy",
  "ElasticRequest",
  "ElasticResult",
  "ElasticScheduler",
  "Emptied",
  "FixedGroups",
  "Goodput",
  "GoodputSearch",
  "GpuCluster",
  "GroupMachine",
  "InstanceCounters",
  "InstanceFamily",
  "InstanceGroup",
  "InstanceView",
  "Limits",
  "LoadPoint",
  "MeasuredCall",
  "PhaseTimes",
  "PlacementSearch",
  "PrefillBatch",
  "QuadraticTimes",
  "Rejected",
  "Replanned",
  "Route",
  "RoutedRequest",
  "RoutingPolicy",
  "ScaledLimits",
  "ServedRequest",
  "ServingPlacement",
  "ShortestQueue",
  "SimulatedInstance",
  "SizedModel",
  "TensorTimes",
  "TrafficSummary",
  "answer_lengths",
  "as_distserve_counts",
  "at_rate",
  "attainment",
  "batch_cost",
  "best_batches",
  "compared_systems",
  "engine_times",
  "even_parts",
  "fewest_instances",
  "goodput",
  "mixed_lengths",
  "percentiles",
  "random_trace",
  "read_calls",
  "read_capacities",
  "read_profile",
  "repeated",
  "replan",
  "share_met",
  "simulate_elastic",
  "trace_rate",
  "zipf_lengths",
]
