"""Checks of annotations that are made when a function is first called."""

from __future__ import annotations

import functools
from collections.abc import Callable

import beartype


def check(function: Callable) -> Callable:
  """`beartype.beartype(function)`, made at the first call.

  To make one takes a millisecond, the package has ten thousand functions, and a
  worker calls a part of them.
  """
  checked = None

  @functools.wraps(function)
  def call(*args, **kwargs):
    nonlocal checked
    if checked is None:
      checked = beartype.beartype(function)
    return checked(*args, **kwargs)

  return call
