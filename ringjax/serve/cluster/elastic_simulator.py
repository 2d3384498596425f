"""Elastic groups without a model: what a scheduler makes of a workload.

Guarantees: as of `ElasticLoop`: all policies meet the same instances, clock and
model of times, so that what differs is the policy.
Cost: an event for each batch that is read and for each few tokens of a group's
answers.
Ref: Wu et al. 2024, LoongServe (SOSP), arXiv 2404.09526, section 7.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringjax.serve.cluster.elastic_loop import ElasticLoop, ElasticResult
from ringjax.serve.cluster.elastic_scheduler import ElasticPolicy
from ringjax.serve.traces import TraceRequest


def simulate_elastic(
  trace: Sequence[TraceRequest], policy: ElasticPolicy, instances: int
) -> ElasticResult:
  """Simulates how a cluster serves a trace.

  Args:
    trace: requests; their prompts share nothing.
    policy: who reads and answers what, an `ElasticScheduler` or `FixedGroups`.
    instances: of the cluster.

  Raises:
    OptionError: a prompt or an answer without tokens, or no instance.
  """
  return ElasticLoop(trace, policy, instances).run()
