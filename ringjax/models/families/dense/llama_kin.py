"""Decoders with RMSNorm that differ from Llama in a detail or two, since 2024.

Seed-OSS, ERNIE 4.5, EXAONE 3 and 4, Arcee, Helium, HunYuan, Apertus, Ministral,
nanochat, CWM, InternLM 3, IQuest-Coder and HyperCLOVA X.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ringjax.models.families.dense.llama import granite_scales
from ringjax.models.families.family import (
  Family,
  attention,
  biases,
  causal,
  gated,
  llama_names,
  model,
  pattern,
  rms,
)
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import LLAMA, TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import Attention, Temperature
from ringjax.nn.feedforward import Gated, Plain
from ringjax.nn.linear import Norm


def _seed_oss(r: ConfigReader) -> TransformerConfig:
  r.ignore("residual_dropout")
  attend = attention(
    r,
    r.rope(),
    bias=r.flag("attention_bias", default=True),
    out_bias=r.flag("attention_out_bias", default=False),
  )
  feedforward = gated(r, bias=r.flag("mlp_bias", default=False))
  return model(r, "seed_oss", attend, feedforward, rms(r))


def _ernie(r: ConfigReader) -> TransformerConfig:
  options = biases(r, "use_bias")
  attend = attention(r, r.rope(theta=500000.0, interleaved=True), **options)
  feedforward = gated(r, bias=options["bias"])
  norm = rms(r, default=1e-5)
  return model(r, "ernie4_5", attend, feedforward, norm, tied=True)


def exaone_types(r: ConfigReader) -> tuple[str, ...]:
  """Kinds of EXAONE's layers: by a number, or by a text like "LLLG"."""
  count = r.layers()
  window = r.whole("sliding_window", absent=4096)
  every = r.value("sliding_window_pattern", default=4)
  if window is None:
    types = ["full_attention"] * count
  elif isinstance(every, str) and every and set(every) <= set("LG"):
    kinds = {"L": "sliding_attention", "G": "full_attention"}
    types = [kinds[every[i % len(every)]] for i in range(count)]
    types[-1] = "full_attention"
  elif isinstance(every, int) and every > 0:
    types = pattern(r, every)
  else:
    want = "a whole number from 1, or a text of L and G"
    raise r.error("sliding_window_pattern", every, want)
  return r.layer_types(types)


def exaone_attentions(r: ConfigReader, norm: Norm) -> list[Attention]:
  """EXAONE's attention, layer by layer, with a norm of queries and keys."""
  rope, types = r.rope(), exaone_types(r)
  window = r.whole("sliding_window", absent=4096)

  def attention_of(kind: str) -> Attention:
    # In models with windows, layers without one have no rotation.
    rotates = window is None or kind == "sliding_attention"
    mask = causal(window, kind)
    return attention(r, rope if rotates else None, qk_norm=norm, mask=mask)

  return [attention_of(kind) for kind in types]


def _exaone4(r: ConfigReader) -> TransformerConfig:
  norm = rms(r, default=1e-5)
  attentions = exaone_attentions(r, norm)
  layer = {"pre": False, "post": True}
  return model(r, "exaone4", attentions, gated(r), norm, layer=layer)


def _exaone(r: ConfigReader) -> TransformerConfig:
  """EXAONE 3 and 3.5: Llama with keys and tensors of other names."""
  r.ignore("embed_dropout")
  count = r.whole("num_layers", "num_hidden_layers", default=32, most=1000)
  width = r.whole("hidden_size", default=2048)
  feedforward = Gated(
    hidden=r.whole("intermediate_size", default=4 * width),
    act=r.act("activation_function", "hidden_act", default="silu"),
  )
  norm = Norm(eps=r.positive("layer_norm_epsilon", default=1e-5))
  attend = [attention(r, r.rope())] * count
  return model(r, "exaone", attend, feedforward, norm, tied=True)


