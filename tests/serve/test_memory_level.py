"""An engine that has answered very many requests holds no more than before."""

from __future__ import annotations

import collections
import gc
import os
import pathlib

import numpy as np
import pytest

from ringjax.errors import RingjaxError
from ringjax.serve import Request
from tests.serve.test_engine import engine, requests


def resident():
  """Bytes of this process that are in memory."""
  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
  return pages * os.sysconf("SC_PAGE_SIZE")


def ours():
  """How many objects of the package's classes there are."""
  gc.collect()
  kinds = (type(x) for x in gc.get_objects())
  return collections.Counter(
    k.__qualname__ for k in kinds if str(k.__module__).startswith("ringjax")
  )


def flood(at, count, rng):
  """Requests of all kinds: also cancelled, too late, too long, and failing."""

  def broken(_):
    raise ValueError("a mask that fails")

  vocab = at.model.config.vocab
  done = 0
  while done < count:
    some = requests(rng, vocab, 8, logprobs=1)
    some += requests(rng, vocab, 1, deadline=1e-9)
    some += requests(rng, vocab, 1, mask=broken)
    handles = [at.submit(one) for one in some]
    with pytest.raises(RingjaxError):
      at.submit(Request(prompt=np.zeros(1000, np.int32), max_new_tokens=1))
    at.step()
    handles[rng.integers(len(handles))].cancel()
    at.run()
    assert all(h.done for h in handles)
    done += len(handles)
  at.scheduler.tree.check()
  return done


@pytest.mark.slow
def test_nothing_stays_behind_of_requests(loaded):
  model, _ = loaded("llama3")
  at, rng = engine(model), np.random.default_rng(0)
  flood(at, 60, rng)
  before = ours()
  flood(at, 160, rng)
  more = ours() - before
  # Nodes of the prefix tree come and go, and there are as many as pages.
  pages = at.scheduler.tree.groups[0].pages
  assert all(n <= pages for n in more.values()), more


@pytest.mark.slow
def test_memory_is_level_over_ten_thousand_requests(loaded):
  model, _ = loaded("llama3")
  at, rng = engine(model), np.random.default_rng(1)
  # What allocators keep has its size after some thousands.
  flood(at, 6000, rng)
  before = resident()
  flood(at, 4000, rng)
  # None of 4,000 may leave as little as a kilobyte.
  assert resident() - before < 4000 * 1024
