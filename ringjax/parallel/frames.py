"""Frames of a byte stream: sizes before texts, headers before arrays.

Guarantees: nothing is pickled; a view is sent and filled without a copy.

  text    4 bytes: its size, little-endian; the text
  array   the fields of a header, little-endian; the bytes of the array
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# Size of a text.
SIZE = struct.Struct("<I")


def framed(text: bytes) -> bytes:
  """A text with its size before it."""
  return SIZE.pack(len(text)) + text


def json_object(text: bytes | bytearray) -> dict[str, Any]:
  """Parse a JSON object.

  Raises:
    ValueError: If the text is anything else.
  """
  try:
    fields = json.loads(text)
  except RecursionError:
    raise ValueError("too deep") from None
  if not isinstance(fields, dict):
    raise ValueError("not an object")
  return fields


def send(
  link: socket.socket, parts: Sequence[np.ndarray], header: bytes = b""
) -> None:
  """Send contiguous arrays as bytes, after a header."""
  views = [p.reshape(-1).view(np.uint8).data for p in parts]
  send_views(link, [memoryview(header), *views])


def send_views(
  link: socket.socket,
  parts: Sequence[memoryview],
  before: Callable[[], object] = lambda: None,
) -> None:
  """Send contiguous bytes; `before` is called before each system call."""
  views = [part for part in parts if len(part)]
  while views:
    before()
    # The system takes a limited number of buffers at once.
    num_sent = link.sendmsg(views[:64])
    while views and num_sent >= len(views[0]):
      num_sent -= len(views.pop(0))
    if num_sent:
      views[0] = views[0][num_sent:]


def receive(link: socket.socket, parts: Sequence[np.ndarray]) -> None:
  """Fill contiguous arrays with the bytes that arrive.

  Raises:
    ConnectionError: If the other end is closed.
  """
  for part in parts:
    view = part.reshape(-1).view(np.uint8).data
    if receive_view(link, view) < len(view):
      raise ConnectionError("closed by the other end")


def receive_header(
  link: socket.socket, header: struct.Struct
) -> tuple[Any, ...]:
  """Fields of the header that arrives.

  Raises:
    ConnectionError: If the other end is closed.
  """
  fields = np.zeros(header.size, np.uint8)
  receive(link, [fields])
  return header.unpack(fields.tobytes())


def receive_view(
  link: socket.socket,
  view: memoryview,
  before: Callable[[], object] = lambda: None,
) -> int:
  """Fill contiguous memory; return the bytes that came before the link closed.

  Args:
    link: Connected socket.
    view: Memory to fill, of bytes.
    before: Called before each system call.
  """
  size = len(view)
  while len(view):
    before()
    num_received = link.recv_into(view)
    if not num_received:
      break
    view = view[num_received:]
  return size - len(view)
