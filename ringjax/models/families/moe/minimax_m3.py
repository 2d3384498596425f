"""MiniMax-M3, its text model: blocks of keys that an index chooses, experts.

Attention is grouped-query with norms and a partial rotation. In sparse layers
the query heads of a kv head read the blocks that an index chose for them.
"""

from __future__ import annotations

import dataclasses

from ringjax.models.families.family import (
  Family,
  TextModel,
  Wrapper,
  attention,
  llama_names,
  model,
  rms,
)
from ringjax.models.families.moe.mixtures import W_EXPERTS, shared_names
from ringjax.models.hf.config_reader import OTHER, ConfigReader
from ringjax.models.hf.names import Fusion
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.attention_layers.choosing.index_block_attention import (
  IndexBlockAttention,
  KeyBlockIndex,
)
from ringjax.nn.feedforward import Clamped, Experts, Gated, Grouped
from ringjax.nn.linear import Norm

_FULL, _SPARSE = "full_attention", "minimax_m3_sparse"
# Keys of an index, as in published files: there in an object of their own.
_INDEX_KEYS = {
  "index_n_heads": "sparse_num_index_heads",
  "index_head_dim": "sparse_index_dim",
  "index_block_size": "sparse_block_size",
  "index_topk_blocks": "sparse_topk_blocks",
  "index_local_blocks": "sparse_local_block",
}
# Properties of the family that published files state.
_PROPERTIES = {
  "use_qk_norm": True,
  "qk_norm_type": "per_head",
  "use_gemma_norm": True,
  "attention_output_gate": False,
  "n_shared_experts": 1,
  "scoring_func": "sigmoid",
  "use_routing_bias": True,
}
_DEFAULTS = {
  "index_n_heads": 4,
  "index_head_dim": 128,
  "index_block_size": 128,
  "index_topk_blocks": 16,
  "index_local_blocks": 1,
}


def _flags(
  r: ConfigReader, key: str, count: int, names: tuple[str, str]
) -> list[str]:
  """Names of layers by flags in a published file; else the first name."""
  flags = r.value(key, default=None)
  if flags is None:
    return [names[0]] * count
  valid = isinstance(flags, list) and all(x in (0, 1) for x in flags)
  if not valid or len(flags) < count:
    raise r.error(key, flags, f"{count} numbers, each 0 or 1")
  return [names[int(x)] for x in flags[:count]]


def _attentions(r: ConfigReader, norm: Norm) -> list[Attention]:
  rope = r.rope(theta=5000000.0)
  rotated = r.whole("rotary_dim", absent=64)
  if rotated is not None and rotated != rope.dims:
    want = f"the {rope.dims} dims that partial_rotary_factor says"
    raise r.error("rotary_dim", rotated, want, OTHER)
  plain = attention(r, rope, qk_norm=norm)
  entry = r.value("sparse_attention_config", default=None)
  part = r.part("sparse_attention_config", {} if entry is None else entry)
  default = _flags(part, "sparse_attention_freq", r.layers(), (_FULL, _SPARSE))
  kinds = r.kinds("layer_types", (_FULL, _SPARSE), default, longer=True)
  sizes = {
    key: part.whole(
      older, default=r.whole(key, default=_DEFAULTS[key], least=0), least=0
    )
    for key, older in _INDEX_KEYS.items()
  }
  part.only("use_sparse_attention", True)
  part.only("sparse_score_type", "max")
  part.only("sparse_init_block", 0)
  key = "sparse_disable_index_value"
  if part.has(key):
    # An index without values only chooses.
    has_values = _flags(part, key, r.layers(), ("yes", "no"))
    if ("yes", _SPARSE) in zip(has_values, kinds, strict=True):
      raise part.error(key, part.value(key), "1 for every sparse layer", OTHER)
  part.finish()
  if _SPARSE not in kinds:
    return [plain] * len(kinds)
  for key in sizes:
    if key != "index_local_blocks" and not sizes[key]:
      raise r.error(key, 0, "1 or more")
  heads, dim = sizes["index_n_heads"], sizes["index_head_dim"]
  if heads != plain.kv_heads:
    want = f"{plain.kv_heads}, one for each kv head"
    raise r.error("index_n_heads", heads, want, OTHER)
  if dim < rope.dims:
    want = f"at least the {rope.dims} dims that are rotated"
    raise r.error("index_head_dim", dim, want)
  count, local = sizes["index_topk_blocks"], sizes["index_local_blocks"]
  if local > count:
    want = f"at most the {count} of index_topk_blocks"
    raise r.error("index_local_blocks", local, want)
  index = KeyBlockIndex(
    dim=dim,
    block=sizes["index_block_size"],
    count=count,
    local=local,
    norm=norm,
  )
  fields = {x.name: getattr(plain, x.name) for x in dataclasses.fields(plain)}
  sparse = IndexBlockAttention(**fields, index=index)
  return [sparse if kind == _SPARSE else plain for kind in kinds]


