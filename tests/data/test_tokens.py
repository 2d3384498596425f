"""Tokenizers: as the library's, and never a special token from text."""

from __future__ import annotations

import json
import pathlib
import random
import string
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ringjax.data import Bytes, Stream, Tokenizer, punctuation_ids
from ringjax.data.text import tokenizer as tokenizer_module
from ringjax.errors import InputTypeError, PromptError, TokenizerError
from tests.data import made

TEXTS = [
  "",
  " ",
  "\n",
  "Hello world",
  "  two  spaces  ",
  "def f(x):\n  return x\n\n\n# tail",
  "Grüße aus München, 東京の天気、😀👍🏽 é",
  "tabs\t\tand\r\nlines\r\n",
  "a\x00b\x7f",
  "12345 67,890.5",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  base = tmp_path_factory.mktemp("tokenizers")
  return {kind: made.folder(kind, base / kind) for kind in made.KINDS}


@pytest.fixture(scope="module")
def loaded(folders):
  return {kind: Tokenizer.load(path) for kind, path in folders.items()} | {
    "bytes": Bytes()
  }


@pytest.fixture(scope="module")
def plain(folders):
  """The library's own, reading special tokens in texts as it does."""
  return {
    kind: tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    for kind, path in folders.items()
  }


ALL = [*made.KINDS, "bytes"]


# ---------------------------------------------------------------------------
# Ids and texts
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", made.KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts_are_the_librarys(loaded, plain, kind, text):
  ids = loaded[kind].encode(text)
  assert ids.dtype == np.int32 and ids.ndim == 1
  assert ids.tolist() == plain[kind].encode(text, add_special_tokens=False).ids
  assert loaded[kind].decode(ids) == plain[kind].decode(ids.tolist())
  assert loaded[kind].decode(ids, special=True) == plain[kind].decode(
    ids.tolist(), skip_special_tokens=False
  )


@pytest.mark.parametrize("kind", ["llama3", "qwen", "gemma", "llama2", "bytes"])
@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back(loaded, kind, text):
  assert loaded[kind].decode(loaded[kind].encode(text)) == text


@pytest.mark.parametrize("kind", made.KINDS)
def test_special_texts_are_tokens_where_asked_for(loaded, plain, kind):
  special = made.SPECIAL[kind]
  text = f"{special[-1]} one {special[-2]}two  {special[-1]}"
  ids = loaded[kind].encode(text, special=True)
  assert ids.tolist() == plain[kind].encode(text, add_special_tokens=False).ids
  assert loaded[kind].specials.ids >= set(ids[[0, -1]].tolist())


def test_a_token_that_strips_takes_the_space_along(loaded, plain):
  text = "<|user|>\n  Hi <|end|>\n\n<|assistant|>\n"
  ids = loaded["phi3"].encode(text, special=True).tolist()
  assert ids == plain["phi3"].encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", made.KINDS)
def test_bos_is_what_the_library_adds(loaded, plain, kind):
  tokenizer = loaded[kind]
  assert tokenizer.adds_bos == (kind in made.BOS)
  if tokenizer.adds_bos:
    want = plain[kind].encode("Hello", add_special_tokens=True).ids
    assert tokenizer.encode("Hello", bos=True).tolist() == want
  else:
    with pytest.raises(TokenizerError, match=r"bos=tokenizer\.adds_bos"):
      tokenizer.encode("Hello", bos=True)


def test_attributes(loaded):
  tokenizer = loaded["llama3"]
  vocab = tokenizer._engine.get_vocab()
  assert tokenizer.name == "llama3"
  assert tokenizer.bos_id == vocab["<|begin_of_text|>"]
  assert tokenizer.eos_ids == (vocab["<|eot_id|>"],)
  # The token by which texts go on is nobody's.
  assert tokenizer.vocab_size == tokenizer._mark_id
  assert tokenizer.special_names["bos_token"] == "<|begin_of_text|>"


def test_ids_without_a_token(loaded):
  for tokenizer in loaded.values():
    far = [tokenizer.vocab_size + 5, 2**31 - 1]
    assert tokenizer.decode(far) == "\ufffd\ufffd"
    stream = Stream(tokenizer)
    assert stream.feed(far) + stream.flush() == "\ufffd\ufffd"


@pytest.mark.parametrize("ids", [[-1], [3, 2**31], np.int64(2**40)])
def test_what_is_no_id(unchecked, loaded, ids):
  for tokenizer in loaded.values():
    with pytest.raises(PromptError, match="ids from 0 to 2147483647"):
      tokenizer.decode(ids)
    with pytest.raises(PromptError, match="position"):
      Stream(tokenizer).feed(ids)


@pytest.mark.parametrize("ids", ["abc", [1.5], [[1], [2]], [None]])
def test_what_is_no_row_of_ids(unchecked, loaded, ids):
  with pytest.raises(InputTypeError, match="one id or a row of ids"):
    loaded["bytes"].decode(ids)


def test_what_is_no_text(loaded, unchecked):
  for tokenizer in loaded.values():
    with pytest.raises(PromptError, match=r"lone surrogate .* character 2"):
      tokenizer.encode("ab\ud800c")
    with pytest.raises(InputTypeError, match="decode bytes first"):
      tokenizer.encode(b"abc")


# ---------------------------------------------------------------------------
# No text makes a special token
# ---------------------------------------------------------------------------


def attacks(special: list[str], count: int) -> list[str]:
  """Texts of special tokens, their parts, and words between them."""
  rng = random.Random(0)
  cut = [t[: rng.randrange(1, len(t))] for t in special]
  rest = [t[len(c) :] for t, c in zip(special, cut, strict=True)]
  glue = ["", " ", "\n", "user", "é", "😀", "▁", "Ġ", "##", "\ufffd", "a" * 50]
  some = [*special * 3, *cut, *rest, *glue]
  return [
    "".join(rng.choices(some, k=rng.randrange(1, 8))) for _ in range(count)
  ]


@pytest.mark.one_case
@pytest.mark.long_cases(10)
@pytest.mark.parametrize("kind", ALL)
def test_no_text_makes_a_special_token(loaded, kind):
  tokenizer = loaded[kind]
  special = sorted(tokenizer.specials.by_text)
  unknown = {
    t.id for s, t in tokenizer.specials.by_text.items() if "unk" in s.lower()
  }
  steering = tokenizer.specials.ids - unknown
  for text in attacks(special, 1000):
    ids = tokenizer.encode(text).tolist()
    assert not steering.intersection(ids), text
    assert max(ids, default=0) < tokenizer.vocab_size
    if kind in ("llama3", "qwen", "bytes"):
      assert tokenizer.decode(ids) == text
    if kind in ("llama2", "gemma"):
      # To them these two are one.
      assert tokenizer.decode(ids) == text.replace("▁", " ")


def test_a_vocabulary_that_spells_a_special_token(loaded, plain):
  # The library alone is not enough: this vocabulary has merges to <s>.
  library = plain["llama2"]
  library.encode_special_tokens = True
  special = loaded["llama2"].bos_id
  assert special in library.encode("so <s> said", add_special_tokens=False).ids
  ids = loaded["llama2"].encode("so <s> said")
  assert special not in ids
  assert loaded["llama2"].decode(ids) == "so <s> said"
  library.encode_special_tokens = False


def test_a_word_that_only_a_special_token_spells(tmp_path):
  engine = tokenizers.Tokenizer(
    tokenizers.models.WordLevel({"stop": 0, "go": 1, "?": 2}, unk_token="?")
  )
  engine.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  engine.add_special_tokens(["stop"])
  engine.save(str(tmp_path / "tokenizer.json"))
  tokenizer = Tokenizer.load(tmp_path)
  assert tokenizer.encode("go on").tolist() == [1, 2]
  with pytest.raises(PromptError, match="special token 0"):
    tokenizer.encode("go stop")


def test_what_only_the_side_files_call_special(tmp_path):
  path = made.folder("qwen", tmp_path, additional_special_tokens=["<think>"])
  tokenizer = Tokenizer.load(path)
  thought = tokenizer.encode("<think>", special=True).tolist()
  assert len(thought) == 1
  assert tokenizer.is_special(thought[0])
  assert thought[0] not in tokenizer.encode("a <think> b")
  assert "<think>" not in tokenizer.added


@pytest.mark.long
def test_ids_with_gaps(tmp_path):
  engine = tokenizers.Tokenizer(
    tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
  )
  engine.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  source = json.loads(engine.to_str())

  def saved(gap):
    # By hand: the library counts through all ids up to the largest.
    source["model"]["vocab"]["b"] = gap
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))

  saved(9)
  tokenizer = Tokenizer.load(tmp_path)
  assert tokenizer.vocab_size == 10
  assert tokenizer.encode("a b c").tolist() == [0, 9, 2]
  assert tokenizer.encode_parts([2, "a b"]).tolist() == [2, 0, 9]
  assert tokenizer.decode([0, 3, 9]) == "a\ufffdb"
  saved(5000)
  with pytest.raises(TokenizerError, match="over 1000 gaps"):
    Tokenizer.load(tmp_path)
  saved(2**32 - 2)
  with pytest.raises(TokenizerError, match="an id of 4294967294"):
    Tokenizer.load(tmp_path)


