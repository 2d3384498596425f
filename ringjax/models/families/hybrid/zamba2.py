"""Zamba2: state spaces, some of which read blocks of shared weights."""

from __future__ import annotations

import math

from ringjax.models.families.family import Family, llama_names, model, rms
from ringjax.models.families.hybrid.state_space import (
  expanded,
  mixer,
  mixer_names,
)
from ringjax.models.hf.config_reader import OTHER, ConfigReader
from ringjax.models.hf.names import TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.attention_layers.shared_block import AfterBlock, SharedBlocks
from ringjax.nn.feedforward import NoFeedforward
from ringjax.nn.recurrent_layers.mamba import Mamba2

# Other names of the same kinds of layers.
_KINDS = {
  "linear_attention": "mamba",
  "mamba": "mamba",
  "mamba2": "mamba",
  "hybrid": "hybrid",
}
_MAMBA, _HYBRID = ["mamba"], ["hybrid"]
# What a file means that does not list its 54 layers.
_DEFAULT = [
  *_MAMBA,
  *(_MAMBA * 5 + _HYBRID) * 7,
  *(_MAMBA * 4 + _HYBRID),
  *(_MAMBA * 3 + _HYBRID),
  *(_MAMBA * 2),
]


def _kinds(r: ConfigReader) -> list[str]:
  """Kind of each layer, "mamba" or "hybrid"."""
  key = "layers_block_type"
  kinds = r.value(key, "layer_types", default=_DEFAULT)
  count = r.whole("num_hidden_layers", default=54)
  if (
    not isinstance(kinds, list)
    or len(kinds) != count
    or not all(kind in list(_KINDS) for kind in kinds)
  ):
    want = f"{count} names of {', '.join(_KINDS)}"
    raise r.error(key, kinds, want, OTHER)
  return [_KINDS[kind] for kind in kinds]


