"""Clusters of two instances, for prompts whose pages leave in several ways."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

import ringjax as rj
from ringjax.serve import cluster
from ringjax.serve.cluster.worker import WorkerTask

_KEY = bytes(range(32))
_PATIENCE_S = 600


@dataclasses.dataclass(frozen=True)
class MovedPrompt:
  """One prompt.

  Attributes:
    read_s: until it was read.
    left: bytes that were not pulled by then.
    answer_s: from then to the end of its answer.
    total: bytes that were pulled.
    tokens: of the answer.
  """

  read_s: float
  left: int
  answer_s: float
  total: int
  tokens: list[int]


class _NotingReader(cluster.ClusterWorker):
  """Notes when a prompt has been read, and what has been pulled by then."""

  def __init__(self, engine: rj.serve.Engine, **options: Any):
    super().__init__(engine, **options)
    self.read = threading.Event()
    self.then: tuple[float, int] = (0.0, 0)

  def _changed(self, task: WorkerTask, answer: rj.serve.Answer) -> None:
    self.then = time.perf_counter(), self.publisher.counters.read_bytes
    self.read.set()
    super()._changed(task, answer)


class InstancePair:
  """A router, who reads and who answers."""

  def __init__(self, router: cluster.ClusterRouter, reader: _NotingReader):
    self.router, self.reader = router, reader

  def moved(self, prompt: Int[np.ndarray, " n"]) -> MovedPrompt:
    """One request, from one end to the other."""
    self.reader.read.clear()
    before = self.reader.publisher.counters.read_bytes
    start = time.perf_counter()
    handle = self.router.submit(
      rj.serve.Request(prompt=prompt, max_new_tokens=2)
    )
    tokens = [int(x) for x in handle]
    end = time.perf_counter()
    if not self.reader.read.wait(_PATIENCE_S):
      raise TimeoutError("no prompt was read")
    read, pulled = self.reader.then
    total = self.reader.publisher.counters.read_bytes - before
    return MovedPrompt(
      read - start, total - (pulled - before), end - read, total, tokens
    )


@contextlib.contextmanager
def pair(
  config: dict[str, Any],
  tokens: int,
  *,
  stream: int,
  layer_parts: int,
  piece: int,
  pieces: int,
) -> Iterator[InstancePair]:
  """A cluster of who reads and who answers.

  Args:
    config: of a model with random weights.
    tokens: of prompts.
    stream: tokens of a prompt after which pages leave; 0 for its end.
    layer_parts: of who reads.
    piece: see `Engine`.
    pieces: see `Engine`.
  """
  model = rj.models.create(config, seed=0)
  with contextlib.ExitStack() as stack:
    router = cluster.ClusterRouter(
      key=_KEY,
      vocab=model.config.vocab,
      longest=tokens + 2,
      stream_tokens=stream,
    )
    stack.callback(router.close)
    made: list[Any] = []
    for role in ("prefill", "decode"):
      engine = rj.serve.Engine(
        model,
        rows=1,
        capacity=tokens + 128,
        longest=tokens + 2,
        piece=piece,
        pieces=pieces,
        layer_parts=layer_parts if role == "prefill" else 1,
        store=rj.store.Store(host=1 << 30),
      )
      stack.callback(engine.close)
      kind = _NotingReader if role == "prefill" else cluster.ClusterWorker
      worker = kind(engine, key=_KEY, router=router.address, role=role)
      stack.callback(worker.close)
      made.append(worker.start())
      if not worker.joined.wait(_PATIENCE_S):
        raise TimeoutError(worker.refused)
    yield InstancePair(router, made[0])
