"""Prompts that are read by the tiles that a pattern chooses."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.eval import perplexity
from ringjax.nn.sharding_context import ContextParallel
from ringjax.nn.tile_context import CachedTiles, TileParallel
from tests.helpers import SMALL, make_mesh

# Nearly all of the mass: every tile is computed, but by lists of tiles.
ALL = "xattention,threshold=0.9999999,block=64"
HALF = "xattention,threshold=0.5,block=64"


@functools.cache
def small(devices=1):
  mesh = make_mesh(devices, "auto") if devices > 1 else None
  return rj.models.create(SMALL, seed=1, mesh=mesh)


@pytest.fixture(scope="module")
def prompts():
  rng = np.random.default_rng(0)
  return [rng.integers(0, 64, n).tolist() for n in (200, 130)]


def ask(prompts, method, *, model=None, **more):
  """New tokens, as lists, and the report of a call."""
  reports = []
  new = rj.infer.generate(
    small() if model is None else model,
    prompts,
    max_new_tokens=4,
    prefill=method,
    report=reports.append,
    **more,
  )
  return new.tokens.tolist(), reports[0]


def test_all_tiles_give_the_dense_answer_and_leave_nothing_out(prompts):
  dense, without = ask(prompts, "blockwise")
  new, report = ask(prompts, f"sparse:{ALL}")
  assert new == dense and without.tiles is None
  assert report.prefill.name == "sparse" and report.tiles.computed == 1
  assert report.tiles.left_out < 1e-6


def test_what_is_left_out_is_reported_by_layer(prompts):
  _, report = ask(prompts, f"sparse:{HALF}")
  (layer,) = report.tiles.layers
  assert layer.layer == 0 and 0.5 < layer.computed < 1
  assert 0 < layer.left_out <= layer.worst_head < 0.5
  assert report.tiles.record()["threshold"] == 0.5


def test_a_threshold_of_one_is_the_dense_method(prompts):
  _, report = ask(prompts, "sparse:flexprefill,gamma=1")
  assert report.prefill.name == "blockwise" and report.tiles is None
  assert "all tiles" in report.prefill.why


@pytest.mark.long
def test_a_row_is_read_as_if_it_were_alone(prompts):
  batch, _ = ask(prompts, f"sparse:{HALF}")
  alone = [ask([prompt], f"sparse:{HALF}")[0][0] for prompt in prompts]
  assert batch == alone


@pytest.mark.long
@pytest.mark.parametrize("turn", ["first", "second"])
def test_a_row_in_chunks_is_read_as_if_it_were_alone(turn):
  """Its last chunk, of a few tokens, stands beside a longer one."""
  model = rj.models.create({**SMALL, "num_hidden_layers": 3}, seed=1)
  rng = np.random.default_rng(1)
  turns = [[rng.integers(0, 64, n).tolist() for n in (140, 200)]]
  if turn == "second":
    turns += [[rng.integers(0, 64, n).tolist() for n in (12, 200)]]

  def logits(rows):
    session = rj.infer.Session(model, 640, batch=rows)
    for prompts in turns:
      rj.infer.read_context(
        model, prompts[:rows], cache=session, prefill=f"sparse:{HALF}", chunk=64
      )
    return model(np.ones((rows, 1), np.int32), cache=session.cache)[0][0]

  np.testing.assert_allclose(logits(2), logits(1), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(
  "text",
  [
    HALF,
    "flexprefill,gamma=0.1,tau=1,least_tokens=0,block=64",
    "minference,first=1,window=64,vertical=2,slash=4,tokens=64,block=64",
  ],
)
def test_shards_leave_out_what_one_device_leaves_out(devices, text, prompts):
  new, report = ask(prompts, f"sparse:{text}")
  sharded, on_mesh = ask(prompts, f"sparse:{text}", model=small(devices))
  assert sharded == new
  assert on_mesh.tiles.computed == report.tiles.computed < 1
  assert on_mesh.tiles.left_out == pytest.approx(
    report.tiles.left_out, rel=1e-4, abs=1e-6
  )


@pytest.mark.long
@pytest.mark.parametrize(
  ("method", "layout"),
  [("ring", rj.Contiguous()), ("zigzag", rj.Zigzag())],
)
def test_methods_read_the_same_tiles(method, layout):
  """Whole blocks are on the shards, or tokens are exchanged in a layer."""
  rng = np.random.default_rng(0)
  for length, blocks in ((500, 8), (200, 4)):
    prompts = [rng.integers(0, 64, length).tolist(), [1, 2, 3]]
    new, report = ask(prompts, f"sparse:{HALF}")
    sharded, on_mesh = ask(prompts, f"sparse-{method}:{HALF}", model=small(4))
    assert sharded == new
    assert on_mesh.prefill.layout == layout
    assert on_mesh.tiles.computed == report.tiles.computed
    assert on_mesh.tiles.left_out == pytest.approx(
      report.tiles.left_out, rel=1e-4, abs=1e-6
    )
    tiles = on_mesh.tiles.by_shard
    assert len(tiles) == 4 and sum(tiles) >= 4 * (2 * blocks - 1)


@pytest.mark.long
def test_stripes_of_blocks_level_the_shards():
  prompts = [np.random.default_rng(0).integers(0, 64, 1800).tolist()]
  _, report = ask(prompts, f"sparse:{HALF}", model=small(2))
  assert report.prefill.layout == rj.Striped(64)
  assert report.tiles.balance <= 1.15
  assert report.tiles.record()["by_shard"] == [*report.tiles.by_shard]


@pytest.mark.long
def test_a_session_without_room_for_whole_blocks_is_read_the_same():
  prompt = [np.random.default_rng(0).integers(0, 64, 196).tolist()]
  new, _ = ask(prompt, f"sparse:{HALF}")
  session = rj.infer.Session(small(2), 204, batch=1)
  got, report = ask(prompt, f"sparse:{HALF}", model=small(2), cache=session)
  assert got == new and report.prefill.layout == rj.Striped()


@pytest.mark.long
def test_losses_of_rows_that_stripes_do_not_fill():
  """Two shards of 100 tokens, in stripes of 64."""
  text = [np.random.default_rng(0).integers(0, 64, 201).astype(np.int32)]
  losses = lambda model: perplexity(
    model, text, length=200, rows=1, prefill=f"sparse:{HALF}"
  )
  one, two = losses(small()), losses(small(2))
  np.testing.assert_allclose(two.nll, one.nll, atol=1e-5)


@pytest.mark.long
def test_heads_and_rows_may_be_sharded(prompts):
  new, report = ask(prompts, f"sparse:{HALF}")
  mesh = rj.make_mesh((2, 2, 2), ("data", "seq", "model"))
  model = rj.models.create(SMALL, seed=1, mesh=mesh)
  sharded, on_mesh = ask(prompts, f"sparse:{HALF}", model=model)
  assert sharded == new and on_mesh.tiles.computed == report.tiles.computed


@pytest.mark.long
def test_chunks_and_turns_read_earlier_keys_by_tiles(prompts):
  def turns(method, **more):
    session = rj.infer.Session(small(), 512, batch=2)
    first, _ = ask(prompts, method, cache=session, **more)
    second, report = ask(
      [x[:90] for x in prompts], method, cache=session, **more
    )
    return first, second, report

  *dense, _ = turns("chunked", chunk=64)
  *new, report = turns(f"sparse:{ALL}", chunk=64)
  assert new == dense and report.tiles.left_out < 1e-6
  assert report.tiles.computed is None
  *_, report = turns(f"sparse:{HALF}", chunk=64)
  assert isinstance(report.prefill.attend, CachedTiles)
  assert 0.01 < report.tiles.left_out < 0.5
  # A second turn without chunk= reads earlier keys, too.
  *new, report = turns(f"sparse:{ALL}")
  assert new == dense and report.prefill.chunk is not None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "unrotated", "snapkv:budget=64"])
def test_caches_hold_what_they_hold_after_dense_reading(kind, prompts):
  for more in ({}, {"chunk": 64}):
    dense = ask(prompts, "chunked" if more else "auto", cache_kind=kind, **more)
    new = ask(prompts, f"sparse:{ALL}", cache_kind=kind, **more)
    assert new[0] == dense[0]


@pytest.mark.long
def test_drafts_change_no_token(prompts):
  plain, _ = ask(prompts, f"sparse:{HALF}")
  drafted, report = ask(prompts, f"sparse:{HALF}", speculate="lookup")
  assert drafted == plain and report.tiles is not None


@pytest.mark.long
@pytest.mark.parametrize(
  "family", ["gpt_oss", "gemma3_text", "deepseek_v3", "qwen3_next"]
)
def test_windows_sinks_latents_and_states_are_kept(family, loaded):
  model, _ = loaded(family)
  tokens = np.random.default_rng(0).integers(0, 32, (2, 150))
  dense = model(tokens, attend=ContextParallel())
  pattern = rj.XAttention(threshold=0.9999999, block=64)
  out = model(tokens, attend=TileParallel(pattern=pattern))
  np.testing.assert_allclose(out, dense, atol=1e-4)


@pytest.mark.long
def test_both_attentions_of_a_layer_are_measured(loaded):
  """LongCat's layers have two; a limit is of both."""
  prompt = [np.random.default_rng(0).integers(0, 32, 100).tolist()]
  one, two = (
    ask(prompt, f"sparse:{HALF}", model=loaded(name)[0])[1].tiles
    for name in ("deepseek_v3", "longcat_flash")
  )
  assert two.samples == 2 * one.samples
  assert all(x.computed == 1 for x in two.layers)


