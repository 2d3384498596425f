"""Checks a Hugging Face folder or a GGUF file, and writes a folder anew.

  python -m launch.convert --model=DIR --check
      Whether ringjax can load it: config.json, names, shapes and numbers.
  python -m launch.convert --model=DIR --out=DIR2 --dtype=bfloat16
      The same model in another dtype, in files of --max_shard_bytes. Weights
      of 4 or 8 bits become floats (bfloat16 without --dtype); of a model of
      text and images the text model is written.

Layers that only guess further tokens are copied from plain weights, and left
out, with the config's word on them, of quantised ones. Weights go tensor by
tensor: host memory holds one file to write, and what is
read for it. The new folder appears when it is complete. The tokenizer's and
other settings go along, by name; nothing in a folder is ever run.
"""

from __future__ import annotations

import collections
import functools
import itertools
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.typing import DTypeLike

from launch import common, console
from launch.flag_helpers import FlagHelper
from ringjax import models
from ringjax.data import Tokenizer
from ringjax.errors import OptionError
from ringjax.models.checkpoint import (
  EMBEDDING,
  check_heads,
  check_unpacked,
  stored_dtype,
)
from ringjax.models.contents import Contents, contents, read_source
from ringjax.models.gguf.gguf_folder import open_model
from ringjax.models.hf import save
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.packed import Packed
from ringjax.models.hf.packings import packing
from ringjax.models.hf.tensors import CheckpointTensor, parameters
from ringjax.models.origin import Origin, origin_of

NAME = "convert"
DTYPES = ("bfloat16", "float16", "float32")


def define(values: flags.FlagValues) -> None:
  """The flags of this script."""
  new = FlagHelper(values)
  new.model("model", None, "Folder to read.")
  new.strict()
  new.path("out", None, "Folder to make.")
  new.boolean("check", False, "Only look, and write nothing.")
  flags.DEFINE_enum(
    "dtype",
    None,
    DTYPES,
    "Of the weights; default: as they are. What a model needs in float32 "
    "stays.",
    flag_values=values,
  )
  new.whole(
    "max_shard_bytes", 2 * 10**9, "Of a file that holds more than one tensor."
  )


class Conversion(NamedTuple):
  """What is read, and as what.

  Fields:
    source: the config.json of what is written.
    family: its family's name.
    contents: the tensors of the model, and the others.
    origin: the folder, and which others are copied.
    targets: shape and dtype of what they are read from, by its name there.
    dtypes: of what packed tensors become, by their names.
    parameters: numbers that are learned.
  """

  source: dict[str, Any]
  family: str
  contents: Contents
  origin: Origin
  targets: dict[str, jax.ShapeDtypeStruct]
  dtypes: dict[str, Any]
  parameters: int


def run(
  values: flags.FlagValues,
  *,
  stdout: TextIO | None = None,
  stderr: TextIO | None = None,
) -> int:
  """Does what the flags say; the exit status."""
  stdout = sys.stdout if stdout is None else stdout
  screen = console.Screen(NAME, stderr)
  try:
    _check(values)
    found = _conversion(values.model, values.dtype, values.strict)
    if values.check:
      for _ in _tensors(found, screen):
        pass
    else:
      _convert(values, found, screen)
    lines = _summary(found, values)
  except KeyboardInterrupt:
    screen.error("interrupted; nothing was written")
    return console.INTERRUPTED
  except Exception as error:
    knobs = "pass a smaller --max_shard_bytes, or use a machine with more"
    return screen.failed(error, "reading tensors", knobs)
  screen.end()
  print("\n".join(lines), file=stdout, flush=True)
  return 0


def _check(values: flags.FlagValues) -> None:
  if values.model is None:
    raise app.UsageError("--model is required, e.g. --model=DIR; see --help.")
  if (values.out is None) != values.check:
    got = "--check and --out" if values.check else "neither --out nor --check"
    raise app.UsageError(f"got {got}; wanted one of them; see --help.")
  if values.check or not os.path.exists(values.out):
    return
  if not os.path.isdir(values.out) or os.listdir(values.out):
    raise OptionError(
      "--out", values.out, "a new or an empty folder", "pass another --out"
    )


