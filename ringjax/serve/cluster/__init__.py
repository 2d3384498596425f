"""Many engines as one service: who reads a prompt, who answers, what moves."""

from ringjax.serve.cluster.cluster_simulator import (
  ClusterResult,
  ClusterSimulator,
  InstanceCounters,
  LoadPoint,
  SimulatedInstance,
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
from ringjax.serve.cluster.fixed_groups import (
  FixedGroups,
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
  "ClusterView",
  "ComparedSystem",
  "DecodeGroup",
  "ElasticOptions",
  "ElasticPlan",
  "ElasticPolicy",
  "ElasticRequest",
  "ElasticResult",
  "ElasticScheduler",
  "Emptied",
  "FixedGroups",
  "GroupMachine",
  "InstanceCounters",
  "InstanceView",
  "Limits",
  "LoadPoint",
  "PhaseTimes",
  "PrefillBatch",
  "QuadraticTimes",
  "Rejected",
  "Route",
  "RoutedRequest",
  "RoutingPolicy",
  "ScaledLimits",
  "ServedRequest",
  "ShortestQueue",
  "SimulatedInstance",
  "answer_lengths",
  "attainment",
  "batch_cost",
  "best_batches",
  "compared_systems",
  "even_parts",
  "fewest_instances",
  "mixed_lengths",
  "percentiles",
  "random_trace",
  "simulate_elastic",
  "zipf_lengths",
]
