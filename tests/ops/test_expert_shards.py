"""Sharded experts against experts on one device: rows travel, weights stay."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ringjax.bench.program import Program
from ringjax.errors import OptionError
from ringjax.ops.experts import expert_shards
from ringjax.ops.experts.expert_shards import (
  Dispatch,
  ExpertShards,
  choose_dispatch,
  mix_sharded,
)
from ringjax.ops.experts.moe import mix
from tests.helpers import mesh_of

DIM, HIDDEN, COUNT, CHOSEN = 8, 16, 8, 3


def expert(w, rows):
  up, down = w
  return jnp.tanh(rows @ up) @ down


def problem(tokens, seed=0, favourite=None):
  r = np.random.default_rng(seed)
  narrow = lambda *shape: jnp.asarray(r.normal(size=shape) / 3, jnp.float32)
  weights = narrow(COUNT, DIM, HIDDEN), narrow(COUNT, HIDDEN, DIM)
  experts = np.argsort(r.random((tokens, COUNT)), 1)[:, :CHOSEN]
  if favourite is not None:
    experts = np.stack([np.roll(np.arange(COUNT), -favourite)] * tokens)
    experts = experts[:, :CHOSEN]
  mixing = jnp.asarray(r.random((tokens, CHOSEN)), jnp.float32)
  x = jnp.asarray(r.normal(size=(tokens, DIM)), jnp.float32)
  return weights, x, jnp.asarray(experts, jnp.int32), mixing


def one_device(weights, x, experts, mixing, scale_input=False):
  entry = lambda e: jax.tree.map(lambda a: a[e], weights)
  f = lambda e, rows: expert(entry(e), rows)
  return mix(f, x, experts, mixing, COUNT, scale_input=scale_input)


def sharded(mesh, over, tokens_over, dispatch=None, scale_input=False):
  shards = ExpertShards(
    over=over, tokens=tuple(a for a in over if a in tokens_over)
  )
  spec = P(tokens_over or None)

  def local(weights, x, experts, mixing):
    return mix_sharded(
      expert, weights, x, experts, mixing, COUNT, shards,
      scale_input=scale_input, dispatch=dispatch,
    )  # fmt: skip

  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(P(over), spec, spec, spec),
    out_specs=spec,
    axis_names={*over, *tokens_over},
  )


def rounds(chunk, capacity):
  return Dispatch(kind="rounds", reason="", chunk=chunk, capacity=capacity)


GATHER = Dispatch(kind="gather", reason="")
# (mesh, axes of experts, axes of tokens, dispatch)
CASES = {
  "own": (dict(expert=4), ("expert",), (), None),
  "own, tokens elsewhere": (
    dict(data=2, expert=4), ("expert",), ("data",), None
  ),
  "gather": (dict(seq=4), ("seq",), ("seq",), GATHER),
  "one round": (dict(seq=4), ("seq",), ("seq",), rounds(24, 72)),
  "rounds": (dict(seq=4), ("seq",), ("seq",), rounds(6, 3)),
  "gather over two axes": (
    dict(data=2, seq=2), ("data", "seq"), ("data", "seq"), GATHER
  ),
  "rounds and replicas": (
    dict(expert=2, seq=4), ("expert", "seq"), ("seq",), rounds(16, 8)
  ),
}  # fmt: skip


@pytest.mark.long_cases(3)
@pytest.mark.parametrize(
  "name",
  [
    pytest.param(x, marks=[pytest.mark.long] * (x not in ("own", "rounds")))
    for x in CASES
  ],
)
def test_equals_one_device(name):
  """Outputs and gradients, with experts of equal and of unequal load."""
  sizes, over, tokens_over, dispatch = CASES[name]
  mesh = mesh_of(**sizes)
  for favourite, scale_input in ((None, True), (5, False)):
    args = problem(64, favourite=favourite)
    _, x, experts, _ = args

    def loss(f, weights, x, mixing, experts=experts):
      y = f(weights, x, experts, mixing)
      return jnp.sum(jnp.sin(y)), y

    grad = lambda f: jax.jit(
      jax.grad(functools.partial(loss, f), (0, 1, 2), has_aux=True)
    )
    run = sharded(mesh, over, tokens_over, dispatch, scale_input)
    floats = args[0], x, args[3]
    got = grad(run)(*floats)
    want = grad(functools.partial(one_device, scale_input=scale_input))(*floats)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      assert float(jnp.linalg.norm(b)) > 0.1
      np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["own", "gather", "rounds"])
def test_a_token_does_not_depend_on_its_neighbours(name):
  sizes, over, tokens_over, dispatch = CASES[name]
  run = jax.jit(sharded(mesh_of(**sizes), over, tokens_over, dispatch))
  weights, x, experts, mixing = problem(64)
  _, *others = problem(64, seed=1, favourite=2)
  kept = np.arange(64) % 5 == 0
  put = lambda a, b: jnp.where(kept.reshape(-1, *[1] * (a.ndim - 1)), a, b)
  changed = (
    put(a, b) for a, b in zip((x, experts, mixing), others, strict=True)
  )
  first, second = run(weights, x, experts, mixing), run(weights, *changed)
  assert not np.array_equal(first, second)
  np.testing.assert_array_equal(first[kept], second[kept])


def sent(program):
  """Bytes of results by operation, in all, and shapes that are sent."""
  kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute",
           "reduce-scatter")  # fmt: skip
  by_op, shapes = {}, set()
  for name, instructions in program.computations.items():
    for i in instructions.values():
      op = i.op.removesuffix("-start")
      if op in kinds:
        by_op[op] = by_op.get(op, 0) + i.bytes * program.times[name]
        shapes |= {dims for _, dims in i.shapes}
  return by_op, shapes


@pytest.mark.parametrize("name", ["own", "gather", "one round"])
def test_what_is_sent_is_what_the_choice_states(name):
  sizes, over, tokens_over, dispatch = CASES[name]
  run = jax.jit(sharded(mesh_of(**sizes), over, tokens_over, dispatch))
  text = run.lower(*problem(96)).compile().as_text()
  by_op, shapes = sent(Program(text))
  # No weights of an expert.
  assert not any({DIM, HIDDEN} <= {*dims} for dims in shapes)
  own = 96 // 4
  if name == "own":
    assert by_op == {"all-reduce": 4 * 96 * DIM}
  elif name == "gather":
    numbers = 96 * (DIM + 2 * CHOSEN)
    assert by_op == {"all-gather": 4 * numbers, "reduce-scatter": 4 * own * DIM}
  else:
    # Rows, results, and an expert and a weight each; the number of rounds.
    row_bytes = 2 * 4 * DIM + 8
    assert by_op == {"all-to-all": 4 * 72 * row_bytes, "all-reduce": 4}


def test_a_backward_pass_keeps_its_inputs_alone():
  """Neither copies of tokens nor what was sent."""
  sizes, over, tokens_over, _ = CASES["rounds"]
  run = jax.jit(sharded(mesh_of(**sizes), over, tokens_over, rounds(8, 8)))
  weights, x, experts, mixing = problem(64)
  _, pull = jax.vjp(lambda w, x, m: run(w, x, experts, m), weights, x, mixing)
  inputs = {a.shape for a in (*weights, x, experts, mixing)}
  assert {a.shape for a in jax.tree.leaves(pull) if a.ndim} <= inputs


def parts(equation):
  """Traced programs among an equation's parameters."""
  for value in equation.params.values():
    for part in value if isinstance(value, tuple | list) else (value,):
      part = getattr(part, "jaxpr", part)
      if hasattr(part, "eqns"):
        yield part


