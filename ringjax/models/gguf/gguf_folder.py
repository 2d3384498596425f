"""A GGUF file in the place of a model's folder.

Guarantees: numbers are those that the package gguf dequantises, rounded once to
the requested dtype.
Memory: on the host, some tensors as float32 that are in flight to the devices.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from ringjax import fetched_models
from ringjax.data.gguf.gguf_file import GgufFiles, is_gguf, open_gguf, package
from ringjax.data.gguf.gguf_tokenizer import tokenizer_files
from ringjax.errors import CheckpointMismatchError, TokenizerError
from ringjax.models.gguf.architectures import check_factors, config_of
from ringjax.models.gguf.blocks import PLAIN
from ringjax.models.gguf.sources import Source, sources_of
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.header import TensorInfo
from ringjax.models.hf.safe_files import identity


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufFolder(Folder):
  """A model in GGUF files, with the names of a Hugging Face folder.

  Attributes:
    gguf: The GGUF files.
    sources: Source of each tensor in the files.
  """

  gguf: GgufFiles
  sources: Mapping[str, Source]

  def companions(self) -> dict[str, Callable[[pathlib.Path], None]]:
    """Functions that write side files; the tokenizer's are from metadata."""
    writers = super().companions()
    try:
      files = tokenizer_files(self.gguf.metadata)
    except TokenizerError as error:
      warnings.warn(
        f"no tokenizer is written: {error}", RuntimeWarning, stacklevel=2
      )
      return writers
    for name, content in files.items():
      writers[name] = functools.partial(_write, name, content)
    return writers

  def with_stored(self) -> GgufFolder:
    """The folder with all tensors also as they are stored, see `stored_name`.

    Block types are bytes, uint8 [..., R, bytes], others plain numbers.
    """
    infos: dict[str, TensorInfo] = {}
    for name, source in self.sources.items():
      for n, part in enumerate(source.names):
        infos[stored_name(name, n)] = _stored(self.gguf, part, source.index)
    return dataclasses.replace(self, tensors=self.tensors | infos)

  def type_name(self, number: int) -> str:
    """The name of a type by ggml's number."""
    return package().GGMLQuantizationType(number).name

  def read(
    self,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    *,
    host_bytes: int = 256 << 20,
  ) -> dict[str, Shaped[Array, " ..."]]:
    """Dequantises tensors; see `Folder.read`."""
    del host_bytes
    wanted = {name: self._target(name, t) for name, t in targets.items()}
    self.unchanged(wanted)
    arrays: dict[str, jax.Array] = {}
    for name, target in wanted.items():
      plain = name in self.sources
      with np.errstate(over="ignore", invalid="ignore"):
        x = self.raw(name) if plain else super().raw(name)
        x = x.astype(target.dtype, copy=False)
      if not np.isfinite(x.astype(np.float32, copy=False)).all():
        raise CheckpointMismatchError(
          self.sources[name].name if plain else name,
          f"values that are not finite as {x.dtype}",
          "finite values",
          "download the file again, or take a wider dtype",
        )
      arrays[name] = jax.make_array_from_callback(
        x.shape, target.sharding, lambda index, x=x: x[index]
      )
    self.unchanged(wanted)
    return arrays

  def raw(self, name: str) -> Shaped[np.ndarray, ...]:
    """The dequantised numbers of a tensor, float32."""
    return self.sources[name].floats(self.gguf)


def stored_name(name: str, part: int) -> str:
  """Name of a part of a tensor as it is stored, from a Hugging Face name."""
  return f"{name} as stored, {part}"


def _stored(files: GgufFiles, name: str, index: int | None) -> TensorInfo:
  """Place of the bytes of a tensor, or of one index of its first axis."""
  tensor = files.tensors[name]
  shape, dtype = tensor.shape, jnp.dtype(jnp.uint8)
  if tensor.type in PLAIN:
    dtype = jnp.dtype(PLAIN[tensor.type])
  else:
    rows = int(np.prod(shape[:-1]))
    shape = (*shape[:-1], tensor.nbytes // rows)
  nbytes, offset = tensor.nbytes, tensor.offset
  if index is not None:
    nbytes //= shape[0]
    shape, offset = shape[1:], offset + index * nbytes
  return TensorInfo(tensor.file, dtype, shape, nbytes, offset)


def _write(name: str, content: bytes, to: pathlib.Path) -> None:
  (to / name).write_bytes(content)


def open_model(path: str | os.PathLike[str]) -> Folder:
  """A model on disk: a Hugging Face folder, GGUF files, or a fetched name.

  Raises:
    CheckpointFormatError, ConfigError, UnsafeFormatError: See `Folder.open`.
    OptionError: If it is a GGUF file and the package gguf is not installed.
    StorageError: If an object can't be read.
  """
  path = fetched_models.resolve(path)
  if not isinstance(path, str | os.PathLike) or not is_gguf(path):
    return Folder.open(path)
  files = open_gguf(path)
  config = config_of(files)
  check_factors(files, config)
  sources = sources_of(files)
  float32 = jnp.dtype(jnp.float32)
  tensors = {
    name: TensorInfo(
      files.tensors[s.name].file,
      float32,
      s.shape,
      4 * int(np.prod(s.shape)),
      files.tensors[s.name].offset,
    )
    for name, s in sources.items()
  }
  return GgufFolder(
    path=files.path,
    config=config,
    tensors=tensors,
    files={name: identity(x) for name, x in files.status.items()},
    gguf=files,
    sources=sources,
  )
