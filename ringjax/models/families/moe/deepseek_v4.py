"""DeepSeek-V4: near and compressed keys, several streams, experts by ids.

Layers attend to a window, and most also to compressed keys at one of two rates,
the denser of which has an index. Hyper-connections mix the streams. Experts of
the first layers are fixed by a token's id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringjax.models.families.family import Family, llama_names, model, rms
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.compressed import (
  CompressedAttention,
  Compression,
  EntryIndex,
  NearKeys,
)
from ringjax.nn.feedforward import ClampedProduct, Experts, Scored
from ringjax.nn.residuals import HyperConnection
from ringjax.nn.streams import HyperStreams
from ringjax.ops.rope import Dynamic, LongRope, Rope

_NEAR = "sliding_attention"
_SPARSE = "compressed_sparse_attention"
_HEAVY = "heavily_compressed_attention"
_KINDS = (_NEAR, _SPARSE, _HEAVY)
_HASHED, _ROUTED = "hash_moe", "moe"
# Kinds of layers by the rates of a published config.
_BY_RATE = {0: _NEAR, 4: _SPARSE, 128: _HEAVY}


def _kinds(r: ConfigReader) -> list[str]:
  """Kind of each layer's attention."""
  count = r.layers()
  rates = r.value("compress_ratios", default=None)
  if rates is None:
    default = [_SPARSE if i > 1 and i % 2 else _HEAVY for i in range(count)]
    return r.kinds("layer_types", _KINDS, default, longer=True)
  valid = isinstance(rates, list) and all(
    type(rate) is int and rate in _BY_RATE for rate in rates
  )
  if not valid or len(rates) < count:
    want = f"{count} numbers, each one of {sorted(_BY_RATE)}"
    raise r.error("compress_ratios", rates, want)
  default = [_BY_RATE[rate] for rate in rates]
  return r.kinds("layer_types", _KINDS, default, longer=True)


def _rate(r: ConfigReader, kind: str, old_key: str, default: int) -> int:
  """Number of tokens of a compressed key, for layers of one kind."""
  rates = r.value("compress_rates", default=None)
  part = r.part("compress_rates", {} if rates is None else rates)
  rate = part.whole(kind, default=default, least=1, most=65536)
  # It counts before the newer key.
  return r.whole(old_key, default=rate, least=1, most=65536)


def _fraction(r: ConfigReader, dim: int) -> float:
  """Part of a head's dims that are rotated."""
  rotated = r.whole("qk_rope_head_dim", default=None)
  default = 64 / 512 if rotated is None else rotated / dim
  fraction = r.positive("partial_rotary_factor", default=default)
  return fraction


def _rope(
  r: ConfigReader, label: str, theta: float, dim: int, fraction: float
) -> Rope:
  """Rotation of layers without (`main`) or with compressed keys (`compress`).

  Args:
    r: Reader of the config.
    label: Key of the rotation.
    theta: Base of the rotation, where the file has one for both.
    dim: Size of a head.
    fraction: Part of the dims that are rotated, where the file has one for
      both.
  """
  rope_config = r.value("rope_parameters", "rope_scaling", default=None) or {}
  part = r.part("rope_parameters", rope_config).all()
  nested = all(isinstance(part.get(key), dict) for key in ("main", "compress"))
  if nested:
    rotation = {"partial_rotary_factor": 1.0} | part[label]
  elif label == "main":
    rotation = {"rope_type": "default"}
  else:
    rotation = {
      key: x
      for key, x in part.items()
      if key not in ("main", "compress", "rope_theta")
    }
    if rotation.get("rope_type", rotation.get("type")) == "yarn":
      # No magnitude, unless the file has one.
      rotation = {"attention_factor": 1.0} | rotation
  if not nested:
    rotation |= {"rope_theta": theta, "partial_rotary_factor": fraction}
  config = {
    "rope_parameters": rotation,
    "max_position_embeddings": r.whole(
      "max_position_embeddings", default=1048576
    ),
  }
  rope = r.part(label, config).rope(dim, interleaved=True)
  if isinstance(rope.scaling, Dynamic | LongRope):
    want = "a rotation that does not depend on the length of the text"
    raise r.error("rope_parameters", rotation.get("rope_type"), want)
  return rope