def _feedforwards(r: ConfigReader) -> list[Experts | Gated]:
  # Published files name the clamped gate here; transformers does not read it.
  act = r.text("hidden_act", default="silu")
  if act not in ("silu", "swigluoai"):
    raise r.error("hidden_act", act, "silu or swigluoai", OTHER)
  clamped = Clamped(
    alpha=r.positive("swiglu_alpha", default=1.702),
    limit=r.positive("swiglu_limit", default=7.0),
  )
  number = r.whole("num_local_experts", "num_experts", default=128)
  sparse = Experts(
    experts=number,
    chosen=r.whole("num_experts_per_tok", default=4, most=number),
    hidden=r.whole("intermediate_size", default=3072),
    act="silu",
    router=Grouped(scale=r.positive("routed_scaling_factor", default=2.0)),
    correction=True,
    clamped=clamped,
    shared=r.whole("shared_intermediate_size", default=3072),
    shared_clamped=True,
  )
  dense = Gated(
    hidden=r.whole("dense_intermediate_size", default=12288),
    act="silu",
    clamped=clamped,
  )
  by_kind: dict[str, Experts | Gated] = {"dense": dense, "sparse": sparse}
  kinds = ("dense", "sparse")
  default = ["sparse"] * r.layers()
  if r.has("moe_layer_freq"):
    default = _flags(r, "moe_layer_freq", r.layers(), kinds)
  else:
    r.ignore("moe_layer_freq")
  names = r.kinds("mlp_layer_types", kinds, default, longer=True)
  return [by_kind[name] for name in names]


def _config(r: ConfigReader) -> TransformerConfig:
  norm = rms(r, offset=1.0)
  for key, value in _PROPERTIES.items():
    r.only(key, value)
  # Layers that only predict further tokens.
  r.ignore("num_mtp_modules", "num_nextn_predict_layers")
  return model(r, "minimax_m3_vl", _attentions(r, norm), _feedforwards(r), norm)


_INDEX = ("q_proj", "k_proj", "q_norm", "k_norm")
_FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_NAMES = llama_names(
  {
    **{
      f"attention.index.{x.removesuffix('_proj')}": f"self_attn.indexer.{x}"
      for x in _INDEX
    },
    "feedforward.router": "mlp.gate",
    "feedforward.shared.down": "mlp.shared_experts.down_proj",
  },
  leaves={
    "feedforward.correction": "mlp.gate.e_score_correction_bias",
    "feedforward.down": "mlp.experts.down_proj",
  },
  fused={
    "mlp.gate_up_proj": Fusion(parts=("feedforward.gate", "feedforward.up")),
    "mlp.shared_experts.gate_up_proj": Fusion(
      parts=("feedforward.shared.gate", "feedforward.shared.up")
    ),
  },
  columns={
    "mlp.experts.gate_up_proj": (
      ("feedforward.gate", "feedforward.up"),
      False,
    ),
  },
  swapped=lambda name: name in _FUSED,
)
# Within the model of text and images, as it is published.
_PUBLISHED = llama_names(
  {
    **{
      f"attention.index.{x.removesuffix('_proj')}": f"self_attn.index_{x}"
      for x in _INDEX
    },
    "feedforward.router": "block_sparse_moe.gate",
    **shared_names("block_sparse_moe.shared_experts"),
  },
  leaves={"feedforward.correction": "block_sparse_moe.e_score_correction_bias"},
  experts=W_EXPERTS,
)

FAMILIES = (
  Family(
    name="minimax_m3_vl",
    config=_config,
    names=_NAMES,
    types=("minimax_m3_vl_text",),
    unread=lambda config: ("mtp.", "model.mtp."),
    wrapper=Wrapper(
      type="minimax_m3_vl",
      texts=(
        TextModel(
          type="minimax_m3_vl_text",
          architecture="MiniMaxM3VLForCausalLM",
          names=_PUBLISHED,
          defaults={
            "vocab_size": 200064,
            "hidden_size": 6144,
            "num_hidden_layers": 60,
            "num_attention_heads": 64,
            "max_position_embeddings": 524288,
          },
        ),
      ),
    ),
  ),
)
