"""The codec of a cache on the wire: who sees what, and in how many bytes."""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax import Blockwise, Chain, Dense, Gather, Halo, Ring
from ringjax.bench.program import Program
from ringjax.errors import OptionError
from ringjax.kv import Floats, Hadamard, Integers
from ringjax.kv.codecs.codec_wire import CodecWire
from ringjax.nn.sharding_context import ChainParallel
from ringjax.ops.attention.strategies.wire_format import Wire, WireFormat
from tests.contracts import cache as contract
from tests.helpers import refused
from tests.ops.attention.test_exact import ring_mesh
from tests.ops.attention.test_schedule import compiled

TILES = Blockwise(8, 8)
MIXED = rj.kv.Codec(keys=Hadamard(bits=4), values=Integers(bits=4, group=8))
R, T, N, K, H = 4, 44, 4, 2, 16


@functools.partial(jax.jit, static_argnums=0)
def decoded(codec, x):
  """[B, T, K, H] as another shard gets it."""
  x = jnp.swapaxes(jnp.asarray(x), 1, 2)
  back = codec.decode(codec.encode(x), x.shape[-1], x.dtype)
  return jnp.swapaxes(back, 1, 2)


def slowly(codec, q, k, v, shard, sees):
  """Each query sees the keys of its own shard exact, others decoded."""
  own = shard[:, None] == shard[None]
  each = q.shape[2] // k.shape[2]
  wide = lambda x: jnp.repeat(x, each, 2)
  scores = lambda k: jnp.einsum("btnh,bsnh->bnts", q, wide(k))
  values = lambda w, v: jnp.einsum("bnts,bsnh->btnh", w, wide(v))
  s = jnp.where(own, scores(k), scores(decoded(codec.keys, k)))
  s = jnp.where(sees, s * q.shape[-1] ** -0.5, -jnp.inf)
  w = jax.nn.softmax(s, -1)
  others = values(jnp.where(own, 0, w), decoded(codec.values, v))
  return values(jnp.where(own, w, 0), v) + others


@functools.cache
def drawn():
  rng = np.random.default_rng(5)
  draw = lambda n: jnp.asarray(rng.normal(size=(2, T, n, H)), jnp.float32)
  return draw(N), draw(K), draw(K)


@pytest.mark.parametrize(
  ("kind", "codec", "window"),
  [
    (Ring, MIXED, None),
    pytest.param(Chain, MIXED, None, marks=pytest.mark.long),
    pytest.param(Halo, MIXED, 7, marks=pytest.mark.long),
    pytest.param(Gather, MIXED, None, marks=pytest.mark.long),
    *(
      pytest.param(Ring, rj.kv.Codec(keys=x, values=x), None,
                   marks=pytest.mark.long)
      for x in (Integers(bits=8), Floats(), Hadamard(bits=2))
    ),
  ],
)  # fmt: skip
def test_others_see_what_was_encoded_and_own_keys_are_exact(
  kind, codec, window
):
  q, k, v = drawn()
  shard = np.arange(T) // (T // R)
  i, j = np.ogrid[:T, :T]
  sees = (j <= i) & (i - j <= (T if window is None else window))
  if kind is Gather:
    # There a shard's own keys are decoded too.
    k, v = decoded(codec.keys, k), decoded(codec.values, v)
    codec = types.SimpleNamespace(keys=Exact(), values=Exact())
  want = slowly(codec, q, k, v, shard, sees)
  got = rj.dot_product_attention(
    *drawn(),
    is_causal=True,
    local_window_size=None if window is None else (window, 0),
    mesh=ring_mesh(R),
    strategy=kind(TILES, wire=MIXED if kind is Gather else codec),
  )
  np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)
  exact = rj.dot_product_attention(*drawn(), is_causal=True)
  assert window or np.abs(np.asarray(got - exact)).max() > 1e-3


class Exact:
  """A codec that changes nothing."""

  def encode(self, x, constants=()):
    return x

  def decode(self, data, dim, dtype, constants=()):
    return data


