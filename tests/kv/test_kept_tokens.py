"""Which tokens policies keep: those that kvpress keeps, case by case.

The fixtures are made by `tests/fixtures/policies.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import numpy as np
import pytest

import ringjax as rj
from tests import checkpoints

HOME = pathlib.Path(__file__).parent.parent / "fixtures/policies"
INDEX = json.loads((HOME / "index.json").read_text())
FEW = 4


def runs(press, family):
  """(number of the case, tokens, bool [layers, K, T], parameters), and layers.

  The parameters are those of the press.
  """
  file = np.load(HOME / f"{press}.npz")
  mine = {
    key.split("/")[1]: file[key]
    for key in file.files
    if key.startswith(f"{family}/")
  }
  layers, found = mine.pop("layers"), []
  for i, case in enumerate(mine["case"].tolist()):
    length = INDEX["lengths"][case % 8]
    tokens = np.random.Philox(key=case).random_raw(length) % 98 + 3
    kept = np.unpackbits(mine["kept"][i], axis=-1, count=length).astype(bool)
    own = {
      key: value[i].tolist()
      for key, value in mine.items()
      if key not in ("kept", "case", "margin")
    }
    parameters = INDEX["presses"][press]["parameters"] | own
    found.append((case, tokens.astype(np.int32), kept, parameters))
  return found, layers.tolist()


@functools.cache
def model(family, folder):
  known = INDEX["families"][family]
  config = checkpoints.config(known["model"]) | known["config"]
  # A repetition is behind the text; no rotation here depends on it.
  config |= {"max_position_embeddings": 4096}
  tensors = checkpoints.tensors(known["model"])
  at = folder / family
  checkpoints.write_folder(tensors, config, at)
  return rj.models.load(at, dtype=np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("kvpress")


def _streaming(p, share):
  return rj.kv.Sinks(budget=share, sinks=p["n_sink"])


def _snap(p, share):
  window, kernel = p["window_size"], p["kernel_size"]
  return rj.kv.SnapKV(budget=share, window=window, kernel=kernel)


def _pyramid(p, share):
  return rj.kv.PyramidKV(
    budget=share,
    window=p["window_size"],
    kernel=p["kernel_size"],
    beta=p["beta"],
  )


def _ada(p, share):
  return rj.kv.AdaKV(
    budget=share,
    window=p["window_size"],
    kernel=p["kernel_size"],
    safe=float(p["alpha_safeguard"]),
  )


def _ada_by(by):
  return lambda p, share: rj.kv.AdaKV(
    budget=share, safe=float(p["alpha_safeguard"]), by=by(p, share)
  )


def _norm(p, share):
  return rj.kv.KeyNorm(budget=share)


def _lag(p, share):
  return rj.kv.LagKV(
    budget=share,
    sinks=p["n_sink"],
    lag=p["lag_size"],
    across=p["cross_scoring"],
  )


def _expected(p, share):
  return rj.kv.ExpectedAttention(
    budget=share,
    positions=p["n_future_positions"],
    covariance=p["use_covariance"],
    by_value=p["use_vnorm"],
    least=float(p["epsilon"]),
  )


def _duo(p, share):
  """The share is of the heads: those of the lowest gates stream."""
  gates = np.reshape(p["head_scores"], (-1, 2))
  order = np.argsort(gates, axis=None)[: round(gates.size * (1 - share))]
  return rj.kv.Duo(
    streaming=tuple((int(n) // 2, int(n) % 2) for n in order),
    sinks=p["sink_size"],
    newest=p["recent_size"],
  )


PRESSES = {
  "streaming_llm": _streaming,
  "keydiff": lambda p, share: rj.kv.KeyDiff(budget=share),
  "snapkv": _snap,
  "snapkv_long": _snap,
  "tova": lambda p, share: rj.kv.Tova(budget=share),
  "pyramidkv": _pyramid,
  "observed_attention": lambda p, share: rj.kv.HeavyHitters(budget=share),
  "expected_attention": _expected,
  "adakv_snapkv": _ada,
  "expected_attention_more": _expected,
  "knorm": _norm,
  "lagkv": _lag,
  "adakv_knorm": _ada_by(_norm),
  "adakv_expected_attention": _ada_by(_expected),
  "snapkv_eager": _snap,
  "duo_attention": _duo,
}
# Of 100 cases those of what is not there. Of queries to come: the first four
# always stay, and not 0 or 7. KVzip+: weights times norms of hidden states and
# of values.
LEFT_OUT = {"expected_attention_more": 26, "kvzip_more": 70}


def left_out(press, parameters):
  if press == "expected_attention_more":
    return parameters["n_sink"] != 4
  return bool(parameters.get("kvzip_plus_normalization"))


def compare(press, family, many, folder, keep):
  """`keep(model, tokens, what kvpress keeps, parameters)` of `many` cases."""
  net = model(family, folder)
  found, layers = runs(press, family)
  compared = 0
  for case, tokens, kept, parameters in found[:many]:
    if left_out(press, parameters):
      continue
    got = keep(net, tokens, kept, parameters).positions(0)
    compared += 1
    for layer, want in zip(layers, kept, strict=True):
      for mine, there in zip(got[layer], want, strict=True):
        assert mine.tolist() == np.flatnonzero(there).tolist(), (case, layer)
  assert compared > 0 and len(found) == 100
  if many == 100:
    assert compared == 100 - LEFT_OUT.get(press, 0)


def families(press):
  return tuple(INDEX["presses"][press]["families"])


class Asks:
  """The tokenizer of KVzip's fixtures: three texts."""

  def encode(self, text):
    known = INDEX["kvzip_tokens"]
    if text == "\n":
      return known["suffix"]
    return known["later" if "starting" in text else "first"]


