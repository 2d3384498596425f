"""Models over ranks that each hold a window of blocks of their weights.

Ranks are threads here, with the sockets of processes between them; that ranks
are processes, and are killed, is in tests/launch/test_tensor_ranks.py.
"""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import (
  CheckpointFormatError,
  ConfigError,
  NotFiniteLogitsError,
  OptionError,
  PeerError,
)
from ringjax.infer.tpi_llm import block_window, process_star, tensor_window
from ringjax.infer.tpi_llm.block_window import BlockTimes, BlockWindow
from ringjax.models import small
from ringjax.models.hf.tensor_boxes import TensorBoxes
from ringjax.models.partition.tensor_shares import SharedModel, spans
from ringjax.models.partition.window_layout import WindowLayout
from ringjax.parallel.door import Door
from ringjax.parallel.links.connection import Connection
from ringjax.plan.systems import layer_window
from tests import checkpoints
from tests.infer.window_ranks import KEY, PATIENCE_S, ranks

NEW = 6
SHARES = (3, 2, 2, 1)
# Rows of unequal, odd lengths, and ids that no run of positions has.
PROMPTS = [
  np.array([201, 17, 99, 250, 3, 77, 131, 18, 244, 60, 9], np.int32),
  np.array([5, 222, 41], np.int32),
]


@pytest.fixture(scope="module")
def dense():
  """Tokens of the whole model on one device, by options."""
  model = rj.models.load(small.path())

  def run(**options):
    return rj.infer.generate(model, PROMPTS, max_new_tokens=NEW, **options)

  return run


# ---------------------------------------------------------------------------
# Shares
# ---------------------------------------------------------------------------


def test_spans_deal_all_and_follow_the_weights():
  assert spans(8, (3, 2, 2, 1)) == [(0, 3), (3, 5), (5, 7), (7, 8)]
  assert spans(1, (1, 5, 1)) == [(0, 0), (0, 1), (1, 1)]
  draw = np.random.default_rng(0)
  for _ in range(200):
    weights = draw.integers(0, 9, draw.integers(1, 7)).tolist()
    weights[0] += 1
    count = int(draw.integers(1, 100))
    found = spans(count, weights)
    assert found[0][0] == 0 and found[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    for (first, end), weight in zip(found, weights, strict=True):
      assert abs(end - first - count * weight / sum(weights)) < 1
  for wrong in ((0, 0), (1, -1)):
    with pytest.raises(OptionError, match="shares"):
      spans(4, wrong)


# Plain and fused rows, groups, one KV head, experts, columns, biases.
FORMS = ("llama3", "phi3", "falcon_40b", "falcon_7b", "qwen3_moe", "gpt_oss",
         "gpt_neox", "starcoder2")  # fmt: skip
UNSHARED = (
  "bailing_hybrid", "bamba", "cohere", "deepseek_v2", "deepseek_v2_lite",
  "deepseek_v3", "deepseek_v32", "deepseek_v3_noq", "deepseek_v4", "falcon_h1",
  "falcon_mamba",
  "flex_olmo", "gemma3n", "gemma4", "gemma4_moe", "glm4_moe_lite",
  "glm5_next",
  "glm_moe_dsa", "glm_moe_dsa_shared", "gpt2", "gpt_bigcode",
  "gpt_bigcode_heads", "granitemoehybrid",
  "granitemoehybrid_dense", "hy_v4", "jamba", "kimi_linear", "lfm2",
  "lfm2_moe",
  "longcat_flash", "mamba",
  "mamba2", "minimax", "minimax_m2", "minimax_m3_vl", "mistral4",
  "mistral_large4", "muse_glimmer", "muse_spark",
  "nemotron_h", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "qwen3_5",
  "qwen3_5_moe", "qwen3_next", "qwen4_exp",
  "recurrent_gemma", "stablelm", "youtu", "zamba2",
)  # fmt: skip


def parts_of(model: SharedModel, rank: int) -> dict:
  """The parameters of a rank's part of each layer, by their paths."""
  found = {}
  for n, layer in enumerate(model.layers(rank)):
    for name, part in layer.items():
      for tensor, x in zip(part.tensors, model.read(part), strict=True):
        pieces = [
          tensor.form.split(one) for one in (x if tensor.stacked else [x])
        ]
        for path, *piece in zip(tensor.paths, *pieces, strict=True):
          whole = np.stack(piece) if tensor.stacked else piece[0]
          found[f"{n}.{name}.{path}"] = whole
  return found


@pytest.mark.long
@pytest.mark.parametrize(
  "name",
  [
    pytest.param(x, marks=() if x in FORMS else pytest.mark.slow)
    for x in checkpoints.names()
    if x not in UNSHARED
  ],
)
def test_the_parts_of_all_ranks_are_the_model(name, tmp_path):
  checkpoints.write(name, tmp_path, shards=2)
  whole = parts_of(SharedModel(tmp_path, (1,)), 0)
  model = SharedModel(tmp_path, (3, 2, 1))
  parts = [parts_of(model, rank) for rank in range(3)]
  assert set(whole) == set().union(*parts)
  for path, want in whole.items():
    found = [part[path] for part in parts if path in part]
    cut = [
      axis
      for axis, n in enumerate(want.shape)
      if any(x.shape[axis] != n for x in found)
    ]
    if cut:
      got = np.concatenate(found, cut[0])
    elif path.endswith(("o.bias", "down.bias", "down_bias")):
      # Added once, by the first that has a part.
      assert not any(x.any() for x in found[1:])
      got = found[0]
    else:
      assert len(found) == 1 or found[0].tobytes() == found[1].tobytes()
      got = found[0]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
  ("name", "why"),
  [
    ("olmo2", "over all heads together"),
    ("cohere", "each head with a weight of its own"),
    ("qwen3_next", "Delta"),
    ("deepseek_v3", "Latent"),
    ("muse_spark", "residuals that are no plain sums"),
  ],
)
def test_models_that_are_no_sums_are_refused_by_name(name, why, tmp_path):
  checkpoints.write(name, tmp_path)
  with pytest.raises(ConfigError, match=f"{name}.*layer 0.*{why}"):
    SharedModel(tmp_path, (1, 1))


