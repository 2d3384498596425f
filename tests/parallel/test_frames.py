"""Frames of a byte stream, over a pair of sockets."""

from __future__ import annotations

import socket
import struct

import numpy as np
import pytest

from ringjax.parallel import frames


def test_a_header_and_arrays_arrive_as_they_were_sent():
  header = struct.Struct("<BIQ")
  sent = [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 4), "uint8")]
  left, right = socket.socketpair()
  with left, right:
    frames.send(left, sent, header.pack(3, 70_000, 24))
    assert frames.receive_header(right, header) == (3, 70_000, 24)
    received = [np.empty_like(x) for x in sent]
    frames.receive(right, received)
    left.close()
    with pytest.raises(ConnectionError, match="closed by the other end"):
      frames.receive_header(right, header)
  np.testing.assert_array_equal(received[0], sent[0])


@pytest.mark.parametrize("text", [b"[]", b"1", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(text):
  assert frames.json_object(b'{"n": 1}') == {"n": 1}
  with pytest.raises(ValueError):  # noqa: PT011
    frames.json_object(text)


def test_a_text_has_its_size_before_it():
  assert frames.framed(b"abc") == b"\x03\x00\x00\x00abc"
