"""The law of an answer: its tokens are a function of its row alone.

A path is a way to answer that is approximate or keeps a state: an entry of
`PATHS`. A situation is what must change no token: drafts, other rows, chunks
of a prompt, a turn in which another row ended early, an engine's other
requests. Each pair gives the tokens of the row alone or is refused by name.

Models are random, with weights so large that heads look at few tokens and a
wrong key is seen in the next token.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import RingjaxError
from ringjax.infer import speculate
from ringjax.kv import CacheConfig, kind_text
from ringjax.serve import Engine, Request
from tests import checkpoints

LENGTHS, NEW, CHUNK = (41, 9), 20, 16
CONTEXTS = (13, 7, 22, 30)
# Layers before which a head reads the stream of a model with two.
TAPS = (0, 1, 2)


@functools.cache
def model(family="llama3", predicts=False, **more):
  config = checkpoints.config(family) | {"initializer_range": 0.25} | more
  return rj.models.create(config, seed=1, predict_layers=predicts)


def texts(lengths, seed=0, vocab=64):
  """Some of their tokens come again, for those who look things up."""
  draw = np.random.default_rng(seed)
  part = draw.integers(1, vocab, max(lengths)).astype(np.int32)
  other = [draw.integers(1, vocab, n // 3).astype(np.int32) for n in lengths]
  return [
    np.concatenate([head, np.tile(part[: n // 4 + 1], 4)])[:n]
    for n, head in zip(lengths, other, strict=True)
  ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Path:
  """A way to answer.

  Attributes:
    model: makes the model.
    options: makes what `generate` gets beside it.
    refusals: by situation, words of the error that it raises.
    coded: whether what is read in a chunk comes out of a codec, and a prompt
      that is read at once sees its own keys exact.
    evicts: whether tokens go behind each chunk, so that chunks are a setting.
  """

  model: Callable[[], Any] = model
  options: Callable[[], dict[str, Any]] = dict
  refusals: Mapping[str, str] = dataclasses.field(default_factory=dict)
  coded: bool = False
  evicts: bool = False


def _kind(kind, **fields):
  """A path of a kind of cache by its text, or with a policy."""

  def options():
    made = kind
    if isinstance(kind, str):
      made = kind_text.parse(kind)
      if isinstance(made.codec, rj.kv.Calibrated):
        measured = _calibration(made.codec.values.outliers)
        made = made.with_options({"calibration": measured})
    return {"cache_kind": made}

  return Path(options=options, **fields)


def _policy(policy, codec=None, **fields):
  codec = codec and kind_text.parse(codec).codec
  kind = CacheConfig(policy=policy, codec=codec, room=12, page=8)
  refusals = {"crowd": "policy"}
  fields = dict(evicts=not policy.selects, coded=codec is not None) | fields
  return _kind(kind, refusals=refusals, **fields)


def _in_host(policy, codec=None, choice=None, unrotated=False, **fields):
  """A path of pages in host memory, of which chosen ones are copied."""
  codec = codec and kind_text.parse(codec).codec
  kind = CacheConfig(
    policy=policy, codec=codec, unrotated=unrotated, device=8, hot=16, page=8,
    **(choice or {}),
  )  # fmt: skip
  return _kind(kind, refusals={"crowd": "device"}, **fields)


@functools.cache
def _calibration(outliers):
  draw = np.random.default_rng(1).integers(1, 64, (2, 64)).astype(np.int32)
  return rj.infer.calibrate(model(), draw, outliers=outliers)


@functools.cache
def _library():
  return rj.infer.ContextLibrary(model(), prefix=(5, 9, 3))


def _contexts(how, **refusals):
  options = lambda: dict(
    contexts=texts(CONTEXTS, seed=7), combine=how, library=_library()
  )
  return Path(options=options, refusals=refusals)


@functools.cache
def _sparse(predicted):
  """A model whose feedforward neurons are on disk."""
  from ringjax.store.flash.neuron_file import NeuronFile

  relu = model(hidden_act="relu", intermediate_size=61)
  folder = tempfile.mkdtemp(prefix="ringjax-neurons-")
  path = rj.models.write_neurons(relu, folder)
  predictors = None
  if predicted:
    draw = np.random.default_rng(5)
    normal = lambda *shape: draw.normal(size=shape).astype(np.float32)
    layers = {
      n: {
        "down": normal(relu.config.embed, 6),
        "up": normal(6, 61),
        "bias": normal(61) - 14,
      }
      for n in range(len(relu.config.layers))
    }
    digest = NeuronFile(path).model
    predictors = rj.models.NeuronPredictors(digest, 0.0, layers, {})
  return rj.models.sparse_model(
    relu, folder, predictors=predictors, window=5, memory="1MB"
  )


@functools.cache
def _eagle():
  return rj.models.eagle3.with_head(model(), ids=np.arange(0, 64, 3), taps=TAPS)


@functools.cache
def _choosing(kind):
  """A model whose layers choose keys by summaries of them."""
  return rj.train.with_sparse_attention(model(), kind)


@functools.cache
def _integers():
  tokens = np.stack(texts((40, 40), seed=3))
  ranges = rj.infer.activation_ranges(model(), tokens)
  return rj.infer.integer_model(model(), ranges)


_TOGETHER = dict(chunks="whole question in one call")
PATHS: dict[str, Path] = {
  "exact": Path(),
  # Feedforwards.
  "neurons on disk": Path(model=lambda: _sparse(False)),
  "neuron predictors": Path(model=lambda: _sparse(True)),
  "integer products": Path(model=_integers),
  "mixture": Path(model=lambda: model("mixtral")),
  # A layer that predicts further tokens, whose keys are in the cache.
  "predicting layer": Path(model=lambda: model(predicts=True)),
  # A head that reads several layers (EAGLE-3), likewise.
  "eagle head": Path(model=_eagle),
  # Keys that an index chooses.
  "index of keys": Path(model=lambda: model("deepseek_v32")),
  # Keys that summaries in the cache choose.
  "means of blocks": Path(model=lambda: _choosing("moba:block=4,count=3")),
  "compressed keys": Path(
    model=lambda: _choosing(
      "nsa:length=4,stride=2,block=4,count=4,initial=1,local=1,window=5"
    )
  ),
  # Contexts that were read apart.
  "parallel": _contexts("parallel"),
  "ape": _contexts("ape:temperature=0.8,scale=0.9"),
  "select by query": _contexts("select:keep=1,by=query"),
  "select by token": _contexts("select:keep=1,by=token"),
  "select by head": _contexts("select:keep=1,by=head", **_TOGETHER),
  "select by call": _contexts("select:keep=1,by=call", **_TOGETHER),
  # Policies.
  "quest": _policy(rj.kv.Select(budget=0.4)),
  "quest of tokens": _policy(rj.kv.Select(budget=16)),
  "quest, int8": _policy(rj.kv.Select(budget=0.4), codec="int8"),
  "quest, unrotated": _kind(
    CacheConfig(
      policy=rj.kv.Select(budget=0.4), unrotated=True, room=12, page=8
    ),
    refusals={"crowd": "policy"},
  ),
  "quest, index of keys": _policy(
    rj.kv.Select(budget=0.4), model=lambda: model("deepseek_v32")
  ),
  "quest in host memory": _in_host(rj.kv.Select(budget=0.4)),
  "quest in host memory, int8": _in_host(
    rj.kv.Select(budget=16), codec="int8", coded=True
  ),
  "quest in host memory, unrotated": _in_host(
    rj.kv.Select(budget=0.4), unrotated=True
  ),
  "means in host memory": _in_host(
    rj.kv.Select(budget=0.4), choice=dict(landmarks="means", outlier_pages=1)
  ),
  # Hashes are of keys without the mean of the first that left the devices.
  "hashes in host memory": _in_host(
    rj.kv.Select(budget=16),
    choice=dict(landmarks="hashes", hash_bits=2, hash_tables=8, sink_tokens=2),
    evicts=True,
  ),
  # Clusters are of a page's keys, by queries of the row's first tokens.
  "clusters in host memory": _in_host(
    rj.kv.Select(budget=16),
    choice=dict(landmarks="clusters", cluster_tokens=3),
  ),
  # Keys are of a basis of the first that left the devices.
  "keys of low rank": _in_host(
    rj.kv.Select(budget=0.4), choice=dict(rank=6), unrotated=True, evicts=True
  ),
  "index in host memory": _in_host(None, model=lambda: model("deepseek_v32")),
  "sinks": _policy(rj.kv.Sinks(budget=12)),
  "sinks in the cache": _policy(rj.kv.Sinks(budget=12, positions="cache")),
  "keydiff": _policy(rj.kv.KeyDiff(budget=12)),
  "snapkv": _policy(rj.kv.SnapKV(budget=12, window=4)),
  "snapkv by share": _policy(rj.kv.SnapKV(budget=0.4, window=4)),
  "pyramidkv": _policy(rj.kv.PyramidKV(budget=12, window=4)),
  "adakv": _policy(rj.kv.AdaKV(budget=12, window=4)),
  "tova": _policy(rj.kv.Tova(budget=12)),
  "h2o": _policy(rj.kv.HeavyHitters(budget=12)),
  "h2o, half newest": _policy(
    rj.kv.HeavyHitters(budget=12, score="sum", newest=0.5)
  ),
  "expected": _policy(rj.kv.ExpectedAttention(budget=12)),
  "fastgen": _policy(rj.kv.FastGen(punctuation=(1, 5))),
  "fastgen, fixed choices": _policy(
    rj.kv.FastGen(recovered=0.8, budget=0.2, local=0.2, window=8)
  ),
  "knorm": _policy(rj.kv.KeyNorm(budget=12)),
  "lagkv": _policy(rj.kv.LagKV(budget=12)),
  "kvzip": _policy(rj.kv.KVzip(budget=0.5, chunk=16)),
  # Codecs.
  "int8": _kind("int8", coded=True),
  "int4": _kind("int4", coded=True),
  "hadamard3": _kind("hadamard3", coded=True),
  "nuq3": _kind("nuq3", coded=True),
  "nuq3, outliers of pages": _kind(
    "nuq3:outliers=2%,group=8,recent=4,room=12",
    coded=True,
    evicts=True,
    refusals={"crowd": "nuq3|groups|evict"},
  ),
  "kivi2": _kind(
    "kivi2:recent=4,group=8,page=8,room=12",
    coded=True,
    evicts=True,
    refusals={"crowd": "kivi|groups|evict"},
  ),
  "kivi2, residual": _kind(
    "kivi2:residual=8,group=8,page=8,room=12",
    coded=True,
    evicts=True,
    refusals={"crowd": "kivi|groups|evict"},
  ),
  "int2, newest exact": _kind(
    "int2:first=2,recent=6,room=12,page=8",
    coded=True,
    evicts=True,
    refusals={"crowd": "recent|first|evict"},
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Foretold(speculate.Drafter):
  """Drafts what comes, and behind 0, 1, 2 tokens of it what does not."""

  answers: tuple[tuple[int, ...], ...] = ()
  count: int = 3
  adapt: bool = False

  def begin(self, target):
    return _Foretold(self.answers, self.count)


class _Foretold:
  def __init__(self, answers, count):
    self.answers, self.count = answers, count
    self.said, self.rounds = [0] * len(answers), 0

  def draft(self, new, state, most):
    tokens = np.zeros((len(self.answers), self.count), np.int32)
    for row, (fresh, answer) in enumerate(zip(new, self.answers, strict=True)):
      self.said[row] += len(fresh)
      coming = answer[self.said[row] : self.said[row] + self.count]
      tokens[row, : len(coming)] = coming
      # Another token than the one that comes.
      right = (self.rounds + row) % self.count
      tokens[row, right:] ^= 3
    self.rounds += 1
    return speculate.Draft(
      tokens, np.minimum(most, self.count).astype(np.int32)
    )


# ---------------------------------------------------------------------------
# Situations
# ---------------------------------------------------------------------------


@functools.cache
def alone(name: str, chunk: int | None = None) -> list[list[int]]:
  """The answer to each row in a call of its own."""
  path = PATHS[name]
  how = {} if chunk is None else dict(prefill="chunked", chunk=chunk)
  return [_answers(path, [row], **how)[0] for row in texts(LENGTHS)]


def _answers(path, rows, count=NEW, **how):
  new = rj.infer.generate(
    path.model(), rows, max_new_tokens=count, **path.options(), **how
  )
  return [row.tolist() for row in new]


def drafts(name):
  """Right and wrong drafts, of one row."""
  path, want = PATHS[name], alone(name)[:1]
  drafter = Foretold(answers=tuple(map(tuple, want)))
  return _answers(path, texts(LENGTHS)[:1], speculate=drafter), want


def lookup(name):
  """Drafts out of the row's own text, which are shorter where they fail."""
  path, want = PATHS[name], alone(name)[:1]
  found = _answers(
    path, texts(LENGTHS)[:1], speculate="lookup:count=4,adapt=false"
  )
  return found, want


