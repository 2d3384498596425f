"""What a config.json means, and which tensors of a folder are its model.

Guarantees: every tensor of a folder is a part of the model, is named as one
that is not, or is an error. No code of a folder is ever run.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from ringjax.errors import ConfigError
from ringjax.models.families import FAMILIES, WRAPPERS, Family, Wrapper
from ringjax.models.families.family import TextModel
from ringjax.models.families.with_images import KEYS, OTHERS, REFUSED
from ringjax.models.hf.config_reader import ConfigReader, error
from ringjax.models.hf.folder import Folder, batches
from ringjax.models.hf.names import FirstRows, SwappedAxes, TensorNames
from ringjax.models.hf.packings import packed_name, packing
from ringjax.models.hf.tensors import CheckpointTensor, checkpoint_tensors
from ringjax.models.hf.unknown_keys import UnknownKeys
from ringjax.models.transformer import Transformer, TransformerConfig

# Bytes of a checkpoint's tensors that are on their way at a time.
_BATCH_BYTES = 256 << 20
_log = logging.getLogger(__name__)
# Keys about the folder at hand only, and not about the model.
_OF_THE_FOLDER = ("auto_map", "quantization_config")


def read_config(
  config: Mapping[str, Any], *, strict: bool = True
) -> tuple[TransformerConfig, Family]:
  """What a config.json means, and which family's it is.

  Of a model of text and images it is the text model. Keys that transformers
  ignores are ignored with a warning.

  Args:
    config: The file.
    strict: Whether a key is an error that may change the computation and is
      not known.

  Raises:
    ConfigError: an unknown architecture, a value out of range, or a key that
      may change the computation and is not known.
  """
  parsed, _, family = read_source(config, strict=strict)
  return parsed, family


def read_source(
  config: Mapping[str, Any], *, strict: bool = True
) -> tuple[TransformerConfig, dict[str, Any], Family]:
  """As `read_config`, with the config.json of the text model alone between."""
  unknown = UnknownKeys(config, strict=strict)
  source, family = text_config(config, unknown)
  parsed = family.read(source, unknown)
  unknown.warn()
  return parsed, unknown.without_overruled(source), family


def text_config(
  config: Mapping[str, Any], unknown: UnknownKeys | None = None
) -> tuple[dict[str, Any], Family]:
  """The config.json of the text model alone, with plain weights.

  Args:
    config: The file.
    unknown: What happens to keys beside the text model's that nothing reads;
      default: as of a file that is read.

  Raises:
    ConfigError: an unknown architecture, or weights that are packed in a way
      that is not known.
  """
  unknown = unknown or UnknownKeys(config)
  kind = config.get("model_type")
  by_type = {x: f for f in FAMILIES.values() for x in f.types}
  known = by_type.keys() | WRAPPERS.keys()
  if isinstance(kind, str) and kind in known:
    packing(config)
    text = config
    if kind not in by_type:
      text = _inner(config, WRAPPERS[kind], unknown)
      unknown.text_of(text["model_type"])
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
  if isinstance(kind, str) and kind in REFUSED:
    raise error(
      "model_type",
      kind,
      f"one around a text model of a known family; this is {REFUSED[kind]}",
      "use another checkpoint; docs/models.md lists all",
    )
  near = difflib.get_close_matches(str(kind).lower(), sorted(known), 6)
  raise ConfigError(
    "config.json: model_type",
    repr(kind)[:80],
    f"one of {len(known)} such as "
    + ", ".join(near or ("llama", "gemma2", "qwen3", "deepseek_v3")),
    "use a checkpoint of one of these; docs/models.md lists all",
  )


def _inner(
  config: Mapping[str, Any], wrapper: Wrapper, unknown: UnknownKeys
) -> dict[str, Any]:
  """The text model's config as that of a model without images."""
  text = _said(config, wrapper, unknown)
  found = _text_model(text, wrapper)
  if found.skips and text.get(found.skips, 0) is None:
    text = {k: x for k, x in text.items() if k != found.skips}
  merged = {**found.defaults, **text}
  if text.get("num_local_experts") is not None:
    # The default is of the other spelling.
    merged["num_experts"] = text.get("num_experts")
  for key, others in found.renamed.items():
    if key in merged:
      merged |= dict.fromkeys(others, merged.pop(key))
  if found.skips:
    merged["num_hidden_layers"] = len(_layers(text, found)[0])
    del merged[found.skips]
  for key in ("rope_parameters", "rope_scaling"):
    if isinstance(merged.get(key), dict) and wrapper.texts:
      merged[key] = _one_position(merged[key])
  return merged | {
    **found.fixed,
    "model_type": found.type,
    "architectures": [found.architecture],
  }


