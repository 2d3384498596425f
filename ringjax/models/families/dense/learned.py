"""GPT-2, GPTBigCode and OPT, which have learned position embeddings."""

from __future__ import annotations

import dataclasses

from ringjax.models.families.family import Family, llama_names, model
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import Fusion, TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.feedforward import Plain
from ringjax.nn.linear import LearnedPositions, Norm


def _gpt2(r: ConfigReader) -> TransformerConfig:
  heads = r.whole("n_head", "num_attention_heads", default=12)
  embed = r.whole("hidden_size", "n_embd")
  if embed % heads:
    raise r.error("n_embd", embed, f"a multiple of {heads} heads")
  scale = 1.0
  if r.flag("scale_attn_weights", default=True):
    scale = (embed // heads) ** -0.5
  by_layer = r.flag("scale_attn_by_inverse_layer_idx", default=False)
  # Order and precision of products: always float32 here.
  r.ignore("reorder_and_upcast_attn")
  # Options of classifiers, and another name of the positions.
  r.ignore("summary_activation", "summary_first_dropout", "summary_type")
  r.ignore("summary_proj_to_labels", "summary_use_proj", "n_ctx")
  attentions = [
    Attention(
      heads=heads,
      kv_heads=heads,
      head_dim=embed // heads,
      scale=scale / (i + 1) if by_layer else scale,
      bias=True,
      out_bias=True,
    )
    for i in range(r.layers())
  ]
  return _like_gpt2(r, "gpt2", attentions, act="gelu_new")


def _like_gpt2(
  r: ConfigReader,
  name: str,
  attention: Attention | list[Attention],
  act: str,
) -> TransformerConfig:
  """GPT-2 but for its attention.

  Args:
    r: Reader of the config.
    name: Name of the family.
    attention: Attention of every layer, or a list with one per layer.
    act: Default of the activation.
  """
  embed = r.whole("hidden_size", "n_embd")
  return model(
    r,
    name,
    attention,
    Plain(
      hidden=r.whole("n_inner", default=4 * embed),
      act=r.act("activation_function", default=act),
      bias=True,
    ),
    Norm(eps=r.positive("layer_norm_epsilon", default=1e-5), layer=True),
    tied=True,
    positions=LearnedPositions(
      count=_count(r, "n_positions", "max_position_embeddings", default=1024)
    ),
    bound="n_positions",
  )


def _gpt_bigcode(r: ConfigReader) -> TransformerConfig:
  """GPT-2 whose heads may share their keys."""
  heads = r.whole("n_head", "num_attention_heads", default=12)
  embed = r.whole("hidden_size", "n_embd")
  if embed % heads:
    raise r.error("n_embd", embed, f"a multiple of {heads} heads")
  scaled = r.flag("scale_attn_weights", default=True)
  # transformers computes it from `multi_query`.
  r.ignore("num_key_value_heads")
  # Precision of products: always float32 here.
  r.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
  attention = Attention(
    heads=heads,
    kv_heads=1 if r.flag("multi_query", default=True) else heads,
    head_dim=embed // heads,
    scale=(embed // heads) ** -0.5 if scaled else 1.0,
    bias=True,
    out_bias=True,
  )
  return _like_gpt2(r, "gpt_bigcode", attention, act="gelu_pytorch_tanh")


def _opt(r: ConfigReader) -> TransformerConfig:
  heads = r.whole("num_attention_heads", default=12)
  embed = r.whole("hidden_size")
  if embed % heads:
    raise r.error("hidden_size", embed, f"a multiple of {heads} heads")
  # The second smallest OPT has norms after its layers and a narrow embedding.
  r.must_be("do_layer_norm_before", True, default=True)
  r.only("_remove_final_layer_norm", False)
  r.only("word_embed_proj_dim", embed)
  # Training settings, and an older name of a token.
  r.ignore("activation_dropout", "dropout", "init_std", "layerdrop")
  bias = r.flag("enable_bias", default=True)
  weight = r.flag("layer_norm_elementwise_affine", default=True)
  return model(
    r,
    "opt",
    Attention(
      heads=heads,
      kv_heads=heads,
      head_dim=embed // heads,
      bias=bias,
      out_bias=bias,
    ),
    Plain(
      hidden=r.whole("ffn_dim", default=3072),
      act=r.act("activation_function", default="relu"),
      bias=bias,
    ),
    Norm(eps=1e-5, layer=True, weight=weight),
    tied=True,
    positions=LearnedPositions(
      count=_count(r, "max_position_embeddings", default=2048), offset=2
    ),
    bound="max_position_embeddings",
  )


def _count(r: ConfigReader, *keys: str, default: int) -> int:
  """Number of learned positions."""
  return r.whole(*keys, most=2**24, default=default)


_GPT2_NAMES = TensorNames(
  layer="transformer.h.{}.",
  parts={
    "attention.o": "attn.c_proj",
    "feedforward.up": "mlp.c_fc",
    "feedforward.down": "mlp.c_proj",
    "pre_attention": "ln_1",
    "pre_feedforward": "ln_2",
  },
  fused={
    "attn.c_attn": Fusion(parts=("attention.q", "attention.k", "attention.v"))
  },
  # Its maps are [in, out] on disk.
  swapped=lambda name: name.endswith(
    ("c_attn.weight", "c_proj.weight", "c_fc.weight")
  ),
  embed="transformer.wte",
  positions="transformer.wpe",
  norm="transformer.ln_f",
  buffers=("attn.bias", "attn.masked_bias"),
  base="transformer.",
)


def _bigcode_names(config: TransformerConfig) -> TensorNames:
  """GPT-2's names, with maps [out, in] whose rows are grouped by kv heads."""
  mixer = config.layers[0].attention
  assert isinstance(mixer, Attention)
  ((name, fusion),) = _GPT2_NAMES.fused.items()
  grouped = dataclasses.replace(fusion, groups=mixer.kv_heads)
  return dataclasses.replace(
    _GPT2_NAMES, fused={name: grouped}, swapped=lambda name: False
  )


FAMILIES = (
  Family(name="gpt2", config=_gpt2, names=lambda config: _GPT2_NAMES),
  Family(name="gpt_bigcode", config=_gpt_bigcode, names=_bigcode_names),
  Family(
    name="opt",
    config=_opt,
    names=llama_names(
      {
        "attention.o": "self_attn.out_proj",
        "feedforward.up": "fc1",
        "feedforward.down": "fc2",
        "pre_attention": "self_attn_layer_norm",
        "pre_feedforward": "final_layer_norm",
      },
      layer="model.decoder.layers.{}.",
      embed="model.decoder.embed_tokens",
      positions="model.decoder.embed_positions",
      norm="model.decoder.final_layer_norm",
      base="model.",
    ),
  ),
)
