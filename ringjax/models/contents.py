"""What a config.json means, and which tensors of a folder are its model.

Guarantees: every tensor of a folder is a part of the model, is named as one
that is not, or is an error. No code of a folder is ever run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ringjax.errors import ConfigError
from ringjax.models.families import FAMILIES, Family
from ringjax.models.hf.config_reader import ConfigReader, error
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.names import TensorNames
from ringjax.models.hf.packed import packing
from ringjax.models.hf.tensors import CheckpointTensor, plan
from ringjax.models.transformer import Transformer, TransformerConfig

# What is said of the folder at hand only, and not of the model.
_OF_THE_FOLDER = ("auto_map", "quantization_config")


def read_config(config: Mapping[str, Any]) -> tuple[TransformerConfig, Family]:
  """What a config.json means, and whose it is.

  Of a model of text and images it is the text model.

  Raises:
    ConfigError: an unknown architecture, a value out of range, or a key that
      would change the computation and is not known.
  """
  text, family = text_config(config)
  return family.config(ConfigReader(text)), family


def text_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], Family]:
  """The config.json of the text model alone, with plain weights.

  Raises:
    ConfigError: an unknown architecture, or weights that are packed in a way
      that is not known.
  """
  kind = config.get("model_type")
  for family in FAMILIES.values():
    wrapper = family.wrapper
    if kind in family.types:
      packing(config)
      text = {k: v for k, v in config.items() if k not in _OF_THE_FOLDER}
      return _whole(text, family), family
    if wrapper is not None and kind == wrapper.type:
      packing(config)
      return _whole(_inner(config, family), family), family
  if config.get("auto_map"):
    raise error(
      "auto_map",
      config["auto_map"],
      f"a known model_type instead of {str(kind)[:40]!r}",
      "use a checkpoint in a form that transformers knows; code in "
      "checkpoints is never run",
    )
  types = [t for family in FAMILIES.values() for t in family.types]
  types += [f.wrapper.type for f in FAMILIES.values() if f.wrapper is not None]
  raise ConfigError(
    "config.json: model_type",
    repr(kind),
    f"one of {', '.join(sorted(types))}",
    "use a checkpoint of one of these",
  )


def _whole(text: dict[str, Any], family: Family) -> dict[str, Any]:
  """With what its writer left out."""
  if family.wrapper is None:
    return text
  defaults = family.wrapper.defaults
  left = {k: v for k, v in defaults.items() if text.get(k) is None}
  return {**text, **left}


def _inner(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
  wrapper = family.wrapper
  assert wrapper is not None
  outer = ConfigReader(config)
  outer.ignore("text_config", "quantization_config", *wrapper.keys)
  given = outer.value("text_config")
  part = outer.part("text_config", given)
  kind = part.text("model_type", default=family.types[0])
  if kind not in family.types:
    raise part.error(
      "model_type", kind, f"{family.types[0]!r}", "use another checkpoint"
    )
  text = {k: v for k, v in given.items() if k not in _OF_THE_FOLDER}
  # The outer one says of the whole what is true of its text model.
  for key in ("tie_word_embeddings", "dtype", "torch_dtype"):
    x = outer.value(key, default=None)
    if x is not None:
      text[key] = x
  outer.finish()
  text["model_type"] = kind
  text["architectures"] = [wrapper.architecture]
  return text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
  """The model in a folder.

  Attributes:
    tensors: its tensors; `CheckpointTensor.pieces` are those on disk.
    spare: names of others on disk, that are no part of it.
    heads: of those the heads of a model whose head is its embedding: they must
      have its numbers.
  """

  tensors: list[CheckpointTensor]
  spare: tuple[str, ...]
  heads: tuple[str, ...]


def contents(
  folder: Folder, family: Family, model: Transformer, source: Mapping[str, Any]
) -> Contents:
  """Finds the tensors of a model, which may be abstract, in a folder.

  Args:
    folder: where they lie.
    family: of the model.
    model: what they become.
    source: its config.json, of the text model.

  Raises:
    CheckpointMismatchError: tensors that are missing, too many, or of another
      shape.
  """
  names = family.names(model.config)
  wrapped = folder.config.get("model_type") not in family.types
  packed = packing(folder.config)
  have = folder.tensors
  tensors = []
  for tensor in plan(model, names):
    place = tensor.name
    if wrapped:
      places = _places(tensor.name)
      place = next((n for n in places if n in have), places[0])
    form = tensor.form
    if packed is not None:
      form = packed.form(form, place, have)
    tensors.append(dataclasses.replace(tensor, form=form, place=place))
  expected = {p.name: p.shape for t in tensors for p in t.pieces}
  heads = _heads(names, model.config, wrapped)
  ignored = _ignored(names, family, heads, source, wrapped)
  folder.check(expected, optional=ignored)
  return Contents(
    tensors=tensors,
    spare=tuple(n for n in have if n not in expected),
    heads=tuple(n for n in have if n in heads),
  )


def _places(name: str) -> tuple[str, ...]:
  """Where a model of text and images keeps a tensor of its text model."""
  inner = name.removeprefix("model.")
  if inner == name:
    return f"language_model.{name}", name
  return f"language_model.{name}", f"model.language_model.{inner}"


def _heads(
  names: TensorNames, config: TransformerConfig, wrapped: bool
) -> tuple[str, ...]:
  """Where a folder may have the embedding once more, as the head."""
  head = f"{names.head}.weight"
  if not config.tied:
    return ()
  return (head, *_places(head)) if wrapped else (head,)


def _ignored(
  names: TensorNames,
  family: Family,
  heads: tuple[str, ...],
  source: Mapping[str, Any],
  wrapped: bool,
) -> Any:
  unread = family.unread(source)
  if wrapped and family.wrapper is not None:
    unread += family.wrapper.others
  return lambda name: (
    name in heads or name.endswith(names.buffers) or name.startswith(unread)
  )