# ---------------------------------------------------------------------------
# Long texts
# ---------------------------------------------------------------------------


def long_texts() -> dict[str, str]:
  rng = random.Random(1)
  source = pathlib.Path(string.__file__).read_text()
  prose = " ".join(rng.choices(source.split(), k=4000))
  noise = "".join(
    chr(rng.choice([32, 10, *range(33, 1000)])) for _ in range(20_000)
  )
  return {
    "code": source,
    "prose": prose,
    "spaces": " " * 20_000 + "x",
    "lines": "\n" * 10_000 + "a\n\n\nb" * 2_000,
    "noise": noise,
    "one word": "ab" * 10_000,
  }


@pytest.mark.one_case
@pytest.mark.long_cases(60)
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("what", list(long_texts()))
def test_pieces_are_the_whole(loaded, kind, what, monkeypatch):
  text, tokenizer = long_texts()[what], loaded[kind]
  whole = tokenizer.encode(text).tolist()
  seen = []
  monkeypatch.setattr(tokenizer_module, "_PIECE", 1000)
  pieces = tokenizer.encode(text, progress=lambda *at: seen.append(at))
  assert pieces.tolist() == whole
  assert seen[-1] == (len(text), len(text)) and seen == sorted(seen)
  if kind in ("llama3", "gemma") and what in ("code", "prose"):
    assert len(list(tokenizer._cuts(text))) > 5


