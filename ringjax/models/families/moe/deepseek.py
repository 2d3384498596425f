"""DeepSeek-V2, V3 and V3.2, and models with their routing.

V2 and V3 have latent attention and grouped routing, V3.2 also an index of keys;
dots.llm1 and GLM-4.5 have the routing alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ringjax.models.families.family import (
  Family,
  attention,
  biases,
  causal,
  experts,
  gated,
  llama_names,
  model,
  rms,
)
from ringjax.models.families.moe.mixtures import QWEN_EXPERTS, shared_names
from ringjax.models.families.predict_layers import NEXTN, unread
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.key_index import KeyIndex
from ringjax.nn.attention_layers.latent import Latent
from ringjax.nn.feedforward import Experts, Gated, Grouped
from ringjax.ops.rope import Rope, Unscaled, yarn_magnitude


def latent(
  r: ConfigReader,
  interleaved: bool,
  *,
  query_latent: int | None = 1536,
  theta: float = 10000.0,
  turned_by_head_dim: bool = False,
  rope: Rope | None = None,
) -> Latent:
  """Latent attention of a config.

  Args:
    r: Reader of the config.
    interleaved: Whether neighbouring dims rotate as a pair.
    query_latent: Default of `q_lora_rank`; null means none.
    theta: Default of the rotation's base.
    turned_by_head_dim: Whether transformers rotates as many dims as
      `head_dim` says, if it is present.
    rope: Rotation; None: that of a config whose vectors have the dims that
      rotate.
  """
  heads, kv_heads = r.heads()
  if kv_heads != heads:
    raise r.error("num_key_value_heads", kv_heads, f"the {heads} heads")
  rotated = r.whole("qk_rope_head_dim")
  plain = r.whole("qk_nope_head_dim")
  rope = rope or r.rope(rotated, interleaved=interleaved, theta=theta)
  if r.has("head_dim") and turned_by_head_dim:
    r.only("head_dim", rotated)
  r.ignore("head_dim", "qk_head_dim")
  scale = (plain + rotated) ** -0.5
  scaling = r.value("rope_parameters", "rope_scaling", default={})
  if type(rope.scaling) is not Unscaled and scaling.get("mscale_all_dim"):
    factor = yarn_magnitude(
      getattr(rope.scaling, "factor", 1.0), float(scaling["mscale_all_dim"])
    )
    scale *= factor * factor
  return Latent(
    heads=heads,
    plain=plain,
    rope=rope,
    value=r.whole("v_head_dim"),
    latent=r.whole("kv_lora_rank"),
    query_latent=r.whole("q_lora_rank", absent=query_latent),
    scale=scale,
    bias=r.flag("attention_bias", default=False),
    eps=1e-6,
  )


def _grouped(
  r: ConfigReader,
  *,
  groups: int,
  best: int,
  scale: float,
  first: int,
  renormalise: bool,
) -> list[Experts | Gated]:
  """Feedforward of each layer, with experts chosen as in DeepSeek-V3.

  Args:
    r: Reader of the config.
    groups, best, scale, first, renormalise: Defaults of `n_group`,
      `topk_group`, `routed_scaling_factor`, `first_k_dense_replace` and
      `norm_topk_prob`.
  """
  router, max_chosen = grouped_router(
    r, groups=groups, best=best, scale=scale, renormalise=renormalise
  )
  return dense_then_sparse(
    r, router, first, 1, most=max_chosen, correction=True
  )


def grouped_router(
  r: ConfigReader,
  *,
  count: tuple[str, ...] = ("n_routed_experts", "num_local_experts"),
  group: str = "n_group",
  norm: str = "norm_topk_prob",
  groups: int = 1,
  best: int = 1,
  scale: float = 1.0,
  renormalise: bool = True,
) -> tuple[Grouped, int]:
  """DeepSeek-V3's router, and the largest number of experts per token.

  Args:
    r: Reader of the config.
    count: Keys of the number of experts.
    group, norm: Keys of the number of groups, and of whether the weights of
      the chosen experts add up to 1.
    groups, best, scale, renormalise: Defaults of `n_group`, `topk_group`,
      `routed_scaling_factor` and `norm_topk_prob`.
  """
  number = r.whole(*count)
  groups = r.whole(group, default=groups)
  if number % groups or number < 2 * groups:
    want = f"a divisor of the {number} experts, with two or more in a group"
    raise r.error(group, groups, want)
  best = r.whole("topk_group", default=best, most=groups)
  router = Grouped(
    groups=groups,
    best=best,
    renormalise=r.flag(norm, default=renormalise),
    scale=r.positive("routed_scaling_factor", default=scale),
  )
  return router, number // groups * best


def dense_then_sparse(
  r: ConfigReader, router: Grouped, first: int, shared: int, **options: Any
) -> list[Experts | Gated]:
  """Plain feedforwards in the first layers, experts in the others."""
  # Training settings.
  r.ignore("ep_size", "seq_aux", "aux_loss_alpha")
  r.only("moe_layer_freq", 1)
  sparse = experts(
    r,
    router,
    count=("n_routed_experts", "num_local_experts"),
    shared=r.whole("moe_intermediate_size")
    * r.whole("n_shared_experts", default=shared),
    **options,
  )
  dense = gated(r)
  first = r.whole("first_k_dense_replace", default=first, least=0)
  return [dense if i < first else sparse for i in range(r.layers())]


def _v3(r: ConfigReader) -> TransformerConfig:
  turned = r.flag("rope_interleave", default=True)
  attend = latent(r, turned, turned_by_head_dim=True)
  r.must_be("scoring_func", "sigmoid", default="sigmoid")
  r.must_be("topk_method", "noaux_tc", default="noaux_tc")
  feedforwards = _grouped(
    r, groups=8, best=4, scale=2.5, first=3, renormalise=True
  )
  return model(r, "deepseek_v3", attend, feedforwards, rms(r))


# Name of a layer with an index in transformers, and in some published files.
INDEXED = ("indexed_attention", "deepseek_sparse_attention")


def indexed(
  r: ConfigReader, attend: Latent, *, heads: int, interleaved: bool
) -> Latent:
  """Latent attention whose queries read the keys that an index scores best.

  Args:
    r: Reader of the config.
    attend: The attention without an index.
    heads: Default of `index_n_heads`.
    interleaved: Whether neighbouring dims of the index rotate as a pair.
  """
  if attend.query_latent is None:
    raise r.error("q_lora_rank", None, "a size: the index reads that latent")
  assert attend.rope is not None
  dim = r.whole("index_head_dim", default=128)
  if dim < attend.rope.dims:
    want = f"at least the {attend.rope.dims} of qk_rope_head_dim"
    raise r.error("index_head_dim", dim, want)
  default = [INDEXED[0]] * r.layers()
  r.kinds("layer_types", INDEXED, default)
  r.must_be("mlp_bias", False, default=False)
  index = KeyIndex(
    heads=r.whole("index_n_heads", default=heads),
    dim=dim,
    count=r.whole("index_topk", default=2048),
    interleaved=interleaved,
  )
  return dataclasses.replace(attend, index=index)


def _v32(r: ConfigReader) -> TransformerConfig:
  """V3 with queries that read only the keys that an index scores best."""
  r.must_be("rope_interleave", True, default=True)
  attend = latent(r, interleaved=True)
  attend = indexed(r, attend, heads=64, interleaved=False)
  r.must_be("scoring_func", "sigmoid", default="sigmoid")
  r.must_be("topk_method", "noaux_tc", default="noaux_tc")
  feedforwards = _grouped(
    r, groups=8, best=4, scale=2.5, first=3, renormalise=True
  )
  names = ["dense" if isinstance(f, Gated) else "sparse" for f in feedforwards]
  r.only("mlp_layer_types", names)
  return model(r, "deepseek_v32", attend, feedforwards, rms(r))


def _v2(r: ConfigReader) -> TransformerConfig:
  """V2, with a softmax over experts; a group's score is its best expert's."""
  attend = latent(r, interleaved=True)
  r.must_be("scoring_func", "softmax", default="softmax")
  r.must_be("norm_topk_prob", False, default=False)
  method = r.text("topk_method", default="greedy")
  groups = r.whole("n_group", default=None)
  best = r.whole("topk_group", default=None)
  if method == "greedy":
    groups, best = 1, 1
  elif method != "group_limited_greedy" or not groups or not best:
    want = "greedy, or group_limited_greedy with n_group and topk_group"
    raise r.error("topk_method", method, want)
  number = r.whole("n_routed_experts", "num_local_experts", default=64)
  if number % groups or best > groups:
    want = f"a divisor of the {number} experts, not below topk_group"
    raise r.error("n_group", groups, want)
  router = Grouped(
    groups=groups,
    best=best,
    renormalise=False,
    scale=r.positive("routed_scaling_factor", default=1.0),
    softmax=True,
    judged=1,
  )
  max_chosen = number // groups * best
  feedforwards = dense_then_sparse(r, router, 0, 2, most=max_chosen)
  return model(r, "deepseek_v2", attend, feedforwards, rms(r))


def _dots1(r: ConfigReader) -> TransformerConfig:
  norm, rope = rms(r), r.rope()
  r.must_be("scoring_func", "noaux_tc", default="noaux_tc")
  window = r.whole("sliding_window", absent=4096)
  first_sliding = r.whole("max_window_layers", default=62, least=0)
  slides = lambda i: window is not None and i >= first_sliding
  types = r.layer_types(
    [
      "sliding_attention" if slides(i) else "full_attention"
      for i in range(r.layers())
    ]
  )
  attentions = [
    attention(r, rope, qk_norm=norm, mask=causal(window, kind), **biases(r))
    for kind in types
  ]
  feedforwards = _grouped(
    r, groups=1, best=1, scale=1.0, first=0, renormalise=False
  )
  return model(r, "dots1", attentions, feedforwards, norm)


def _glm4_moe(r: ConfigReader) -> TransformerConfig:
  norm = rms(r, default=1e-5)
  attend = attention(
    r,
    r.rope(partial=0.5),
    bias=r.flag("attention_bias", default=False),
    qk_norm=norm if r.flag("use_qk_norm", default=False) else None,
  )
  feedforwards = _grouped(
    r, groups=1, best=1, scale=1.0, first=1, renormalise=True
  )
  return model(r, "glm4_moe", attend, feedforwards, norm)


ROUTED = {
  "feedforward.router": "mlp.gate",
  **shared_names("mlp.shared_experts"),
}
_CORRECTION = {"feedforward.correction": "mlp.gate.e_score_correction_bias"}
GROUPED_NAMES = llama_names(ROUTED, leaves=_CORRECTION, experts=QWEN_EXPERTS)


def latent_names(config: TransformerConfig) -> TensorNames:
  mixer = config.layers[0].attention
  low = isinstance(mixer, Latent) and mixer.query_latent is not None
  return llama_names(
    {
      "attention.q_down": "self_attn.q_a_proj",
      "attention.q_norm": "self_attn.q_a_layernorm",
      "attention.q": "self_attn.q_b_proj" if low else "self_attn.q_proj",
      "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
      "attention.kv_norm": "self_attn.kv_a_layernorm",
      "attention.kv": "self_attn.kv_b_proj",
      "attention.index.q": "self_attn.indexer.wq_b",
      "attention.index.k": "self_attn.indexer.wk",
      "attention.index.k_norm": "self_attn.indexer.k_norm",
      "attention.index.weights": "self_attn.indexer.weights_proj",
      **ROUTED,
    },
    leaves=_CORRECTION,
    experts=QWEN_EXPERTS,
  )(config)


FAMILIES = (
  Family(
    name="deepseek_v3",
    config=_v3,
    names=latent_names,
    unread=unread,
    predict=NEXTN,
  ),
  Family(name="deepseek_v32", config=_v32, names=latent_names, unread=unread),
  Family(name="deepseek_v2", config=_v2, names=latent_names),
  Family(name="dots1", config=_dots1, names=GROUPED_NAMES),
  Family(
    name="glm4_moe",
    config=_glm4_moe,
    names=GROUPED_NAMES,
    unread=unread,
    predict=NEXTN,
  ),
)