def _repeated(net, tokens, kept, p):
  """What KVzip keeps of a prompt; how many is given by what is kept."""
  policy = rj.kv.KVzip(
    budget=kept.mean().item(),
    sinks=p["n_sink"],
    chunk=p["chunk_size"],
    prefix=p["prefix"],
    by_layer=p["layerwise"],
  )
  cache = filled(net, tokens, policy, room=120)
  return rj.infer.evict_by_repetition(
    net, cache, tokens[None], tokenizer=Asks()
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ("press", "family", "many"),
  [
    ("kvzip", "llama", 2),
    *(
      pytest.param(press, family, 16, marks=pytest.mark.long)
      for press, family in (("kvzip", "qwen3"), ("kvzip_more", "mistral"))
    ),
    *(
      pytest.param(press, family, 100, marks=pytest.mark.slow)
      for press in ("kvzip", "kvzip_more")
      for family in families(press)
    ),
  ],
)
def test_kept_tokens_of_a_repetition_are_those_of_kvpress(
  press, family, many, folder
):
  compare(press, family, many, folder, _repeated)


DEFAULT = ("snapkv", "expected_attention", "lagkv", "adakv_knorm")


def filled(net, tokens, policy, **options):
  """A cache with the tokens."""
  # One size and one policy for all, so that few programs are compiled.
  plain = rj.kv.KVzip() if policy.repeats else policy.traced()
  kind = rj.kv.CacheConfig(policy=plain, page=8, **options)
  cache = net.init_cache(1, 120, kind=kind)
  seg = (np.arange(120) < tokens.size).astype(np.int32)[None]
  padded = np.zeros((1, 120), np.int32)
  padded[0, : tokens.size] = tokens
  _, cache = net(padded, cache=cache, segment_ids=seg)
  kind = kind.replace(policy=policy)
  return dataclasses.replace(cache, kind=kind)


@pytest.mark.long
@pytest.mark.parametrize(
  ("press", "family", "many"),
  [
    *((press, "llama", FEW) for press in DEFAULT),
    *(
      pytest.param(press, family, 100, marks=pytest.mark.slow)
      for press in PRESSES
      for family in families(press)
    ),
    *(
      # Each press in one family, and each family. A pattern is a program.
      pytest.param(
        press,
        families(press)[n % len(families(press))],
        4 if press == "duo_attention" else 16,
        marks=pytest.mark.long,
      )
      for n, press in enumerate(PRESSES)
    ),
  ],
)
def test_kept_tokens_are_those_of_kvpress(press, family, many, folder):
  # Shares are drawn as what goes, and 1 - ratio is what stays.
  policy = lambda p: PRESSES[press](p, 1 - p["ratio"])
  compare(
    press,
    family,
    many,
    folder,
    lambda net, tokens, _, p: filled(net, tokens, policy(p)).evict(),
  )


def test_every_fixture_is_read():
  read = {*PRESSES, "kvzip", "kvzip_more"}
  assert read == set(INDEX["presses"])
  assert read == {path.stem for path in HOME.glob("*.npz")}