@pytest.mark.parametrize("kind", made.KINDS)
def test_parts_go_on_in_pieces(loaded, kind, monkeypatch):
  text = pathlib.Path(string.__file__).read_text()
  tokenizer, one = loaded[kind], min(loaded[kind].specials.ids)
  whole = tokenizer.encode_parts([one, text, one]).tolist()
  monkeypatch.setattr(tokenizer_module, "_PIECE", 1000)
  assert tokenizer.encode_parts([one, text, one]).tolist() == whole


def test_a_word_without_end(loaded, monkeypatch):
  monkeypatch.setattr(tokenizer_module, "_PIECE", 100)
  monkeypatch.setattr(tokenizer_module, "_LONGEST_PIECE", 1000)
  with pytest.raises(PromptError, match="without a place to cut"):
    loaded["gemma"].encode("ab" * 2000)


def test_what_is_too_long_is_not_all_encoded(loaded, monkeypatch):
  monkeypatch.setattr(tokenizer_module, "_PIECE", 64)
  monkeypatch.setattr(tokenizer_module, "_LOOK", 16)
  text = "some words and more of them\n" * 1000
  for kind in made.KINDS:
    tokenizer, chars = loaded[kind], []
    whole = tokenizer.encode(text)
    seen = lambda done, total, chars=chars: chars.append(done)
    some = tokenizer.encode(text, enough=100, progress=seen)
    assert 100 < some.size < whole.size and max(chars) < len(text)
    np.testing.assert_array_equal(some, whole[: some.size])
    parts = [text[:60], 0, text]
    assert 100 < tokenizer.encode_parts(parts, enough=100).size < whole.size
    for enough in (whole.size, None):
      np.testing.assert_array_equal(
        tokenizer.encode(text, enough=enough), whole
      )
  assert Bytes().encode("abc", bos=True, enough=1).size > 1


