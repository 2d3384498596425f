"""What is said when memory runs out."""

from __future__ import annotations

import jax
import pytest

from ringjax.errors import MemoryEstimateError, OutOfMemoryError
from ringjax.parallel import memory

SAID = {
  "RESOURCE_EXHAUSTED: Out of memory allocating 123456789 bytes.": 123456789,
  "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
  "memory space hbm. Used 17.5G of 16.0G hbm.": int(17.5 * 2**30),
  "RESOURCE_EXHAUSTED: Attempting to allocate 1.5GiB.": int(1.5 * 2**30),
  "RESOURCE_EXHAUSTED: out of memory": None,
}


@pytest.mark.parametrize("text", SAID)
def test_what_a_runtime_says_is_read(text):
  with (
    pytest.raises(OutOfMemoryError, match="while resting") as caught,
    memory.watched("resting", "sleep less, or more"),
  ):
    raise jax.errors.JaxRuntimeError(text)
  assert caught.value.nbytes == SAID[text]
  much = "more" if SAID[text] is None else f"{SAID[text]:,} bytes"
  assert f"asked for {much}: sleep less, or more" in str(caught.value)
  assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
  assert isinstance(caught.value, MemoryError)


def test_the_host_s_too():
  with pytest.raises(OutOfMemoryError), memory.watched("resting", "sleep"):
    raise MemoryError


@pytest.mark.parametrize(
  "error",
  [
    jax.errors.JaxRuntimeError("INTERNAL: no"),
    ZeroDivisionError(),
    MemoryEstimateError("an estimate"),
    OutOfMemoryError("inside", 3),
  ],
)
def test_other_errors_pass(error):
  with pytest.raises(type(error)) as caught, memory.watched("resting", "x"):
    raise error
  assert caught.value is error