def _attentions(r: ConfigReader) -> list[CompressedAttention]:
  kinds = _kinds(r)
  heads = r.whole("num_attention_heads", default=64)
  r.must_be("num_key_value_heads", 1, default=1)
  dim = r.whole("head_dim", default=512)
  window = r.whole("sliding_window", default=128)
  groups = r.whole("o_groups", default=8)
  if heads % groups:
    raise r.error("o_groups", groups, f"a divisor of the {heads} heads")
  eps = r.positive("rms_norm_eps", default=1e-6)
  fraction = _fraction(r, dim)
  theta = r.positive("rope_theta", default=10000.0)
  compress_theta = r.positive("compress_rope_theta", default=160000.0)
  main = _rope(r, "main", theta, dim, fraction)
  compress = _rope(r, "compress", compress_theta, dim, fraction)
  index = EntryIndex(
    heads=r.whole("index_n_heads", default=64),
    dim=r.whole("index_head_dim", default=128),
    count=r.whole("index_topk", default=512),
  )
  if index.dim < compress.dims and _SPARSE in kinds:
    want = f"at least the {compress.dims} dims that are rotated"
    raise r.error("index_head_dim", index.dim, want)
  sparse = _rate(r, _SPARSE, "compress_rate_csa", 4)
  heavy = _rate(r, _HEAVY, "compress_rate_hca", 128)
  compressions = {
    _NEAR: None,
    _SPARSE: Compression(rate=sparse, overlap=True, dim=dim, index=index),
    _HEAVY: Compression(rate=heavy, overlap=False, dim=dim),
  }
  return [
    CompressedAttention(
      keys=NearKeys(
        heads=heads,
        dim=dim,
        window=window,
        rope=main if kind == _NEAR else compress,
        scale=dim**-0.5,
      ),
      compression=compressions[kind],
      query_latent=r.whole("q_lora_rank", default=1024),
      groups=groups,
      out_latent=r.whole("o_lora_rank", default=1024),
      eps=eps,
    )
    for kind in kinds
  ]


def _feedforwards(r: ConfigReader) -> list[Experts]:
  count = r.layers()
  hashed = r.whole("num_hash_layers", default=3, least=0)
  default = [_HASHED if i < hashed else _ROUTED for i in range(count)]
  kinds = r.kinds("mlp_layer_types", (_HASHED, _ROUTED), default, longer=True)
  number = r.whole("n_routed_experts", "num_local_experts", default=256)
  hidden = r.whole("moe_intermediate_size", "intermediate_size", default=2048)
  r.must_be("n_shared_experts", 1, default=1)
  # The weights of the chosen experts always add up to the factor.
  r.ignore("norm_topk_prob")
  score = r.text("scoring_func", default="sqrtsoftplus")
  if score not in ("sqrtsoftplus", "sigmoid"):
    raise r.error("scoring_func", score, "sqrtsoftplus or sigmoid")
  act = r.act("hidden_act", default="silu")
  limit = r.positive("swiglu_limit", default=10.0)
  scale = r.positive("routed_scaling_factor", default=1.5)
  chosen = r.whole("num_experts_per_tok", default=6, most=number)
  vocab = r.whole("vocab_size", default=129280)

  def experts(by_id: bool) -> Experts:
    return Experts(
      experts=number,
      chosen=chosen,
      hidden=hidden,
      act=act,
      router=Scored(
        root=score == "sqrtsoftplus", scale=scale, by_id=vocab * by_id
      ),
      correction=not by_id,
      clamped=ClampedProduct(act=act, limit=limit),
      shared=hidden,
      shared_clamped=True,
    )

  return [experts(kind == _HASHED) for kind in kinds]


