"""Silent connections delay nobody at any listening socket of the package."""

import contextlib
import socket
import threading

import pytest

import ringjax as rj
from ringjax.infer.tpi_llm.process_star import Star, join
from ringjax.parallel.door import Door

KEY = b"a key of at least sixteen bytes"


def _greet(link, address):
  # As long as the peer likes: what closes a silent connection is the door.
  link.settimeout(None)
  if link.recv(4) != b"open":
    raise rj.PeerError("a stranger")
  return link


@pytest.fixture
def server():
  with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
    yield server


def test_a_peer_is_admitted_among_silent_connections(server):
  with Door(server, _greet, name="test", waiting=4) as door:
    address = server.getsockname()
    silent = [socket.create_connection(address, 20.0) for _ in range(20)]
    with socket.create_connection(server.getsockname()) as peer:
      peer.sendall(b"open")
      admitted = door.accept(30.0)
      assert admitted.getpeername() == peer.getsockname()
    admitted.close()
    # All but the newest four are closed.
    assert [link.recv(1) for link in silent[:16]] == [b""] * 16
    for link in silent:
      link.close()


def test_strangers_are_closed_and_nobody_enters(server):
  with Door(server, _greet, name="test") as door:
    with socket.create_connection(server.getsockname()) as stranger:
      stranger.sendall(b"GET ")
      assert stranger.recv(1) == b""
    with pytest.raises(TimeoutError):
      door.accept(0.01)


def test_closing_ends_waiting_connections_and_accept(server):
  door = Door(server, _greet, name="test")
  silent = socket.create_connection(server.getsockname())
  waiter = threading.Thread(target=lambda: got.append(door.accept()))
  got: list = []
  waiter.start()
  door.close()
  waiter.join(30)
  assert got == [None]
  server.close()
  # It is reset if it was not accepted yet.
  with silent, contextlib.suppress(ConnectionResetError):
    assert silent.recv(1) == b""


def test_ranks_join_among_silent_connections(server):
  address = server.getsockname()
  silent = [socket.create_connection(address) for _ in range(100)]
  links = []
  rank = threading.Thread(
    target=lambda: links.append(join(address, 1, 2, KEY, digest="x"))
  )
  rank.start()
  star = Star.gather(server, 2, KEY, digest="x")
  rank.join(60)
  assert list(star.links) == [1] and len(links) == 1
  star.close()
  links[0].close()
  for link in silent:
    link.close()
