"""Checks a Hugging Face folder or a GGUF file, and writes a new folder.

  python -m launch.convert --model=DIR --check
      Whether ringjax can load it: config.json, names, shapes and numbers.
  python -m launch.convert --model=DIR --out=DIR2 --rope_scaling=yarn:factor=4
      The same weights, with a config.json of a longer context.
  python -m launch.convert --model=DIR --out=DIR2 --dtype=bfloat16
      The same model in another dtype, in files of --max_shard_bytes. Weights
      of 4 or 8 bits become floats (without --dtype bfloat16, and float32 those
      of a GGUF file); of a model of text and images the text model is written.

Layers that only predict further tokens are copied from plain weights. Of
quantised ones the first layer becomes floats, too, if rj.models.load reads it
with predict_layers=True; others are left out with their config entries, and
named. Weights go tensor by
tensor: host memory holds one file to write, and the tensors that are read for
it. The new folder appears when it is complete. Files of the tokenizer and other
settings are copied, by name; nothing in a folder is ever run.
"""

from __future__ import annotations

import collections
import functools
import itertools
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ringjax import fetched_models, models
from ringjax.data import Tokenizer
from ringjax.errors import CheckpointMismatchError, OptionError
from ringjax.models.checkpoint import (
  EMBEDDING,
  check_heads,
  check_unpacked,
  stored_dtype,
)
from ringjax.models.contents import Contents, contents
from ringjax.models.families import Family
from ringjax.models.gguf.gguf_folder import GgufFolder, open_model
from ringjax.models.hf import save
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.packed import Packed
from ringjax.models.hf.packings import packing
from ringjax.models.hf.tensors import CheckpointTensor, parameters
from ringjax.models.origin import Origin, origin_of
from ringjax.models.rope_scaling import read_extended
from ringjax.paths import as_path

from .shared import common, console
from .shared.flag_helpers import FlagHelper

NAME = "convert"
DTYPES = ("bfloat16", "float16", "float32")


def define(values: flags.FlagValues) -> None:
  """Defines the flags of this script."""
  new = FlagHelper(values)
  new.model("model", None, "Folder to read.")
  new.strict()
  new.rope_scaling()
  new.place("out", None, "Folder to make, or its address.")
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
  """Plan of a conversion: the tensors to read and their targets.

  Fields:
    source: Contents of the config.json to write.
    family: Name of the model's family.
    contents: Tensors of the model, and unused tensors of the folder.
    origin: Folder that is read, and the unused tensors that are copied.
    targets: Shape and dtype to read each stored tensor as, by its name.
    dtypes: Dtypes of unpacked tensors, by name.
    parameters: Number of parameters.
    predicting: Number of layers among them that predict further tokens.
  """

  source: dict[str, Any]
  family: str
  contents: Contents
  origin: Origin
  targets: dict[str, jax.ShapeDtypeStruct]
  dtypes: dict[str, Any]
  parameters: int
  predicting: int


def run(
  values: flags.FlagValues,
  *,
  stdout: TextIO | None = None,
  stderr: TextIO | None = None,
) -> int:
  """Checks or converts as the flags say; returns the exit status."""
  stdout = sys.stdout if stdout is None else stdout
  screen = console.Screen(NAME, stderr)
  knobs = "pass a smaller --max_shard_bytes, or use a machine with more"
  with console.Run(
    screen,
    knobs,
    doing="reading tensors",
    interrupted="interrupted; nothing was written",
  ) as run:
    _check(values)
    conversion = _conversion(values)
    if values.check:
      for _ in _tensors(conversion, screen):
        pass
    else:
      _convert(values, conversion, screen)
    lines = _summary(conversion, values)
  if run.status:
    return run.status
  screen.end()
  print("\n".join(lines), file=stdout, flush=True)
  return 0


def _check(values: flags.FlagValues) -> None:
  if values.model is None:
    raise app.UsageError("--model is required, e.g. --model=DIR; see --help.")
  if (values.out is None) != values.check:
    got = "--check and --out" if values.check else "neither --out nor --check"
    raise app.UsageError(f"got {got}; wanted one of them; see --help.")
  out = None if values.check else as_path(values.out)
  if out is None or not out.exists():
    return
  if not out.is_dir() or any(out.iterdir()):
    raise OptionError(
      "--out", values.out, "a new or an empty folder", "pass another --out"
    )


def _conversion(values: flags.FlagValues) -> Conversion:
  """Opens a folder and compares it with the model of its config."""
  dtype = values.dtype
  folder = open_model(fetched_models.resolve(values.model, "--model"))
  parsed, source, family = read_extended(
    folder.config, values.rope_scaling, strict=values.strict
  )
  packed = packing(folder.config) is not None
  # Plain weights of such a layer are copied as they are.
  predicts = packed and _reads_predicting(parsed, family, folder)
  empty = models.abstract(
    source, dtype=dtype or jnp.float32, predict_layers=predicts
  )
  model_contents = contents(folder, family, empty, source)
  params = parameters(empty)
  cpu = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
  targets: dict[str, jax.ShapeDtypeStruct] = {}
  dtypes: dict[str, Any] = {}
  for tensor in model_contents.tensors:
    param_dtype = params[tensor.targets[0][0]].get_value().dtype
    if isinstance(tensor.form, Packed):
      stored = stored_dtype(folder, source) if dtype is None else param_dtype
      dtypes[tensor.name] = jnp.dtype(stored)
    for piece in tensor.pieces:
      target_dtype = piece.dtype or param_dtype
      if piece.dtype is None and dtype is None:
        target_dtype = folder.tensors[piece.name].dtype
      if isinstance(target_dtype, str):
        # A dtype without an equivalent in NumPy: the reader raises an error.
        target_dtype = jnp.float32
      targets[piece.name] = jax.ShapeDtypeStruct(
        piece.shape, target_dtype, sharding=cpu
      )
  return Conversion(
    source,
    empty.config.family,
    model_contents,
    origin_of(
      model_contents,
      whole=folder.config.get("model_type") in family.types,
      packed=packed,
    ),
    targets,
    dtypes,
    sum(p.get_value().size for p in params.values()),
    int(predicts),
  )