def _cwm(r: ConfigReader) -> TransformerConfig:
  """Llama, in which three of four layers look back a window."""
  # Without a value transformers scales the context by 16: the file must have
  # it.
  r.value("rope_parameters", "rope_scaling")
  rope, window = r.rope(theta=1000000.0), r.whole("sliding_window", absent=8192)
  types = r.layer_types(
    [
      "sliding_attention" if i % 4 else "full_attention"
      for i in range(r.layers())
    ]
  )
  attentions = [attention(r, rope, mask=causal(window, x)) for x in types]
  return model(r, "cwm", attentions, gated(r), rms(r, default=1e-5))


def _internlm3(r: ConfigReader) -> TransformerConfig:
  """Llama, whose biases have other keys."""
  bias = r.flag("qkv_bias", "attention_bias", default=False)
  attend = attention(r, r.rope(), bias=bias, out_bias=bias)
  feedforward = gated(r, bias=r.flag("bias", "mlp_bias", default=False))
  return model(r, "internlm3", attend, feedforward, rms(r, default=1e-5))


def _iquestcoder(r: ConfigReader) -> TransformerConfig:
  r.only("clip_qkv", None)
  r.only("use_sliding_window", False)
  r.ignore("sliding_window", "max_window_layers")
  feedforward = gated(r, bias=r.flag("mlp_bias", default=False))
  attend = attention(r, r.rope(), **biases(r))
  return model(r, "iquestcoder", attend, feedforward, rms(r, default=1e-5))


def _hyperclovax(r: ConfigReader) -> TransformerConfig:
  """Granite, optionally with norms after each part, and logits multiplied."""
  scale = r.positive("attention_multiplier", default=r.head_dim() ** -0.5)
  scales = granite_scales(r) | {
    "logit_scale": r.positive("logits_scaling", default=1.0)
  }
  scales["layer"]["post"] = r.flag("use_post_norm", default=True)
  attend = attention(r, r.rope(), scale=scale, **biases(r))
  feedforward = gated(r, bias=r.flag("mlp_bias", default=False))
  return model(r, "hyperclovax", attend, feedforward, rms(r), **scales)


def _arcee(r: ConfigReader) -> TransformerConfig:
  feedforward = Plain(
    hidden=r.whole("intermediate_size"),
    act=r.act("hidden_act", default="relu2"),
    bias=r.flag("mlp_bias", default=False),
  )
  attend = attention(r, r.rope(), **biases(r))
  return model(r, "arcee", attend, feedforward, rms(r, default=1e-5))


def _helium(r: ConfigReader) -> TransformerConfig:
  rope = r.rope(theta=100000.0, interleaved=True)
  attend = attention(r, rope, bias=r.flag("attention_bias", default=False))
  feedforward = gated(r, bias=r.flag("mlp_bias", default=False))
  return model(r, "helium", attend, feedforward, rms(r, default=1e-8))


def hunyuan_attention(r: ConfigReader) -> Attention:
  """Attention of HunYuan, with norms of queries and keys after the rotation.

  Further keys of its configs are ignored where they mean nothing.
  """
  r.ignore("eod_token_id", "sep_token_id", "attention_head_dim")
  norm = rms(r, default=1e-5)
  return attention(r, r.rope(), qk_norm=norm, qk_norm_late=True, **biases(r))


def _hunyuan(r: ConfigReader) -> TransformerConfig:
  attend, norm = hunyuan_attention(r), rms(r, default=1e-5)
  return model(r, "hunyuan_v1_dense", attend, gated(r), norm)


def _apertus(r: ConfigReader) -> TransformerConfig:
  norm = rms(r, default=1e-5)
  r.must_be("hidden_act", "xielu", default="xielu")
  # Without a value transformers scales the context by 8: the file must have it.
  r.value("rope_parameters", "rope_scaling")
  rope = r.rope(theta=12000000.0)
  attend = attention(r, rope, qk_norm=norm, **biases(r))
  feedforward = Plain(hidden=r.whole("intermediate_size"), act="xielu")
  return model(r, "apertus", attend, feedforward, norm)


def _ministral(r: ConfigReader) -> TransformerConfig:
  """Qwen 2's windows without its biases."""
  window, rope = r.whole("sliding_window", absent=4096), r.rope()
  kind = "full_attention" if window is None else "sliding_attention"
  attentions = [
    attention(r, rope, mask=causal(window, kind))
    for kind in r.layer_types([kind] * r.layers())
  ]
  return model(r, "ministral", attentions, gated(r), rms(r))


