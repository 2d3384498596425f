"""Reads a config.json, and finds the tensors of its model in a folder.

Guarantees: every tensor of a folder is a part of the model, is listed as
unused, or is an error. Code in a folder is never run.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jaxtyping import Array, Shaped

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

# Bytes of a checkpoint's tensors that are in flight at a time.
_BATCH_BYTES = 256 << 20
_log = logging.getLogger(__name__)
# Keys about the folder only, and not about the model.
_OF_THE_FOLDER = ("auto_map", "quantization_config")


def read_config(
  config: Mapping[str, Any], *, strict: bool = True
) -> tuple[TransformerConfig, Family]:
  """Reads a config.json: the model's architecture and its family.

  For a model of text and images that is the text model. Keys that transformers
  ignores are ignored with a warning.

  Args:
    config: Content of config.json.
    strict: Whether an unknown key that may change the computation is an error.

  Raises:
    ConfigError: If the architecture is unknown, a value is out of range, or
      an unknown key may change the computation.
  """
  parsed, _, family = read_source(config, strict=strict)
  return parsed, family


def read_source(
  config: Mapping[str, Any], *, strict: bool = True
) -> tuple[TransformerConfig, dict[str, Any], Family]:
  """Reads a config.json: architecture, the text model's config, and family."""
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
    config: Content of config.json.
    unknown: Treatment of unknown keys outside of the text model's; default:
      that of a config that is read.

  Raises:
    ConfigError: If the architecture or the packing of the weights is not
      known.
  """
  unknown = unknown or UnknownKeys(config)
  kind = config.get("model_type")
  by_type = {x: f for f in FAMILIES.values() for x in f.types}
  known_types = by_type.keys() | WRAPPERS.keys()
  if isinstance(kind, str) and kind in known_types:
    packing(config)
    text = config
    if kind not in by_type:
      text = _inner(config, WRAPPERS[kind], unknown)
      unknown.text_of(text["model_type"])
    family = by_type[text["model_type"]]
    source = {k: v for k, v in text.items() if k not in _OF_THE_FOLDER}
    # The writer left out values that are defaults of transformers.
    defaults = family.wrapper.defaults if family.wrapper else {}
    for key, value in defaults.items():
      if source.get(key) is None:
        source[key] = value
    return source, family
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
  # What is no text has no neighbours.
  text = kind.lower() if isinstance(kind, str) else ""
  close_types = difflib.get_close_matches(text, sorted(known_types), 6)
  raise ConfigError(
    "config.json: model_type",
    repr(kind)[:80],
    f"one of {len(known_types)} such as "
    + ", ".join(close_types or ("llama", "gemma2", "qwen3", "deepseek_v3")),
    "use a checkpoint of one of these; docs/models.md lists all",
  )


def _inner(
  config: Mapping[str, Any], wrapper: Wrapper, unknown: UnknownKeys
) -> dict[str, Any]:
  """The text model's config, written as that of a model without images."""
  text = _said(config, wrapper, unknown)
  text_model = _text_model(text, wrapper)
  if text_model.skips and text.get(text_model.skips, 0) is None:
    text = {k: x for k, x in text.items() if k != text_model.skips}
  merged = {**text_model.defaults, **text}
  if text.get("num_local_experts") is not None:
    # The default is for the other spelling.
    merged["num_experts"] = text.get("num_experts")
  for key, others in text_model.renamed.items():
    if key in merged:
      merged |= dict.fromkeys(others, merged.pop(key))
  if text_model.skips:
    merged["num_hidden_layers"] = len(_layers(text, text_model)[0])
    del merged[text_model.skips]
  for key in ("rope_parameters", "rope_scaling"):
    if isinstance(merged.get(key), dict) and wrapper.texts:
      merged[key] = _one_position(merged[key])
  return merged | {
    **text_model.fixed,
    "model_type": text_model.type,
    "architectures": [text_model.architecture],
  }


def _said(
  config: Mapping[str, Any], wrapper: Wrapper, unknown: UnknownKeys
) -> dict[str, Any]:
  """The text model's config in the config of a model of text and images."""
  outer = ConfigReader(config, unknown=unknown)
  if wrapper.within:
    outer = outer.part(wrapper.within, outer.value(wrapper.within))
  if wrapper.flat and not outer.has("text_config"):
    outer_keys = ("text_config", "model_type", "architectures", *KEYS)
    return {k: v for k, v in config.items() if k not in outer_keys}
  # The text model's own sizes count.
  outer.ignore("text_config", "hidden_size", "vocab_size")
  outer.ignore("quantization_config", *KEYS)
  text = outer.value("text_config")
  # The outer config states these for the whole model, and so for its text.
  keys = ("tie_word_embeddings", "dtype", "torch_dtype")
  shared = {key: outer.value(key, default=None) for key in keys}
  outer.finish()
  shared = {key: x for key, x in shared.items() if x is not None}
  if config.get(keys[0], 0) is None:
    # transformers takes null as false.
    shared[keys[0]] = False
  text = outer.part("text_config", text).all()
  if wrapper.text_ties and text.get("tie_word_embeddings") is not None:
    shared.pop("tie_word_embeddings", None)
  return {**text, **shared}


