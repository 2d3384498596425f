"""Gemma 4's text model.

It has layers of two widths, keys that later layers also read, and a second
embedding that all layers read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ringjax.models.families.family import (
  Family,
  Wrapper,
  biases,
  causal,
  llama_names,
  model,
  pattern,
  rms,
)
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.feedforward import DenseAndExperts, Experts, Gated, Softmax
from ringjax.nn.layer_inputs import LayerInputs

_FULL, _SLIDES = "full_attention", "sliding_attention"
_OWN = ("k_proj", "v_proj", "k_norm", "v_norm")


def layer_groups(
  r: ConfigReader, types: tuple[str, ...], shared: int
) -> list[dict[str, Any]]:
  """Options of each layer's attention: its key group, and whether it reads it.

  The last `shared` layers read the keys of the last layer of their kind before.
  """
  first = len(types) - shared
  if first < 1 or set(types[first:]) - set(types[:first]):
    want = "fewer, with a layer of each kind before those that share"
    raise r.error("num_kv_shared_layers", shared, want)
  last = {kind: i for i, kind in enumerate(types[:first])}
  options: list[dict[str, Any]] = []
  for i, kind in enumerate(types):
    if i >= first:
      options.append({"group": kind, "reads": True})
    elif kind in types[first:] and i == last[kind]:
      options.append({"group": kind})
    else:
      options.append({})
  return options


def _sizes(r: ConfigReader, types: tuple[str, ...]) -> list[tuple[int, int]]:
  """(head dim, kv heads) of each layer."""
  _, kv_heads = r.heads()
  base = r.head_dim(), kv_heads
  one_map = r.flag("attention_k_eq_v", default=False)
  global_dim = r.whole("global_head_dim", default=512)
  global_kv_heads = r.whole("num_global_key_value_heads", default=kv_heads)
  full = global_dim, global_kv_heads if one_map else kv_heads
  sizes = [full if kind == _FULL else base for kind in types]
  layer_configs = r.value("per_layer_config", absent=sizes)
  if layer_configs is sizes:
    return sizes
  if layer_configs is None:
    # Null means that no layer differs.
    return [base] * len(types)
  part = r.part("per_layer_config", layer_configs, closed=True)
  sizes_by_layer = []
  for i in range(len(types)):
    layer_config = part.part(str(i), part.value(str(i), default={}))
    sizes_by_layer.append(
      (
        layer_config.whole("head_dim", default=base[0]),
        layer_config.whole("num_key_value_heads", default=base[1]),
      )
    )
    layer_config.finish()
  part.finish()
  return sizes_by_layer


def _attentions(r: ConfigReader) -> list[Attention]:
  types = r.layer_types(pattern(r, 6))
  for kind in types:
    if kind not in (_FULL, _SLIDES):
      raise r.error("layer_types", kind, f"{_SLIDES} or {_FULL}")
  types = (*types[:-1], _FULL)
  shared = r.whole("num_kv_shared_layers", default=0, least=0)
  heads, _ = r.heads()
  one_map = r.flag("attention_k_eq_v", default=False)
  window = r.whole("sliding_window", default=512)
  norm = rms(r)
  options: dict[str, Any] = biases(r)
  groups, sizes = layer_groups(r, types, shared), _sizes(r, types)
  owners: dict[str, tuple[int, int]] = {}
  attentions = []
  for i, kind in enumerate(types):
    head_dim, kv_heads = sizes[i]
    if heads % kv_heads:
      want = f"a divisor of the {heads} query heads"
      raise r.error("num_key_value_heads", kv_heads, want)
    if groups[i] and owners.setdefault(kind, sizes[i]) != sizes[i]:
      want = f"{owners[kind]}, as the layer whose keys it reads"
      raise r.error("per_layer_config", sizes[i], want)
    slides = kind == _SLIDES
    rope = r.rope(
      head_dim,
      kind=kind,
      theta=10000.0 if slides else 1000000.0,
      partial=1.0 if slides else 0.25,
      unsaid="default" if slides else "proportional",
    )
    attentions.append(
      Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        scale=1.0,
        mask=causal(window, kind),
        qk_norm=norm,
        value_norm=dataclasses.replace(norm, weight=False),
        one_map=one_map and not slides,
        **groups[i],
        **options,
      )
    )
  return attentions


def _config(r: ConfigReader) -> TransformerConfig:
  act = r.act("hidden_activation", default="gelu_pytorch_tanh")
  # Only tokens of images would see each other.
  seen = r.value("use_bidirectional_attention", default=None)
  if seen not in (None, False, "vision"):
    want = "null or vision, which text does not notice"
    raise r.error("use_bidirectional_attention", seen, want)
  attentions, norm = _attentions(r), rms(r)
  hidden = r.whole("intermediate_size", default=9216)
  double = r.flag("use_double_wide_mlp", default=False)
  feedforwards: list[Any] = [
    Gated(hidden=hidden * (2 if double and a.reads else 1), act=act)
    for a in attentions
  ]
  r.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
  if r.flag("enable_moe_block", default=False):
    number = r.whole("num_experts")
    sparse = Experts(
      experts=number,
      chosen=r.whole("top_k_experts", most=number),
      hidden=r.whole("moe_intermediate_size"),
      act=act,
      router=Softmax(renormalise=True),
      scaled=True,
    )
    feedforwards = [
      DenseAndExperts(dense=dense, sparse=sparse, norm=norm)
      for dense in feedforwards
    ]
  inputs = layer_inputs(r, act, default=262144)
  return model(
    r,
    "gemma4",
    attentions,
    feedforwards,
    norm,
    layer={"post": True, "inputs": inputs, "learned_scale": True},
    tied=True,
    embed_scale=math.sqrt(r.whole("hidden_size")),
    logit_cap=r.positive("final_logit_softcapping", default=None),
    inputs=inputs,
  )


def layer_inputs(r: ConfigReader, act: str, default: int) -> LayerInputs | None:
  """The second embedding of a config; None if it has no width."""
  vocab = r.whole("vocab_size_per_layer_input", default=default)
  width = r.whole("hidden_size_per_layer_input", default=256, least=0)
  if not width:
    return None
  if vocab * width * r.layers() > 2**40:
    raise r.error("vocab_size_per_layer_input", vocab, "2^40 numbers in all")
  return LayerInputs(
    vocab=vocab, layers=r.layers(), width=width, act=act, norm=rms(r)
  )


def unread_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
  """Maps of layers that read others' keys, which published files still have."""
  count, shared = (
    config.get(key) for key in ("num_hidden_layers", "num_kv_shared_layers")
  )
  if not isinstance(count, int) or not isinstance(shared, int):
    return ()
  return tuple(
    f"{prefix}layers.{i}.self_attn.{name}."
    for i in range(max(count - shared, 0), min(count, 1000))
    for name in _OWN
    for prefix in (
      "model.",
      "language_model.model.",
      "model.language_model.",
    )
  )


