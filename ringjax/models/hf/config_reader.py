"""Reads a Hugging Face config.json, key by key, and forgets none.

Guarantees: a key that nobody read and that is not known to be harmless is an
error, since it may change the computation. Some keys are harmless with one
value only: with another one they are an error too. The spellings of
transformers 4 and 5 mean the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringjax.errors import ConfigError
from ringjax.ops.rope import (
  Dynamic,
  Linear,
  Llama3,
  LongRope,
  Rope,
  Unscaled,
  Yarn,
  yarn_magnitude,
)

# Keys that say nothing about what a forward pass computes.
HARMLESS = frozenset(
  {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "attention_probs_dropout_prob",
    # Code of the folder is never run: a known model_type says what it is.
    "auto_map",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "dtype",
    "embd_pdrop",
    "embedding_dropout",
    "eos_token_id",
    "finetuning_task",
    "for_llm_compressor",
    "gradient_checkpointing",
    "hidden_dropout",
    "hidden_dropout_prob",
    "id2label",
    "initial_context_length",
    "initializer_range",
    "is_composition",
    "is_decoder",
    "is_llama_config",
    "label2id",
    # Llama 1's limit, beside `max_position_embeddings`.
    "max_sequence_length",
    "model_type",
    "num_nextn_predict_layers",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "resid_pdrop",
    "residual_dropout",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id",
    "task_specific_params",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    # For programs in a browser.
    "transformers.js_config",
    "transformers_version",
    "use_bfloat16",
    "use_cache",
    "unsloth_fixed",
    "unsloth_version",
    # How tokens are drawn: older files keep it beside the architecture.
    "bad_words_ids",
    "begin_suppress_tokens",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "prefix",
    "remove_invalid_values",
    "repetition_penalty",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
  }
)
# Keys that say nothing as long as they have this value, and the family does
# not read them. With another one they would change the computation.
HARMLESS_AS: dict[str, Any] = {
  # Falcon 3's word for the gate that Llama has, beside `hidden_act`.
  "activation": "swiglu",
  "add_cross_attention": False,
  "attention_bias": False,
  "is_encoder_decoder": False,
  "mlp_bias": False,
  "pruned_heads": {},
  "rope_interleaved": False,
  "use_bidirectional_attention": False,
  "use_mrope": False,
  "use_qk_norm": False,
  "use_sliding_window": False,
}
_MOST = 2**31 - 1
# What float32 can tell from infinity, and from 0.
_LARGEST, _SMALLEST = 3.4e38, 1e-37
_MISSING = object()


def error(key: str, got: Any, want: str, remedy: str) -> ConfigError:
  """What to raise for the value of a key."""
  shown = repr(got)
  shown = shown if len(shown) <= 80 else shown[:77] + "..."
  return ConfigError(f"config.json: {key}", shown, want, remedy)


# What transformers takes where a file leaves out its (head_dim,
# num_key_value_heads), by model_type; None, and every other type: they follow
# from the hidden size and the heads.
_UNSAID_HEADS: dict[Any, tuple[int | None, int | None]] = {
  "gemma": (256, 16),
  "gemma2": (256, 4),
  "gemma3": (256, 4),
  "gemma3_text": (256, 4),
  "glm": (128, 2),
  "glm4": (128, 2),
  "gpt_oss": (64, 8),
  "llama4_text": (128, 8),
  "mistral": (None, 8),
  "mixtral": (None, 8),
  "qwen2": (None, 32),
  "qwen3": (128, 32),
  "qwen3_moe": (None, 4),
  "qwen3_next": (256, 2),
  "smollm3": (None, 4),
  "starcoder2": (None, 2),
}


class ConfigReader:
  """A config whose keys are taken one by one.

  `prefix` is what stands before a key in errors.
  """

  def __init__(self, config: Mapping[str, Any], prefix: str = ""):
    self._config = config
    self._prefix = prefix
    self._read: set[str] = set()

  def error(self, key: str, got: Any, want: str, remedy: str) -> ConfigError:
    """What to raise for the value of a key of this config."""
    return error(self._prefix + key, got, want, remedy)

  def part(self, key: str, value: Any) -> ConfigReader:
    """A reader of an object in this config."""
    if not isinstance(value, dict):
      raise self.error(key, value, "an object", "repair the file")
    return ConfigReader(value, f"{self._prefix}{key}.")

  def ignore(self, *keys: str) -> None:
    """Marks keys as read that have no meaning in this family."""
    self._read.update(keys)

  def has(self, key: str) -> bool:
    """Whether the key is there and not null."""
    return self._config.get(key) is not None

  def unsaid(self, key: str, default: Any) -> Any:
    """A default for a key that is not there; null is a word, and means None."""
    return None if key in self._config else default

  def value(self, *keys: str, default: Any = _MISSING) -> Any:
    """The first of these keys that is there and not null."""
    self._read.update(keys)
    for key in keys:
      if self._config.get(key) is not None:
        return self._config[key]
    if default is _MISSING:
      raise self.error(
        keys[0], "nothing", "a value", "copy the whole config of the model"
      )
    return default

  def whole(
    self,
    *keys: str,
    default: Any = _MISSING,
    least: int = 1,
    most: int = _MOST,
  ) -> Any:
    """A whole number; `default` may be None."""
    x = self.value(*keys, default=default)
    if x is None:
      return None
    whole = isinstance(x, int) and not isinstance(x, bool)
    if not whole or not least <= x <= most:
      raise self.error(
        keys[0],
        x,
        f"a whole number from {least} to {most}",
        "repair the file",
      )
    return x

  def number(self, *keys: str, default: Any = _MISSING) -> Any:
    """A finite number; `default` may be None."""
    x = self.value(*keys, default=default)
    if x is None:
      return None
    if not _is_number(x):
      raise self.error(keys[0], x, "a finite number", "repair the file")
    return float(x)

  def positive(self, *keys: str, default: Any = _MISSING) -> Any:
    """A number above 0; `default` may be None."""
    x = self.number(*keys, default=default)
    if x is not None and x < _SMALLEST:
      raise self.error(keys[0], x, "a number above 0", "repair the file")
    return x

  def flag(self, *keys: str, default: Any = _MISSING) -> bool:
    """True or false."""
    x = self.value(*keys, default=default)
    if not isinstance(x, bool):
      raise self.error(keys[0], x, "true or false", "repair the file")
    return x

  def text(self, *keys: str, default: Any = _MISSING) -> str:
    """A string."""
    x = self.value(*keys, default=default)
    if not isinstance(x, str):
      raise self.error(keys[0], x, "a string", "repair the file")
    return x

  def act(self, *keys: str, default: Any = _MISSING) -> str:
    """An activation, by our name of it."""
    known = {
      "gelu": "gelu",
      "gelu_fast": "gelu_tanh",
      "gelu_new": "gelu_tanh",
      "gelu_pytorch_tanh": "gelu_tanh",
      "relu": "relu",
      "silu": "silu",
      "swish": "silu",
    }
    x = self.text(*keys, default=default)
    if x not in known:
      raise self.error(
        keys[0], x, f"one of {', '.join(known)}", "use another checkpoint"
      )
    return known[x]

  def must_be(self, key: str, wanted: Any, default: Any) -> None:
    """Refuses another value than the one that is supported."""
    x = self.value(key, default=default)
    if x != wanted:
      raise self.error(key, x, repr(wanted), "this variant is not supported")

  def only(self, key: str, wanted: Any) -> None:
    """Refuses another value than the one that says nothing new."""
    self.must_be(key, wanted, wanted)

  def layers(self) -> int:
    """The number of layers."""
    n = self.whole("num_hidden_layers", "n_layer")
    if n > 1000:
      raise self.error(
        "num_hidden_layers", n, "at most 1000", "repair the file"
      )
    return n

  def layer_types(self, count: int, default: Sequence[str]) -> tuple[str, ...]:
    """The kind of each layer: what the file says, or what older ones meant."""
    types = self.value("layer_types", default=list(default))
    known = (
      "full_attention",
      "sliding_attention",
      "chunked_attention",
      "linear_attention",
    )
    if not isinstance(types, list) or len(types) != count:
      raise self.error(
        "layer_types", types, f"a list of {count} names", "repair the file"
      )
    for name in types:
      if name not in known:
        raise self.error(
          "layer_types", name, f"one of {', '.join(known)}", "repair the file"
        )
    return tuple(types)

  def flags(self, key: str, count: int, default: Sequence[int]) -> list[bool]:
    """A list of 0 and 1 for the layers; empty means the default."""
    x = self.value(key, default=None)
    x = list(default) if x is None or x == [] else x
    sound = isinstance(x, list) and all(i in (0, 1) for i in x)
    if not sound or len(x) != count:
      raise self.error(
        key, x, f"a list of {count} times 0 or 1", "repair the file"
      )
    return [bool(i) for i in x]

  def numbers_of_layers(self, key: str, default: Sequence[int]) -> list[int]:
    """A list of layers by their numbers."""
    x = self.value(key, default=list(default))
    sound = isinstance(x, list) and all(
      isinstance(i, int) and not isinstance(i, bool) for i in x
    )
    if not sound:
      raise self.error(key, x, "a list of layers' numbers", "repair the file")
    return x

  def heads(self) -> tuple[int, int]:
    """(query heads, kv heads)."""
    n = self.whole("num_attention_heads", "n_head")
    usual = _UNSAID_HEADS.get(self._config.get("model_type"), (None, None))[1]
    usual = self.unsaid("num_key_value_heads", usual)
    k = self.whole("num_key_value_heads", default=usual or n)
    if n % k:
      raise self.error(
        "num_key_value_heads",
        k if self.has("num_key_value_heads") else f"nothing, which means {k}",
        f"a divisor of the {n} query heads",
        "repair the file",
      )
    return n, k

  def head_dim(self, heads: int) -> int:
    """Its own key, or the hidden size over the heads."""
    hidden = self.whole("hidden_size", "n_embed")
    usual = _UNSAID_HEADS.get(self._config.get("model_type"), (None, None))[0]
    h = self.whole("head_dim", default=self.unsaid("head_dim", usual))
    if h is not None:
      return h
    if hidden % heads:
      raise self.error(
        "hidden_size",
        hidden,
        f"a multiple of the {heads} heads, or a head_dim",
        "repair the file",
      )
    return hidden // heads

  def rope(
    self,
    head_dim: int,
    *,
    kind: str | None = None,
    theta: float = 10000.0,
    partial: float = 1.0,
    interleaved: bool = False,
    plain: bool = False,
    theta_key: str = "rope_theta",
  ) -> Rope:
    """The rotation of layers of a `kind` (where the file tells them apart).

    `theta` and `partial` are the family's defaults. With `plain` the scaling
    of an older file is not for this kind, whose base is `theta_key`.
    """
    top = self.value("rope_parameters", default=None)
    bases = ("rotary_emb_base", "rope_theta")
    if theta_key not in bases:
      # A base of its own: that of other layers is not for these.
      self.ignore(*bases)
      bases = (theta_key,)
    theta = self.positive(*bases, default=theta)
    old = self.value("rope_scaling", default=None)
    partial = self.positive(
      "partial_rotary_factor", "rotary_pct", default=partial
    )
    if top is None:
      given = {} if plain or old is None else dict(_dict("rope_scaling", old))
      name = "rope_scaling"
    else:
      given, name = dict(_dict("rope_parameters", top)), "rope_parameters"
      if given and all(isinstance(v, dict | None) for v in given.values()):
        if kind not in given:
          raise self.error(
            name, sorted(given), f"one entry for {kind!r}", "repair the file"
          )
        given = dict(given[kind] or {})
    part = ConfigReader(given, f"{name}.")
    theta = part.positive("rope_theta", default=theta)
    partial = part.positive("partial_rotary_factor", default=partial)
    dims = int(head_dim * partial)
    if dims < 2 or dims % 2 or dims > head_dim:
      raise self.error(
        "partial_rotary_factor",
        partial,
        f"an even number of the {head_dim} dims of a head",
        "repair the file",
      )
    return Rope(
      theta=theta,
      dims=dims,
      interleaved=interleaved,
      scaling=self._scaling(part, theta, dims),
    )

  def _scaling(self, part: ConfigReader, theta: float, dims: int) -> Unscaled:
    kind = part.text("rope_type", "type", default="default")
    # What a family would have it be is no number to stretch a context by.
    stretched = kind not in ("default", "linear")
    most = self.whole(
      "max_position_embeddings", default=_MISSING if stretched else 2048
    )
    own = self.whole("original_max_position_embeddings", default=None)
    # "finetuned" was about a training.
    part.ignore("type", "finetuned")
    inner = part.whole("original_max_position_embeddings", default=most)
    original = own or inner
    if kind == "default":
      scaling = Unscaled()
    elif kind == "linear":
      known = part.has("original_max_position_embeddings")
      scaling = Linear(
        factor=part.positive("factor"), original=inner if known else None
      )
    elif kind == "dynamic":
      if dims == 2:
        raise part.error(
          "rope_type", kind, "more than 2 dims that turn", "repair the file"
        )
      scaling = Dynamic(factor=part.positive("factor"), original=most)
    elif kind == "llama3":
      scaling = part._llama3(original)
    elif kind == "yarn":
      scaling = part._yarn(original, most, theta)
    elif kind in ("longrope", "su"):
      scaling = part._longrope(original, most, dims)
    else:
      raise part.error(
        "rope_type",
        kind,
        "default, linear, dynamic, llama3, yarn or longrope",
        "use another checkpoint",
      )
    part.finish()
    return scaling

  def _llama3(self, original: int) -> Llama3:
    low = self.positive("low_freq_factor")
    high = self.positive("high_freq_factor")
    if high < low:
      raise self.error(
        "high_freq_factor", high, f"at least {low}", "repair the file"
      )
    return Llama3(
      factor=self.positive("factor"), low=low, high=high, original=original
    )

  def _longrope(self, original: int, most: int, dims: int) -> LongRope:
    if original < 2:
      raise self.error(
        "original_max_position_embeddings",
        original,
        "at least 2",
        "repair the file",
      )
    return LongRope(
      short=self._floats("short_factor", dims // 2),
      long=self._floats("long_factor", dims // 2),
      original=original,
      factor=self.positive("factor", default=most / original),
      attention=self.positive("attention_factor", default=None),
    )

  def _floats(self, key: str, count: int) -> tuple[float, ...]:
    x = self.value(key)
    sound = isinstance(x, list) and all(_is_number(i) and i > 0 for i in x)
    if not sound or len(x) != count:
      raise self.error(
        key, x, f"a list of {count} numbers above 0", "repair the file"
      )
    return tuple(float(i) for i in x)

  def _yarn(self, original: int, most: int, theta: float) -> Yarn:
    if theta <= 1:
      raise self.error("rope_theta", theta, "more than 1", "repair the file")
    factor = self.positive("factor", default=most / original)
    weight = self.number("mscale", default=None)
    whole = self.number("mscale_all_dim", default=None)
    attention = self.positive("attention_factor", default=None)
    if attention is None and weight and whole:
      attention = yarn_magnitude(factor, weight) / yarn_magnitude(factor, whole)
    return Yarn(
      factor=factor,
      original=original,
      fast=self.positive("beta_fast", default=32.0),
      slow=self.positive("beta_slow", default=1.0),
      truncate=self.flag("truncate", default=True),
      attention=attention,
    )

  def finish(self) -> None:
    """Refuses a key that nobody read."""
    left = sorted(
      k
      for k, v in self._config.items()
      if k not in self._read and k not in HARMLESS and v is not None
    )
    for key in left:
      if key in HARMLESS_AS:
        self.only(key, HARMLESS_AS[key])
        continue
      raise self.error(
        key,
        self._config[key],
        "keys of this family",
        "remove it if it does not change the computation",
      )


def _dict(name: str, x: Any) -> dict[str, Any]:
  if not isinstance(x, dict):
    raise error(name, x, "an object", "repair the file")
  return x


def _is_number(x: Any) -> bool:
  """Whether float32 has it; True is no number, and NaN is none."""
  plain = isinstance(x, int | float) and not isinstance(x, bool)
  return plain and abs(x) <= _LARGEST
