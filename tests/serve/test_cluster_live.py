"""Requests that several engines serve: the tokens are those of one engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
import time

import numpy as np
import pytest

import ringjax as rj
from ringjax import transfer
from ringjax.data import Bytes
from ringjax.errors import InputTypeError, OptionError, PeerError
from ringjax.parallel.links.connection import as_json
from ringjax.serve import Engine, Request, RowSampling, cluster
from ringjax.serve.cluster import block_keys, short_key
from ringjax.serve.cluster.worker import check_engine
from ringjax.serve.request_fields import request_fields, request_of
from ringjax.serve.traces import TraceRequest, first_prefixes
from ringjax.transfer.wire import PullConnection
from tests.helpers import SMALL, refused, swept, until
from tests.serve.test_engine_group import Replicas
from tests.serve.test_http import Wire, choices, complete, joined
from tests.serve.test_http import ask as get

KEY = bytes(range(32))
MODEL = SMALL | {"vocab_size": 262, "max_position_embeddings": 256}
WAIT_S = 60


@pytest.fixture(scope="module")
def model():
  return rj.models.create(MODEL, seed=0)


def engine(model, *, page=16, rows=4, capacity=512, **options):
  # Engines of one size share their programs.
  settings = dict(longest=160, piece=16, pieces=2, tokenizer=Bytes())
  settings |= dict(shared_reads="never")
  settings |= dict(store=rj.store.Store(host=1 << 24))
  return Engine(
    model, page=page, rows=rows, capacity=capacity, **settings | options
  )


def requests(count, seed=0, **options):
  """Unequal prompts of which some begin alike, with settings of all kinds."""
  rng = np.random.default_rng(seed)
  common, made = rng.integers(0, 256, 40).astype(np.int32), []
  for n in range(count):
    own = rng.integers(0, 256, rng.integers(1, 60)).astype(np.int32)
    prompt = np.concatenate([common[: rng.choice([0, 17, 40])], own])
    how = RowSampling()
    if n % 2:
      how = RowSampling(
        temperature=1.0,
        seed=int(rng.integers(0, 2**40)),
        top_k=20 if n % 4 == 1 else None,
        repetition_penalty=1.3 if n % 4 == 1 else None,
      )
    more = dict(n=2) if n % 5 == 4 else {}
    made.append(
      Request(
        prompt=prompt,
        max_new_tokens=int(rng.integers(1, 30)),
        sampling=how,
        **more | options,
      )
    )
  return made


@pytest.fixture(scope="module")
def alone(model):
  """Tokens of each answer of a request by one engine."""
  with engine(model) as made:
    made.start()

    def answers(request):
      return [
        (x.tokens, x.text, x.finish)
        for x in made.submit(request).result().answers
      ]

    yield answers


def test_stops_come_through_whole():
  for stop in (
    rj.infer.Stop(ids=(3,), strings=("a", "<|x|>"), included=True),
    rj.infer.Stop(special=True),
  ):
    asked = Request(prompt=[1, 2], max_new_tokens=3, stop=stop)
    data = as_json(request_fields(asked, np.array([1, 2], np.int32)))
    assert request_of(json.loads(data), None).stop == stop


def found(handle):
  return [(x.tokens, x.text, x.finish) for x in handle.result().answers]


class Live:
  """A router and instances in one process."""

  def __init__(
    self, model, *roles, policy=None, planner=None, silence_s=60,
    stream_tokens=0, devices=False, **options,
  ):  # fmt: skip
    self.model, self.options, self.now = model, options, 0.0
    self.devices = devices
    self.router = cluster.ClusterRouter(
      key=KEY,
      vocab=262,
      longest=options.get("longest", 160),
      tokenizer=Bytes(),
      policy=policy,
      roles=planner,
      stream_tokens=stream_tokens,
      silence_s=silence_s,
      patience_s=WAIT_S,
      beat_s=0.05,
      clock=lambda: time.monotonic() + self.now,
    )
    self.workers, self.engines, self.groups = {}, [], []
    for n, role in enumerate(roles):
      self.join(f"{role}{n}", role)

  def join(self, name, role="both", *, lease_s=60, more=None, **options):
    made = engine(self.model, **self.options | options)
    server = transfer.DeviceServer() if self.devices else None
    worker = cluster.ClusterWorker(
      made,
      key=KEY,
      router=self.router.address,
      role=role,
      name=name,
      lease_s=lease_s,
      beat_s=0.05,
      **dict(devices=server) | (more or {}),
    )
    self.engines.append(made)
    self.workers[name] = worker.start()
    assert worker.joined.wait(WAIT_S), worker.refused
    return worker

  def join_group(self, name):
    """An instance of two processes, which are threads."""
    options = self.options | {"store": None}
    engines = [engine(self.model, **options) for _ in range(2)]
    codec = cluster.page_codec(engines[0])
    replicas = Replicas(engines)
    worker = cluster.GroupWorker(
      replicas.groups[0],
      codec,
      key=KEY,
      router=self.router.address,
      name=name,
      beat_s=0.05,
    )
    self.groups.append(replicas)
    self.workers[name] = worker.start()
    assert worker.joined.wait(WAIT_S), worker.refused
    return replicas

  def kill(self, name):
    """As if its process were gone: sockets close, and nothing else happens."""
    worker = self.workers[name]
    worker._membership.closed = True
    if worker._membership.link is not None:
      worker._membership.link.wire.close()
    worker.publisher._server.close()
    for wire in list(worker.publisher._wires.values()):
      wire.close()

  def submit(self, request, on_change=None):
    return self.router.submit(request, on_change)

  def figure(self, name):
    return {x.name: x.value for x in self.router.figures()}[name]

  def later(self, seconds):
    """So much time passes for requests."""
    self.now += seconds
    self.router.look()

  def idle(self):
    """Waits until no page is published and no engine has anything to do."""

    def busy():
      live = [w for w in self.workers.values() if not w._membership.closed]
      return any(w.publisher.offered or w._tasks for w in live)

    until(lambda: not busy())
    for made in self.engines:
      until(lambda made=made: not (made.open and made.busy))
      made.scheduler.tree.check()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.router.close()
    for worker in self.workers.values():
      worker.close()
    for made in (*self.engines, *(x.groups[0] for x in self.groups)):
      made.close()


@pytest.mark.long
def test_an_answer_goes_on_behind_tokens_that_are_known(model, alone):
  with engine(model) as other:
    for request in requests(6):
      want = alone(request)
      for share in (0.4, 0.99):
        begun = tuple(tuple(t[: int(share * len(t))]) for t, *_ in want)
        again = dataclasses.replace(request, begun=begun)
        assert found(other.submit(again)) == want
  with pytest.raises(rj.OptionError, match="begun"):
    Request(prompt=[1], max_new_tokens=2, begun=((1, 2),))
  with pytest.raises(rj.OptionError, match="begun"):
    Request(prompt=[1], max_new_tokens=2, begun=((1,), (1,)))


@pytest.mark.one_case
@pytest.mark.parametrize("devices", [False, True])
def test_prefill_apart_from_decode_is_one_engine(model, alone, devices):
  with Live(model, "prefill", "decode", devices=devices) as live:
    wanted = requests(12)
    handles = [live.submit(request) for request in wanted]
    for request, handle in zip(wanted, handles, strict=True):
      assert found(handle) == alone(request)
    live.idle()
    # Each prompt of more than a page moved, and none was read by both.
    long = sum(len(x.prompt) > 16 for x in wanted)
    assert live.router.counters.moved == long > 6
    sent = live.workers["prefill0"].publisher.counters
    assert sent.array_reads == (sent.reads if devices else 0)
    read, answered = (made.counters for made in live.engines)
    assert read.new_tokens == long
    assert answered.prompt_tokens < 17 * sum(x.rows for x in wanted)
    assert live.router.counters.again == 0
    # Seeds, penalties, logprobs and stops go with a request.
    request = dataclasses.replace(
      wanted[1], logprobs=2, stop=(wanted[1].prompt[0], "\n")
    )
    assert found(live.submit(request)) == alone(request)
    (answer,) = live.submit(request).result().answers
    assert [x.token for x in answer.logprobs] == answer.tokens
    assert all(len(x.top) == 2 for x in answer.logprobs)


@pytest.mark.long
def test_instances_score_and_embed_texts(model):
  """Also while one of them is lost, over HTTP and with errors by name."""
  # Two passes of at most 2,048 tokens.
  texts = [
    [5],
    [7, 9, 200, 31],
    list(range(40)),
    *([n] * 130 for n in range(8)),
  ]
  scorer = rj.infer.TextScorer(model)
  with Live(model, "both", "prefill") as live:
    rows = live.router.texts
    killed = []

    def kill(count):
      if not killed:
        killed.append(count)
        live.kill("both0")

    scores = rows.scores(texts, top=2, on_batch=kill)
    assert killed and live.router.counters.lost == 1
    expected = scorer.scores(texts, top=2)
    for score, right in zip(scores, expected, strict=True):
      for values, wanted in zip(score, right, strict=True):
        np.testing.assert_allclose(values, wanted, atol=1e-5)
    np.testing.assert_allclose(
      rows.embeddings(texts[:3]), scorer.embeddings(texts[:3]), atol=1e-5
    )
    at = rj.serve.app(live.router)
    body = dict(echo=True, logprobs=1, max_tokens=0)
    (choice,) = choices(complete(at, prompt=texts[2], **body))
    assert len(choice["logprobs"]["token_logprobs"]) == 40
    answer = get(at, "/v1/embeddings", {"input": ["a", "bc"]})
    assert len(answer.json["data"][1]["embedding"]) == 16
    wide = get(at, "/v1/embeddings", {"input": "a", "dimensions": 17})
    assert wide.status == 400 and "1 to 16" in wide.data.decode()
    with pytest.raises(OptionError, match="adapter"):
      rows.scores(texts, adapter="none")
    live.kill("prefill1")
    threading.Timer(1.0, live.later, [WAIT_S + 1]).start()
    with pytest.raises(PeerError, match="no instance that scores"):
      rows.scores(texts[:1])


@pytest.mark.long
def test_an_instance_says_what_does_nothing_with_its_router():
  model = rj.models.create(MODEL | {"num_hidden_layers": 2}, seed=0)
  options = dict(layer_parts=2)
  for stream, word in ((0, "layer_parts=2 only cuts programs"), (64, "")):
    with Live(model, "both", stream_tokens=stream, **options) as live:
      assert live.workers["both0"].notice.startswith(word)
      assert bool(live.workers["both0"].notice) == bool(word)
  with Live(model, "both") as live:
    assert not live.workers["both0"].notice


@pytest.mark.parametrize(
  ("read", "answer", "devices"),
  swept(
    [((32, 1), (16, 1), False), ((16, 4), (64, 2), False)],
    [((16, 4), (64, 2), True)],
  ),
)
def test_between_other_pages_and_numbers_of_devices(
  loaded, read, answer, devices
):
  prompts = [np.arange(n, dtype=np.int32) % 100 for n in (5, 97, 70, 33)]
  wanted = [Request(prompt=x, max_new_tokens=9) for x in prompts]
  models = [loaded("llama3", devices) for _, devices in (read, answer)]
  vocab, found_, moved = models[0][0].config.vocab, [], 0
  with contextlib.ExitStack() as stack:
    made = [
      stack.enter_context(
        engine(one, page=page, mesh=mesh, tokenizer=None, cache_kind="dense")
      )
      for (page, _), (one, mesh) in zip((read, answer), models, strict=True)
    ]
    one = stack.enter_context(engine(models[1][0], mesh=models[1][1]))
    want = [one.submit(x).result().tokens.tolist() for x in wanted]
    router = stack.enter_context(
      cluster.ClusterRouter(key=KEY, vocab=vocab, longest=160)
    )
    for role, x in zip(("prefill", "decode"), made, strict=True):
      server = transfer.DeviceServer() if devices else None
      worker = cluster.ClusterWorker(
        x, key=KEY, router=router.address, role=role, devices=server
      )
      if role == "prefill":
        sent = worker.publisher.counters
      assert stack.enter_context(worker).joined.wait(WAIT_S), worker.refused
    handles = [router.submit(x) for x in wanted]
    found_ = [x.result().tokens.tolist() for x in handles]
    moved = router.counters.moved
    # What no whole page of both is of is read again.
    assert made[1].counters.prompt_tokens < sum(map(len, prompts)) / 2
  assert found_ == want and moved == 3
  assert sent.array_reads == (sent.reads if devices else 0)


@pytest.mark.long
def test_pages_beyond_the_bytes_for_them_leave_the_devices(model, alone):
  with Live(model, "prefill", "decode", devices=True) as live:
    worker = live.workers["prefill0"]
    prompts = [np.arange(n, dtype=np.int32) for n in (40, 90)]
    for prompt, arrays in zip(prompts, (0, 1), strict=True):
      # Copies of 2 and of 5 pages are arrays of 16.
      worker._offers.device_bytes = (15 + arrays) * worker._layout.nbytes
      request = Request(prompt=prompt, max_new_tokens=5)
      assert found(live.submit(request)) == alone(request)
      assert worker.publisher.counters.array_reads == arrays
    # Others have no server, or no publisher that has one.
    live.devices = False
    live.kill("decode1")
    live.join("plain", "decode")
    request = Request(prompt=prompts[0][::-1].copy(), max_new_tokens=5)
    assert found(live.submit(request)) == alone(request)
    assert worker.publisher.counters.reads == 3
    assert worker.publisher.counters.array_reads == 1
    live.idle()


class Killer(cluster.ShortestQueue):
  """Kills who has read a prompt when it is to be answered, once."""

  def decode_instance(self, request, instances, now_s):
    if self.kill:
      self.kill.pop()()
    return super().decode_instance(request, instances, now_s)


def _marked(mark, *stages):
  return [pytest.param(x, marks=mark) for x in stages]


@pytest.mark.parametrize(
  "stage",
  [
    "answering",
    *_marked(pytest.mark.long, "read"),
    *_marked(pytest.mark.slow, "reading", "silent", "broken"),
  ],
)
def test_an_instance_that_is_lost(model, alone, stage):
  policy = Killer()
  object.__setattr__(policy, "kill", [])
  silence_s = 3 if stage == "silent" else 60
  with Live(
    model, "prefill", "decode", policy=policy, silence_s=silence_s
  ) as live:
    wanted = [x for x in requests(12, seed=3) if len(x.prompt) > 16]
    wanted = [dataclasses.replace(x, max_new_tokens=25) for x in wanted]
    # All begin at the first two; those that join finish them.
    with contextlib.ExitStack() as stopped:
      if stage == "reading":
        stopped.enter_context(live.engines[0].between_steps())
      if stage == "read":
        policy.kill.append(lambda: live.kill("prefill0"))
      grown = threading.Event()

      def change(answer):
        if len(answer.tokens) > 4:
          grown.set()

      handles = [live.submit(request, change) for request in wanted]
      if stage == "reading":
        live.kill("prefill0")
      elif stage != "read":
        assert grown.wait(WAIT_S)
        if stage == "silent":
          # It hangs: nothing comes, and nothing is closed.
          live.workers["decode1"]._membership.link.wire.send = lambda *_: (
            time.sleep(WAIT_S)
          )
        elif stage == "broken":
          live.engines[1]._run = lambda _: 1 // 0
        else:
          live.kill("decode1")
      live.join("prefill2", "prefill")
      live.join("decode3", "decode")
    for request, handle in zip(wanted, handles, strict=True):
      assert found(handle) == alone(request)
    assert live.router.counters.lost == 1
    assert live.router.counters.again > 0
    assert live.router.counters.failed == 0
    live.idle()


@pytest.mark.long
@pytest.mark.parametrize(
  "role", ["prefill", *_marked(pytest.mark.long, "decode")]
)
def test_requests_wait_for_the_only_instance_of_a_role(model, alone, role):
  with Live(model, "prefill", "decode") as live:
    wanted = requests(24, seed=7)
    begun = threading.Event()
    handles = [live.submit(x, lambda _: begun.set()) for x in wanted]
    assert begun.wait(WAIT_S)
    name = {"prefill": "prefill0", "decode": "decode1"}[role]
    killed = live.workers[name]
    live.kill(name)
    until(lambda: live.router.counters.lost == 1)
    # It takes nearly the patience to start it again, under its name.
    live.later(WAIT_S - 5)
    live.join(name, role)
    for request, handle in zip(wanted, handles, strict=True):
      assert found(handle) == alone(request)
    assert live.router.counters.failed == 0
    # Without a restart each ends with an error that says what is missing.
    live.kill(name)
    until(lambda: live.router.counters.lost == 2)
    handle = live.submit(wanted[0])
    does = {"prefill": "reads prompts", "decode": "answers"}[role]
    until(
      lambda: any(x.alone_since for x in live.router._requests.states.values())
    )
    live.later(WAIT_S + 1)
    with pytest.raises(rj.PeerError, match=f"no instance that {does}"):
      handle.result()
    killed.close()


@pytest.mark.long
def test_a_restart_under_a_name_whose_end_is_not_noticed_yet(model, alone):
  # A loaded machine may be silent for a second.
  with Live(model, "both", silence_s=4) as live:
    hung = live.workers["both0"]
    with engine(model) as made:
      other = cluster.ClusterWorker(
        made, key=KEY, router=live.router.address, role="both", name="both0"
      )
      with other:
        # It says that it is alive: the name is its own.
        until(lambda: other.refused)
      assert "no other instance" in other.refused
    # It hangs: nothing comes, and nothing is closed.
    over = threading.Event()
    hung._membership.link.wire.send = lambda *_: over.wait(WAIT_S)
    live.join("both0")
    assert live.router.counters.lost == 1
    (request,) = requests(1, seed=4)
    assert found(live.submit(request)) == alone(request)
    over.set()
    hung.close()


@pytest.mark.long
def test_instances_join_leave_and_change_their_roles(model, alone):
  with Live(model, "prefill", "decode") as live:
    wanted = requests(24, seed=5)
    handles = [live.submit(request) for request in wanted[:8]]
    late = live.join("late", "decode")
    # The roles are swapped while all three are at work.
    ask = lambda name, role: cluster.ask_router(
      live.router.address, KEY, what="set_role", name=name, role=role
    )
    ask("decode1", "prefill")
    views = ask("prefill0", "decode")["instances"]
    assert {x["name"]: x["role"] for x in views} == {
      "decode1": "prefill",
      "late": "decode",
      "prefill0": "decode",
    }
    handles += [live.submit(request) for request in wanted[8:16]]
    refused(rj.OptionError, lambda: ask("decode1", "decode"), "that reads")
    refused(rj.OptionError, lambda: ask("nobody", "decode"), "late")
    until(lambda: late._engine.counters.new_tokens > 0)
    late.leave(grace_s=WAIT_S)
    handles += [live.submit(request) for request in wanted[16:]]
    for request, handle in zip(wanted, handles, strict=True):
      assert found(handle) == alone(request)
    counters = live.router.counters
    assert (counters.again, counters.failed, counters.lost) == (0, 0, 0)
    assert [x.name for x in live.router.instances()] == ["decode1", "prefill0"]
    # Each of the first two has read prompts and answered.
    for made in live.engines[:2]:
      assert made.counters.requests > 4
    live.idle()


class Watched:
  """A planner whose decisions are written down."""

  def __init__(self, planner):
    self.planner, self.asked = planner, []

  @property
  def window_s(self):
    return self.planner.window_s

  def decide(self, *given):
    found = self.planner.decide(*given)
    if self.asked or len(given[0]) >= 8:
      self.asked.append((given, found))
    return found


@pytest.mark.long
def test_a_planner_changes_roles_while_requests_are_served(model, alone):
  # By these times one that reads is too few for two that answer.
  slow = cluster.QuadraticTimes(prefill_token_s=1e-2, decode_fixed_s=1e-4)
  planner = Watched(
    cluster.DriftingRoles(
      instances=cluster.SimulatedInstance(name="any", times=slow),
      limits=cluster.Limits(ttft_s=5.0, tpot_s=1.0),
      window_s=0.3,
      gain=0.2,
      requests=12,
    )
  )
  with Live(model, "prefill", "decode", "decode", planner=planner) as live:
    wanted = requests(20, seed=8)
    # All in one window, and some of them behind the change.
    with live.router._work:
      handles = [live.submit(request) for request in wanted[:14]]
    until(lambda: live.router.counters.roles)
    handles += [live.submit(request) for request in wanted[14:]]
    for request, handle in zip(wanted, handles, strict=True):
      assert found(handle) == alone(request)
    router = live.router
    (change,) = router.role_changes
    assert change.why == "the first window" and change.role == "prefill"
    roles = {x.name: x.role for x in router.instances()}
    assert roles[change.name] == "prefill"
    assert sorted(roles.values()) == ["decode", "prefill", "prefill"]
    assert live.figure("roles_changed_total") == router.counters.roles == 1
    assert (router.counters.failed, router.counters.again) == (0, 0)
    assert router.role_error == ""
    live.idle()
  given, decided = planner.asked[0]
  assert planner.planner.decide(*given) == decided
  came, views, _ = given
  assert [x.prompt_tokens for x in came] == [x.prompt.size for x in wanted[:14]]
  assert all(x.capacity_tokens >= 512 and x.max_rows == 4 for x in views)
  # What prompts share is known: some begin with 17 or 40 equal tokens.
  first = [x.blocks[0] for x in came if x.blocks and x.block == 16]
  assert 0 < len({*first}) < len(first)


def test_a_planner_that_fails_stops_nothing(model):
  class Broken:
    window_s = 0.1

    def decide(self, requests, instances, planned):
      raise ValueError("no idea")

  with Live(model, "prefill", "decode", planner=Broken()) as live:
    until(lambda: live.router.role_error)
    assert live.router.role_error == "no idea"
    assert live.figure("roles_unplanned_total") > 0
    assert len(found(live.submit(requests(1)[0]))) == 1
    roles = [x.role for x in live.router.instances()]
    assert roles == ["decode", "prefill"]
  with Live(model) as live:
    refused(rj.OptionError, live.router.plan_roles, "DriftingRoles")


@pytest.mark.long
def test_pages_are_pulled_when_there_is_room(model, alone):
  with Live(model, "prefill") as live:
    live.join("decode", "decode", rows=2, capacity=192)
    big = [
      dataclasses.replace(x, prompt=np.resize(x.prompt, 60), max_new_tokens=30)
      for x in requests(4, seed=7)
    ]
    publisher = live.workers["prefill0"].publisher
    decode = live.engines[1]
    with decode.between_steps():
      handles = [live.submit(request) for request in big]
      # The first two have room for all of their tokens, the others wait with
      # their pages where they were read.
      until(lambda: publisher.counters.tickets == 4)
      time.sleep(0.3)
      assert publisher.counters.reads <= 2
      assert publisher.offered >= 2 * 3
    for request, handle in zip(big, handles, strict=True):
      assert found(handle) == alone(request)
    assert decode.counters.preemptions == 0
    live.idle()


@pytest.mark.long
def test_what_can_not_be_served_is_named(model, alone):
  request = requests(1)[0]
  with Live(model, "prefill") as live:
    handle = live.submit(request)
    until(lambda: live.engines[0].counters.finished == 1)
    until(lambda: live.figure("requests_read") == 1)
    live.later(WAIT_S + 1)
    with pytest.raises(rj.PeerError, match="no instance that answers"):
      handle.result()
    live.join("small", "decode", rows=2, capacity=64)
    long = dataclasses.replace(request, max_new_tokens=100)
    handle = live.submit(long)
    until(lambda: live.figure("requests_read") == 1)
    live.later(WAIT_S + 1)
    with pytest.raises(rj.PeerError, match="room for|has room"):
      handle.result()
    mask = dataclasses.replace(request, mask=lambda tokens: None)
    refused(rj.OptionError, lambda: live.submit(mask), "grammar")
    refused(
      rj.PromptError,
      lambda: live.submit(dataclasses.replace(request, max_new_tokens=160)),
      "160",
    )
    handle = live.submit(dataclasses.replace(long, deadline=5.0))
    live.later(6)
    assert handle.result().finish == "deadline"
    assert found(live.submit(request)) == alone(request)
    # One that kills whoever serves it does not kill all of them.
    live.router._dispatcher.attempts = 1
    live.join("other", "decode")

    def kill(answer):
      if answer.finish is None:
        live.kill("small" if "small" in names() else "other")

    names = lambda: [x.name for x in live.router.instances()]
    with pytest.raises(rj.PeerError, match="1 instances were lost"):
      live.submit(
        dataclasses.replace(request, max_new_tokens=20), kill
      ).result()


@pytest.mark.long
def test_who_may_join(model):
  with Live(model, "both") as live:
    address = live.router.address

    def reason(made, key=KEY, **options):
      worker = cluster.ClusterWorker(made, key=key, router=address, **options)
      with contextlib.closing(worker), made:
        worker.start()
        until(lambda: worker.refused)
        return worker.refused

    assert "same key" in reason(engine(model), key=bytes(32))
    assert "no other instance" in reason(engine(model), name="both0")
    assert "longest 96" in reason(engine(model, longest=96))
    other = rj.models.create(MODEL, seed=1)
    assert "of those that joined" in reason(engine(other))
    with Engine(model, rows=1, capacity=64, longest=64) as bare:
      make = lambda: cluster.ClusterWorker(bare, key=KEY, router=address)
      refused(rj.OptionError, make, "store")
    # What is no message ends its own connection only.
    for fields in ({}, {"t": "join"}, {"t": "command"}, {"t": "view"}):
      wire = PullConnection(socket.create_connection(address), 20, "router")
      wire.greet_server(KEY)
      wire.tell_object(fields)
      answer = wire.hear_object(1000)
      assert answer is None or "error" in answer
      wire.close()
    live.workers["both0"]._membership.link.tell("tokens", id=1)
    assert [x.name for x in live.router.instances()] == ["both0"]
    live.workers["both0"]._membership.link.tell("view")
    # It joins again.
    until(lambda: live.router.counters.lost == 1)
    until(lambda: live.router.instances())


@pytest.mark.long
def test_pages_return_by_their_lease_when_the_router_is_gone(model):
  with Live(model) as live:
    worker = live.join("prefill", "prefill", lease_s=0.5)
    live.submit(requests(8)[7])
    until(lambda: live.figure("requests_read") == 1)
    # Renewed as long as the router wants them.
    time.sleep(1.0)
    assert worker.publisher.offered and not worker.publisher.counters.expired
    live.router._admission._server.shutdown(socket.SHUT_RDWR)
    for one in list(live.router._instances.alive.values()):
      one.link.wire.close()
    until(lambda: not worker.publisher.offered)
    assert worker.publisher.counters.expired == 1


class Elsewhere(cluster.ShortestQueue):
  """Lets who has not read a prefix fetch it from the one that has."""

  def route(self, request, instances, now_s):
    able = [x.name for x in instances if x.prefills]
    found = {name: request.cached_tokens(name) for name in able}
    owner = max(able, key=lambda name: found[name])
    other = next((name for name in able if name != owner), owner)
    if not found[owner]:
      return super().route(request, instances, now_s)
    both = {x.name: x.role for x in instances}[other] == "both"
    return cluster.Route(
      prefill=other,
      decode=other if both else None,
      fetch_from=owner,
      fetch_tokens=found[owner],
    )


@pytest.mark.parametrize(
  "roles",
  [
    ("prefill", "prefill", "decode"),
    pytest.param(("both", "both"), marks=pytest.mark.long),
  ],
)
def test_a_prefix_is_fetched_from_who_has_it(model, alone, roles):
  rng = np.random.default_rng(9)
  common = rng.integers(0, 256, 67).astype(np.int32)
  ask = lambda n: Request(
    prompt=np.append(common, rng.integers(0, 256, n).astype(np.int32)),
    max_new_tokens=9,
  )
  with Live(model, *roles, policy=Elsewhere()) as live:
    first, second, third = ask(20), ask(31), ask(5)
    assert found(live.submit(first)) == alone(first)
    keys = [cluster.short_key(x) for x in cluster.block_keys(common, 16)]
    knows = lambda name: live.router.blocks.match(keys).get(name, 0) == 4
    names = [f"{role}{n}" for n, role in enumerate(roles)]
    until(lambda: any(map(knows, names[:2])))
    owner = next(n for n, name in enumerate(names) if knows(name))
    # What it has it offers, and the other one computes the rest only.
    other = live.engines[1 - owner].counters
    assert not other.prompt_tokens
    assert found(live.submit(second)) == alone(second)
    assert other.prompt_tokens == 67 + 31 - 64
    counters = live.router.counters
    assert counters.fetched == 1 and counters.fetched_bytes > 0
    assert counters.moved == (0 if "both" in roles else 2)
    # Who has it is lost meanwhile: the prompt is read without it.
    until(lambda: knows(names[1 - owner]))
    lost = next(n for n in (0, 1) if knows(names[n]))
    with live.engines[lost].between_steps():
      handle = live.submit(third)
      live.kill(names[lost])
      assert found(handle) == alone(third)
    assert counters.failed == 0 and counters.lost == 1


def test_what_is_no_engine_is_no_instance():
  """A stage of a pipeline, which has a worker of its own."""
  pipeline = object.__new__(rj.infer.ChunkPipeline)
  refused(
    InputTypeError, lambda: check_engine(pipeline), "ChunkPipeline", "stages"
  )


class Copying(cluster.ShortestQueue):
  """Reads where the prefix is, and lets the other one get it as well."""

  def route(self, request, instances, now_s):
    able = sorted(x.name for x in instances if x.prefills)
    have = {name: request.cached_tokens(name) for name in able}
    owner, other = sorted(able, key=lambda name: -have[name])[:2]
    route = cluster.Route(prefill=owner, decode=None)
    if have[other] or not have[owner]:
      return route
    copy = cluster.PrefixCopy(source=owner, target=other, tokens=have[owner])
    return dataclasses.replace(route, copy=copy)


@pytest.mark.long
def test_a_hot_prefix_is_copied_to_another_instance(model, alone):
  rng = np.random.default_rng(9)
  common = rng.integers(0, 256, 67).astype(np.int32)
  ask = lambda n: Request(
    prompt=np.append(common, rng.integers(0, 256, n).astype(np.int32)),
    max_new_tokens=9,
  )
  with Live(model, "prefill", "prefill", "decode", policy=Copying()) as live:
    first, second, third = ask(20), ask(31), ask(5)
    assert found(live.submit(first)) == alone(first)
    keys = [cluster.short_key(x) for x in cluster.block_keys(common, 16)]
    has = lambda name: live.router.blocks.match(keys).get(name, 0) == 4
    names = ["prefill0", "prefill1"]
    until(lambda: any(map(has, names)))
    owner = next(n for n, name in enumerate(names) if has(name))
    other = live.engines[1 - owner].counters
    assert not other.prompt_tokens
    assert found(live.submit(second)) == alone(second)
    # Of the copy it computes the token behind it alone.
    until(lambda: has(names[1 - owner]))
    counters = live.router.counters
    assert counters.copied == 1 and counters.copied_bytes > 0
    assert live.figure("prefixes_copied_total") == 1
    assert other.prompt_tokens == 1
    # Its first owner is lost: nothing of the prefix is computed again.
    live.kill(names[owner])
    until(lambda: counters.lost == 1)
    live.router._dispatcher.policy = cluster.ShortestQueue()
    assert found(live.submit(third)) == alone(third)
    assert other.prompt_tokens == 1 + 67 + 5 - 64
    assert counters.copied == 1 and counters.failed == 0
    assert not live.router._copies.tasks


@pytest.mark.parametrize("how", ["gone", "evicted", "lost", "target"])
def test_a_copy_that_does_not_come_costs_no_request(how):
  with Live(None, policy=Copying()) as live:
    a, b = (Scripted(live, name, "prefill") for name in "ab")
    c = Scripted(live, "c", "decode")
    keys = [short_key(x) for x in block_keys(np.full(60, 7, np.int32), 16)]
    told = dict(t="blocks", epoch=1, number=0, kind="all", keys=keys)
    a.wire.tell_object(told)
    until(lambda: live.router.blocks.match(keys).get("a") == 3)
    handle = live.submit(Request(prompt=[7] * 60, max_new_tokens=1))
    offer, reading = a.hear("offer")["id"], a.hear("read")["id"]
    if how == "gone":
      b.close()
    else:
      a.tell(
        "read",
        id=offer,
        ticket=None if how == "evicted" else "a ticket",
        cached=48,
      )
    if how in ("lost", "target"):
      task = b.hear("read")
      assert task["tickets"] == ["a ticket"]
      assert request_of(task["request"], None).prompt.size == 49
      if how == "lost":
        b.tell("pulled", id=task["id"], nbytes=0)
        assert b.hear("cancel")["id"] == task["id"]
      else:
        b.close()
    assert a.hear("cancel")["id"] == offer
    a.tell("read", id=reading, ticket=None, cached=48)
    c.answer(c.hear("answer")["id"], cached=48)
    assert handle.result().finish
    until(lambda: not live.router._copies.tasks)
    counters = live.router.counters
    assert counters.copied == counters.copied_bytes == counters.failed == 0


def test_a_router_says_what_a_card_has_to_send(model, alone):
  common = np.random.default_rng(10).integers(0, 256, 67).astype(np.int32)
  ask = lambda n: Request(prompt=np.append(common, [n]), max_new_tokens=4)
  seen = []

  class Seeing(Elsewhere):
    def route(self, request, instances, now_s):
      seen.append({one.name: one.sending_tokens for one in instances})
      return super().route(request, instances, now_s)

  names = ["prefill0", "prefill1", "decode2"]
  with Live(model, "prefill", "prefill", "decode", policy=Seeing()) as live:
    assert found(live.submit(ask(1))) == alone(ask(1))
    keys = [cluster.short_key(x) for x in cluster.block_keys(common, 16)]
    knows = lambda name: live.router.blocks.match(keys).get(name, 0) == 4
    until(lambda: any(map(knows, names[:2])))
    owner = next(n for n, name in enumerate(names) if knows(name))
    # It can't copy what it is to send while another looks at its pages.
    with live.engines[owner].between_steps():
      handles = [live.submit(ask(n)) for n in (2, 3)]
    for n, handle in zip((2, 3), handles, strict=True):
      assert found(handle) == alone(ask(n))
    assert seen[0] == seen[1] == dict.fromkeys(names, 0)
    assert seen[2] == dict.fromkeys(names, 0) | {names[owner]: 64}
    assert live.router._dispatcher.sending() == {}


class Scripted:
  """An instance without an engine, which says what a test says."""

  def __init__(self, live, name, role):
    self.wire = PullConnection(
      socket.create_connection(live.router.address), WAIT_S, "router"
    )
    self.wire.greet_server(KEY)
    self.tell(
      "join",
      name=name,
      role=role,
      address=["127.0.0.1", 1],
      codec="none",
      dtype="float32",
      vocab=262,
      longest=160,
      page=16,
      capacity=512,
      rows=4,
    )
    self.hear("welcome")
    live.workers[name] = self

  def close(self):
    self.wire.close()

  def tell(self, kind, **fields):
    self.wire.tell_object({"t": kind} | fields)

  def hear(self, kind):
    while (fields := self.wire.hear_object(1 << 20)) is not None:
      if fields["t"] == kind:
        return fields
    raise AssertionError(f"no {kind}")

  def answer(self, task, cached):
    text = dict(text_at=0, text="x", logprobs=[], total=0.0)
    self.tell(
      "tokens",
      id=task,
      n=0,
      at=0,
      tokens=[5],
      cached=cached,
      finish="length",
      stopped=None,
      **text,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class From(cluster.ShortestQueue):
  """The same instance reads and answers, with a prefix of another one."""

  def route(self, request, instances, now_s):
    return cluster.Route(
      prefill="b", decode="b", fetch_from="a", fetch_tokens=48
    )


@pytest.mark.parametrize("how", ["pulled", "evicted", "lost"])
def test_what_was_found_is_what_who_answers_says(how):
  with Live(None, policy=From()) as live:
    a, b = (Scripted(live, name, "both") for name in "ab")
    handle = live.submit(Request(prompt=[7] * 60, max_new_tokens=1))
    offer, there = a.hear("offer")["id"], how != "evicted"
    a.tell(
      "read",
      id=offer,
      ticket="a ticket" if there else None,
      cached=48 if there else 0,
    )
    task = b.hear("answer")
    assert task["tickets"] == (["a ticket"] if there else [])
    if how == "pulled":
      b.tell("pulled", id=task["id"], nbytes=100)
    elif how == "lost":
      b.tell("lost", id=task["id"], why="a network")
      task = b.hear("answer")
      assert not task["tickets"]
    b.answer(task["id"], cached=16)
    assert handle.result().cached_tokens == 16
    counters, came = live.router.counters, how == "pulled"
    assert counters.fetched == came and counters.fetched_bytes == 100 * came
    assert counters.moved == counters.moved_bytes == counters.failed == 0


def test_patience_begins_when_a_prompt_has_been_read():
  with Live(None, stream_tokens=64) as live:
    reader = Scripted(live, "a", "prefill")
    handle = live.submit(Request(prompt=[7] * 90, max_new_tokens=1))
    task = reader.hear("read")
    assert task["stream"] == 64
    # Who answers comes late.
    reader.tell("part", id=task["id"], ticket="a part")
    (state,) = live.router._requests.states.values()
    until(lambda: state.tickets)
    live.later(WAIT_S + 1)
    assert not handle.done
    reader.tell("read", id=task["id"], ticket=None, cached=0)
    until(lambda: live.figure("requests_read") == 1)
    live.later(WAIT_S + 1)
    with pytest.raises(rj.PeerError, match="no instance that answers"):
      handle.result()


def test_requests_that_wait_for_room_do_not_wait_for_an_instance():
  with Live(None) as live:
    reader = Scripted(live, "a", "prefill")
    asked = Request(prompt=[7] * 90, max_new_tokens=60)
    handles = [live.submit(asked) for _ in range(8)]
    for _ in handles:
      task = reader.hear("read")
      reader.tell("read", id=task["id"], ticket="a ticket", cached=0)
    until(lambda: live.figure("requests_read") == 8)
    live.later(WAIT_S - 5)
    # It has room for some of them.
    decoder = Scripted(live, "b", "decode")
    decoder.hear("answer")
    live.later(WAIT_S - 5)
    states = list(live.router._requests.states.values())
    assert [state.alone_since for state in states] == [None] * 8
    assert any(state.stage == "read" for state in states)
    assert not any(handle.done for handle in handles)
    # Once it has gone, their patience begins again.
    decoder.close()
    until(lambda: live.router.counters.lost == 1)
    live.later(WAIT_S - 5)
    assert not any(handle.done for handle in handles)


@pytest.mark.parametrize("again", ["part", "read"])
def test_pages_after_the_last_ones_of_a_prompt_are_refused(again):
  with Live(None) as live:
    reader = Scripted(live, "a", "prefill")
    handle = live.submit(Request(prompt=[7] * 60, max_new_tokens=1))
    task = reader.hear("read")["id"]
    reader.tell("read", id=task, ticket="a ticket", cached=0)
    until(lambda: live.figure("requests_read") == 1)
    reader.tell(again, id=task, ticket="a ticket", cached=0)
    # Nobody could say any more which pages there are: they are read again.
    until(lambda: live.router.counters.lost == 1)
    assert live.figure("requests_new") == 1
    assert not handle.done


class Looking(cluster.ShortestQueue):
  """Notes what a policy sees of the first instance."""

  def __init__(self):
    super().__init__()
    object.__setattr__(self, "views", [])

  def route(self, request, instances, now_s):
    self.views.append(instances[0])
    return super().route(request, instances, now_s)


def test_a_live_queue_is_predicted_as_a_simulated_one():
  times = cluster.QuadraticTimes(
    prefill_fixed_s=1e-3, prefill_token_s=1e-5, prefill_pair_s=1e-4
  )
  costs = cluster.RoutingCosts(times=times)
  rng = np.random.default_rng(0)
  sizes = [int(n) for n in rng.integers(40, 100, 10)]
  # All begin alike; who reads has these 32 tokens since the first one.
  trace = [
    TraceRequest(
      arrival=1e3 * (n > 0),
      prompt_tokens=size,
      new_tokens=1,
      number=n,
      blocks=(1, 2, *range(10 * n + 10, 10 * n + 10 + -(-size // 16) - 2)),
      block=16,
    )
    for n, size in enumerate([40, *sizes, 40])
  ]
  look = Looking()
  cluster.ClusterSimulator(
    instances=[
      cluster.SimulatedInstance(
        name="a", role="prefill", times=times, prefix_cache_tokens=10**4
      ),
      cluster.SimulatedInstance(name="b", role="decode", times=times),
    ],
    policy=look,
  ).run(trace)
  simulated = costs.queue_s(look.views[-1])
  assert look.views[-1].queued_requests == 10
  alone = [times.prefill_s([(n - 32, 32)]) for n in sizes]
  assert simulated == pytest.approx(sum(alone))
  assert times.prefill_s([(sum(sizes), 0)]) > 8 * simulated
  with Live(None) as live:
    a, b = Scripted(live, "a", "prefill"), Scripted(live, "b", "both")
    prompts = [one.prompt(256) for one in trace]
    keys = [short_key(x) for x in block_keys(prompts[0][:32], 16)]
    event = dict(epoch=1, number=0, kind="all", keys=keys)
    a.wire.tell_object({"t": "blocks"} | event)
    until(lambda: live.router.blocks.match(keys) == {"a": 2})
    for prompt in prompts[1:-1]:
      live.router._dispatcher.policy = To("a")
      live.submit(Request(prompt=prompt, max_new_tokens=1))
    tasks = [a.hear("read")["id"] for _ in sizes]
    seen = lambda: live.router.instances()[0]
    # What was sent, before the instance says anything.
    assert costs.queue_s(seen()) == pytest.approx(simulated)
    assert seen().queued_tokens == look.views[-1].queued_tokens == sum(sizes)

    def says(queue, more=(0, 0), taken=10, **others):
      a.tell(
        "view",
        taken=taken,
        queue=queue,
        queued_requests=len(queue) + more[0],
        queued_tokens=sum(left for _, left, _ in queue) + more[1],
        **dict(running_requests=0, running_tokens=0, free_tokens=512) | others,
      )

    waits = [[n, size, 0] for n, size in zip(tasks, sizes, strict=True)]
    says(waits, free_tokens=511)
    until(lambda: seen().free_tokens == 511)
    assert costs.queue_s(seen()) == pytest.approx(simulated)
    assert seen().queued_requests == 10
    # Nothing has come since of the first one; of the second one a part.
    says([[tasks[1], sizes[1] - 35, 35], *waits[2:]], free_tokens=510)
    until(lambda: seen().free_tokens == 510)
    left = times.prefill_s([(sizes[1] - 35, 35)]) + sum(alone[2:])
    assert costs.queue_s(seen()) == pytest.approx(left)
    # Those behind the ones that are named count as equally long.
    says(waits[:1], more=(3, 150), free_tokens=509)
    until(lambda: seen().free_tokens == 509)
    left = alone[0] + 3 * times.prefill_s([(50, 0)])
    assert costs.queue_s(seen()) == pytest.approx(left)
    assert json.loads(json.dumps(dataclasses.asdict(seen())))["queue"] == [
      [sizes[0] - 32, 32, 1], [50, 0, 3]
    ]  # fmt: skip
    # One that reads and answers has the prompt in its queue too.
    live.router._dispatcher.policy = To("b", "b")
    live.submit(Request(prompt=prompts[1], max_new_tokens=1))
    b.hear("answer")
    both = live.router.instances()[1]
    assert (both.queued_requests, both.running_requests) == (1, 0)
    assert costs.queue_s(both) == times.prefill_s([(sizes[0], 0)])
    # What can't be is no report, and ends the link.
    for n, (queue, options) in enumerate([
      ([[0, 1, 0]] * 257, {}),
      ([[0, 0, 0]], {}),
      ([[0, 1, -1]], {}),
      ([[0, 1 << 60, 0]], {}),
      ([[0, 1, 0]], dict(more=(-1, 0))),
      ([[0, 1, 0]], dict(more=(0, 7))),
      ([[0, 1, 0]], dict(more=(2, 1))),
      ([], dict(free_tokens=-1)),
      ([], dict(taken="9")),
    ]):  # fmt: skip
      a = Scripted(live, f"a{n}", "prefill")
      says(queue, **options)
      until(lambda n=n: live.router.counters.lost == n + 1)
    assert [one.name for one in live.router.instances()] == ["a", "b"]


@dataclasses.dataclass(frozen=True)
class To(cluster.ShortestQueue):
  """One instance reads; the same or another one answers."""

  reader: str = ""
  decoder: str | None = None

  def route(self, request, instances, now_s):
    return cluster.Route(prefill=self.reader, decode=self.decoder)


def test_a_planner_is_told_what_instances_had():
  windows = []

  class Noted:
    window_s = 1e6

    def decide(self, requests, instances, planned):
      windows.append(requests)
      return cluster.RoleDecision()

  with Live(None, planner=Noted()) as live:
    a, _ = Scripted(live, "a", "prefill"), Scripted(live, "b", "decode")
    prompt = np.arange(60, dtype=np.int32)
    keys = [short_key(x) for x in block_keys(prompt[:32], 16)]
    event = dict(epoch=1, number=0, kind="all", keys=keys)
    a.wire.tell_object({"t": "blocks"} | event)
    until(lambda: live.router.blocks.match(keys))
    for share in (True, False):
      live.submit(Request(prompt=prompt, max_new_tokens=1, share=share))
    live.router.plan_roles()
    ((first, second),) = windows
    assert (first.cached, second.cached) == ((("a", 32),), ())
    assert first_prefixes([first]) == {"a": dict.fromkeys(first.blocks[:2], 16)}


def test_an_instance_says_what_it_has_to_read(model):
  with engine(model) as made:
    worker = cluster.ClusterWorker(made, key=KEY, router=("127.0.0.1", 1))
    with contextlib.closing(worker):
      prompts = [np.arange(n, dtype=np.int32) for n in (90, 50, 70)]
      for prompt, answers in zip(prompts, (1, 3, 1), strict=True):
        made.submit(Request(prompt=prompt, max_new_tokens=2, n=answers))
      made.submit(
        Request(prompt=prompts[0][1:], max_new_tokens=2, n=2, share=False)
      )
      found = worker._view()
      # Answers share what one of them reads, if they may.
      assert found["queue"] == [(-1, n, 0) for n in (90, 50, 70, 89, 89)]
      assert (found["queued_requests"], found["queued_tokens"]) == (5, 388)
      made.step()
      found = worker._view()
      assert found["queue"][0] == (-1, 58, 32)
      assert found["queued_tokens"] == 356
      while made.busy:
        made.step()
      assert worker._view()["queue"] == []


@pytest.mark.long
@pytest.mark.parametrize("devices", [False, True])
@pytest.mark.parametrize("lost", [None, "prefill0", "decode1"])
def test_pages_are_pulled_while_a_prompt_is_read(model, lost, devices):
  rng = np.random.default_rng(4)
  prompts = [rng.integers(0, 256, n).astype(np.int32) for n in (230, 40, 256)]
  wanted = [
    Request(prompt=x[:-12], max_new_tokens=12, salt=str(n))
    for n, x in enumerate(prompts)
  ]
  options = dict(longest=256, page=32)
  with engine(model, **options) as one:
    want = [found(one.submit(x)) for x in wanted]
  options |= dict(stream_tokens=100, devices=devices)
  with Live(model, "prefill", "decode", **options) as live:
    live.join("decode2", "decode", page=64)
    source, publisher = live.engines[0], live.workers["prefill0"].publisher
    step_of, waited = source.step, []

    def step():
      more = step_of()
      rows = [x for x in source.scheduler.running if x is not None]
      # Half of the first prompt is read: the engine waits for its pages.
      if not waited and any(x.salt == "0" and x.computed >= 128 for x in rows):
        waited.append(True)
        until(lambda: publisher.counters.reads)
      return more

    source.step = step
    handles = [live.submit(x) for x in wanted]
    if lost is not None:
      until(lambda: publisher.counters.reads)
      live.join("prefill3", "prefill")
      live.kill(lost)
    assert [found(x) for x in handles] == want
    assert waited
    if lost is None:
      # The second one has no whole page, and is read by who answers.
      assert live.router.counters.moved == 2
      assert live.router.counters.again == 0
      assert source.counters.new_tokens == 2
      # Each of the others in two parts.
      assert publisher.counters.tickets == 4
      answered = live.engines[1].counters, live.engines[2].counters
      assert sum(x.prompt_tokens for x in answered) < 3 * 64
    assert live.router.counters.failed == 0
    live.idle()


@pytest.mark.long
@pytest.mark.parametrize("devices", [False, True])
@pytest.mark.parametrize("lost", [None, "prefill0", "decode1"])
def test_layers_are_pulled_in_the_middle_of_a_step(lost, devices):
  model = rj.models.create(MODEL | {"num_hidden_layers": 3}, seed=0)
  rng = np.random.default_rng(4)
  wanted = [
    Request(
      prompt=rng.integers(0, 256, n).astype(np.int32),
      max_new_tokens=12,
      salt=str(n),
    )
    for n in (218, 30, 244)
  ]
  options = dict(longest=256, page=32, layer_parts=2)
  with engine(model, **options) as one:
    want = [found(one.submit(x)) for x in wanted]
  options |= dict(stream_tokens=100, devices=devices)
  with Live(model, "prefill", "decode", **options) as live:
    live.join("decode2", "decode", page=64, layer_parts=1)
    source, publisher = live.engines[0], live.workers["prefill0"].publisher
    begun, waited = source.on_layers, []

    def layers(part, pieces, pool):
      begun(part, pieces, pool)
      read = [x.row.computed for x in pieces if x.row.salt == "218"]
      # Half of the first prompt is read, and the end of it: the last layers
      # are not computed before others have been pulled.
      if any(x in (128, 218) for x in read) and (lost is None or not waited):
        waited.append(read)
        tickets = len(waited) * 2 - 1
        until(lambda: publisher.counters.reads >= tickets)

    source.on_layers = layers
    handles = [live.submit(wanted[0])]
    if lost is None:
      assert found(handles[0]) == want[0]
      assert len(waited) == 2 and publisher.counters.tickets == 4
    else:
      until(lambda: publisher.counters.reads)
      live.join("prefill3", "prefill")
      live.kill(lost)
    handles += [live.submit(x) for x in wanted[1:]]
    assert [found(x) for x in handles] == want
    assert waited
    if lost is None:
      assert live.router.counters.again == 0
      assert live.router.counters.moved == 2
      answered = live.engines[1].counters, live.engines[2].counters
      assert sum(x.prompt_tokens for x in answered) < 3 * 64
    assert live.router.counters.failed == 0
    live.idle()


def test_text_of_tokens_that_are_known(model, alone):
  request = dataclasses.replace(requests(2)[1], max_new_tokens=20)
  ((tokens, text, finish),) = alone(request)
  with Live(model, "both") as live:
    assert live.router.missing == ""
    again = dataclasses.replace(request, begun=(tuple(tokens[:7]),))
    assert found(live.submit(again)) == [(tokens, text, finish)]


def test_health_of_a_router_without_instances():
  app = lambda: rj.serve.app(live.router)
  with Live(None) as live:
    answer = get(app(), "/health")
    assert answer.status == 503
    assert answer.json["missing"] == (
      "an instance that reads prompts and an instance that answers"
    )


class Full(cluster.ShortestQueue):
  """Takes nothing that is long."""

  def route(self, request, instances, now_s):
    if request.prompt_tokens > 30:
      return cluster.Rejected(reason="too much to do")
    return super().route(request, instances, now_s)


def test_openai_api_over_a_cluster(model, alone):
  with Live(model, "prefill", "decode", policy=Full()) as live:
    app = rj.serve.app(live.router, trusted_template=True)
    with engine(model) as made:
      made.start()
      one = rj.serve.app(made, trusted_template=True)
      body = dict(max_tokens=24, temperature=1.0, n=2, logprobs=2)
      want = choices(complete(one, **body))
      assert choices(complete(app, **body)) == want
      streamed = complete(app, **body, stream=True)
      texts, _ = joined(streamed.events)
      assert [texts[n] for n in range(2)] == [x["text"] for x in want]
      body = dict(beams=3, n=2, temperature=0, max_tokens=8)
      assert choices(complete(app, **body)) == choices(complete(one, **body))
    answer = complete(app, prompt="x" * 100)
    assert answer.status == 429 and answer.json["error"]["code"] == "rejected"
    text = rj.serve.app(live.router).metrics.text(live.router.figures())
    assert "ringjax_requests_rejected_total 1" in text

    async def leaves():
      body = dict(prompt="abc", max_tokens=150, ignore_eos=True, stream=True)
      wire = Wire(app, "/v1/completions", body)
      task = asyncio.ensure_future(wire.run())
      while not wire.data:
        await asyncio.sleep(0.01)
      with live.engines[1].between_steps():
        wire.leave()
        await task

    before = live.engines[1].counters.cancelled
    asyncio.run(leaves())
    until(lambda: live.engines[1].counters.cancelled == before + 1)
    live.idle()


@pytest.mark.one_case
@pytest.mark.long_cases(2)
@pytest.mark.parametrize("others", [(), ("prefill",), ("decode",)])
def test_an_engine_of_several_processes_is_an_instance(model, alone, others):
  """It answers what it reads, whichever instances there are besides."""
  with Live(model, *others) as live:
    replicas = live.join_group("group")
    wanted = requests(8)
    handles = [live.submit(request) for request in wanted]
    for request, handle in zip(wanted, handles, strict=True):
      assert found(handle) == alone(request)
    assert live.router.counters.moved == 0
    counters = replicas.groups[0].engine.counters
    assert counters.new_tokens > 0
    if "decode" not in others:
      # No prompt is read where its answer can't be made.
      assert all(made.counters.prompt_tokens == 0 for made in live.engines)
    cancelled = live.submit(Request(prompt=[5] * 20, max_new_tokens=100))
    until(lambda: cancelled.answers[0].tokens)
    cancelled.cancel()
    until(lambda: not replicas.groups[0].engine.busy)
    with engine(model) as one:
      texts = [[1, 2, 3], [7] * 30]
      want = one.texts.embeddings(texts)
      got = live.router.texts.embeddings(texts)
      np.testing.assert_allclose(got, want, atol=1e-5)
    with pytest.raises(OptionError, match="several processes"):
      live.router.set_role("group", "decode")


@pytest.mark.long
def test_requests_of_a_lost_group_go_on_elsewhere(model, alone):
  with Live(model) as live:
    replicas = live.join_group("group")
    wanted = [
      dataclasses.replace(request, max_new_tokens=60)
      for request in requests(4, seed=3)
    ]
    handles = [live.submit(request) for request in wanted]
    until(lambda: all(h.answers[0].tokens for h in handles[:2]))
    # One of its processes is lost.
    replicas.groups[1].peers.close()
    until(lambda: "group" not in live.router._instances.alive)
    live.join("another")
    for request, handle in zip(wanted, handles, strict=True):
      assert found(handle) == alone(request)
    assert live.router.counters.lost == 1
