"""The errors: caught as ringjax's and as the builtin, short, complete."""

from __future__ import annotations

import inspect

import pytest

from ringjax import errors

pytestmark = pytest.mark.smoke

LIMIT = 400
BUILTINS = {
  "ShapeError": ValueError,
  "DtypeError": TypeError,
  "InputTypeError": TypeError,
  "MeshError": ValueError,
  "PeerError": RuntimeError,
  "OptionError": ValueError,
  "ConfigError": ValueError,
  "CheckpointFormatError": ValueError,
  "CheckpointMismatchError": ValueError,
  "CheckpointWriteError": OSError,
  "CheckpointCorruptError": ValueError,
  "StorageError": OSError,
  "UnsafeFormatError": ValueError,
  "TokenizerError": ValueError,
  "TemplateError": ValueError,
  "PromptError": ValueError,
  "DataError": ValueError,
  "SamplingError": ValueError,
  "MemoryEstimateError": MemoryError,
  "OutOfMemoryError": MemoryError,
  "CollectiveTimeoutError": TimeoutError,
  "NotFiniteError": ArithmeticError,
  "NotFiniteLogitsError": ArithmeticError,
  "ReplayError": ArithmeticError,
  "RewardError": ValueError,
  "Declined": NotImplementedError,
}


def test_every_error_is_listed_here():
  found = {
    name
    for name, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.RingjaxError)
  }
  assert found == {"RingjaxError", *BUILTINS}


@pytest.mark.parametrize("name", BUILTINS)
def test_caught_as_ours_and_as_the_builtin(name):
  cls = getattr(errors, name)
  for base in (errors.RingjaxError, BUILTINS[name]):
    with pytest.raises(base, match="what came"):
      raise cls("what came")


def test_ringjax_error_is_no_builtin_kind_itself():
  # A bare RingjaxError must not be caught by `except ValueError`.
  assert errors.RingjaxError.__bases__ == (Exception,)


def test_message_says_what_came_what_was_wanted_and_what_to_change():
  text = errors.message("query", (2, 3), "rank 4", "add a batch axis")
  assert text == "query: got (2, 3); wanted rank 4; add a batch axis."


@pytest.mark.parametrize("length", [0, 1, 119, 120, 121, 500, 100_000])
def test_a_long_value_is_cut_but_not_the_remedy(length):
  text = errors.message("mask", "x" * length, "a Mask", "pass Causal()")
  assert len(text) <= LIMIT
  assert text.startswith("mask: got ")
  assert text.endswith("; wanted a Mask; pass Causal().")
  shown = text.removeprefix("mask: got ").partition(";")[0]
  if length <= 120:
    assert shown == "x" * length
  else:
    assert shown == "x" * 117 + "..."


@pytest.mark.parametrize("extra", range(-3, 4))
def test_message_is_capped_at_the_limit(extra):
  bare = len(errors.message("a", "b", "", "d"))
  want = "w" * (LIMIT - bare + extra)
  text = errors.message("a", "b", want, "d")
  assert len(text) <= LIMIT
  if len(want) + bare < LIMIT:
    assert text.endswith(want + "; d.")
  else:
    assert text.startswith("a: got b; wanted www")
    assert text.endswith("...")


def test_message_takes_any_value():
  class Silent:
    def __str__(self) -> str:
      return ""

  assert errors.message("a", Silent(), "b", "c") == "a: got ; wanted b; c."
  assert "got None;" in errors.message("a", None, "b", "c")
