"""What a config.json means, and which tensors of a folder are its model.

Guarantees: every tensor of a folder is a part of the model, is named as one
that is not, or is an error. No code of a folder is ever run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from ringjax.errors import ConfigError
from ringjax.models.families import FAMILIES, Family
from ringjax.models.hf.config_reader import ConfigReader, error
from ringjax.models.hf.folder import Folder, batches
from ringjax.models.hf.packings import packed_name, packing
from ringjax.models.hf.tensors import CheckpointTensor, checkpoint_tensors
from ringjax.models.transformer import Transformer, TransformerConfig

# Bytes of a checkpoint's tensors that are on their way at a time.
_BATCH_BYTES = 256 << 20
# Keys about the folder at hand only, and not about the model.
_OF_THE_FOLDER = ("auto_map", "quantization_config")


def read_config(config: Mapping[str, Any]) -> tuple[TransformerConfig, Family]:
  """What a config.json means, and which family's it is.

  Of a model of text and images it is the text model.

  Raises:
    ConfigError: an unknown architecture, a value out of range, or a key that
      would change the computation and is not known.
  """
  text, family = text_config(config)
  return family.read(text), family


def text_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], Family]:
  """The config.json of the text model alone, with plain weights.

  Raises:
    ConfigError: an unknown architecture, or weights that are packed in a way
      that is not known.
  """
  kind = config.get("model_type")
  types: list[str] = []
  for family in FAMILIES.values():
    wrapper = family.wrapper
    known = (*family.types, *([wrapper.type] if wrapper else []))
    types += known
    if kind not in known:
      continue
    packing(config)
    text = config if kind in family.types else _inner(config, family)
    found = {k: v for k, v in text.items() if k not in _OF_THE_FOLDER}
    # Its writer left out what transformers has by default.
    for key, value in wrapper.defaults.items() if wrapper else ():
      if found.get(key) is None:
        found[key] = value
    return found, family
  if config.get("auto_map"):
    raise error(
      "auto_map",
      config["auto_map"],
      f"a known model_type instead of {str(kind)[:40]!r}",
      "use a checkpoint in a form that transformers knows; code in "
      "checkpoints is never run",
    )
  raise ConfigError(
    "config.json: model_type",
    repr(kind),
    f"one of {', '.join(sorted(types))}",
    "use a checkpoint of one of these",
  )


def _inner(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
  """The text model's part of the config of a model of text and images."""
  wrapper = family.wrapper
  assert wrapper is not None
  outer = ConfigReader(config)
  outer.ignore("text_config", "quantization_config", *wrapper.keys)
  text = outer.value("text_config")
  part = outer.part("text_config", text)
  kind = part.text("model_type", default=family.types[0])
  if kind not in family.types:
    raise part.error(
      "model_type", kind, f"{family.types[0]!r}", "use another checkpoint"
    )
  # The outer one says of the whole what is true of its text model.
  keys = ("tie_word_embeddings", "dtype", "torch_dtype")
  said = {key: outer.value(key, default=None) for key in keys}
  outer.finish()
  return {
    **text,
    **{key: x for key, x in said.items() if x is not None},
    "model_type": kind,
    "architectures": [wrapper.architecture],
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
  """The model in a folder.

  Attributes:
    folder: where it is.
    tensors: its tensors, in the order of the disk; `CheckpointTensor.pieces`
      are those that are stored.
    unused: names of others on disk, that are no part of it.
    heads: of those the heads of a model whose head is its embedding: they must
      have its numbers.
  """

  folder: Folder
  tensors: list[CheckpointTensor]
  unused: tuple[str, ...]
  heads: tuple[str, ...]

  def nbytes(self, tensor: CheckpointTensor) -> int:
    """What a tensor has on disk."""
    return sum(self.folder.tensors[x.name].nbytes for x in tensor.pieces)

  def read(
    self,
    targets: Callable[[CheckpointTensor], Mapping[str, jax.ShapeDtypeStruct]],
  ) -> Iterator[tuple[CheckpointTensor, tuple[jax.Array, ...]]]:
    """Reads all tensors, some at a time.

    Args:
      targets: as what the pieces of a tensor are read, by their names.

    Yields:
      Each tensor with the arrays of its pieces.
    """
    for batch in batches(self.tensors, _BATCH_BYTES, self.nbytes):
      wanted: dict[str, jax.ShapeDtypeStruct] = {}
      for t in batch:
        wanted |= targets(t)
      read = self.folder.read(wanted)
      for t in batch:
        yield t, tuple(read.pop(piece.name) for piece in t.pieces)


def contents(
  folder: Folder, family: Family, model: Transformer, source: Mapping[str, Any]
) -> Contents:
  """Finds the tensors of a model, which may be abstract, in a folder.

  Args:
    folder: where they are.
    family: of the model.
    model: what they become.
    source: its config.json, of the text model.

  Raises:
    CheckpointMismatchError: tensors that are missing, too many, or of another
      shape.
  """
  names = family.names(model.config)
  wrapped = folder.config.get("model_type") not in family.types
  if wrapped:
    spellings = _wrapped_names
  else:
    spellings = lambda name: tuple(
      dict.fromkeys((name, name.removeprefix(names.base)))
    )
  packed = packing(folder.config)
  have = folder.tensors
  tensors = []
  for tensor in checkpoint_tensors(model, names):
    options = spellings(tensor.name)
    codes = () if packed is None else packed.codes
    name = next(
      (
        n
        for n in options
        if n in have or any(packed_name(n, x) in have for x in codes)
      ),
      options[0],
    )
    form = tensor.form
    if packed is not None:
      form = packed.form(form, name, have)
    tensors.append(dataclasses.replace(tensor, form=form, stored_name=name))
  expected = {p.name: p.shape for t in tensors for p in t.pieces}
  head = f"{names.head}.weight"
  # Where a folder may have a tied embedding once more.
  heads = (head, *spellings(head)) if model.config.tied else ()
  unread = family.unread(source)
  if wrapped and family.wrapper is not None:
    others = family.wrapper.others
    unread += (*others, *(f"model.{prefix}" for prefix in others))
  folder.check(
    expected,
    optional=lambda name: (
      name in heads
      or name.endswith(names.buffers)
      or name.startswith(unread)
      or (packed is not None and name.endswith(packed.beside))
    ),
  )
  if packed is not None:
    packed.check(folder, [n for n in have if n not in expected])
  order = {name: i for i, name in enumerate(have)}
  tensors.sort(key=lambda t: min(order[piece.name] for piece in t.pieces))
  return Contents(
    folder=folder,
    tensors=tensors,
    unused=tuple(n for n in have if n not in expected),
    heads=tuple(n for n in have if n in heads),
  )


def _wrapped_names(name: str) -> tuple[str, ...]:
  """Where a model of text and images keeps a tensor of its text model."""
  inner = name.removeprefix("model.")
  if inner == name:
    return f"language_model.{name}", name
  return f"language_model.{name}", f"model.language_model.{inner}"