def _said(
  config: Mapping[str, Any], wrapper: Wrapper, unknown: UnknownKeys
) -> dict[str, Any]:
  """What the config of a model of text and images says of its text model."""
  outer = ConfigReader(config, unknown=unknown)
  if wrapper.within:
    outer = outer.part(wrapper.within, outer.value(wrapper.within))
  if wrapper.flat and not outer.has("text_config"):
    own = ("text_config", "model_type", "architectures", *KEYS)
    return {k: v for k, v in config.items() if k not in own}
  # The text model has sizes of its own.
  outer.ignore("text_config", "hidden_size", "vocab_size")
  outer.ignore("quantization_config", *KEYS)
  text = outer.value("text_config")
  # The outer one says of the whole what is true of its text model.
  keys = ("tie_word_embeddings", "dtype", "torch_dtype")
  said = {key: outer.value(key, default=None) for key in keys}
  outer.finish()
  said = {key: x for key, x in said.items() if x is not None}
  if config.get(keys[0], 0) is None:
    # transformers takes null for false.
    said[keys[0]] = False
  text = outer.part("text_config", text).all()
  if wrapper.text_ties and text.get("tie_word_embeddings") is not None:
    said.pop("tie_word_embeddings", None)
  return {**text, **said}


def _text_model(text: Mapping[str, Any], wrapper: Wrapper) -> TextModel:
  """As what a text model is read."""
  texts = wrapper.texts
  if not texts:
    (types,) = [f.types for f in FAMILIES.values() if f.wrapper is wrapper]
    texts = [
      TextModel(type=x, architecture=wrapper.architecture) for x in types
    ]
  known = {x.said or x.type: x for x in texts}
  kind = text.get("model_type") or next(iter(known))
  if not isinstance(kind, str) or kind not in known:
    raise error(
      "text_config.model_type",
      kind,
      f"one of {', '.join(known)}",
      "use another checkpoint",
    )
  return known[kind]


def _layers(
  text: Mapping[str, Any], found: TextModel
) -> tuple[list[int], list[int]]:
  """The layers that text meets, and those that it does not, by number."""
  r = ConfigReader({**found.defaults, **text}, "text_config.")
  count, skipped = r.layers(), r.numbers_of_layers(found.skips, [])
  kept = [i for i in range(count) if i not in skipped]
  if not kept or not all(0 <= i < count for i in skipped):
    raise r.error(found.skips, skipped, f"numbers of some of {count} layers")
  return kept, skipped