def test_progress_can_end_it(loaded, monkeypatch):
  monkeypatch.setattr(tokenizer_module, "_PIECE", 100)

  def stop(done, total):
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    loaded["llama3"].encode("a line of text\n" * 1000, progress=stop)


# ---------------------------------------------------------------------------
# Streams
# ---------------------------------------------------------------------------


def fed(tokenizer, ids, rng) -> str:
  stream, text, at = Stream(tokenizer), "", 0
  while at < len(ids):
    size = rng.randrange(1, 4)
    text += stream.feed(ids[at : at + size])
    at += size
  return text + stream.flush()


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=60)
@given(text=st.text(max_size=60), seed=st.integers(0, 1000))
def test_pieces_of_a_stream_are_the_text(loaded, kind, text, seed):
  tokenizer = loaded[kind]
  ids = tokenizer.encode(text).tolist()
  assert fed(tokenizer, ids, random.Random(seed)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ALL)
def test_streams_of_any_ids(loaded, kind):
  tokenizer, rng = loaded[kind], random.Random(2)
  for _ in range(300):
    ids = rng.choices(range(tokenizer.vocab_size + 3), k=rng.randrange(30))
    assert fed(tokenizer, ids, rng) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["llama3", "llama2", "gemma", "bytes"])
def test_characters_come_when_they_are_whole(loaded, kind):
  tokenizer = loaded[kind]
  stream = Stream(tokenizer)
  pieces = [stream.feed(i) for i in tokenizer.encode("a😀é").tolist()]
  assert "".join(pieces) == "a😀é"
  assert "\ufffd" not in "".join(pieces)
  assert stream.flush() == ""
  assert stream.feed(tokenizer.encode(" b")) == " b"


def test_an_unfinished_character_is_shown_at_the_end():
  stream = Stream(Bytes())
  assert stream.feed([0xF0, 0x9F]) == ""
  assert stream.flush() == "\ufffd"
  assert stream.feed([0xFF, 65]) == "\ufffdA"


def test_special_tokens_in_a_stream(loaded):
  tokenizer = loaded["llama3"]
  ids = [tokenizer.bos_id, *tokenizer.encode("hi"), *tokenizer.eos_ids]
  assert Stream(tokenizer).feed(ids) == "hi"
  shown = Stream(tokenizer, special=True).feed(ids)
  assert shown == "<|begin_of_text|>hi<|eot_id|>"


# ---------------------------------------------------------------------------
# Bytes
# ---------------------------------------------------------------------------


def test_bytes_as_others_read_them(tmp_path):
  own = Bytes()
  own.save(tmp_path)
  library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  read = Tokenizer.load(tmp_path, untrusted=True)
  for text in [*TEXTS, "<|user|> & <|end|>"]:
    ids = own.encode(text).tolist()
    assert ids == list(text.encode())
    assert read.encode(text).tolist() == ids
    known = own.encode(text, special=True, bos=True).tolist()
    assert library.encode(text).ids == known
    assert read.encode(text, special=True, bos=True).tolist() == known
    assert library.decode(known) == own.decode(known) == read.decode(known)
  names = ("vocab_size", "bos_id", "eos_ids", "pad_id", "special_names")
  for name in (*names, "adds_bos", "chat_template"):
    assert getattr(read, name) == getattr(own, name), name


def test_bytes_without_their_tokens():
  with pytest.raises(TokenizerError, match="at least 3 different texts"):
    Bytes(["<|a|>", "<|a|>", "<|b|>"])


# ---------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------


def test_eos_ids_of_all_files(tmp_path):
  path = made.folder("llama3", tmp_path)
  own = Tokenizer.load(path).eos_ids
  (path / "config.json").write_text('{"eos_token_id": 3}')
  assert Tokenizer.load(path).eos_ids == (3, *own)
  (path / "generation_config.json").write_text('{"eos_token_id": [1, 2, 1]}')
  assert Tokenizer.load(path).eos_ids == (1, 2, *own)


