"""Errors of one process that are raised in all."""

from __future__ import annotations

import pytest

from ringjax.errors import (
  CheckpointFormatError,
  OptionError,
  OutOfMemoryError,
  PeerError,
)
from ringjax.nn.weights.placed_layers import (
  ReadFault,
  naming_faults,
  raise_fault,
)
from ringjax.parallel import joint_outcome

RANKS = (0, 1)


@pytest.fixture
def said(monkeypatch):
  """What this process, of rank 0, said; the other says what is in `other`."""
  found = []

  def exchanged(value, ranks):
    assert ranks == RANKS
    found.append(None if value is None else value["kind"])
    if exchanged.other == "silent":
      raise PeerError("process 1: no answer", rank=1)
    return [value, exchanged.other]

  exchanged.other = None
  monkeypatch.setattr(joint_outcome, "exchanged", exchanged)
  found_and = lambda other: setattr(exchanged, "other", other)
  return found, found_and


def caught(call) -> Exception:
  try:
    call()
  except Exception as error:
    return error
  raise AssertionError("nothing was raised")


def test_every_block_makes_one_exchange_more(said):
  """Whatever ends it: the numbers of calls stay those of the others."""
  found, _ = said
  fault = ReadFault(ranks=RANKS)
  out = OutOfMemoryError("no room", nbytes=1)
  read = CheckpointFormatError("a layer that has changed")

  def run(error, fault_error=None, *, step=False):
    found.clear()
    with naming_faults([fault]), naming_faults([fault]):
      fault.error = fault_error
      if step:
        raise_fault([fault])
      if error is not None:
        raise error

  assert caught(lambda: run(out)) is out and found == ["OutOfMemoryError"]
  bare = KeyError("x")
  assert caught(lambda: run(bare)) is bare and found == ["KeyError"]
  # A read that failed is why a program did.
  assert caught(lambda: run(ZeroDivisionError(), read)) is read
  assert found == ["CheckpointFormatError"] and fault.error is None
  assert isinstance(read.__cause__, ZeroDivisionError)
  again = CheckpointFormatError("another")
  assert caught(lambda: run(None, again, step=True)) is again
  assert found == ["CheckpointFormatError"]
  run(None)
  assert found == [None, None]


def test_the_error_of_another_is_raised_once(said):
  found, other = said
  other({"kind": "OptionError", "text": "rows: too many"})

  def run():
    with (
      joint_outcome.failing_together(RANKS),
      joint_outcome.failing_together(RANKS),
    ):
      pass

  error = caught(run)
  assert isinstance(error, OptionError) and "process 1: rows" in str(error)
  assert found == [None]


def test_silence_does_not_hide_ones_own_error(said):
  found, other = said
  other("silent")
  mine = OptionError("rows: too many")
  error = caught(lambda: joint_outcome.raise_first(mine, RANKS))
  assert error is mine and isinstance(error.__cause__, PeerError)
  why = OSError("gone")
  mine = CheckpointFormatError("no file")
  mine.__cause__ = why
  assert caught(lambda: joint_outcome.raise_first(mine, RANKS)).__cause__ is why
  assert isinstance(
    caught(lambda: joint_outcome.raise_first(None, RANKS)), PeerError
  )
  assert len(found) == 3
