"""What a config.json means, and which tensors of a folder are its model.

Guarantees: every tensor of a folder is a part of the model, is named as one
that is not, or is an error. No code of a folder is ever run.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from ringjax.errors import ConfigError
from ringjax.models.families import FAMILIES, WRAPPERS, Family, Wrapper
from ringjax.models.families.family import TextModel
from ringjax.models.hf.config_reader import ConfigReader, error
from ringjax.models.hf.folder import Folder, batches
from ringjax.models.hf.names import SwappedAxes
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
  by_type = {x: f for f in FAMILIES.values() for x in f.types}
  known = by_type.keys() | WRAPPERS.keys()
  if isinstance(kind, str) and kind in known:
    packing(config)
    text = config if kind in by_type else _inner(config, WRAPPERS[kind])
    family = by_type[text["model_type"]]
    found = {k: v for k, v in text.items() if k not in _OF_THE_FOLDER}
    # Its writer left out what transformers has by default.
    defaults = family.wrapper.defaults if family.wrapper else {}
    for key, value in defaults.items():
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
  near = difflib.get_close_matches(str(kind).lower(), sorted(known), 6)
  raise ConfigError(
    "config.json: model_type",
    repr(kind)[:80],
    f"one of {len(known)} such as "
    + ", ".join(near or ("llama", "gemma2", "qwen3", "deepseek_v3")),
    "use a checkpoint of one of these; docs/models.md lists all",
  )


def _inner(config: Mapping[str, Any], wrapper: Wrapper) -> dict[str, Any]:
  """The text model's part of the config of a model of text and images."""
  outer = ConfigReader(config)
  if wrapper.flat and not outer.has("text_config"):
    own = ("text_config", "model_type", "architectures", *wrapper.keys)
    text = {k: v for k, v in config.items() if k not in own}
    return _read_as(text, wrapper, outer)
  outer.ignore("text_config", "quantization_config", *wrapper.keys)
  text = outer.value("text_config")
  # The outer one says of the whole what is true of its text model.
  keys = ("tie_word_embeddings", "dtype", "torch_dtype")
  said = {key: outer.value(key, default=None) for key in keys}
  outer.finish()
  said = {key: x for key, x in said.items() if x is not None}
  text = outer.part("text_config", text).all()
  if wrapper.text_ties and text.get("tie_word_embeddings") is not None:
    said.pop("tie_word_embeddings", None)
  return _read_as({**text, **said}, wrapper, outer)


def _read_as(
  text: Mapping[str, Any], wrapper: Wrapper, outer: ConfigReader
) -> dict[str, Any]:
  """The text model's config as that of a model without images."""
  if not wrapper.texts:
    (types,) = [f.types for f in FAMILIES.values() if f.wrapper is wrapper]
    texts = {
      x: TextModel(type=x, architecture=wrapper.architecture) for x in types
    }
  else:
    texts = wrapper.texts
  kind = text.get("model_type") or next(iter(texts))
  if not isinstance(kind, str) or kind not in texts:
    raise outer.error(
      "text_config.model_type",
      kind,
      f"one of {', '.join(texts)}",
      "use another checkpoint",
    )
  found = texts[kind]
  merged = {**found.defaults, **text}
  for key in ("rope_parameters", "rope_scaling"):
    if isinstance(merged.get(key), dict) and wrapper.texts:
      merged[key] = _one_position(merged[key])
  return merged | {
    **found.fixed,
    "model_type": found.type,
    "architectures": [found.architecture],
  }


def _one_position(rope: Mapping[str, Any]) -> dict[str, Any]:
  """A rotation by time, height and width, of tokens that have one position."""
  plain = {k: v for k, v in rope.items() if not k.startswith("mrope_")}
  for key in ("type", "rope_type"):
    if plain.get(key) == "mrope":
      plain[key] = "default"
  return plain


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
  wrapper = None
  if folder.config.get("model_type") not in family.types:
    wrapper = WRAPPERS[folder.config["model_type"]]
  named = wrapper.names if wrapper and wrapper.names else family.names
  names = named(model.config)
  spellings = _wrapped_names
  if not wrapper:
    # Some leave out what stands before all names.
    spellings = lambda name: tuple(
      dict.fromkeys(
        spelt
        for one in family.spellings(name)
        for spelt in (one, one.removeprefix(names.base))
      )
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
    form: Any = tensor.form
    if wrapper and name.endswith(wrapper.turned) and name in have:
      turned = SwappedAxes(form)
      form = turned if have[name].shape == turned.stored else form
    if packed is not None:
      form = packed.form(form, name, have)
    tensors.append(dataclasses.replace(tensor, form=form, stored_name=name))
  expected = {p.name: p.shape for t in tensors for p in t.pieces}
  head = f"{names.head}.weight"
  # Where a folder may have a tied embedding once more.
  heads = (head, *spellings(head)) if model.config.tied else ()
  unread = family.unread(source)
  if wrapper is not None:
    others = wrapper.others
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
  return (
    f"language_model.{name}",
    f"model.language_model.{inner}",
    f"model.text_model.{inner}",
    name,
  )
