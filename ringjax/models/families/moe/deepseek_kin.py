"""Families that attend, or choose experts, as DeepSeek-V3 does, since 2025.

GLM-4.7-Flash, GLM-5, Mistral 4 and Youtu have latent attention; Solar Open,
EXAONE's mixture and Hunyuan 3 have its choice of experts.
"""

from __future__ import annotations

import dataclasses

from ringjax.models.families.dense.llama_kin import exaone_attentions
from ringjax.models.families.family import (
  Family,
  attention,
  biases,
  experts,
  gated,
  llama_names,
  model,
  rms,
)
from ringjax.models.families.moe.deepseek import (
  GROUPED_NAMES,
  ROUTED,
  dense_then_sparse,
  grouped_router,
  indexed,
  latent,
  latent_names,
)
from ringjax.models.families.moe.mixtures import QWEN_EXPERTS, shared_names
from ringjax.models.families.predict_layers import HUNYUAN, NEXTN, unread
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import Temperature
from ringjax.nn.attention_layers.shared_index import (
  IndexSharingLayer,
  IndexStream,
)
from ringjax.nn.feedforward import Experts, Gated, Grouped


def feedforwards(
  r: ConfigReader, sparse: Experts, first: int = 0
) -> list[Experts | Gated]:
  """Feedforward of each layer: by its name, or plain in the first layers."""
  count = r.layers()
  first = r.whole("first_k_dense_replace", default=first, least=0)
  default = ["dense" if i < first else "sparse" for i in range(count)]
  kinds = r.kinds("mlp_layer_types", ("dense", "sparse"), default)
  if "dense" not in kinds:
    # Files may state a width that no layer has.
    r.ignore("intermediate_size")
    return [sparse] * count
  dense = gated(r)
  return [dense if kind == "dense" else sparse for kind in kinds]


def _chosen(
  r: ConfigReader,
  *,
  count: str = "n_routed_experts",
  shared: str = "n_shared_experts",
  scale: float = 1.0,
  older: str = "num_local_experts",
) -> Experts:
  """Experts with the router of DeepSeek-V3.

  Args:
    r: Reader of the config.
    count, shared: Keys of the numbers of experts, chosen and shared.
    scale: Default of `routed_scaling_factor`.
    older: Another key of the number of experts.
  """
  r.only("scoring_func", "sigmoid")
  r.only("topk_method", "noaux_tc")
  names = (count, "num_local_experts", older)
  router, max_chosen = grouped_router(r, count=names, scale=scale)
  width = r.whole("moe_intermediate_size")
  return experts(
    r,
    router,
    count=names,
    shared=width * r.whole(shared, default=1),
    most=max_chosen,
    correction=True,
  )


def _glm4_moe_lite(r: ConfigReader) -> TransformerConfig:
  turned = r.flag("rope_interleave", default=True)
  attend = latent(r, turned, query_latent=768)
  layers = feedforwards(r, _chosen(r, scale=1.8), first=1)
  return model(r, "glm4_moe_lite", attend, layers, rms(r, default=1e-5))


def index_types(r: ConfigReader, *, first_full: bool = True) -> list[str]:
  """Kind of each layer's index: "full", or "shared" for the last one before.

  Args:
    r: Reader of the config.
    first_full: Whether the first layer must have an index.
  """
  count = r.layers()
  freq = r.whole("index_topk_freq", default=1, least=0)
  offset = r.whole("index_skip_topk_offset", default=2, least=0)
  key, types = "index_topk_pattern", r.value("index_topk_pattern", default=None)
  if types is None:
    key, types = (
      "index_topk_freq",
      [
        "shared" if max(i - offset + 1, 0) % max(freq, 1) else "full"
        for i in range(count)
      ],
    )
  if isinstance(types, str):
    types = [{"F": "full", "S": "shared"}.get(x, x) for x in types]
  if r.has("indexer_types"):
    key = "indexer_types"
  types = r.value("indexer_types", default=types)
  if (
    not isinstance(types, list)
    or len(types) != count
    or not all(x in ("full", "shared") for x in types)
    or (first_full and types[0] != "full")
  ):
    first = ", the first one full" if first_full else ""
    want = f"{count} names, each full or shared{first}"
    raise r.error(key, types, want)
  return types


def _glm_moe_dsa(r: ConfigReader) -> TransformerConfig:
  """GLM-5: DeepSeek-V3.2 whose index rotates neighbouring dims, too.

  From GLM-5.2 on some layers read the keys that an earlier layer's index chose.
  """
  # Of published files; transformers has these properties in its code.
  r.only("rope_interleave", True)
  r.only("indexer_rope_interleave", True)
  r.only("moe_router_dtype", "float32")
  # Of layers that only predict further tokens.
  r.ignore("index_share_for_mtp_iteration")
  attend = latent(r, interleaved=True, query_latent=2048)
  attend = indexed(r, attend, heads=32, interleaved=True)
  types = index_types(r)
  # An older name, which counts.
  sparse = _chosen(r, scale=2.5, older="num_experts")
  layers = feedforwards(r, sparse, first=3)
  norm = rms(r, default=1e-5)
  if "shared" not in types:
    return model(r, "glm_moe_dsa", attend, layers, norm)
  assert attend.index is not None
  index = dataclasses.replace(attend.index, shared=True)
  attentions = [
    dataclasses.replace(
      attend, index=dataclasses.replace(index, reads=kind == "shared")
    )
    for kind in types
  ]
  return model(
    r,
    "glm_moe_dsa",
    attentions,
    layers,
    norm,
    kind=IndexSharingLayer,
    streams=IndexStream(index=index),
  )


