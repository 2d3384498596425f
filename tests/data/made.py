"""Small tokenizers of the kinds that models have, trained on the spot."""

from __future__ import annotations

import json
import pathlib
import string

import tokenizers
from tokenizers import (
  AddedToken,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
  trainers,
)

SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = {
  "llama3": [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
  ],
  "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
  "phi3": ["<unk>", "<s>", "</s>", "<|endoftext|>"],
  "llama2": ["<unk>", "<s>", "</s>"],
  "mistral": ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
  "gemma": ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
  "wordpiece": ["[PAD]", "[UNK]", "[CLS]", "[SEP]"],
  "unigram": ["<unk>", "<s>", "</s>"],
}
KINDS = tuple(SPECIAL)
STRIPPED = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
CALLS = ["<think>", "</think>", "<tool_call>", "<tool_response>"]
BOS = {
  "llama3": "<|begin_of_text|>",
  "phi3": "<s>",
  "llama2": "<s>",
  "mistral": "<s>",
  "gemma": "<bos>",
}
EOS = {
  "llama3": "<|eot_id|>",
  "qwen": "<|im_end|>",
  "phi3": "<|endoftext|>",
  "gemma": "<eos>",
  "wordpiece": "[SEP]",
}


def corpus() -> list[str]:
  """Lines of Python and of prose, the same on each machine that runs it."""
  text = pathlib.Path(string.__file__).read_text()
  words = ["Grüße aus München", "東京の天気 は", "it's <b>bold</b>", "¿qué? 😀"]
  return [*text.splitlines(keepends=True), *words * 3]


def engine(kind: str) -> tokenizers.Tokenizer:
  """A tokenizer of the library, of the kind that a family of models has."""
  special = SPECIAL[kind]
  if kind in ("llama3", "qwen"):
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    split = pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
      [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
      vocab_size=600,
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    )
  elif kind == "wordpiece":
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
      vocab_size=600, special_tokens=special, show_progress=False
    )
  elif kind == "unigram":
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
      vocab_size=600,
      special_tokens=special,
      unk_token="<unk>",
      show_progress=False,
    )
  else:
    return _sentencepiece(kind)
  made.train_from_iterator(corpus(), trainer)
  return _with_special(kind, made)


def _sentencepiece(kind: str) -> tokenizers.Tokenizer:
  """As sentencepiece models are converted: ▁ for spaces, bytes for the rest."""
  trained = tokenizers.Tokenizer(models.BPE())
  trained.normalizer = normalizers.Replace(" ", "▁")
  trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False)
  trained.train_from_iterator(corpus(), trainer)
  state = json.loads(trained.to_str())["model"]
  words = [
    *SPECIAL[kind],
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *sorted(state["vocab"], key=state["vocab"].get),
  ]
  # A merge that spells a special token, as converted vocabularies have them.
  spelled = [("<", "s"), ("<s", ">")] if "<s>" in words else []
  words += [w for w in ("<", "s", ">", "<s") if w not in words]
  merges = [tuple(m) for m in state["merges"]]
  made = tokenizers.Tokenizer(
    models.BPE(
      vocab={w: i for i, w in enumerate(dict.fromkeys(words))},
      merges=[*spelled, *(m for m in merges if m not in spelled)],
      unk_token="<unk>" if "<unk>" in words else None,
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
  if kind == "gemma":
    made.normalizer = normalizers.Replace(" ", "▁")
  elif kind == "mistral":
    made.pre_tokenizer = pre_tokenizers.Metaspace(
      prepend_scheme="first", split=False
    )
    steps.append(decoders.Strip(" ", 1, 0))
  else:
    made.normalizer = normalizers.Sequence(
      [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps.append(decoders.Strip(" ", 1, 0))
  made.decoder = decoders.Sequence(steps)
  return _with_special(kind, made)


def _with_special(
  kind: str, made: tokenizers.Tokenizer
) -> tokenizers.Tokenizer:
  made.add_special_tokens(
    [AddedToken(t, special=True, normalized=False) for t in SPECIAL[kind]]
  )
  if kind == "phi3":
    made.add_special_tokens(
      [AddedToken(t, special=True, rstrip=True) for t in STRIPPED]
    )
  if kind == "qwen":
    made.add_tokens([AddedToken(t, normalized=False) for t in CALLS])
  bos = BOS.get(kind)
  if bos is not None:
    made.post_processor = processors.TemplateProcessing(
      single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))]
    )
  return made


def folder(kind: str, path: pathlib.Path, **config: object) -> pathlib.Path:
  """The same as a model's folder has it."""
  path.mkdir(parents=True, exist_ok=True)
  engine(kind).save(str(path / "tokenizer.json"))
  said = {"bos_token": BOS.get(kind), "eos_token": EOS.get(kind, "</s>")}
  unknown = [t for t in SPECIAL[kind] if "unk" in t.lower()]
  said["unk_token"] = unknown[0] if unknown else None
  (path / "tokenizer_config.json").write_text(json.dumps(said | config))
  return path
