"""Layers that predict further tokens: their parts and names in published files.

Transformers skips these tensors; the layouts are those that vLLM and SGLang
read. A file may have several such layers: the first one is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from ringjax.errors import OptionError
from ringjax.models.hf.names import TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.attention_layers.choosing.indexed_attention import (
  IndexedAttention,
)
from ringjax.nn.attention_layers.latent import Latent
from ringjax.nn.block import Layer
from ringjax.nn.draft_layers.predict_layer import PredictLayer
from ringjax.nn.feedforward import Gated, ShortcutFeedforward


def _last(config: TransformerConfig) -> Layer:
  """A layer like the last one."""
  return config.layers[-1]


def last_attention(config: TransformerConfig) -> Layer:
  """A layer like the last one that is no recurrent layer."""
  return next(
    layer
    for layer in reversed(config.layers)
    if isinstance(layer.attention, Attention | Latent)
  )


def first_dense(config: TransformerConfig) -> Layer:
  """A layer like the last one, with the feedforward of the first dense one."""
  dense = next(
    (x for x in config.layers if isinstance(x.feedforward, Gated)), None
  )
  if dense is None:
    raise OptionError(
      "predict_layers",
      f"a {config.family} all of whose layers have experts",
      "a dense layer, which says the width of the predicting layer's "
      "feedforward",
      "leave predict_layers out",
    )
  return dataclasses.replace(_last(config), feedforward=dense.feedforward)


def windowed_dense(config: TransformerConfig) -> Layer:
  """A layer of the last windowed attention and first dense feedforward."""
  layer = first_dense(config)
  windowed = (x.attention for x in reversed(config.layers))
  attention = next(
    (x for x in windowed if isinstance(x, Attention) and x.sinks), None
  )
  if attention is None:
    raise OptionError(
      "predict_layers",
      f"a {config.family} without layers that see a window",
      "one such layer, whose heads the predicting layer has",
      "leave predict_layers out",
    )
  return dataclasses.replace(layer, attention=attention)


def without_shortcut(config: TransformerConfig) -> Layer:
  """A layer with one attention and dense feedforward of the last one."""
  last = _last(config)
  feedforward = cast(ShortcutFeedforward, last.feedforward)
  return Layer(
    norm=last.norm, attention=last.attention, feedforward=feedforward.dense
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictNames:
  """The layer of a family that predicts one token further, and its names.

  Attributes:
    start: Prefix of its tensors, with {} for the number of the model's layers.
    block: Second part of the prefix of attention, feedforward and their norms.
    parts: Names after the prefix of `embed_norm`, `hidden_norm`, `join`,
      `out_norm`, and, after `block`, of other parts whose names differ from
      those of the model's layers.
    copies: Names after the prefix of tensors that are the same as the model's
      -> path of the model's parameter.
    layer: Function from the model's config to a layer of the same form.
    key: Key of config.json with the number of such layers.
    hidden_first: See `PredictLayer`.
    hands_normed: See `PredictLayer`.
  """

  start: str = "model.layers.{}."
  block: str = ""
  parts: Mapping[str, str]
  copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
  layer: Callable[[TransformerConfig], Layer] = _last
  key: str = "num_nextn_predict_layers"
  hidden_first: bool = False
  hands_normed: bool = False

  def prefix(self, config: TransformerConfig) -> str:
    """Prefix of the tensors for a model's config, without or with the layer."""
    count = len(config.layers) - (config.predicts is not None)
    return self.start.format(count)

  def stored(self, config: TransformerConfig, names: Iterable[str]) -> bool:
    """Whether a folder with these names of tensors has the layer."""
    path = f"{self.prefix(config)}{self.parts['join']}."
    return any(path in name for name in names)

  def with_layer(
    self, config: TransformerConfig, names: Iterable[str] | None = None
  ) -> TransformerConfig:
    """A config with the layer after the others.

    Args:
      config: Config of the model.
      names: Names of the tensors of a folder; None for a new model.

    Raises:
      OptionError: If the folder does not have the layer, or it is of a model
        with several streams or an index of keys.
    """
    if names is not None and not self.stored(config, names):
      join = f"{self.prefix(config)}{self.parts['join']}.weight"
      raise OptionError(
        "predict_layers",
        f"True, for a folder without {join}",
        "a folder that has a layer that predicts further tokens",
        "leave predict_layers out",
      )
    layer = self.layer(config)
    attention: Any = layer.attention
    reads_chosen = isinstance(attention, IndexedAttention) or (
      getattr(attention, "index", None) is not None
    )
    if config.streams is not None or reads_chosen:
      raise OptionError(
        "predict_layers",
        f"True, for a {config.family} with several streams or an index of keys",
        "one stream, and attention to all keys",
        "leave predict_layers out",
      )
    predicting = PredictLayer.of(
      layer,
      config.embed,
      out_norm=config.norm if "out_norm" in self.parts else None,
      hidden_first=self.hidden_first,
      hands_normed=self.hands_normed,
    )
    return dataclasses.replace(config, layers=(*config.layers, predicting))

  def named(self, names: TensorNames, config: TransformerConfig) -> TensorNames:
    """A model's names, with those of the layer."""
    number, start = len(config.layers) - 1, self.prefix(config)
    outer = ("embed_norm.", "hidden_norm.", "join.", "out_norm.")

    def prefix(layer: int, path: str) -> str:
      if layer != number:
        return names.layer.format(names.number(layer, path))
      return start if path.startswith(outer) else start + self.block

    return dataclasses.replace(
      names, parts_of={number: self.parts}, prefix=prefix
    )


