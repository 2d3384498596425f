"""Messages of JSON fields and arrays over a connection.

Guarantees: nothing is pickled; a message is JSON and raw bytes of arrays whose
dtypes and shapes it states, of at most `MOST_BYTES`.
Cost: arrays are sent without a copy; a header has about 100 bytes.

  message   4 bytes: size of the header, little-endian; the header, JSON;
            the bytes of its arrays one after another

The header has the kind of the message ("t"), dtypes and shapes of its arrays
("x", if there are any), and further fields.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ringjax.parallel.frames import SIZE, framed, json_object
from ringjax.parallel.links.connection import (
  Connection,
  HostileMessageError,
  as_json,
)

MOST_BYTES = 1 << 34
# Maximum bytes of a header: prompts of many millions of tokens.
_MOST_HEADER = 1 << 27
_DTYPES = ("float32", "bfloat16", "float16", "float64", "int32")


class ArrayMessage(NamedTuple):
  """A received message.

  Fields:
    kind: Kind of the message.
    fields: JSON values of the header by name.
    arrays: NumPy arrays of the message.
    nbytes: Bytes of the whole message on the wire.
  """

  kind: str
  fields: dict[str, Any]
  arrays: tuple[np.ndarray, ...]
  nbytes: int

  @property
  def as_object(self) -> dict[str, Any]:
    """Fields of the header, with the kind as "t"."""
    return {"t": self.kind, **self.fields}

  def integer(self, name: str, below: int) -> int:
    """Returns a field that must be an int from 0 to `below` - 1.

    Raises:
      HostileMessageError: If the field is anything else.
    """
    value = self.fields.get(name)
    if type(value) is not int or not 0 <= value < below:
      raise HostileMessageError(f"{self.kind}: {name} is {value!r:.40}")
    return value


def message_parts(
  kind: str, arrays: Sequence[np.ndarray] = (), /, **fields: Any
) -> list[bytes | memoryview]:
  """Bytes of a message; those of contiguous arrays are not copied.

  Raises:
    AttributeError, TypeError, ValueError: If a field is not for JSON.
  """
  parts = [np.asarray(x, order="C") for x in arrays]
  stated = [[x.dtype.name, list(x.shape)] for x in parts]
  beside = {"x": stated} if stated else {}
  head = framed(as_json({"t": kind, **beside, **fields}))
  return [head, *(x.reshape(-1).view(np.uint8).data for x in parts if x.size)]


def send_arrays(
  link: Connection,
  kind: str,
  arrays: Sequence[np.ndarray] = (),
  /,
  **fields: Any,
) -> int:
  """Sends a message; returns its size in bytes.

  Raises:
    PeerError: If the other side does not receive, or is gone.
  """
  parts = message_parts(kind, arrays, **fields)
  link.send(parts)
  return sum(map(len, parts))


def receive_arrays(
  link: Connection, kinds: Collection[str] | None = None
) -> ArrayMessage | None:
  """Receives the next message; None if the other side left before it.

  Args:
    link: Connection to receive from.
    kinds: Kinds that a message may have; default: any.

  Raises:
    HostileMessageError: If the message breaks the protocol.
    PeerError: If the other side sends nothing, or is gone.
  """
  head = link.frame(_MOST_HEADER)
  if head is None:
    return None
  try:
    fields = json_object(head)
    kind, stated = str(fields.pop("t")), fields.pop("x", ())
    shapes = [(_dtype(name), _shape(shape)) for name, shape in stated]
    if kinds is not None and kind not in kinds:
      raise ValueError(f"a message {kind!r:.40}")
    nbytes = sum(dtype.itemsize * math.prod(s) for dtype, s in shapes)
    if nbytes > MOST_BYTES:
      raise ValueError(f"{nbytes} bytes")
  except (KeyError, TypeError, ValueError, AttributeError) as error:
    raise link.hostile(error) from None
  arrays = []
  for dtype, shape in shapes:
    array = np.empty(shape, dtype)
    if array.size:
      link.receive(array.reshape(-1).view(np.uint8).data)
    arrays.append(array)
  return ArrayMessage(
    kind, fields, tuple(arrays), SIZE.size + len(head) + nbytes
  )


def _dtype(name: Any) -> np.dtype:
  if name not in _DTYPES:
    raise ValueError(f"dtype {name!r:.40}")
  return jnp.dtype(name)


def _shape(given: Any) -> tuple[int, ...]:
  if not isinstance(given, list) or len(given) > 8:
    raise ValueError("no shape")
  if not all(type(n) is int and 0 <= n < 1 << 40 for n in given):
    raise ValueError(f"shape {given!r:.60}")
  # An array of no elements has a limit, too: NumPy makes none of huge sizes.
  if math.prod(n for n in given if n) > MOST_BYTES:
    raise ValueError(f"shape {given!r:.60}")
  return tuple(given)
