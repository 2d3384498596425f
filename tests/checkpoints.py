"""Tiny checkpoints of every model family, as Hugging Face folders hold them.

Law: `tests/fixtures/models/<name>/` holds a config, the shapes of the tensors,
and what transformers computes; the weights themselves are not committed. A
tensor is a function of its name, its shape, the config and a seed of the
model, by integer arithmetic and one division: the same bits on every machine.
`tests/fixtures/make.py` makes the fixtures, with torch, from these weights.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
import zlib
from collections.abc import Mapping
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

MODELS = pathlib.Path(__file__).resolve().parent / "fixtures" / "models"
# Models of text and images, of which the logits are those of text alone.
IMAGES = MODELS.with_name("image_models")
# The tensors of these that no text reads.
SIGHT = (
  "aligner",
  "audio_tower",
  "connector",
  "embed_audio",
  "embed_vision",
  "generation_",
  "high_res_vision",
  "image_newline",
  "image_tower",
  "layerwise_projectors",
  "merger",
  "mlp1",
  "mlp_AR",
  "mm_projector",
  "multi_modal_projector",
  "patch_merge_mlp",
  "patch_merger",
  "pre_mm_projector_norm",
  "projector",
  "spatial_projectors",
  "video_tower",
  "vision",
  "visual",
  "vit",
  "vqmodel",
)

GEMMA = ("gemma", "gemma2", "gemma3_text")
# Families whose norms multiply by (1 + weight).
ONE_PLUS = (
  *GEMMA,
  "minimax_m3_vl_text",
  "nemotron",
  "qwen3_5_moe_text",
  "qwen3_5_text",
  "qwen3_next",
  "qwen4_exp_text",
  "recurrent_gemma",
  "vaultgemma",
)
# Families of which the last norm alone does not.
PARTLY_ONE_PLUS = ("muse_glimmer_text", "muse_spark_text")
# Families of which all layers read tokens' ids.
STREAMED = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")
# Families that multiply their embeddings.
LOUD = (
  *GEMMA,
  *STREAMED,
  "recurrent_gemma",
  "granite",
  "granite4_vision_text",
  "granite_docling_text",
  "granitemoe",
  "granitemoehybrid",
  "vaultgemma",
)

# Tables that follow from a config, and that no program has to read or write.
DECAY_TABLES = ("query_decay", "key_decay", "diagonal_decay")
HASHES = ("layer_multipliers", "heads_offsets", "heads_vocab_sizes")
TABLES = (*DECAY_TABLES, *HASHES)
# Numbers that follow from a config: tables of decays, and one of each head.
DECAYS = ("slope_rate", *DECAY_TABLES)

# Buffers, not parameters: they keep their dtype in a checkpoint of any other.
BUFFER = "e_score_correction_bias"
# A table of each token's experts, int64.
EXPERTS_OF_IDS = "tid2eid"
BUFFERS = (BUFFER, "ffn.gate.bias", EXPERTS_OF_IDS, *HASHES)

DTYPES = {
  "float32": np.dtype(np.float32),
  "float16": np.dtype(np.float16),
  "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
  """What transformers computes, in float64.

  `logits` belong to `tokens`; `greedy` continues `prompt`, each token by a
  forward pass over all that came before it, without a cache.
  """

  tokens: np.ndarray  # int32 [B, T]
  logits: np.ndarray  # float32 [B, T, V]
  prompt: np.ndarray  # int32 [B, P]
  greedy: np.ndarray  # int32 [B, 16]


def names() -> list[str]:
  return sorted(path.parent.name for path in MODELS.glob("*/expected.npz"))


def image_names() -> list[str]:
  """The models of text and images."""
  return sorted(path.parent.name for path in IMAGES.glob("*/expected.npz"))


def home(name: str) -> pathlib.Path:
  """The folder of a fixture."""
  inner = MODELS / name
  return inner if inner.exists() else IMAGES / name


def sees(tensor: str, settings: Mapping[str, Any] | None = None) -> bool:
  """Whether a tensor is of the part that no text reads.

  Of some configs (`settings`) whole layers are.
  """
  skipped = (settings or {}).get("text_config", {})
  layers = skipped.get("cross_attention_layers", ())
  parts = (*SIGHT, *(f"layers.{i}." for i in layers))
  return any(f".{part}" in f".{tensor}" for part in parts)


def config(name: str, spelling: Literal["v4", "v5"] = "v5") -> dict[str, Any]:
  """config.json; some models also have one as transformers 4 spelled it."""
  file = "config.json" if spelling == "v5" else "config_v4.json"
  return json.loads((home(name) / file).read_text())


def names_v4() -> list[str]:
  """The models whose config exists in the spelling of transformers 4 too."""
  return sorted(path.parent.name for path in MODELS.glob("*/config_v4.json"))


def shapes(name: str) -> dict[str, tuple[int, ...]]:
  """Of every tensor on disk, in the order in which they lie there."""
  file = json.loads((home(name) / "shapes.json").read_text())
  return {tensor: tuple(shape) for tensor, shape in file.items()}


def expected(name: str) -> Expected:
  fields = [field.name for field in dataclasses.fields(Expected)]
  with np.load(home(name) / "expected.npz") as file:
    return Expected(**{field: file[field] for field in fields})


def tensors(name: str) -> dict[str, np.ndarray]:
  """Every tensor by its name on disk, float32 or whole numbers."""
  with np.load(home(name) / "expected.npz") as file:
    seed, crc = int(file["seed"]), int(file["crc"])
  arrays = draw_all(shapes(name), config(name), seed)
  if checksum(arrays) != crc:
    raise AssertionError(
      f"{name}: other weights than those that transformers was given; "
      "run tests/fixtures/make.py"
    )
  return arrays


def write(
  name: str,
  folder: str | pathlib.Path,
  *,
  shards: int = 1,
  dtype: str = "float32",
  spelling: Literal["v4", "v5"] = "v5",
) -> pathlib.Path:
  """The checkpoint as `save_pretrained` lays it out; returns the folder."""
  settings = config(name, spelling)
  settings["dtype" if "dtype" in settings else "torch_dtype"] = dtype
  return write_folder(
    {
      key: array if key.endswith(BUFFERS) else array.astype(DTYPES[dtype])
      for key, array in tensors(name).items()
    },
    settings,
    pathlib.Path(folder),
    shards=shards,
  )


def write_folder(
  arrays: Mapping[str, np.ndarray],
  settings: Mapping[str, Any],
  folder: pathlib.Path,
  *,
  shards: int = 1,
) -> pathlib.Path:
  """config.json, and the tensors in one file or in several with an index."""
  if not 1 <= shards <= len(arrays):
    raise ValueError(f"shards: got {shards}, want 1 to {len(arrays)}")
  folder.mkdir(parents=True, exist_ok=True)
  text = json.dumps(settings, indent=2, sort_keys=True)
  (folder / "config.json").write_text(text + "\n")
  keys, where = list(arrays), {}
  for i in range(shards):
    part = keys[len(keys) * i // shards : len(keys) * (i + 1) // shards]
    file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
    file = "model.safetensors" if shards == 1 else file
    where |= dict.fromkeys(part, file)
    save_file(
      {key: np.asarray(arrays[key], order="C") for key in part},
      folder / file,
      metadata={"format": "pt"},
    )
  if shards > 1:
    totals = {
      "total_parameters": sum(
        x.size for k, x in arrays.items() if not k.endswith(BUFFERS)
      ),
      "total_size": sum(x.nbytes for x in arrays.values()),
    }
    index = {"metadata": totals, "weight_map": where}
    text = json.dumps(index, indent=2, sort_keys=True)
    (folder / "model.safetensors.index.json").write_text(text + "\n")
  return folder


# ---------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------


def draw_all(
  shapes: Mapping[str, tuple[int, ...]],
  settings: Mapping[str, Any],
  seed: int,
) -> dict[str, np.ndarray]:
  return {
    name: draw(name, shape, settings, seed) for name, shape in shapes.items()
  }


def checksum(arrays: Mapping[str, np.ndarray]) -> int:
  """Of all bytes of all tensors."""
  crc = 0
  for array in arrays.values():
    crc = zlib.crc32(array.astype("<f4").tobytes(), crc)
  return crc


def draw(
  name: str, shape: tuple[int, ...], settings: Mapping[str, Any], seed: int
) -> np.ndarray:
  """One tensor, float32 or whole numbers."""
  if name.endswith(DECAYS):
    return decay(name, settings).reshape(shape)
  if name.endswith(HASHES):
    return hashes(name, settings)
  if name.endswith(EXPERTS_OF_IDS):
    # A row has different experts.
    first = np.argsort(
      normal(name, (shape[0], settings["n_routed_experts"]), seed)
    )
    return np.ascontiguousarray(first[:, : shape[1]], np.int64)
  centre, scale = spread(name, shape, settings)
  x = centre + scale * normal(name, shape, seed)
  return np.asarray(x, np.float32)


def decay(name: str, settings: Mapping[str, Any]) -> np.ndarray:
  """A table of MiniMax-01's fixed decays, float32.

  Rounded from float64, so that the last bits of an exponential do not show.
  """
  heads, size = settings["num_attention_heads"], settings["block_size"]
  layer = int(name.split(".layers.")[1].split(".")[0])
  share = 1 - layer / (settings["num_hidden_layers"] - 1 + 1e-5) + 1e-5
  rate = share * np.float64(2) ** (-8 * np.arange(1, heads + 1) / heads)
  rate, at = rate[:, None, None], np.arange(1, size + 1)[:, None]
  table = {
    "slope_rate": lambda: rate,
    "query_decay": lambda: np.exp(-rate * at),
    "key_decay": lambda: np.exp(-rate * (size - at)),
    "diagonal_decay": lambda: np.exp(-rate * (at - at.T)) * (at >= at.T),
  }[name.rsplit(".", 1)[-1]]
  return np.asarray(table(), np.float32)


def hashes(name: str, settings: Mapping[str, Any]) -> np.ndarray:
  """Factors, sizes and offsets of the tables of Qwen4-Exp's n-grams, int64."""
  layer = int(name.split(".layers.")[1].split(".")[0])
  table = settings["ple_layer_ids"].index(layer + 1)
  longest = settings["ngram_size"]
  if name.endswith("layer_multipliers"):
    half = (2**63 - 1) // settings["vocab_size"] // 2
    step, wrap, factors = 0x9E3779B97F4A7C15, 2**64, []
    for n in range(longest):
      x = (settings["seed"] + 10007 * table + step * (n + 2)) % wrap
      x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % wrap
      x = (x ^ x >> 27) * 0x94D049BB133111EB % wrap
      factors.append(2 * ((x ^ x >> 31) % half) + 1)
    return np.asarray(factors, np.int64)
  heads = (longest - 1) * settings["heads_per_ngram"]
  least = settings["ngram_vocab_size_base"]
  primes = [
    n for n in range(least, 8 * least) if all(n % k for k in range(2, n))
  ]
  sizes = np.asarray(primes[table * heads :][:heads], np.int64)
  if name.endswith("heads_vocab_sizes"):
    return sizes
  return np.cumsum(sizes) - sizes