def test_short_runs_of_a_tensor_are_read_in_parts(monkeypatch):
  model = SharedModel(small.path(), (7, 1))
  (tensor,) = (
    x
    for x in model.layers(1)[0]["feedforward"].tensors
    if x.paths == ("down.weight",)
  )
  name = tensor.names[0]
  shape = model.folder.tensors[name].shape
  whole, part = np.empty(shape, np.float32), np.empty(tensor.shape, np.float32)
  boxes = TensorBoxes(model.folder)
  boxes.read(name, whole, [slice(0, n) for n in shape])
  monkeypatch.setattr("ringjax.models.hf.tensor_boxes._ROWS_BYTES", 5000)
  (box,) = tensor.boxes
  boxes.read(name, part, box)
  np.testing.assert_array_equal(part, whole[box])


# ---------------------------------------------------------------------------
# Windows
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [(), (1,)])
@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_at_most_a_window_of_blocks_is_held(window, kept):
  nbytes, held, most, reads = (5, 3, 0, 2, 4, 1), [], 0, []
  lock = threading.Lock()

  def read(block: int) -> int:
    nonlocal most
    with lock:
      held.append(block)
      reads.append(block)
      passing = [x for x in held if x not in kept]
      most = max(most, len(passing))
    return block

  layout = WindowLayout(nbytes=nbytes, window=window, beside=frozenset(kept))
  blocks = BlockWindow(read, layout, BlockTimes())
  order = [k for k, n in enumerate(nbytes) if n]
  passing = [k for k in order if k not in kept]
  fits = len(passing) <= window
  for _ in range(4):
    for k in order:
      assert blocks.take(k) == k
      if not fits and k not in kept:
        with lock:
          held.remove(k)
      blocks.release(k)
  blocks.close()
  assert most <= window
  assert blocks.peak_blocks <= window + len(kept)
  bound = layer_window.window_numbers([nbytes[k] for k in passing], window)
  assert blocks.peak_bytes <= bound + sum(nbytes[k] for k in kept)
  assert all(reads.count(k) == 1 for k in (order if fits else kept))
  if not fits:
    assert all(4 <= reads.count(k) <= 5 for k in passing)
    passed = [k for k in reads if k not in kept]
    assert passed == list(
      itertools.islice(itertools.cycle(passing), len(passed))
    )


