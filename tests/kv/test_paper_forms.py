"""Policies in the forms of their papers, beside simulations by hand.

The simulation is a Llama in NumPy that reads a token at a time. Each KV head
has a list of its tokens, and drops one when there are too many.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import ringjax as rj
from ringjax.kv.cache_kind import cache_kind
from tests import checkpoints

CONFIG = checkpoints.config("llama3") | {
  "max_position_embeddings": 16,
  "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
HEADS, KV_HEADS, DIM, BUDGET = 4, 2, 16, 8
TOKENS = np.random.default_rng(0).integers(3, 101, 24).astype(np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp("llama")
  checkpoints.write_folder(checkpoints.tensors("llama3"), CONFIG, folder)
  return rj.models.load(folder, dtype=np.float32)


@dataclasses.dataclass
class Token:
  """A token of a head: its place in the text, key, value, and attention."""

  number: int
  key: np.ndarray
  value: np.ndarray
  mass: float = 0.0


def rotated(x, position):
  """By halves, of [..., DIM]."""
  turns = position * 10000.0 ** -(np.arange(0, DIM, 2) / DIM)
  a, b = np.split(x, 2, -1)
  cos, sin = np.cos(turns), np.sin(turns)
  return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def normed(x, weight):
  scale = np.sqrt(np.mean(np.square(x)) + CONFIG["rms_norm_eps"])
  return x / scale * weight


class Simulated:
  """A model that reads a token at a time.

  Attributes:
    drop: returns which of a head's tokens go, or None.
    by_index: whether a token's position is its index in the head's list.
    heads: by layer and KV head the tokens that are there.
  """

  def __init__(self, drop, by_index=False):
    self.weights = checkpoints.tensors("llama3")
    self.drop, self.by_index, self.count = drop, by_index, 0
    layers = range(CONFIG["num_hidden_layers"])
    self.heads: list[list[list[Token]]]
    self.heads = [[[] for _ in range(KV_HEADS)] for _ in layers]

  def read(self, token):
    """The logits [V] behind one more token."""
    w: Any = {k: np.float64(x) for k, x in self.weights.items()}
    x = w["model.embed_tokens.weight"][token]
    for n, heads in enumerate(self.heads):
      part = lambda name, n=n: w[f"model.layers.{n}.{name}.weight"]
      h = normed(x, part("input_layernorm"))
      q, k, v = (
        (part(f"self_attn.{c}_proj") @ h).reshape(-1, DIM) for c in "qkv"
      )
      out = []
      for each, key, value, queries in zip(
        heads, k, v, q.reshape(KV_HEADS, -1, DIM), strict=True
      ):
        each.append(Token(self.count, key, value))
        out.append(self.attended(each, queries))
      x = x + part("self_attn.o_proj") @ np.concatenate(out, axis=None)
      h = normed(x, part("post_attention_layernorm"))
      gate, up = part("mlp.gate_proj") @ h, part("mlp.up_proj") @ h
      x = x + part("mlp.down_proj") @ (gate / (1 + np.exp(-gate)) * up)
    self.count += 1
    h = normed(x, w["model.norm.weight"])
    return w["model.embed_tokens.weight"] @ h

  def attended(self, tokens, queries):
    """Of the newest token's queries [G, DIM], which see all of the tokens."""
    at = lambda n, token: n if self.by_index else token.number
    keys = np.stack([rotated(t.key, at(n, t)) for n, t in enumerate(tokens)])
    q = rotated(queries, at(len(tokens) - 1, tokens[-1]))
    scores = q @ keys.T / np.sqrt(DIM)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    for token, mass in zip(tokens, weights.mean(0), strict=True):
      token.mass += mass
    return weights @ np.stack([t.value for t in tokens])

  def evict(self):
    for head in (head for layer in self.heads for head in layer):
      while len(head) > BUDGET:
        head.remove(self.drop(head))

  def positions(self):
    return [
      [[token.number for token in head] for head in layer]
      for layer in self.heads
    ]


