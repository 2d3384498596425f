"""Hunyuan 4: gated latent attention with shared indexes, and several streams.

Each query reads the keys that an index chose, that of its layer or of an
earlier one, and a sink. Hyper-connections add to the streams without mixing
them. Experts have clamped gates.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from ringjax.models.families.family import (
  Family,
  experts,
  model,
  rms,
)
from ringjax.models.families.moe.deepseek import (
  grouped_router,
  indexed,
  latent,
  latent_names,
)
from ringjax.models.families.moe.deepseek_kin import (
  feedforwards,
  fused_names,
)
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.latent import Latent
from ringjax.nn.attention_layers.shared_index import (
  IndexSharingLayer,
  IndexStream,
)
from ringjax.nn.feedforward import ClampedProduct, Experts, Gated
from ringjax.nn.residuals import IndependentConnection
from ringjax.nn.streams import HyperStreams

# Properties of the family that published files state.
_PROPERTIES = {
  "enable_ihc": True,
  "gated_mla": True,
  "gating_type": "elementwise",
  "learnable_sink": True,
  "scoring_func": "sigmoid",
}
_COUNT = ("n_routed_experts", "num_local_experts")


def _attentions(r: ConfigReader, eps: float) -> list[Latent]:
  """Attention of each layer: with an index, or with that of an earlier one."""
  attend = latent(r, interleaved=False)
  attend = indexed(r, attend, heads=16, interleaved=False)
  assert attend.index is not None
  index = dataclasses.replace(
    attend.index, eps=eps, rotated_last=True, shared=True
  )
  default = [
    "shared" if n % 4 != 1 and n else "full" for n in range(r.layers())
  ]
  kinds = r.kinds("indexer_types", ("full", "shared"), default)
  if kinds[0] != "full":
    want = "names of which the first is full"
    raise r.error("indexer_types", kinds, want)
  # The sinks' value in a new model.
  r.ignore("learnable_sink_init")
  return [
    dataclasses.replace(
      attend,
      index=dataclasses.replace(index, reads=kind == "shared"),
      gated=True,
      gate_dims=attend.value,
      sinks=True,
    )
    for kind in kinds
  ]


def _feedforwards(r: ConfigReader) -> list[Experts | Gated]:
  """Feedforward of each layer, by its name; the first one is plain."""
  # Experts have this activation whatever the file says.
  r.must_be("hidden_act", "silu", default="silu")
  router, max_chosen = grouped_router(r, count=_COUNT, scale=2.827)
  width = r.whole("moe_intermediate_size")
  limit = r.positive("swiglu_limit", default=10.0)
  sparse = experts(
    r,
    router,
    count=_COUNT,
    most=max_chosen,
    shared=width * r.whole("n_shared_experts", default=1),
    correction=True,
    clamped=ClampedProduct(act="silu", limit=limit),
  )
  return feedforwards(r, sparse, first=1)


def _config(r: ConfigReader) -> TransformerConfig:
  for key, value in _PROPERTIES.items():
    r.only(key, value)
  # The dtype of the head's product, and the factor of a loss.
  r.ignore("enable_lm_head_fp32", "mtp_loss_factor")
  norm = rms(r, default=1e-5)
  attentions = _attentions(r, norm.eps)
  index = attentions[0].index
  assert index is not None
  count = r.whole("hc_mult", default=4, most=64)
  floor = r.positive("hc_eps", default=1e-6)
  if 2 * count * count * r.whole("hidden_size") > 2**40:
    raise r.error("hc_mult", count, "maps of 2^40 numbers in all")
  connection = IndependentConnection(
    count=count,
    magnitude=r.positive("hc_magnitude", default=2.0),
    floor=floor,
    eps=norm.eps,
  )
  return model(
    r,
    "hy_v4",
    attentions,
    _feedforwards(r),
    norm,
    kind=IndexSharingLayer,
    layer={"residuals": (connection, connection), "count": count},
    streams=IndexStream(
      index=index,
      streams=HyperStreams(count=count, floor=floor, eps=norm.eps),
    ),
  )


def _names(config: TransformerConfig) -> TensorNames:
  names = fused_names(config)
  leaves = {"attention.sinks": "self_attn.learnable_sink_param"}
  for part, name in (("attention", "attn"), ("feedforward", "mlp")):
    leaves |= {
      f"{part}_residual.{leaf}": f"hc_{name}_layer.hc_{file}"
      for leaf, file in (("map", "fn"), ("base", "base"), ("scale", "scale"))
    }
  return dataclasses.replace(
    names,
    parts={**names.parts, "attention.gate": "self_attn.linear_gate"},
    leaves={**latent_names(config).leaves, **names.leaves, **leaves},
    streams={
      "streams.map": "model.hc_head.hc_head_fn",
      "streams.base": "model.hc_head.hc_head_base",
      "streams.scale": "model.hc_head.hc_head_scale",
    },
  )


def _spellings(name: str) -> tuple[str, ...]:
  """The name, as transformers saves it, and as files may have it."""
  names = [name]
  if ".hc_" in name:
    part = re.search(r"\.(hc_attn_layer|hc_mlp_layer|hc_head)\.", name)
    assert part is not None
    prefix, leaf = name[: part.start()], name[part.end() :]
    names += [
      f"{prefix}.hc_pre{part[0]}{leaf}",
      f"{prefix}{part[0]}hc_pre.{leaf}",
    ]
  elif name.endswith(".gate_proj.weight"):
    names.append(name.replace(".gate_proj.", ".linear_gate."))
  return tuple(names)


def _unread(config: Mapping[str, Any]) -> tuple[str, ...]:
  """Prefix of the layers that predict further tokens."""
  del config
  return ("model.mtp_layers.",)


FAMILIES = (
  Family(
    name="hy_v4",
    config=_config,
    names=_names,
    unread=_unread,
    spellings=_spellings,
  ),
)