def test_an_error_of_a_read_is_that_of_its_block():
  def read(block: int) -> int:
    if block == 2:
      raise CheckpointFormatError("layer", "a fault", "none", "read again")
    return block

  layout = WindowLayout(nbytes=(1, 1, 1, 1), window=3)
  blocks = BlockWindow(read, layout, BlockTimes())
  assert [blocks.take(0), blocks.take(1)] == [0, 1]
  with pytest.raises(CheckpointFormatError, match="a fault"):
    blocks.take(2)
  blocks.close()
  with pytest.raises(OptionError, match="window"):
    WindowLayout(nbytes=(1,), window=0)


# ---------------------------------------------------------------------------
# Tokens
# ---------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
  "windows",
  [
    (2,),
    pytest.param((1, 2, None), marks=pytest.mark.long),
    pytest.param((3, 4, 5, 6), marks=pytest.mark.slow),
  ],
)
def test_tokens_are_dense_ones_and_bits_the_same_for_every_window(
  dense, monkeypatch, windows
):
  want = dense()
  logits: list[list[bytes]] = []
  output = tensor_window._output

  def noted(*args):
    made = output(*args)
    logits[-1].append(np.asarray(made).tobytes())
    return made

  monkeypatch.setattr(tensor_window, "_output", noted)
  for window in windows:
    # In some runs rank 1 comes last, in others first.
    def late(rank, link, window=window):
      if rank == 1 and window in (2, 5):
        send = link.send_array
        link.send_array = lambda *x: (time.sleep(0.002), send(*x))

    logits.append([])
    reports = []
    with ranks(
      small.path(), SHARES, [window] * 4, wrap=late, events=window == 3
    ) as group:
      new = group.window.generate(
        PROMPTS, max_new_tokens=NEW, report=reports.append
      )
    assert not group.errors
    np.testing.assert_array_equal(new.tokens, want.tokens)
    np.testing.assert_array_equal(new.lengths, want.lengths)
    assert logits[-1] == logits[0] and len(logits[0]) == NEW
    (report,) = reports
    for rank, one in enumerate(report.ranks):
      blocks = [n for n in one.block_bytes if n]
      assert one.rank == rank and one.weight_bytes == sum(blocks)
      most = len(blocks) if window is None else window
      assert 0 < one.peak_blocks <= most
      bound = layer_window.window_numbers(blocks, most)
      assert one.peak_bytes <= bound
      sizes = max(one.block_bytes[:8:2]), max(one.block_bytes[1:8:2])
      if rank and window is not None and all(sizes):
        # The plan's formula, which knows two sizes of blocks.
        assert one.peak_bytes <= layer_window.worker_numbers(*sizes, window)
      reads = NEW if window is not None and window < len(blocks) else 1
      assert reads * sum(blocks) <= one.bytes_read <= (reads + 1) * sum(blocks)
      assert (one.events is None) == (window != 3)
    run = report.simulated()
    assert run.token_s > 0 and len(run.peak_blocks) == 4
    assert all(
      n <= (window or len(report.ranks[0].block_bytes)) for n in run.peak_blocks
    )


@pytest.mark.slow
def test_sampling_and_stops_are_those_of_generate(dense):
  text = rj.data.Tokenizer.load(small.path())
  cases = (
    dict(temperature=0.9, top_k=40, seed=11),
    dict(repetition_penalty=1.7),
    dict(stop=int(dense()[0][2])),
    dict(stop=text.decode([int(dense()[1][1])]), tokenizer=text, pad_id=7),
  )
  with ranks(small.path(), (2, 1), [3, None], retain=2) as group:
    for options in cases:
      want = dense(**options)
      got = group.window.generate(PROMPTS, max_new_tokens=NEW, **options)
      np.testing.assert_array_equal(got.tokens, want.tokens)
      np.testing.assert_array_equal(got.lengths, want.lengths)
    new = group.window.generate(
      PROMPTS, max_new_tokens=NEW, stream=lambda _: True
    )
    assert new.lengths.tolist() == [1, 1]
    with pytest.raises(OptionError, match="evicts|policy"):
      group.window.generate(PROMPTS, max_new_tokens=2, cache_kind="snapkv")
    with pytest.raises(OptionError, match="max_new_tokens"):
      group.window.generate(PROMPTS, max_new_tokens=0)
    # Refusals end nothing.
    again = group.window.generate([PROMPTS[0]], max_new_tokens=2)
    assert again[0].tolist() == dense()[0][:2].tolist()
  assert not group.errors


