"""Entropy of a model's attention, and of contexts that are encoded apart."""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ringjax as rj
from launch import evaluate
from ringjax import eval as evaluation
from ringjax import models
from ringjax.data import Tokenizer
from ringjax.data.tasks import documents
from ringjax.errors import OptionError, PromptError, ShapeError
from ringjax.kv.base import KV, FreshLayer, NoCache
from ringjax.models import small, tiny
from ringjax.models.transformer import forward
from tests import checkpoints
from tests.helpers import SMALL, make_mesh, refused, script

run = functools.partial(script, evaluate)

T = 23


class Recorded(NamedTuple):
  """A layer that leaves its queries and keys to the cache, as they are."""

  slots: Any
  index: Any
  fresh: Any = None

  def append(self, k, v, at, rotation):
    return self._replace(fresh=KV(rotation.own(k), v, at))

  def observe(self, rotated, plain):
    put = lambda old, new: lax.dynamic_update_index_in_dim(
      old, new.astype(old.dtype), self.index, 0
    )
    new = rotated(), jnp.swapaxes(self.fresh.k, 1, 2)
    return self._replace(slots=jax.tree.map(put, self.slots, new))

  def views(self, *, apart=False):
    return (self.fresh.view(),)


class Recorder(NoCache):
  """For a call outside of jit."""

  def __init__(self, model, batch, tokens):
    self.kinds = model.kinds
    zeros = lambda kind, heads: jnp.zeros(
      (kind.layers, batch, tokens, heads, kind.key), jnp.float32
    )
    self.found = tuple(
      (zeros(k, k.heads * k.reading.groups), zeros(k, k.heads))
      if hasattr(k, "reading")
      else ()
      for k in self.kinds
    )

  @property
  def slots(self):
    return self.found

  def layer(self, kind, slots, index):
    return Recorded(slots, index) if slots else FreshLayer()

  def updated(self, slots):
    self.found = slots
    return self


def direct(model, ids, pos=None, seg=None, segments=None):
  """By layer (p [B, N, T, S] with a last column for sinks, lse) in NumPy."""
  batch, length = ids.shape
  recorder = Recorder(model, batch, length)
  attend = models.ContextParallel(
    axis=None, **({} if segments is None else {"segments": segments})
  )
  _, recorder = forward(
    model,
    attend,
    jnp.asarray(ids),
    None if pos is None else jnp.asarray(pos),
    None if seg is None else jnp.asarray(seg),
    recorder,
    None,
    None,
  )
  wide = lambda x, default: np.broadcast_to(
    default if x is None else x, (batch, length)
  )
  at = rj.Coords(wide(pos, np.arange(length)), wide(seg, 1))
  found = {}
  blocks = [block for run in model.stack.blocks for block in run]
  for kind, block, slots in zip(
    model.kinds, blocks, recorder.found, strict=True
  ):
    for n, which in enumerate(getattr(kind, "which", ())):
      reading = kind.reading
      q, k = (np.asarray(x[n], np.float64) for x in slots)
      s = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, reading.groups, 2))
      s = s * reading.scores.scale
      if (cap := reading.scores.soft_cap) is not None:
        s = cap * np.tanh(s / cap)
      pair = [
        rj.Coords(*(c[:, None, :, None] for c in at)),
        rj.Coords(*(c[:, None, None, :] for c in at)),
      ]
      if reading.slopes is not None:
        far = np.abs(pair[0].pos - pair[1].pos)
        s = s - np.asarray(reading.slopes)[:, None, None] * far
      sees = reading.mask & (segments or rj.SameSegment())
      real = (pair[0].seg > 0) & (pair[1].seg > 0)
      s = np.where(np.asarray(sees.allows(*pair)) & real, s, -np.inf)
      sinks = getattr(block.attention, "sinks", None)
      sink = np.full((*s.shape[:3], 1), -np.inf)
      if sinks is not None:
        sink[:] = np.asarray(sinks[...])[n][:, None, None]
      s = np.concatenate([s, sink], -1)
      top = np.maximum(s.max(-1, keepdims=True), -1e30)
      total = np.exp(s - top).sum(-1, keepdims=True)
      p = np.exp(s - top) / np.maximum(total, 1e-300)
      with np.errstate(divide="ignore"):
        found[which] = p, (top + np.log(total))[..., 0]
  return dict(sorted(found.items()))