def holds(equation, name):
  """Whether an equation is an operation, or has it in its parts."""
  return equation.primitive.name == name or any(
    holds(inner, name) for part in parts(equation) for inner in part.eqns
  )


def loops(jaxpr, name):
  """Bodies of the innermost loops that hold an operation."""
  for equation in jaxpr.eqns:
    if not holds(equation, name):
      continue
    inner = [body for part in parts(equation) for body in loops(part, name)]
    if not inner and equation.primitive.name == "while":
      inner = [equation.params["body_jaxpr"].jaxpr]
    yield from inner


def needs(body, first, then):
  """Whether an operation `then` of a body reads what a `first` computed."""
  from_first = set()
  for equation in body.eqns:
    inputs = {v for v in equation.invars if not hasattr(v, "val")}
    if holds(equation, then) and inputs & from_first:
      return True
    if holds(equation, first) or inputs & from_first:
      from_first.update(equation.outvars)
  return False


@pytest.mark.parametrize(("chunk", "overlapped"), [(8, True), (16, False)])
def test_sends_of_a_turn_do_not_wait_for_its_products(chunk, overlapped):
  """Nor do products wait for sends; forward, and backward.

  A single chunk has one round as a rule, whose sends have no other products.
  """
  run = sharded(mesh_of(seq=4), ("seq",), ("seq",), rounds(chunk, 8))
  weights, x, experts, mixing = problem(64)
  loss = lambda x: jnp.sum(run(weights, x, experts, mixing))
  jaxpr = jax.make_jaxpr(jax.grad(loss))(x).jaxpr
  bodies = [*loops(jaxpr, "all_to_all")]
  assert len(bodies) == 2
  for body in bodies:
    assert any(holds(equation, "tanh") for equation in body.eqns)
    assert needs(body, "all_to_all", "tanh") is not overlapped
    assert needs(body, "tanh", "all_to_all") is not overlapped


