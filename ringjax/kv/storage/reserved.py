"""Arrays on CPUs whose memory is resident only where it was written.

Guarantees: a reserved array reads as zeros until it is written; XLA owns its
buffer, so that a donated update happens in place, as for any array. This module
never writes where an executable may write: it populates memory, which changes
no byte, or releases memory of rows that are not read.
Cost: a page fault, or one `madvise`, for each of a row's tensors.
Memory: address space for the whole array; resident memory for the parts that
were written or mapped, in pages of the operating system.

XLA does not update an imported buffer in place: it would copy an array that
comes from `mmap`. So XLA allocates the buffer, as the result of a call that
writes nothing, and the pages that its allocator has touched are released.
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
# Constants of Linux' <sys/mman.h>.
_DONTNEED, _NOHUGEPAGE, _POPULATE_WRITE = 4, 15, 23
_EXTENSION_METADATA = 1
# Version of XLA's foreign function interface; XLA refuses other versions.
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
  """FFI handler that writes nothing; reports its interface version if asked."""
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
def _libc() -> ctypes.CDLL:
  libc = ctypes.CDLL(None, use_errno=True)
  libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
  libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
  return libc


def _inside(start: int, size: int) -> tuple[int, int]:
  """Start and size in bytes of the pages that lie wholly in a range."""
  page = mmap.PAGESIZE
  first = -(-start // page) * page
  return first, max(0, (start + size) // page * page - first)


def _around(start: int, size: int) -> tuple[int, int]:
  """Start and size in bytes of the pages that a range touches."""
  page = mmap.PAGESIZE
  first = start // page * page
  return first, -(-(start + size) // page) * page - first


def _blank(start: int, size: int) -> None:
  """Fills a range with zeros; releases the whole pages in it."""
  first, whole_bytes = _inside(start, size)
  if not whole_bytes:
    ctypes.memset(start, 0, size)
    return
  ctypes.memset(start, 0, first - start)
  ctypes.memset(first + whole_bytes, 0, start + size - first - whole_bytes)
  _libc().madvise(first, whole_bytes, _NOHUGEPAGE)
  if _libc().madvise(first, whole_bytes, _DONTNEED):
    raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED)")


def reserved_zeros(like: PyTree) -> PyTree:
  """Allocate zeros that take no resident memory until they are written.

  Args:
    like: Tree of arrays on CPUs, or of their shapes, dtypes and shardings.

  Raises:
    OptionError: If the system is not Linux.
    MemoryEstimateError: If an array needs more address space than the system
      grants.
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
  shard_shape = shape if sharding is None else sharding.shard_shape(shape)
  call = jax.ffi.ffi_call(
    _TARGET, jax.ShapeDtypeStruct(shard_shape, like.dtype)
  )
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
    array = jax.block_until_ready(jax.jit(make)())
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    size = np.dtype(like.dtype).itemsize * math.prod(shard_shape)
    raise MemoryEstimateError(
      "reserved rows",
      f"{size:,} bytes of address space in one array",
      "no more than memory and swap, as vm.overcommit_memory=0 wants",
      "pass fewer rows=, a smaller longest=, or set vm.overcommit_memory=1",
    ) from error
  for shard in array.addressable_shards if array.size else ():
    _blank(shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
  return array


class _Tensor(NamedTuple):
  """One array's shard on one device.

  Fields:
    start: Address of the shard.
    layers: Number of layers, L.
    layer_bytes: Bytes of a layer.
    page_bytes: Bytes of a page of one layer.
    pages: Number of pages, N.
  """

  start: int
  layers: int
  layer_bytes: int
  page_bytes: int
  pages: int


class ReservedRows:
  """The memory of rows in reserved arrays [L, rows n, ...]; see `RowMemory`.

  Attributes:
    row_bytes: Address space of a row, all layers and devices.
    group_bytes: Address space of a row's page group, all layers and devices.
  """

  def __init__(self, arrays: PyTree, each: int):
    """Record the addresses of arrays that `reserved_zeros` made.

    Args:
      arrays: Tree of arrays; donated updates keep their addresses.
      each: Number of pages of a row on each device, n.
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
    # Linux before 5.14 can't populate; it maps pages on the first write.
    self._populates = True

  def map(self, slot: int, first: int, last: int) -> bool:
    """Make pages of a row resident; return whether the system had memory."""
    for start, size in self._ranges(slot, first, last):
      if not self._populates:
        return True
      if _libc().madvise(*_around(start, size), _POPULATE_WRITE):
        error = ctypes.get_errno()
        # EINVAL: the system does not know this advice.
        if error != 22:
          return False
        self._populates = False
    return True

  def unmap(self, slot: int, first: int, last: int) -> None:
    """Release a row's pages: the system's pages that lie wholly in them."""
    for start, size in self._ranges(slot, first, last):
      address, whole_bytes = _inside(start, size)
      if whole_bytes and _libc().madvise(address, whole_bytes, _DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED)")

  def resident(self) -> int:
    """Bytes of the arrays that are resident in memory now."""
    total = 0
    for t in self._tensors:
      address, size = _around(t.start, t.layers * t.layer_bytes)
      step = 1 << 30
      for offset in range(0, size, step):
        chunk_bytes = min(step, size - offset)
        page_flags = np.zeros(chunk_bytes // mmap.PAGESIZE, np.uint8)
        if _libc().mincore(
          address + offset, chunk_bytes, page_flags.ctypes.data
        ):
          raise OSError(ctypes.get_errno(), "mincore")
        total += int((page_flags & 1).sum()) * mmap.PAGESIZE
    return total

  def reserved(self) -> int:
    """Bytes of address space of the arrays."""
    return sum(t.layers * t.layer_bytes for t in self._tensors)

  def at(self, arrays: PyTree) -> bool:
    """Whether these arrays are still at the recorded addresses."""
    addresses = [
      part.data.unsafe_buffer_pointer()
      for x in jax.tree.leaves(arrays)
      for part in (x.addressable_shards if x.size else ())
    ]
    return addresses == [t.start for t in self._tensors]

  def _ranges(self, slot: int, first: int, last: int) -> Any:
    for t in self._tensors:
      begin = (slot * self._each + first) * t.page_bytes
      for layer in range(t.layers):
        start = t.start + layer * t.layer_bytes + begin
        yield start, (last - first) * t.page_bytes
