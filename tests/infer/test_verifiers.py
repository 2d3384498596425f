"""The joint law of drafted and checked tokens, against enumeration."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from ringjax.infer import Greedy, Sample
from ringjax.infer.sampling import law, noise, traced
from ringjax.infer.speculate import verifiers
from ringjax.infer.speculate.verifiers import DRAFT, VERIFIERS, Nodes, concluded
from tests.helpers import swept

V, DEPTH = 5, 3
# Of a prefix of up to DEPTH - 1 tokens the number.
PREFIXES = [
  p for n in range(DEPTH + 1) for p in itertools.product(range(V), repeat=n)
]
FIRST = np.cumsum([0, *(V**n for n in range(DEPTH + 1))])
CHAIN = (-1, 0, 1)
TREE = (-1, -1, 0, 0, 1, 1)


def table(seed, kind="any"):
  """Logits behind each prefix, [P, V]."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(len(PREFIXES), V)).astype(np.float32) * 1.5
  if kind == "zeros":
    x[np.arange(len(x)), rng.integers(0, V, len(x))] = -np.inf
  if kind == "disjoint":
    x[:, :2] = -np.inf
  return x


def following(prefix, length, token):
  """The number of a prefix with a token more."""
  start = jnp.asarray(FIRST)[length]
  after = jnp.asarray(FIRST)[jnp.minimum(length + 1, DEPTH)]
  return after + (prefix - start) * V + token


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def a_round(rule, sampler, p, q, state, parents, form):
  """New tokens of rows that are at a prefix, and the next state."""
  prefix, length, out, active = state
  batch, n = prefix.shape[0], len(parents)
  rows = jnp.arange(batch)
  at = [prefix]
  lengths = [length]
  tokens = []
  laws = []
  for number, parent in enumerate(parents):
    above, long = at[parent + 1], lengths[parent + 1]
    logits = q[jnp.minimum(above, len(p) - 1)]
    mine = law(sampler, logits, None)
    if form == "drawn":
      noisy = jnp.log(mine) + noise(
        sampler, rows, length, V, stream=DRAFT + 4 * (number + 1)
      )
      tokens.append(jnp.argmax(noisy, 1).astype(jnp.int32))
      laws.append(mine)
    else:
      tokens.append(((jnp.argmax(logits, 1) + number) % V).astype(jnp.int32))
    at.append(following(above, long, tokens[-1]))
    lengths.append(long + 1)
  depth = jnp.stack(lengths, 1)
  # Rows have drafts of their own lengths.
  count = jnp.where(rows % 3 == 0, n - 1, n)
  real = active[:, None] & (jnp.arange(n + 1)[None] <= count[:, None])
  inside = real & (depth < DEPTH + 1)
  nodes = Nodes(
    jnp.stack([jnp.zeros(batch, jnp.int32), *tokens], 1),
    jnp.broadcast_to(
      jnp.array([-1, *(x + 1 for x in parents)], jnp.int32)[None],
      (batch, n + 1),
    ),
    inside,
    depth + 7,
    p[jnp.minimum(jnp.stack(at, 1), len(p) - 1)],
    jnp.stack(laws, 1) if form == "drawn" else None,
    None,
  )
  left = jnp.where(active, DEPTH - length, 0)
  found = concluded(
    VERIFIERS[rule](sampler, nodes), nodes, left, jnp.array([-1])
  )
  for j in range(n + 1):
    here = j < found.count
    out = out.at[rows, jnp.where(here, length, DEPTH)].set(
      found.new[:, j], mode="drop"
    )
    prefix = jnp.where(here, following(prefix, length, found.new[:, j]), prefix)
    length = jnp.where(here, length + 1, length)
  return prefix, length, out, length < DEPTH


def drawn(rule, sampler, p, q, parents, form, rows):
  """The first DEPTH tokens of each row."""
  state = (
    jnp.zeros(rows, jnp.int32),
    jnp.zeros(rows, jnp.int32),
    jnp.zeros((rows, DEPTH), jnp.int32),
    jnp.ones(rows, bool),
  )
  p, q = jnp.asarray(p), jnp.asarray(q)
  for _ in range(DEPTH):
    state = a_round(rule, traced(sampler), p, q, state, parents, form)
  return np.asarray(state[2])


