"""Clusters of two instances, for the benchmark of page transfers."""

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
from ringjax.serve.cluster.worker_task import WorkerTask

_KEY = bytes(range(32))
_PATIENCE_S = 600


@dataclasses.dataclass(frozen=True)
class MovedPrompt:
  """Times and bytes of one prompt.

  Attributes:
    read_s: Seconds of its prefill.
    left: Bytes that were not pulled at the end of prefill.
    answer_s: Seconds from then to the end of its answer.
    total: Bytes that were pulled in all.
    tokens: Ids of the answer.
  """

  read_s: float
  left: int
  answer_s: float
  total: int
  tokens: list[int]


class _RecordingWorker(cluster.ClusterWorker):
  """Prefill instance that records the time and pulled bytes at its end."""

  def __init__(self, engine: rj.serve.Engine, **options: Any):
    super().__init__(engine, **options)
    self.read = threading.Event()
    self.then: tuple[float, int] = (0.0, 0)

  def _changed(self, task: WorkerTask, answer: rj.serve.Answer) -> None:
    self.then = time.perf_counter(), self.publisher.counters.read_bytes
    self.read.set()
    super()._changed(task, answer)


class InstancePair:
  """A router, a prefill instance and a decode instance."""

  def __init__(self, router: cluster.ClusterRouter, reader: _RecordingWorker):
    self.router, self.reader = router, reader

  def moved(self, prompt: Int[np.ndarray, " n"]) -> MovedPrompt:
    """Answers one prompt by both instances; returns times and bytes."""
    self.reader.read.clear()
    bytes_before = self.reader.publisher.counters.read_bytes
    start = time.perf_counter()
    handle = self.router.submit(
      rj.serve.Request(prompt=prompt, max_new_tokens=2)
    )
    tokens = [int(x) for x in handle]
    end = time.perf_counter()
    if not self.reader.read.wait(_PATIENCE_S):
      raise TimeoutError("no prompt was read")
    read, pulled = self.reader.then
    total = self.reader.publisher.counters.read_bytes - bytes_before
    return MovedPrompt(
      read - start, total - (pulled - bytes_before), end - read, total, tokens
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
  """Runs a cluster of a prefill instance and a decode instance.

  Args:
    config: Config of a model with random weights.
    tokens: Tokens of prompts.
    stream: Tokens of a prompt after which pages leave; 0 for its end.
    layer_parts: Number of parts of the prefill instance's layers.
    piece: Tokens of a prompt in a row of a call, see `Engine`.
    pieces: Rows of a call of prompts, see `Engine`.
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
    workers: list[Any] = []
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
      kind = _RecordingWorker if role == "prefill" else cluster.ClusterWorker
      worker = kind(engine, key=_KEY, router=router.address, role=role)
      stack.callback(worker.close)
      workers.append(worker.start())
      if not worker.joined.wait(_PATIENCE_S):
        raise TimeoutError(worker.refused)
    yield InstancePair(router, workers[0])