def _text_model(text: Mapping[str, Any], wrapper: Wrapper) -> TextModel:
  """The text model that a text config describes, of a wrapper's choices."""
  texts = wrapper.texts
  if not texts:
    (types,) = [f.types for f in FAMILIES.values() if f.wrapper is wrapper]
    texts = [
      TextModel(type=x, architecture=wrapper.architecture) for x in types
    ]
  by_kind = {x.text_model_type or x.type: x for x in texts}
  kind = text.get("model_type") or next(iter(by_kind))
  if not isinstance(kind, str) or kind not in by_kind:
    raise error(
      "text_config.model_type",
      kind,
      f"one of {', '.join(by_kind)}",
      "use another checkpoint",
    )
  return by_kind[kind]


def _layers(
  text: Mapping[str, Any], text_model: TextModel
) -> tuple[list[int], list[int]]:
  """Numbers of the layers that text passes, and of those that it skips."""
  r = ConfigReader({**text_model.defaults, **text}, "text_config.")
  count, skipped = r.layers(), r.numbers_of_layers(text_model.skips, [])
  run_layers = [i for i in range(count) if i not in skipped]
  if not run_layers or not all(0 <= i < count for i in skipped):
    raise r.error(
      text_model.skips, skipped, f"numbers of some of {count} layers"
    )
  return run_layers, skipped


