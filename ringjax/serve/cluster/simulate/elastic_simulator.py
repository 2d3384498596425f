"""Simulation of elastic groups without a model.

Guarantees: as in `ElasticLoop`, all policies get the same instances, clock and
model of times, so that results differ by the policy alone.
Cost: an event for each prefill batch and for each few tokens of a group's
answers.
Ref: Wu et al. 2024, LoongServe (SOSP), arXiv 2404.09526, section 7.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringjax.serve.cluster.loongserve.elastic_loop import (
  ElasticLoop,
  ElasticResult,
)
from ringjax.serve.cluster.loongserve.elastic_scheduler import ElasticPolicy
from ringjax.serve.traces import TraceRequest


def simulate_elastic(
  trace: Sequence[TraceRequest], policy: ElasticPolicy, instances: int
) -> ElasticResult:
  """Simulate how a cluster serves a trace.

  Args:
    trace: Requests; their prompts share no prefix.
    policy: Decides which instances prefill and decode what: an
      `ElasticScheduler` or `FixedGroups`.
    instances: Number of instances of the cluster.

  Raises:
    OptionError: If a prompt or an answer has no tokens, or there is no
      instance.
  """
  return ElasticLoop(trace, policy, instances).run()
