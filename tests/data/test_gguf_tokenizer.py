"""Tokenizers of GGUF files: texts are split as the tokenizer's name says."""

import json

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

import ringjax as rj
from ringjax.data.bytelevel import BYTE_CHARS
from ringjax.data.gguf_splits import SPLITS
from ringjax.data.gguf_tokenizer import tokenizer_files

TEXTS = (
  "Hello  World's HTTPServer 1234567 x=3.14;\n\n  naïve",
  "Übung привет, мир 你好世界 ひらがな 한국어 हिन्दी",
  "12,5 don'T\tend  \n $5+3 …。foo    bar\r\n\r\n",
  "\u00a0wide\u3000spaces 😀😀 e\u0301 ١٢٣",
)


def _trained(pre_tokenizer):
  """A byte-level tokenizer trained on a few texts."""
  t = tokenizers.Tokenizer(models.BPE())
  t.pre_tokenizer = pre_tokenizer
  t.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=400, initial_alphabet=list(BYTE_CHARS), show_progress=False
  )
  t.train_from_iterator([x for x in TEXTS for _ in range(3)], trainer)
  return t


def _file(path, name, vocab, merges):
  w = gguf.GGUFWriter(path, "llama")
  w.add_tokenizer_model("gpt2")
  w.add_tokenizer_pre(name)
  w.add_token_list(sorted(vocab, key=vocab.get))
  w.add_token_types([1] * len(vocab))
  w.add_token_merges([" ".join(pair) for pair in merges])
  w.write_header_to_file()
  w.write_kv_data_to_file()
  w.write_tensors_to_file()
  w.close()


