"""The file of a block: a header, the payload, a digest of both.

Guarantees: `unpack` returns the bytes that `pack` was given for that key, or
raises; a file that was cut, extended, altered in one bit, or renamed to
another key's name is detected, so nothing has to be synced to the disk for
that a crash leaves whole blocks or none.
Cost: SHA-256 of the payload, once when written and once when read.

  offset  bytes
  0       8      "RJBLOCK" and the version, one byte
  8       32     the key
  40      8      bytes of the payload, little-endian
  48      32     SHA-256 of the 48 bytes before and of the payload
  80             the payload
"""

from __future__ import annotations

import hashlib

MAGIC = b"RJBLOCK\x01"
KEY_BYTES = 32
HEADER_BYTES = 80


def pack(key: bytes, payload: bytes) -> tuple[bytes, bytes]:
  """The two parts of a block's file: its header, and the payload as it is.

  Args:
    key: 32 bytes.
    payload: any bytes.
  """
  head = MAGIC + key + len(payload).to_bytes(8, "little")
  return head + _digest(head, payload), payload


def unpack(key: bytes, data: bytes) -> memoryview:
  """The payload of a block's file.

  Args:
    key: of the block that the file should have.
    data: all bytes of the file.

  Raises:
    ValueError: the file is not what was written for this key.
  """
  view = memoryview(data)
  head, payload = view[:48], view[HEADER_BYTES:]
  if bytes(head[:8]) != MAGIC:
    raise ValueError("not a block of this version")
  if bytes(head[8:40]) != key:
    raise ValueError("the block of another key")
  if int.from_bytes(head[40:48], "little") != len(payload):
    raise ValueError("a payload of another size")
  if bytes(view[48:HEADER_BYTES]) != _digest(bytes(head), payload):
    raise ValueError("bytes that do not have the digest that they state")
  return payload


def _digest(head: bytes, payload: bytes | memoryview) -> bytes:
  found = hashlib.sha256(head)
  found.update(payload)
  return found.digest()