def rows(name):
  """Rows of other lengths in the batch."""
  return _answers(PATHS[name], texts(LENGTHS)), alone(name)


def drafted_rows(name):
  """Drafts for rows of other lengths."""
  want = alone(name)
  drafter = Foretold(answers=tuple(map(tuple, want)))
  return _answers(PATHS[name], texts(LENGTHS), speculate=drafter), want


def own_tree(name):
  """Trees that a layer or head of the model drafts, of rows together."""
  path = PATHS[name]
  drafter = dict(mtp=speculate.PredictDraft, eagle3=speculate.Eagle3)[
    path.model().config.predicts.drafter
  ]
  draft = drafter(widths=(2, 4, 4), beam=2, best=7, adapt=False)
  found = _answers(path, texts(LENGTHS), speculate=draft)
  return found, alone(name)


def chunks(name):
  """A batch of prompts that are read in chunks."""
  path, how = PATHS[name], dict(prefill="chunked", chunk=CHUNK)
  if path.evicts:
    want = alone(name, CHUNK)
  else:
    # Out of a codec in whole chunks as in parts.
    want = alone(name, max(LENGTHS)) if path.coded else alone(name)
  return _answers(path, texts(LENGTHS), **how), want


def turn(name):
  """A second turn, behind one in which some rows ended early."""
  path = PATHS[name]
  first, second = texts(LENGTHS), texts((5, 12), seed=2)
  # What the second row says early; the first may, too.
  stop = [alone(name)[1][4]]

  def talk(which):
    options = dict(path.options())
    if "contexts" in options:
      session = rj.infer.context_session(
        path.model(),
        options.pop("contexts"),
        options.pop("combine"),
        library=options.pop("library"),
        batch=len(which),
        capacity=128,
      )
    else:
      session = rj.infer.Session(path.model(), 192, batch=len(which), **options)
      options = {}
    answers = [
      rj.infer.generate(
        path.model(), [turn[n] for n in which], max_new_tokens=NEW,
        cache=session, stop=stop, **options,
      )
      for turn in (first, second)
    ]  # fmt: skip
    return [row.tolist() for new in answers for row in new]

  together = talk(range(len(first)))
  each = [talk([n]) for n in range(len(first))]
  lengths = [len(first) for first, _ in each]
  assert min(lengths) < max(lengths), "no row ended early"
  return together, [x[n] for n in range(2) for x in each]


