"""Rings of neighbours: every hop of the sequence axis is one link."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import ringjax as rj
from ringjax.parallel import mesh as meshes

# Slices as they are sold: v5e is flat, v4 and v5p are cubes of chips.
SLICES = [(4, 4), (2, 4), (8, 8), (16, 16), (2, 2, 1), (4, 4, 4), (4, 4, 8)]


@dataclasses.dataclass(frozen=True)
class Chip:
  """What `make_mesh` looks at of a TPU device."""

  id: int
  coords: tuple[int, ...]
  slice_index: int = 0


def chips(shape, slices=1):
  points = list(itertools.product(*(range(n) for n in shape)))
  return [
    Chip(s * len(points) + i, point, s)
    for s in range(slices)
    for i, point in enumerate(points)
  ]


def grid_of(monkeypatch, shape, names, devices, **options):
  """The device grid, from a stand-in for Mesh that takes our chips."""
  monkeypatch.setattr(meshes, "Mesh", lambda grid, names, axis_types: grid)
  return rj.make_mesh(shape, names, devices=devices, **options)


def hops(ring):
  steps = zip(ring, [*ring[1:], ring[0]], strict=True)
  return [
    sum(abs(x - y) for x, y in zip(a.coords, b.coords, strict=True))
    for a, b in steps
  ]


@pytest.mark.parametrize("shape", SLICES, ids=str)
def test_a_ring_over_the_whole_slice(monkeypatch, shape):
  devices = chips(shape)
  ring = grid_of(monkeypatch, (-1,), ("seq",), devices)
  assert sorted(d.id for d in ring) == [d.id for d in devices]
  assert set(hops(list(ring))) == {1}


@pytest.mark.parametrize(
  ("shape", "data", "seq"),
  [((8, 8), 4, 16), ((4, 4), 2, 8), ((4, 4, 4), 8, 8), ((16, 16), 16, 16)],
)
def test_data_by_seq_tiles_the_slice(monkeypatch, shape, data, seq):
  grid = grid_of(monkeypatch, (data, seq), ("data", "seq"), chips(shape))
  assert len({d.id for d in grid.reshape(-1)}) == data * seq
  for ring in grid:
    assert set(hops(list(ring))) == {1}


def test_slices_stay_apart(monkeypatch):
  devices = chips((4, 4), slices=2)
  grid = grid_of(monkeypatch, (2, 16), ("replica", "seq"), devices)
  for which, ring in enumerate(grid):
    assert {d.slice_index for d in ring} == {which}
    assert set(hops(list(ring))) == {1}


def test_plain_order_is_worse():
  """Negative control: the order in which devices are listed jumps."""
  assert max(hops(chips((8, 8)))) > 1


@pytest.mark.parametrize(
  "box", list(itertools.product(range(1, 7), repeat=2)), ids=str
)
def test_every_walk_visits_every_point_by_neighbours(box):
  walk = [Chip(0, p) for p in meshes.ring_walk(box)]
  assert len({c.coords for c in walk}) == len(walk) == np.prod(box)
  assert set(hops(walk)[:-1]) <= {1}
  closes = min(box) > 1 and np.prod(box) % 2 == 0
  if closes:
    assert hops(walk)[-1] == 1


def test_devices_without_coordinates_keep_their_order():
  mesh = rj.make_mesh((2, -1), ("data", "seq"))
  assert isinstance(mesh, Mesh) and dict(mesh.shape) == {"data": 2, "seq": 4}
  assert list(mesh.devices.flat) == jax.devices()
  assert set(mesh.axis_types) == {AxisType.Auto}
  kinds = (AxisType.Auto, AxisType.Explicit)
  assert rj.make_mesh((2, 2), ("data", "seq"), axis_types=kinds).size == 4


def test_a_compilers_options_are_those_of_the_meshs_devices():
  """Other compilers refuse the options of TPUs."""
  mesh = rj.make_mesh((1,), ("seq",), devices=jax.devices()[:1])
  assert meshes.compiler_options(mesh) == {}
  assert meshes.compiler_options(mesh.abstract_mesh) == {}
  assert meshes.compiler_options(None) == {}