def verify(model, got, want, rows, keep=None, columns=False):
  """Statistics of all layers, of the queries `rows`."""
  assert [n for n, x in enumerate(got.layers) if x is not None] == list(want)
  for which, (p, lse) in want.items():
    one, p, lse = got.layers[which], p[:, :, rows], lse[:, :, rows]
    close = lambda x, y, which=which: np.testing.assert_allclose(
      x, y, rtol=1e-5, atol=1e-5, err_msg=f"layer {which}"
    )
    log = np.log(np.maximum(p, 1e-300))
    close(one.entropy, -np.where(p > 0, p * log, 0).sum(-1).swapaxes(1, 2))
    close(one.lse, lse.swapaxes(1, 2))
    p = p[..., :-1]
    if keep is not None:
      close(one.kept_mass, (p * keep[:, None, None]).sum(-1).swapaxes(1, 2))
    if columns:
      close(one.column_mass, p.sum(2).swapaxes(1, 2))


def tokens(vocab, batch=2, length=T, seed=3):
  rng = np.random.default_rng(seed)
  return rng.integers(1, vocab, (batch, length)).astype(np.int32)


# Soft caps and windows; sinks; latents; latents with a query latent; ALiBi;
# recurrent layers between; chunked layers with temperature.
FAMILIES = (
  "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_rw",
  "llama4_text",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
  model = models.load(checkpoints.write(family, tmp_path / "model"))
  ids = tokens(model.config.vocab)
  keep = np.arange(T) % 3 == 0
  got = evaluation.attention_statistics(
    model, ids, queries=range(4, 11), keep=keep, columns=True
  )
  keep = np.broadcast_to(keep, ids.shape)
  want = direct(model, ids)
  verify(model, got, want, np.arange(4, 11), keep, columns=True)
  np.testing.assert_allclose(
    got.logits, np.asarray(model(ids))[:, 4:11], rtol=1e-5, atol=1e-5
  )


@pytest.fixture(scope="module")
def model():
  return models.create(SMALL | {"num_hidden_layers": 3}, seed=0)


SEPARATE = np.repeat([2, 3, 4, 0, 1], [3, 6, 5, 2, 7])[None]
POSITIONS = np.concatenate(
  [np.arange(3), 3 + np.arange(6), 3 + np.arange(5), [0, 0], 9 + np.arange(7)]
)[None]


@pytest.mark.slow
@pytest.mark.parametrize(
  "shards", [4, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 8))]
)
def test_documents_positions_and_shards(model, shards):
  ids, segments = tokens(64, 1), rj.SeparateDocuments()
  mesh = None if shards == 1 else make_mesh(shards, "auto")
  got = evaluation.attention_statistics(
    model, ids, queries=7, positions=POSITIONS, segment_ids=SEPARATE,
    segments=segments, keep=SEPARATE == 2, columns=True, mesh=mesh,
  )  # fmt: skip
  want = direct(model, ids, POSITIONS, SEPARATE, segments)
  verify(model, got, want, np.arange(16, 23), SEPARATE == 2, columns=True)


@pytest.mark.long
def test_all_queries_in_rows_of_their_own(model):
  ids = tokens(64)
  got = evaluation.attention_statistics(model, ids)
  verify(model, got, direct(model, ids), np.arange(T))
  assert got.layers[0].kept_mass is None is got.layers[0].column_mass


@pytest.mark.usefixtures("unchecked")
def test_what_is_refused(model):
  ids = tokens(64)
  ask = functools.partial(evaluation.attention_statistics, model)
  for bad in (0, 24, [23], [-1], [], [0.5]):
    refused(OptionError, lambda bad=bad: ask(ids, queries=bad), "queries")
  refused(ShapeError, lambda: ask(ids[0]), "tokens")
  refused(ShapeError, lambda: ask(ids, keep=np.ones(T)), "keep", "bool")
  refused(PromptError, lambda: ask(ids + 64), "tokens")


# ---------------------------------------------------------------------------
# Contexts in chunks
# ---------------------------------------------------------------------------