def _config(r: ConfigReader) -> TransformerConfig:
  norm = rms(r)
  r.must_be("attention_bias", False, default=False)
  r.must_be("mlp_bias", False, default=False)
  # The tensors of published files show which of them have four bits.
  r.ignore("expert_dtype")
  count = r.whole("hc_mult", default=4, most=64)
  if ((2 + count) * count) * count * r.whole("hidden_size") > 2**40:
    raise r.error("hc_mult", count, "maps of 2^40 numbers in all")
  floor = r.positive("hc_eps", default=1e-6)
  connection = HyperConnection(
    count=count,
    iterations=r.whole("hc_sinkhorn_iters", default=20, least=1, most=1000),
    floor=floor,
    eps=norm.eps,
  )
  return model(
    r,
    "deepseek_v4",
    _attentions(r),
    _feedforwards(r),
    norm,
    layer={"residuals": (connection, connection)},
    streams=HyperStreams(count=count, floor=floor, eps=norm.eps),
  )


_PARTS = {
  "attention.q_down": "attn.wq_a",
  "attention.q_norm": "attn.q_norm",
  "attention.q": "attn.wq_b",
  "attention.kv": "attn.wkv",
  "attention.kv_norm": "attn.norm",
  "attention.o_down": "attn.wo_a",
  "attention.o": "attn.wo_b",
  "attention.index_q": "attn.indexer.wq_b",
  "attention.index_weights": "attn.indexer.weights_proj",
  "pre_attention": "attn_norm",
  "pre_feedforward": "ffn_norm",
  "feedforward.router": "ffn.gate",
  "feedforward.shared.gate": "ffn.shared_experts.w1",
  "feedforward.shared.up": "ffn.shared_experts.w3",
  "feedforward.shared.down": "ffn.shared_experts.w2",
}
_LEAVES = {
  "attention.sinks": "attn.attn_sink",
  "feedforward.correction": "ffn.gate.bias",
  "feedforward.table": "ffn.gate.tid2eid",
}
for _part, _name in (
  ("compressor", "attn.compressor"),
  ("index_compressor", "attn.indexer.compressor"),
):
  _PARTS |= {
    f"attention.{_part}.value": f"{_name}.wkv",
    f"attention.{_part}.gate": f"{_name}.wgate",
    f"attention.{_part}.norm": f"{_name}.norm",
  }
  _LEAVES[f"attention.{_part}.bias"] = f"{_name}.ape"
for _part, _name in (("attention", "attn"), ("feedforward", "ffn")):
  _LEAVES |= {
    f"{_part}_residual.map": f"hc_{_name}_fn",
    f"{_part}_residual.base": f"hc_{_name}_base",
    f"{_part}_residual.scale": f"hc_{_name}_scale",
  }

_PUBLISHED = {
  "model.embed_tokens.": "embed.",
  "model.hc_head.hc_": "hc_head_",
  "model.": "",
}


def _spellings(name: str) -> tuple[str, ...]:
  """The name as transformers saves it, and as published files have it."""
  published = name.replace(".attn.norm.", ".attn.kv_norm.")
  for prefix, short in _PUBLISHED.items():
    if published.startswith(prefix):
      published = short + published.removeprefix(prefix)
      break
  return tuple(dict.fromkeys((name, published)))


def _unread(config: Mapping[str, Any]) -> tuple[str, ...]:
  """Prefix of the layers that predict further tokens."""
  del config
  return ("mtp.", "model.mtp.")


FAMILIES = (
  Family(
    name="deepseek_v4",
    config=_config,
    names=llama_names(
      _PARTS,
      leaves=_LEAVES,
      experts={
        "feedforward.gate": "ffn.experts.{}.w1.weight",
        "feedforward.up": "ffn.experts.{}.w3.weight",
        "feedforward.down": "ffn.experts.{}.w2.weight",
      },
      integers=lambda path: path == "feedforward.table",
      head="head",
      streams={
        "map": "model.hc_head.hc_fn",
        "base": "model.hc_head.hc_base",
        "scale": "model.hc_head.hc_scale",
      },
    ),
    unread=_unread,
    spellings=_spellings,
  ),
)