def unread(config: Mapping[str, Any]) -> tuple[str, ...]:
  """Prefixes of the layers after the last one, which predict further tokens."""
  count, num_predict = (
    config.get(key) for key in ("num_hidden_layers", "num_nextn_predict_layers")
  )
  if not isinstance(count, int) or not isinstance(num_predict, int):
    return ()
  return tuple(
    f"model.layers.{count + i}." for i in range(min(num_predict, 1000))
  )


# DeepSeek-V3's file; its embedding and head are stored again.
NEXTN = PredictNames(
  parts={
    "embed_norm": "enorm",
    "hidden_norm": "hnorm",
    "join": "eh_proj",
    "out_norm": "shared_head.norm",
  },
  copies={
    "embed_tokens.weight": "embed.weight",
    "shared_head.head.weight": "head.weight",
  },
)
# Qwen3-Next and 3.5: attention of the kind that sees all tokens.
MTP = PredictNames(
  start="mtp.",
  block="layers.0.",
  parts={
    "embed_norm": "pre_fc_norm_embedding",
    "hidden_norm": "pre_fc_norm_hidden",
    "join": "fc",
    "out_norm": "norm",
  },
  copies={"embed_tokens.weight": "embed.weight"},
  layer=last_attention,
  key="mtp_num_hidden_layers",
  hands_normed=True,
)
# Hunyuan 3: as DeepSeek-V3's, but for the last norm and what is handed on.
HUNYUAN = PredictNames(
  parts={
    "embed_norm": "enorm",
    "hidden_norm": "hnorm",
    "join": "eh_proj",
    "out_norm": "final_layernorm",
  },
  hands_normed=True,
)
# MiMo-V2-Flash: attention with a window, and a dense feedforward.
MIMO = PredictNames(
  start="model.mtp.layers.0.",
  parts={
    "embed_norm": "enorm",
    "hidden_norm": "hnorm",
    "join": "eh_proj",
    "out_norm": "final_layernorm",
    "pre_feedforward": "pre_mlp_layernorm",
  },
  layer=windowed_dense,
  hands_normed=True,
)
# LongCat-Flash: one attention, and the first of the dense feedforwards.
LONGCAT = PredictNames(
  start="model.mtp.",
  block="layers.0.",
  parts={
    "embed_norm": "layers.0.enorm.m",
    "hidden_norm": "layers.0.hnorm.m",
    "join": "layers.0.eh_proj",
    "out_norm": "norm",
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv": "self_attn.kv_b_proj",
    "attention.o": "self_attn.o_proj",
    "feedforward.gate": "transformer_layer.mlp.gate_proj",
    "feedforward.up": "transformer_layer.mlp.up_proj",
    "feedforward.down": "transformer_layer.mlp.down_proj",
  },
  copies={"embed_tokens.weight": "embed.weight"},
  layer=without_shortcut,
  hands_normed=True,
)
# ERNIE 4.5: a dense layer before the model's own norm, as in FastDeploy.
ERNIE = PredictNames(
  start="model.",
  block="mtp_block.0.",
  parts={
    "embed_norm": "mtp_emb_norm.0",
    "hidden_norm": "mtp_hidden_norm.0",
    "join": "mtp_linear_proj.0",
  },
  layer=first_dense,
  hands_normed=True,
)
