"""Qwen4-Exp, its text model: gated delta nets, and attention to blocks.

Three gated delta nets to one gated attention whose index chooses blocks by
their mean keys. Parts read a gated mean of several residual streams; some
layers also read tables of hashed n-grams. All feedforwards have experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ringjax.models.families.family import (
  Family,
  Wrapper,
  attention,
  model,
  rms,
)
from ringjax.models.families.hybrid.qwen3_next import (
  delta,
  qwen_experts,
  tensor_names,
)
from ringjax.models.hf.config_reader import OTHER, ConfigReader
from ringjax.models.hf.names import Fusion, TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.choosing.pooled_block_attention import (
  MeanBlockIndex,
  PooledBlockAttention,
)
from ringjax.nn.block import Layer, Mixer
from ringjax.nn.linear import NoNorm, Norm
from ringjax.nn.recurrent_layers.ngram_layer import NgramLayer, Ngrams
from ringjax.nn.residuals import LowRankConnection
from ringjax.nn.streams import GatedMeanStreams
from ringjax.ops.recurrent.ngram_ids import (
  MOST_IDS,
  MOST_ROWS,
  hash_factors,
  primes_from,
)

_DELTA, _INDEXED = "linear_attention", "indexed_attention"
_INDEX = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim",
          "indexer_budget", "indexer_compress_ratio")  # fmt: skip
_NGRAMS = ("ple_embed_dim", "ple_conv_kernel_size", "ngram_size",
           "heads_per_ngram", "ngram_vocab_size_base",
           "make_ngram_vocab_size_divisible_by", "seed",
           "split_ngram_parts")  # fmt: skip


def _kinds(r: ConfigReader) -> list[str]:
  """Kind of each layer's attention."""
  every = 4
  if r.value("layer_types", default=None) is None:
    every = r.whole("full_attention_interval", default=4)
  else:
    r.ignore("full_attention_interval")
  default = [_INDEXED if (n + 1) % every == 0 else _DELTA
             for n in range(r.layers())]  # fmt: skip
  names = (_DELTA, _INDEXED, "full_attention")
  kinds = r.kinds("layer_types", names, default)
  return [_DELTA if kind == _DELTA else _INDEXED for kind in kinds]


def _attention(r: ConfigReader, norm: Norm) -> PooledBlockAttention:
  """Gated attention to the blocks that an index chooses."""
  # Images have three positions for the rotation; tokens of text have one.
  rope = r.rope(beside=("mrope_section", "mrope_interleaved"))
  r.must_be("indexer_kv_heads", 1, default=None)
  sizes = {key: r.whole(key) for key in _INDEX}
  dim, count = sizes["indexer_head_dim"], sizes["indexer_budget"]
  block = sizes["indexer_compress_ratio"]
  if count % block:
    want = f"a multiple of indexer_compress_ratio, {block}"
    raise r.error("indexer_budget", count, want)
  if dim < rope.dims:
    want = f"at least the {rope.dims} dims that are rotated"
    raise r.error("indexer_head_dim", dim, want)
  if rope.scaling.by_length:
    want = "a rotation that does not depend on the length of the text"
    kind = type(rope.scaling).__name__
    raise r.error("rope_parameters", kind, want, OTHER)
  plain = attention(r, rope, qk_norm=norm, gated=True)
  fields = {x.name: getattr(plain, x.name) for x in dataclasses.fields(plain)}
  index = MeanBlockIndex(
    heads=sizes["indexer_n_heads"],
    dim=dim,
    block=block,
    count=count // block,
    norm=norm,
  )
  return PooledBlockAttention(**fields, index=index)


def _end(r: ConfigReader) -> int:
  """Id of the token that ends a text, the first of several."""
  end = r.value("eos_token_id", default=None)
  if isinstance(end, list) and end:
    end = end[0]
  if isinstance(end, bool) or not isinstance(end, int) or end < 0:
    want = "the id of a token, as ple_layer_ids names layers that read n-grams"
    raise r.error("eos_token_id", end, want)
  return end