def crowd(name):
  """An engine's other requests, of which some share a prefix."""
  path = PATHS[name]
  options = dict(path.options())
  made = Engine(
    path.model(), rows=3, capacity=256, longest=96, page=16, piece=16,
    pieces=2, **options,
  )  # fmt: skip
  prompts = texts(LENGTHS)
  other = [prompts[0][:20], np.concatenate([prompts[0][:33], prompts[1]])]
  handles = [
    made.submit(Request(prompt=p, max_new_tokens=NEW))
    for p in (*other, *prompts, *other)
  ]
  made.run()
  found = [h.result().tokens.tolist() for h in handles[len(other) :]]
  want = alone(name, max(LENGTHS)) if path.coded else alone(name)
  return found[: len(prompts)], want


SITUATIONS = {
  f.__name__.replace("_", " "): f
  for f in (drafts, lookup, rows, drafted_rows, own_tree, chunks, turn, crowd)
}


def applies(name: str, situation: str) -> bool:
  """Whether the pair can be asked for.

  An engine reads no contexts apart, and few models draft by themselves.
  """
  apart = name in ("parallel", "ape") or name.startswith("select by")
  if situation == "own tree" and name not in ("predicting layer", "eagle head"):
    return False
  return not (apart and situation == "crowd")


def check(name: str, situation: str) -> None:
  """The tokens of each row alone, or the error that the path states."""
  run, words = SITUATIONS[situation], PATHS[name].refusals.get(situation)
  if words is not None:
    with pytest.raises(RingjaxError, match=words):
      run(name)
    return
  got, want = run(name)
  assert got == want
