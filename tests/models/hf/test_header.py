"""The header of a safetensors file: every lie is found, and in words."""

from __future__ import annotations

import json
import os
import random

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from ringjax.errors import CheckpointFormatError
from ringjax.models.hf import header
from ringjax.models.hf.safe_files import shown, strict_json

FILE = "m.safetensors"
F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def table(**changes):
  return {"a": {**F32, **changes}}


def text(value) -> bytes:
  return value if isinstance(value, bytes) else json.dumps(value).encode()


@pytest.fixture
def parse(tmp_path):
  """Reads a header, with bytes behind it, from a file in a folder."""

  def read(value, data_bytes=16):
    data = text(value)
    length = len(data).to_bytes(8, "little")
    # Some file systems wait for the disk where a file is written over.
    (tmp_path / FILE).unlink(missing_ok=True)
    (tmp_path / FILE).write_bytes(length + data + bytes(data_bytes))
    found = header.read_header(tmp_path, FILE)[1]
    for info in found.values():
      assert info.file == FILE and info.offset >= 8 + len(data)
    return {
      name: (info.dtype, info.shape, info.offset - 8 - len(data), info.nbytes)
      for name, info in found.items()
    }

  return read


def test_entries_come_in_the_order_of_their_bytes(parse):
  value = {
    "__metadata__": {"format": "pt"},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [16, 18]},
    "empty": {"dtype": "I8", "shape": [0, 3], "data_offsets": [18, 18]},
    "a": F32,
    "bits": {"dtype": "F4", "shape": [2, 3], "data_offsets": [18, 21]},
  }
  assert list(parse(value, 21).items()) == [
    ("a", (np.dtype(np.float32), (2, 2), 0, 16)),
    ("b", (header.DTYPES["BF16"], (), 16, 2)),
    ("empty", (np.dtype(np.int8), (0, 3), 18, 0)),
    ("bits", ("F4", (2, 3), 18, 3)),
  ]


def test_spaces_may_follow_the_header_but_not_lead(parse):
  assert list(parse(text(table()) + b"   ")) == ["a"]
  with pytest.raises(CheckpointFormatError, match="starts with b' '"):
    parse(b" " + text(table()))


