"""Ranks of a window of weights as threads, with sockets between them."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading

from ringjax.infer.tpi_llm import process_star, tensor_window

KEY = bytes(range(32))
# Nothing here takes long; what hangs ends.
PATIENCE_S = 300


@dataclasses.dataclass
class Ranks:
  """A group of threads: rank 0's window, and what became of the others."""

  window: tensor_window.TensorWindow
  errors: dict
  links: dict
  threads: list


@contextlib.contextmanager
def ranks(path, shares, windows=None, *, patience_s=60.0, wrap=None, **options):
  """A `TensorWindow` of as many ranks as there are shares."""
  size = len(shares)
  windows = windows or [2] * size
  errors, links = {}, {}
  server = socket.create_server(("127.0.0.1", 0))

  def run(rank: int) -> None:
    try:
      link = process_star.join(
        server.getsockname(), rank, size, KEY, patience_s=patience_s, join_s=60
      )
      links[rank] = link
      if wrap is not None:
        wrap(rank, link)
      tensor_window.serve_rank(path, link, rank, window=windows[rank])
    except BaseException as error:
      errors[rank] = error

  threads = [
    threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
    for rank in range(1, size)
  ]
  for thread in threads:
    thread.start()
  with server:
    group = process_star.Star.gather(
      server, size, KEY, patience_s=patience_s, join_s=60
    )
  window = tensor_window.TensorWindow(
    path, group, shares=shares, window=windows[0], **options
  )
  with window:
    yield Ranks(window, errors, links, threads)
  for thread in threads:
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