def _one_position(rope: Mapping[str, Any]) -> dict[str, Any]:
  """Plain rotation in place of one by time, height and width."""
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
    folder: Folder of the tensors.
    tensors: Tensors of the model, in their order on disk;
      `CheckpointTensor.pieces` are those that are stored.
    unused: Names of other tensors on disk, which the model does not use.
    heads: Names of stored heads of a model whose head is its embedding: they
      must equal the embedding.
    unread: Unused tensors of other layers: the name in the folder by the name
      in a saved copy. Tensors that are computed from the config and heads that
      equal the embedding are not among them.
    copies: Names of stored copies of the embedding and the head, of a model
      that has a layer that predicts further tokens -> path of the parameter.
  """

  folder: Folder
  tensors: list[CheckpointTensor]
  unused: tuple[str, ...]
  heads: tuple[str, ...]
  unread: Mapping[str, str]
  copies: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def nbytes(self, tensor: CheckpointTensor) -> int:
    """Bytes of a tensor on disk."""
    return sum(self.folder.tensors[x.name].nbytes for x in tensor.pieces)

  def read(
    self,
    targets: Callable[[CheckpointTensor], Mapping[str, jax.ShapeDtypeStruct]],
  ) -> Iterator[tuple[CheckpointTensor, tuple[Shaped[Array, " ..."], ...]]]:
    """Reads all tensors, some at a time.

    Args:
      targets: Function from a tensor to its pieces as device arrays, by name.

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
    folder: Folder to look in.
    family: Family of the model.
    model: Model that the tensors become.
    source: Config of the text model.

  Raises:
    CheckpointMismatchError: If tensors are missing, too many, or of another
      shape.
  """
  names, text, wrapper = family.tensor_names(model.config), None, None
  skipped: tuple[str, ...] = ()
  if folder.config.get("model_type") not in family.types:
    wrapper = WRAPPERS[folder.config["model_type"]]
    # The unknown keys of this config have been checked before.
    outer_text = _said(
      folder.config, wrapper, UnknownKeys(folder.config, strict=False)
    )
    text = _text_model(outer_text, wrapper)
    names = text.names(model.config) if text.names else names
    if text.skips:
      run_layers, numbers = _layers(outer_text, text)
      number = lambda layer, path: run_layers[layer]
      names = dataclasses.replace(names, number=number)
      skipped_layers = [names.layer.format(i) for i in numbers]
      skipped = tuple(
        spelt for x in skipped_layers for spelt in _wrapped_names(x)
      )
  spellings = lambda name: tuple(
    wrapped
    for spelling in family.spellings(name)
    for wrapped in _wrapped_names(spelling)
  )
  if not wrapper:
    # Some writers leave out the prefix of all names.
    spellings = lambda name: tuple(
      dict.fromkeys(
        spelt
        for spelling in family.spellings(name)
        for spelt in (spelling, spelling.removeprefix(names.base))
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
        folder.path, shift.folder_prefix, shift.ours,
      )  # fmt: skip
      spellings_before = spellings
      spellings = lambda name: (*shift.spellings(name), *spellings_before(name))
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
      swapped = SwappedAxes(form)
      form = swapped if have[name].shape == swapped.stored else form
    if text and text.rows and tensor.name == f"{names.embed}.weight":
      form = FirstRows(form, text.rows)
    if packed is not None:
      form = packed.form(form, name, have)
    tensors.append(dataclasses.replace(tensor, form=form, stored_name=name))
  expected = {p.name: p.shape for t in tensors for p in t.pieces}
  head = f"{names.head}.weight"
  # A folder may store a tied embedding again as a head.
  heads = (head, *spellings(head)) if model.config.tied else ()
  unread = family.unread(source)
  if wrapper is not None:
    starts = ("", "model.", "thinker.")
    unread = tuple(spelt for x in unread for spelt in _wrapped_names(x))
    unread += tuple(start + x for start in starts for x in OTHERS)
    unread += ("code2wav.", "talker.", "token2wav.", *skipped)
  is_extra = lambda name: name in heads or name.startswith(unread)
  family_name = lambda name: (
    name if shift is None or is_extra(name) else shift.ours_of(name)
  )
  beside = () if packed is None else packed.beside
  folder.check(
    expected,
    optional=lambda name: (
      is_extra(name)
      or is_extra(family_name(name))
      or name.endswith((*names.buffers, *beside))
    ),
  )
  if packed is not None:
    packed.check(folder, tensors, [n for n in have if n not in expected])
  order = {name: i for i, name in enumerate(have)}
  tensors.sort(key=lambda t: min(order[piece.name] for piece in t.pieces))
  unused = tuple(n for n in have if n not in expected)
  copies: dict[str, str] = {}
  if model.config.predicts is not None:
    assert family.predict is not None
    start = family.predict.prefix(model.config)
    for end, path in family.predict.copies.items():
      stored = next((n for n in spellings(start + end) if n in unused), None)
      if stored is not None:
        tied = path.startswith("head.") and model.config.tied
        copies[stored] = "embed.weight" if tied else path
  return Contents(
    folder=folder,
    tensors=tensors,
    unused=unused,
    heads=tuple(n for n in have if n in heads),
    unread={
      family_name(n): n
      for n in unused
      if family_name(n).startswith(unread) and not n.endswith(names.buffers)
    },
    copies=copies,
  )


@dataclasses.dataclass(frozen=True)
class _Beginning:
  """Replacement of one prefix of a folder's names by another.

  Attributes:
    ours: Prefix of the family's names, which may be empty.
    folder_prefix: Prefix of the folder's names, which may be empty.
  """

  ours: str
  folder_prefix: str

  def spellings(self, name: str) -> tuple[str, ...]:
    """Names that a tensor of the family may have in the folder."""
    if not name.startswith(self.ours):
      # A head has no common prefix, or an additional one.
      return (name, self.folder_prefix + name)
    return (self.folder_prefix + name.removeprefix(self.ours),)

  def ours_of(self, name: str) -> str:
    """Name that the family has for a tensor in the folder."""
    if not name.startswith(self.folder_prefix):
      return name
    return self.ours + name.removeprefix(self.folder_prefix)


def _beginning(
  tensors: list[CheckpointTensor],
  names: TensorNames,
  spellings: Callable[[str], tuple[str, ...]],
  have: Mapping[str, Any],
) -> _Beginning | None:
  """Prefix of a folder's names, if none of them is as the family has it."""
  start = names.layer.split("{}")[0].rstrip(".").rpartition(".")[0]
  beginnings = ["", f"{start}."] if start else [""]
  # Norms are never packed: their names are those of floats.
  layer = [t.name for t in tensors if "norm" in t.name.rsplit(".", 2)[-2]]
  layer = [name for name in layer if name.startswith(f"{start}.")]
  if not layer or any(x in have for name in layer for x in spellings(name)):
    return None
  for ours in beginnings:
    end = layer[0].removeprefix(ours)
    starts = {
      name.removesuffix(end)
      for name in have
      if name == end or name.endswith(f".{end}")
    }
    if len(starts) == 1:
      return _Beginning(ours, starts.pop())
  return None


def _wrapped_names(name: str) -> tuple[str, ...]:
  """Names of a text model's tensor in a model of text and images."""
  inner = name.removeprefix("model.")
  names = [f"language_model.{name}", f"text_model.{name}"]
  if inner != name:
    names += [f"model.language_model.{inner}", f"model.text_model.{inner}"]
  names.append(name)
  # In a model that speaks, the "thinker" is the part with the text model.
  return (*names, *(f"thinker.{x}" for x in names))