def _ngrams(
  r: ConfigReader, kinds: list[str], streams: int, eps: float
) -> list[Ngrams | None]:
  """Tables of n-grams of each layer, None for layers without."""
  ids = r.value("ple_layer_ids", default=None)
  # It follows from the keys here.
  r.ignore("number_of_conv_states")
  if not ids:
    r.ignore(*_NGRAMS)
    if ids not in (None, []):
      raise r.error(
        "ple_layer_ids", ids, "a list of numbers of layers, or null"
      )
    return [None] * len(kinds)
  want = f"numbers of layers of {_DELTA}, from 1 to {len(kinds)}"
  if not isinstance(ids, list) or not all(type(n) is int for n in ids):
    raise r.error("ple_layer_ids", ids, want)
  numbers = sorted(set(ids))
  valid = [n + 1 for n, kind in enumerate(kinds) if kind == _DELTA]
  if not set(numbers) <= set(valid):
    raise r.error("ple_layer_ids", ids, want)
  longest = r.whole("ngram_size", default=3, least=2, most=64)
  heads = r.whole("heads_per_ngram", default=8, most=1024)
  tables = (longest - 1) * heads
  width = r.whole("ple_embed_dim", default=r.whole("hidden_size"))
  if width % tables:
    want = f"a multiple of the {tables} tables of a layer"
    raise r.error("ple_embed_dim", width, want)
  vocab = r.whole("vocab_size", most=MOST_IDS)
  base = r.whole("ngram_vocab_size_base", default=20_000_000)
  divisor = r.whole("make_ngram_vocab_size_divisible_by", default=128)
  seed = r.whole("seed", default=1234, least=0)
  parts = r.whole("split_ngram_parts", default=512)
  taps = r.whole("ple_conv_kernel_size", default=4)
  end = _end(r)
  by_layer: list[Ngrams | None] = [None] * len(kinds)
  for table, number in enumerate(numbers):
    primes = primes_from(base, table * tables, tables)
    rows = -(-sum(primes) // divisor) * divisor
    if primes[-1] >= MOST_ROWS or rows >= 2**31:
      want = f"one whose primes are below {MOST_ROWS:,}, and below 2^31 in all"
      raise r.error("ngram_vocab_size_base", base, want)
    by_layer[number - 1] = Ngrams(
      streams=streams,
      orders=tuple(
        primes[n * heads : (n + 1) * heads] for n in range(longest - 1)
      ),
      factors=hash_factors(vocab, longest, table, seed),
      dim=width // tables,
      end=end,
      parts=min(parts, rows),
      rows=rows,
      taps=taps,
      eps=eps,
    )
  return by_layer


def _config(r: ConfigReader) -> TransformerConfig:
  norm = rms(r, offset=1.0)
  r.must_be("hidden_act", "silu", default="silu")
  r.must_be("attention_bias", False, default=False)
  # Its files have keys of layers that the model lacks.
  r.ignore("intermediate_size", "mlp_only_layers")
  r.only("decoder_sparse_step", 1)
  gate = r.text("output_gate_type", default="silu")
  if gate not in ("silu", "sigmoid"):
    raise r.error("output_gate_type", gate, "silu, sigmoid or null", OTHER)
  count = r.whole("hc_count", default=4, least=2, most=64)
  rank = r.whole("hc_lowrank", default=320)
  connection = LowRankConnection(count=count, rank=rank, eps=norm.eps)
  kinds = _kinds(r)
  mixers: dict[str, Mixer] = {_DELTA: dataclasses.replace(delta(r), gate=gate)}
  if _INDEXED in kinds:
    mixers[_INDEXED] = _attention(r, norm)
  else:
    r.ignore(*_INDEX)
  embed = r.whole("hidden_size")
  tables = _ngrams(r, kinds, count, norm.eps)
  kind = NgramLayer if any(tables) else Layer
  options = {"pre": False, "residuals": (connection, connection)}
  layers: list[Mapping[str, Any]] = [
    options | ({"ngrams": ngrams, "embed": embed} if ngrams else {})
    for ngrams in tables
  ]
  config = model(
    r,
    "qwen4_exp",
    [mixers[kind] for kind in kinds],
    qwen_experts(r),
    norm,
    layer=layers,
    kind=kind,
    streams=GatedMeanStreams(count=count, rank=rank, eps=norm.eps),
  )
  # The streams' end has a norm of its own.
  return dataclasses.replace(config, norm=NoNorm())


_CONNECTION = {
  "norm": "hc_norm",
  "down": "input_mix_weight_down",
  "up": "input_mix_weight_up",
  "weights": "block_inject_weight",
}
_PARTS = {
  "attention.index.q_norm": "self_attn.indexer.q_layernorm",
  "attention.index.k_norm": "self_attn.indexer.k_layernorm",
  "ngrams.key": "ple.key_proj",
  "ngrams.value": "ple.value_proj",
  "ngrams.key_norm": "ple.norm_key",
  "ngrams.query_norm": "ple.norm_query",
  "ngrams.conv_norm": "ple.norm_conv",
  "ngrams.taps": "ple.conv1d",
  **{
    f"{part}_residual.{ours}": f"{name}_hyper_connection.{theirs}"
    for part, name in (("attention", "attn"), ("feedforward", "mlp"))
    for ours, theirs in _CONNECTION.items()
  },
}
_TABLE = "ple.ple_embedding.ngram_embedding.shard_{}.weight"


def _names(config: TransformerConfig) -> TensorNames:
  names = tensor_names(config, apart=True)
  fused = Fusion(parts=("attention.index.q", "attention.index.k"))
  return dataclasses.replace(
    names,
    parts={**names.parts, **_PARTS},
    fused={**names.fused, "self_attn.indexer.index_qk_proj": fused},
    tables={"ngrams.table": _TABLE},
    streams={
      f"{part}.weight": f"model.hyper_connection_mixer.{name}.weight"
      for part, name in _CONNECTION.items()
      if part != "weights"
    },
    # They follow from the config.
    buffers=(
      *names.buffers,
      "ple_embedding.layer_multipliers",
      "ple_embedding.ngram_heads_offsets",
      "ple_embedding.ngram_heads_vocab_sizes",
    ),
  )


FAMILIES = (
  Family(
    name="qwen4_exp",
    config=_config,
    names=_names,
    types=("qwen4_exp_text",),
    # A layer that predicts the token after the next one.
    unread=lambda config: ("mtp.",),
    wrapper=Wrapper(type="qwen4_exp", architecture="Qwen4ExpForCausalLM"),
  ),
)
