"""Attention on workers gives the tokens of a model that attends itself."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import struct
import threading
import time

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import ConfigError, OptionError, PeerError
from ringjax.infer.fastdecode import attention_worker
from ringjax.infer.fastdecode.attention_worker import AttentionServer
from ringjax.parallel.links import array_messages
from ringjax.parallel.links.connection import (
  AuthenticationError,
  Connection,
  HostileMessageError,
)
from ringjax.parallel.links.live_link import LinkEnding, LiveLink
from ringjax.serve.cluster import LoadControl, TokenLimit
from ringjax.transfer.wire import PullConnection
from tests.helpers import refused

LENGTHS = (5, 17, 70, 9, 33)
KEY = bytes(range(32))


def prompts_of(model, lengths=LENGTHS, seed=0):
  rng = np.random.default_rng(seed)
  vocab = model.config.vocab
  return [rng.integers(0, vocab, n).astype(np.int32) for n in lengths]


@pytest.fixture(scope="module")
def four():
  with rj.infer.AttentionWorkers.in_threads(4, patience_s=120) as workers:
    yield workers


def same(model, workers, prompts, count=7, *, generate=None, **options):
  """The report of a call whose tokens are those of `generate`."""
  reports = []
  got = rj.infer.generate_beside(
    model, prompts, workers=workers, max_new_tokens=count,
    report=reports.append, **options,
  )  # fmt: skip
  want = rj.infer.generate(
    model, prompts, max_new_tokens=count, **(generate or {})
  )
  np.testing.assert_array_equal(got.tokens, want.tokens)
  np.testing.assert_array_equal(got.lengths, want.lengths)
  return reports[0]


@pytest.mark.slow
@pytest.mark.parametrize(
  "assignment",
  [None, (0,) * 5, (0, 1, 0, 1, 1), (2, 2, 1, 0, 2), (3, 1, 0, 0, 2)],
)
def test_any_workers_and_any_assignment(loaded, four, assignment):
  model, _ = loaded("llama3")
  found = same(model, four, prompts_of(model), assignment=assignment)
  assert found.assignment == (assignment or (0, 1, 2, 3, 0))
  assert found.peak_tokens == sum(LENGTHS) + 6 * len(LENGTHS)
  assert found.traffic.row_steps == 6 * len(LENGTHS)


@pytest.mark.long
def test_stops_draws_and_prompts_that_wait_for_a_place(loaded, four):
  model, _ = loaded("llama3")
  prompts = prompts_of(model)
  sampler = rj.infer.Sample(
    temperature=0.9, top_k=9, repetition_penalty=1.3, seed=7
  )
  # Ids that some rows come to in the middle.
  first = rj.infer.generate(
    model, prompts, max_new_tokens=7, sampler=sampler
  ).tokens
  stop = [int(first[1, 2]), int(first[3, 4])]
  streamed = []
  options = dict(sampler=sampler, stop=stop)
  found = same(
    model, four, prompts, rows=2, group=1, stream=streamed.append,
    **options, generate=options,
  )  # fmt: skip
  assert len(set(found.starts)) > 1 and found.starts[:2] == (0, 0)
  # Each token was told once, at its step.
  told = np.stack(streamed)
  for row, start in enumerate(found.starts):
    came = told[:, row][told[:, row] >= 0]
    assert came.size == (told[start:, row] >= 0).sum()
  lone = same(model, four, prompts[:1], **options, generate=options)
  assert lone.assignment == (0,)


@pytest.mark.long
@pytest.mark.parametrize("rows", [2, 5])
def test_the_limit_of_cached_tokens_counts_prompts(loaded, four, rows):
  """Also where places are the bottleneck, and of prompts that are long."""
  model, _ = loaded("llama3")
  prompts = prompts_of(model, (40, 3, 17, 33, 5))
  control = LoadControl(60)
  found = same(model, four, prompts, 6, rows=rows, group=1, starts=control)
  assert 40 < found.peak_tokens <= 60
  for few in (45, 30):
    refused(
      OptionError,
      lambda few=few: same(
        model, four, prompts, 6, rows=rows, group=1, starts=LoadControl(few)
      ),
      "40 of prompts", str(few),
    )  # fmt: skip


@pytest.mark.slow
def test_starts_by_load_control(loaded, four):
  model, _ = loaded("llama3")
  prompts = prompts_of(model, (3,) * 8)
  limit = TokenLimit.level(4, 8, 2, prompt=3)
  control = LoadControl(limit)
  found = same(model, four, prompts, 8, rows=4, group=1, starts=control)
  assert found.starts == tuple(range(0, 16, 2))
  assert found.peak_tokens <= limit.tokens
  # A group's prompt, and what it generated: none is at its end with others.
  joint = same(model, four, prompts, 8, rows=4)
  assert found.peak_tokens < joint.peak_tokens


@pytest.mark.parametrize("name", [
  pytest.param("gpt_oss", marks=pytest.mark.slow),
  pytest.param("gemma2", marks=pytest.mark.slow),
  pytest.param("falcon_rw", marks=pytest.mark.slow),
  pytest.param("qwen3", marks=pytest.mark.slow),
  pytest.param("gemma3_text", marks=pytest.mark.slow),
  pytest.param("llama4_text", marks=pytest.mark.slow),
])  # fmt: skip
def test_families(loaded, four, name):
  """Sinks, soft caps, windows, slopes, chunks: as the model's own cache."""
  model, _ = loaded(name)
  same(model, four, prompts_of(model, (5, 17, 33)), 9, rows=2)


