"""launch.shared.rendezvous: all come, or all say who did not."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ipaddress
import socket
import time

import pytest

from launch.shared import rendezvous
from ringjax.errors import OptionError


@pytest.fixture
def port() -> int:
  with socket.socket() as free:
    free.bind(("localhost", 0))
    return free.getsockname()[1]


def call_all(port: int, *callers: tuple[int, int], timeout_s: float):
  """What each of (number, processes) gets: None, or its error."""

  def one(caller: tuple[int, int]) -> str | None:
    number, processes = caller
    try:
      rendezvous.call(f"localhost:{port}", processes, number, timeout_s)
    except OptionError as error:
      return f"{error}"
    return None

  with concurrent.futures.ThreadPoolExecutor(len(callers)) as pool:
    return list(pool.map(one, callers))


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_all_are_there(port, processes):
  # The last first: who comes early waits.
  callers = [(n, processes) for n in reversed(range(processes))]
  assert call_all(port, *callers, timeout_s=60) == [None] * processes
  # The port is free again.
  assert call_all(port, *callers, timeout_s=60) == [None] * processes


def test_all_learn_who_is_missing(port):
  said = call_all(port, (0, 4), (2, 4), timeout_s=1.0)
  for one in said:
    assert one is not None
    assert "2 of 4 within 1 s; missing: 1, 3" in one
    assert "--init_timeout" in one


def test_nobody_at_the_address(port):
  (said,) = call_all(port, (1, 2), timeout_s=0.5)
  assert said is not None
  assert f"localhost:{port}, where process 0 did not answer" in said


@pytest.mark.parametrize(
  ("callers", "words"),
  [
    (((0, 3), (1, 3), (1, 3)), "two processes with --process_id=1"),
    (((0, 2), (1, 3)), "--num_processes=2 in process 0, 3 in process 1"),
    (((0, 2), (5, 2)), "--process_id=5 of 2 processes"),
  ],
)
def test_who_does_not_agree_is_told_too(port, callers, words):
  said = call_all(port, *callers, timeout_s=30.0)
  assert [words in (one or "") for one in said] == [True] * len(callers)


def reach(port: int) -> socket.socket:
  """A line to process 0, once it listens."""
  end = time.monotonic() + 60
  while True:
    try:
      return socket.create_connection(("127.0.0.1", port), timeout=60)
    except OSError:
      if time.monotonic() > end:
        raise
      time.sleep(0.01)


def test_who_died_may_be_started_again(port):
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    first = pool.submit(call_all, port, (0, 3), timeout_s=60)
    with reach(port) as line:
      line.sendall(b'{"number": 1, "processes": 3}\n')
    said = call_all(port, (1, 3), (2, 3), timeout_s=60)
    assert [*first.result(), *said] == [None] * 3


@pytest.mark.long
def test_who_hung_up_was_not_there(port):
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    first = pool.submit(call_all, port, (0, 3), timeout_s=5.0)
    with reach(port) as line:
      line.sendall(b'{"number": 1, "processes": 3}\n')
    second = call_all(port, (2, 3), timeout_s=5.0)
    for one in (*first.result(), *second):
      assert "2 of 3 within 5 s; missing: 1" in (one or "")


@pytest.mark.parametrize(
  "words",
  [
    b"GET / HTTP/1.1\r\n\r\n",
    b'{"number": Infinity, "processes": 2}\n',
    b'{"number": true, "processes": 2}\n',
    b"[" * 4000 + b"\n",
    b"x" * 5000,
  ],
)
def test_strangers_are_not_counted(port, words):
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    first = pool.submit(call_all, port, (0, 2), timeout_s=60)
    with reach(port) as line, contextlib.suppress(ConnectionError):
      line.sendall(words)
      # It is hung up on.
      assert line.recv(1) == b""
    assert call_all(port, (1, 2), timeout_s=60) == [None]
    assert first.result() == [None]


def test_a_stranger_who_does_not_end_keeps_nobody_waiting(port):
  def drip() -> str:
    with reach(port) as line:
      for _ in range(1000):
        try:
          line.sendall(b" ")
        except OSError:
          return "cut off"
        time.sleep(0.02)
    return "went on"

  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    stranger = pool.submit(drip)
    (said,) = call_all(port, (0, 2), timeout_s=1.0)
    assert "1 of 2 within 1 s" in (said or "")
    assert stranger.result() == "cut off"


@pytest.mark.parametrize(
  ("host", "alone"),
  [
    ("localhost", True),
    ("127.0.0.1", True),
    ("a-pod-0.somewhere", False),
    ("10.0.0.7", False),
  ],
)
def test_who_is_let_in(port, host, alone):
  servers = rendezvous._servers(host, port)
  names = [server.getsockname()[0] for server in servers]
  for server in servers:
    server.close()
  assert names
  for name in names:
    address = ipaddress.ip_address(name)
    assert address.is_loopback if alone else address.is_unspecified


def test_a_port_that_is_taken():
  with socket.create_server(("", 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(OptionError, match=f"port {port}"):
      rendezvous.call(f"localhost:{port}", 2, 0, 5.0)


@pytest.mark.parametrize("address", ["", "host", "host:", "host:0", ":9"])
def test_an_address_that_is_none(address):
  with pytest.raises(OptionError, match="HOST:PORT"):
    rendezvous.call(address, 2, 0, 1.0)
