"""Elastic groups of a model: what `ElasticScheduler` decides is done.

`ElasticRunner` gives each request an `ElasticSession` on the instances of its
group. A batch's prompts are read by the ring of all its instances, which keep
what the plan gives them; fewer answer; others join and take new tokens; no key
ever moves. `ElasticRunner.serve` asks the scheduler, by the clock of the wall
or by predicted times.

Guarantees: tokens are those of one device, whatever was decided. Keys are where
the scheduler counts them.
Cost: prompts of a batch are read, and rows of a group answered, one after
another: calls have one row. A program for each group of instances, length of
prompts and instance that takes new tokens.
Memory: of a request, slots for all its tokens on each instance of its group.
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
from ringjax.infer.elastic import ElasticSession
from ringjax.models.transformer import Transformer
from ringjax.serve.cluster.elastic_loop import ElasticLoop, ElasticResult
from ringjax.serve.cluster.elastic_scheduler import (
  ElasticPolicy,
  ElasticRequest,
  PrefillBatch,
)
from ringjax.serve.traces import TraceRequest


class ElasticRunner:
  """Reads and answers requests of a trace with a model.

  Attributes:
    answers: tokens of each request so far; none of one that was refused.
    groups: of each request the instances that read it, then those of each part
      of its answer.
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
    """Nothing is read yet.

    Args:
      model: with all weights on each instance of the mesh.
      prompts: ids of each request, in the order of the trace.
      mesh, axis: as of `ElasticSession`.
      sampler: chooses a token from logits; default `Greedy()`.
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
    """Serves a trace as a policy decides; `answers` then has its tokens.

    Args:
      trace: requests, in the order of the prompts.
      policy: who reads and answers what; it moves no keys
        (`ElasticOptions(most_moved_tokens=0)`).
      instances: of the mesh.
      clock: seconds: requests come when they did in the trace, and calls take
        what they take, one after another; None lets them take what the policy's
        times say, so that all times are those of `simulate_elastic`.

    Raises:
      OptionError: as `ElasticLoop`; or a request has no prompt of its length.
    """
    loop = ElasticLoop(trace, policy, instances, runner=self, clock=clock)
    return loop.run()

  def read(self, batch: PrefillBatch) -> None:
    """As `GroupRunner`.

    Raises:
      OptionError: a request that has no prompt of its length here.
    """
    for request, kept in zip(batch.requests, batch.kept, strict=True):
      prompt = self._prompt(request)
      session = ElasticSession(
        self.model,
        request.all_tokens,
        mesh=self.mesh,
        axis=self.axis,
        members=batch.instances,
      )
      self.groups[request.number].append(session.members)
      owners = np.repeat(np.asarray(batch.instances), kept)
      session.read([prompt], [owners], members=batch.stays)
      self._sessions[request.number] = session
      self._decode(request, 1)

  def step(
    self,
    request: ElasticRequest,
    instances: Sequence[int],
    parts: Sequence[tuple[int, int]],
  ) -> None:
    """As `GroupRunner`."""
    for instance, tokens in parts:
      self._sessions[request.number].regroup(instances, first=instance)
      self._decode(request, tokens)

  def ended(self, request: ElasticRequest) -> None:
    """As `GroupRunner`."""
    del self._sessions[request.number]

  def _decode(self, request: ElasticRequest, tokens: int) -> None:
    session = self._sessions[request.number]
    made = session.decode(tokens, sampler=self.sampler)
    self.answers[request.number] += made.tokens[0].tolist()
    self.groups[request.number].append(session.members)

  def _prompt(self, request: ElasticRequest) -> np.ndarray:
    found = [*self.prompts[request.number : request.number + 1]]
    if not found or found[0].size != request.prompt_tokens:
      have = f"{found[0].size} tokens" if found else "nothing"
      raise OptionError(
        "prompts",
        f"{have} for request {request.number}",
        f"its {request.prompt_tokens:,} tokens",
        "pass the prompts of the trace, in its order",
      )
    return found[0]
