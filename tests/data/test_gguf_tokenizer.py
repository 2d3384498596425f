"""Tokenizers of GGUF files: texts are split as the tokenizer's name says."""

import json
import string
import struct

import gguf
import pytest
import tokenizers
from tokenizers import (
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  trainers,
)

import ringjax as rj
from ringjax.data.gguf.gguf_file import open_gguf
from ringjax.data.gguf.gguf_splits import SPLITS
from ringjax.data.gguf.gguf_tokenizer import tokenizer_files
from ringjax.data.text.bytelevel import BYTE_CHARS
from ringjax.errors import TokenizerError

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
  "default": (
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


def test_a_number_without_a_rule_is_apart_from_its_space():
  split = pre_tokenizers.Sequence([
    pre_tokenizers.Split(tokenizers.Regex(x), "isolated")
    for x in SPLITS["default"]
  ])  # fmt: skip
  parts = [part for part, _ in split.pre_tokenize_str("at 12 `to` ١٢٣٤")]
  assert parts == ["at", " ", "12", " `", "to", "`", " ", "١٢٣٤"]


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


def _charsmap(changes):
  """SentencePiece's bytes of replacements: a double array, then texts."""
  units, texts, values = {}, b"", {}
  for old, new in changes.items():
    values[old.encode()] = len(texts)
    texts += new.encode() + b"\0"

  def place(at, label, rest):
    first = sorted({x[0] if x else 0 for x in rest})
    base = next(
      b
      for b in range(1, 4096)
      if not any((b ^ c) in units or (b ^ c) == at for c in first)
    )
    units[at] = label | (0 in first) << 8 | (at ^ base) << 10
    units.update({base ^ c: 0 for c in first})
    for c in first:
      below = {x[1:]: v for x, v in rest.items() if x and x[0] == c}
      if c == 0:
        units[base] = rest[b""] | 1 << 31
      else:
        place(base ^ c, c, below)

  place(0, 0, values)
  array = [units.get(i, 0) for i in range(max(units) + 1)]
  return struct.pack(f"<{len(array) + 1}I", 4 * len(array), *array) + texts


CHANGES = {"\t": " ", "\n": " ", "\u00a0": " ", "\ufb01": "fi", "\uff21": "A",
           "é": "e"}  # fmt: skip
UNIGRAM = (
  "Hello  World's 1234 x=3;\n\n  na\tve \ufb01ne \uff21é", "  two in front",
  "wide\u00a0space and 你 unknown 好", "<pad> is a word </s>", "",
)  # fmt: skip


@pytest.fixture(scope="module")
def unigram():
  """A unigram vocabulary of the library, and its tokens with their scores."""
  t = tokenizers.Tokenizer(models.Unigram())
  t.normalizer = normalizers.Sequence([
    *(normalizers.Replace(old, new) for old, new in CHANGES.items()),
    normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
    normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), ""),
  ])  # fmt: skip
  t.pre_tokenizer = pre_tokenizers.Metaspace()
  trainer = trainers.UnigramTrainer(
    vocab_size=120, special_tokens=["<pad>", "</s>", "<unk>"],
    unk_token="<unk>", show_progress=False,
    initial_alphabet=[*string.ascii_letters, *"</>'=;1234"],
  )  # fmt: skip
  texts = [*UNIGRAM[:2], "Hello Worlds", "1234 x=3;", "wide space and unknown"]
  t.train_from_iterator(texts * 3, trainer)
  return t, json.loads(t.to_str())["model"]["vocab"]


def _scored_file(path, vocab, kinds, charsmap=b"", unknown=2, **flags):
  w = gguf.GGUFWriter(path, "t5")
  w.add_tokenizer_model("t5")
  w.add_token_list([x for x, _ in vocab])
  w.add_token_scores([score for _, score in vocab])
  w.add_token_types(kinds)
  if charsmap:
    w.add_precompiled_charsmap(charsmap)
  for key, x in flags.items():
    w.add_bool(f"tokenizer.ggml.{key}", x)
  w.add_eos_token_id(1)
  if unknown is not None:
    w.add_unk_token_id(unknown)
  w.write_header_to_file()
  w.write_kv_data_to_file()
  w.write_tensors_to_file()
  w.close()
  return path


