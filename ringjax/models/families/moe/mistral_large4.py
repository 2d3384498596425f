"""Mistral Large 4: latent attention with an index, learned rotation and scales.

The rotation's frequencies are multiplied by learned factors, and some layers
have none. Queries, and those of the index, are scaled by their positions, with
learned numbers of each head. Some layers read the index of an earlier one, and
some of these its latents, too (`kv_source_layers`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ringjax.models.families.family import (
  Family,
  TextModel,
  Wrapper,
  experts,
  llama_names,
  model,
  rms,
  rope_flags,
)
from ringjax.models.families.moe.deepseek import (
  INDEXED,
  grouped_router,
  latent,
)
from ringjax.models.families.moe.deepseek_kin import (
  feedforwards,
  index_types,
)
from ringjax.models.families.moe.mixtures import shared_names
from ringjax.models.hf.config_reader import OTHER, ConfigReader
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import LearnedTemperature
from ringjax.nn.attention_layers.key_index import KeyIndex
from ringjax.nn.attention_layers.latent import Latent
from ringjax.nn.attention_layers.shared_index import (
  IndexSharingLayer,
  IndexStream,
)
from ringjax.nn.feedforward import Experts, Gated
from ringjax.ops.rope import Rope

# Names of layers that share latents, by whether these are rotated.
_GROUPS = {False: "unrotated", True: "rotated"}
_COUNT = ("n_routed_experts", "num_local_experts", "num_experts")
# Of a file without `rope_parameters`.
_ROPE = {
  "rope_type": "yarn",
  "rope_theta": 10000.0,
  "factor": 2048.0,
  "original_max_position_embeddings": 512,
  "beta_fast": 32.0,
  "beta_slow": 1.0,
  "attention_factor": 1.0,
}


def _rope(r: ConfigReader) -> Rope:
  """Rotation of the layers that have one."""
  rotated = r.whole("qk_rope_head_dim", default=64)
  if not r.has("rope_parameters") and not r.has("rope_scaling"):
    r.ignore("rope_parameters", "rope_scaling")
    positions = r.whole("max_position_embeddings", default=1048576)
    config = {"rope_parameters": _ROPE, "max_position_embeddings": positions}
    r = r.part("rope_parameters", config)
  rope = r.rope(rotated, interleaved=True)
  if rope.dims != rotated:
    want = f"1: all {rotated} dims of qk_rope_head_dim rotate"
    raise r.error("partial_rotary_factor", rope.dims / rotated, want)
  if rope.scaling.by_length:
    want = "a rotation that does not depend on the length of the text"
    raise r.error("rope_parameters", type(rope.scaling).__name__, want)
  return dataclasses.replace(rope, learned=True)


def _index(r: ConfigReader, rope: Rope) -> KeyIndex:
  """Index of the layers that have one."""
  dim = r.whole("index_head_dim", default=128)
  if dim < rope.dims:
    want = f"at least the {rope.dims} of qk_rope_head_dim"
    raise r.error("index_head_dim", dim, want)
  return KeyIndex(
    heads=r.whole("index_n_heads", default=32),
    dim=dim,
    count=r.whole("index_topk", default=2048),
    interleaved=True,
    normed=True,
    temperature=LearnedTemperature(),
  )


def _sources(
  r: ConfigReader, types: list[str], rotates: list[bool]
) -> list[int]:
  """Layer whose latents each layer reads: its own, or those of an earlier one.

  A layer reads the latents of the last layer before it that others read and
  that is rotated as it is, and the index whose keys are stored with them.
  """
  key, count = "kv_source_layers", r.layers()
  sources = r.value(key, default=None)
  if sources is None:
    return list(range(count))
  valid = isinstance(sources, list) and all(type(n) is int for n in sources)
  if not valid or len(sources) != count:
    raise r.error(key, sources, f"{count} numbers of layers, or null")
  last_source: dict[bool, int] = {}
  last_index = {}
  for n, source in enumerate(sources):
    last_index[n] = n if types[n] == "full" else last_index.get(n - 1)
    if source == n:
      if n in sources[n + 1 :]:
        last_source[rotates[n]] = n
      continue
    if not 0 <= source < n or sources[source] != source:
      want = f"for layer {n} itself, or an earlier layer that has latents"
      raise r.error(key, sources, want)
    if last_source.get(rotates[n]) != source:
      want = (
        f"for layer {n} the last layer before it that others read and that is "
        "rotated as it is (no_rope_layers)"
      )
      raise r.error(key, sources, want, OTHER)
    if types[n] == "full" or last_index[n] != last_index[source]:
      want = (
        f"{n} for layer {n}, or one that reads the index of layer {source}, "
        "whose keys are stored with its latents (indexer_types)"
      )
      raise r.error(key, sources, want, OTHER)
  return sources


def _attentions(r: ConfigReader, eps: float) -> list[Latent]:
  """Attention of each layer."""
  # The queries have no latent vector.
  r.only("q_lora_rank", None)
  r.kinds("layer_types", INDEXED, [INDEXED[0]] * r.layers())
  rope = _rope(r)
  attend = latent(r, interleaved=True, query_latent=None, rope=rope)
  attend = dataclasses.replace(
    attend, eps=eps, temperature=LearnedTemperature()
  )
  index = _index(r, rope)
  rotates, types = rope_flags(r), index_types(r)
  sources = _sources(r, types, rotates)
  shares = "shared" in types
  attentions = []
  last_index = 0
  for n, (kind, is_rotated) in enumerate(zip(types, rotates, strict=True)):
    if kind == "full":
      last_index = n
    elif is_rotated != rotates[last_index]:
      want = (
        f"full for layer {n}, as layer {last_index} has the last index, and "
        "one of both has no rotation (no_rope_layers)"
      )
      raise r.error("indexer_types", kind, want, OTHER)
    layer_index = dataclasses.replace(
      index, shared=shares, reads=kind == "shared"
    )
    reads = sources[n] != n
    layer = dataclasses.replace(attend, index=layer_index, reads=reads)
    if reads or n in sources[n + 1 :]:
      layer = dataclasses.replace(layer, group=_GROUPS[is_rotated])
    if not is_rotated:
      plain = attend.plain + attend.shared
      layer = dataclasses.replace(layer, rope=None, plain=plain)
    attentions.append(layer)
  return attentions


def _feedforwards(r: ConfigReader) -> list[Experts | Gated]:
  """Feedforward of each layer: plain in the first, experts in the others."""
  router, max_chosen = grouped_router(r, count=_COUNT)
  # The weights of a token's experts always add up to the factor.
  router = dataclasses.replace(router, softmax=True, renormalise=True)
  width = r.whole("moe_intermediate_size")
  sparse = experts(
    r,
    router,
    count=_COUNT,
    most=max_chosen,
    shared=width * r.whole("n_shared_experts", default=1),
  )
  return feedforwards(r, sparse, first=1)


def _config(r: ConfigReader) -> TransformerConfig:
  norm = rms(r, default=1e-5)
  attentions = _attentions(r, norm.eps)
  index = attentions[0].index
  assert index is not None
  options: dict[str, Any] = {}
  if index.shared:
    options = {"kind": IndexSharingLayer, "streams": IndexStream(index=index)}
  return model(
    r,
    "mistral_large4",
    attentions,
    _feedforwards(r),
    norm,
    logit_cap=r.positive("final_logit_softcapping", default=30.0),
    **options,
  )


_PARTS = {
  "attention.q": "attention.wq",
  "attention.kv_down": "attention.wkv_a_with_mqa",
  "attention.kv_norm": "attention.kv_a_norm",
  "attention.kv": "attention.wkv_b",
  "attention.o": "attention.o_proj",
  "attention.index.q": "attention.indexer.wq_b",
  "attention.index.q_norm": "attention.indexer.q_input_norm",
  "attention.index.k": "attention.indexer.wk",
  "attention.index.k_norm": "attention.indexer.k_norm",
  "attention.index.weights": "attention.indexer.weights_proj",
  "pre_attention": "attention_norm",
  "pre_feedforward": "ffn_norm",
  "feedforward.gate": "feed_forward.gate_proj",
  "feedforward.up": "feed_forward.up_proj",
  "feedforward.down": "feed_forward.down_proj",
  "feedforward.router": "gate",
  **shared_names("shared_experts"),
}
_LEAVES = {
  f"attention.{part}temperature.{leaf}": f"attention.{file}.{letter}"
  for part, file in (
    ("", "ssmax_scaling"),
    ("index.", "indexer.ssmax_scaling"),
  )
  for leaf, letter in (("scale", "s"), ("bias", "b"))
}
_EXPERTS = {
  "feedforward.gate": "experts.{}.w1.weight",
  "feedforward.up": "experts.{}.w3.weight",
  "feedforward.down": "experts.{}.w2.weight",
}


# Names as published files have them.
_PUBLISHED = {
  "model.embed_tokens.": "tok_embeddings.",
  "model.rotary_emb.": "lerope.",
  "model.": "",
  "lm_head.": "output.",
}
_PUBLISHED_MAPS = {
  "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", "o_proj": "wo"
}  # fmt: skip


def _spellings(name: str) -> tuple[str, ...]:
  """The name as transformers saves it, and as published files have it."""
  published = name
  for prefix, short in _PUBLISHED.items():
    if published.startswith(prefix):
      published = short + published.removeprefix(prefix)
      break
  for long, short in _PUBLISHED_MAPS.items():
    published = published.replace(f".{long}.", f".{short}.")
  return name, published


def _unread(config: Mapping[str, Any]) -> tuple[str, ...]:
  """Prefix of the head that predicts further tokens."""
  del config
  return ("mtp_dspark.", "model.mtp_dspark.")


FAMILIES = (
  Family(
    name="mistral_large4",
    config=_config,
    names=llama_names(_PARTS, leaves=_LEAVES, experts=_EXPERTS),
    types=("mistral_large4_text",),
    unread=_unread,
    spellings=_spellings,
    wrapper=Wrapper(
      type="mistral_large4",
      texts=(
        TextModel(
          type="mistral_large4_text", architecture="MistralLarge4TextModel"
        ),
      ),
    ),
  ),
)
