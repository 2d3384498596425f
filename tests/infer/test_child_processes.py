"""Processes that end with this one, and those that do not start."""

from __future__ import annotations

import pytest

from ringjax.errors import PeerError
from ringjax.infer.child_processes import (
  end_children,
  first_line,
  start_child,
)

# Nothing here takes long; what hangs ends.
PATIENCE_S = 240.0


def test_a_process_says_its_first_line_and_is_ended():
  # It reads its options as JSON, and writes them in its own way.
  child = start_child("json.tool", {"port": 7}, {})
  assert child.stdin is not None and child.poll() is None
  child.stdin.close()
  with pytest.raises(PeerError, match="worker 3 did not start"):
    first_line("worker", 3, child, PATIENCE_S)
  end_children([child])
  assert child.returncode is not None


def test_a_process_that_does_not_start_is_named():
  child = start_child("a_module_that_is_missing", {}, {})
  with pytest.raises(PeerError, match="worker 3.*ended with 1") as raised:
    first_line("worker", 3, child, PATIENCE_S)
  assert raised.value.rank == 3
  end_children([child])
