"""Contexts that are read apart, against one forward pass of all of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.data import LinkTokens, arranged
from ringjax.errors import (
  CheckpointFormatError,
  MemoryEstimateError,
  OptionError,
  PromptError,
)
from ringjax.infer import contexts as apart
from tests import checkpoints
from tests.helpers import make_mesh, refused

PREFIX = (5, 9, 3)
SIZES = (13, 7, 22)


@functools.cache
def model(family="llama3", shards=1, axes=None):
  mesh = None
  if axes is not None:
    mesh = rj.make_mesh(*axes)
  elif shards > 1:
    mesh = make_mesh(shards, "auto")
  # Heads that look at few tokens: a wrong one is seen in the logits.
  config = checkpoints.config(family) | {"initializer_range": 0.2}
  return rj.models.create(config, seed=1, mesh=mesh)


@functools.cache
def texts(vocab=64):
  draw = np.random.default_rng(3)
  make = lambda n: draw.integers(1, vocab, n).astype(np.int32)
  return [make(n) for n in SIZES], make(5)


def logits_of(call, contexts, how, question=None, **options):
  """Logits [B, T, V] of the question behind contexts, and the session."""
  question = texts()[1] if question is None else question
  question = np.atleast_2d(question)
  session = rj.infer.context_session(
    call, contexts, how, capacity=4 * question.shape[1] + 8, **options
  )
  logits, session.cache = call(question, cache=session.cache)
  return np.asarray(logits), session


def one_pass(call, tokens, positions, segments, cache=None):
  """Logits of one call in which documents do not see each other."""
  attend = rj.models.ContextParallel(segments=rj.SeparateDocuments())
  # On one device: the reference of all meshes.
  one = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), call)
  made = one(
    tokens[None],
    positions=positions[None],
    segment_ids=segments[None],
    attend=attend,
    cache=cache,
  )
  return np.asarray(made if cache is None else made[0])


def parallel(prefix, contexts, question):
  """Tokens, positions and segments of contexts at the same positions."""
  first = len(prefix)
  parts = [(np.array(prefix, np.int32), np.arange(first), 2)]
  for n, text in enumerate(contexts):
    parts.append((text, first + np.arange(text.size), 3 + n))
  end = first + max(text.size for text in contexts)
  parts.append((question, end + np.arange(question.size), 1))
  join = lambda x: np.concatenate(x).astype(np.int32)
  return (
    join([text for text, _, _ in parts]),
    join([at for _, at, _ in parts]),
    join([np.full(text.size, n) for text, _, n in parts]),
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ("family", "shards"),
  [("llama3", 4),
   *(pytest.param(*each, marks=pytest.mark.long)
     for each in (("llama3", 1), ("gemma2", 2), ("deepseek_v3", 2),
                  ("gpt_oss", 1), ("falcon_rw", 2), ("llama3", 8),
                  ("deepseek_v32", 2)))],
)  # fmt: skip
def test_parallel_is_one_pass(family, shards):
  contexts, question = texts()
  how = apart.Parallel(prefix=PREFIX)
  found, _ = logits_of(model(family, shards), contexts, how)
  want = one_pass(model(family), *parallel(PREFIX, contexts, question))
  want = want[:, -question.size :]
  np.testing.assert_allclose(found, want, atol=2e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("links", [None, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("shards", [1, pytest.param(4, marks=pytest.mark.long)])
def test_kvlink_is_one_pass_in_any_order(order, links, shards):
  contexts, question = texts()
  if links is not None:
    links = LinkTokens(first=40, each=links, documents=3)
  call = model(shards=shards)
  library = rj.infer.ContextLibrary(call, cache_kind="unrotated")
  ready = library.encode(contexts)
  found, session = logits_of(
    call,
    [ready[n] for n in order],
    apart.KVLink(prefix=PREFIX, links=links),
    library=library,
  )
  mine = [contexts[n] for n in order]
  tokens = arranged(mine, question, links, PREFIX, shared=False)
  want = one_pass(model(), *tokens)[:, -question.size :]
  np.testing.assert_allclose(found, want, atol=1e-4, rtol=1e-4)
  # Links and prefix alone are computed.
  each = 0 if links is None else links.each
  assert session.contexts.computed == len(PREFIX) + each * len(order)
  assert session.contexts.encoded == 0


def calibrated(name):
  """A kind of cache by its name, calibrated where it has to be."""
  kind = rj.kv.kind_text.parse(name)
  if not name.startswith("nuq"):
    return kind
  draw = np.random.default_rng(1).integers(1, 64, (2, 64)).astype(np.int32)
  found = rj.infer.calibrate(model(), draw)
  return kind.with_options({"calibration": found})


@pytest.mark.slow
@pytest.mark.parametrize(
  ("kind", "how", "shards"),
  [("int4", "parallel", 1), ("nuq4", "kvlink", 2),
   *(pytest.param(*each, marks=pytest.mark.long)
     for each in (("int4", "ape", 2), ("hadamard3", "select", 1),
                  ("nuq3", "parallel", 4)))],
)  # fmt: skip
def test_codecs_lose_no_more_than_in_one_pass(kind, how, shards):
  contexts, question = texts()
  kind = calibrated(kind)
  plain = "unrotated" if how == "kvlink" else "dense"
  exact, whole = logits_of(model(), contexts, how, cache_kind=plain)
  found, coded = logits_of(model(shards=shards), contexts, how, cache_kind=kind)
  assert coded.contexts.nbytes < 0.4 * whole.contexts.nbytes
  # All contexts and the question as one text, of numbers that are stored.
  text = np.concatenate([*contexts, question])[None]
  one = model()
  cache = rj.kv.SimulatedCache.create(one, kind)
  lost = np.asarray(one(text, cache=cache)[0]) - np.asarray(one(text))
  off = np.linalg.norm(found - exact)
  assert 0 < off < 1.5 * np.linalg.norm(lost[:, -question.size :])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["parallel", "ape", "select"])
@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.long), 4])
def test_one_context_is_read_as_one_text(how, shards):
  (context, *_), question = texts()
  made = {
    "parallel": apart.Parallel(prefix=PREFIX),
    "ape": apart.APE(prefix=PREFIX, temperature=1, scale=1),
    "select": apart.Selection(prefix=PREFIX, keep=1),
  }[how]
  found, _ = logits_of(model(shards=shards), [context], made)
  text = np.concatenate([PREFIX, context, question]).astype(np.int32)
  want = np.asarray(model()(text[None]))[:, -question.size :]
  np.testing.assert_allclose(found, want, atol=1e-4, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("how", ["parallel", "ape", "select:keep=2"])
def test_the_order_of_contexts_does_not_matter(how):
  contexts, _ = texts()
  call = model()
  library = rj.infer.ContextLibrary(call, prefix=PREFIX)
  found = [
    logits_of(call, [contexts[n] for n in order], how, library=library)[0]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0))
  ]
  np.testing.assert_array_equal(found[0], found[1])
  np.testing.assert_array_equal(found[0], found[2])
  assert library.counters.encoded == len(contexts)


@pytest.mark.long
def test_to_select_every_context_is_to_read_them_all():
  contexts, _ = texts()
  library = rj.infer.ContextLibrary(model(), prefix=PREFIX)
  found, want = (
    logits_of(model(), contexts, how, library=library)[0]
    for how in (f"select:keep={len(contexts)}", "parallel")
  )
  np.testing.assert_allclose(found, want, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.long), 4])
def test_recomputing_all_is_one_text(shards):
  contexts, question = texts()
  call = model(shards=shards)
  how = apart.Recompute(prefix=PREFIX, fraction=1)
  found, session = logits_of(call, contexts, how)
  text = np.concatenate([PREFIX, *contexts, question]).astype(np.int32)
  want = np.asarray(model()(text[None]))[:, -question.size :]
  np.testing.assert_allclose(found, want, atol=1e-4, rtol=1e-4)
  assert session.contexts.computed == sum(SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unrotated", "int8:unrotated=true"])
def test_recomputing_more_is_nearer_to_one_text(kind):
  contexts, question = texts()
  text = np.concatenate([PREFIX, *contexts, question]).astype(np.int32)
  want = np.asarray(model()(text[None]))[:, -question.size :]
  kind = rj.kv.kind_text.parse(kind)
  off = []
  for fraction in (0, 0.3, 0.6, 1):
    how = apart.Recompute(prefix=PREFIX, fraction=fraction)
    found, session = logits_of(model(), contexts, how, cache_kind=kind)
    assert session.contexts.computed == np.ceil(fraction * sum(SIZES))
    off.append(np.abs(found - want).mean())
  assert off[0] > off[1] > off[2] > off[3]


@pytest.mark.slow
def test_rows_have_contexts_of_their_own():
  contexts, question = texts()
  call = model()
  rows = [contexts[:1], contexts, contexts[1:]]
  library = rj.infer.ContextLibrary(call, prefix=PREFIX, rows=2)
  for how in ("parallel", "ape", "select:keep=1,by=query"):
    together, _ = logits_of(
      call, rows, how, np.stack([question] * 3), library=library
    )
    for row, alone in enumerate(rows):
      want, _ = logits_of(call, alone, how, library=library)
      np.testing.assert_allclose(together[row], want[0], atol=1e-4, rtol=1e-4)
  # Each document was read once.
  assert library.counters.encoded == 3
  assert library.counters.tokens == sum(SIZES) + len(PREFIX)


@pytest.mark.long
@pytest.mark.parametrize(
  "how",
  ["select",
   *(pytest.param(x, marks=pytest.mark.long) for x in ("ape", "kvlink"))],
)  # fmt: skip
def test_a_mesh_of_data_and_sequence(how):
  contexts, question = texts()
  axes = ((2, 2, 2), ("data", "seq", "model"))
  kind = "unrotated" if how == "kvlink" else "dense"
  rows = [contexts[:2], contexts[1:]]
  questions = np.stack([question, question[::-1]])
  found, want = (
    logits_of(call, rows, how, questions, cache_kind=kind)[0]
    for call in (model(axes=axes), model())
  )
  np.testing.assert_allclose(found, want, atol=1e-4, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
  "how",
  ["recompute", "kvlink",
   *(pytest.param(x, marks=pytest.mark.long)
     for x in ("full", "parallel", "ape", "select"))],
)  # fmt: skip
def test_generate_answers_behind_contexts(how):
  contexts, question = texts()
  reports = []
  ask = functools.partial(
    rj.infer.generate,
    contexts=contexts,
    combine=how,
    max_new_tokens=6,
    report=reports.append,
  )
  new = ask(model(), [question])
  sharded = ask(model(shards=4), [question])
  np.testing.assert_array_equal(new[0], sharded[0])
  done = reports[0].contexts
  if how == "full":
    text = np.concatenate([*contexts, question])
    want = rj.infer.generate(model(), [text], max_new_tokens=6)
    np.testing.assert_array_equal(new[0], want[0])
  else:
    assert done.tokens == done.encoded == sum(SIZES)
    assert done.combine.name == how


@pytest.mark.long
def test_several_questions_to_the_same_contexts():
  contexts, question = texts()
  session = rj.infer.context_session(
    model(), contexts, apart.APE(prefix=PREFIX), capacity=64
  )
  start = session.cache.snapshot()
  ask = functools.partial(
    rj.infer.generate, model(), max_new_tokens=4, cache=session
  )
  first = ask([question])[0].tolist()
  # A second turn goes on; the snapshot goes back to before the first.
  ask([question[::-1]])
  session.cache = session.cache.restore(start)
  assert ask([question])[0].tolist() == first


@pytest.mark.parametrize("tier", ["host", "disk", "file"])
def test_blocks_come_back_with_their_bytes(tier, tmp_path):
  contexts, _ = texts()
  make = dict(prefix=PREFIX, cache_kind="int4")
  kept = {
    "host": dict(host=1 << 24),
    "disk": dict(disk=(tmp_path, 1 << 24)),
    "file": None,
  }[tier]
  store = None if kept is None else rj.store.Store(**kept)
  library = rj.infer.ContextLibrary(model(), store=store, **make)
  found = library.encode(contexts)
  if store is None:
    other = rj.infer.ContextLibrary(model(), **make)
    for n, context in enumerate(found):
      context.save(tmp_path / f"{n}.context")
      other.load(tmp_path / f"{n}.context")
  else:
    if tier == "disk":
      store.close()
      store = rj.store.Store(**kept)
    other = rj.infer.ContextLibrary(model(), store=store, **make)
  again = other.encode(contexts)
  assert other.counters.encoded == other.counters.tokens == 0
  for a, b in zip(found, again, strict=True):
    assert a.digest == b.digest and a.nbytes == b.nbytes
    pair = [jax.tree.leaves((c.tokens, c.blocks[:2])) for c in (a, b)]
    for x, y in zip(*pair, strict=True):
      np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_any_subset_of_documents_is_there():
  draw = np.random.default_rng(0)
  library = rj.infer.ContextLibrary(model(), rows=8)
  documents = [draw.integers(1, 64, draw.integers(4, 30)) for _ in range(24)]
  library.encode(documents)
  for _ in range(5):
    some = draw.choice(24, 4, replace=False)
    reports = []
    rj.infer.generate(
      model(),
      [[1, 2, 3]],
      contexts=[documents[n] for n in some],
      library=library,
      max_new_tokens=1,
      report=reports.append,
    )
    assert reports[0].contexts.encoded == 0
  assert library.counters.encoded == 24
  assert library.counters.reused == 20


@pytest.mark.long
def test_what_is_refused_before_anything_is_computed(tmp_path):
  contexts, question = texts()
  call, encoded = model(), []
  library = rj.infer.ContextLibrary(call)
  ask = functools.partial(rj.infer.generate, call, [question], max_new_tokens=2)
  with_contexts = functools.partial(ask, contexts=contexts)
  for kind, options, words in (
    (PromptError, dict(contexts=[]), ("contexts", "at least one")),
    (PromptError, dict(contexts=[[3], []]), ("context 1", "without tokens")),
    (PromptError, dict(contexts=[[3, 9999]]), ("9999",)),
    (PromptError, dict(contexts="text"), ("str",)),
    (OptionError, dict(combine="most"), ("most", "parallel")),
    (OptionError, dict(combine="ape:heat=1"), ("heat", "temperature")),
    (OptionError, dict(combine="ape:scale=0"), ("scale", "above 0")),
    (OptionError, dict(combine="kvlink", cache_kind="dense"), ("unrotated",)),
    (OptionError, dict(cache_kind="snapkv"), ("policy",)),
    (OptionError, dict(cache_kind="kivi4"), ("policy",)),
    (OptionError, dict(keep="last"), ("keep", "combine='full'")),
    (OptionError, dict(library=library, cache_kind="int8"), ("library",)),
  ):
    refused(kind, lambda options=options: with_contexts(**options), *words)
  refused(OptionError, lambda: ask(combine="ape"), "without contexts")
  links = LinkTokens(first=40, each=2, documents=2)
  how = apart.KVLink(links=links)
  refused(PromptError, lambda: with_contexts(combine=how), "slots")
  far = apart.KVLink(links=LinkTokens(first=9000, each=2, documents=9))
  refused(OptionError, lambda: with_contexts(combine=far), "with_more_tokens")
  # A block of another model, kind, or prefix.
  other = rj.models.create(checkpoints.config("llama3"), seed=2)
  encoded = rj.infer.ContextLibrary(other).encode(contexts[:1])
  refused(OptionError, lambda: ask(contexts=encoded), "of model")
  encoded = rj.infer.ContextLibrary(call, cache_kind="int8").encode(
    contexts[:1]
  )
  refused(OptionError, lambda: ask(contexts=encoded), "cache kind")
  encoded = rj.infer.ContextLibrary(call, prefix=(3,)).encode(contexts[:1])
  refused(
    OptionError, lambda: ask(contexts=[*encoded, contexts[1]], library=library),
    "prefix",
  )  # fmt: skip
  path = tmp_path / "a.context"
  encoded[0].save(path)
  path.write_bytes(path.read_bytes()[:-1])
  refused(CheckpointFormatError, lambda: library.load(path), "a.context")
  recurrent = model("qwen3_next")
  refused(
    OptionError,
    lambda: rj.infer.generate(
      recurrent, [question], contexts=contexts, max_new_tokens=1
    ),
    "recurrent",
  )
  assert library.counters.encoded == 0


def test_contexts_beyond_memory_are_refused(monkeypatch):
  contexts, question = texts()
  at = "ringjax.infer.contexts.behind_contexts.free_on"
  monkeypatch.setattr(at, lambda mesh: (1000, 1))
  library = rj.infer.ContextLibrary(model())
  refused(
    MemoryEstimateError,
    lambda: rj.infer.generate(
      model(), [question], contexts=contexts, library=library, max_new_tokens=1
    ),
    "contexts",
    "int4",
  )
  assert library.counters.encoded == 0