def test_the_program_sends_the_bytes_of_the_formula():
  wire = MIXED.as_wire()
  assert isinstance(wire, Wire) and isinstance(WireFormat("int8"), Wire)
  text = compiled(4, 48, False, strategy=Ring(wire=MIXED)).as_text()
  sent = {}
  for _, i, times in Program(text).sends():
    name = i.shapes[0][0]
    sent[name] = sent.get(name, 0) + times * i.bytes
  # Tokens of a shard, KV heads; codes, and the halves behind them.
  each = (8 + 2) + (8 + 2 * 4)
  assert wire.token_bytes(16, 16) == each
  assert sent["u8"] == 3 * (1 * 2 * 12) * each
  assert set(sent) == {"u8", "s32"}
  plain = compiled(4, 48, False, strategy=Ring()).as_text()
  exact = sum(
    times * i.bytes
    for _, i, times in Program(plain).sends()
    if i.shapes[0][0] == "f32"
  )
  assert exact / sent["u8"] == 2 * 16 * 4 / each


def test_the_cost_model_knows_the_bytes():
  shape = (1, 8192, 8, 128)
  explain = functools.partial(
    rj.explain, shape, (1, 8192, 2, 128), shards=8, is_causal=True,
    machine="tpu v5e", backward=False, show=False,
  )  # fmt: skip
  codec = rj.kv.Codec(keys=Hadamard(bits=2), values=Hadamard(bits=2))
  found = explain(wire=codec)
  bytes_of = lambda one: sum(one.bytes_by_link.values())
  coded = [x for x in found.predictions if "wire" in x.options]
  (ring,) = [x for x in coded if x.strategy == "ring"][:1]
  at = bytes_of(ring) / bytes_of(
    next(
      x
      for x in found.predictions
      if x.strategy == "ring"
      and "wire" not in x.options
      and x.layout == ring.layout
    )
  )
  assert at == pytest.approx((32 + 2) / 256)
  assert any("encode again" in x.reason for x in found.refusals)
  assert "Hadamard(bits=2)" in str(found) + str(found.record())


@pytest.mark.long
@pytest.mark.parametrize("bits", [8])
def test_gradients_pass_the_codes(bits):
  """As of attention to what arrived, passed on to what left."""
  x = Integers(bits=bits)
  codec = rj.kv.Codec(keys=x, values=x)
  q, k, v = drawn()
  shard = np.arange(T) // (T // R)
  i, j = np.ogrid[:T, :T]
  weight = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)

  class Through:
    """Straight through: the codes, and the slope of the numbers."""

    def encode(self, y, constants=()):
      back = x.decode(x.encode(y), y.shape[-1], y.dtype)
      return y + jax.lax.stop_gradient(back - y)

    def decode(self, data, dim, dtype, constants=()):
      return data

  slow = types.SimpleNamespace(keys=Through(), values=Through())
  want = jax.grad(
    lambda *x: jnp.sum(slowly(slow, *x, shard, j <= i) * weight), (0, 1, 2)
  )(q, k, v)
  got = jax.jit(
    jax.grad(
      lambda *x: jnp.sum(
        rj.dot_product_attention(
          *x, is_causal=True, mesh=ring_mesh(R),
          strategy=Ring(TILES, wire=codec),
        ) * weight
      ),
      (0, 1, 2),
    )
  )(q, k, v)  # fmt: skip
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noting(CodecWire):
  """Notes the bytes that leave."""

  def send(self, k, v):
    sent, axis = super().send(k, v)
    jax.debug.callback(lambda x: NOTED.append(np.asarray(x)), sent)
    return sent, axis


NOTED: list = []


@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "dtype", "attend"),
  [
    ("hadamard4", "bfloat16", rj.models.ContextParallel),
    pytest.param("int4", "float32", rj.models.ContextParallel,
                 marks=pytest.mark.long),
    ("int4", "bfloat16", ChainParallel),
    pytest.param("float8", "bfloat16", ChainParallel,
                 marks=pytest.mark.long),
  ],
)  # fmt: skip
def test_what_travels_is_what_the_cache_stores(name, dtype, attend):
  """Bit for bit."""
  model = contract.model(R, "grouped", dtype)
  kind = rj.kv.KINDS[name].replace(windowed=False)
  codec = kind.codec
  wire = Noting(keys=codec.keys, values=codec.values, dtype=model.dtype)
  chain = attend is ChainParallel
  how = attend(
    mesh=model.mesh,
    axis="seq",
    strategy=(Chain if chain else Ring)(wire=wire),
    **({"layout": rj.Uneven((6, 6, 6, 6))} if chain else {}),
  )
  NOTED.clear()
  tokens = contract.text("grouped")[0][:2]
  cache = model.init_cache(2, 24, sharding=how, kind=kind)
  _, cache = jax.jit(lambda m, c: m(tokens, cache=c, attend=how))(model, cache)
  jax.effects_barrier()
  stored = {
    bytes(np.concatenate([k, v], -1)[:, :, 6 * r : 6 * (r + 1)].tobytes())
    for slots in cache.slots
    for k, v in zip(*map(np.asarray, slots), strict=True)
    for r in range(R)
  }
  left = {x.tobytes() for x in NOTED}
  assert len(left) >= R and left <= stored
  assert len(left) == len(stored)


