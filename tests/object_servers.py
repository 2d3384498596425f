"""Servers of object storage on this machine, and a storage with faults.

moto serves S3, gcp-storage-emulator serves GCS; both are in the extra `dev`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from ringjax import paths
from ringjax.paths import object_store

BUCKET = "ringjax-test"


@contextlib.contextmanager
def served(scheme: str) -> Iterator[str]:
  """Address of a new bucket of an emulator, or of objects in memory."""
  if scheme == "memory":
    yield f"memory://{BUCKET}"
    store = object_store.store_of("memory")
    for address in store.find(f"memory://{BUCKET}"):
      store.delete(address)
    return
  serve = {"s3": _s3, "gs": _gs}[scheme]
  object_store.store_of.cache_clear()
  with serve() as settings, mock.patch.dict(os.environ, settings):
    if scheme == "s3":
      object_store.store_of("s3")._files.mkdir(BUCKET)
    yield f"{scheme}://{BUCKET}"
  object_store.store_of.cache_clear()


@contextlib.contextmanager
def _s3() -> Iterator[dict[str, str]]:
  """Runs moto's server; yields the environment of its clients."""
  pytest.importorskip("s3fs")
  server_module = pytest.importorskip("moto.server")
  server = server_module.ThreadedMotoServer(
    ip_address="127.0.0.1", port=0, verbose=False
  )
  server.start()
  host, port = server.get_host_and_port()
  # Servers of one process have the same buckets.
  reset = urllib.request.Request(
    f"http://{host}:{port}/moto-api/reset", method="POST"
  )
  urllib.request.urlopen(reset).close()
  try:
    yield {
      "AWS_ENDPOINT_URL": f"http://{host}:{port}",
      "AWS_ACCESS_KEY_ID": "test",
      "AWS_SECRET_ACCESS_KEY": "test",
      "AWS_DEFAULT_REGION": "us-east-1",
    }
  finally:
    server.stop()


@contextlib.contextmanager
def _gs() -> Iterator[dict[str, str]]:
  """Runs the emulator of GCS; yields the environment of its clients."""
  pytest.importorskip("gcsfs")
  emulator = pytest.importorskip("gcp_storage_emulator.server")
  server = emulator.create_server("127.0.0.1", 0, in_memory=True)
  server.start()
  port = server._api._httpd.socket.getsockname()[1]
  address = f"http://127.0.0.1:{port}"
  request = urllib.request.Request(
    f"{address}/storage/v1/b?project=test",
    data=json.dumps({"name": BUCKET}).encode(),
    headers={"Content-Type": "application/json"},
  )
  urllib.request.urlopen(request).close()
  try:
    yield {"STORAGE_EMULATOR_HOST": address}
  finally:
    server.stop()


class Faulty:
  """A file system of fsspec whose requests fail as `fault` says.

  Attributes:
    requests: (name of the method, address) of each request.
    ranges: (address, first byte, end) of each read of a range.
  """

  def __init__(self, files: Any, fault: Callable[[int, str, str], None]):
    self._files, self._fault = files, fault
    self._lock = threading.Lock()
    self.requests: list[tuple[str, str]] = []
    self.ranges: list[tuple[str, int, int]] = []

  def __getattr__(self, name: str) -> Any:
    method = getattr(self._files, name)

    def request(*args: Any, **options: Any) -> Any:
      address = args[1] if name == "put_file" else args[0]
      with self._lock:
        number = len(self.requests)
        self.requests.append((name, address))
        if name == "cat_file" and options:
          self.ranges.append((address, options["start"], options["end"]))
      self._fault(number, name, address)
      return method(*args, **options)

    return request


@contextlib.contextmanager
def with_faults(
  fault: Callable[[int, str, str], None] = lambda number, name, address: None,
) -> Iterator[Faulty]:
  """Passes each request of memory:// to `fault` first, which may raise."""
  store = paths.ObjectPath("memory://x").store
  faulty = Faulty(store._files, fault)
  with (
    mock.patch.object(store, "_files", faulty),
    mock.patch.object(object_store, "FIRST_PAUSE_S", 0),
  ):
    yield faulty