def chance(rule, sampler, p, q, parents=CHAIN, form="drawn", rows=250_000):
  """The probability of a table as far from the law as this one, or farther."""
  found = drawn(rule, sampler, p, q, parents, form, rows)
  number = (found * V ** np.arange(DEPTH - 1, -1, -1)).sum(1)
  counts = np.bincount(number, minlength=V**DEPTH)
  each = np.asarray(law(sampler, jnp.asarray(p), None)).astype(np.float64)
  each /= each.sum(1, keepdims=True)
  want = np.ones(1)
  for n in range(DEPTH):
    want = (want[:, None] * each[FIRST[n] : FIRST[n + 1]]).reshape(-1)
  assert counts[want == 0].sum() == 0
  some = want > 0
  if some.sum() == 1:
    return 1.0
  return stats.chisquare(counts[some], want[some] * rows).pvalue


CASES = {
  "other": (table(0), table(1), Sample(seed=5)),
  "equal": (table(0), table(0), Sample(seed=5)),
  "disjoint": (np.where(np.arange(V) > 1, -np.inf, table(0)).astype(
    np.float32), table(1, "disjoint"), Sample(seed=5)),
  "zeros": (table(0, "zeros"), table(1, "zeros"), Sample(seed=5)),
  "top_k": (table(0), table(1), Sample(top_k=3, seed=5)),
  "top_p": (table(0), table(1), Sample(top_p=0.8, seed=5)),
  "min_p": (table(0), table(1), Sample(min_p=0.2, seed=5)),
  "temperature": (table(0), table(1), Sample(temperature=0.6, seed=5)),
}  # fmt: skip


TREES = dict(chain=CHAIN, tree=TREE)
PAIRS = list(itertools.product(
  CASES, VERIFIERS, TREES, ("drawn", "chosen")))  # fmt: skip


# Each law, rule, tree and form, which take turns.
@pytest.mark.long
@pytest.mark.one_case
@pytest.mark.parametrize(
  ("case", "rule", "parents", "form"),
  [
    ("zeros", "match", "chain", "drawn"),
    ("zeros", "rejection", "tree", "drawn"),
    *swept(PAIRS, PAIRS[::3]),
  ],
)
def test_the_joint_law_is_the_target_s(case, rule, parents, form):
  p, q, sampler = CASES[case]
  assert chance(rule, sampler, p, q, TREES[parents], form) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
  ("case", "parents"),
  swept(
    itertools.product(CASES, TREES), [("other", "chain"), ("top_p", "tree")]
  ),
)
def test_a_million_draws(case, parents):
  p, q, sampler = CASES[case]
  tree = TREES[parents]
  assert chance("rejection", sampler, p, q, tree, rows=10**6) > 1e-4


@pytest.mark.long
@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_match_gives_the_tokens_of_the_sampler_itself(parents):
  p, q, sampler = CASES["top_k"]
  found = drawn("match", sampler, p, q, parents, "drawn", 999)
  prefix, rows = jnp.zeros(999, jnp.int32), jnp.arange(999)
  for n in range(DEPTH):
    logits = jnp.asarray(p)[prefix]
    token = sampler(logits, jnp.full(999, n + 8), rows=rows)
    np.testing.assert_array_equal(found[:, n], token)
    prefix = following(prefix, jnp.full(999, n), token)


@pytest.mark.parametrize("rule", VERIFIERS)
def test_greedy_is_the_largest_logit(rule):
  p, q, _ = CASES["other"]
  found = drawn(rule, Greedy(), p, q, TREE, "chosen", 9)
  prefix = 0
  for n in range(DEPTH):
    token = int(np.argmax(p[prefix]))
    assert (found[:, n] == token).all()
    prefix = int(following(prefix, n, token))


