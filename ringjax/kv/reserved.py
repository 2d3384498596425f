"""Arrays on CPUs whose memory is resident only where it was written.

Guarantees: a reserved array reads as zeros until it is written; XLA owns its
buffer, so that a donated update happens in place, as of any array. Nothing
here writes where an executable may write: memory is populated, which changes
no byte, or released, of rows that nobody reads.
Cost: a page fault, or one `madvise`, for each of a row's tensors.
Memory: address space of the whole array; of resident memory what was written
or mapped, in pages of the operating system.

XLA refuses to update an imported buffer in place: it would copy an array that
comes from `mmap`. So the buffer is XLA's own, the result of a call that writes
nothing, and what the allocator has touched of it is released.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import sys
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from ringjax.errors import MemoryEstimateError, OptionError

_TARGET = "ringjax_reserve"
# Of Linux' <sys/mman.h>.
_DONTNEED, _NOHUGEPAGE, _POPULATE_WRITE = 4, 15, 23
_EXTENSION_METADATA = 1
# Of XLA's foreign function interface, which a call of another one refuses.
_MAJOR, _MINOR = 0, 3


class _Extension(ctypes.Structure):
  _fields_ = (
    ("size", ctypes.c_size_t),
    ("type", ctypes.c_int),
    ("next", ctypes.c_void_p),
  )


class _Version(ctypes.Structure):
  _fields_ = (
    ("size", ctypes.c_size_t),
    ("extension", ctypes.c_void_p),
    ("major", ctypes.c_int),
    ("minor", ctypes.c_int),
  )


class _Metadata(ctypes.Structure):
  _fields_ = (("size", ctypes.c_size_t), ("version", _Version))


class _MetadataExtension(ctypes.Structure):
  _fields_ = (("base", _Extension), ("metadata", ctypes.POINTER(_Metadata)))


class _Frame(ctypes.Structure):
  _fields_ = (
    ("size", ctypes.c_size_t),
    ("extension", ctypes.POINTER(_MetadataExtension)),
  )


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))
def _handler(frame: Any) -> None:
  """Leaves its result as it is; says which interface it is made for."""
  extension = frame.contents.extension
  if extension and extension.contents.base.type == _EXTENSION_METADATA:
    version = extension.contents.metadata.contents.version
    version.major, version.minor = _MAJOR, _MINOR


@functools.cache
def _registered() -> None:
  jax.ffi.register_ffi_target(
    _TARGET, jax.ffi.pycapsule(_handler), platform="cpu"
  )


@functools.cache
def _libc() -> Any:
  libc = ctypes.CDLL(None, use_errno=True)
  libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
  libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
  return libc


def _inside(start: int, size: int) -> tuple[int, int]:
  """The pages that are whole in a range: where they begin, and their bytes."""
  page = mmap.PAGESIZE
  first = -(-start // page) * page
  return first, max(0, (start + size) // page * page - first)


def _around(start: int, size: int) -> tuple[int, int]:
  """The pages that a range touches."""
  page = mmap.PAGESIZE
  first = start // page * page
  return first, -(-(start + size) // page) * page - first


def _blank(start: int, size: int) -> None:
  """Makes a range zeros, and releases what is whole pages of it."""
  first, many = _inside(start, size)
  if not many:
    ctypes.memset(start, 0, size)
    return
  ctypes.memset(start, 0, first - start)
  ctypes.memset(first + many, 0, start + size - first - many)
  _libc().madvise(first, many, _NOHUGEPAGE)
  if _libc().madvise(first, many, _DONTNEED):
    raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED)")


def reserved_zeros(like: PyTree) -> PyTree:
  """Zeros of these shapes, dtypes and shardings that take no memory yet.

  Args:
    like: a tree of arrays, or of what stands for them, on CPUs.

  Raises:
    OptionError: on another system than Linux.
    MemoryEstimateError: more address space than the system gives one array.
  """
  if not sys.platform.startswith("linux"):
    raise OptionError(
      "layout",
      f"reserved rows, on {sys.platform}",
      "Linux, whose madvise releases memory",
      "pass layout='doubling' or 'pages'",
    )
  _registered()
  return jax.tree.map(_reserved, like)


def _reserved(like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
  sharding, shape = like.sharding, tuple(like.shape)
  part = shape if sharding is None else sharding.shard_shape(shape)
  call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(part, like.dtype))
  make = lambda: call()
  if isinstance(sharding, NamedSharding):
    make = jax.shard_map(
      make,
      mesh=sharding.mesh,
      in_specs=(),
      out_specs=sharding.spec,
      check_vma=False,
    )
  try:
    made = jax.block_until_ready(jax.jit(make)())
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    size = np.dtype(like.dtype).itemsize * math.prod(part)
    raise MemoryEstimateError(
      "reserved rows",
      f"{size:,} bytes of address space in one array",
      "no more than memory and swap, as vm.overcommit_memory=0 wants",
      "pass fewer rows=, a smaller longest=, or set vm.overcommit_memory=1",
    ) from error
  for shard in made.addressable_shards if made.size else ():
    _blank(shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
  return made


class _Tensor(NamedTuple):
  """One array's part on one device.

  Fields:
    start: its address.
    layers: L.
    layer_bytes: of a layer.
    page_bytes: of a page of one layer.
    pages: N.
  """

  start: int
  layers: int
  layer_bytes: int
  page_bytes: int
  pages: int


class ReservedRows:
  """The memory of rows in reserved arrays [L, rows n, ...]; see `RowMemory`.

  Attributes:
    row_bytes: address space of a row, all layers and devices.
    group_bytes: of one page group of a row, all layers and devices.
  """

  def __init__(self, arrays: PyTree, each: int):
    """Of arrays that `reserved_zeros` made.

    Args:
      arrays: a tree; donated updates of them keep their addresses.
      each: pages of a row on each device, n.
    """
    self._each = each
    self._tensors = []
    for x in jax.tree.leaves(arrays):
      for part in x.addressable_shards if x.size else ():
        data = part.data
        layers, pages = data.shape[:2]
        self._tensors.append(
          _Tensor(
            start=data.unsafe_buffer_pointer(),
            layers=layers,
            layer_bytes=data.nbytes // layers,
            page_bytes=data.nbytes // (layers * pages),
            pages=pages,
          )
        )
    self.group_bytes = sum(t.layers * t.page_bytes for t in self._tensors)
    self.row_bytes = self.group_bytes * each
    # Linux before 5.14 maps on the first write only.
    self._populates = True

  def map(self, slot: int, first: int, last: int) -> bool:
    """Makes pages of a row resident; whether the system had memory."""
    for start, size in self._ranges(slot, first, last):
      if not self._populates:
        return True
      if _libc().madvise(*_around(start, size), _POPULATE_WRITE):
        error = ctypes.get_errno()
        # EINVAL: an advice that the system does not know.
        if error != 22:
          return False
        self._populates = False
    return True

  def unmap(self, slot: int, first: int, last: int) -> None:
    """Releases pages of a row: the system's pages that are whole in them."""
    for start, size in self._ranges(slot, first, last):
      at, many = _inside(start, size)
      if many and _libc().madvise(at, many, _DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED)")

  def resident(self) -> int:
    """Bytes of the arrays that are in memory now."""
    total = 0
    for t in self._tensors:
      at, size = _around(t.start, t.layers * t.layer_bytes)
      step = 1 << 30
      for offset in range(0, size, step):
        many = min(step, size - offset)
        found = np.zeros(many // mmap.PAGESIZE, np.uint8)
        if _libc().mincore(at + offset, many, found.ctypes.data):
          raise OSError(ctypes.get_errno(), "mincore")
        total += int((found & 1).sum()) * mmap.PAGESIZE
    return total

  def reserved(self) -> int:
    """Bytes of address space."""
    return sum(t.layers * t.layer_bytes for t in self._tensors)

  def at(self, arrays: PyTree) -> bool:
    """Whether these arrays are still where they were made."""
    found = [
      part.data.unsafe_buffer_pointer()
      for x in jax.tree.leaves(arrays)
      for part in (x.addressable_shards if x.size else ())
    ]
    return found == [t.start for t in self._tensors]

  def _ranges(self, slot: int, first: int, last: int) -> Any:
    for t in self._tensors:
      begin = (slot * self._each + first) * t.page_bytes
      for layer in range(t.layers):
        start = t.start + layer * t.layer_bytes + begin
        yield start, (last - first) * t.page_bytes