def test_a_context_in_chunks():
  prompt = functools.partial(
    evaluation.entropy.split_prompt, np.arange(10, 17), np.array([30, 31]), 3,
    np.array([1]),
  )  # fmt: skip
  made = prompt(shared=False)
  assert made.tokens.tolist() == [1, 10, 11, 12, 1, 13, 14, 1, 15, 16, 30, 31]
  assert made.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 4, 5]
  assert made.segments.tolist() == [3] * 4 + [4] * 3 + [5] * 3 + [1] * 2
  made = prompt(shared=True)
  assert made.tokens.tolist() == [1, 10, 11, 12, 13, 14, 15, 16, 30, 31]
  assert made.positions.tolist() == [0, 1, 2, 3, 1, 2, 1, 2, 4, 5]
  assert made.segments.tolist() == [2] + [3] * 3 + [4] * 2 + [5] * 2 + [1] * 2


def test_one_chunk_is_the_text_itself(model):
  text, prefix = tokens(64, 1, 40)[0], [7]
  (found,) = evaluation.split_entropy(
    model, [text], [1], context=20, query=9, prefix=prefix, rows=1
  )
  ids = np.concatenate([prefix, text[:29]]).astype(np.int32)[None]
  whole = evaluation.attention_statistics(model, ids, queries=9)
  heads = [np.asarray(x.entropy)[0].mean(0) for x in whole.layers]
  np.testing.assert_allclose(found.heads, heads, rtol=1e-5)
  np.testing.assert_allclose(found.entropy, np.mean(heads), rtol=1e-5)
  score = jax.nn.log_softmax(whole.logits[0])
  loss = -np.asarray(score)[np.arange(9), text[21:30]].mean()
  np.testing.assert_allclose(found.loss, loss, rtol=1e-5)


@pytest.mark.long
def test_shards_read_chunks_alike(model):
  told = []
  ask = functools.partial(
    evaluation.split_entropy, model, tokens(64, 2, 40), [1, 3], context=20,
    query=9, prefix=[7, 8], rows=2,
  )  # fmt: skip
  one = ask(on_read=told.append, on_setting=told.append)
  assert [(x.splits, x.shared) for x in one] == [
    (1, False), (3, False), (3, True),
  ]  # fmt: skip
  assert told == [1, 2, one[0], 3, 4, one[1], 5, 6, one[2]]
  many = ask(mesh=make_mesh(4, "auto"))
  for a, b in zip(one, many, strict=True):
    np.testing.assert_allclose(a.heads, b.heads, rtol=1e-5)
    np.testing.assert_allclose(a.losses, b.losses, rtol=1e-5)
    assert a.prefix_mass == pytest.approx(b.prefix_mass, rel=1e-5)


def test_what_cannot_be_split(model):
  ask = lambda **options: evaluation.split_entropy(
    model,
    tokens(64, 2, 40),
    **dict(splits=[1], context=20, query=9, prefix=[7], rows=2) | options,
  )
  refused(PromptError, lambda: ask(rows=3), "texts", "2 of 30")
  refused(PromptError, lambda: ask(context=31), "texts")
  refused(OptionError, lambda: ask(splits=[21]), "splits")
  refused(OptionError, lambda: ask(splits=[]), "splits")
  refused(OptionError, lambda: ask(prefix=[]), "prefix")
  refused(OptionError, lambda: ask(query=0), "query")


@pytest.mark.long
def test_the_entropy_of_what_a_selection_reads(model):
  """All selected is the context in chunks; fewer have other entropies."""
  ask = functools.partial(
    evaluation.split_entropy, model, tokens(64, 1, 40), [3], context=20,
    query=9, prefix=[7, 8], rows=1,
  )  # fmt: skip
  plain, every, one = (
    ask(combine=x) for x in ("parallel", "select:keep=3", "select:keep=1")
  )
  for a, b, c in zip(plain, every, one, strict=True):
    assert (a.shared, a.combine, b.combine) == (b.shared, "parallel", "select")
    np.testing.assert_allclose(a.heads, b.heads, rtol=1e-4)
    np.testing.assert_allclose(a.losses, b.losses, rtol=1e-4)
    assert a.prefix_mass == pytest.approx(b.prefix_mass, rel=1e-4)
    # A third of the keys of contexts, of nearly equal weights.
    assert c.entropy < b.entropy - 0.1
  with pytest.raises(OptionError, match="'recompute'"):
    ask(combine="recompute")