def test_acceptance_is_the_overlap_of_both_laws():
  p, q, sampler = CASES["other"]
  rows = 100_000
  state = (
    jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.int32),
    jnp.zeros((rows, DEPTH), jnp.int32), jnp.ones(rows, bool),
  )  # fmt: skip
  arrays = jnp.asarray(p), jnp.asarray(q)
  _, length, *_ = a_round(
    "rejection", traced(sampler), *arrays, state, (-1,), "drawn"
  )
  taken = np.asarray(length)[np.arange(rows) % 3 > 0] - 1
  both = [np.asarray(law(sampler, x[:1], None))[0] for x in arrays]
  overlap = 1 - np.abs(both[0] - both[1]).sum() / 2
  assert taken.mean() == pytest.approx(overlap, abs=0.01)


def test_a_sibling_has_all_that_a_rejected_one_left():
  """p is (1/2, 1/2, 0), q (2/5, 2/5, 1/5): behind token 2, which p never has,
  the rest of p is p again, and more than q has of token 0.
  """
  rows = 64
  wide = lambda x: jnp.broadcast_to(jnp.asarray(x)[None], (rows, *np.shape(x)))
  nodes = Nodes(
    tokens=wide([0, 2, 0]),
    parents=wide([-1, 0, 0]),
    real=jnp.ones((rows, 3), bool),
    pos=wide([4, 5, 5]),
    logits=wide(np.log([[0.5, 0.5, 1e-30]] * 3).astype(np.float32)),
    probs=wide(np.array([[0.4, 0.4, 0.2]] * 2, np.float32)),
    seen=None,
  )
  kept = verifiers.rejection(traced(Sample(seed=5)), nodes).accepted_nodes
  np.testing.assert_array_equal(kept, wide([True, False, True]))


# ---------------------------------------------------------------------------
# Planted bugs
# ---------------------------------------------------------------------------


def from_q(sampler, nodes):
  """The bonus token is drawn from the draft's law."""
  found = verifiers.rejection(sampler, nodes)
  rows = jnp.arange(len(nodes.tokens))
  q = jnp.concatenate([nodes.probs[:, :1], nodes.probs], 1)
  last = jnp.sum(found.accepted_nodes, 1) - 1
  mine = q[rows, last]
  gumbel = noise(sampler, rows, last + 50, V, stream=3)
  token = jnp.argmax(jnp.log(mine) + gumbel, 1).astype(jnp.int32)
  return found._replace(chosen=token)


def from_p(sampler, nodes):
  """Behind a rejection the target's law is drawn from, not its rest."""
  found = verifiers.rejection(sampler, nodes)
  rows = jnp.arange(len(nodes.tokens))
  last = jnp.max(
    jnp.where(
      found.accepted_nodes, jnp.arange(found.accepted_nodes.shape[1]), 0
    ),
    1,
  )
  mine = law(sampler, nodes.logits[rows, last], None)
  gumbel = noise(sampler, rows, last + 50, V, stream=3)
  token = jnp.argmax(jnp.log(mine) + gumbel, 1).astype(jnp.int32)
  return found._replace(chosen=token)


def unfiltered(sampler, nodes):
  """The target's law is not filtered as the draft's is."""
  return verifiers.rejection(Sample(seed=5), nodes)


def by_number(sampler, nodes):
  """Probabilities are looked up by a node's number, not by its token."""
  number = jnp.arange(nodes.tokens.shape[1], dtype=jnp.int32) % V
  wrong = nodes._replace(
    tokens=jnp.broadcast_to(number[None], nodes.tokens.shape)
  )
  return verifiers.rejection(sampler, wrong)


def shifted(sampler, nodes):
  """Each node is checked by the logits behind itself."""
  return verifiers.rejection(
    sampler, nodes._replace(parents=jnp.maximum(nodes.parents, 0) * 0 +
                            jnp.where(nodes.parents < 0, -1, 0))
  )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
  "bug",
  [
    from_q,
    unfiltered,
    *(pytest.param(x, marks=pytest.mark.long)
      for x in (from_p, by_number, shifted)),
  ],
)  # fmt: skip
def test_a_wrong_rule_is_seen(bug, monkeypatch):
  rule = f"bug {bug.__name__}"
  monkeypatch.setitem(VERIFIERS, rule, bug)
  p, q, sampler = CASES["top_k"]
  try:
    found = chance(rule, sampler, p, q, rows=50_000)
  except AssertionError:
    # A token that the law does not have.
    found = 0.0
  assert found < 1e-9
