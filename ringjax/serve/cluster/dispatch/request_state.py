"""State of a request between a router and the instances that serve it.

  NEW ---> FETCHING ---> READING ---> READ ---> ANSWERING ---> (ended)

Stages are left out where there is nothing to do: no prefix to fetch, no prefill
on another instance; and decode begins while the prompt is in prefill, if pages
are pulled meanwhile. If an instance is lost, the request goes back to `NEW`, or
to `READING` or `READ` if the prompt's pages are still there or will come.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from ringjax.serve.cluster.block_index import block_keys, short_key
from ringjax.serve.cluster.dispatch.instances import ClusterInstance
from ringjax.serve.cluster.routing import RoutedRequest
from ringjax.serve.request import Handle


class RequestStage(enum.StrEnum):
  """Stage of a request in flight.

  Attributes:
    NEW: It is to be routed.
    FETCHING: A prefix is published, to be pulled before prefill.
    READING: An instance prefills it.
    READ: It is to be decoded.
    ANSWERING: An instance decodes it, or prefills and decodes it.
  """

  NEW = "new"
  FETCHING = "fetching"
  READING = "reading"
  READ = "read"
  ANSWERING = "answering"


# Stages that may follow each one; a request may end in any of them.
_NEXT = {
  RequestStage.NEW: {
    RequestStage.FETCHING,
    RequestStage.READING,
    RequestStage.READ,
    RequestStage.ANSWERING,
  },
  RequestStage.FETCHING: {RequestStage.READING, RequestStage.NEW},
  # Pages come in parts.
  RequestStage.READING: {
    RequestStage.READING,
    RequestStage.READ,
    RequestStage.ANSWERING,
    RequestStage.NEW,
  },
  RequestStage.READ: {RequestStage.ANSWERING, RequestStage.NEW},
  RequestStage.ANSWERING: {
    RequestStage.READING,
    RequestStage.READ,
    RequestStage.NEW,
  },
}


@dataclasses.dataclass(eq=False)
class RoutedState:
  """State of a request in flight.

  Attributes:
    routed: Request as policies see it.
    handle: Handle that `submit` returned.
    prompt: Token ids, int32 [n].
    stage: Current stage; `enter` changes it.
    reader: Prefill instance of the prompt, or None.
    lends: Whether the reader only offers a cached prefix, and the decode
      instance prefills the rest.
    read_task: Task number at the reader.
    tickets: Tickets of the pages at the reader, in the order of the prompt.
    prefill_continues: Whether prefill continues, and further tickets will come.
    decoder: Decode instance, current or planned by the route.
    task: Task number at the decoder.
    source: Instance from which the reader first fetches a prefix, or None.
    fetch_task: Task number at the source.
    keys: Keys of the prompt's blocks, by block size in tokens.
    attempts: Number of times that the request was begun.
    alone_since: Time since which no instance could take it; None if one can.
    alone_for: Work that no instance could do then, "prefills" or "decodes".
    why: Reason of the last restart.
    decoder_prefills: Whether the decode instance also prefills, by the route.
    fetch_tokens: Prompt tokens that the reader has after fetching.
    expected: Prompt tokens that should be cached at the instance that was sent
      the request last.
    cached: Prompt tokens that the prefill instance found cached; None if no
      separate instance prefilled it, and the decode instance reports it.
    totals: Log-probability of each answer's known tokens when decoding was
      begun the last time.
    had: (name, tokens) of cached prompt tokens per instance at arrival, if
      roles are planned.
  """

  routed: RoutedRequest
  handle: Handle
  prompt: np.ndarray
  stage: RequestStage = RequestStage.NEW
  reader: ClusterInstance | None = None
  lends: bool = False
  read_task: int = -1
  tickets: list[str] = dataclasses.field(default_factory=list)
  prefill_continues: bool = False
  decoder: ClusterInstance | None = None
  task: int = -1
  source: ClusterInstance | None = None
  fetch_task: int = -1
  keys: dict[int, list[str]] = dataclasses.field(default_factory=dict)
  attempts: int = 0
  alone_since: float | None = None
  alone_for: str = ""
  why: str = ""
  decoder_prefills: bool = False
  fetch_tokens: int = 0
  expected: int = 0
  cached: int | None = None
  totals: list[float] = dataclasses.field(default_factory=list)
  had: tuple[tuple[str, int], ...] = ()

  def enter(self, stage: RequestStage) -> None:
    """Go to the next stage.

    Raises:
      ValueError: If no request goes there from its stage.
    """
    if stage not in _NEXT[self.stage]:
      raise ValueError(f"a request from {self.stage} to {stage}")
    self.stage = stage

  def block_keys(self, page: int) -> list[str]:
    """Short keys of the prompt's blocks, computed once per block size."""
    request = self.handle.request
    if page not in self.keys:
      self.keys[page] = [
        short_key(key)
        for key in block_keys(
          self.prompt, page, salt=request.salt, adapter=request.adapter
        )
      ]
    return self.keys[page]