def _conversion(path: str, dtype: str | None, strict: bool) -> Conversion:
  """Opens a folder and compares it with the model that its config means."""
  folder = open_model(path)
  _, source, family = read_source(folder.config, strict=strict)
  empty = models.abstract(source, dtype=dtype or jnp.float32)
  found = contents(folder, family, empty, source)
  params = parameters(empty)
  cpu = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
  targets: dict[str, jax.ShapeDtypeStruct] = {}
  dtypes: dict[str, Any] = {}
  for tensor in found.tensors:
    becomes = params[tensor.targets[0][0]].get_value().dtype
    if isinstance(tensor.form, Packed):
      said = stored_dtype(folder, source) if dtype is None else becomes
      dtypes[tensor.name] = jnp.dtype(said)
    for piece in tensor.pieces:
      wanted = piece.dtype or becomes
      if piece.dtype is None and dtype is None:
        wanted = folder.tensors[piece.name].dtype
      if isinstance(wanted, str):
        # Without an equivalent in NumPy; the reader says so.
        wanted = jnp.float32
      targets[piece.name] = jax.ShapeDtypeStruct(
        piece.shape, wanted, sharding=cpu
      )
  return Conversion(
    source,
    empty.config.family,
    found,
    origin_of(
      found,
      whole=folder.config.get("model_type") in family.types,
      packed=packing(folder.config) is not None,
    ),
    targets,
    dtypes,
    sum(p.get_value().size for p in params.values()),
  )


def _tensors(
  found: Conversion, screen: console.Screen
) -> Iterator[tuple[str, np.ndarray | jax.Array]]:
  """All tensors, one after the other; some bytes of them are read at once."""
  have = found.contents
  total = sum(map(have.nbytes, have.tensors))
  screen.begin(f"reading {len(have.tensors)} tensors", total, "bytes")
  done = 0
  targets = lambda t: {p.name: found.targets[p.name] for p in t.pieces}
  for t, x in have.read(targets):
    floats = _floats(t, x, found.dtypes.get(t.name))
    if t.targets[0][0] == EMBEDDING:
      check_heads(have.folder, have.heads, floats)
    yield t.name, floats
    done += have.nbytes(t)
    screen.at(done)


def _floats(
  tensor: CheckpointTensor, x: tuple[jax.Array, ...], dtype: Any
) -> jax.Array:
  """The floats of a tensor, from what is stored of it."""
  if not isinstance(tensor.form, Packed):
    return x[0]
  check_unpacked(tensor, x, dtype)
  return _unpack(tensor.form, dtype, x)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _unpack(
  form: Packed, dtype: DTypeLike, x: tuple[jax.Array, ...]
) -> jax.Array:
  return form.unpack(*x).astype(dtype)


def _convert(
  values: flags.FlagValues, found: Conversion, screen: console.Screen
) -> None:
  """Writes the new folder."""
  config = dict(found.source)
  if values.dtype is not None:
    config.pop("torch_dtype", None)
    config["dtype"] = values.dtype
  elif found.dtypes and not (config.get("dtype") or config.get("torch_dtype")):
    config["dtype"] = next(iter(found.dtypes.values())).name
  origin, read = found.origin, found.contents.folder

  def beside(folder: pathlib.Path) -> None:
    for write in read.companions().values():
      write(folder)

  save.write(
    values.out,
    origin.config(config, origin.copied),
    itertools.chain(_tensors(found, screen), origin.stored(origin.copied)),
    max_shard_bytes=values.max_shard_bytes,
    beside=beside,
  )


def _summary(found: Conversion, values: flags.FlagValues) -> list[str]:
  """The lines of the result."""
  have = found.contents
  folder = have.folder if values.check else Folder.open(values.out)
  kinds = collections.Counter(
    str(info.dtype)
    for name, info in folder.tensors.items()
    if name not in have.unused
  )
  weights = sum(info.nbytes for info in folder.tensors.values())
  lines = {
    "folder": f"{folder.path}",
    "family": f"{found.family}, {found.parameters:,} parameters",
    "tensors": f"{len(found.targets if values.check else folder.tensors)}, "
    + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    + ", all finite",
    "weights": f"{console.nbytes(weights)} in {len(folder.files)} "
    + ("file" if len(folder.files) == 1 else "files"),
    "others": ", ".join(folder.companions()) or "none",
  }
  kept = set() if values.check else set(found.origin.copied.values())
  for title, tensors in (
    ("kept unread", [n for n in have.unused if n in kept]),
    (
      "not used" if values.check else "left out",
      [n for n in have.unused if n not in kept],
    ),
  ):
    if tensors:
      more = " ..." if len(tensors) > 3 else ""
      lines[title] = f"{len(tensors)}, {', '.join(tensors[:3])}{more}"
  if (folder.path / "tokenizer.json").is_file():
    tokenizer = Tokenizer.load(folder.path, untrusted=True)
    chat = "a" if tokenizer.chat_template is not None else "no"
    lines["tokenizer"] = f"{tokenizer.vocab_size:,} ids, {chat} chat template"
  return [f"{name:9} {text}" for name, text in lines.items()]


def main(argv: Sequence[str]) -> int:
  common.refuse_rest(argv)
  # A conversion needs no accelerator, and must not take one from others.
  jax.config.update("jax_platforms", "cpu")
  return run(flags.FLAGS)


if __name__ == "__main__":
  define(flags.FLAGS)
  common.launch(NAME, main)
