"""Live elastic instances: groups that change, members that leave and die."""

from __future__ import annotations

import signal
import socket
import threading

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import ConfigError, OptionError, PeerError, PromptError
from ringjax.infer.loongserve.elastic_instance import (
  block_bytes,
  instance_programs,
)
from ringjax.infer.loongserve.elastic_worker import ElasticWorker
from ringjax.parallel.links.array_messages import send_arrays
from ringjax.parallel.links.connection import AuthenticationError, Connection
from ringjax.parallel.links.live_link import LiveLink
from ringjax.serve.cluster import (
  ElasticOptions,
  ElasticScheduler,
  ElasticWorkers,
  QuadraticTimes,
)
from ringjax.transfer.wire import PullConnection
from tests.helpers import refused

SLOTS, NEW = 80, 12
LENGTHS = (100, 20, 70)


@pytest.fixture(scope="module")
def model():
  config = dict(
    model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=64,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256,
  )  # fmt: skip
  return rj.models.create(config, seed=0, dtype="float32")


@pytest.fixture(scope="module")
def prompts():
  chance = np.random.default_rng(0)
  return [chance.integers(0, 64, n).astype(np.int32) for n in LENGTHS]


@pytest.fixture(scope="module")
def want(model, prompts):
  return rj.infer.generate(model, prompts, max_new_tokens=NEW).tokens.tolist()


@pytest.fixture(scope="module")
def threads(model):
  with ElasticWorkers.in_threads(model, 4, slots=SLOTS) as workers:
    yield workers


def same(found, want):
  assert [x.error for x in found.answers] == [""] * len(found.answers)
  assert [x.tokens for x in found.answers] == want


def events(found, kind):
  return [event for event in found.events if event["event"] == kind]


@pytest.mark.long
def test_four_read_two_answer_and_no_key_moves(model, threads, prompts, want):
  found = threads.serve(prompts[:1], NEW)
  same(found, want[:1])
  (read,) = events(found, "read")
  assert len(read["group"]) == 4 and len(read["answers"]) == 2
  assert found.counts.kept_tokens == 100 and found.counts.moved_tokens == 0
  assert "moved" not in found.bytes_sent
  pure = block_bytes(instance_programs(model), "float32", 100, 4)
  # Blocks alone, and less than 200 bytes for the header of each.
  blocks = 4 * 3 * len(model.config.layers)
  assert pure < found.bytes_sent["ring"] < pure + 200 * blocks
  # The same, but each keeps what it computes: half has to move then.
  moved = threads.serve(prompts[:1], NEW, proactive=False)
  same(moved, want[:1])
  assert moved.counts.moved_tokens == 50 and moved.counts.kept_tokens == 0
  spec = model.config.layers[0].attention
  token = 2 * 4 * spec.kv_heads * spec.head_dim * len(model.config.layers)
  assert moved.bytes_sent["moved"] > 50 * token


@pytest.mark.long
def test_instances_join_leave_and_are_masters(threads, prompts, want):
  found = threads.serve(prompts, NEW, policy=threads.policy(steps=2), reserve=2)
  same(found, want)
  assert any(len(e["masters"]) > 1 for e in events(found, "step"))
  steps = []

  def watch(event):
    if event["event"] == "step" and not steps:
      steps.append(threads.join())
      threads.leave(min(threads.live))

  found = threads.serve(
    prompts, NEW, policy=threads.policy(steps=2), watch=watch
  )
  same(found, want)
  assert len(events(found, "join")) == len(events(found, "release")) == 1
  assert found.counts.moved_tokens > 0 and found.counts.reread == 0
  assert threads.live == (1, 2, 3, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", ["gpt_oss", "gemma2", "falcon_rw", "qwen3", "gemma3_text"]
)
def test_families(loaded, name):
  """Windows, sinks, soft caps, slopes, rotations of layers."""
  model, _ = loaded(name)
  chance = np.random.default_rng(1)
  prompts = [
    chance.integers(0, model.config.vocab, n).astype(np.int32) for n in (50, 9)
  ]
  want = rj.infer.generate(model, prompts, max_new_tokens=9)
  with ElasticWorkers.in_threads(model, 3, slots=40) as workers:
    same(workers.serve(prompts, 9), want.tokens.tolist())


