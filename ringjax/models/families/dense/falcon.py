"""Falcon: the 7B, the 40B and the RefinedWeb form."""

from __future__ import annotations

from ringjax.models.families.family import Family, model
from ringjax.models.hf.config_reader import OTHER, ConfigReader
from ringjax.models.hf.names import Fusion, TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import Attention, alibi_slopes
from ringjax.nn.feedforward import Plain
from ringjax.nn.linear import Norm


def _falcon(r: ConfigReader) -> TransformerConfig:
  heads = r.whole("num_attention_heads", "n_head")
  embed = r.whole("hidden_size", "n_embed")
  if embed % heads:
    raise r.error("hidden_size", embed, f"a multiple of {heads} heads")
  h = embed // heads
  new = r.flag("new_decoder_architecture", default=False)
  multi_query = r.flag("multi_query", default=True)
  stated_kv_heads = r.whole("num_kv_heads", "n_head_kv", default=heads)
  if not new and not multi_query and stated_kv_heads != heads:
    raise r.error("num_kv_heads", stated_kv_heads, f"the {heads} heads", OTHER)
  kv_heads = stated_kv_heads if new else 1 if multi_query else heads
  if heads % kv_heads:
    raise r.error("num_kv_heads", kv_heads, f"a divisor of {heads} heads")
  alibi = r.flag("alibi", default=False)
  rope = r.rope(h)
  norms = 2 if new else 1
  norms = r.whole("num_ln_in_parallel_attn", most=2, default=norms)
  parallel = r.flag("parallel_attn", default=True)
  if new and not parallel:
    want = "true, as new_decoder_architecture is"
    raise r.error("parallel_attn", parallel, want, OTHER)
  bias = r.flag("bias", default=False)
  r.must_be("apply_residual_connection_post_layernorm", False, default=False)
  slopes = tuple(s * h**-0.5 for s in alibi_slopes(heads))
  hidden = r.whole("ffn_hidden_size", default=4 * embed)
  r.only("ff_factor", hidden / embed)
  act = r.act("activation", "hidden_act", default="gelu")
  return model(
    r,
    "falcon",
    Attention(
      heads=heads,
      kv_heads=kv_heads,
      head_dim=h,
      rope=None if alibi else rope,
      alibi=slopes if alibi else None,
      bias=bias,
      out_bias=bias,
    ),
    Plain(hidden=hidden, act=act, bias=bias),
    Norm(eps=r.positive("layer_norm_epsilon", default=1e-5), layer=True),
    layer={"parallel": parallel, "shared_norm": parallel and norms == 1},
    tied=True,
  )


def _names(config: TransformerConfig) -> TensorNames:
  layer = config.layers[0]
  assert isinstance(layer.attention, Attention)
  two_norms = layer.parallel and not layer.shared_norm
  return TensorNames(
    layer="transformer.h.{}.",
    parts={
      "attention.o": "self_attention.dense",
      "feedforward.up": "mlp.dense_h_to_4h",
      "feedforward.down": "mlp.dense_4h_to_h",
      "pre_attention": "ln_attn" if two_norms else "input_layernorm",
      "pre_feedforward": "ln_mlp" if two_norms else "post_attention_layernorm",
    },
    fused={
      "self_attention.query_key_value": Fusion(
        parts=("attention.q", "attention.k", "attention.v"),
        groups=layer.attention.kv_heads,
      )
    },
    embed="transformer.word_embeddings",
    norm="transformer.ln_f",
  )


FAMILIES = (
  Family(
    name="falcon",
    config=_falcon,
    names=_names,
    types=("falcon", "RefinedWeb", "RefinedWebModel"),
  ),
)
