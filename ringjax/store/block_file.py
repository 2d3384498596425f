"""The file of a block: a header, the payload, a digest of both.

Guarantees: `unpack` returns the bytes that `pack` was given for that key, or
raises; a file that was cut, extended, altered in one bit, or renamed to
another key's name is detected. So no sync to the disk is needed to tell whole
blocks after a crash.
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
  """Build the two parts of a block's file: header and unchanged payload.

  Args:
    key: Key of the block, 32 bytes.
    payload: Any bytes.
  """
  head = MAGIC + key + len(payload).to_bytes(8, "little")
  return head + _digest(head, payload), payload


def unpack(key: bytes, data: bytes) -> memoryview:
  """Check a block's file and return its payload.

  Args:
    key: Key of the block that the file should have.
    data: All bytes of the file.

  Raises:
    ValueError: If the file is not the one that was written for this key.
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
  digest = hashlib.sha256(head)
  digest.update(payload)
  return digest.digest()