@pytest.mark.slow
def test_processes_that_are_killed_at_any_time(
  model, prompts, want, tmp_path_factory
):
  """Answers are whole, or end with an error; the right ones in any case."""
  folder = tmp_path_factory.mktemp("model")
  rj.models.save(model, folder)
  moments = [
    ("read", 0.0), ("read", 0.03), ("step", 0.0), ("step", 0.02),
    ("move", 0.0), ("move", 0.01),
  ]  # fmt: skip
  with ElasticWorkers.start(folder, 4, slots=SLOTS) as workers:
    found = workers.serve(prompts, NEW)
    same(found, want)
    for moment, delay_s in moments:
      killed = []

      def watch(event, moment=moment, delay_s=delay_s, killed=killed):
        if event["event"] == "step" and moment == "move" and not killed:
          workers.leave(event["group"][0])
        if event["event"] != moment or killed:
          return
        victim = event.get("source", event.get("group", [0])[-1])
        killed.append(victim)
        process = workers.processes[victim]
        threading.Timer(delay_s, process.kill).start()

      found = workers.serve(
        prompts, NEW, policy=workers.policy(steps=2), watch=watch,
        proactive=moment != "move",
      )  # fmt: skip
      assert killed
      same(found, want)
      while len(workers.live) < 4:
        workers.join()
        # It takes part from the next call on.
        workers.serve(prompts[2:], 1)
    # Too few for the longest.
    killed = []

    def watch(event):
      if event["event"] == "step" and not killed:
        killed.extend(workers.live[1:])
        for n in killed:
          workers.processes[n].kill()

    found = workers.serve(prompts, NEW, watch=watch)
    assert len(workers.live) == 1 and found.counts.lost == 3
    assert "lost" in found.answers[0].error
    for one, tokens in zip(found.answers, want, strict=True):
      assert one.tokens == tokens[: len(one.tokens)]
      assert one.error or one.tokens == tokens


@pytest.mark.slow
def test_a_process_that_stands_still(model, prompts, want, tmp_path):
  rj.models.save(model, tmp_path)
  with ElasticWorkers.start(tmp_path, 3, slots=SLOTS, patience_s=10) as workers:
    same(workers.serve(prompts, NEW), want)
    stopped = []

    def watch(event):
      if event["event"] == "step" and not stopped:
        stopped.append(event["group"][0])
        workers.processes[stopped[0]].send_signal(signal.SIGSTOP)

    found = workers.serve(prompts, NEW, watch=watch)
    same(found, want)
    assert events(found, "lost")[0]["why"] == "silent for 10 s"


def test_what_is_refused(model, loaded, threads, prompts):
  scaled, _ = loaded("llama_dynamic")
  refused(ConfigError, lambda: instance_programs(scaled), "length")
  fixed = ElasticScheduler([QuadraticTimes()], ElasticOptions(slots=9))
  call = lambda prompts=prompts, **how: threads.serve(prompts, NEW, **how)
  refused(OptionError, lambda: call(policy=fixed), "80")
  refused(OptionError, lambda: call(arrivals=[0.0]), "arrivals")
  refused(OptionError, lambda: call(reserve=0), "reserve")
  refused(PromptError, lambda: call([[]]), "no prompts")
  # Too long for all of them: said at once, and of it alone.
  found = call([np.zeros(400, np.int32)])
  assert "320 slots" in found.answers[0].error


def test_a_manager_hears_why_an_instance_has_ended(model):
  worker = ElasticWorker(model, 0, 8, bytes(range(32)))
  thread = threading.Thread(target=worker.serve, daemon=True)
  thread.start()
  wire = Connection.connect(worker.address, bytes(range(32)), 60, "instance 0")
  send_arrays(wire, "manage", number=0)
  link = LiveLink(wire).start()
  # It lacks its arrays.
  link.send("drop")
  with pytest.raises(PeerError, match="instance 0 failed: ValueError"):
    link.take(within_s=60)
  thread.join(60)
  assert not thread.is_alive()


def test_strangers_get_no_further_than_the_greeting(model):
  worker = ElasticWorker(model, 0, 8, bytes(range(32)))
  threading.Thread(target=worker.serve, daemon=True).start()
  link = PullConnection(socket.create_connection(worker.address), 5, "worker")
  with pytest.raises(AuthenticationError):
    link.greet_server(bytes(32))
  link.close()
  worker.close()
