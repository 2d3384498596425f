"""Reads the config.json of an EAGLE-3 head, in its published spellings.

`LlamaForCausalLMEagle3` is what EAGLE, SpecForge, SGLang and ModelOpt write,
`speculators` with a `transformer_layer_config` what vLLM's trainers do. They
count layers differently: `eagle_config` names layers by whose output, a key of
the outer object those by whose input the head is fed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ringjax.json_text import json_text
from ringjax.models.families.family import attention, biases, gated, rms
from ringjax.models.hf.config_reader import OTHER, ConfigReader
from ringjax.models.hf.unknown_keys import UnknownKeys
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.draft_layers.eagle_layer import (
  DraftVocabulary,
  EagleLayer,
  HeadFolder,
)
from ringjax.nn.draft_layers.predict_layer import FIRST
from ringjax.ops.mask import Causal, Since

IDS = "eagle_aux_hidden_state_layer_ids"
# Keys that say nothing about the head's numbers.
_HARMLESS = (
  "embed_requires_grad", "has_no_defaults_at_init", "max_position_embeddings",
  "max_window_layers", "modal_type", "num_aux_hidden_states", "sliding_window",
  "speculators_config", "speculators_model_type", "speculators_version",
  "target_model_type", "verifier_accept_k",
)  # fmt: skip


def default_taps(layers: int) -> tuple[int, ...]:
  """Layers whose inputs a head reads where its config names none."""
  return (2, layers // 2, layers - 3)


def read_layer(
  config: Mapping[str, Any],
  target: TransformerConfig,
  *,
  ids: np.ndarray | None,
  own_embedding: bool,
  folder: HeadFolder,
) -> EagleLayer:
  """The layer that a head's config.json describes, for a target.

  Args:
    config: Content of the head's config.json.
    target: Config of the target, without a head.
    ids: Ids of the draft vocabulary, int [W]; None: all ids of the target.
    own_embedding: Whether the folder has embeddings.
    folder: Storage of the head in its folder.

  Raises:
    ConfigError: If a value is out of range, does not fit the target, or is of
      a head that is not supported.
  """
  # The folder's code is not run; that of speculators is what is computed here.
  config = {key: x for key, x in config.items() if key != "auto_map"}
  unknown = UnknownKeys(config)
  outer = ConfigReader(config, unknown=unknown)
  speculators = "transformer_layer_config" in config
  r = outer
  if speculators:
    key = "transformer_layer_config"
    r = outer.part(key, outer.value(key))
  outer.ignore(*_HARMLESS)
  r.ignore(*_HARMLESS)
  width = r.whole("hidden_size")
  if r.layers() != 1:
    raise r.error("num_hidden_layers", r.layers(), "1", OTHER)
  if r.flag("use_sliding_window", default=False):
    raise r.error("use_sliding_window", True, "false", OTHER)
  r.only("is_causal", True)
  outer.only("parallel_drafting", False)
  target_width = outer.whole("target_hidden_size", default=width)
  if target_width != target.embed:
    key = "target_hidden_size" if outer.has("target_hidden_size") else (
      "hidden_size"
    )  # fmt: skip
    want = f"{target.embed}, the width of the target"
    raise outer.error(key, target_width, want, OTHER)
  if not own_embedding and width != target.embed:
    want = f"{target.embed}, or embed_tokens.weight in the folder"
    raise r.error("hidden_size", width, want, OTHER)
  vocab = outer.whole("target_vocab_size", "vocab_size", default=None)
  vocab = vocab or r.whole("vocab_size")
  r.ignore("vocab_size")
  size = outer.whole("draft_vocab_size", default=vocab)
  outer.flag("tie_word_embeddings", default=False)
  r.flag("tie_word_embeddings", default=False)
  vocabulary: DraftVocabulary | int = size
  if ids is None:
    if size != vocab or size > target.vocab:
      want = f"{target.vocab} ids of the target, or d2t in the folder"
      raise outer.error("draft_vocab_size", size, want, OTHER)
  else:
    _check_ids(outer, ids, size, target.vocab)
    vocabulary = DraftVocabulary(ids)
  norm = rms(r)
  norm_each = outer.flag("fc_norm", default=False)
  norm_all = outer.flag("norm_before_fc", default=False)
  if norm_each and norm_all:
    raise outer.error("fc_norm", True, "false with norm_before_fc", OTHER)
  options = biases(r)
  r.ignore("head_dim")
  layer = EagleLayer(
    attention=attention(r, r.rope(), mask=Causal() & Since(FIRST), **options),
    feedforward=gated(r, bias=r.flag("mlp_bias", default=False)),
    norm=norm,
    embed=width,
    out_norm=norm,
    hands_normed=outer.flag("norm_output", default=False),
    taps=_taps(outer, len(target.layers)),
    vocabulary=vocabulary,
    own_embedding=vocab if own_embedding else 0,
    feature_norm="each" if norm_each else "whole" if norm_all else "",
    normed_residual=outer.flag("norm_before_residual", default=speculators),
    folder=folder,
  )
  r.finish()
  if r is not outer:
    outer.finish()
  unknown.warn()
  return layer


def _check_ids(r: ConfigReader, ids: np.ndarray, size: int, vocab: int) -> None:
  """Refuses ids of a draft vocabulary that are not ids of the target."""
  key, remedy = "draft_vocab_size", "use the head of this target"
  if ids.shape != (size,):
    raise r.error(key, size, f"{list(ids.shape)}, the shape of d2t", remedy)
  unique = np.unique(ids)
  if unique.size != size or unique[0] < 0 or unique[-1] >= vocab:
    got = f"d2t with ids from {unique[0]} to {unique[-1]}, {unique.size} in all"
    want = f"{size} different ids of a target with {vocab}"
    raise r.error(key, got, want, remedy)


def _taps(r: ConfigReader, layers: int) -> tuple[int, ...]:
  """Layers whose inputs the head reads.

  Args:
    r: Reader of the head's config.
    layers: Number of the target's layers.
  """
  inner = r.value("eagle_config", default={})
  part = r.part("eagle_config", inner)
  part.ignore("num_aux_hidden_states", "next_layer_regular")
  part.only("use_input_layernorm_in_first_layer", True)
  part.only("use_last_layernorm", True)
  part.only("use_mtp_layernorm", False)
  part.only("parallel_draft_step", 1)
  if not part.flag("use_aux_hidden_state", default=True):
    raise part.error(
      "use_aux_hidden_state", False, "true: EAGLE-3, with states of several "
      "layers", OTHER
    )  # fmt: skip
  outputs: Sequence[int] | None = part.value(IDS, default=None)
  inputs: Sequence[int] | None = r.value(
    IDS, "aux_hidden_state_layer_ids", default=None
  )
  part.finish()
  first = 0 if outputs is None else -1
  numbers = outputs if outputs is not None else inputs
  if outputs is not None and inputs is not None:
    raise r.error(IDS, inputs, "one such key: eagle_config has one, too", OTHER)
  if numbers is None:
    taps = default_taps(layers)
    if min(taps) < 0:
      want = f"layers of the target, of which there are {layers}"
      raise r.error(f"eagle_config.{IDS}", "nothing", want, "name them")
    return taps
  is_int = lambda n: isinstance(n, int) and not isinstance(n, bool)
  valid = isinstance(numbers, list) and numbers and all(map(is_int, numbers))
  if not valid or not all(first <= n <= layers + first for n in numbers):
    want = f"layers of the target, from {first} to {layers + first}"
    raise r.error(IDS, numbers, want, OTHER)
  return tuple(n - first for n in numbers)


def config_for(
  target: TransformerConfig,
  source: Mapping[str, Any],
  *,
  size: int,
  taps: Sequence[int] | None,
  hidden: int | None,
) -> dict[str, Any]:
  """The config.json of a new head with the heads of the target's attention.

  Args:
    target: Config of the target.
    source: Content of the target's config.json.
    size: Size of the draft vocabulary.
    taps: Layers whose inputs the head reads; None: the default ones.
    hidden: Width of its feedforward; None: 4 D.
  """
  layers, width = len(target.layers), target.embed
  chosen = default_taps(layers) if taps is None else tuple(taps)
  mixers: list[Any] = [layer.attention for layer in target.layers]
  mixer = next(
    (x for x in reversed(mixers) if getattr(x, "kv_heads", 0) and x.ropes),
    None,
  )
  config: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": width,
    "intermediate_size": hidden or 4 * width,
    "num_hidden_layers": 1,
    "num_attention_heads": max(1, width // 64),
    "num_key_value_heads": max(1, width // 64),
    "head_dim": min(width, 64),
    "hidden_act": "silu",
    "max_position_embeddings": target.max_positions,
    "rms_norm_eps": target.norm.eps,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": target.vocab,
    "draft_vocab_size": size,
    "eagle_config": {
      "use_aux_hidden_state": True,
      IDS: [n - 1 for n in chosen],
    },
  }
  if mixer is not None:
    config |= {
      "num_attention_heads": mixer.heads,
      "num_key_value_heads": mixer.kv_heads,
      "head_dim": mixer.head_dim,
      "rope_theta": mixer.ropes[0].theta,
    }
    scaling = source.get("rope_scaling") or source.get("rope_parameters")
    plain = isinstance(scaling, dict) and not any(
      isinstance(x, dict) for x in scaling.values()
    )
    if plain and scaling.get("rope_type", scaling.get("type")) == "llama3":
      config["rope_scaling"] = scaling
  return config


def text_of(config: Mapping[str, Any]) -> str:
  """Text of a config.json, by which equal ones have equal programs."""
  return json_text(config, sort_keys=True)
