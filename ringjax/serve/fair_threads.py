"""Threads that take turns between clients.

Guarantees: of clients that wait, each has one call done before any has a second
one. Calls of one client are done in their order.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple


class _Job(NamedTuple):
  """A call that waits for a thread.

  Fields:
    done: The future of its result, cancelled if the client is gone.
    call: The function.
    args: The arguments of the function.
  """

  done: asyncio.Future[Any]
  call: Callable[..., Any]
  args: tuple[Any, ...]


class FairThreads:
  """Some threads, for calls of clients of an event loop.

  All methods are called by the thread of the loop.
  """

  def __init__(self, count: int, name: str):
    """Starts none yet.

    Args:
      count: Number of threads.
      name: Prefix of the threads' names.
    """
    self._idle = count
    self._pool = ThreadPoolExecutor(count, name)
    # The client whose turn it is comes first.
    self._waiting: collections.OrderedDict[Hashable, collections.deque[_Job]]
    self._waiting = collections.OrderedDict()

  async def run(
    self, client: Hashable, call: Callable[..., Any], *args: Any
  ) -> Any:
    """What a call returns or raises, which a thread makes.

    Args:
      client: The client, by anything that tells it apart.
      call: The function.
      *args: The arguments of the function.
    """
    done = asyncio.get_running_loop().create_future()
    jobs = self._waiting.setdefault(client, collections.deque())
    jobs.append(_Job(done, call, args))
    self._start()
    return await done

  def close(self) -> None:
    """Takes no more calls; does not wait for those that are being made."""
    self._pool.shutdown(wait=False, cancel_futures=True)

  def _start(self) -> None:
    loop = asyncio.get_running_loop()
    while self._idle and self._waiting:
      client, jobs = self._waiting.popitem(last=False)
      job = jobs.popleft()
      if jobs:
        self._waiting[client] = jobs
      if job.done.cancelled():
        continue
      self._idle -= 1
      work = loop.run_in_executor(self._pool, job.call, *job.args)
      work.add_done_callback(lambda work, job=job: self._ended(work, job))

  def _ended(self, work: asyncio.Future[Any], job: _Job) -> None:
    self._idle += 1
    self._start()
    if work.cancelled():
      job.done.cancel()
      return
    error = work.exception()
    if job.done.cancelled():
      return
    if error is not None:
      job.done.set_exception(error)
    else:
      job.done.set_result(work.result())