@pytest.mark.parametrize(
  ("name", "digits", "words"),
  [("gpt-2", False, None), ("exaone4", False, None), ("smollm", True, None),
   ("command-r", True, None),
   ("qwen2", False,
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
   ("qwen35", False,
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")],
)  # fmt: skip
def test_tokens_are_those_of_an_equal_vocabulary(tmp_path, name, digits, words):
  """As transformers' GPT-2, Cohere and Qwen tokenizers are put together."""
  parts = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
  if words is not None:
    words = tokenizers.Regex(words)
    parts.append(pre_tokenizers.Split(words, "isolated"))
  parts.append(
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
  )
  want = _trained(pre_tokenizers.Sequence(parts))
  model = json.loads(want.to_str())["model"]
  path = tmp_path / "t.gguf"
  _file(path, name, model["vocab"], model["merges"])
  got = rj.data.Tokenizer.load(path)
  for text in TEXTS:
    ids = got.encode(text).tolist()
    assert ids == want.encode(text, add_special_tokens=False).ids
    assert got.decode(ids) == text


# Parts of a text, with a bar between them.
PARTS = {
  "llama-bpe": (
    "Hello| | World|'s| |123|456|7| x|=|3|;\n\n| | don|'T|\tend|  \n| $"
  ),
  "qwen2": (
    "Hello| | World|'s| |1|2|3|4|5|6|7| x|=|3|;\n\n| | don|'T|\tend|  \n| $"
  ),
  "gpt-2": "Hello| | World|'s| 1234567| x|=|3|;|\n\n | don|'|T|\t|end|  \n| $",
  "smollm": (
    "Hello| | World|'s| |1|2|3|4|5|6|7| x|=|3|;|\n\n | don|'|T|\t|end|  \n| $"
  ),
  "falcon": (
    "Hello| | World|'|s| |123|456|7| x|=|3|;|\n\n | don|'|T|\t|end|  \n |$"
  ),
  "bloom": "Hello| | World's| 1234567| x=3;|\n\n | don'T|\t|end|  \n| $",
  "viking": (
    "Hello| | World's| |1|2|3|4|5|6|7| x=|3|;|\n\n | don'T|\t|end|  \n| $"
  ),
  "gpt-4o": "Hello| | World's| |123|456|7| x|=|3|;\n\n| | don'T|\tend|  \n| $",
  "tekken": (
    "Hello| | World|'s| |1|2|3|4|5|6|7| x|=|3|;\n\n| | don|'T|\tend|  \n| $"
  ),
  "tiny_aya": (
    "Hello| | World's| |1|234|567| x|=|3|;\n\n| | don'T|\tend|  \n| $"
  ),
  "deepseek-v3": (
    "Hello| | World|'s| |123|456|7| x|=|3|;\n\n| | don|'T|\tend|  \n| $"
  ),
  "deepseek-coder": (
    "Hello| | World|'|s| |1|2|3|4|5|6|7| x|=|3|;|\n|\n| | don|'|T|\tend|  |\n"
    "| $"
  ),
  "deepseek-llm": (
    "Hello| | World|'|s| |1234567| x|=|3|;|\n|\n| | don|'|T|\tend|  |\n| $"
  ),
  "chameleon": (
    "Hello|  |World|'|s| |1|2|3|4|5|6|7| x|=|3|;|\n|\n|  |don|'|T|\t|end|  |\n"
    "| |$"
  ),
}
SCRIPTS = {
  "llama-bpe": "naïve| мир| 你好| ひら| 한국| ह|िन|्द|ी",
  "qwen35": "naïve| мир| 你好| ひら| 한국| हिन्दी",
  "gpt-2": "naïve| мир| 你好| ひら| 한국| ह|ि|न|्|द|ी",
  "deepseek-v3": "naïve| мир| |你好| |ひら| 한국| हिन्दी",
  "deepseek-coder": "naïve| мир| |你好| |ひら| |한국| |ह|ि|न|्|द|ी",
  "gpt-4o": "naïve| мир| 你好| ひら| 한국| हिन्दी",
}


@pytest.mark.parametrize(("name", "parts"), [*PARTS.items(), *SCRIPTS.items()])
def test_a_text_is_split_as_the_name_says(name, parts):
  metadata = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name,
    "tokenizer.ggml.tokens": [*BYTE_CHARS, "ab"],
    "tokenizer.ggml.merges": ["a b"],
  }  # fmt: skip
  made = tokenizers.Tokenizer.from_str(
    tokenizer_files(metadata)["tokenizer.json"].decode()
  )
  text = parts.replace("|", "")
  spans = made.pre_tokenizer.pre_tokenize_str(text)
  assert "|".join(text[a:b] for _, (a, b) in spans) == parts


@pytest.mark.parametrize("name", SPLITS)
def test_every_name_keeps_every_text(name):
  parts = [
    pre_tokenizers.Split(tokenizers.Regex(x), "isolated") for x in SPLITS[name]
  ]
  text = "".join(TEXTS)
  split = pre_tokenizers.Sequence(parts).pre_tokenize_str(text)
  assert "".join(x for x, _ in split) == text and len(split) > 30


def test_a_text_begins_as_its_tokenizer_has_it():
  metadata = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": ["<s>", *BYTE_CHARS, "ab"],
    "tokenizer.ggml.token_type": [3, *[1] * 257],
    "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 0,
  }  # fmt: skip

  def adds(**more):
    more = {f"tokenizer.ggml.{key}": x for key, x in more.items()}
    files = tokenizer_files(metadata | more)
    return json.loads(files["tokenizer_config.json"])["add_bos_token"]

  assert adds()
  assert not adds(pre="qwen2")
  assert not adds(add_bos_token=False)
  assert adds(pre="qwen2", add_bos_token=True)


def test_gemma_4_has_merges_of_text(tmp_path):
  space = "\u2581"
  tokens = ["<eos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256))]
  kinds = [3, 2] + [6] * 256
  words = [space, "a", "b", f"{space}a", "ab"]
  w = gguf.GGUFWriter(tmp_path / "t.gguf", "gemma4")
  w.add_tokenizer_model("gemma4")
  w.add_token_list(tokens + words)
  w.add_token_types(kinds + [1] * len(words))
  w.add_token_merges([f"{space} a", "a b"])
  w.add_eos_token_id(0)
  w.write_header_to_file()
  w.write_kv_data_to_file()
  w.write_tensors_to_file()
  w.close()
  t = rj.data.Tokenizer.load(tmp_path / "t.gguf")
  ids = t.encode("ab ab é").tolist()
  tokens += words
  assert [tokens[i] for i in ids] == [
    "ab", f"{space}a", "b", space, "<0xC3>", "<0xA9>",
  ]  # fmt: skip
  assert t.decode(ids) == "ab ab é"