@pytest.mark.slow
def test_windows_in_a_dense_cache(loaded, four):
  model, _ = loaded("gpt_oss")
  same(
    model, four, prompts_of(model), 9, cache_kind="dense",
    assignment=(1, 0, 1, 0, 0),
  )  # fmt: skip


@pytest.mark.slow
def test_bytes_of_a_step_do_not_depend_on_the_context(loaded, four):
  model, _ = loaded("llama3")
  layer = model.config.layers[0].attention
  short, long = (
    same(model, four, prompts_of(model, (n,) * 4), 5, rows=4).traffic
    for n in (3, 120)
  )
  for name in ("sent_bytes", "received_bytes", "row_steps"):
    assert getattr(short, name) == getattr(long, name)
  assert long.prompt_bytes > short.prompt_bytes
  n, k, h = layer.heads, layer.kv_heads, layer.head_dim
  many = short.row_steps * len(model.config.layers)
  assert short.row_steps == 4 * 4
  # Numbers of four bytes, a position, and a header a message.
  headers = many * 180
  pure = many * 4 * ((n + 2 * k) * h + 1)
  assert pure < short.sent_bytes < pure + headers
  pure = many * 4 * n * h
  assert pure < short.received_bytes < pure + headers


@pytest.mark.long
def test_what_is_refused(loaded, four):
  model, _ = loaded("llama3")
  prompts = prompts_of(model)
  call = lambda model=model, **how: rj.infer.generate_beside(
    model, prompts, **{"workers": four, "max_new_tokens": 3} | how
  )
  sharded, _ = loaded("llama3", 2)
  refused(ConfigError, lambda: call(sharded), "mesh")
  refused(OptionError, lambda: call(assignment=(0, 4, 0, 0, 0)), "0 to 3")
  refused(OptionError, lambda: call(assignment=(0, 1)), "assignment")
  refused(OptionError, lambda: call(cache_kind="int8"), "cache_kind")
  refused(OptionError, lambda: call(stop="end"), "stop")
  # A call that was refused leaves the workers free.
  same(model, four, prompts[:2], 2)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "word"), [("qwen3_next", "Delta"), ("deepseek_v3", "Latent")]
)
def test_layers_without_keys_are_refused(loaded, four, name, word):
  model, _ = loaded(name)
  refused(
    ConfigError,
    lambda: rj.infer.generate_beside(
      model, prompts_of(model), workers=four, max_new_tokens=3
    ),
    word,
  )


class SilentServer:
  """Has the key, takes what comes, and answers nothing."""

  def __init__(self):
    self.socket = socket.create_server(("127.0.0.1", 0))
    self.address = self.socket.getsockname()
    threading.Thread(target=self.serve, daemon=True).start()

  def serve(self):
    with self.socket:
      link = PullConnection(self.socket.accept()[0], 60, "model")
    with link.link:
      link.greet_client(KEY)
      while link.link.recv(1 << 16):
        pass


def test_a_silent_worker_is_named_in_time(loaded):
  model, _ = loaded("llama3")
  well = AttentionServer(KEY)
  threading.Thread(target=well.serve, daemon=True).start()
  addresses = [well.address, SilentServer().address]
  with rj.infer.AttentionWorkers.connect(
    addresses, KEY, patience_s=1
  ) as workers:
    begin = time.monotonic()
    call = lambda: rj.infer.generate_beside(
      model, prompts_of(model), workers=workers, max_new_tokens=3
    )
    refused(PeerError, call, "worker 1", str(addresses[1][1]), "1 s")
    assert time.monotonic() - begin < 60
    # Answers may still come: they would be taken for those of another call.
    refused(OptionError, call, "failed")
  well.close()