def _ministral3(r: ConfigReader) -> TransformerConfig:
  """Mistral with queries that grow with their position, as in Llama 4."""
  rope_config = r.value("rope_parameters", "rope_scaling")
  part = r.part("rope_parameters", rope_config)
  tuned = Temperature(
    scale=part.positive("llama_4_scaling_beta"),
    floor=float(part.whole("original_max_position_embeddings")),
    counted=0,
  )
  beside = ("llama_4_scaling_beta", "max_position_embeddings")
  mask = causal(r.whole("sliding_window", default=None))
  rope = r.rope(beside=beside)
  attend = attention(r, rope, mask=mask, temperature=tuned)
  return model(r, "ministral3", attend, gated(r), rms(r, default=1e-5))


def _nanochat(r: ConfigReader) -> TransformerConfig:
  """Norms without weights; the rotation is in the other direction."""
  norm = dataclasses.replace(rms(r), weight=False)
  rope = dataclasses.replace(r.rope(), reverse=True)
  attend = attention(r, rope, qk_norm=norm, qk_norm_late=True, **biases(r))
  feedforward = Plain(
    hidden=r.whole("intermediate_size"),
    act=r.act("hidden_act", default="relu2"),
  )
  return model(
    r,
    "nanochat",
    attend,
    feedforward,
    norm,
    embed_norm=norm,
    logit_cap=r.positive("final_logit_softcapping", absent=15.0),
  )


_BEHIND: dict[str, Any] = {
  **{k: v for k, v in LLAMA.items() if not k.startswith("pre_")},
  "post_attention": "post_attention_layernorm",
  "post_feedforward": "post_feedforward_layernorm",
}
HUNYUAN_NORMS = {
  "attention.q_norm": "self_attn.query_layernorm",
  "attention.k_norm": "self_attn.key_layernorm",
}
_ACTIVATION = {
  f"feedforward.act.{name}": f"mlp.act_fn.{name}"
  for name in ("alpha_p", "alpha_n", "beta", "eps")
}

FAMILIES = (
  Family(name="seed_oss", config=_seed_oss),
  Family(name="ernie4_5", config=_ernie),
  Family(
    name="exaone4",
    config=_exaone4,
    names=lambda config: TensorNames(parts=_BEHIND),
  ),
  Family(
    name="exaone",
    config=_exaone,
    names=lambda config: TensorNames(
      parts={
        **{
          f"attention.{part}": f"attn.attention.{part}_proj" for part in "qkv"
        },
        "attention.o": "attn.attention.out_proj",
        "feedforward.gate": "mlp.c_fc_0",
        "feedforward.up": "mlp.c_fc_1",
        "feedforward.down": "mlp.c_proj",
        "pre_attention": "ln_1",
        "pre_feedforward": "ln_2",
      },
      layer="transformer.h.{}.",
      embed="transformer.wte",
      norm="transformer.ln_f",
      buffers=("rotary.inv_freq", "rotary_emb.inv_freq"),
    ),
  ),
  Family(name="cwm", config=_cwm),
  Family(name="internlm3", config=_internlm3),
  Family(name="iquestcoder", config=_iquestcoder),
  Family(
    name="hyperclovax",
    config=_hyperclovax,
    names=llama_names(
      {"post_attention": "post_norm1", "post_feedforward": "post_norm2"}
    ),
  ),
  Family(name="arcee", config=_arcee),
  Family(name="helium", config=_helium),
  Family(
    name="hunyuan_v1_dense",
    config=_hunyuan,
    names=llama_names(HUNYUAN_NORMS),
  ),
  Family(
    name="apertus",
    config=_apertus,
    names=llama_names(
      {
        "pre_attention": "attention_layernorm",
        "pre_feedforward": "feedforward_layernorm",
      },
      leaves=_ACTIVATION,
    ),
  ),
  Family(name="ministral", config=_ministral),
  Family(name="ministral3", config=_ministral3),
  Family(
    name="nanochat",
    config=_nanochat,
    names=llama_names(
      {"feedforward.up": "mlp.fc1", "feedforward.down": "mlp.fc2"}
    ),
  ),
)
