"""Pytrees of dataclasses: what tells two classes apart."""

import dataclasses
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax import tree
from ringjax.ops import mask as masks

pytestmark = pytest.mark.smoke


def kinds():
  """Every class of masks there is."""
  found = [
    kind
    for kind in vars(masks).values()
    if isinstance(kind, type)
    and issubclass(kind, masks.Mask)
    and dataclasses.is_dataclass(kind)
    and not inspect.isabstract(kind)
  ]
  assert {rj.Causal, masks.Everything, rj.Window, rj.Prefix} <= set(found)
  return found


def same_fields(kind):
  """One of a class, not checked, with fields that any other may have."""
  made = object.__new__(kind)
  for field in dataclasses.fields(kind):
    object.__setattr__(made, field.name, 3)
  return made


def test_structures_of_masks_differ():
  """Else a call may run another mask's program."""
  structures = [jax.tree.structure(same_fields(kind)) for kind in kinds()]
  for a, b in itertools.combinations(structures, 2):
    assert a != b
  structures = [
    jax.tree.structure(m)
    for m in (
      rj.Window(3),
      rj.Window(4),
      rj.Chunked(3),
      rj.BlockCausal(3),
      rj.Causal() & rj.SameSegment(),
      rj.Causal() | rj.SameSegment(),
      rj.SameSegment() & rj.Causal(),
      rj.SeparateDocuments() & rj.Causal(),
    )
  ]
  for a, b in itertools.combinations(structures, 2):
    assert a != b


def test_register():
  @dataclasses.dataclass(frozen=True)
  class Pair:
    left: object
    size: int
    right: object = None

    def __post_init__(self):
      assert self.size > 0, "called for what JAX puts together"

  assert tree.register(Pair, ["left", "right"], ["size"]) is Pair
  x = Pair(jnp.arange(2), 5, {"a": jnp.ones(3)})
  y = jax.tree.map(lambda a: a + 1, x)
  assert y.size == 5
  assert np.array_equal(y.left, [1, 2]) and np.array_equal(
    y.right["a"], [2] * 3
  )
  assert jax.jit(lambda p: p)(x).size == 5
  paths = [jax.tree_util.keystr(k) for k, _ in jax.tree.leaves_with_path(x)]
  assert paths == [".left", ".right['a']"]
  assert jax.tree.structure(x) != jax.tree.structure(Pair(1, 6, {"a": 2}))
  with pytest.raises(TypeError, match="Pair"):
    tree.register(Pair, ["left"], ["size"])
  assert jax.tree.structure(x) == jax.tree.structure(y)
