"""RecurrentGemma: two gated linear recurrences to one windowed attention."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ringjax.models.families.family import (
  Family,
  attention,
  causal,
  llama_names,
  model,
  rms,
)
from ringjax.models.hf.config_reader import OTHER, ConfigReader
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.feedforward import Gated
from ringjax.nn.recurrent_layers.rg_lru import RgLru
from ringjax.ops.rope import Unscaled

_KINDS = ("recurrent", "attention")


def _kinds(r: ConfigReader) -> list[str]:
  """Kind of each layer: a list that is repeated."""
  default = ["recurrent", "recurrent", "attention"]
  block = r.value("block_types", default=default)
  count = r.layers()
  if (
    not isinstance(block, list)
    or not all(kind in list(_KINDS) for kind in block)
    or len(block) * 100 < count
  ):
    want = f"a list of {', '.join(_KINDS)}, for {count} layers in 100 repeats"
    raise r.error("block_types", block, want, OTHER)
  return [block[i % len(block)] for i in range(count)]


def _config(r: ConfigReader) -> TransformerConfig:
  hidden, (heads, _) = r.whole("hidden_size"), r.heads()
  r.only("head_dim", hidden // heads)
  width = r.whole("lru_width", default=hidden)
  if width % heads:
    raise r.error("lru_width", width, f"a multiple of the {heads} heads")
  # Deviations of the first values of weights.
  r.ignore("w_init_variance_scale", "final_w_init_variance_scale")
  act = r.act("hidden_activation", default="gelu_pytorch_tanh")
  window = r.whole("attention_window_size", "sliding_window", default=2048)
  rope = r.rope(partial=0.5)
  if type(rope.scaling) is not Unscaled:
    raise r.error(
      "rope_parameters", type(rope.scaling).__name__, "the type default", OTHER
    )
  mixers = {
    "recurrent": RgLru(
      heads=heads,
      dim=width // heads,
      taps=r.whole("conv1d_width", default=4, least=2),
      act=act,
    ),
    "attention": attention(
      r,
      rope,
      mask=causal(window),
      bias=r.flag("attention_bias", default=False),
      out_bias=True,
    ),
  }
  # The width of both maps into a feedforward together.
  inner = r.whole("intermediate_size", least=2) // 2
  return model(
    r,
    "recurrent_gemma",
    [mixers[kind] for kind in _kinds(r)],
    Gated(hidden=inner, act=act, bias=True),
    rms(r, offset=1.0),
    tied=True,
    # transformers keeps it in bfloat16.
    embed_scale=float(ml_dtypes.bfloat16(np.sqrt(hidden))),
    logit_cap=r.positive("logits_soft_cap", default=30.0),
    rope_scalable=False,
  )


_LRU = "temporal_block.rg_lru"
_NAMES = llama_names(
  {
    **{f"attention.{x}": f"temporal_block.{x}_proj" for x in "qkvo"},
    "attention.x": "temporal_block.linear_x",
    "attention.z": "temporal_block.linear_y",
    "attention.taps": "temporal_block.conv_1d",
    "attention.out": "temporal_block.linear_out",
    **{
      f"feedforward.{x}": f"mlp_block.{x}_proj" for x in ("gate", "up", "down")
    },
    "pre_attention": "temporal_pre_norm",
    "pre_feedforward": "channel_pre_norm",
  },
  leaves={
    "attention.input_gate": f"{_LRU}.input_gate_weight",
    "attention.input_bias": f"{_LRU}.input_gate_bias",
    "attention.decay_gate": f"{_LRU}.recurrent_gate_weight",
    "attention.decay_bias": f"{_LRU}.recurrent_gate_bias",
    "attention.rate": f"{_LRU}.recurrent_param",
  },
  norm="model.final_norm",
)
FAMILIES = (Family(name="recurrent_gemma", config=_config, names=_NAMES),)