NAMES = llama_names(
  {
    "post_attention": "post_attention_layernorm",
    "pre_feedforward": "pre_feedforward_layernorm",
    "post_feedforward": "post_feedforward_layernorm",
    "inputs.gate": "per_layer_input_gate",
    "inputs.projection": "per_layer_projection",
    "inputs.norm": "post_per_layer_input_norm",
    "feedforward.dense.gate": "mlp.gate_proj",
    "feedforward.dense.up": "mlp.up_proj",
    "feedforward.dense.down": "mlp.down_proj",
    "feedforward.pre_dense": "pre_feedforward_layernorm",
    "feedforward.post_dense": "post_feedforward_layernorm_1",
    "feedforward.post_sparse": "post_feedforward_layernorm_2",
    "feedforward.sparse.router": "router.proj",
  },
  leaves={
    "scale": "layer_scalar",
    "feedforward.sparse.down": "experts.down_proj",
    "feedforward.sparse.input_scale": "pre_feedforward_layernorm_2.weight",
    "feedforward.sparse.router_scale": "router.scale",
    "feedforward.sparse.expert_scale": "router.per_expert_scale",
  },
  columns={
    "experts.gate_up_proj": (
      ("feedforward.sparse.gate", "feedforward.sparse.up"),
      False,
    )
  },
  swapped=lambda name: name in ("experts.gate_up_proj", "experts.down_proj"),
  inputs={
    "table": "model.embed_tokens_per_layer.weight",
    "projection": "model.per_layer_model_projection.weight",
    "norm.weight": "model.per_layer_projection_norm.weight",
  },
)
_WRAPPER = Wrapper(
  type="gemma4",
  defaults={
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
  },
  architecture="Gemma4ForCausalLM",
)
FAMILIES = (
  Family(
    name="gemma4",
    config=_config,
    names=NAMES,
    types=("gemma4_text",),
    unread=unread_keys,
    wrapper=_WRAPPER,
  ),
)