def least_attended(head):
  """Of all but the newest half of the budget, the one of the least mass."""
  return min(head[: -BUDGET // 2], key=lambda token: token.mass)


def held(cache):
  return [[head.tolist() for head in layer] for layer in cache.positions(0)]


def beside(model, simulated, text, prompt):
  """Compares logits and kept tokens behind each token; returns the cache."""
  kind = cache_kind(text).replace(room=1, page=8)
  cache = model.init_cache(1, 64, kind=kind)
  _, cache = model(TOKENS[None, :prompt], cache=cache)
  for token in TOKENS[:prompt]:
    simulated.read(token)
  kept = []
  for token in (*TOKENS[prompt:], None):
    cache = cache.evict()
    simulated.evict()
    kept.append(held(cache))
    assert kept[-1] == simulated.positions()
    if token is None:
      return cache, kept
    logits, cache = model(token[None, None], cache=cache.with_room(1))
    np.testing.assert_allclose(
      logits[0, 0], simulated.read(token), rtol=1e-4, atol=1e-4
    )
  raise AssertionError


@pytest.mark.long
def test_heavy_hitters_of_the_paper_are_those_of_a_simulation(model):
  """Sums of attention, and half of the budget for the newest tokens."""
  text = f"h2o:budget={BUDGET},score=sum,newest=.5"
  _, kept = beside(model, Simulated(least_attended), text, 10)
  heads = [tuple(head) for layer in kept[-1] for head in layer]
  newest = list(range(TOKENS.size - BUDGET // 2, TOKENS.size))
  assert all(list(head[-BUDGET // 2 :]) == newest for head in heads)
  # Heads keep different tokens, and not the newest alone.
  assert len(set(heads)) > 1 and len({head[:4] for head in heads}) > 1


@pytest.mark.long
@pytest.mark.parametrize(
  ("text", "newest"),
  [("h2o:newest=1.0", range(6, 12)), ("h2o:newest=4", range(8, 12))],
)
def test_the_newest_tokens_stay_with_heavy_hitters(model, text, newest):
  kind = cache_kind(text).replace(page=8)
  assert cache_kind(str(kind)) == kind
  cache = model.init_cache(2, 64, kind=kind)
  _, cache = model(np.stack([TOKENS[:12]] * 2), cache=cache)
  for layer in cache.evict().positions(1):
    for head in layer:
      assert head.size == 6 and set(newest) <= set(head.tolist())


@pytest.mark.parametrize("newest", [-0.1, 1.5, 1, True])
def test_a_share_of_the_newest_that_is_none_is_refused(newest):
  with pytest.raises(rj.OptionError, match="newest"):
    rj.kv.HeavyHitters(newest=newest)
  with pytest.raises(rj.OptionError, match="by: got"):
    rj.kv.AdaKV(by=rj.kv.HeavyHitters(newest=0.5))


def oldest_behind_the_sinks(head):
  return head[2]


STREAM = f"sinks:budget={BUDGET},sinks=2,positions=cache"


@pytest.mark.long
def test_positions_in_the_cache_are_those_of_a_simulation(model):
  """Beyond the 16 tokens that the model's context has."""
  simulated = Simulated(oldest_behind_the_sinks, by_index=True)
  _, kept = beside(model, simulated, STREAM, 10)
  newest = range(TOKENS.size - BUDGET + 2, TOKENS.size)
  assert kept[-1][0][0] == [0, 1, *newest]
  # Positions in the text are others.
  other = Simulated(oldest_behind_the_sinks)
  with pytest.raises(AssertionError, match="Not equal to tolerance"):
    beside(model, other, STREAM, 10)


@pytest.mark.long
def test_a_stream_goes_beyond_the_context_of_the_model(model):
  """By `generate`, in chunks, with a second turn, as the simulation goes on."""
  with pytest.raises(rj.PromptError, match="at most 16 in all"):
    rj.infer.generate(model, TOKENS[None, :12], max_new_tokens=8,
                      cache_kind=f"sinks:budget={BUDGET}")  # fmt: skip
  kind = cache_kind(STREAM).replace(room=1, page=8)
  session = rj.infer.Session(model, 64, cache_kind=kind)
  ask = lambda tokens, count: rj.infer.generate(
    model, tokens, max_new_tokens=count, cache=session,
    prefill="chunked", chunk=4,
  )  # fmt: skip
  simulated = Simulated(oldest_behind_the_sinks, by_index=True)

  def answer(tokens, count):
    out = []
    for n in range(0, len(tokens), 4):
      for token in tokens[n : n + 4]:
        logits = simulated.read(token)
      simulated.evict()
    for _ in range(count):
      out.append(int(np.argmax(logits)))
      if len(out) < count:
        # The last token of a turn goes with the next one's first call.
        simulated.evict()
        logits = simulated.read(out[-1])
    return out

  first = ask(TOKENS[None, :12], 8).tokens[0].tolist()
  assert first == answer(TOKENS[:12], 8)
  more = TOKENS[None, 12:18]
  want = answer([first[-1], *TOKENS[12:18]], 6)
  assert ask(more, 6).tokens[0].tolist() == want
  assert session.lengths.tolist() == [12 + 8 + 6 + 5]
  # A call whose tokens do not fit beside those that are kept.
  with pytest.raises(rj.PromptError, match="tokens in the cache at once"):
    rj.infer.generate(model, TOKENS[None], max_new_tokens=2, cache_kind=kind)


def test_positions_in_the_cache_are_refused_where_they_are_not():
  """Without a number of tokens, or beside what they can't be with."""
  for text in (
    "sinks:positions=cache",
    "sinks:budget=4,positions=cache",
    "sinks:budget=64,sinks=0,positions=cache",
    "sinks:positions=row",
  ):
    with pytest.raises(rj.OptionError, match="positions"):
      cache_kind(text)
  with pytest.raises(rj.OptionError, match="first: got 2"):
    cache_kind(f"{STREAM},first=2")
  with pytest.raises(rj.OptionError, match="by: got"):
    rj.kv.AdaKV(by=cache_kind(STREAM).policy)
  kind = cache_kind(f"int4+{STREAM}")
  assert kind.layout.unrotated and cache_kind(str(kind)) == kind