@pytest.mark.long
def test_a_row_whose_logits_are_not_finite_is_named(dense, monkeypatch):
  real = SharedModel.embedding_rows

  def planted(self, ids):
    rows = np.array(real(self, ids))
    rows[np.asarray(ids) == PROMPTS[1][1]] = np.nan
    return rows

  monkeypatch.setattr(SharedModel, "embedding_rows", planted)
  want = dense()
  with ranks(small.path(), (1, 1)) as group:
    with pytest.raises(NotFiniteLogitsError) as caught:
      group.window.generate(PROMPTS, max_new_tokens=NEW)
    assert caught.value.rows == (1,) and caught.value.positions == (3,)
    np.testing.assert_array_equal(caught.value.tokens[0], want[0])
    assert caught.value.tokens.lengths[1] == 0
    # The group goes on.
    again = group.window.generate([PROMPTS[0]], max_new_tokens=2)
    assert again[0].tolist() == want[0][:2].tolist()
  assert not group.errors


# Norms behind the sum, parallel ones, a bias, experts, no head on a rank.
FAMILIES = ("gemma2", "cohere2", "gpt_oss", "falcon_7b", "granite", "gpt_neox",
            "llama4_text", "starcoder2", "phi3_longrope", "nanochat",
            "bloom", "apertus", "ernie4_5_moe", "granitemoeshared")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, tmp_path):
  checkpoints.write(name, tmp_path)
  model = rj.models.load(tmp_path)
  prompts = [p % model.config.vocab for p in PROMPTS]
  want = rj.infer.generate(model, prompts, max_new_tokens=NEW)
  with ranks(tmp_path, (3, 2, 1), [1, 2, 3]) as group:
    got = group.window.generate(prompts, max_new_tokens=NEW)
  np.testing.assert_array_equal(got.tokens, want.tokens)


@pytest.mark.slow
def test_bfloat16_gives_the_same_bits_again(monkeypatch):
  logits: list[bytes] = []
  output = tensor_window._output

  def noted(*args):
    logits.append(np.asarray(made := output(*args)).tobytes())
    return made

  monkeypatch.setattr(tensor_window, "_output", noted)
  for _ in range(2):
    with ranks(small.path(), (2, 1), dtype="bfloat16") as group:
      group.window.generate(PROMPTS, max_new_tokens=3)
  assert logits[:3] == logits[3:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "unrotated", "dense"])
def test_kinds_of_caches(dense, kind):
  want = dense(cache_kind=kind)
  with ranks(small.path(), (1, 1)) as group:
    got = group.window.generate(PROMPTS, max_new_tokens=NEW, cache_kind=kind)
  np.testing.assert_array_equal(got.tokens, want.tokens)


# ---------------------------------------------------------------------------
# What stays on rank 0
# ---------------------------------------------------------------------------


def spellings(ids) -> list[bytes]:
  """Three ids in a row, as numbers of some widths and as JSON."""
  some = [int(i) for i in ids]
  texts = (", ", ",", " ")
  found = [sep.join(map(str, some)).encode() for sep in texts]
  kinds = ("<i2", "<i4", "<i8", ">i4", "<f4")
  return found + [np.array(some, kind).tobytes() for kind in kinds]