def _reads_predicting(
  config: models.TransformerConfig, family: Family, folder: Folder
) -> bool:
  """Whether a folder has a layer that predicts further, and it can be read."""
  layout = family.predict
  if layout is None or not layout.stored(config, folder.tensors):
    return False
  try:
    layout.with_layer(config, folder.tensors)
  except OptionError:
    return False
  return True


def _tensors(
  conversion: Conversion, screen: console.Screen
) -> Iterator[tuple[str, np.ndarray | jax.Array]]:
  """Yields all tensors; several small ones may be read at once."""
  model_contents = conversion.contents
  total = sum(map(model_contents.nbytes, model_contents.tensors))
  screen.begin(f"reading {len(model_contents.tensors)} tensors", total, "bytes")
  read_bytes = 0
  by_stored = {x: name for name, x in conversion.origin.unread.items()}
  targets = lambda t: {p.name: conversion.targets[p.name] for p in t.pieces}
  for t, x in model_contents.read(targets):
    floats = _floats(t, x, conversion.dtypes.get(t.name))
    if t.targets[0][0] == EMBEDDING:
      check_heads(model_contents.folder, model_contents.heads, floats)
    yield t.name, floats
    for copy, path in model_contents.copies.items():
      if path == t.targets[0][0]:
        name = by_stored.get(copy, copy)
        yield name, _copied(model_contents.folder, copy, floats)
    read_bytes += model_contents.nbytes(t)
    screen.at(read_bytes)


def _copied(
  folder: Folder, name: str, weight: Float[Array, "_ _"]
) -> Float[Array, "_ _"]:
  """Read a copy of a weight, in the dtype of that weight.

  Raises:
    CheckpointMismatchError: If it has other numbers.
  """
  like = jax.ShapeDtypeStruct(
    weight.shape, weight.dtype, sharding=weight.sharding
  )
  (copy,) = folder.read({name: like}).values()
  if not jnp.array_equal(copy, weight):
    raise CheckpointMismatchError(
      name,
      "other numbers than the model's embedding or head",
      "a copy of it, as layers that predict further tokens have",
      "remove the layer's tensors from the folder",
    )
  return copy


def _floats(
  tensor: CheckpointTensor, x: tuple[jax.Array, ...], dtype: Any
) -> jax.Array:
  """Unpacks the stored arrays of a tensor into floats."""
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
  values: flags.FlagValues, conversion: Conversion, screen: console.Screen
) -> None:
  """Writes the new folder."""
  config = dict(conversion.source)
  if values.dtype is not None:
    config.pop("torch_dtype", None)
    config["dtype"] = values.dtype
  elif isinstance(conversion.contents.folder, GgufFolder):
    # The numbers that a file's codes stand for, which 16 bits would round.
    config["dtype"] = "float32"
  elif conversion.dtypes and not (
    config.get("dtype") or config.get("torch_dtype")
  ):
    config["dtype"] = next(iter(conversion.dtypes.values())).name
  origin, read = conversion.origin, conversion.contents.folder

  def write_companions(folder: pathlib.Path) -> None:
    for write in read.companions().values():
      write(folder)

  save.write(
    values.out,
    origin.config(config, origin.copied, conversion.predicting),
    itertools.chain(_tensors(conversion, screen), origin.stored(origin.copied)),
    max_shard_bytes=values.max_shard_bytes,
    beside=write_companions,
  )


def _summary(conversion: Conversion, values: flags.FlagValues) -> list[str]:
  """Lines that describe the result."""
  model_contents = conversion.contents
  folder = model_contents.folder if values.check else Folder.open(values.out)
  kinds = collections.Counter(
    str(info.dtype)
    for name, info in folder.tensors.items()
    if name not in model_contents.unused
  )
  weights = sum(info.nbytes for info in folder.tensors.values())
  lines = {
    "folder": f"{folder.path}",
    "family": f"{conversion.family}, {conversion.parameters:,} parameters",
    "tensors": f"{len(conversion.targets if values.check else folder.tensors)}"
    ", "
    + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    + ", all finite",
    "weights": f"{console.nbytes(weights)} in {len(folder.files)} "
    + ("file" if len(folder.files) == 1 else "files"),
    "others": ", ".join(folder.companions()) or "none",
  }
  copied_names = (
    set() if values.check else set(conversion.origin.copied.values())
  )
  for title, tensors in (
    ("kept unread", [n for n in model_contents.unused if n in copied_names]),
    (
      "not used" if values.check else "left out",
      [n for n in model_contents.unused if n not in copied_names],
    ),
  ):
    if tensors:
      suffix = " ..." if len(tensors) > 3 else ""
      lines[title] = f"{len(tensors)}, {', '.join(tensors[:3])}{suffix}"
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
