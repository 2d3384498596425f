"""Threads that take turns between clients.

Guarantees: each waiting client has one call run before any has a second one.
Calls of one client run in order.
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
    future: The future of its result, cancelled if the client is gone.
    call: The function.
    args: The arguments of the function.
  """

  future: asyncio.Future[Any]
  call: Callable[..., Any]
  args: tuple[Any, ...]


class FairThreads:
  """Some threads, for calls of clients of an event loop.

  All methods are called by the thread of the loop.
  """

  def __init__(self, count: int, name: str):
    """Start no threads yet.

    Args:
      count: Number of threads.
      name: Prefix of the threads' names.
    """
    self._idle = count
    self._pool = ThreadPoolExecutor(count, name)
    # The next client to serve comes first.
    self._waiting: collections.OrderedDict[Hashable, collections.deque[_Job]]
    self._waiting = collections.OrderedDict()

  async def run(
    self, client: Hashable, call: Callable[..., Any], *args: Any
  ) -> Any:
    """Run a call in a thread and return or raise its result.

    Args:
      client: Any key that identifies the client.
      call: The function.
      *args: The arguments of the function.
    """
    result = asyncio.get_running_loop().create_future()
    jobs = self._waiting.setdefault(client, collections.deque())
    jobs.append(_Job(result, call, args))
    self._start()
    return await result

  def close(self) -> None:
    """Accepts no more calls; does not wait for those that are running."""
    self._pool.shutdown(wait=False, cancel_futures=True)

  def _start(self) -> None:
    loop = asyncio.get_running_loop()
    while self._idle and self._waiting:
      client, jobs = self._waiting.popitem(last=False)
      job = jobs.popleft()
      if jobs:
        self._waiting[client] = jobs
      if job.future.cancelled():
        continue
      self._idle -= 1
      work = loop.run_in_executor(self._pool, job.call, *job.args)
      work.add_done_callback(lambda work, job=job: self._ended(work, job))

  def _ended(self, work: asyncio.Future[Any], job: _Job) -> None:
    self._idle += 1
    self._start()
    if work.cancelled():
      job.future.cancel()
      return
    error = work.exception()
    if job.future.cancelled():
      return
    if error is not None:
      job.future.set_exception(error)
    else:
      job.future.set_result(work.result())