@pytest.mark.long
def test_no_id_reaches_a_worker_and_no_embedding(monkeypatch):
  inbox: dict[int, list[bytes]] = {1: [], 2: []}
  names: dict[str, set[str]] = {}

  def tap(rank, link):
    receive = link.wire.receive

    def noted(view, **options):
      there = receive(view, **options)
      inbox[rank].append(bytes(view))
      return there

    link.wire.receive = noted

  read = TensorBoxes.read

  def seen(self, name, out, box):
    blocks = self is not owner
    names.setdefault("workers" if blocks else "rank 0", set()).add(name)
    read(self, name, out, box)

  monkeypatch.setattr(TensorBoxes, "read", seen)
  owner = None
  with ranks(small.path(), (1, 1, 1), wrap=tap) as group:
    owner = group.window._model._boxes
    names.clear()
    new = group.window.generate(PROMPTS, max_new_tokens=NEW)
  for rank, parts in inbox.items():
    text = b"".join(parts)
    for row, prompt in enumerate(PROMPTS):
      every = np.concatenate([prompt, new[row]])
      for n in range(len(every) - 2):
        for wanted in spellings(every[n : n + 3]):
          assert wanted not in text, (rank, row, n)
    # It would have been found: positions do come.
    assert np.arange(5, 8).astype("<i4").tobytes() in text
    # Single ids of a step, which have no others beside them.
    steps = [json.loads(x) for x in parts if b'"t": "pass"' in x]
    assert len(steps) == NEW
    assert not any("ids" in step or "token" in step for step in steps)
  outer = {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
  assert names["workers"] and not names["workers"] & outer
  assert names["rank 0"] & outer


# ---------------------------------------------------------------------------
# Failures
# ---------------------------------------------------------------------------


def failing(monkeypatch, rank: int, block: int, act) -> None:
  """Has a rank do something in place of its term of a block."""
  term = tensor_window._RankBlocks.term

  def maybe(self, number, *args):
    if (self.rank, number) == (rank, block):
      act()
    return term(self, number, *args)

  monkeypatch.setattr(tensor_window._RankBlocks, "term", maybe)


def test_a_rank_that_dies_is_named_on_all_others(monkeypatch):
  def die():
    group.links[2].wire.close()
    raise PeerError("dead")

  failing(monkeypatch, 2, 5, die)
  with ranks(small.path(), (1, 1, 1)) as group:
    with pytest.raises(PeerError, match="rank 2 closed") as found:
      group.window.generate(PROMPTS, max_new_tokens=NEW)
    assert found.value.rank == 2
    with pytest.raises(PeerError, match="ended.*rank 2"):
      group.window.generate(PROMPTS, max_new_tokens=NEW)
  assert group.errors[1].rank == 2 and "rank 2" in f"{group.errors[1]}"


def test_what_a_rank_could_not_do_is_said_by_all(monkeypatch):
  def fault():
    raise CheckpointFormatError("model", "a bad disk", "a good one", "buy one")

  failing(monkeypatch, 1, 2, fault)
  with (
    ranks(small.path(), (1, 1, 1)) as group,
    pytest.raises(PeerError, match="rank 1 failed: .*a bad disk") as found,
  ):
    group.window.generate(PROMPTS, max_new_tokens=NEW)
  assert found.value.rank == 1 and "a bad disk" in f"{group.errors[2]}"
  assert isinstance(group.errors[1], CheckpointFormatError)


@pytest.mark.long
def test_a_frozen_rank_is_named_and_a_slow_one_is_waited_for(monkeypatch):
  over = threading.Event()
  slow = lambda: time.sleep(2.0)
  failing(monkeypatch, 1, 1, slow)
  with ranks(small.path(), (1, 1), patience_s=1.0) as group:
    group.window.generate([PROMPTS[1]], max_new_tokens=1)

  def freeze():
    # Its thread that says that it is alive is stopped with it.
    group.links[1].wire.send = lambda *_: None
    over.wait(PATIENCE_S)

  monkeypatch.undo()
  failing(monkeypatch, 1, 3, freeze)
  with ranks(small.path(), (1, 1), patience_s=1.0) as group:
    with pytest.raises(PeerError, match="rank 1 did nothing for 1 s") as found:
      group.window.generate([PROMPTS[1]], max_new_tokens=1)
    assert found.value.rank == 1
    over.set()


def test_who_does_not_join_is_named():
  with socket.create_server(("127.0.0.1", 0)) as server:
    address = server.getsockname()
    said: dict[str, BaseException] = {}

    def come(name, rank, **options):
      options = {"size": 4, "key": KEY, "digest": "", "join_s": 1.0} | options
      try:
        link = process_star.join(address, rank, patience_s=5.0, **options)
        link.take("setup")
      except PeerError as error:
        said[name] = error

    def gather(*comers, **options):
      threads = [
        threading.Thread(target=come, args=x[:2], kwargs=dict(x[2:]))
        for x in comers
      ]
      for thread in threads:
        thread.start()
      try:
        process_star.Star.gather(
          server, 4, KEY, patience_s=5.0, **{"join_s": 1.0} | options
        )
      finally:
        for thread in threads:
          thread.join(PATIENCE_S)

    with pytest.raises(PeerError, match="rank 1, 3 of 4 did not join") as found:
      gather(("there", 2))
    assert found.value.rank == 1
    assert "rank 1, 3 of 4 did not join" in f"{said['there']}"
    # One that has another key is a stranger.
    with pytest.raises(PeerError, match="rank 1, 2, 3 of 4"):
      gather(("stranger", 1, ("key", b"x" * 16)))
    assert "same key" in f"{said['stranger']}"
    with pytest.raises(OptionError, match="another model folder on rank 3"):
      gather(("other", 3, ("digest", "else")), join_s=60)
    assert "another model" in f"{said['other']}"
    with pytest.raises(OptionError, match="rank 4 of 4"):
      gather(("many", 4), join_s=60)

    with pytest.raises(OptionError, match="two processes of rank 1"):
      gather(("one", 1), ("same", 1), join_s=60)

    def gone():
      raise PeerError("rank 3 ended with status 1", rank=3)

    with pytest.raises(PeerError, match="status 1"):
      gather(join_s=60, check=gone)
  with pytest.raises(PeerError, match="rank 0 was not reached"):
    process_star.join(address, 1, 2, KEY, join_s=0.3)


def test_rank_0_is_named_if_another_gives_it_up():
  with socket.create_server(("127.0.0.1", 0)) as server:
    links = []
    rank = threading.Thread(
      target=lambda: links.append(
        process_star.join(server.getsockname(), 1, 2, KEY)
      )
    )
    rank.start()
    star = process_star.Star.gather(server, 2, KEY)
    rank.join(PATIENCE_S)
    links[0].fail("it did nothing", blame=0)
    with pytest.raises(
      PeerError, match="rank 0 was given up by rank 1"
    ) as told:
      star.links[1].take()
    assert told.value.rank == 0
    star.close()


def test_a_rank_that_cannot_say_hello_leaves_no_connection(monkeypatch):
  wires = []

  def fail(wire, *_, **__):
    wires.append(wire)
    raise PeerError("rank 0 closed the connection")

  monkeypatch.setattr(process_star, "send_arrays", fail)
  with socket.create_server(("127.0.0.1", 0)) as server:
    greet = lambda link, address: Connection.admit(link, address, KEY, 60.0)
    with (
      Door(server, greet, Connection.close, name="rank 0"),
      pytest.raises(PeerError, match="rank 0 closed"),
    ):
      process_star.join(server.getsockname(), 1, 2, KEY)
  assert [wire.link.fileno() for wire in wires] == [-1]


def test_shares_have_to_be_those_of_the_ranks():
  with pytest.raises(OptionError, match="shares: got 2"):
    tensor_window.TensorWindow(small.path(), shares=(1, 2))


def test_times_of_first_passes_are_apart():
  times = BlockTimes()
  for later, seconds in ((False, 0.0), (True, 0.0)):
    times.begin(later=later)
    with times.of("compute", 1):
      time.sleep(0.02 if not later else seconds)
  assert times.means("compute", 2)[0] == 0
  assert times.means("compute", 2)[1] < 0.02
  times.restart()
  assert not any(times.means("compute", 2))
  assert block_window.BlockTimes.KINDS == ("read", "disk", "peers", "compute")


def test_blocks_that_stay_have_the_time_of_their_read():
  times = BlockTimes()
  with times.of("read", 0):
    time.sleep(0.01)
  times.restart()
  times.begin(later=False)
  assert times.means("read", 2)[0] >= 0.01
  assert times.means("read", 2)[1] == 0
  with times.of("read", 0):
    pass
  assert times.means("read", 2)[0] < 0.01
