"""DFlash: a head that drafts a block of tokens in one pass.

Guarantees: weights and logits of the target are those without the head, and
its weights are not copied. A head is written as it was read: the same names and
config, and the same bits if the target's dtype has all numbers of the folder.
Memory: the head's weights; in caches the keys of its layers.
Ref: Chen et al. 2026, arXiv 2602.06036; folders as SpecForge and vLLM read them
(`DFlashDraftModel`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ringjax import fetched_models
from ringjax.models.checkpoint import stored_dtype
from ringjax.models.families.family import attention, biases, gated, rms
from ringjax.models.heads.eagle3_config import text_of
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
from ringjax.models.hf.config_reader import OTHER, ConfigReader
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.save import write
from ringjax.models.hf.tensors import CheckpointTensor, module_tensors
from ringjax.models.hf.unknown_keys import UnknownKeys
from ringjax.models.parameter_arrays import filled
from ringjax.models.transformer import Transformer, TransformerConfig
from ringjax.nn.draft_layers.dflash_layer import DFlashBlock, DFlashLayer
from ringjax.nn.draft_layers.eagle_layer import HeadFolder
from ringjax.nn.param import Rules

_PARTS = {
  "pre_attentions": "input_layernorm",
  "pre_feedforwards": "post_attention_layernorm",
  "attentions.q": "self_attn.q_proj",
  "attentions.k": "self_attn.k_proj",
  "attentions.v": "self_attn.v_proj",
  "attentions.o": "self_attn.o_proj",
  "attentions.q_norm": "self_attn.q_norm",
  "attentions.k_norm": "self_attn.k_norm",
  "feedforwards.gate": "mlp.gate_proj",
  "feedforwards.up": "mlp.up_proj",
  "feedforwards.down": "mlp.down_proj",
}
_OUTER = {"fuse": "fc", "hidden_norm": "hidden_norm", "out_norm": "norm"}


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
    The target with the head, which drafts with speculate="dflash".

  Raises:
    ConfigError: If the head is not supported, or does not fit the target.
    CheckpointFormatError: If a file is broken.
    CheckpointMismatchError: If tensors are missing, too many, of a wrong
      shape or not finite.
    UnsafeFormatError: If all weights are in files that would run code.
    OptionError: If the target has a head, several streams, or layers that are
      not on the devices.
  """
  check_target(target, "add a DFlash head")
  opened = Folder.open(fetched_models.resolve(folder, "folder"))
  # The folder's code is not run; SpecForge's is what is computed here.
  config = {k: x for k, x in opened.config.items() if k != "auto_map"}
  layer = _layer(
    config,
    target.config,
    HeadFolder(
      config=text_of(opened.config),
      dtype=str(jnp.dtype(stored_dtype(opened, {}))),
      path=str(folder),
    ),
  )
  empty = block_shapes(layer, target)
  arrays = read_block(opened, _tensors(empty, layer), target.dtype)
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
  overwrite: bool = False,
) -> None:
  """Writes the head of a model as it was read; the target is not written.

  Args:
    model: Model with a head.
    folder: Folder that does not exist yet, or its address.
    overwrite: Whether to replace an existing folder.

  Raises:
    OptionError: If the model has no head, or the folder exists.
    CheckpointWriteError: If it cannot be written.
  """
  layer = _layer_of(model)
  block = head_block(model)
  write(
    folder,
    json.loads(layer.folder.config),
    written_tensors(block, _tensors(block, layer), layer.folder.dtype),
    overwrite=overwrite,
  )


def _layer_of(model: Transformer) -> DFlashLayer:
  return head_layer(model, DFlashLayer, "a DFlash head", "dflash")


def _layer(
  config: Mapping[str, Any], target: TransformerConfig, folder: HeadFolder
) -> DFlashLayer:
  """The layer that a head's config.json describes, for a target.

  Raises:
    ConfigError: If a value is out of range, does not fit the target, or is of a
      head that is not supported.
  """
  unknown = UnknownKeys(config)
  r = ConfigReader(config, unknown=unknown)
  layers, depth = len(target.layers), r.layers()
  wanted = {
    "hidden_size": target.embed,
    "vocab_size": target.vocab,
    "num_target_layers": layers,
  }
  for key, value in wanted.items():
    if r.whole(key, default=value) != value:
      raise r.error(key, r.whole(key), f"{value}, as the target has", OTHER)
  r.layer_types(["full_attention"] * depth)
  if "sliding_attention" in r.layer_types(["full_attention"] * depth):
    want = "full_attention in all layers"
    raise r.error("layer_types", "sliding_attention", want, OTHER)
  r.ignore("max_window_layers", "sliding_window", "use_sliding_window")
  r.ignore("max_position_embeddings", "tie_word_embeddings")
  key = "dflash_config"
  part = r.part(key, r.value(key), closed=True)
  ids = part.value("target_layer_ids", default=_default_ids(layers, depth))
  is_int = lambda n: isinstance(n, int) and not isinstance(n, bool)
  valid = isinstance(ids, list) and ids and all(map(is_int, ids))
  if not valid or not all(-1 <= n < layers for n in ids):
    want = f"layers of the target, from -1 to {layers - 1}"
    raise part.error("target_layer_ids", ids, want, OTHER)
  mask_id = part.whole("mask_token_id", least=0, most=target.vocab - 1)
  part.must_be("projector_type", None, None)
  part.only("pure_draft_prefix_len", 0)
  part.only("shift_label", False)
  part.finish()
  norm = rms(r)
  layer = DFlashLayer(
    attention=attention(r, r.rope(), qk_norm=norm, **biases(r)),
    feedforward=gated(r),
    norm=norm,
    embed=target.embed,
    out_norm=norm,
    # Named are layers by whose outputs the head is fed.
    taps=tuple(n + 1 for n in ids),
    depth=depth,
    block=r.whole("block_size", least=2),
    mask_id=mask_id,
    folder=folder,
  )
  r.finish()
  unknown.warn()
  return layer


def _default_ids(layers: int, depth: int) -> list[int]:
  """Layers of a target whose outputs a head of `depth` layers reads."""
  if depth == 1:
    return [layers // 2]
  span = layers - 4
  return [round(1 + n * span / (depth - 1)) for n in range(depth)]


def _tensors(block: DFlashBlock, layer: DFlashLayer) -> list[CheckpointTensor]:
  """The tensors of a head's folder."""
  names = dict(_OUTER)
  for n in range(layer.depth):
    for part, name in _PARTS.items():
      start, _, end = part.partition(".")
      path = f"{start}.{n}.{end}" if end else f"{start}.{n}"
      names[path] = f"layers.{n}.{name}"
  return module_tensors(block, names)