class Slow(rj.models.ContextParallel):
  """One device that sees keys as four shards would."""

  def __call__(self, q, tokens, cache, mask, extras):
    k, v = (jnp.swapaxes(x, 1, 2) for x in cache.fresh[:2])
    i, j = np.ogrid[: q.shape[1], : q.shape[1]]
    shard = np.arange(q.shape[1]) // (q.shape[1] // R)
    return slowly(MIXED, q, k, v, shard, j <= i)


@pytest.mark.slow
@pytest.mark.parametrize(
  "prefill", ["ring", pytest.param("kvr", marks=pytest.mark.long)]
)
def test_a_prompt_read_on_shards_is_one_where_others_are_coded(prefill):
  model, one = contract.model(R, "grouped"), contract.model(1, "grouped")
  tokens = np.random.default_rng(2).integers(1, 64, (2, 32)).astype(np.int32)
  kind = rj.kv.CacheConfig(codec=MIXED)
  session = rj.infer.Session(model, 40, batch=2, cache_kind=kind)
  reports = []
  options = {"partition": (8, 8, 8, 8)} if prefill == "kvr" else {}
  rj.infer.generate(
    model, tokens, max_new_tokens=1, prefill=prefill, wire="cache",
    cache=session, report=reports.append, **options,
  )  # fmt: skip
  (report,) = reports
  assert report.prefill.attend.strategy.wire == MIXED.as_wire(jnp.float32)
  # The call's own keys, layer by layer, are those of such a call.
  alone = one.init_cache(2, 32, kind=kind)
  _, alone = one(tokens, cache=alone, attend=Slow())
  for row in range(2):
    parts = [x.export(row, 0, 32).parts for x in (session.cache, alone)]
    for got, want in zip(*parts, strict=True):
      for vectors, a, b in zip(
        (MIXED.keys, MIXED.values), got, want, strict=True
      ):
        dim = model.kinds[0].key
        a, b = (vectors.decode(x, dim, jnp.float32) for x in (a, b))
        off = np.abs(np.asarray(a - b))
        # A number on the edge of two codes may be the other one.
        assert np.mean(off > 1e-3 * np.abs(b).max()) < 1e-2
  exact, _ = one(tokens, cache=one.init_cache(2, 32, kind=kind))
  coded, _ = one(tokens, cache=one.init_cache(2, 32, kind=kind), attend=Slow())
  assert np.abs(np.asarray(exact - coded)).max() > 1e-2


@pytest.mark.long
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_wire():
  unrotated = rj.kv.KINDS["nuq3"].codec
  refused(OptionError, lambda: Ring(wire=unrotated), "before their rotation")
  book = rj.kv.CodeBook(by="token")
  codec = rj.kv.Codec(keys=Integers(), values=book)
  refused(OptionError, lambda: Chain(wire=codec), "a codec without a calib")
  refused(OptionError, lambda: Ring(Dense(), wire=MIXED), "blockwise")
  refused(
    OptionError,
    lambda: Ring(Ring(wire=MIXED), wire=MIXED),
    "on one of two levels",
  )
  model = contract.model(R, "grouped")
  ask = functools.partial(
    rj.infer.generate, model, contract.text("grouped")[0], max_new_tokens=1
  )
  for options, says in (
    ({}, "a kind with a codec"),
    ({"cache_kind": rj.kv.CacheConfig(codec=MIXED, unrotated=True)}, "rotated"),
    ({"cache_kind": "int4", "prefill": "chunked"}, "from shard to shard"),
    ({"cache_kind": "int4", "prefill": "ulysses"}, "from shard to shard"),
  ):
    refused(OptionError, lambda o=options: ask(wire="cache", **o), says)
  latent = contract.model(1, "latent")
  refused(
    OptionError,
    lambda: rj.infer.generate(
      latent, [[1, 2]], max_new_tokens=1, wire="cache", cache_kind="int8"
    ),
    "caches latents",
  )


def test_one_shard_says_that_it_sends_nothing():
  reports = []
  rj.infer.generate(
    contract.model(1, "grouped"), [[1, 2, 3]], max_new_tokens=1, wire="int8",
    report=reports.append,
  )  # fmt: skip
  assert "one shard sends nothing" in reports[0].prefill.why
