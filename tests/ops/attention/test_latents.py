"""Latent attention on shards: what travels, and that the answer is the same."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax import (
  Blockwise,
  Causal,
  Chain,
  Contiguous,
  Dense,
  Gather,
  Halo,
  Ring,
  Striped,
  Window,
  Zigzag,
)
from ringjax.bench.program import Program
from ringjax.errors import DtypeError, ShapeError
from ringjax.ops.attention.cost.call_shape import CallShape, RowShape
from ringjax.ops.attention.strategies import registry
from ringjax.parallel import chips
from tests import oracle
from tests.ops.attention.test_exact import ring_mesh

B, T, N, PLAIN, SHARED, VALUE, LATENT = 2, 64, 4, 12, 4, 10, 16
TILES = Blockwise(8, 8)
LONG = pytest.mark.long
# Strategy, layout and form of each case.
CASES = {
  "ring": (Ring(TILES, unroll=1), Contiguous(), "rows"),
  "striped": (Ring(TILES, unroll=1), Striped(), "rows"),
  "zigzag": (Ring(TILES, unroll=1), Zigzag(), "rows"),
  "both ways": (Ring(TILES, unroll=1, two_way=True), Striped(), "rows"),
  "documents": (Ring(TILES, by_document=True), Contiguous(), "rows"),
  "two levels": (
    Ring(Ring(TILES, unroll=1), unroll=1, inner=2), Striped(), "rows"
  ),
  "dense": (Ring(Dense()), Striped(), "rows"),
  "chain": (Chain(TILES), Contiguous(), "rows"),
  "gather": (Gather(TILES), Striped(), "rows"),
  "halo": (Halo(TILES), Contiguous(), "rows"),
  "absorbed": (Ring(TILES, unroll=1), Striped(), "absorbed"),
  "absorbed gather": (Gather(TILES), Striped(), "absorbed"),
  "absorbed dense": (Ring(Dense()), Zigzag(), "absorbed"),
  "heads": ("ulysses", Striped(), "heads"),
}  # fmt: skip
FIRST = ("striped",)


@pytest.fixture
def form(monkeypatch):
  """Send this form, whatever the cost model says."""

  def send(name):
    monkeypatch.setattr(registry, "latent_form", lambda *_: name)

  return send


def operands(dtype=jnp.float32):
  draw = np.random.default_rng(0)
  normal = lambda *shape: draw.normal(size=shape).astype(np.float32)
  arrays = (
    normal(B, T, N, PLAIN + SHARED),
    normal(B, T, LATENT + SHARED),
    normal(LATENT, N, PLAIN + VALUE) / 4,
    normal(B, T, N, VALUE),
  )
  return tuple(jnp.asarray(x, dtype) for x in arrays)


def truth(q, rows, up, do, visible):
  """Output and gradients in float64."""
  q, rows, up = (np.asarray(x, np.float64) for x in (q, rows, up))
  latent, shared = rows[..., :LATENT], rows[..., LATENT:]
  kv = np.einsum("bsc,cnh->bsnh", latent, up)
  shared = np.broadcast_to(shared[:, :, None], (*kv.shape[:3], SHARED))
  k = np.concatenate([kv[..., :PLAIN], shared], -1)
  want = oracle.attend(
    q, k, kv[..., PLAIN:], visible, do, np.zeros(q.shape[:3])
  )
  dk = want["key"]
  dkv = np.concatenate([dk[..., :PLAIN], want["value"]], -1)
  dlatent = np.einsum("bsnh,cnh->bsc", dkv, up)
  drows = np.concatenate([dlatent, dk[..., PLAIN:].sum(2)], -1)
  dup = np.einsum("bsc,bsnh->cnh", latent, dkv)
  return want["out"], want["query"], drows, dup


def call(q, rows, up, do, *, strategy, layout=None, shards=4, **options):
  """Output and gradients of a call on shards, in natural order."""
  layout = layout or Contiguous()
  options = {"mesh": ring_mesh(shards), "is_causal": True} | options
  order = lambda x: layout.permute(x, shards=shards, axis=1)
  back = lambda x: layout.restore(x, shards=shards, axis=1)

  def attend(q, rows, up):
    return back(
      rj.latent_attention(
        order(q), order(rows), up, layout=layout, strategy=strategy, **options
      )
    )

  def run(q, rows, up, do):
    out, pull_back = jax.vjp(attend, q, rows, up)
    return out, *pull_back(do)

  return jax.jit(run)(q, rows, up, do)


def errors(got, want):
  return [oracle.error(a, b) for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize(
  "name",
  [pytest.param(x, marks=() if x in FIRST else LONG) for x in CASES],
)
def test_every_strategy_gives_the_answer_of_all_heads(form, name):
  strategy, layout, sent = CASES[name]
  form(sent)
  i, j = np.arange(T)[:, None], np.arange(T)
  visible, options = j <= i, {}
  if name == "halo":
    visible = visible & (i - j < 10)
    options = {"mask": Causal() & Window(10), "is_causal": False}
  if name == "documents":
    documents = np.sort(np.random.default_rng(1).integers(1, 6, T))
    visible = visible & (documents[:, None] == documents)
    options = {"q_segment_ids": jnp.asarray(documents[None].repeat(B, 0))}
  x = operands()
  got = call(*x, strategy=strategy, layout=layout, **options)
  assert max(errors(got, truth(*x, visible))) < 1e-5


@LONG
@pytest.mark.parametrize("sent", ["rows", "absorbed"])
def test_heads_and_rows_of_a_batch_may_be_sharded(form, sent):
  form(sent)
  mesh = rj.make_mesh((2, 2, 2), ("data", "seq", "model"))
  x = operands()
  got = call(
    *x, strategy=Ring(TILES, unroll=1), layout=Striped(), shards=2, mesh=mesh,
    axis="seq", batch_axis="data", head_axis="model",
  )  # fmt: skip
  assert max(errors(got, truth(*x, np.tri(T, dtype=bool)))) < 1e-5


@LONG
@pytest.mark.parametrize("sent", ["rows", "absorbed"])
def test_bfloat16_is_as_near_as_its_digits(form, sent):
  form(sent)
  x = operands(jnp.bfloat16)
  got = call(*x, strategy=Ring(TILES, unroll=1), layout=Striped())
  assert got[2].dtype == jnp.bfloat16
  assert max(errors(got, truth(*x, np.tri(T, dtype=bool)))) < 0.03


@LONG
@pytest.mark.parametrize("sent", ["rows", "absorbed", "heads"])
def test_a_mesh_axis_that_the_call_does_not_name_changes_nothing(form, sent):
  """Also in bfloat16, whose sums XLA's CPU compiler can't promote there."""
  form(sent)
  mesh = rj.make_mesh((4, 2), ("seq", "model"))
  x = operands(jnp.bfloat16)
  got = call(
    *x, strategy=Ring(TILES, unroll=1), layout=Striped(), mesh=mesh, axis="seq"
  )
  assert got[3].dtype == jnp.bfloat16
  assert max(errors(got, truth(*x, np.tri(T, dtype=bool)))) < 0.03


@LONG
@pytest.mark.parametrize(
  "wire", ["int8", "bfloat16", rj.kv.kind_text.parse("int8").codec]
)
@pytest.mark.parametrize("sent", ["rows", "absorbed"])
def test_rows_travel_in_every_wire_format(form, sent, wire):
  form(sent)
  x = operands()
  got = call(*x, strategy=Ring(TILES, unroll=1, wire=wire), layout=Striped())
  assert 1e-5 < max(errors(got, truth(*x, np.tri(T, dtype=bool)))) < 0.05


def permuted(shards=4, **options):
  """Bytes of each permute of a forward and backward pass."""
  run = lambda *x: call(
    *x, shards=shards, strategy=Ring(TILES, unroll=1), layout=Striped(),
    **options,
  )  # fmt: skip
  text = jax.jit(run).lower(*operands()).compile().as_text()
  program = Program(text)
  total = 0
  for name, instructions in program.computations.items():
    for x in instructions.values():
      if re.match("collective-permute(-start)?$", x.op):
        total += x.bytes * program.times[name]
  return total


def test_rows_are_what_is_sent_forward_and_back(form):
  """Keys of all heads are five times as many numbers here."""
  shards, numbers, coordinates = 4, LATENT + SHARED, 2 * T // 4 * 2
  form("rows")
  token = B * T // shards * 4
  # Forward and again for the backward pass, and gradients once to each shard.
  passes = 2 * (shards - 1) + shards
  limit = token * numbers * passes + 4 * coordinates * 2 * shards
  assert token * numbers * passes <= permuted() <= limit


# DeepSeek-V3: 128 heads of 128 + 64, values of 128, latents of 512.
def deepseek(tokens, heads=128, shards=8, **options):
  return CallShape(
    batch=1, queries=tokens, keys=tokens, heads=heads, kv_heads=heads,
    head_dim=192, value_dim=128, mask=Causal(), axes=(("seq", shards),),
    rows=RowShape(512, 64), **options,
  )  # fmt: skip


@pytest.mark.parametrize(
  ("tokens", "heads", "sent"),
  [
    (1 << 20, 128, "rows"),
    (1 << 16, 16, "rows"),
    # Less to multiply than to project.
    (128, 128, "absorbed"),
    # A row has no fewer numbers than the keys and values of one head.
    (1 << 16, 1, "heads"),
  ],
)
def test_the_form_is_chosen_by_cost(tokens, heads, sent):
  machine = chips.machine("h100")
  call = deepseek(tokens, heads)
  assert registry.latent_form(Ring(), call, machine, Striped()) == sent


def test_a_prediction_counts_the_bytes_of_rows():
  machine = chips.machine("h100")
  sent = lambda call: sum(
    registry.predict("ring", call, machine, Striped()).bytes_by_link.values()
  )
  call = deepseek(1 << 17, backward=False)
  rows_bytes = sent(call)
  assert rows_bytes == 7 * (1 << 14) * 576 * 2
  by_heads = sent(deepseek(1 << 17, 1, backward=False)) * 128
  assert by_heads / rows_bytes == pytest.approx(40960 / 576)


@pytest.mark.parametrize(
  ("change", "error", "words"),
  [
    (lambda q, r, u: (q, r[..., :8], u), ShapeError, "rows"),
    (lambda q, r, u: (q, r[:1], u), ShapeError, "rows"),
    (lambda q, r, u: (q, r[0], u), ShapeError, "rows"),
    (lambda q, r, u: (q, r, u[:, :2]), ShapeError, "rows"),
    (lambda q, r, u: (q, r, u[..., :12]), ShapeError, "up"),
    (lambda q, r, u: (q, r, u.astype("bfloat16")), DtypeError, "up"),
  ],
)
def test_operands_that_do_not_fit_are_refused(change, error, words):
  q, rows, up, _ = operands()
  with pytest.raises(error, match=f"^{words}"):
    rj.latent_attention(*change(q, rows, up), is_causal=True)
