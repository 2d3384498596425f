"""Kinds of caches as they are written in a flag."""

from __future__ import annotations

import dataclasses

import pytest

from ringjax.errors import OptionError
from ringjax.kv import kind_text
from ringjax.kv.cache_kind import KINDS, CacheConfig, LayoutConfig
from ringjax.kv.policies import KeyDiff


@dataclasses.dataclass(frozen=True, kw_only=True)
class Many(KeyDiff):
  """A policy with options of all types."""

  bits: int = 8
  part: float = 0.5
  order: str = "first"
  most: int | None = None


@pytest.fixture
def many(monkeypatch):
  monkeypatch.setitem(KINDS, "many", CacheConfig(policy=Many()))


@pytest.mark.parametrize("name", KINDS)
def test_a_name_alone(name):
  assert kind_text.parse(name) == KINDS[name]


def test_options_are_the_fields_of_the_kind(many):
  assert kind_text.parse("dense:unrotated=true") == KINDS["unrotated"]
  text = "many:bits=4,part=1,order=last,most=7,unrotated=True"
  policy = Many(bits=4, part=1.0, order="last", most=7)
  want = CacheConfig(policy=policy, layout=LayoutConfig(unrotated=True))
  assert kind_text.parse(text) == want
  assert type(kind_text.parse(text).policy.part) is float
  assert kind_text.parse("many:order='4',most=none") == CacheConfig(
    policy=Many(order="4")
  )


@pytest.mark.parametrize(
  ("text", "says"),
  [
    ("", "--cache: got ''; wanted one of dense, unrotated"),
    ("int3", ", many, or a codec + a policy of these; pass --cache"),
    ("Dense", "one of dense"),
    ("dense:", "got '' in 'dense:'; wanted options of 'dense'"),
    ("many:bit=4", "policy.bits, policy.part, policy.order"),
    ("many:bits", "'bits' in 'many:bits'"),
    ("many:bits=4,bits=8", "each once"),
    ("many:bits=four", "wanted a value of type int; write it as bits=8"),
    ("many:bits=4.0", "a value of type int"),
    ("many:bits=True", "a value of type int"),
    ("many:unrotated=1", "a value of type bool"),
    ("many:order=3", "a value of type str"),
    ("many:bits=" + "(" * 10_000, "a value of type int"),
    ("many:bits=__import__('os')", "a value of type int"),
  ],
)
def test_what_no_kind_is_written_like(many, text, says):
  with pytest.raises(OptionError) as caught:
    kind_text.parse(text, "--cache")
  assert says in str(caught.value)
  assert len(str(caught.value)) < 150 + len(", ".join(KINDS))