@pytest.mark.long
def test_statistics_behind_contexts_leave_the_session(model):
  """Logits are those of the call itself, and so are later answers."""
  contexts = [np.arange(1, 12), np.arange(20, 29), np.arange(40, 52)]
  session = functools.partial(
    rj.infer.context_session, model, contexts, "select:keep=1", capacity=12
  )
  asked, plain = np.arange(5, 9), session()
  measured = session()
  found = evaluation.context_statistics(measured, asked)
  assert [x.entropy.shape[:2] for x in found.layers] == [(1, 4)] * len(
    found.layers
  )
  answers = [
    rj.infer.generate(model, asked[None], max_new_tokens=3, cache=x)[0]
    for x in (measured, plain)
  ]
  assert answers[0].tolist() == answers[1].tolist()
  assert int(found.logits[0, -1].argmax()) == answers[0][0]
  whole = rj.infer.Session(model, 16)
  refused(
    OptionError,
    lambda: evaluation.context_statistics(whole, asked),
    "context_session",
  )


def of_held_out_text(shipped, rows, splits):
  text = "\n".join(documents.library(held_out=True))
  ids = np.asarray(Tokenizer.load(shipped.path()).encode(text))
  apart = len(ids) // rows
  return evaluation.split_entropy(
    models.load(shipped.path()),
    [ids[n * apart :][:369] for n in range(rows)],
    splits,
    context=240,
    query=128,
    prefix=[256],
    rows=rows,
  )


@pytest.mark.slow
@pytest.mark.long
def test_chunks_make_attention_flat():
  """Zhang et al. 2025: entropy rises with P, and the loss with it."""
  found = of_held_out_text(small, 16, [1, 4, 16])
  own = [x for x in found if not x.shared]
  entropies = [x.entropy for x in own]
  assert entropies == sorted(entropies)
  assert evaluation.correlation(own) > 0.9
  last, shared = found[-2:]
  assert (last.splits, last.shared, shared.shared) == (16, False, True)
  assert shared.entropy < last.entropy


@pytest.mark.long
def test_a_shared_prefix_helps_a_model_that_looks_at_it():
  own, shared = of_held_out_text(tiny, 8, [8])
  assert own.prefix_mass > shared.prefix_mass > 0.01
  assert shared.entropy < own.entropy - 0.03
  assert shared.loss < own.loss


# ---------------------------------------------------------------------------
# The script
# ---------------------------------------------------------------------------


@pytest.mark.long
def test_entropy_by_script(tmp_path):
  pytest.importorskip("matplotlib")
  plot, kept = tmp_path / "entropy.png", tmp_path / "entropy.json"
  script = (
    "entropy", "--splits=4,1,4", "--context=60", "--query=20", "--rows=2",
    "--mesh=seq:2", f"--out={kept}",
  )  # fmt: skip
  status, out, err = run(*script, f"--plot={plot}")
  assert status == 0, err
  assert plot.read_bytes()[:4] == b"\x89PNG"
  record = json.loads(kept.read_text())
  assert record["complete"] and record["model"] == "ringjax-small"
  found = [(x["splits"], x["shared"]) for x in record["settings"]]
  assert found == [(1, False), (4, False), (4, True)]
  assert set(record["correlation"]) == {"own", "shared"}
  lines = [line.split() for line in out.splitlines()]
  assert [line[0] for line in lines[3:5]] == ["1", "4"]
  whole, own, shared = record["settings"]
  assert lines[4][1] == f"{own['entropy']:.4f}"
  assert lines[4][4] == f"{shared['entropy']:.4f}"
  # Four layers of eight heads, each with its mean.
  assert lines[7] == ["layer", "head", "1", "4", "4s"]
  assert len(lines) == 8 + 4 * 9
  assert lines[8][2:] == [f"{x['heads'][0][0]:.3f}" for x in record["settings"]]
  means = [float(line[2]) for line in lines if line[1] == "all"]
  assert np.mean(means) == pytest.approx(whole["entropy"], abs=1e-3)
  status, out, err = run(*script, "--json")
  assert status == 0 and json.loads(out)["settings"] == record["settings"]


@pytest.mark.parametrize(
  ("argv", "says"),
  [
    (("--splits=0",), "--splits: got 0"),
    (("--splits=4,x",), "--splits: got 4,x"),
    (("--splits=65", "--context=64"), "--splits: got 65"),
    (("--lengths=64",), "--lengths with entropy"),
    (("--rows=100000",), "--rows"),
    (("--combine=kvlink",), "combine: got 'kvlink'"),
    (("--combine=picked",), "--combine"),
  ],
)
def test_entropy_that_cannot_be_found(argv, says):
  status, out, err = run("entropy", *argv, "--mesh=seq:1")
  assert (status, out) == (2, "") and says in err
