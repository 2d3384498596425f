"""GPT-J, GPT-NeoX and GPT-OSS."""

from __future__ import annotations

from ringjax.models.families.family import (
  Family,
  attention,
  biases,
  causal,
  experts,
  model,
  pattern,
  rms,
)
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import LLAMA, Fusion, TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.feedforward import Clamped, Plain, Softmax
from ringjax.nn.linear import Norm
from ringjax.ops.rope import Rope


def _gptj(r: ConfigReader) -> TransformerConfig:
  embed = r.whole("n_embd", "hidden_size", default=4096)
  heads = r.whole("n_head", "num_attention_heads", default=16)
  if embed % heads:
    raise r.error("n_embd", embed, f"a multiple of {heads} heads")
  head_dim = embed // heads
  rotated = r.whole("rotary_dim", default=None, absent=64)
  if rotated is None or rotated % 2 or rotated > head_dim:
    want = f"an even number of the {head_dim} dims of a head"
    raise r.error("rotary_dim", rotated, want)
  # Keys of published files that transformers does not read.
  r.only("rotary", True)
  r.only("scale_attn_weights", True)
  # Also another name of the bound.
  r.whole("n_positions", "max_position_embeddings", default=2048)
  return model(
    r,
    "gptj",
    Attention(
      heads=heads,
      kv_heads=heads,
      head_dim=head_dim,
      rope=Rope(theta=10000.0, dims=rotated, interleaved=True),
    ),
    Plain(
      hidden=r.whole("n_inner", default=4 * embed),
      act=r.act("activation_function", default="gelu_new"),
      bias=True,
    ),
    Norm(eps=r.positive("layer_norm_epsilon", default=1e-5), layer=True),
    layer={"parallel": True, "shared_norm": True},
    head_bias=True,
    rope_scalable=False,
  )


_GPTJ_NAMES = TensorNames(
  layer="transformer.h.{}.",
  parts={
    "attention.q": "attn.q_proj",
    "attention.k": "attn.k_proj",
    "attention.v": "attn.v_proj",
    "attention.o": "attn.out_proj",
    "feedforward.up": "mlp.fc_in",
    "feedforward.down": "mlp.fc_out",
    "pre_attention": "ln_1",
  },
  embed="transformer.wte",
  norm="transformer.ln_f",
  buffers=("attn.bias", "attn.masked_bias"),
  base="transformer.",
)


def _neox(r: ConfigReader) -> TransformerConfig:
  r.only("num_key_value_heads", r.whole("num_attention_heads"))
  return model(
    r,
    "gpt_neox",
    attention(r, r.rope(partial=0.25), **biases(r, default=True)),
    Plain(
      hidden=r.whole("intermediate_size"),
      act=r.act("hidden_act", default="gelu"),
      bias=True,
    ),
    Norm(eps=r.positive("layer_norm_eps", default=1e-5), layer=True),
    layer={"parallel": r.flag("use_parallel_residual", default=True)},
  )


def _neox_names(config: TransformerConfig) -> TensorNames:
  mixer = config.layers[0].attention
  assert isinstance(mixer, Attention)
  return TensorNames(
    layer="gpt_neox.layers.{}.",
    parts={
      "attention.o": "attention.dense",
      "feedforward.up": "mlp.dense_h_to_4h",
      "feedforward.down": "mlp.dense_4h_to_h",
      "pre_attention": "input_layernorm",
      "pre_feedforward": "post_attention_layernorm",
    },
    fused={
      "attention.query_key_value": Fusion(
        parts=("attention.q", "attention.k", "attention.v"),
        groups=mixer.heads,
      )
    },
    embed="gpt_neox.embed_in",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    buffers=("attention.bias", "masked_bias", "rotary_emb.inv_freq"),
  )


def _oss(r: ConfigReader) -> TransformerConfig:
  # Without a value transformers scales the context by 32: the file must have
  # it.
  r.value("rope_parameters", "rope_scaling")
  rope = r.rope(theta=150000.0)
  options = {**biases(r, default=True), "sinks": True}
  window = r.whole("sliding_window", default=128)
  # An older name, which transformers does not read.
  chosen = "num_experts_per_tok"
  r.only("experts_per_token", r.whole(chosen))
  feedforward = experts(
    r,
    Softmax(renormalise=True),
    chosen=(chosen,),
    hidden="intermediate_size",
    bias=True,
    router_bias=True,
    clamped=Clamped(
      alpha=r.positive("swiglu_alpha", default=1.702),
      limit=r.positive("swiglu_limit", default=7.0),
    ),
  )
  attentions = [
    attention(r, rope, mask=causal(window, kind), **options)
    for kind in r.layer_types(pattern(r, 2))
  ]
  return model(r, "gpt_oss", attentions, feedforward, rms(r, default=1e-5))


_OSS_NAMES = TensorNames(
  parts={
    **{k: v for k, v in LLAMA.items() if not k.startswith("feedforward")},
    "feedforward.router": "mlp.router",
  },
  leaves={
    "attention.sinks": "self_attn.sinks",
    "feedforward.down": "mlp.experts.down_proj",
    "feedforward.down_bias": "mlp.experts.down_proj_bias",
  },
  columns={
    f"mlp.experts.gate_up_proj{end}": (
      (f"feedforward.gate{end}", f"feedforward.up{end}"),
      True,
    )
    for end in ("", "_bias")
  },
)

FAMILIES = (
  Family(name="gptj", config=_gptj, names=lambda config: _GPTJ_NAMES),
  Family(name="gpt_neox", config=_neox, names=_neox_names),
  Family(name="gpt_oss", config=_oss, names=lambda config: _OSS_NAMES),
)
