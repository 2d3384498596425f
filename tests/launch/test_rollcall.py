"""launch.rollcall: all come, or all say who did not."""

from __future__ import annotations

import concurrent.futures
import socket

import pytest

from launch import rollcall
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
      rollcall.call(f"localhost:{port}", processes, number, timeout_s)
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
  ],
)
def test_who_does_not_agree(port, callers, words):
  said = call_all(port, *callers, timeout_s=5.0)
  assert words in (said[0] or "")


def test_strangers_are_not_counted(port):
  def stranger() -> None:
    while True:
      try:
        with socket.create_connection(("localhost", port), timeout=5) as line:
          line.sendall(b"GET / HTTP/1.1\r\n\r\n")
          line.recv(1)
          return
      except OSError:
        continue

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    first = pool.submit(call_all, port, (0, 2), timeout_s=60)
    pool.submit(stranger).result()
    assert call_all(port, (1, 2), timeout_s=60) == [None]
    assert first.result() == [None]


def test_a_port_that_is_taken():
  with socket.create_server(("", 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(OptionError, match=f"port {port}"):
      rollcall.call(f"localhost:{port}", 2, 0, 5.0)


@pytest.mark.parametrize("address", ["", "host", "host:", "host:0", ":9"])
def test_an_address_that_is_none(address):
  with pytest.raises(OptionError, match="HOST:PORT"):
    rollcall.call(address, 2, 0, 1.0)