@pytest.mark.parametrize(
  "said",
  [
    {"eos_token": "</nowhere>"},
    {"bos_token": 5},
    {"additional_special_tokens": 5},
    {"chat_template": 5},
    {"added_tokens_decoder": [1]},
    {"added_tokens_decoder": {"x": {"content": "a"}}},
    {"added_tokens_decoder": {"9999": {"content": "<|im_end|>"}}},
  ],
)
def test_side_files_that_are_wrong(tmp_path, said):
  path = made.folder("qwen", tmp_path, **said)
  with pytest.raises(TokenizerError, match=r"^tokenizer_config\.json: got"):
    Tokenizer.load(path)


@pytest.mark.parametrize("ids", ['"a"', "[1.5]", "-1", "[[1]]", "true", "1e3"])
def test_eos_ids_that_are_none(tmp_path, ids):
  path = made.folder("qwen", tmp_path)
  (path / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
  with pytest.raises(TokenizerError, match="an id or a list of ids"):
    Tokenizer.load(path)


@pytest.mark.parametrize("data", [b"[1]", b"{", b"\xff\xff", b"[" * 100_000])
def test_side_files_that_are_no_table(tmp_path, data):
  path = made.folder("qwen", tmp_path)
  (path / "tokenizer_config.json").write_bytes(data)
  with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
    Tokenizer.load(path)


def test_folders_without_a_tokenizer(tmp_path):
  with pytest.raises(TokenizerError, match="the folder that holds"):
    Tokenizer.load(tmp_path)
  (tmp_path / "tokenizer.model").touch()
  with pytest.raises(TokenizerError, match="AutoTokenizer"):
    Tokenizer.load(tmp_path)
  (tmp_path / "tokenizer.json").mkdir()
  with pytest.raises(TokenizerError):
    Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_that_link_out_of_the_folder(name, tmp_path):
  path = made.folder("qwen", tmp_path / "model")
  (path / name).rename(tmp_path / name)
  (path / name).symlink_to(tmp_path / name)
  with pytest.raises(TokenizerError, match=f"{name}: got a link out of the"):
    Tokenizer.load(path)


def test_the_links_of_the_hubs_cache_are_followed(tmp_path):
  path = made.folder("qwen", tmp_path / "snapshots" / "0123abc")
  ids = Tokenizer.load(path).encode("two words").tolist()
  (tmp_path / "blobs").mkdir()
  for number, file in enumerate(sorted(path.iterdir())):
    file.rename(tmp_path / "blobs" / str(number))
    file.symlink_to(tmp_path / "blobs" / str(number))
  assert Tokenizer.load(path).encode("two words").tolist() == ids


def test_a_file_that_is_too_large(tmp_path, monkeypatch):
  path = made.folder("qwen", tmp_path)
  monkeypatch.setattr(tokenizer_module, "TOKENIZER_BYTES", 1000)
  with pytest.raises(TokenizerError, match="over 0 MB"):
    Tokenizer.load(path)


def test_templates_of_all_ages(tmp_path):
  path = made.folder("qwen", tmp_path)
  assert Tokenizer.load(path).chat_template is None
  (path / "chat_template.json").write_text('{"chat_template": "a"}')
  assert Tokenizer.load(path).chat_template == "a"
  listed = [
    {"name": "tools", "template": "x"},
    {"name": "default", "template": "b"},
  ]
  made.folder("qwen", tmp_path, chat_template=listed)
  assert Tokenizer.load(path).chat_template == "b"
  (path / "chat_template.jinja").write_text("c")
  assert Tokenizer.load(path).chat_template == "c"


def test_a_text_is_neither_cut_nor_filled_nor_dropped(tmp_path):
  path = made.folder("qwen", tmp_path)
  file = path / "tokenizer.json"
  want = Tokenizer.load(path).encode("a longer text than four")
  said = json.loads(file.read_text())
  said["model"]["dropout"] = 0.9
  said["truncation"] = {
    "direction": "Right",
    "max_length": 4,
    "strategy": "LongestFirst",
    "stride": 0,
  }
  said["padding"] = {
    "strategy": {"Fixed": 100},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "x",
  }
  file.write_text(json.dumps(said))
  assert Tokenizer.load(path).encode("a longer text than four").tolist() == (
    want.tolist()
  )


# ---------------------------------------------------------------------------
# Hostile files
# ---------------------------------------------------------------------------


def hostile() -> dict[str, dict]:
  """Parts that replace those of a sound file."""
  bomb = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10**6}
  twice = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}
  return {
    "null charsmap": {
      "normalizer": {"type": "Precompiled", "precompiled_charsmap": None}
    },
    "wrong charsmap": {
      "normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    },
    "replace bomb": {"normalizer": bomb},
    "replace chain": {
      "normalizer": {"type": "Sequence", "normalizers": [twice] * 10}
    },
    "decoder bomb": {"decoder": bomb},
    "prepend bomb": {"normalizer": {"type": "Prepend", "prepend": "a" * 10**5}},
    "no model": {"model": None},
    "no vocabulary": {"model": {"type": "BPE", "vocab": {}, "merges": []}},
    "merges of nothing": {
      "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}
    },
    "wrong version": {"version": "9.9"},
    "wrong regex": {
      "pre_tokenizer": {
        "type": "Split",
        "pattern": {"Regex": "("},
        "behavior": "Isolated",
        "invert": False,
      }
    },
    "huge id": {"model": {"type": "BPE", "vocab": {"a": 2**40}, "merges": []}},
    "negative id": {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
    "unknown part": {"decoder": {"type": "Evil"}},
    "deep": {"normalizer": json.loads("[" * 500 + "]" * 500)},
  }


@pytest.mark.one_case
@pytest.mark.long_cases(30)
@pytest.mark.parametrize("what", list(hostile()))
@pytest.mark.parametrize("untrusted", [False, True])
def test_hostile_files(tmp_path, what, untrusted, monkeypatch):
  # Who takes all of it takes less of ours.
  monkeypatch.setattr(tokenizer_module, "_CPU_S", 5)
  Bytes().save(tmp_path)
  file = tmp_path / "tokenizer.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | hostile()[what]))
  with pytest.raises(TokenizerError) as caught:
    Tokenizer.load(tmp_path, untrusted=untrusted)
  assert len(str(caught.value)) <= 400


def test_a_file_that_fails_on_some_texts(tmp_path):
  Bytes().save(tmp_path)
  file = tmp_path / "tokenizer.json"
  said = json.loads(file.read_text())
  said["pre_tokenizer"] = {
    "type": "Split",
    "pattern": {"Regex": r"(x+x+)+y(?=z)|(?:(?:x?){60}){60}q"},
    "behavior": "Isolated",
    "invert": False,
  }
  file.write_text(json.dumps(said))
  tokenizer = Tokenizer.load(tmp_path)
  with pytest.raises(TokenizerError, match=r"^text: got"):
    tokenizer.encode("x" * 5000)


def test_an_interrupt_is_no_fault_of_the_file():
  def interrupted():
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    tokenizer_module._guard("text", interrupted)

  panic = type("PanicException", (BaseException,), {})

  def panics():
    raise panic("at the\ndisco")

  with pytest.raises(TokenizerError, match="text: got at the;"):
    tokenizer_module._guard("text", panics)


# Reads files from a folder, one after the other, in a process with limits; a
# line for each: what came of it.
MUTANTS = """
import pathlib, random, resource, shutil, sys
sys.path.insert(0, {root!r})
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
import ringjax.data
from ringjax.errors import RingjaxError
source = pathlib.Path({folder!r})
sound = (source / "tokenizer.json").read_bytes()
words = [b'"type"', b"null", b"-1", b"1e99", b"[]", b"{{}}", b'""', b"true",
         b"4294967296", b'"Replace"', b'"\\\\ud800"', b"\\xff", b"Sequence"]
text = "The quick brown fox\\n\\n\\u00e9\\u4e2d <s> " + "a" * 200
for seed in range({first}, {last}):
  rng = random.Random(seed)
  data = bytearray(sound)
  # The vocabulary is most of a file; other places matter more.
  edges = [0, len(data)] + [data.find(w) for w in (b'"normalizer"', b'"model"',
    b'"merges"', b'"decoder"', b'"added_tokens"', b'"pre_tokenizer"')]
  for _ in range(rng.randrange(1, 6)):
    near = rng.choice(edges)
    at = min(len(data), max(0, near + rng.randrange(-200, 600)))
    kind = rng.randrange(4)
    if kind == 0:
      data[at : at + 1] = bytes([rng.randrange(256)])
    elif kind == 1:
      del data[at : at + rng.randrange(1, 30)]
    elif kind == 2:
      data[at:at] = rng.choice(words)
    else:
      there = rng.randrange(len(data) + 1)
      data[at:at] = data[there : there + rng.randrange(1, 100)]
  (source / "tokenizer.json").write_bytes(data)
  try:
    t = ringjax.data.Tokenizer.load(source)
    ids = t.encode(text)
    stream = ringjax.data.Stream(t)
    assert stream.feed(ids) + stream.flush() == t.decode(ids), "stream"
    said = "ok"
  except RingjaxError as error:
    said = type(error).__name__
    assert len(str(error)) <= 400
  except BaseException as error:
    said = f"FAULT {{type(error).__name__}}: {{error}}"[:200]
  print(seed, said, flush=True)
"""


def mutants(kind: str, path: pathlib.Path, first: int, last: int) -> list[str]:
  made.folder(kind, path)
  root = str(pathlib.Path(__file__).resolve().parents[2])
  script = MUTANTS.format(root=root, folder=str(path), first=first, last=last)
  done = subprocess.run(
    [sys.executable, "-c", script],
    capture_output=True,
    text=True,
    check=False,
    errors="replace",
  )
  lines = done.stdout.splitlines()
  faults = [line for line in lines if "FAULT" in line]
  assert not faults, "\n".join(faults)
  assert done.returncode == 0 and len(lines) == last - first, (
    f"ended at {lines[-1:]} with {done.returncode}: {done.stderr[-500:]}"
  )
  return [line.split()[1] for line in lines]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen", "llama2"])
def test_mutants(kind, tmp_path):
  said = mutants(kind, tmp_path, 0, 50)
  assert {"ok", "TokenizerError"} <= set(said)


@pytest.mark.slow
@pytest.mark.parametrize("kind", made.KINDS)
@pytest.mark.parametrize("part", range(5))
def test_many_mutants(kind, part, tmp_path):
  mutants(kind, tmp_path, 1000 + 125 * part, 1125 + 125 * part)


def test_which_tokens_are_punctuation(loaded):
  """Nothing else in them, spaces aside; bytes by their ASCII."""
  found = {kind: punctuation_ids(one) for kind, one in loaded.items()}
  text = bytes(found["bytes"]).decode("ascii")
  assert text == "!\"#%&'()*,-./:;?@[\\]_{}"
  for kind, one in loaded.items():
    ids = set(found[kind])
    assert not ids & set(one.specials.ids)
    for n in range(one.vocab_size):
      inside = one.window([n]).strip()
      if inside in {".", ",", "?", "..."} and not one.is_special(n):
        assert n in ids, (kind, n)
      if any(c.isalnum() or c in "+<$" for c in inside):
        assert n not in ids, (kind, n)
    dot = [int(n) for n in one.encode("a.") if one.window([int(n)]) == "."]
    assert dot and set(dot) <= ids


def test_a_copied_stream_shares_nothing_that_is_pending():
  first = Stream(Bytes())
  head, tail, other = *"é".encode(), "è".encode()[1]
  assert first.feed(head) == ""
  second = first.copy()
  assert (first.feed(tail), second.feed(other)) == ("é", "è")
  # Ids that are no whole text yet, of tokenizers without bytes.
  first._pending.append(1)
  third = first.copy()
  third._pending.append(2)
  assert (first._pending, third._pending) == ([1], [1, 2])