def _mistral4(r: ConfigReader) -> TransformerConfig:
  """Latent attention with queries that grow with their position."""
  # Without a value transformers scales the context by 128: the file must have
  # it.
  rope_config = r.value("rope_parameters", "rope_scaling")
  part = r.part("rope_parameters", rope_config)
  temperature = Temperature(
    scale=part.positive("llama_4_scaling_beta"),
    floor=float(part.whole("original_max_position_embeddings")),
    counted=0,
  )
  rotated = r.whole("qk_rope_head_dim")
  head_dim = rotated + r.whole("qk_nope_head_dim")
  # The part that rotates is one of whole heads.
  rope = r.rope(
    head_dim,
    partial=rotated / head_dim,
    interleaved=r.flag("rope_interleave", default=True),
    beside=("llama_4_scaling_beta", "max_position_embeddings"),
  )
  if rope.dims != rotated:
    want = f"the part {rotated} of {head_dim}, as qk_rope_head_dim says"
    got = part.value("partial_rotary_factor", default=None)
    raise r.error("rope_parameters.partial_rotary_factor", got, want)
  attend = dataclasses.replace(
    latent(r, rope.interleaved, query_latent=1024, rope=rope),
    temperature=temperature,
  )
  router, max_chosen = grouped_router(r)
  router = dataclasses.replace(router, softmax=True)
  layers = dense_then_sparse(r, router, 0, 1, most=max_chosen)
  return model(r, "mistral4", attend, layers, rms(r))


def _youtu(r: ConfigReader) -> TransformerConfig:
  turned = r.flag("rope_interleave", default=True)
  attend = latent(r, turned, turned_by_head_dim=True)
  # Initialisation of the weights.
  r.ignore("embedding_initializer_range")
  return model(r, "youtu", attend, gated(r), rms(r), tied=True)


def _solar_open(r: ConfigReader) -> TransformerConfig:
  r.only("use_qk_norm", False)
  r.only("first_k_dense_replace", 0)
  rope = r.rope(theta=1000000.0)
  attend = attention(r, rope, bias=r.flag("attention_bias", default=False))
  layers = feedforwards(r, _chosen(r))
  return model(r, "solar_open", attend, layers, rms(r, default=1e-5))


def _exaone_moe(r: ConfigReader) -> TransformerConfig:
  """EXAONE 4's attention, with norms before the parts of a layer."""
  norm = rms(r, default=1e-5)
  sparse = _chosen(
    r, count="num_experts", shared="num_shared_experts", scale=2.5
  )
  layers = feedforwards(r, sparse, first=1)
  return model(r, "exaone_moe", exaone_attentions(r, norm), layers, norm)


def _hy_v3(r: ConfigReader) -> TransformerConfig:
  norm = rms(r, default=1e-5)
  rope = r.rope(theta=11158840.0)
  attend = attention(r, rope, qk_norm=norm, **biases(r))
  # Precision of a sum, which is float32 here in any case.
  r.ignore("enable_moe_fp32_combine")
  width = r.whole("moe_intermediate_size")
  scale = r.positive("router_scaling_factor", default=2.826)
  sparse = experts(
    r,
    Grouped(scale=scale),
    shared=width * r.whole("num_shared_experts", default=1),
    correction=True,
  )
  layers = feedforwards(r, sparse, first=1)
  return model(r, "hy_v3", attend, layers, norm)


_FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def fused_names(config: TransformerConfig) -> TensorNames:
  """Latent attention's names, with all experts [out, in] in two tensors."""
  pair = ("feedforward.gate", "feedforward.up")
  return dataclasses.replace(
    latent_names(config),
    leaves={"feedforward.down": _FUSED[1]},
    columns={_FUSED[0]: (pair, False)},
    swapped=lambda name: name in _FUSED,
    experts={},
  )


FAMILIES = (
  Family(
    name="glm_moe_dsa",
    config=_glm_moe_dsa,
    names=latent_names,
    unread=unread,
  ),
  Family(name="mistral4", config=_mistral4, names=fused_names),
  Family(
    name="glm4_moe_lite",
    config=_glm4_moe_lite,
    names=latent_names,
    unread=unread,
    predict=NEXTN,
  ),
  Family(name="youtu", config=_youtu, names=latent_names, unread=unread),
  Family(
    name="solar_open",
    config=_solar_open,
    names=GROUPED_NAMES,
    unread=unread,
  ),
  Family(
    name="exaone_moe",
    config=_exaone_moe,
    names=llama_names(
      ROUTED,
      leaves={"feedforward.correction": "mlp.e_score_correction_bias"},
      experts=QWEN_EXPERTS,
    ),
    unread=lambda config: ("mtp.",),
  ),
  Family(
    name="hy_v3",
    config=_hy_v3,
    names=llama_names(
      {
        "feedforward.router": "mlp.router.gate",
        **shared_names("mlp.shared_mlp"),
      },
      leaves={"feedforward.correction": "mlp.expert_bias"},
      experts=QWEN_EXPERTS,
    ),
    unread=unread,
    predict=HUNYUAN,
  ),
)