def _one_position(rope: Mapping[str, Any]) -> dict[str, Any]:
  """A rotation by time, height and width, of tokens that have one position."""
  threefold = ("mrope_", "xdrope_")
  plain = {k: v for k, v in rope.items() if not k.startswith(threefold)}
  kinds = {"mrope": "default", "xdrope": "dynamic"}
  for key in ("type", "rope_type"):
    if plain.get(key) in kinds:
      plain[key] = kinds[plain[key]]
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
    unread: of the unused ones those that are of other layers, the name in the
      folder by the one that they have in a copy of it. What is computed from
      the config, or a head that is the embedding, is not among them.
  """

  folder: Folder
  tensors: list[CheckpointTensor]
  unused: tuple[str, ...]
  heads: tuple[str, ...]
  unread: Mapping[str, str]

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
    nbytes = lambda t: sum(
      self.folder.nbytes(target, name) for name, target in targets(t).items()
    )
    for batch in batches(self.tensors, _BATCH_BYTES, nbytes):
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
  names, text, wrapper = family.names(model.config), None, None
  skipped: tuple[str, ...] = ()
  if folder.config.get("model_type") not in family.types:
    wrapper = WRAPPERS[folder.config["model_type"]]
    # Its keys have been looked at.
    said = _said(
      folder.config, wrapper, UnknownKeys(folder.config, strict=False)
    )
    text = _text_model(said, wrapper)
    names = text.names(model.config) if text.names else names
    if text.skips:
      kept, numbers = _layers(said, text)
      number = lambda layer, path: kept[layer]
      names = dataclasses.replace(names, number=number)
      left = [names.layer.format(i) for i in numbers]
      skipped = tuple(spelt for x in left for spelt in _wrapped_names(x))
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
  plain = checkpoint_tensors(model, names)
  if not wrapper:
    shift = _beginning(plain, names, spellings, have)
    if shift is not None:
      _log.info(
        "%s: names of tensors begin with %r in place of %r",
        folder.path, shift.there, shift.ours,
      )  # fmt: skip
      usual = spellings
      spellings = lambda name: (*shift.spellings(name), *usual(name))
  else:
    shift = None
  tensors = []
  for tensor in plain:
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
    if text and name.endswith(text.turned) and name in have:
      other = SwappedAxes(form)
      form = other if have[name].shape == other.stored else form
    if text and text.rows and tensor.name == f"{names.embed}.weight":
      form = FirstRows(form, text.rows)
    if packed is not None:
      form = packed.form(form, name, have)
    tensors.append(dataclasses.replace(tensor, form=form, stored_name=name))
  expected = {p.name: p.shape for t in tensors for p in t.pieces}
  head = f"{names.head}.weight"
  # Where a folder may have a tied embedding once more.
  heads = (head, *spellings(head)) if model.config.tied else ()
  unread = family.unread(source)
  if wrapper is not None:
    starts = ("", "model.", "thinker.")
    unread += tuple(start + x for start in starts for x in OTHERS)
    unread += ("code2wav.", "talker.", "token2wav.", *skipped)
  known = lambda name: name in heads or name.startswith(unread)
  ours = lambda name: (
    name if shift is None or known(name) else shift.ours_of(name)
  )
  beside = () if packed is None else packed.beside
  folder.check(
    expected,
    optional=lambda name: (
      known(name)
      or known(ours(name))
      or name.endswith((*names.buffers, *beside))
    ),
  )
  if packed is not None:
    packed.check(folder, tensors, [n for n in have if n not in expected])
  order = {name: i for i, name in enumerate(have)}
  tensors.sort(key=lambda t: min(order[piece.name] for piece in t.pieces))
  unused = tuple(n for n in have if n not in expected)
  return Contents(
    folder=folder,
    tensors=tensors,
    unused=unused,
    heads=tuple(n for n in have if n in heads),
    unread={
      ours(n): n
      for n in unused
      if ours(n).startswith(unread) and not n.endswith(names.buffers)
    },
  )


@dataclasses.dataclass(frozen=True)
class _Beginning:
  """One beginning of a folder's names in place of another.

  Attributes:
    ours: the family's, which may be empty.
    there: the folder's, which may be empty.
  """

  ours: str
  there: str

  def spellings(self, name: str) -> tuple[str, ...]:
    """Names that a tensor of the family may have in the folder."""
    if not name.startswith(self.ours):
      # A head stands beside the others, or is within what is one more.
      return (name, self.there + name)
    return (self.there + name.removeprefix(self.ours),)

  def ours_of(self, name: str) -> str:
    """The family's name of a tensor in the folder."""
    if not name.startswith(self.there):
      return name
    return self.ours + name.removeprefix(self.there)


def _beginning(
  tensors: list[CheckpointTensor],
  names: TensorNames,
  spellings: Callable[[str], tuple[str, ...]],
  have: Mapping[str, Any],
) -> _Beginning | None:
  """How the names of a folder begin, where none is as the family has them."""
  start = names.layer.split("{}")[0].rstrip(".").rpartition(".")[0]
  beginnings = ["", f"{start}."] if start else [""]
  # Norms are never packed: their names are those of floats.
  layer = [t.name for t in tensors if "norm" in t.name.rsplit(".", 2)[-2]]
  layer = [name for name in layer if name.startswith(f"{start}.")]
  if not layer or any(x in have for name in layer for x in spellings(name)):
    return None
  for ours in beginnings:
    end = layer[0].removeprefix(ours)
    theirs = {
      name.removesuffix(end)
      for name in have
      if name == end or name.endswith(f".{end}")
    }
    if len(theirs) == 1:
      return _Beginning(ours, theirs.pop())
  return None


def _wrapped_names(name: str) -> tuple[str, ...]:
  """Where a model of text and images keeps a tensor of its text model."""
  inner = name.removeprefix("model.")
  names = [f"language_model.{name}", f"text_model.{name}"]
  if inner != name:
    names += [f"model.language_model.{inner}", f"model.text_model.{inner}"]
  names.append(name)
  # Of a model that speaks, too, one part reads and writes.
  return (*names, *(f"thinker.{x}" for x in names))