def test_a_unigram_vocabulary_comes_from_the_file(tmp_path, unigram):
  want, vocab = unigram
  kinds = [3, 3, 2] + [1] * (len(vocab) - 3)
  # Tokens that fill up the vocabulary are no words, and cost nothing else.
  more = [[f"[PAD{i}]", -1000.0] for i in range(3)]
  path = _scored_file(
    tmp_path / "t.gguf", vocab + more, kinds + [5] * 3, _charsmap(CHANGES),
    add_space_prefix=True, remove_extra_whitespaces=True,
  )  # fmt: skip
  got = rj.data.Tokenizer.load(path)
  assert got.eos_ids == (1,) and not got.adds_bos
  assert got.vocab_size == len(vocab) + 3
  for text in UNIGRAM:
    ids = got.encode(text).tolist()
    assert 0 not in ids and 1 not in ids
    if "<pad>" not in text:
      assert ids == want.encode(text).ids
    plain = want.normalizer.normalize_str(text)
    unknown = "".join("<unk>" if x in "你好" else x for x in plain)
    assert got.decode(ids, special=True) == unknown
  assert got.encode("</s>", special=True).tolist() == [1]


def test_spaces_of_a_unigram_vocabulary_are_as_the_file_says(tmp_path, unigram):
  _, vocab = unigram
  kinds = [3, 3, 2] + [1] * (len(vocab) - 3)
  words = [x for x, _ in vocab]

  def spelled(text, **flags):
    path = _scored_file(tmp_path / "t.gguf", vocab, kinds, **flags)
    ids = rj.data.Tokenizer.load(path).encode(text)
    return "".join(words[i] for i in ids)

  assert spelled(" a  b ") == "▁a▁b"
  assert spelled(" a  b ", add_space_prefix=False) == "a▁b"
  kept = dict(remove_extra_whitespaces=False)
  assert spelled(" a  b ", **kept) == "▁▁a▁▁b▁"
  assert spelled(" a", add_space_prefix=False, **kept) == "▁a"
  # Only spaces are removed, not other ends of lines.
  assert spelled(" a\n b") == "▁a<unk>▁b"


def test_a_unigram_vocabulary_without_its_parts_is_refused(tmp_path, unigram):
  _, vocab = unigram
  kinds = [1] * len(vocab)

  def refused(key, **more):
    path = _scored_file(tmp_path / "t.gguf", vocab, **({"kinds": kinds} | more))
    with pytest.raises(TokenizerError, match=key):
      rj.data.Tokenizer.load(path)

  refused("unknown_token_id", unknown=None)
  refused("unknown_token_id", unknown=1000)
  refused("tokenizer.json", charsmap=b"\xff\xff\0\0short")
  path = _scored_file(tmp_path / "t.gguf", vocab, kinds)
  metadata = open_gguf(path).metadata
  for key, value in (("scores", [1.0]), ("add_space_prefix", "yes"),
                     ("precompiled_charsmap", [300])):  # fmt: skip
    with pytest.raises(TokenizerError, match=key):
      tokenizer_files(metadata | {f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("old", [True, False])
def test_a_wordpiece_vocabulary_comes_from_the_file(tmp_path, lowercase, old):
  want = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
  want.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
  want.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  want.decoder = decoders.WordPiece()
  special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
  trainer = trainers.WordPieceTrainer(
    vocab_size=150, special_tokens=special, show_progress=False
  )
  want.train_from_iterator([x for x in TEXTS for _ in range(3)], trainer)
  vocab = want.get_vocab()
  words = sorted(vocab, key=vocab.get)
  # As llama.cpp's converter marks them.
  marked = [
    x if x in special else x[2:] if x.startswith("##") else f"▁{x}"
    for x in words
  ]
  w = gguf.GGUFWriter(tmp_path / "t.gguf", "bert")
  w.add_tokenizer_model("bert")
  w.add_token_list(marked)
  # Older files do not say which tokens are special.
  kinds = [1 if old else 3] * len(special)
  w.add_token_types(kinds + [1] * (len(words) - len(special)))
  w.add_unk_token_id(1)
  w.write_header_to_file()
  w.write_kv_data_to_file()
  w.write_tensors_to_file()
  w.close()
  got = rj.data.Tokenizer.load(tmp_path / "t.gguf")
  for text in (*TEXTS, "[1] (a) hello##o \u2603"):
    ids = got.encode(text).tolist()
    assert ids == want.encode(text).ids
    assert got.decode(ids) == want.decode(ids)
