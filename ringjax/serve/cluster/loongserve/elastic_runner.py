"""Execution of an elastic scheduler's decisions with a model.

`ElasticRunner` gives each request an `ElasticSession` on the instances of its
group. A batch's prompts are prefilled by the ring of all its instances, which
keep the keys that the plan assigns to them; fewer instances decode; others join
and take new tokens; no key ever moves. `ElasticRunner.serve` asks the
scheduler, on the wall clock or on predicted times.

Guarantees: tokens are those of one device, whatever was decided. Keys are where
the scheduler counts them.
Cost: prompts of a batch are prefilled, and rows of a group decoded, one after
another: calls have one row. A program for each group of instances, length of
prompts and instance that takes new tokens.
Memory: for a request, slots for all its tokens on each instance of its group.
Ref: Wu et al. 2024, LoongServe (SOSP), arXiv 2404.09526.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from ringjax.errors import OptionError
from ringjax.infer import inputs
from ringjax.infer.loongserve.elastic import ElasticSession
from ringjax.models.transformer import Transformer
from ringjax.serve.cluster.loongserve.elastic_loop import (
  ElasticLoop,
  ElasticResult,
)
from ringjax.serve.cluster.loongserve.elastic_scheduler import (
  ElasticPolicy,
  ElasticRequest,
  PrefillBatch,
)
from ringjax.serve.traces import TraceRequest


class ElasticRunner:
  """Prefills and decodes the requests of a trace with a model.

  Attributes:
    answers: Token ids of each request so far; empty if it was refused.
    groups: For each request the instances that prefilled it, then those of each
      part of its answer.
  """

  def __init__(
    self,
    model: Transformer,
    prompts: Sequence[Int[np.ndarray, " _"] | Sequence[int]],
    *,
    mesh: Mesh | None = None,
    axis: str | None = None,
    sampler: Callable[..., Any] | None = None,
  ):
    """Prepare a runner without requests in progress.

    Args:
      model: Model with all weights on each instance of the mesh.
      prompts: Token ids of each request, in the order of the trace.
      mesh, axis: Mesh and axis of the instances, as in `ElasticSession`.
      sampler: Samples a token from logits; default `Greedy()`.
    """
    self.model, self.mesh, self.axis = model, mesh, axis
    self.prompts = [inputs.prompt(x, model.config.vocab) for x in prompts]
    self.sampler = sampler
    self.answers: list[list[int]] = [[] for _ in self.prompts]
    self.groups: list[list[tuple[int, ...]]] = [[] for _ in self.prompts]
    self._sessions: dict[int, ElasticSession] = {}

  def serve(
    self,
    trace: Sequence[TraceRequest],
    policy: ElasticPolicy,
    instances: int,
    *,
    clock: Callable[[], float] | None = time.monotonic,
  ) -> ElasticResult:
    """Serve a trace as a policy decides; `answers` then has the tokens.

    Args:
      trace: Requests, in the order of the prompts.
      policy: Decides which instances prefill and decode what; moves no keys
        (`ElasticOptions(most_moved_tokens=0)`).
      instances: Number of instances of the mesh.
      clock: Returns seconds: requests arrive at the trace's times, and calls
        take their real time, one after another; None uses the policy's
        predicted times, so that all times are those of `simulate_elastic`.

    Raises:
      OptionError: As in `ElasticLoop`; or if a request has no prompt of its
        length.
    """
    loop = ElasticLoop(trace, policy, instances, runner=self, clock=clock)
    return loop.run()

  def read(self, batch: PrefillBatch) -> None:
    """Prefill a batch and sample the first tokens.

    Raises:
      OptionError: If a request has no prompt of its length here.
    """
    for request, counts in zip(batch.requests, batch.kept, strict=True):
      prompt = self._prompt(request)
      session = ElasticSession(
        self.model,
        request.all_tokens,
        mesh=self.mesh,
        axis=self.axis,
        members=batch.instances,
      )
      self.groups[request.number].append(session.members)
      owners = np.repeat(np.asarray(batch.instances), counts)
      session.read([prompt], [owners], members=batch.stays)
      self._sessions[request.number] = session
      self._decode(request, 1)

  def step(
    self,
    request: ElasticRequest,
    instances: Sequence[int],
    parts: Sequence[tuple[int, int]],
  ) -> None:
    """Decode the next tokens of a request, kept as `parts` says."""
    for instance, tokens in parts:
      self._sessions[request.number].regroup(instances, first=instance)
      self._decode(request, tokens)

  def ended(self, request: ElasticRequest) -> None:
    """Release the session of a finished request."""
    del self._sessions[request.number]

  def _decode(self, request: ElasticRequest, tokens: int) -> None:
    session = self._sessions[request.number]
    generated = session.decode(tokens, sampler=self.sampler)
    self.answers[request.number] += generated.tokens[0].tolist()
    self.groups[request.number].append(session.members)

  def _prompt(self, request: ElasticRequest) -> np.ndarray:
    matching = [*self.prompts[request.number : request.number + 1]]
    if not matching or matching[0].size != request.prompt_tokens:
      length = f"{matching[0].size} tokens" if matching else "nothing"
      raise OptionError(
        "prompts",
        f"{length} for request {request.number}",
        f"its {request.prompt_tokens:,} tokens",
        "pass the prompts of the trace, in its order",
      )
    return matching[0]