@pytest.mark.parametrize(
  ("tokens", "chosen", "shards", "kind"),
  [
    (1024, 2, 1, "own"),
    (1024, 4, 2, "gather"),
    (1024, 2, 8, "rounds"),
    (1024, 8, 4, "gather"),
    (1, 2, 8, "gather"),  # a round has at least eight rows
    (65536, 8, 4, "rounds"),  # too many to gather
  ],
)
def test_the_choice_goes_by_bytes(tokens, chosen, shards, kind):
  dispatch = choose_dispatch(tokens, 4096, chosen, 2, shards)
  assert dispatch.kind == kind, dispatch
  assert str(dispatch).startswith(f"{kind}: ")


def test_a_long_call_is_sent_in_chunks():
  dispatch = choose_dispatch(65536, 4096, 8, 2, 4)
  sent = 3 * 65 * dispatch.capacity * (2 * 2 * 4096 + 8)
  assert dispatch.chunk == 1024 and f" {sent:,} in rounds" in dispatch.reason
  rows = dispatch.chunk * 8
  assert rows <= expert_shards._CHUNK_ROWS
  assert dispatch.capacity >= rows / 4


def test_a_gradient_of_arrays_of_all_layers_is_refused():
  """Their first axis is that of layers: gradients would go to other layers."""
  sizes, over, tokens_over, dispatch = CASES["own"]
  weights, x, experts, mixing = problem(64)
  stacked = jax.tree.map(lambda a: jnp.stack([a, a, a]), weights)
  shards = ExpertShards(over=over, tokens=tokens_over)

  def local(weights, x, experts, mixing):
    return mix_sharded(
      expert, weights, x, experts, mixing, COUNT, shards,
      entry=lambda w, n: jax.tree.map(lambda a: a[1, n], w), dispatch=dispatch,
    )  # fmt: skip

  run = jax.shard_map(
    local,
    mesh=mesh_of(**sizes),
    in_specs=(P(None, over), P(), P(), P()),
    out_specs=P(),
    axis_names={*over},
  )
  np.testing.assert_allclose(
    jax.jit(run)(stacked, x, experts, mixing),
    one_device(weights, x, experts, mixing),
    rtol=0,
    atol=1e-5,
  )
  loss = lambda weights: jnp.sum(run(weights, x, experts, mixing))
  with pytest.raises(OptionError, match="a call without a cache"):
    jax.jit(jax.grad(loss))(stacked)
