"""Llama 4, its text model."""

from __future__ import annotations

from ringjax.models.families.family import (
  IMAGE_KEYS,
  Family,
  Wrapper,
  attention,
  model,
  rms,
)
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import LLAMA, TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention import Temperature
from ringjax.nn.block import Layer
from ringjax.nn.feedforward import Experts, Gated, Sigmoid
from ringjax.ops.mask import Causal, Chunked


def _config(r: ConfigReader) -> TransformerConfig:
  count = r.layers()
  heads, _ = r.heads()
  rope = r.rope(r.head_dim(heads), theta=500000.0, interleaved=True)
  every = r.whole("no_rope_layer_interval", default=4)
  default = [int((i + 1) % every != 0) for i in range(count)]
  with_rope = r.flags("no_rope_layers", count, default)
  types = r.layer_types(
    count,
    ["chunked_attention" if turns else "full_attention" for turns in with_rope],
  )
  step = r.whole("interleave_moe_layer_step", default=1)
  mixed = r.numbers_of_layers("moe_layers", range(step - 1, count, step))
  chunk = r.whole("attention_chunk_size", default=8192)
  norm = rms(r, default=1e-5)
  bias = r.flag("attention_bias", default=False)
  late = norm if r.flag("use_qk_norm", default=True) else None
  temperature = None
  scale = r.positive("attn_scale", default=0.1)
  floor = r.positive("floor_scale", default=8192)
  # Older files have a number in place of true.
  tuned = r.value("attn_temperature_tuning", default=True)
  if not isinstance(tuned, int) or tuned < 0:
    raise r.error(
      "attn_temperature_tuning", tuned, "true or false", "repair the file"
    )
  if tuned:
    temperature = Temperature(scale=scale, floor=floor)
  act = r.act("hidden_act", default="silu")
  dense = Gated(hidden=r.whole("intermediate_size_mlp"), act=act)
  hidden = r.whole("intermediate_size")
  number = r.whole("num_local_experts")
  experts = Experts(
    experts=number,
    chosen=r.whole("num_experts_per_tok", most=number),
    hidden=hidden,
    act=act,
    router=Sigmoid(),
    scale_input=True,
    shared=hidden,
  )

  def layer(i: int) -> Layer:
    turns = with_rope[i]
    chunked = types[i] == "chunked_attention"
    return Layer(
      attention=attention(
        r,
        rope if turns else None,
        bias=bias,
        out_bias=bias,
        qk_norm=late if turns else None,
        qk_norm_late=True,
        qk_norm_weight=False,
        temperature=None if turns else temperature,
        mask=Causal() & Chunked(chunk) if chunked else Causal(),
      ),
      feedforward=experts if i in mixed else dense,
      norm=norm,
    )

  return model(r, "llama4", [layer(i) for i in range(count)])


def _names(config: TransformerConfig) -> TensorNames:
  del config
  return TensorNames(
    parts={
      **LLAMA,
      "feedforward.gate": "feed_forward.gate_proj",
      "feedforward.up": "feed_forward.up_proj",
      "feedforward.down": "feed_forward.down_proj",
      "feedforward.router": "feed_forward.router",
      "feedforward.shared.gate": "feed_forward.shared_expert.gate_proj",
      "feedforward.shared.up": "feed_forward.shared_expert.up_proj",
      "feedforward.shared.down": "feed_forward.shared_expert.down_proj",
    },
    leaves={"feedforward.down": "feed_forward.experts.down_proj"},
    columns={
      "feed_forward.experts.gate_up_proj": (
        ("feedforward.gate", "feedforward.up"),
        False,
      ),
    },
  )


_WRAPPER = Wrapper(
  type="llama4",
  keys=IMAGE_KEYS,
  defaults={
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
  },
  architecture="Llama4ForCausalLM",
  others=(
    "vision_model.",
    "multi_modal_projector.",
    "model.vision_model.",
    "model.multi_modal_projector.",
  ),
)

FAMILIES = (
  Family(
    name="llama4",
    types=("llama4_text",),
    config=_config,
    names=_names,
    wrapper=_WRAPPER,
  ),
)
