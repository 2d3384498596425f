"""An engine of several processes, here of several threads with an engine each.

What processes add, collectives and signals, is in test_engine_processes.py.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Bytes
from ringjax.errors import OptionError, PeerError, PromptError
from ringjax.parallel.door import shut
from ringjax.parallel.peers import Peers
from ringjax.serve import (
  Engine,
  EngineGroup,
  Request,
  RowSampling,
  text_requests,
)
from ringjax.serve.api.grammar import GrammarCompiler
from ringjax.serve.hosts import engine_facts
from tests.serve.conftest import BYTES_MODEL

# Threads that hang fail a test.
PATIENCE_S = 240


@pytest.fixture(scope="module")
def model():
  return rj.models.create(BYTES_MODEL, seed=0)


def engine(model, **options) -> Engine:
  """A small one, which has to preempt rows."""
  settings = dict(
    rows=4, capacity=128, longest=96, page=16, piece=16, pieces=2,
    tokenizer=Bytes(),
  )  # fmt: skip
  return Engine(model, **settings | options)


class Replicas:
  """Groups of some engines, each in a thread that follows the first.

  Attributes:
    groups: Groups by rank.
    errors: Error of each `follow`, None where it returned.
    failures: Errors that `on_failure` got, by rank.
  """

  def __init__(
    self,
    engines: list[Engine],
    *,
    peers: list[Peers] | None = None,
    **options: Any,
  ):
    self.errors: list[Exception | None] = [None] * len(engines)
    self.failures: list[list[PeerError]] = [[] for _ in engines]
    self.groups: list[Any] = [None] * len(engines)
    if peers is None:
      peers = Peers.in_threads(len(engines), timeout_s=60.0)
    joined = [threading.Event() for _ in engines]

    def join(rank: int) -> None:
      try:
        self.groups[rank] = EngineGroup(
          engines[rank],
          peers=peers[rank],
          on_failure=self.failures[rank].append,
          **options,
        )
        joined[rank].set()
        if rank:
          self.groups[rank].follow()
      except (PeerError, OptionError) as error:
        self.errors[rank] = error
      finally:
        joined[rank].set()

    self.threads = [
      threading.Thread(target=join, args=(rank,), daemon=True)
      for rank in range(len(engines))
    ]
    for thread in self.threads:
      thread.start()
    for event in joined:
      assert event.wait(PATIENCE_S)

  def ended(self) -> list[Exception | None]:
    """Errors of all once they have ended."""
    for thread in self.threads:
      thread.join(PATIENCE_S)
      assert not thread.is_alive()
    return self.errors


class Network:
  """Connections of rank 1 to rank 0, which delay bytes and may drop them.

  Attributes:
    drops: Whether all bytes are dropped, as of a cable that is cut: neither
      side sees an end of the connection.
  """

  def __init__(self) -> None:
    self.drops = False
    self._target = 0
    self._server = socket.create_server(("127.0.0.1", 0))
    self._sockets = [self._server]
    self._threads: list[threading.Thread] = []
    self._run(self._accept)

  def _run(self, work: Callable[..., None], *args: Any) -> None:
    thread = threading.Thread(target=work, args=args, daemon=True)
    self._threads.append(thread)
    thread.start()

  def _accept(self) -> None:
    with contextlib.suppress(OSError):
      while True:
        accepted, _ = self._server.accept()
        connected = socket.create_connection(("127.0.0.1", self._target))
        self._sockets += [accepted, connected]
        self._run(self._forward, accepted, connected)
        self._run(self._forward, connected, accepted)

  def _forward(self, source: socket.socket, target: socket.socket) -> None:
    delays = random.Random(len(self._threads))
    with contextlib.suppress(OSError):
      while data := source.recv(1 << 12):
        if delays.random() < 0.1:
          # As long as a packet that is sent again takes.
          time.sleep(delays.uniform(0, 0.05))
        if not self.drops:
          target.sendall(data)
    if not self.drops:
      shut(target)

  def peers(self, timeout_s: float) -> list[Peers]:
    """Two ranks that meet over this network."""
    cards, all_here = ["", ""], threading.Barrier(2)
    groups: list[Any] = [None, None]

    def join(rank: int) -> None:
      def exchange(card: str) -> list[str]:
        fields = json.loads(card)
        if not rank:
          self._target = fields["port"]
          fields["port"] = self._server.getsockname()[1]
        cards[rank] = json.dumps(fields)
        all_here.wait(PATIENCE_S)
        return cards

      groups[rank] = Peers.meet(rank, 2, exchange, timeout_s=timeout_s)

    threads = [threading.Thread(target=join, args=(r,)) for r in range(2)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(PATIENCE_S)
    return groups

  def close(self) -> None:
    for link in self._sockets:
      shut(link)
    for thread in self._threads:
      thread.join(PATIENCE_S)


@contextlib.contextmanager
def replicas(engines: list[Engine], **options: Any) -> Iterator[Replicas]:
  group = Replicas(engines, **options)
  try:
    yield group
  finally:
    if group.groups[0] is not None:
      group.groups[0].close()


def prompts(count: int) -> list[np.ndarray]:
  """Prompts of unequal lengths, of which many share a prefix."""
  rng = np.random.default_rng(count)
  common = rng.integers(0, 256, 40).astype(np.int32)
  ends = [rng.integers(0, 256, rng.integers(1, 20)) for _ in range(count)]
  return [
    np.concatenate([common[: (0, 17, 40)[n % 3]], ends[n]]).astype(np.int32)
    for n in range(count)
  ]


def requests(count: int) -> list[Request]:
  return [
    Request(
      prompt=prompt,
      max_new_tokens=5 + 7 * n % 29,
      sampling=RowSampling(
        temperature=0.8 * (n % 2),
        seed=n,
        repetition_penalty=1.0 + 0.2 * (n % 3),
      ),
      logprobs=2 if n % 4 == 1 else None,
      n=2 if n % 5 == 4 else 1,
      stop="e" if n % 4 == 2 else None,
    )
    for n, prompt in enumerate(prompts(count))
  ]


def as_lists(results, adapts: bool = False) -> list[Any]:
  """Answers; without log-probabilities where drafts may pause."""
  return [
    [
      (a.tokens, a.text, a.finish, () if adapts else a.logprobs)
      for a in result.answers
    ]
    for result in results
  ]


@pytest.mark.one_case
@pytest.mark.parametrize(
  "options",
  [
    dict(preempt="swap", cache_kind="int8"),
    dict(layer_parts=2, share="answers"),
    dict(speculate="lookup:count=3", preempt="auto"),
  ],
  ids=str,
)
def test_answers_are_those_of_one_engine(model, options):
  submitted = requests(9)
  beams = Request(prompt=prompts(1)[0], max_new_tokens=6, beams=3, n=2)
  mask = GrammarCompiler(Bytes(), model.config.vocab).mask(None, "[ab]{4,9}", 1)
  masked = Request(prompt=[65, 66, 67], max_new_tokens=12, mask=mask)
  submitted += [beams, masked]
  with engine(model, **options) as one:
    handles = [one.submit(request) for request in submitted]
    one.run()
    expected = as_lists((h.result() for h in handles), "speculate" in options)
    counters = one.counters
  engines = [engine(model, **options) for _ in range(2)]
  with replicas(engines) as group:
    leader = group.groups[0]
    handles = [leader.submit(request) for request in submitted]
    dropped = leader.submit(Request(prompt=prompts(2)[1], max_new_tokens=50))
    late = leader.submit(
      Request(prompt=[1, 2, 3], max_new_tokens=50, deadline=1e-3)
    )
    next(iter(dropped))
    dropped.cancel()
    results = [handle.result() for handle in handles]
    assert as_lists(results, "speculate" in options) == expected
    assert (
      dropped.answers[0].finish == "cancelled" and dropped.answers[0].tokens
    )
    assert late.result().finish == "deadline"
    check_texts(leader, engines[0])
    assert leader.missing == "" and leader.open
    figures = {figure.name: figure.value for figure in leader.figures()}
    assert figures["engine_processes"] == 2
  assert group.ended() == [None] * 2
  assert not any(group.failures)
  # Reasons of pauses are those of each process's clock.
  counts, follower_counts = (
    {
      name: count
      for name, count in vars(replica.counters).items()
      if not name.startswith("paused")
    }
    for replica in engines
  )
  # Deadlines are cancellations in process 1.
  assert follower_counts | {"expired": 1} == counts
  assert counts["preemptions"] and counters.preemptions
  if "speculate" in options:
    # On a loaded machine drafts may not pay from the first step on.
    assert counts["drafted_steps"] or any(
      count
      for name, count in vars(engines[0].counters).items()
      if name.startswith("paused")
    )
  elif "share" not in options:
    assert counts["swapped"]


def check_texts(leader: EngineGroup, reference: Engine) -> None:
  """Texts between the steps of answers have the numbers of `TextScorer`."""
  texts = [prompt.tolist() for prompt in prompts(5)]
  request = Request(prompt=prompts(3)[2], max_new_tokens=40)
  handle = leader.submit(request)
  scorer = rj.infer.TextScorer(reference.base)
  seen: list[int] = []
  scores = leader.texts.scores(texts, top=2, on_batch=seen.append)
  for score, expected in zip(scores, scorer.scores(texts, top=2), strict=True):
    for values, right in zip(score, expected, strict=True):
      np.testing.assert_allclose(values, right, atol=1e-5)
  assert seen == [5]
  np.testing.assert_allclose(
    leader.texts.embeddings(texts, pooling="mean"),
    scorer.embeddings(texts, pooling="mean"),
    atol=1e-5,
  )
  with pytest.raises(OptionError, match="adapter"):
    leader.texts.scores(texts, adapter="none")
  with pytest.raises(PromptError):
    leader.texts.embeddings([[]])
  # A text that the engine refuses is refused in all processes.
  with pytest.raises(PromptError, match="context"):
    leader.texts.embeddings([[1] * (reference.base.config.max_positions + 1)])
  assert handle.result().finish == "length"


def wait_for(condition: Callable[[], bool]) -> None:
  end = time.monotonic() + PATIENCE_S
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.01)


def stored(model, stores: list[Any], submitted: list[Request]) -> Any:
  """Answers of a group with a store each, and tokens that came from them."""
  engines = [engine(model, store=store) for store in stores]
  with replicas(engines) as group:
    leader = group.groups[0]
    # One after another: each finds what those before it left.
    results = [leader.submit(request).result() for request in submitted]
    # Written before the end: a process that is killed leaves them, too.
    wait_for(lambda: all(x.disk.nbytes or x.counters.put for x in stores))
  assert group.ended() == [None] * len(stores)
  counts = {replica.counters.stored_tokens for replica in engines}
  assert len(counts) == 1
  return as_lists(results), counts.pop()


@pytest.mark.long
def test_prefixes_count_as_stored_where_all_processes_have_them(
  model, tmp_path
):
  """Also after a restart, and where one has lost some."""
  submitted = requests(6)
  with engine(model) as one:
    handles = [one.submit(request) for request in submitted]
    one.run()
    expected = as_lists(handle.result() for handle in handles)
  found = []
  for _ in range(3):
    with contextlib.ExitStack() as stack:
      stores = [
        stack.enter_context(rj.store.Store(disk=(tmp_path / name, 1 << 24)))
        for name in ("0", "1")
      ]
      answers, tokens = stored(model, stores, submitted)
      assert answers == expected
      found.append(tokens)
      assert not any(store.counters.errors for store in stores)
    if len(found) == 2:
      blocks = sorted(tmp_path.glob("1/*/*.kv"))
      for path in blocks[::2]:
        path.unlink()
  first, again, partly = found
  assert again > first and again > partly


def test_a_process_that_is_told_to_end_ends_all(model):
  """After the open requests; further ones are refused."""
  with replicas([engine(model) for _ in range(2)]) as group:
    leader = group.groups[0]
    handle = leader.submit(Request(prompt=[5, 6], max_new_tokens=60))
    group.groups[1].leave()
    end = time.monotonic() + PATIENCE_S
    while leader.open:
      assert time.monotonic() < end
      time.sleep(0.01)
    with pytest.raises(OptionError, match="ending|closed"):
      leader.submit(Request(prompt=[5], max_new_tokens=5))
    assert handle.result().finish == "length"
    assert group.ended() == [None] * 2
  # In process 0, without a request.
  with replicas([engine(model) for _ in range(2)]) as group:
    group.groups[0].leave()
    assert group.ended() == [None] * 2


def test_texts_of_several_passes_end_before_the_group(model, monkeypatch):
  """A process asks to end after the first of them."""
  monkeypatch.setattr(text_requests, "_PASS_TEXTS", 1)
  texts = [prompt.tolist() for prompt in prompts(3)]
  with replicas([engine(model) for _ in range(2)]) as group:
    leader = group.groups[0]

    def on_batch(count: int) -> None:
      if count == 1:
        group.groups[1].leave()
        end = time.monotonic() + PATIENCE_S
        while leader.open:
          assert time.monotonic() < end
          time.sleep(0.01)
        # The thread that drives has seen it.
        time.sleep(0.5)

    embeddings = leader.texts.embeddings(texts, on_batch=on_batch)
    with pytest.raises(OptionError, match="ending|closed"):
      leader.texts.embeddings(texts)
    assert group.ended() == [None] * 2
  scorer = rj.infer.TextScorer(model)
  np.testing.assert_allclose(embeddings, scorer.embeddings(texts), atol=1e-5)


@pytest.mark.parametrize("pooling", ["", "last"])
def test_numbers_of_another_shape_are_not_split(pooling):
  text_pass = text_requests.TextPass(
    texts=(np.array([1, 2], np.int32),), pooling=pooling
  )
  for shape in ((), (1,), (2, 1), (1, 1, 1)):
    with pytest.raises(ValueError, match="numbers of texts"):
      text_pass.split(np.zeros(shape, np.float32))
  assert len(text_pass.split(np.zeros((1, 1), np.float32))) == 1


def test_options_that_are_objects_are_compared_by_their_contents(model):
  codecs = [
    rj.kv.Codec(keys=rj.kv.Integers(bits=8), values=rj.kv.Integers(bits=bits))
    for bits in (8, 4, 8)
  ]
  models = [model, rj.models.create(BYTES_MODEL, seed=1), model]
  for options in (
    [rj.kv.CacheConfig(codec=codec) for codec in codecs],
    [rj.infer.speculate.DraftModel(model=draft) for draft in models],
    [3, 4, 3],
  ):
    first, other, again = map(engine_facts._option, options)
    assert first == again != other


@pytest.mark.long
def test_a_replica_that_differs_ends_all_requests(model, monkeypatch):
  """The tokens of another model are noticed before any is handed out."""
  second_model = rj.models.create(BYTES_MODEL, seed=1)
  different = Replicas([engine(model), engine(second_model)])
  assert all("replicated weights" in str(error) for error in different.ended())
  # As if the weights that differ were sharded over the processes.
  monkeypatch.setattr(engine_facts, "_replicated", lambda model: "")
  with replicas([engine(model), engine(second_model)]) as group:
    handle = group.groups[0].submit(Request(prompt=[5, 6], max_new_tokens=50))
    with pytest.raises(PeerError, match="rank 1 differs from rank 0"):
      handle.result()
    assert not handle.answers[0].tokens
    assert handle.answers[0].finish == "error"
    with pytest.raises(PeerError, match="start them again"):
      group.groups[0].submit(Request(prompt=[5], max_new_tokens=5))
    assert "rank 1" in group.groups[0].missing
    (error,) = group.failures[0]
    assert error.rank == 1
  assert isinstance(group.ended()[1], PeerError)


def test_a_lost_process_ends_all_requests(model, monkeypatch):
  """Also where the engine hangs in a call, as in a collective."""
  engines = [engine(model) for _ in range(3)]
  hangs, hanging = threading.Event(), threading.Event()
  with replicas(engines) as group:
    leader = group.groups[0]
    assert leader.submit(Request(prompt=[5], max_new_tokens=3)).result()
    read = engines[0]._read

    def hang(flight: object) -> None:
      hanging.set()
      hangs.wait(PATIENCE_S)
      read(flight)

    monkeypatch.setattr(engines[0], "_read", hang)
    handle = leader.submit(Request(prompt=[5, 6], max_new_tokens=50))
    assert hanging.wait(PATIENCE_S)
    waiting: list[object] = []

    def submit() -> None:
      try:
        leader.submit(Request(prompt=[7], max_new_tokens=5)).result()
      except PeerError as error:
        waiting.append(error)

    thread = threading.Thread(target=submit, daemon=True)
    thread.start()
    group.groups[2].peers.abandon(ValueError("no memory"))
    with pytest.raises(PeerError, match="rank 2 failed: ValueError: no memory"):
      handle.result()
    thread.join(PATIENCE_S)
    assert waiting
    # What the hanging step brings now comes too late.
    count = len(handle.answers[0].tokens)
    hangs.set()
    time.sleep(0.2)
    assert len(handle.answers[0].tokens) == count
    assert [error.rank for error in group.failures[1]] == [2]
  assert isinstance(group.ended()[1], PeerError)


@pytest.mark.long
def test_a_network_that_delays_and_is_cut(model):
  """Delays change no token; a cut ends all requests, on both of its sides."""
  submitted = requests(3)
  with engine(model) as alone:
    handles = [alone.submit(request) for request in submitted]
    alone.run()
    expected = as_lists(handle.result() for handle in handles)
  network = Network()
  engines = [engine(model) for _ in range(2)]
  with (
    contextlib.closing(network),
    replicas(engines, peers=network.peers(4.0)) as group,
  ):
    leader = group.groups[0]
    handles = [leader.submit(request) for request in submitted]
    assert as_lists(handle.result() for handle in handles) == expected
    handle = leader.submit(Request(prompt=[5, 6], max_new_tokens=80))
    next(iter(handle))
    network.drops = True
    with pytest.raises(PeerError, match="rank 1 has said nothing for 4 s"):
      handle.result()
    (error,) = group.ended()[1:]
    assert isinstance(error, PeerError) and error.rank == 0
    tokens = handle.answers[0].tokens
    assert 0 < len(tokens) < 80 and handle.answers[0].finish == "error"


@pytest.mark.long
def test_an_error_of_a_step_is_that_of_all(model, monkeypatch):
  engines = [engine(model) for _ in range(2)]
  with replicas(engines) as group:

    def fail(plan: object) -> None:
      raise MemoryError("out of pages")

    monkeypatch.setattr(engines[1], "_run", fail)
    handle = group.groups[0].submit(Request(prompt=[5, 6], max_new_tokens=50))
    with pytest.raises(PeerError, match="rank 1 failed: MemoryError"):
      handle.result()
  assert isinstance(group.ended()[1], Exception)


def test_what_is_refused(model):
  engines = [engine(model) for _ in range(2)]
  with replicas(engines) as group:
    leader, follower = group.groups[0], engines[1]
    one = Request(prompt=[5], max_new_tokens=3)
    with pytest.raises(OptionError, match="a function"):
      leader.submit(
        Request(prompt=[5], max_new_tokens=3, mask=lambda tokens: None)
      )
    with pytest.raises(PromptError, match="a row at most"):
      leader.submit(Request(prompt=[5], max_new_tokens=500))
    with pytest.raises(PromptError):
      leader.submit(Request(prompt=[999], max_new_tokens=5))
    with pytest.raises(OptionError, match="process 1"):
      group.groups[1].submit(one)
    with pytest.raises(OptionError, match="follow in process 0"):
      leader.follow()
    for call in (
      lambda: engines[0].submit(one),
      engines[0].step,
      engines[0].warm_up,
      engines[0].start,
      engines[0].close,
      follower.step,
    ):
      with pytest.raises(OptionError, match="EngineGroup"):
        call()
    with (
      pytest.raises(OptionError, match="EngineGroup"),
      engines[0].between_steps(),
    ):
      pass
    with pytest.raises(OptionError, match="EngineGroup"):
      engines[0].texts.scores([[5, 6]])
    with pytest.raises(OptionError, match="process 1"):
      group.groups[1].texts.scores([[5, 6]])
    # None of these calls had an effect.
    assert leader.submit(one).result().finish == "length"
  assert group.ended() == [None, None]
  with pytest.raises(OptionError, match="closed group"):
    leader.submit(one)
  for name, options in (
    ("option rows", dict(rows=2)),
    ("store", dict(store=rj.store.Store(host=1 << 20))),
  ):
    unequal = Replicas([engine(model), engine(model, **options)])
    assert all(
      name in str(error) and "process 1" in str(error)
      for error in unequal.ended()
    )
  part = dict(store=rj.store.Store(host=1 << 20), important=0.5)
  with pytest.raises(OptionError, match="whole prefixes"):
    EngineGroup(engine(model, **part))