def _state(r: ConfigReader) -> Mamba2:
  heads = r.whole("n_mamba_heads", default=8)
  groups = r.whole("mamba_ngroups", default=1)
  inner = expanded(r)
  # Kernels, and a bias that is there whatever the file says.
  r.ignore("use_mamba_kernels", "use_mem_eff_path", "use_conv_bias")
  least_step = r.number("time_step_min", default=0.001)
  return mixer(
    r,
    heads,
    r.whole("mamba_headdim", default=inner // heads or 1),
    groups,
    inner,
    key="n_mamba_heads",
    state=r.whole("mamba_d_state", default=64),
    taps=r.whole("mamba_d_conv", default=4, least=2),
    eps=1e-5,
    norm_groups=groups,
    bias=r.flag("add_bias_linear", default=False),
    step_limit=(least_step, math.inf),
  )


def _attention(r: ConfigReader) -> Attention:
  """Attention of a shared block, whose input has two times the width."""
  heads, kv_heads = r.heads()
  width = 2 * r.whole("hidden_size")
  r.only("attention_hidden_size", width)
  # Sizes of other programs.
  r.ignore("kv_channels", "num_query_groups")
  keys = ("attention_head_dim", "head_dim")
  dim = r.whole(*keys, default=width // heads or 1)
  rotated = r.flag("use_mem_rope", default=False)
  rope = r.rope(dim) if rotated else None
  if not rotated:
    r.ignore("rope_parameters", "rope_scaling", "rope_theta")
  return Attention(
    heads=heads,
    kv_heads=kv_heads,
    head_dim=dim,
    rope=rope,
    scale=(dim / 2) ** -0.5,
  )


def _config(r: ConfigReader) -> TransformerConfig:
  norm, kinds = rms(r, default=1e-5), _kinds(r)
  # transformers shares the blocks' weights where it shares the embedding's.
  r.must_be("tie_word_embeddings", True, default=True)
  # A longer context that the file does not state.
  r.only("use_long_context", False)
  hybrids = [i for i, kind in enumerate(kinds) if kind == "hybrid"]
  if not hybrids:
    raise r.error("layers_block_type", kinds, "a hybrid among them", OTHER)
  r.only("hybrid_layer_ids", hybrids)
  attend, state = _attention(r), _state(r)
  blocks = r.whole("num_mem_blocks", default=1)
  rank = r.whole("adapter_rank", default=128)
  adapted = r.flag("use_shared_attention_adapter", default=False)
  width = 2 * r.whole("hidden_size")
  # The maps that are added to keys and values have the width of queries.
  if adapted and attend.kv_heads != attend.heads:
    want = f"the {attend.heads} query heads"
    raise r.error("num_key_value_heads", attend.kv_heads, want)
  if adapted and width != attend.heads * attend.head_dim:
    want = f"heads of {width} numbers in all"
    raise r.error("attention_head_dim", attend.head_dim, want)
  hidden = r.whole("intermediate_size", least=0, default=0) or 2 * width
  shared = SharedBlocks(
    count=min(blocks, len(hybrids)),
    uses=len(hybrids),
    attention=attend,
    hidden=hidden,
    act=r.act("hidden_act", default="gelu"),
    bias=r.flag("add_bias_linear", default=False),
    norm=norm,
    rank=rank,
    adapted=adapted,
  )
  mixers, layers = [], []
  for kind in kinds:
    uses = sum(isinstance(x, AfterBlock) for x in mixers)
    is_hybrid = kind == "hybrid"
    mixers.append(
      AfterBlock(attention=attend, state=state, norm=norm, use=uses)
      if is_hybrid
      else state
    )
    layers.append({"pre": not is_hybrid})
  return model(
    r,
    "zamba2",
    mixers,
    NoFeedforward(),
    norm,
    layer=layers,
    tied=True,
    inputs=shared,
  )


def _shared_names(
  config: TransformerConfig,
) -> dict[str, tuple[str, ...]]:
  """Names of the tensors of shared blocks, which are in their first layer."""
  spec = config.inputs
  assert isinstance(spec, SharedBlocks)
  hybrids = [
    i
    for i, layer in enumerate(config.layers)
    if isinstance(layer.attention, AfterBlock)
  ]
  names: dict[str, tuple[str, ...]] = {}
  for block in range(spec.count):
    start = f"model.layers.{hybrids[block]}.shared_transformer."
    prefix = f"blocks.{block}."
    names[f"{start}input_layernorm.weight"] = (f"{prefix}norm.weight",)
    names[f"{start}pre_ff_layernorm.weight"] = (
      f"{prefix}pre_feedforward.weight",
    )
    for x in "qkvo":
      name = f"{start}self_attn.{x}_proj.weight"
      names[name] = (f"{prefix}attention.{x}.weight",)
    for leaf in ("weight", "bias") if spec.bias else ("weight",):
      feed = f"{start}feed_forward."
      pair = (f"{prefix}gate.{leaf}", f"{prefix}up.{leaf}")
      names[f"{feed}gate_up_proj.{leaf}"] = pair
      names[f"{feed}down_proj.{leaf}"] = (f"{prefix}down.{leaf}",)
    for n, use in enumerate(range(block, spec.uses, spec.count)):
      maps = f"{prefix}uses.{n}."
      name = f"{start}feed_forward.gate_up_proj_adapter_list.{use}"
      names[f"{name}.0.weight"] = (f"{maps}down.weight",)
      names[f"{name}.1.weight"] = (f"{maps}gate.weight", f"{maps}up.weight")
      for x in "qkv" if spec.adapted else "":
        name = f"{start}self_attn.linear_{x}_adapter_list.{use}"
        names[f"{name}.0.weight"] = (f"{maps}{x}.down.weight",)
        names[f"{name}.1.weight"] = (f"{maps}{x}.up.weight",)
  return names


def _names(config: TransformerConfig) -> TensorNames:
  parts, leaves, fused = mixer_names("mamba")
  inner = mixer_names("mamba_decoder.mamba", "attention.state")
  return llama_names(
    {
      **parts,
      **inner[0],
      "attention.into": "linear",
      "attention.pre_state": "mamba_decoder.input_layernorm",
    },
    leaves={**leaves, **inner[1]},
    fused={**fused, **inner[2]},
    norm="model.final_layernorm",
    shared=_shared_names(config),
  )(config)


FAMILIES = (Family(name="zamba2", config=_config, names=_names),)