def test_strangers_and_nonsense(loaded):
  server = AttentionServer(KEY, patience_s=5)
  threading.Thread(target=server.serve, daemon=True).start()
  with pytest.raises(AuthenticationError):
    rj.infer.AttentionWorkers.connect([server.address], bytes(32))
  refused(
    PeerError,
    lambda: rj.infer.AttentionWorkers.connect([("127.0.0.1", 1)], KEY),
    "worker 0",
  )
  bad = [
    b"not json",
    b"[]",
    json.dumps({"t": "open", "x": [["object", [1]]]}).encode(),
    json.dumps({"t": "open", "x": [["float32", [-1]]]}).encode(),
    json.dumps({"t": "open", "x": [["float32", [1 << 36]]]}).encode(),
    json.dumps(
      {"t": "open", "x": [["float32", [0, 1 << 39, 1 << 39]]]}
    ).encode(),
    json.dumps({"t": "attend", "x": [], "half": 0, "layer": 0}).encode(),
    json.dumps({"t": "open", "x": [], "rows": [-1], "config": "{}"}).encode(),
  ]
  for body in bad:
    link = PullConnection(socket.create_connection(server.address), 5, "w")
    link.greet_server(KEY)
    link.send([struct.pack("<I", len(body)) + body])
    # It says why, or just leaves; and takes the next connection.
    try:
      found = array_messages.receive_arrays(link)
      while found is not None and found.kind in ("live", "beat"):
        found = array_messages.receive_arrays(link)
    except (PeerError, HostileMessageError):
      found = None
    assert found is None or (found.kind == "bye" and found.fields["blame"])
    link.close()
  model, _ = loaded("llama3")
  with rj.infer.AttentionWorkers.connect([server.address], KEY) as workers:
    same(model, workers, prompts_of(model)[:2], 3)
  server.close()


def opening_fails(address, error, monkeypatch):
  """Text of the error of a worker that can't open a model, for `error`."""

  def fail(*_):
    raise error

  with monkeypatch.context() as patch:
    patch.setattr(attention_worker, "_opened", fail)
    link = LiveLink(Connection.connect(address, KEY, 60, "worker")).start()
    link.send("open")
    with pytest.raises(PeerError) as raised:
      link.take(within_s=60)
    assert link.ending is LinkEnding.TOLD
    link.join(60)
  return str(raised.value)


def test_any_error_ends_one_connection_and_the_next_is_served(monkeypatch):
  server = AttentionServer(KEY)
  thread = threading.Thread(target=server.serve, daemon=True)
  thread.start()
  # A config "[]" has no keys, for instance.
  for error in (AttributeError("no get"), KeyError("bias"), MemoryError("k")):
    text = opening_fails(server.address, error, monkeypatch)
    assert text == f"worker failed: {type(error).__name__}: {error}"
  server.close()
  thread.join(60)
  assert not thread.is_alive()


def test_a_worker_that_is_interrupted_ends_its_link(monkeypatch):
  server = AttentionServer(KEY)

  def serve():
    with contextlib.suppress(SystemExit):
      server.serve()

  threading.Thread(target=serve, daemon=True).start()
  text = opening_fails(server.address, SystemExit(), monkeypatch)
  assert text == "worker failed: the worker has ended"
  server.close()


@pytest.mark.long
def test_processes_and_one_that_dies(loaded):
  model, _ = loaded("llama3")
  prompts = prompts_of(model)
  with rj.infer.AttentionWorkers.start(2, patience_s=120) as workers:
    same(model, workers, prompts)
    seen = []

    def stream(tokens):
      seen.append(tokens)
      if len(seen) == 3:
        workers.processes[1].kill()

    refused(
      PeerError,
      lambda: rj.infer.generate_beside(
        model, prompts, workers=workers, max_new_tokens=20, stream=stream
      ),
      "worker 1",
    )
    assert 3 <= len(seen) < 20
  assert all(one.poll() is not None for one in workers.processes)


@pytest.mark.slow
def test_a_process_that_stands_still(loaded):
  """It takes what is sent until buffers are full, and answers nothing."""
  model, _ = loaded("llama3")
  prompts = prompts_of(model)
  with rj.infer.AttentionWorkers.start(2, patience_s=30) as workers:
    same(model, workers, prompts)
    workers.patience_s = 2
    workers.processes[0].send_signal(signal.SIGSTOP)
    refused(
      PeerError,
      lambda: rj.infer.generate_beside(
        model, prompts, workers=workers, max_new_tokens=3
      ),
      "worker 0",
    )
