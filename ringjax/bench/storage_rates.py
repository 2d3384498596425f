"""Measures a machine's three tiers: device, host and disk, for offloading.

Guarantees: the file that is written and read is removed again; it is synced
before it is read, and its pages are dropped from the system's cache where the
system allows that. Rates are of the fastest of several rounds.

On CPU devices "device" and "host" are one memory: each counts as half of it,
and a copy between them is a copy within it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.bench import timing
from ringjax.checks import integer, positive_int
from ringjax.errors import OptionError
from ringjax.ops.attention.api import blockwise_attention
from ringjax.parallel import memory
from ringjax.plan.flexgen.offload_tiers import OffloadMachine

_LEAST_BYTES = 1 << 20
_CHUNK_BYTES = 16 << 20
# Rows of a prompt and of a token, side of a matrix, tokens, by platform.
_SIZES = {"cpu": (512, 16, 1024, 256)}
_LARGE = (4096, 64, 8192, 2048)
_HEADS, _HEAD_DIM, _KEYS_ROWS = 8, 64, 8


def measure(
  folder: str,
  *,
  nbytes: int = 256 << 20,
  rounds: int = 3,
  stream: TextIO | io.TextIOBase | None = None,
) -> OffloadMachine:
  """Measures the first device, the host and the disk of a folder.

  Args:
    folder: Folder in which a file of `nbytes` is written and read.
    nbytes: Bytes of the file, and of copies between host and device.
    rounds: Timed runs of each.
    stream: Stream for progress; default stderr.

  Raises:
    OptionError: If the folder does not exist or is full, or a count is too
      small.
  """
  integer("nbytes", nbytes, least=_LEAST_BYTES)
  positive_int("rounds", rounds)
  if not os.path.isdir(folder):
    raise OptionError(
      "folder", repr(folder), "a directory", "pass one of the disk to measure"
    )
  free = shutil.disk_usage(folder).free
  if free < 2 * nbytes:
    raise OptionError(
      "folder",
      f"{folder} with {free / 1e6:,.0f} MB free",
      f"{2 * nbytes / 1e6:,.0f} MB",
      "free some, or measure with fewer bytes",
    )
  device = jax.devices()[0]
  dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
  rng = np.random.default_rng(0)
  data = rng.integers(0, 255, nbytes, np.uint8)
  put = lambda shape: jax.device_put(
    rng.standard_normal(shape, np.float32), device
  ).astype(dtype)
  prompt_rows, token_rows, side, tokens = _SIZES.get(device.platform, _LARGE)
  weight = put((side, side))
  product = jax.jit(lambda x, w: x @ w)
  q = put((1, tokens, _HEADS, _HEAD_DIM))
  attend = jax.jit(functools.partial(blockwise_attention, is_causal=False))
  query = put((_KEYS_ROWS, _HEADS, 1, _HEAD_DIM))
  keys = put((_KEYS_ROWS, _HEADS, 4 * tokens, _HEAD_DIM))
  host_query, host_keys = (
    np.asarray(query, np.float32),
    np.asarray(keys, np.float32),
  )
  device_data = jax.device_put(data, device)
  if device.platform == "cpu":
    # Without the copy, host and device arrays would share their bytes.
    to_device = lambda: jax.device_put(data.copy(), device)
    from_device = lambda: np.array(device_data)
  else:
    # A new array each time: JAX caches the host copy of an array.
    increment = jax.jit(lambda x: x + jnp.uint8(1))
    to_device = lambda: jax.device_put(data, device)
    from_device = lambda: np.asarray(increment(device_data))

  try:
    handle, path = tempfile.mkstemp(dir=folder, suffix=".rates")
    os.close(handle)
  except OSError as error:
    raise OptionError(
      "folder",
      f"{folder}: {error.strerror}",
      "one that can be written",
      "pass another folder",
    ) from None
  try:
    _write(path, data)
    runs: dict[str, Callable[[], Any]] = {
      "disk write": lambda: _write(path, data),
      "disk read": lambda: _read(path),
      "to device": to_device,
      "from device": from_device,
      "prefill": _call(product, put((prompt_rows, side)), weight),
      "decode": _call(product, put((token_rows, side)), weight),
      "attention": _call(attend, q, q, q),
      "token": _call(jax.jit(_one_token), query, keys),
      "host": lambda: _one_token_on_host(host_query, host_keys),
    }
    timings = timing.timed(runs, rounds, stream)
  finally:
    with contextlib.suppress(OSError):
      os.unlink(path)

  # The minimum: other work on the machine can only add time.
  fastest_s = lambda name: min(timings[name].seconds)
  back = nbytes / fastest_s("from device")
  product_flops = lambda name, rows: 2 * rows * side**2 / fastest_s(name)
  token_flops = 4 * keys.size
  written = nbytes / fastest_s("disk write")
  device_bytes, host_bytes = _memory_bytes(device)
  return OffloadMachine(
    name="here",
    device_bytes=device_bytes,
    host_bytes=host_bytes,
    disk_bytes=float(free),
    to_device=nbytes / fastest_s("to device"),
    from_device_cache=back,
    from_device_hidden=back,
    disk_read=nbytes / fastest_s("disk read"),
    disk_write_cache=written,
    disk_write_hidden=written,
    disk_write_decode=written,
    prefill_flops=product_flops("prefill", prompt_rows),
    decode_flops=product_flops("decode", token_rows),
    prefill_attention_flops=4 * q.size * tokens / fastest_s("attention"),
    decode_attention_flops=token_flops / fastest_s("token"),
    host_flops=token_flops / fastest_s("host"),
    source=(
      f"measured: {device.device_kind}, {jnp.dtype(dtype).name}, the disk of "
      f"{os.path.abspath(folder)} with {nbytes >> 20} MiB, the least of "
      f"{rounds} rounds"
      + ("; half of the memory each" if device.platform == "cpu" else "")
    ),
  )


def _call(f: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
  return lambda: f(*arguments)


def _one_token(query: jax.Array, keys: jax.Array) -> jax.Array:
  """Attention of one query of each row; the keys are the values, too."""
  scores = jnp.einsum("BNTH,BNSH->BNTS", query, keys)
  weights = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(keys.dtype)
  return jnp.einsum("BNTS,BNSH->BNTH", weights, keys)


def _one_token_on_host(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
  scores = query @ keys.swapaxes(-1, -2)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  return (weights / weights.sum(-1, keepdims=True)) @ keys


def _write(path: str, data: np.ndarray) -> None:
  with open(path, "wb", buffering=0) as file:
    for start in range(0, len(data), _CHUNK_BYTES):
      file.write(data[start : start + _CHUNK_BYTES].data)
    os.fsync(file.fileno())
    if hasattr(os, "posix_fadvise"):
      os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: str) -> None:
  space = bytearray(_CHUNK_BYTES)
  with open(path, "rb", buffering=0) as file:
    while file.readinto(space):
      pass
    # Drop the pages again for the next round.
    if hasattr(os, "posix_fadvise"):
      os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _memory_bytes(device: jax.Device) -> tuple[float, float]:
  """Bytes of (device, host) memory; half of the machine's each on CPUs."""
  sharing = 2 if device.platform == "cpu" else 1
  total = memory.device_memory(device, sharing).total
  host = memory.host_total_bytes()
  return float(total or 0), float((host or 0) // sharing)
