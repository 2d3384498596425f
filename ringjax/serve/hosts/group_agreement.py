"""Agreement on steps between the processes of a group, by digests.

Guarantees: process 0 appends a step's tokens to answers only once every process
has planned the same steps and chosen the same tokens, up to this one and the
one in flight. A process that differs fails the group and is named.
Cost: a digest for each step (0.13 ms for 64 rows of 512 pages on one core), and
a message of some bytes from each process to process 0 (0.06 ms there and back
over loopback). Both pass while the devices compute the next step, but in steps
with drafts or masks, which wait for the tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Shaped

from ringjax.errors import OptionError, PeerError, RingjaxError
from ringjax.json_text import json_text
from ringjax.parallel.peers import Peers
from ringjax.serve.hosts.step_agreement import plan_bytes
from ringjax.serve.scheduler import Scheduler, StepPlan
from ringjax.serve.text_requests import ReadPass, TextPass

Value = TypeVar("Value")
_LOG = logging.getLogger("ringjax.serve")
_DIGEST = 8
# Seconds after an error in which the process that caused it may become known.
_MOMENT_S = 3.0


def group_error(failure: PeerError, size: int) -> PeerError:
  """Error of all requests of a group in which a process has failed.

  Args:
    failure: Failure, which names the process.
    size: Number of processes of the group.
  """
  return PeerError(
    "engine",
    f"a failure of one of its {size} processes: {failure}",
    "all of them, which compute each token together",
    "retry once they are back; end all processes and start them again "
    "(launch.serve --restarts=N does); that process's log has the reason",
    rank=failure.rank,
  )


class GroupAgreement:
  """Agreement of a replica with those of a group's other processes.

  Attributes:
    peers: The processes of the group.
  """

  def __init__(self, peers: Peers):
    self.peers = peers
    self._driver: int | None = None
    self._hasher = hashlib.blake2b(digest_size=_DIGEST)
    self._version = -1
    self._steps = 0

  @contextlib.contextmanager
  def driving(self) -> Iterator[None]:
    """Context in which this thread drives the replica."""
    self._driver = threading.get_ident()
    yield

  def check_caller(self, what: str) -> None:
    """Refuses threads that do not drive the replica.

    Raises:
      OptionError: If this is such a thread.
    """
    if threading.get_ident() != self._driver:
      raise OptionError(
        "engine",
        f"{what}, of an engine in a group of processes",
        "requests to its group, whose processes take the same steps",
        "call the methods of rj.serve.EngineGroup",
      )

  def choose(self, value: Value) -> Value:
    """Choice of process 0, which posts it to the others."""
    if self.peers.rank == 0:
      self.peers.post(["choice", value])
      return value
    kind, chosen = self.peers.receive(0, idle=False)
    if kind != "choice":
      raise self._differs(self.peers.rank)
    return chosen

  def together(self, value: int | None) -> list[int | None]:
    """Numbers of all processes, in the order of their ranks.

    Raises:
      PeerError: If a process has failed.
    """
    return self.peers.gather(value, idle=False)

  def planned(self, plan: StepPlan, scheduler: Scheduler) -> None:
    """Adds a plan, and the pages of all rows, to the digest."""
    self._steps += 1
    self._hasher.update(plan_bytes(plan))
    if scheduler.version != self._version:
      self._version = scheduler.version
      for table in scheduler.tables:
        self._hasher.update(table.tobytes())
    # A process that does not come as far as the others is stuck.
    self.peers.tick(self._steps)

  def read(self, chosen: Sequence[np.ndarray]) -> None:
    """Compares the digests of all processes in process 0.

    Raises:
      PeerError: If one differs, or a process has failed.
    """
    for tokens in chosen:
      self._hasher.update(np.asarray(tokens).tobytes())
    digest = self._hasher.hexdigest()
    if self.peers.rank:
      self.peers.post(["digest", digest], 0)
      # Those that follow learn of a difference by the end of the group.
      self.peers.check()
      return
    for rank in range(1, self.peers.size):
      if self.peers.receive(rank, idle=False) != ["digest", digest]:
        raise self._differs(rank)

  def read_texts(
    self, text_pass: TextPass, read: ReadPass
  ) -> Sequence[Shaped[np.ndarray, ...]]:
    """Numbers of a pass that all processes compute together, see `ReadPass`.

    Args:
      text_pass: Texts of the pass.
      read: Function that computes it with this replica.

    Raises:
      RingjaxError: If the texts can't be read, in all processes alike.
      PeerError: If a process has read others, or has failed.
    """
    self._steps += 1
    self._hasher.update(json_text(text_pass.fields()).encode())
    self.peers.tick(self._steps)
    values: Sequence[np.ndarray] = ()
    refusal: RingjaxError | None = None
    try:
      values = read(text_pass)
    except PeerError:
      raise
    except RingjaxError as error:
      refusal = error
    except Exception as error:
      raise self.failed(error) from error
    self._hasher.update(type(refusal).__name__.encode())
    self.read([])
    if refusal is not None:
      raise refusal
    return values

  def failed(self, error: Exception) -> Exception:
    """Failure of the group, or else this process's error, which it reports."""
    end = time.monotonic() + _MOMENT_S
    # A collective may fail before the lost process is identified.
    while (
      not isinstance(error, PeerError)
      and self.peers.failure is None
      and time.monotonic() < end
    ):
      time.sleep(0.02)
    if self.peers.failure is None:
      _LOG.error("a step failed", exc_info=error)
      self.peers.abandon(error)
      return error
    return group_error(self.peers.failure, self.peers.size)

  def _differs(self, rank: int) -> PeerError:
    """Report a process that differs from process 0 as the group's failure."""
    why = (
      f"differs from rank 0 in its plan or tokens of step {self._steps}: "
      "weights, options, versions or devices differ"
    )
    return self.peers.report_failure(rank, why, grace_s=0)
