"""Every kind of cache keeps the laws of `tests.contracts.cache`."""

from __future__ import annotations

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError, PromptError, ShapeError
from ringjax.kv.cache_kind import KINDS
from ringjax.ops.mask import Coords
from tests.contracts import cache as contract

# Those with a policy have laws of their own: test_evicting.
WHOLE = {name: kind for name, kind in KINDS.items() if not kind.evicting}
EXACT = [name for name, kind in WHOLE.items() if kind.codec is None]
CODED = [name for name in WHOLE if name not in EXACT]
# Blocks of 3 tokens in host memory.
TIERED = "dense:device=4,room=3"
# Pages of 8 tokens in host memory, of which queries choose all.
CHOSEN = "select:budget=1.0,page=8,device=4,hot=8"
QUICK = [contract.Setup(kind, 4) for kind in ("windowed", "int4")]
LONG = [
  *(contract.Setup(kind, 4) for kind in ("dense", "unrotated", TIERED)),
  *(contract.Setup(kind, 1) for kind in EXACT),
  contract.Setup("windowed", 8),
  contract.Setup("nuq3", 4),
  contract.Setup("nuq3:keys.by=token,unrotated=false", 1),
  contract.Setup("per-head-nuq", 4),
  *(contract.Setup("per-head", n) for n in (1, 4)),
  contract.Setup("windowed", 4, dtype="bfloat16"),
  contract.Setup(TIERED, 1),
  *(contract.Setup(CHOSEN, n) for n in (1, 4)),
  contract.Setup("int8:page=8,device=4,hot=16", 1, "selected"),
  contract.Setup("windowed:device=4,room=3", 4, "recurrent"),
  contract.Setup("nuq3:device=4,room=3", 4),
  contract.Setup("unrotated:device=4,room=3", 4, "latent"),
  *(
    contract.Setup("windowed", 4, family)
    for family in ("latent", "alibi", "chunked", "recurrent")
  ),
]
SLOW = [
  *(contract.Setup(f"{CHOSEN},landmarks=clusters", n) for n in (1, 4)),
  *(
    contract.Setup("per-head", n, family)
    for n in (1, 4)
    for family in contract.FAMILIES
  ),
  *(contract.Setup(kind, n) for kind in EXACT for n in (2, 8)),
  *(contract.Setup(kind, n) for kind in CODED for n in (1, 4)),
  *(contract.Setup("int4:device=4,room=3", n) for n in (1, 2, 4)),
  *(contract.Setup(TIERED, 2, family) for family in contract.FAMILIES),
  *(
    contract.Setup(kind, 4, family, dtype)
    for family in contract.FAMILIES
    for kind, dtype in (
      ("unrotated", "float32"),
      ("windowed", "float32"),
      ("windowed", "bfloat16"),
      ("int4", "float32"),
    )
  ),
]
LONG = [x for x in LONG if x not in QUICK]
SLOW = [x for x in dict.fromkeys(SLOW) if x not in (*QUICK, *LONG)]


def pairs():
  """Each law with each setup, of which a commit has to keep the first ones.

  The longer run has a design: each setup keeps three of the laws, which take
  turns, and each law is kept by several setups.
  """
  for m, law in enumerate(contract.LAWS):
    for n, setup in enumerate([*QUICK, *LONG, *SLOW]):
      marks = pytest.mark.slow
      if n == 0 or (setup in QUICK and law is contract.as_without_a_cache):
        marks = ()
      elif setup in QUICK or (
        setup in LONG and (m - 3 * n) % len(contract.LAWS) < 3
      ):
        marks = pytest.mark.long
      yield pytest.param(law, setup, marks=marks, id=f"{law.__name__}-{setup}")


@pytest.mark.long_cases(3)
@pytest.mark.parametrize(("law", "setup"), [*pairs()])
def test_law(law, setup):
  law(setup)


@pytest.mark.long
def test_unrotated_keys_move_to_other_positions():
  """Loaded elsewhere: as if the tokens had been read there, no key changed."""
  setup = contract.Setup("unrotated", 1)
  model, (tokens, _) = setup.model, setup.text()
  first, more = tokens[:1, :8], tokens[:1, 8:11]
  positions = np.arange(20, 28, dtype=np.int32)[None]
  _, cache = setup.read(first, setup.empty(batch=1))
  blocks = cache.export(0, 0, 8)
  at = Coords(positions[0], np.ones(8, np.int32))
  moved = setup.empty(batch=1).load(0, blocks, at)
  there = moved.export(0, 20, 28)
  np.testing.assert_array_equal(there.parts[0].k, blocks.parts[0].k)
  got, _ = setup.read(more, moved)
  want = model(
    np.concatenate([first, more], 1),
    positions=np.arange(20, 31, dtype=np.int32)[None],
  )
  contract.close(got, np.asarray(want)[:, 8:])


@pytest.mark.long
def test_generate_and_sessions_take_a_kind():
  model, (tokens, _) = contract.model(1), contract.text()
  ask = lambda **options: (
    rj.infer.generate(model, tokens[:2, :9], max_new_tokens=5, **options).tokens
  )
  want = ask()
  np.testing.assert_array_equal(ask(cache_kind="unrotated"), want)
  session = rj.infer.Session(model, 32, batch=2, cache_kind="unrotated")
  np.testing.assert_array_equal(ask(cache=session), want)
  assert session.cache.kind == KINDS["unrotated"]
  session.restart()
  assert session.cache.kind == KINDS["unrotated"]
  with pytest.raises(OptionError, match="one of dense, unrotated"):
    ask(cache_kind="int3")


@pytest.mark.usefixtures("unchecked")
def test_what_a_cache_refuses():
  setup = contract.Setup("dense", 1)
  _, cache = setup.read(setup.text()[0][:, :8], setup.empty())
  blocks = cache.export(0, 2, 6)
  elsewhere = Coords(np.arange(9, 13, dtype=np.int32), np.ones(4, np.int32))
  with pytest.raises(OptionError, match="stored rotated"):
    cache.load(1, blocks, elsewhere)
  with pytest.raises(OptionError, match="of kind dense"):
    contract.Setup("unrotated", 1).empty().load(1, blocks)
  with pytest.raises(PromptError, match="positions from 0 to 8"):
    cache.export(0, 6, 10)
  with pytest.raises(ShapeError, match="a value for each token"):
    cache.keep(np.ones(3, bool))
  with pytest.raises(ShapeError, match="from 0 to 2"):
    cache.reset([3])
  with pytest.raises(OptionError, match="capacity 32"):
    cache.insert([0], setup.empty(batch=1, capacity=16))