HUGE = 1 << 62
NONE = {"dtype": "U8", "shape": [0], "data_offsets": [16, 16]}
BAD = {
  "empty": (b"", "header of 0 bytes"),
  "no object": ([1], "starts with"),
  "no json": (b"{a}", "character 1"),
  "cut": (text(table())[:-1], "character"),
  "not utf-8": (b'{"\xff": 1}', "UTF-8"),
  "utf-16": ("{}".encode("utf-16-le"), "character"),
  "second value": (text(table()) + b"{}", "Extra data"),
  "deep": (b'{"a":' + b"[" * 100_000, "deeper"),
  "deep and closed": (b'{"a":' + b"[" * 4 + b"]" * 4 + b"}", "deeper"),
  "duplicate name": (
    b'{"a": %s, "a": %s}' % (text(F32), text(F32)),
    "a twice",
  ),
  "duplicate field": (
    text(table()).replace(b'"shape"', b'"dtype": "F32", "shape"'),
    "dtype twice",
  ),
  "nan": (b'{"a": NaN}', "NaN"),
  "infinite": (b'{"a": 1e999}', "1e999"),
  "surrogate": (b'{"\\ud800": 1}', "UTF-8"),
  "long integer": (b'{"a": ' + b"9" * 5000 + b"}", "header"),
  "metadata no table": ({"__metadata__": [], **table()}, "expected a map"),
  "metadata no strings": (
    {"__metadata__": {"a": 1}, **table()},
    "expected a string",
  ),
  "entry no object": ({"a": 3}, "TensorInfo"),
  "field missing": (
    {"a": {"dtype": "F32", "shape": [2, 2]}},
    "missing field `data_offsets`",
  ),
  "field unknown": (table(more=1), "other fields"),
  "dtype unknown": (table(dtype="F31"), "F31"),
  "dtype number": (table(dtype=3), "3"),
  "shape string": (table(shape="22"), "string .22."),
  "shape nested": (table(shape=[[2], 2]), "deeper"),
  "shape negative": (table(shape=[-2, -2]), "`-2`, expected usize"),
  "shape float": (table(shape=[2.0, 2]), "`2.0`, expected usize"),
  "shape bool": (table(shape=[True, 4]), "boolean `true`"),
  "shape overflows": (table(shape=[HUGE, HUGE]), "overflow"),
  "shape overflows behind a zero": (
    {
      "a": F32,
      "b": {"dtype": "U8", "shape": [0, HUGE], "data_offsets": [16, 16]},
    },
    "elements",
  ),
  "rank": (table(shape=[2, 2] + [1] * 7), "at most 8"),
  "offsets one": (table(data_offsets=[0]), "length 1"),
  "offsets three": (table(data_offsets=[0, 8, 16]), "length 3"),
  "offsets string": (table(data_offsets="ab"), "string .ab."),
  "offsets negative": (table(data_offsets=[-16, 0]), "`-16`"),
  "offsets backwards": (table(data_offsets=[16, 0]), "invalid offset"),
  "too few bytes": (table(data_offsets=[0, 12]), "invalid shape"),
  "too many bytes": (table(data_offsets=[0, 20]), "invalid shape"),
  "half a byte": (table(dtype="F4", shape=[3], data_offsets=[0, 1]), "byte"),
  "hole in front": (table(data_offsets=[4, 20]), "offset for tensor `a`"),
  "overlap": (
    {"a": F32, "b": {**F32, "data_offsets": [8, 24]}},
    "offset for tensor `b`",
  ),
  "same bytes": ({"a": F32, "b": F32}, "invalid offset"),
  "hole between": (
    {"a": F32, "b": {**F32, "data_offsets": [17, 33]}},
    "offset for tensor `b`",
  ),
  "bytes behind": (table(shape=[1], data_offsets=[0, 4]), "each of the 16 byt"),
  "behind the end": (table(shape=[8], data_offsets=[0, 32]), "the 16 bytes"),
  "name empty": ({"": F32}, "empty tensor name"),
  "name long": ({"a" * 513: F32}, "513 characters"),
  "name with a slash": ({"a/b": F32}, "tensor name a/b"),
  "name climbs": ({"../../etc/passwd": F32}, "etc/passwd"),
  "name with dots": ({"a..b": F32}, "a..b"),
  "name with backslash": ({"a\\b": F32}, "name"),
  "name with nul": ({"a\0b": F32}, r"a\\x00b"),
  "name with newline": ({"a\nb": F32}, r"a\\nb"),
  "name turns the text around": ({"a\u202eb": F32}, r"u202e"),
  "many": (b'{"data_offsets"' * 200_001, "deeper"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_header(parse, name):
  value, words = BAD[name]
  with pytest.raises(CheckpointFormatError, match=words) as caught:
    parse(value)
  said = str(caught.value)
  assert said.startswith("m.safetensors: got ")
  assert len(said) <= 400
  assert said.isprintable()


@pytest.mark.long
def test_many_tensors_of_no_size_are_refused(parse):
  entry = b'"%d":{"dtype":"I8","shape":[0],"data_\\u006fffsets":[0,0]}'
  many = b",".join(entry % i for i in range(200_001))
  with pytest.raises(CheckpointFormatError, match="200001 tensors"):
    parse(b"{" + many + b"}", 0)


def test_the_largest_name_rank_and_depth_pass(parse):
  value = {"a" * 512: {**F32, "shape": [2, 2] + [1] * 6}}
  assert len(parse(value)) == 1
  assert strict_json(b"[[1]]", max_depth=2) == [[1]]
  with pytest.raises(ValueError, match="deeper than 1"):
    strict_json(b"[[1]]", max_depth=1)


def test_brackets_in_strings_are_not_depth():
  nasty = ["[" * 50, '\\"[[[[', "\\", '"', "\\\\[["]
  value = {key: key for key in nasty}
  assert strict_json(text(value), max_depth=1) == value


@pytest.mark.parametrize("end", [b"", b"\\", b'\\"', b'"[[', b'"x'])
def test_strings_without_an_end_cost_no_time(end):
  # Quadratic, this would take days.
  with pytest.raises(ValueError, match="Unterminated|Invalid|Extra|deeper"):
    strict_json(b'"' + b'\\"' * (1 << 20) + end, max_depth=1)


@pytest.mark.parametrize(
  ("first8", "file_bytes", "words"),
  [
    (b"", 0, "0 bytes"),
    (b"\x02\0\0", 3, "3 bytes"),
    ((0).to_bytes(8, "little"), 100, "header of 0 bytes"),
    ((1).to_bytes(8, "little"), 100, "header of 1 bytes"),
    ((93).to_bytes(8, "little"), 100, "header of 93 bytes in a file of 100"),
    (((16 << 20) + 1).to_bytes(8, "little"), 1 << 30, "at most 16777216"),
    ((2**63).to_bytes(8, "little"), 100, str(2**63)),
    ((2**64 - 1).to_bytes(8, "little"), 100, str(2**64 - 1)),
    (b"\x80\x02}q\0X\x04\0", 100, "is a safetensors file"),
  ],
)
def test_bad_length(tmp_path, first8, file_bytes, words):
  (tmp_path / FILE).write_bytes(first8)
  # Without blocks on the disk.
  os.truncate(tmp_path / FILE, file_bytes)
  with pytest.raises(CheckpointFormatError, match=words) as caught:
    header.read_header(tmp_path, FILE)
  assert len(str(caught.value)) <= 400


@pytest.mark.parametrize(
  ("name", "want"),
  [
    ("model.layers.0.weight", "model.layers.0.weight"),
    ("a\nb", r"'a\nb'"),
    ("é", r"'\xe9'"),
    (3, "3"),
  ],
)
def test_shown(name, want):
  assert shown(name) == want


@pytest.mark.parametrize("limit", [24, 25, 72])
def test_shown_is_short(limit):
  for length in range(limit - 2, limit + 40):
    words = shown("".join(chr(97 + i % 26) for i in range(length)), limit)
    assert len(words) <= limit
    assert ("..." in words) == (length > limit)


# ---------------------------------------------------------------------------
# Fuzz
# ---------------------------------------------------------------------------

SEEDS = [
  text(table()),
  text(
    {
      "__metadata__": {"format": "pt"},
      "model.a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
      "b": {"dtype": "U8", "shape": [4], "data_offsets": [12, 16]},
    }
  ),
  text(
    {
      "s": {"dtype": "F64", "shape": [], "data_offsets": [0, 8]},
      "t": {"dtype": "BOOL", "shape": [1, 8, 1], "data_offsets": [8, 16]},
      "z": {"dtype": "F16", "shape": [0], "data_offsets": [16, 16]},
    }
  ),
]
ATOMS = [
  *(b"0", b"1", b"-1", b"16", b"17", b"1e3", b"1e999", b"18446744073709551616"),
  *(b"null", b"true", b"NaN", b'""', b'"a"', b'"F32"', b'"BF16"', b'"U8"'),
  *(b'"shape"', b'"dtype"', b'"data_offsets"', b'"__metadata__"'),
  *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u", b"\\ud800", b" "),
  *(b"\0", b"\xff", b"[0,0]", b"[0,16]", b"[2,2]", b'"../x"', b"{}", b"[]"),
]


def mutated(rng: random.Random) -> bytes:
  data = bytearray(rng.choice(SEEDS))
  for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
    i = rng.randrange(len(data) + 1)
    j = min(len(data), i + rng.choice((0, 0, 1, 1, 2, 5, 20)))
    kind = rng.randrange(4)
    if kind == 0:
      data[i:j] = rng.choice(ATOMS)
    elif kind == 1:
      data[i:j] = bytes(rng.randrange(256) for _ in range(j - i))
    elif kind == 2:
      k = rng.randrange(len(data) + 1)
      data[k:k] = data[i:j]
    elif digits := [n for n, c in enumerate(data) if 48 <= c < 58]:
      data[rng.choice(digits)] = rng.randrange(48, 58)
  return bytes(data)


def fuzz(parse, seed: int, rounds: int) -> int:
  """Rounds that passed; all others are refused, and nothing else happens."""
  rng, passed = random.Random(seed), 0
  for _ in range(rounds):
    data = mutated(rng)
    try:
      found = parse(data)
    except CheckpointFormatError as error:
      assert len(str(error)) <= 400 and str(error).isprintable(), data
      continue
    passed += 1
    # Every byte once, in order.
    end = 0
    for _, _, begin, nbytes in found.values():
      assert begin == end, data
      end += nbytes
    assert end == 16, data
    # As the format's own reader of a whole file in memory has it.
    whole = len(data).to_bytes(8, "little") + data + bytes(16)
    theirs = dict(safetensors.deserialize(whole))
    assert theirs.keys() == found.keys(), data
    for name, (dtype, shape, _, nbytes) in found.items():
      said = theirs[name]["dtype"]
      assert header.READ_DTYPES.get(said, said) == dtype, data
      assert tuple(theirs[name]["shape"]) == shape, data
      assert len(theirs[name]["data"]) == nbytes, data
  return passed


@pytest.mark.long
def test_fuzz(parse):
  assert fuzz(parse, seed=0, rounds=20_000) > 500


@pytest.mark.slow
def test_fuzz_long(parse):
  assert fuzz(parse, seed=1, rounds=1_000_000) > 25_000


@pytest.mark.parametrize("name", header.DTYPES)
def test_dtypes_are_those_of_the_format(name, tmp_path):
  """The library calls each NumPy dtype by the name of the table."""
  x = np.zeros((2, 3), header.DTYPES[name])
  save_file({"a": x}, tmp_path / FILE)
  with safetensors.safe_open(tmp_path / FILE, framework="numpy") as file:
    assert file.get_slice("a").get_dtype() == name
