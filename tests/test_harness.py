"""The test run itself: what conftest promises holds."""

from __future__ import annotations

import pathlib

import hypothesis
import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax import checks
from ringjax.ops.attention.reference import reference
from tests.helpers import make_mesh

pytestmark = pytest.mark.smoke


def test_eight_cpu_devices():
  assert [d.platform for d in jax.devices()] == ["cpu"] * 8


def test_implicit_dtype_and_rank_promotion_raise():
  with pytest.raises(Exception, match="dtype promotion"):
    jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.bfloat16)
  with pytest.raises(ValueError, match="rank_promotion"):
    jnp.ones((2, 2)) + jnp.ones(2)


def test_annotations_of_ringjax_are_checked():
  with pytest.raises(jaxtyping.TypeCheckError):
    checks.positive_int(4, 1)  # pyrefly: ignore


def test_annotations_are_not_checked_where_users_are_played(unchecked):
  assert checks.positive_int(4, 1) == 1  # pyrefly: ignore


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("keys", [8, 16])
def test_shapes_are_checked_while_shard_map_is_traced(kind, keys):
  mesh = make_mesh(2, kind)
  q, v = jnp.ones((1, 8, 2, 4)), jnp.ones((1, 8, 2, 4))
  k = jnp.ones((1, keys, 2, 4))
  local = jax.jit(
    jax.shard_map(
      lambda *x: reference(*x)[0],
      mesh=mesh,
      in_specs=P(None, "seq"),
      out_specs=P(None, "seq"),
    )
  )
  if kind == "explicit":
    place = NamedSharding(mesh, P(None, "seq"))
    q, k, v = (jax.device_put(x, place) for x in (q, k, v))
  if keys == v.shape[1]:
    assert local(q, k, v).shape == q.shape
  else:  # 8 keys a shard, 4 values
    with pytest.raises(jaxtyping.TypeCheckError, match="S"):
      local(q, k, v)


def test_64_bits_are_off():
  assert jnp.asarray(1.0).dtype == jnp.float32


def test_64_bits_are_on_where_asked_for(x64):
  assert jnp.asarray(1.0).dtype == jnp.float64


def test_examples_are_not_timed_and_in_ci_the_same_each_time():
  assert hypothesis.settings().deadline is None
  assert hypothesis.settings.get_profile("ci").derandomize


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize(
  ("kind", "axis_type"),
  [("auto", AxisType.Auto), ("explicit", AxisType.Explicit)],
)
def test_make_mesh(n, kind, axis_type):
  mesh = make_mesh(n, kind)
  assert dict(mesh.shape) == {"seq": n}
  assert mesh.axis_types == (axis_type,)
  x = jax.device_put(jnp.arange(8), NamedSharding(mesh, P("seq")))
  assert len(x.sharding.device_set) == n


class Case:
  """What conftest asks of one collected case of a test."""

  path, originalname = "test_of_cases.py", "test_of_cases"

  def __init__(self, *marks: pytest.MarkDecorator):
    self.marks = {mark.name: mark.mark for mark in marks}

  def get_closest_marker(self, name: str) -> pytest.Mark | None:
    return self.marks.get(name)

  def add_marker(self, name: str) -> None:
    self.marks[name] = getattr(pytest.mark, name).mark

  def run(self) -> str:
    """Name of the run that the case is in."""
    runs = [name for name in ("slow", "long") if name in self.marks]
    return [*runs, "default"][0]


@pytest.fixture
def choose_cases(request):
  path = pathlib.Path(__file__).with_name("conftest.py")
  return request.config.pluginmanager.get_plugin(str(path)).choose_cases


@pytest.mark.parametrize(
  ("marks", "runs"),
  [
    ([], "default default default default default"),
    ([pytest.mark.one_case], "default slow slow slow long"),
    ([pytest.mark.long], "slow slow slow slow long"),
    (
      [pytest.mark.one_case, pytest.mark.long_cases(2)],
      "default slow long slow long",
    ),
    (
      [pytest.mark.one_case, pytest.mark.long_cases(9)],
      "default long long long long",
    ),
    (
      [pytest.mark.one_case, pytest.mark.long_cases(0)],
      "default slow slow slow slow",
    ),
    ([pytest.mark.long, pytest.mark.long_cases(9)], "long long long long long"),
    ([pytest.mark.slow, pytest.mark.one_case], "slow slow slow slow slow"),
  ],
)
def test_marks_say_in_which_run_a_case_is(choose_cases, marks, runs):
  cases = [Case(*marks) for _ in range(5)]
  choose_cases(cases)
  assert [case.run() for case in cases] == runs.split()


def test_a_slow_case_is_not_the_one_that_runs_by_default(choose_cases):
  cases = [Case(pytest.mark.one_case) for _ in range(3)]
  cases[0].add_marker("slow")
  choose_cases(cases)
  assert [case.run() for case in cases] == ["slow", "default", "long"]
