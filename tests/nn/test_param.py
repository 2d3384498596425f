"""Rules lay the named axes of parameters on a mesh, or say why not."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ringjax.errors import MeshError
from ringjax.nn.param import Rules, param


def mesh_of(**sizes):
  return jax.make_mesh(
    tuple(sizes.values()),
    tuple(sizes),
    axis_types=(AxisType.Auto,) * len(sizes),
    devices=jax.devices()[: int(np.prod(list(sizes.values())))],
  )


@pytest.mark.parametrize(
  ("axes", "shape", "want"),
  [
    (("embed", "heads", None), (6, 4, 3), P(None, "model")),
    (("embed", "heads", None), (6, 3, 4), P()),  # 2 does not divide 3
    (("embed", "heads", None), (9, 6, 4, 3), P(None, None, "model")),
    (("vocab", "embed"), (10, 6), P("model")),
    (("embed", "vocab"), (6, 10), P(None, "model")),
    (("ffn", "embed"), (8, 6), P("model")),
    (("experts", "embed", "ffn"), (4, 6, 8), P(None, None, "model")),
    ((None,), (8,), P()),
    ((), (), P()),
  ],
)
def test_default_rules(axes, shape, want):
  assert Rules().spec(axes, shape, mesh_of(seq=2, model=2)) == want
  assert Rules().spec(axes, shape, mesh_of(seq=2)) == P()


def test_rules_of_ones_own():
  mesh = mesh_of(data=2, seq=2, model=2)
  rules = Rules(embed="data", heads="seq", ffn=None)
  assert rules.spec(("embed", "heads"), (4, 4), mesh) == P("data", "seq")
  assert rules.spec(("embed", "ffn"), (4, 4), mesh) == P("data")


def test_several_mesh_axes_for_one():
  mesh = mesh_of(data=2, seq=2, model=2)
  spec = lambda n, axes: Rules(embed=axes).spec(("embed", "ffn"), (n, 4), mesh)
  assert spec(8, ("data", "seq")) == P(("data", "seq"), "model")
  assert spec(8, ("seq", "data")) == P(("seq", "data"), "model")
  # As many as divide it.
  assert spec(6, ("data", "seq")) == P("data", "model")
  assert spec(5, ("data", "seq")) == P(None, "model")
  with pytest.raises(MeshError, match="'model' for two axes"):
    spec(8, ("data", "model"))
  with pytest.raises(MeshError, match="embed=.*pod"):
    Rules(embed=("data", "pod")).check(mesh)


def test_mesh_axes_of_experts_shard_nothing_else_of_them():
  mesh = mesh_of(data=2, model=2)
  axes = "experts", "embed", "ffn"
  rules = Rules(experts="model", embed="data")
  assert rules.spec(axes, (4, 6, 8), mesh) == P("model", "data")
  assert rules.spec(("embed", "ffn"), (6, 8), mesh) == P("data", "model")
  # An axis that does not divide the experts is free for another.
  assert rules.spec(axes, (3, 6, 8), mesh) == P(None, "data", "model")
  assert rules.over_experts(4, mesh) == ("model",)
  assert rules.over_experts(3, mesh) == ()
  both = Rules(experts=("data", "model"), embed="data")
  assert both.spec(axes, (4, 6, 8), mesh) == P(("data", "model"))


def test_a_mesh_axis_twice():
  with pytest.raises(MeshError, match="rules.*'model'.*embed"):
    Rules(embed="model").spec(("embed", "ffn"), (4, 4), mesh_of(model=2))


def test_rules_are_values():
  assert Rules() == Rules() and hash(Rules()) == hash(Rules())
  assert Rules(ffn=None) != Rules()


def test_parameters_know_their_axes():
  p = param(nnx.Rngs(0), (300, 200), ("embed", "ffn"), fan_in=300)
  assert p.get_metadata()["axes"] == ("embed", "ffn")
  assert not p.get_metadata()["wide"]
  x = np.asarray(p.get_value())
  assert x.dtype == np.float32
  assert abs(x.std() * np.sqrt(300) - 1) < 0.02 and abs(x.mean()) < 1e-3
  flat = param(nnx.Rngs(0), (3,), (None,), value=2.0, wide=True)
  np.testing.assert_array_equal(flat.get_value(), [2, 2, 2])
  assert flat.get_metadata()["wide"]
  mesh = mesh_of(model=2)
  assert Rules().sharding(p, mesh).spec == P(None, "model")