def test_more_than_the_limit_left_out_is_refused(prompts):
  with pytest.raises(OptionError, match="max_left_out.*layer 0"):
    ask(prompts, f"sparse:{HALF},max_left_out=0.01")
  _, report = ask(prompts, f"sparse:{HALF},max_left_out=0.6")
  assert report.tiles.left_out < 0.6


@pytest.mark.parametrize(
  "text",
  [
    "sparse",
    "sparse:",
    "sparse:zattention",
    "sparse:xattention,threshold=2",
    "sparse:xattention,stride=7",
    "sparse:xattention,width=2",
    "sparse:flexprefill,gamma=-1",
    "sparse-gather:xattention",
    "sparse-:xattention",
  ],
)
def test_what_is_no_pattern_is_refused_before_a_model_is_needed(text):
  with pytest.raises(OptionError):
    rj.infer.GenerateConfig(prefill=text)


def test_pairs_that_make_no_sense_are_refused_by_name(prompts):
  method = f"sparse:{HALF}"
  with pytest.raises(OptionError, match="rows_at_once"):
    ask(prompts, method, rows_at_once=1)
  with pytest.raises(OptionError, match="contexts"):
    ask(prompts, method, contexts=[[1, 2, 3]])
  with pytest.raises(OptionError, match="attention_fn"):
    ask(prompts, method, attention_fn=lambda q, k, v, **more: q)
  with pytest.raises(OptionError, match="machine|partition"):
    ask(prompts, method, partition=(100, 100))
  with pytest.raises(OptionError, match="wire"):
    ask(prompts, method, model=small(2), wire="int8")
  with pytest.raises(OptionError, match="one device with all keys"):
    ask(prompts, method, model=small(2), chunk=64)
  with pytest.raises(OptionError, match="max_left_out"):
    perplexity(
      small(),
      [np.arange(64, dtype=np.int32)],
      length=64,
      rows=1,
      prefill=f"{method},max_left_out=0.5",
    )
  session = rj.infer.Session(small(), 512, batch=2)
  rj.infer.read_context(small(), prompts, cache=session)
  session.cache = session.cache.reset([1])
  with pytest.raises(OptionError, match="empty rows"):
    ask(prompts, method, cache=session)
  session = rj.infer.Session(small(), 512, batch=2, rows_at_once=1)
  with pytest.raises(OptionError, match="rows_at_once"):
    rj.infer.read_context(small(), prompts, cache=session, prefill=method)


@pytest.mark.long
@pytest.mark.parametrize(
  ("family", "reason"),
  [("bloom", "ALiBi"), ("deepseek_v32", "index")],
)
def test_models_that_weigh_or_choose_keys_are_refused(family, reason, loaded):
  model, _ = loaded(family)
  with pytest.raises(OptionError, match=reason):
    ask([[1, 2, 3]], f"sparse:{HALF}", model=model)
