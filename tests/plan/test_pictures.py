"""Pictures of strategies: all are drawn, and what they show is counted."""

from __future__ import annotations

import functools
import importlib.util
import pathlib

import numpy as np
import pytest

import ringjax as rj
from launch import plan
from ringjax.data.batches.placement import place
from ringjax.errors import OptionError, ShapeError
from ringjax.plan import draw, pictures
from tests.helpers import script

call = functools.partial(script, plan)

LOCAL, TILE = pictures.LOCAL, pictures.TILE
DRAWS = pytest.mark.skipif(
  importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)


def counts(layout, strategy):
  """[hops, R], as the loops of attention run them."""
  return rj.tile_counts(
    layout, strategy.mask, strategy.shards, strategy.shards * LOCAL, TILE, TILE
  )


@pytest.fixture(scope="module")
def drawn():
  """The steps and the panels of each strategy."""
  made = pictures.STRATEGIES
  return {n: (one, pictures.panels(one)) for n, one in made.items()}


def colored(panel, step, device):
  """Tiles that are not white in a cell, by the colour of their keys."""
  cell = step.cells[device]
  if cell is None or not step.computes:
    return {}
  image = pictures._mosaic(panel, cell)
  tiles = LOCAL // TILE
  return {
    key: int((image[:, n * tiles : (n + 1) * tiles] < 1 - 1e-9).any(-1).sum())
    for n, key in enumerate(cell.keys)
  }


def test_each_strategy_shows_all_tiles_once(drawn):
  """Of every query's and every key's shard as many as there are."""
  for name, (strategy, panels) in drawn.items():
    assert [panel.name for panel in panels] == list(strategy.layouts)
    for panel in panels:
      hops = counts(pictures.LAYOUTS[panel.name], strategy)
      want = np.zeros((strategy.shards, strategy.shards), int)
      for hop, device in np.ndindex(*hops.shape):
        want[device, (device - hop) % strategy.shards] = hops[hop, device]
      got = np.zeros_like(want)
      for step in panel.steps:
        for device, cell in enumerate(step.cells):
          shown = colored(panel, step, device)
          if len(getattr(cell, "queries", ())) == 1:
            for key, n in shown.items():
              got[cell.queries[0], key] += n
          elif shown:
            # A part of the heads: queries of several shards in one cell.
            for key, n in shown.items():
              assert n == want[list(cell.queries), key].sum(), name
            got[device] = want[device]
      np.testing.assert_array_equal(got, want, err_msg=f"{name} {panel.name}")


def test_a_ring_shows_its_hops(drawn):
  strategy, panels = drawn["ring"]
  for panel in panels:
    want = counts(pictures.LAYOUTS[panel.name], strategy)
    np.testing.assert_array_equal(panel.counts(), want)
    got = [
      [sum(colored(panel, step, i).values()) for i in range(strategy.shards)]
      for step in panel.steps
    ]
    np.testing.assert_array_equal(got, want)


def test_nobody_has_keys_that_were_not_sent(drawn):
  """What is at cell in a step was there before, or came from who had it."""
  for name, (strategy, _) in drawn.items():
    moves = {"queries": 0, "keys": 1, "slow link": 1}
    # What each device has had: its own, and what it was sent.
    had = [({i}, {i}) for i in range(strategy.shards)]
    for before, step in zip(
      (None, *strategy.steps), strategy.steps, strict=False
    ):
      came = [(set(), set()) for _ in had]
      for send in before.sends if before else ():
        assert send.source != send.target
        for which in (0, 1):
          if send.kind == "heads" or moves[send.kind] == which:
            came[send.target][which].update(had[send.source][which])
      for old, new in zip(had, came, strict=True):
        for which in (0, 1):
          old[which].update(new[which])
      for device, cell in enumerate(step.cells):
        if cell is not None:
          for which in (0, 1):
            assert set(cell[which]) <= had[device][which], (name, step.name)


def test_steps_and_sends(drawn):
  sends = {
    name: [len(step.sends) for step in strategy.steps]
    for name, (strategy, _) in drawn.items()
  }
  assert sends == {
    "ring": [4, 4, 4, 0],
    "bidirectional": [8, 4, 0],
    "ring_q": [4, 4, 4, 4, 0],
    "gather": [12, 0],
    "ulysses": [12, 12, 0],
    "hybrid": [8, 8, 8, 8, 8, 0],
    "two_level": [8] * 7 + [0],
    "halo": [3, 0],
    "chain": [3, 2, 1, 0],
  }


def test_documents_turn_as_far_as_they_need():
  found = place([20, 50, 9, 30, 8], shards=4, local_length=LOCAL)
  at = {"here": (found.positions, found.segment_ids)}
  (panel,) = pictures.documents(at, 4)
  assert len(panel.steps) == sum(found.hops) + 1
  pos, seg = (x.reshape(4, LOCAL) for x in at["here"])
  got = np.zeros((4, 4), int)
  for step in panel.steps:
    for device in range(4):
      for key, n in colored(panel, step, device).items():
        got[device, key] += n
  for q, k in np.ndindex(4, 4):
    sees = (seg[q][:, None] == seg[k]) & (pos[q][:, None] >= pos[k])
    sees &= seg[k] > 0
    tiles = sees.reshape(LOCAL // TILE, TILE, LOCAL // TILE, TILE)
    # Bounds of a tile may say "look" where there is nothing.
    assert got[q, k] >= tiles.any((1, 3)).sum()
    assert got[q, k] > 0 or not sees.any()


def test_documents_without_hops():
  seg = np.repeat(np.arange(1, 5, dtype=np.int32), LOCAL)
  pos = np.tile(np.arange(LOCAL, dtype=np.int32), 4)
  (panel,) = pictures.documents({"whole": (pos, seg)}, 4)
  assert [len(step.sends) for step in panel.steps] == [0]
  assert panel.counts().tolist() == [[10] * 4]


def test_slots_that_do_not_fit(unchecked):
  at = np.ones(40, np.int32)
  with pytest.raises(ShapeError, match="a multiple of 32"):
    pictures.documents({"odd": (at, at)}, 4)


@pytest.mark.long
@DRAWS
def test_all_pictures_are_written(tmp_path):
  folder = tmp_path / "strategies"
  status, out, err = call("pictures", f"--out={folder}")
  assert (status, err) == (0, "")
  names = [*pictures.STRATEGIES, "documents"]
  assert [pathlib.Path(line).stem for line in out.split()] == names
  for name in names:
    data = (folder / f"{name}.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) < 60_000, name


@DRAWS
def test_a_folder_that_is_none(tmp_path):
  (tmp_path / "file").touch()
  status, _, err = call("pictures", f"--out={tmp_path / 'file'}")
  assert status == 2 and "out: got" in err


def test_without_matplotlib(monkeypatch, tmp_path):
  def missing(name):
    raise ModuleNotFoundError(name)

  monkeypatch.setattr(draw.importlib, "import_module", missing)
  with pytest.raises(OptionError, match="pip install matplotlib"):
    pictures.write(str(tmp_path / "none"), {}, 4)
  assert not (tmp_path / "none").exists()
