"""EAGLE-3: a head that drafts from the states of several layers of its target.

Guarantees: weights and logits of the target are those without the head, and
its weights are not copied. A head is written as it was read: the same names and
config, and the same bits if the target's dtype has all numbers of the folder.
Memory: the head's weights; in caches the keys of one layer more.
Ref: Li et al. 2025, arXiv 2503.01840; folders as those of SafeAILab, SpecForge,
SGLang, ModelOpt and vLLM's speculators.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Shaped

from ringjax import fetched_models
from ringjax.checks import integer, positive_int
from ringjax.errors import (
  CheckpointMismatchError,
)
from ringjax.models.checkpoint import stored_dtype
from ringjax.models.heads.eagle3_config import config_for, read_layer, text_of
from ringjax.models.heads.head_folder import (
  block_shapes,
  check_target,
  head_block,
  head_layer,
  read_block,
  with_layer,
  without_layer,
  written_tensors,
)
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.save import write
from ringjax.models.hf.tensors import (
  CheckpointTensor,
  module_tensors,
  parameters,
)
from ringjax.models.parameter_arrays import arrays_of, filled
from ringjax.models.transformer import Transformer
from ringjax.nn.draft_layers.eagle_layer import (
  EagleBlock,
  EagleLayer,
  HeadFolder,
)
from ringjax.nn.param import Rules

_PARTS = {
  "embed_norm": "input_layernorm",
  "hidden_norm": "hidden_norm",
  "pre_feedforward": "post_attention_layernorm",
  "attention.q": "self_attn.q_proj",
  "attention.k": "self_attn.k_proj",
  "attention.v": "self_attn.v_proj",
  "attention.o": "self_attn.o_proj",
  "feedforward.gate": "mlp.gate_proj",
  "feedforward.up": "mlp.up_proj",
  "feedforward.down": "mlp.down_proj",
}
_OUTER = {
  "fuse": "fc",
  "features_norm": "input_norm",
  "out_norm": "norm",
  "head": "lm_head",
  "embedding": "embed_tokens",
  **{f"feature_norms.{i}": f"fc_norm.{i}" for i in range(16)},
}
# Of the draft vocabulary: distance of each id from the target's, and whether an
# id of the target is in it.
_IDS, _MASK = "d2t", "t2d"
_LAYERS = ("midlayer.", "layers.0.")


def load(
  folder: str | os.PathLike[str],
  target: Transformer,
  *,
  rules: Rules | None = None,
) -> Transformer:
  """Adds the head of a folder to its target, in the target's dtype.

  Args:
    folder: Folder with config.json and safetensors files, its address, or a
      name on the hub.
    target: Model that the head was trained for.
    rules: Rules that shard the head's weights over the target's mesh.

  Returns:
    The target with the head, which drafts with speculate="eagle3".

  Raises:
    ConfigError: If the head is not supported, or does not fit the target.
    CheckpointFormatError: If a file is broken.
    CheckpointMismatchError: If tensors are missing, too many, of a wrong
      shape or not finite.
    UnsafeFormatError: If all weights are in files that would run code.
    OptionError: If the target has a head, several streams, or layers that are
      not on the devices.
  """
  check_target(target, "add an EAGLE-3 head")
  opened = Folder.open(fetched_models.resolve(folder, "folder"))
  have = opened.tensors
  prefix, layer_prefix = _prefixes(have)
  storage = HeadFolder(
    config=text_of(opened.config),
    prefix=prefix,
    layer=layer_prefix,
    dtype=str(jnp.dtype(stored_dtype(opened, {}))),
    path=str(folder),
    bare=tuple(name for name in have if not name.startswith(prefix)),
  )
  ids, mask = None, storage.named(_MASK)
  if (offsets := storage.named(_IDS)) in have:
    distance = opened.raw(offsets).astype(np.int64)
    ids = distance + np.arange(len(distance))
  if mask in have:
    storage = dataclasses.replace(storage, mask=have[mask].shape[0])
  layer = read_layer(
    opened.config,
    target.config,
    ids=ids,
    own_embedding=storage.named("embed_tokens.weight") in have,
    folder=storage,
  )
  empty = block_shapes(layer, target)
  arrays = read_block(
    opened,
    _tensors(empty, layer),
    target.dtype,
    others=(_IDS, _MASK),
  )
  return with_layer(target, layer, filled(empty, arrays), rules)


def with_head(
  target: Transformer,
  *,
  ids: Int[np.ndarray, " W"] | None = None,
  taps: Iterable[int] | None = None,
  hidden: int | None = None,
  seed: int = 0,
  rules: Rules | None = None,
) -> Transformer:
  """Adds a new head to a target, to be trained.

  Its attention has the heads of the target's, its head begins as columns of the
  target's; all else is random.

  Args:
    target: Model of any family with one residual stream.
    ids: Ids of the draft vocabulary, different ones, int [W], see
      `frequent_ids`; None: all.
    taps: Layers before which the target's residual stream is read, from 0 to
      their number, for the stream after the last one; default: 2, L // 2 and
      L - 3.
    hidden: Width of its feedforward; default: 4 D.
    seed: Seed of its weights.
    rules: Rules that shard them over the target's mesh.

  Raises:
    ConfigError: If ids or layers are not the target's.
    OptionError: See `load`.
  """
  check_target(target, "add an EAGLE-3 head")
  integer("seed", seed, least=0)
  if hidden is not None:
    positive_int("hidden", hidden)
  config = config_for(
    target.config,
    json.loads(target.source),
    size=target.config.vocab if ids is None else len(ids),
    taps=None if taps is None else tuple(taps),
    hidden=hidden,
  )
  sorted_ids = None if ids is None else np.sort(np.asarray(ids, np.int64))
  dtype = str(jnp.dtype(target.saved_dtype or target.dtype))
  config["torch_dtype"] = dtype
  layer = read_layer(
    config,
    target.config,
    ids=sorted_ids,
    own_embedding=False,
    folder=HeadFolder(
      config=text_of(config),
      dtype=dtype,
      mask=0 if ids is None else target.config.vocab,
    ),
  )
  empty = block_shapes(layer, target)
  form = parameters(empty)
  head = target.head
  columns = (
    target.embed.weight.get_value().T if head is None else (
      head.weight.get_value()
    )
  )  # fmt: skip

  def make(columns: Shaped[Array, "D V"]) -> dict[str, Any]:
    block = layer.build(nnx.Rngs(seed), target.config.embed)
    arrays = arrays_of(block)
    drafted = columns if sorted_ids is None else columns[:, sorted_ids]
    arrays["head.weight"] = drafted
    return {
      path: x.astype(form[path].get_value().dtype) for path, x in arrays.items()
    }

  arrays = jax.jit(make)(columns)
  return with_layer(target, layer, filled(empty, arrays), rules)


def without_head(model: Transformer) -> Transformer:
  """The target of a model with a head.

  Raises:
    OptionError: If the model has none.
  """
  _layer_of(model)
  return without_layer(model)


def save(
  model: Transformer,
  folder: str | os.PathLike[str],
  *,
  dtype: DTypeLike | None = None,
  overwrite: bool = False,
) -> None:
  """Writes the head of a model, in the format that it was loaded from.

  A new head is written as SpecForge and SGLang have it, with d2t and t2d. The
  target is not written.

  Args:
    model: Model with a head.
    folder: Folder that does not exist yet, or its address.
    dtype: Dtype of the tensors; default: that of the folder, of a new head that
      of its target.
    overwrite: Whether to replace an existing folder.

  Raises:
    OptionError: If the model has no head, or the folder exists.
    CheckpointWriteError: If it cannot be written.
  """
  layer = _layer_of(model)
  storage = layer.folder
  block = head_block(model)
  vocabulary: dict[str, np.ndarray] = {}
  if not isinstance(layer.vocabulary, int):
    ids = layer.vocabulary.ids.astype(np.int64)
    vocabulary[storage.named(_IDS)] = ids - np.arange(len(ids))
    if storage.mask:
      in_vocabulary = np.isin(np.arange(storage.mask), ids)
      vocabulary[storage.named(_MASK)] = in_vocabulary
  written = storage.dtype if dtype is None else jnp.dtype(dtype).name
  config = json.loads(storage.config)
  if written != storage.dtype:
    config["dtype" if "dtype" in config else "torch_dtype"] = written
  write(
    folder,
    config,
    itertools.chain(
      written_tensors(block, _tensors(block, layer), written),
      vocabulary.items(),
    ),
    overwrite=overwrite,
  )


def frequent_ids(
  texts: Iterable[Int[np.ndarray, " _"]], size: int, vocab: int
) -> Int[np.ndarray, " W"]:
  """The most frequent ids of some texts, for a draft vocabulary.

  Of equally frequent ids the smaller ones are taken.

  Args:
    texts: Token ids of each text.
    size: Size of the draft vocabulary, W.
    vocab: Size of the target's vocabulary.

  Returns:
    Ids in ascending order, int64 [W].
  """
  integer("size", size, least=1, most=vocab)
  counts = np.zeros(vocab, np.int64)
  for text in texts:
    counts += np.bincount(np.asarray(text).reshape(-1), minlength=vocab)
  order = np.argsort(-counts, kind="stable")
  return np.sort(order[:size])


def _layer_of(model: Transformer) -> EagleLayer:
  return head_layer(model, EagleLayer, "an EAGLE-3 head", "eagle3")


def _prefixes(have: Mapping[str, Any]) -> tuple[str, str]:
  """Prefixes of all names of tensors, and of those of the layer."""
  end = "self_attn.q_proj.weight"
  for prefix in ("", "model."):
    for layer in _LAYERS:
      if f"{prefix}{layer}{end}" in have:
        return prefix, layer
  raise CheckpointMismatchError(
    "folder",
    "tensors without midlayer.self_attn.q_proj.weight",
    "an EAGLE-3 head: LlamaForCausalLMEagle3, or speculators of eagle3",
    "check the name of the folder, and that its weights are floats",
  )


def _tensors(block: EagleBlock, layer: EagleLayer) -> list[CheckpointTensor]:
  """The tensors of a head's folder, without those of its vocabulary."""
  storage = layer.folder
  names = {part: storage.layer + name for part, name in _PARTS.items()} | _OUTER
  tensors = module_tensors(block, names)
  return [dataclasses.replace(t, name=storage.named(t.name)) for t in tensors]