def normal(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
  """Almost normal, mean 0, deviation 1: a sum of four 16-bit integers.

  NumPy promises the raw bits of a bit generator for ever, of a distribution
  it does not.
  """
  bits = np.random.Philox(key=zlib.crc32(name.encode()) + (seed << 32))
  raw = np.atleast_1d(bits.random_raw(math.prod(shape)))
  fours = raw.astype("<u8").view("<u2").reshape(*shape, 4).astype(np.int64)
  deviation = math.sqrt(4 * (2**32 - 1) / 12)
  return (fours.sum(-1) - 2 * (2**16 - 1)) / deviation


def spread(
  name: str, shape: tuple[int, ...], settings: Mapping[str, Any]
) -> tuple[float, float]:
  """Mean and deviation, such that every part of a model has a say.

  Logits come out with a deviation of about 2.
  """
  if not sees(name, settings) and "text_config" in settings:
    # As if the text model were alone.
    inner = settings["text_config"]
    name = re.sub(r"(language|text)_model\.", "", name)
    settings = {**settings, **inner}
  family, last = settings["model_type"], name.removesuffix(".weight")
  last = last.rsplit(".", 1)[-1]
  # Where the head is the embedding, a model that remembers its input well
  # answers with its last token, for ever: small embeddings, a large last norm.
  tied = settings.get("tie_word_embeddings", True)
  quiet = 9.0 if family in LOUD else 3.0
  # Where logits are not divided by the width of a head they would be large;
  # and so would errors be where each part adds as much as all before it.
  if family in STREAMED and last in ("q_norm", "k_norm"):
    return 0.6, 0.1
  if family in STREAMED and last.startswith("post_"):
    return 0.5, 0.1
  if name.endswith("linear_attn.norm.weight"):
    return 1.0, 0.2
  if re.search(
    r"(norm(_[12])?|post_norm[12]|ln_\w+|norms\.\d+|norm_\w+)\.weight$", name
  ):
    if "embed" in name and "embedding_norm" not in name:
      return 0.3, 0.1
    final = name.count(".") == 2 and "per_layer" not in name
    gain = quiet if tied and final else 1.0
    one_plus = family in ONE_PLUS or (family in PARTLY_ONE_PLUS and not final)
    return gain - one_plus, 0.2
  if last in ("layer_scalar", "per_expert_scale", "scale") or (
    last.startswith("hc_") and last.endswith("_scale")
  ):
    # Two equal scales could not be told apart.
    return 0.9, 0.6 if family in ("hy_v4", "glm5_next_text") else 0.2
  if family == "glm5_next_text" and last in ("hc_attn_base", "hc_ffn_base"):
    return 0.0, 0.6
  if last == "ape":
    return 0.0, 0.7
  if last == "embed_tokens_per_layer":
    return 0.0, 1 / math.sqrt(settings["hidden_size_per_layer_input"])
  if last == BUFFER or name.endswith("ffn.gate.bias"):
    return 0.0, 0.1
  if last in (
    "attention_sink_bias",
    "attn_sink",
    "dt_bias",
    "learnable_sink_param",
    "sinks",
  ):
    return 0.0, 1.0
  if last == "A_log":
    # Where it multiplies what a sigmoid reads, small ones would say nothing.
    limited = "forget_gate" in name or family == "glm5_next_text"
    return 0.5 if limited else -2.0, 0.7
  if last.startswith("index_kpool_compress"):
    # Large gates: the keys of a block do not count alike.
    return 0.0, 1.5 if last.endswith("ape") else 3 / math.sqrt(shape[-1])
  if last == "recurrent_param":
    return -4.0, 0.7
  if len(shape) == 0:
    return (-0.5, 0.1) if last == "eps" else (0.5, 0.1)
  if len(shape) == 1 or last.endswith("_bias"):
    return 0.0, 0.2
  if last in (
    "embed_tokens",
    "embed_in",
    "word_embeddings",
    "wte",
    "embeddings",
    "embed_positions",
    "wpe",
  ):
    return 0.0, 2 / quiet / math.sqrt(shape[-1]) if tied else 1.0
  # A linear map keeps [out, in] on disk; experts in one tensor [E, in, out].
  fan_in = shape[0] if family == "gpt2" else shape[-1]
  if last in ("gate_up_proj", "down_proj") and len(shape) == 3:
    fan_in = shape[1]
  gain = 1.0
  if last in ("lm_head", "embed_out") or name == "head.weight":
    gain = 2.0
  elif (last == "wq_b" and ".attn." in name) or last in (
    "q_proj",
    "k_proj",
    "q_b_proj",
    "qkv_proj",
    "query_key_value",
    "Wqkv",
    "c_attn",
  ):
    gain = 1.5
  elif last == "linear" and family == "zamba2":
    # Blocks without residuals would make much of rounding errors.
    gain = 0.03
  elif last == "modality_router":
    # What it reads is divided by the width.
    gain = 0.5 * fan_in
  elif last in ("prediction_coefs", "correction_coefs"):
    gain = 0.5
  elif last in ("gate", "router", "wg", "layer"):
    gain = 3.0
  return 0.0, gain / math.sqrt(fan_in)
