"""Mixtures of experts.

Mixtral, Phi-3.5-MoE, Qwen 2 and 3, OLMoE, FlexOlmo, Granite, ERNIE 4.5, HunYuan
and MiniMax-M2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ringjax.models.families.dense.llama import (
  OLMO_PARTS,
  granite,
  olmo,
  qwen,
)
from ringjax.models.families.dense.llama_kin import (
  HUNYUAN_NORMS,
  hunyuan_attention,
)
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
from ringjax.models.families.predict_layers import ERNIE
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import Fusion, TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.feedforward import (
  Experts,
  Gated,
  Grouped,
  Softmax,
  SparseMixer,
)
from ringjax.nn.linear import Norm
from ringjax.ops.rope import LongRope, Unscaled


def _mixtral(r: ConfigReader) -> TransformerConfig:
  mask = causal(r.whole("sliding_window", default=None))
  return model(
    r,
    "mixtral",
    attention(r, r.rope(theta=1000000.0), mask=mask),
    experts(r, Softmax(renormalise=True), hidden="intermediate_size"),
    rms(r, default=1e-5),
  )


def _phimoe(r: ConfigReader) -> TransformerConfig:
  """Mixtral with LayerNorm and another choice of experts.

  Texts beyond the original context have LongRoPE's long divisors, as in the
  authors' code; transformers 5 keeps the short ones.
  """
  scales = ("short_mscale", "long_mscale")
  rope = r.rope(theta=1000000.0, beside=scales)
  if type(rope.scaling) is not Unscaled:
    name = "rope_parameters" if r.has("rope_parameters") else "rope_scaling"
    part = r.part(name, r.value(name))
    if not isinstance(rope.scaling, LongRope):
      kind = part.text("rope_type", "type")
      raise part.error("rope_type", kind, "default or longrope")
    # transformers reads it here only.
    part.whole("original_max_position_embeddings")
    short, long = (part.positive(key) for key in scales)
    if short != long:
      raise part.error("long_mscale", long, f"{short}, as short_mscale says")
    scaling = dataclasses.replace(rope.scaling, attention=short)
    rope = dataclasses.replace(rope, scaling=scaling)
  # Noise of training.
  r.ignore("input_jitter_noise")
  noise = r.number("router_jitter_noise", default=0.01)
  if noise < 0:
    raise r.error("router_jitter_noise", noise, "a number from 0")
  chosen = "num_experts_per_tok"
  r.must_be(chosen, 2, default=2)
  sparse = Experts(
    experts=r.whole("num_local_experts", least=2, default=16),
    chosen=2,
    hidden=r.whole("intermediate_size"),
    act=r.act("hidden_act", default="silu"),
    router=SparseMixer(tolerance=2 * noise),
  )
  mask = causal(r.whole("sliding_window", default=None))
  norm = Norm(eps=r.positive("rms_norm_eps", default=1e-5), layer=True)
  return model(
    r,
    "phimoe",
    attention(r, rope, mask=mask, **biases(r)),
    sparse,
    norm,
    head_bias=r.flag("lm_head_bias", default=False),
    rope_scalable=type(rope.scaling) is not Unscaled,
  )


def qwen_feedforwards(
  r: ConfigReader, sparse: Experts
) -> list[Experts | Gated]:
  """Feedforward of each layer: `sparse`, except where the file says dense."""
  dense = gated(r)
  without = r.numbers_of_layers("mlp_only_layers", [])
  step = r.whole("decoder_sparse_step", default=1)
  return [
    dense if i in without or (i + 1) % step else sparse
    for i in range(r.layers())
  ]


def _qwen3_moe(r: ConfigReader) -> TransformerConfig:
  norm = rms(r)
  slides = r.flag("use_sliding_window", default=False)
  window = r.whole("sliding_window", absent=4096)
  r.ignore("max_window_layers")
  r.only("qkv_bias", False)
  r.only("use_qk_norm", True)
  r.only("shared_expert_intermediate_size", 0)
  attend = attention(
    r,
    r.rope(),
    qk_norm=norm,
    mask=causal(window if slides else None),
    **biases(r),
  )
  renormalise = r.flag("norm_topk_prob", default=False)
  sparse = experts(r, Softmax(renormalise=renormalise))
  return model(r, "qwen3_moe", attend, qwen_feedforwards(r, sparse), norm)


def _qwen2_moe(r: ConfigReader) -> TransformerConfig:
  sparse = experts(
    r,
    Softmax(renormalise=r.flag("norm_topk_prob", default=False)),
    shared=r.whole("shared_expert_intermediate_size"),
    shared_gate=True,
  )
  options = {"bias": r.flag("qkv_bias", default=True)}
  feedforwards = qwen_feedforwards(r, sparse)
  return qwen(r, "qwen2_moe", feedforwards, **options)


def _olmoe(r: ConfigReader) -> TransformerConfig:
  norm = rms(r, default=1e-5)
  attend = attention(
    r,
    r.rope(),
    qk_norm=norm,
    qk_norm_whole=True,
    clip=r.positive("clip_qkv", default=None),
    **biases(r),
  )
  renormalise = r.flag("norm_topk_prob", default=False)
  sparse = experts(
    r, Softmax(renormalise=renormalise), hidden="intermediate_size"
  )
  return model(r, "olmoe", attend, sparse, norm)


def _flex_olmo(r: ConfigReader) -> TransformerConfig:
  """OLMo 2 with the feedforward of OLMoE."""
  router = Softmax(renormalise=r.flag("norm_topk_prob", default=False))
  return olmo(
    r,
    "flex_olmo",
    ("full_attention",) * r.layers(),
    500000.0,
    feedforward=experts(r, router, hidden="intermediate_size"),
    eps=1e-6,
  )


def _granitemoe(r: ConfigReader) -> TransformerConfig:
  sparse = experts(r, Softmax(renormalise=True), hidden="intermediate_size")
  return granite(r, "granitemoe", sparse)


def _granitemoeshared(r: ConfigReader) -> TransformerConfig:
  router = Softmax(renormalise=True)
  shared = r.whole("shared_intermediate_size", default=0, least=0)
  sparse = experts(r, router, hidden="intermediate_size", shared=shared)
  return granite(r, "granitemoeshared", sparse)


def _ernie_moe(r: ConfigReader) -> TransformerConfig:
  """Experts that are ranked by their probability plus a learned offset."""
  r.must_be("use_bias", False, default=False)
  count, width = ("moe_num_experts", "num_experts"), "moe_intermediate_size"
  r.positive("moe_norm_min", default=1e-12)
  shared = r.whole("moe_num_shared_experts", default=2, least=0)
  sparse = experts(
    r,
    Grouped(softmax=True),
    count=count,
    chosen=("moe_k", "num_experts_per_tok"),
    hidden=width,
    correction=True,
    shared=shared * r.whole(width),
  )
  dense, layers = gated(r), r.layers()
  every = r.whole("moe_layer_interval", default=1)
  first = r.whole("moe_layer_start_index", default=1, least=0)
  last = r.whole("moe_layer_end_index", default=-1, least=-1)
  last = layers - 1 if last == -1 else last
  feedforwards = [
    sparse if first <= i <= last and (i + 1) % every == 0 else dense
    for i in range(layers)
  ]
  attend = attention(r, r.rope(theta=500000.0, interleaved=True))
  norm = rms(r, default=1e-5)
  return model(r, "ernie4_5_moe", attend, feedforwards, norm, tied=True)


def _hunyuan_moe(r: ConfigReader) -> TransformerConfig:
  """Layers may choose different numbers of experts."""
  count, width = r.layers(), "intermediate_size"
  numbers = r.value("moe_topk", "num_experts_per_tok", default=1)
  numbers = numbers if isinstance(numbers, list) else [numbers] * count
  experts_ = r.whole("num_experts", "num_local_experts", default=1)
  is_count = lambda n: type(n) is int and 1 <= n <= experts_
  if len(numbers) != count or not all(map(is_count, numbers)):
    want = f"a number from 1 to {experts_}, or one for each of {count} layers"
    raise r.error("moe_topk", numbers, want)
  feedforwards = [
    Experts(
      experts=experts_,
      chosen=n,
      hidden=r.whole(width),
      act=r.act("hidden_act", default="silu"),
      router=Softmax(renormalise=True),
      shared=r.whole(width),
    )
    for n in numbers
  ]
  attend, norm = hunyuan_attention(r), rms(r, default=1e-5)
  return model(r, "hunyuan_v1_moe", attend, feedforwards, norm)


def _minimax_m2(r: ConfigReader) -> TransformerConfig:
  norm = rms(r)
  part = r.whole("rotary_dim", default=None)
  part = 1.0 if part is None else part / r.head_dim()
  rope = r.rope(theta=5000000.0, partial=part)
  # The published file states these properties of the family.
  r.must_be("use_qk_norm", True, default=True)
  r.must_be("qk_norm_type", "per_layer", default="per_layer")
  r.must_be("scoring_func", "sigmoid", default="sigmoid")
  r.must_be("use_routing_bias", True, default=True)
  r.only("shared_intermediate_size", 0)
  if set(r.value("attn_type_list", default=[1])) != {1}:
    got = r.value("attn_type_list")
    raise r.error("attn_type_list", got, "1 for every layer")
  # Layers that only predict further tokens.
  r.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
  attend = attention(r, rope, qk_norm=norm, qk_norm_whole=True)
  sparse = experts(r, Grouped(), hidden="intermediate_size", correction=True)
  return model(r, "minimax_m2", attend, sparse, norm)


# Where experts and a plain feedforward share a name, both are found under it.
QWEN_EXPERTS = {
  "feedforward.gate": "mlp.experts.{}.gate_proj.weight",
  "feedforward.up": "mlp.experts.{}.up_proj.weight",
  "feedforward.down": "mlp.experts.{}.down_proj.weight",
}

W_EXPERTS = {
  "feedforward.gate": "block_sparse_moe.experts.{}.w1.weight",
  "feedforward.up": "block_sparse_moe.experts.{}.w3.weight",
  "feedforward.down": "block_sparse_moe.experts.{}.w2.weight",
}


def shared_names(where: str) -> dict[str, str]:
  """Names of the shared expert, which all tokens use."""
  return {
    f"feedforward.shared.{part}": f"{where}.{part}_proj"
    for part in ("gate", "up", "down")
  }


def _granite_names(
  parts: Mapping[str, str] | None = None, **options: Any
) -> Callable[[TransformerConfig], TensorNames]:
  return llama_names(
    {"feedforward.router": "block_sparse_moe.router.layer", **(parts or {})},
    leaves={"feedforward.down": "block_sparse_moe.output_linear.weight"},
    columns={
      "block_sparse_moe.input_linear.weight": (
        ("feedforward.gate", "feedforward.up"),
        False,
      )
    },
    swapped=lambda name: (
      "sparse" in name and name.endswith("put_linear.weight")
    ),
    **options,
  )


FAMILIES = (
  Family(
    name="mixtral",
    config=_mixtral,
    names=llama_names(
      {"feedforward.router": "block_sparse_moe.gate"},
      experts=W_EXPERTS,
    ),
  ),
  Family(
    name="phimoe",
    config=_phimoe,
    names=llama_names(
      {"feedforward.router": "block_sparse_moe.gate"},
      experts=W_EXPERTS,
    ),
  ),
  Family(
    name="qwen3_moe",
    config=_qwen3_moe,
    names=llama_names({"feedforward.router": "mlp.gate"}, experts=QWEN_EXPERTS),
  ),
  Family(
    name="qwen2_moe",
    config=_qwen2_moe,
    names=llama_names(
      {
        "feedforward.router": "mlp.gate",
        "feedforward.shared_gate": "mlp.shared_expert_gate",
        **shared_names("mlp.shared_expert"),
      },
      experts=QWEN_EXPERTS,
    ),
  ),
  Family(
    name="olmoe",
    config=_olmoe,
    names=llama_names({"feedforward.router": "mlp.gate"}, experts=QWEN_EXPERTS),
  ),
  Family(
    name="flex_olmo",
    config=_flex_olmo,
    names=lambda config: TensorNames(
      parts={**OLMO_PARTS, "feedforward.router": "mlp.gate"},
      experts=QWEN_EXPERTS,
    ),
  ),
  Family(name="granitemoe", config=_granitemoe, names=_granite_names()),
  Family(
    name="granitemoeshared",
    config=_granitemoeshared,
    names=_granite_names(
      {"feedforward.shared.down": "shared_mlp.output_linear"},
      fused={
        "shared_mlp.input_linear": Fusion(
          parts=("feedforward.shared.gate", "feedforward.shared.up")
        )
      },
    ),
  ),
  Family(
    name="ernie4_5_moe",
    config=_ernie_moe,
    names=llama_names(
      {
        "feedforward.router": "mlp.gate",
        **shared_names("mlp.shared_experts"),
      },
      leaves={
        "feedforward.correction": "mlp.moe_statics.e_score_correction_bias"
      },
      rows=lambda path: path == "feedforward.correction",
      experts=QWEN_EXPERTS,
    ),
    # A layer that predicts the token after the next one.
    unread=lambda config: ("model.mtp_",),
    predict=ERNIE,
  ),
  Family(
    name="hunyuan_v1_moe",
    config=_hunyuan_moe,
    names=llama_names(
      {
        "feedforward.router": "mlp.gate.wg",
        **shared_names("mlp.shared_mlp"),
        **HUNYUAN_NORMS,
      },
      experts=QWEN_EXPERTS,
    ),
  ),
  Family(
    name="minimax_m2",
    config=_minimax_m2,
    names=llama_names(
      {"feedforward.router": "block_sparse_moe.gate"},
      leaves={
        "feedforward.correction": "block_sparse_moe.e_score_correction_bias"
      },
      experts=W_EXPERTS,
    ),
  ),
)
