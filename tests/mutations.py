"""Planted bugs, and the few cheap comparisons that must find each of them.

A bug is a substitution in the source of one module. `planted` imports the
whole package afresh with it, beside the healthy one; the package's objects
are therefore always taken from the module that a check is given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import re
import sys

import jax.numpy as jnp
import numpy as np

from tests import oracle

_PACKAGE = "ringjax"
_ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Bug:
  """`old` becomes `new` in `module`; the check `seen_by` must fail then."""

  name: str
  module: str
  old: str
  new: str
  seen_by: str


class _Source(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Finds the package's modules, and gives one of them another text.

  Import hooks that check types are passed by: they remember the classes of
  the healthy package by their names.
  """

  def __init__(self, name, text):
    self.name, self.text = name, text

  def find_spec(self, name, path=None, target=None):
    if not _is_ours(name):
      return None
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if name == self.name:
      spec = importlib.util.spec_from_loader(name, self, origin=spec.origin)
    return spec

  def exec_module(self, module):
    code = compile(self.text, module.__spec__.origin, "exec")
    exec(code, module.__dict__)


def _is_ours(name):
  return name == _PACKAGE or name.startswith(_PACKAGE + ".")


def _ours():
  return {name: x for name, x in sys.modules.items() if _is_ours(name)}


def substituted(bug):
  """The text of the bug's module with the bug in it."""
  path = _ROOT.joinpath(*bug.module.split(".")).with_suffix(".py")
  # White space is free, so that a formatter does not lose a bug.
  tokens = map(re.escape, re.findall(r"\w+|[^\w\s]", bug.old))
  text, count = re.subn(
    r"\s*".join(tokens), lambda _: bug.new, path.read_text()
  )
  assert count == 1, f"{bug.module}: {count} places for {bug.name!r}"
  return text


@contextlib.contextmanager
def planted(bug):
  """The package with `bug` in it."""
  finder = _Source(bug.module, substituted(bug))
  healthy = _ours()
  for name in healthy:
    del sys.modules[name]
  sys.meta_path.insert(0, finder)
  try:
    yield importlib.import_module(_PACKAGE)
  finally:
    sys.meta_path.remove(finder)
    for name in _ours():
      del sys.modules[name]
    sys.modules.update(healthy)


# The checks: each takes the package and raises AssertionError.

SEGMENTS = np.stack(
  [
    np.repeat([1, 2, 0, 3], [14, 9, 5, 12]),
    np.repeat([4, 0], [33, 7]),
  ]
)


def _causal(i, j):
  return j <= i


def _compare(rj, case, layout, strategy=None, shards=4, **tolerances):
  got = oracle.run(
    case,
    rj.dot_product_attention,
    layout=layout,
    shards=shards,
    mesh=rj.make_mesh((shards,), ("seq",)),
    strategy=strategy or rj.Ring(rj.Blockwise(8, 8), unroll=1),
  )
  oracle.check(got, oracle.truth(case), **tolerances)


def ring(rj):
  case = oracle.build(t=40, is_causal=True, sees=_causal)
  _compare(rj, case, rj.Contiguous())


def window(rj):
  case = oracle.build(
    t=40,
    mask=rj.Causal() & rj.Window(12),
    sees=lambda i, j: (j <= i) & (i - j < 12),
  )
  _compare(rj, case, rj.Contiguous())


def both_sides(rj):
  case = oracle.build(
    t=40, mask=rj.Window(9), slopes=True, sees=lambda i, j: abs(i - j) < 9
  )
  _compare(rj, case, rj.Contiguous())


def striped(rj):
  case = oracle.build(
    t=40,
    is_causal=True,
    sees=_causal,
    q_seg=SEGMENTS,
    k_len=np.array([38, 40]),
  )
  _compare(rj, case, rj.Striped())


def zigzag(rj):
  case = oracle.build(t=37, is_causal=True, sees=_causal)
  _compare(rj, case, rj.Zigzag())


def zigzag_window(rj):
  case = oracle.build(
    t=40,
    mask=rj.Causal() & rj.Window(5),
    sees=lambda i, j: (j <= i) & (i - j < 5),
  )
  _compare(rj, case, rj.Zigzag())


def prefill(rj):
  case = oracle.build(
    t=12, s=40, is_causal=True, sees=_causal, q_pos=28 + np.arange(12)
  )
  _compare(rj, case, rj.Contiguous())


def extras(rj):
  case = oracle.build(
    t=40, bias=(1, 4, 40, 40), sinks=True, logits_soft_cap=2.0, spread=3.0
  )
  _compare(rj, case, rj.Striped())


def long(rj):
  case = oracle.build(t=128, is_causal=True, sees=_causal)
  _compare(rj, case, rj.Contiguous(), shards=1)


def gather(rj):
  case = oracle.build(t=40, is_causal=True, sees=_causal)
  _compare(rj, case, rj.Striped(), rj.Gather(rj.Blockwise(8, 8)))


def ulysses(rj):
  case = oracle.build(t=40, sinks=True, slopes=True)
  _compare(rj, case, rj.Zigzag(), rj.Ulysses(rj.Blockwise(8, 8)))


def dropout(rj):
  t, rate = 40, 0.4
  options = dict(dropout_rate=rate, dropout_seed=3)
  # Equal scores and one-hot values show the weights.
  flat = np.zeros((1, t, 4, 8), np.float32)
  eye = np.repeat(np.eye(t, dtype=np.float32)[None, :, None], 4, axis=2)
  out = rj.dot_product_attention(flat, flat, eye, **options)
  weights = t * np.asarray(out).swapaxes(1, 2)
  dropped = weights == 0
  allclose = np.allclose(weights, np.where(dropped, 0, 1 / (1 - rate)))
  assert allclose and 0.3 < dropped.mean() < 0.5, "allclose"
  case = oracle.build(t=t, weights=weights, **options)
  _compare(rj, case, rj.Contiguous())


def bfloat16(rj):
  case = oracle.build(t=256, n=2, kv=1, b=1, dtype=jnp.bfloat16)
  narrow = rj.Ring(rj.Blockwise(8, 8, wide=False), unroll=1)
  _compare(rj, case, rj.Contiguous(), narrow, forward=3e-3, backward=4e-3)


def shared(rj):
  """Rows that read together what they share, against dense attention."""
  del rj
  pooled = importlib.import_module("ringjax.ops.attention.cached.pooled")
  scores = importlib.import_module("ringjax.ops.attention.scores")
  mask = importlib.import_module("ringjax.ops.mask")
  rows = importlib.import_module("ringjax.serve.prefix.shared_rows")
  page, tile, each = 32, 128, 4
  lengths = np.array([500, 17, 490, 300, 400])
  # Two share three tiles, of which another row has the first two and one more
  # the first; the second row has no full tile.
  table = np.arange(5 * 16).reshape(5, 16)
  for row, tiles in ((2, 3), (3, 2), (4, 1)):
    table[row, : tiles * each] = table[0, : tiles * each]
  # One page of a tile is the same, the others are not.
  table[4, 5] = table[0, 5]
  plan = rows.shared_tiles(table[:, None], lengths, page, tile, 8)
  draw = np.random.default_rng(0).standard_normal
  k, v = (jnp.asarray(draw((1, 80, 2, page, 8)), jnp.float32) for _ in "kv")
  q = jnp.asarray(draw((5, 2, 2, 1, 8)), jnp.float32)
  pos = np.broadcast_to(np.arange(16 * page), (5, 16 * page))
  ints = lambda *x: mask.Coords(*(jnp.asarray(a, jnp.int32) for a in x))
  at = ints(pos, pos < lengths[:, None])
  view = pooled.PooledView(
    k,
    v,
    at,
    jnp.asarray(table, jnp.int32),
    jnp.int32(0),
    shared=type(plan)(*map(jnp.asarray, plan)),
  )
  q_at = ints(lengths[:, None] - 1, np.ones((5, 1)))
  context = scores.Context(q_at, at, mask.Causal())
  args = scores.ScoreArgs(scores.Scores(scale=0.3), scores.Terms(), context)
  found = pooled.decode_pool(q, view, args)
  got = np.asarray(found.acc / found.l[..., None])[:, :, :, 0]
  for row, length in enumerate(lengths):
    keys, values = (
      np.moveaxis(np.asarray(x)[0, table[row]], 1, 0).reshape(2, -1, 8)
      for x in (k, v)
    )
    s = 0.3 * np.einsum("kgh,kth->kgt", np.asarray(q)[row, :, :, 0], keys)
    p = np.exp(s[..., :length])
    want = np.einsum("kgt,ktj->kgj", p, values[:, :length])
    allclose = np.allclose(got[row], want / p.sum(-1)[..., None], atol=1e-5)
    assert allclose, "allclose"
  # Three tiles are read for nine.
  assert (plan.count[0], plan.shared_counts.sum()) == (3, 9), "allclose"


CHECKS = {
    check.__name__: check
    for check in (
        ring, window, both_sides, striped, zigzag, zigzag_window, prefill,
        extras, gather, ulysses, dropout, bfloat16, long, shared,
    )
}  # fmt: skip


_KV_BLOCK = "ringjax.ops.attention.strategies.kv_block"
_HOPS = "ringjax.ops.attention.strategies.hops"
_ATTEND = "ringjax.ops.attention.attend"
_TILES = "ringjax.ops.attention.blockwise"
_SCORES = "ringjax.ops.attention.scores"
_RUN = "ringjax.ops.attention.execution"
_GATHER = "ringjax.ops.attention.strategies.gather"
_ULYSSES = "ringjax.ops.attention.strategies.ulysses"
_MASK = "ringjax.ops.mask"
_SOFTMAX = "ringjax.ops.softmax"
_LAYOUT = "ringjax.parallel.layout"
_COLLECTIVES = "ringjax.parallel.collectives"
_SHARED = "ringjax.serve.prefix.shared_rows"

BUGS = [
  Bug(
    "the last hop is missing",
    _HOPS,
    "if two_way else (size - 1, 0)",
    "if two_way else (max(size - 2, 0), 0)",
    "ring",
  ),
  Bug(
    "the ring turns the other way",
    _COLLECTIVES,
    "group[(i + shift) % len(group)]",
    "group[(i - shift) % len(group)]",
    "extras",
  ),
  Bug(
    "the window's reach is a token short",
    _LAYOUT,
    "(chunks * q_chunk - behind) // k_chunk",
    "(chunks * q_chunk - behind + 1) // k_chunk",
    "window",
  ),
  Bug(
    "keys from ahead do not come",
    _HOPS,
    "hops_back = max((d for d in distances if size - d > hops_forward), "
    "default=0)",
    "hops_forward, hops_back = 0, max(distances[:1], default=0)",
    "both_sides",
  ),
  Bug(
    "dK and dV do not go home",
    _HOPS,
    "return return_sums(sums, lane.last)",
    "return sums",
    "ring",
  ),
  Bug(
    "dK and dV from ahead do not go home",
    _HOPS,
    "return return_sums(sums, lane.last)",
    "return sums if lane.shift < 0 else return_sums(sums, lane.last)",
    "both_sides",
  ),
  Bug(
    "the accumulator is not rescaled",
    _TILES,
    "carry.acc * weight[..., None] + acc",
    "carry.acc + acc",
    "ring",
  ),
  Bug(
    "the sum is not rescaled",
    _TILES,
    "carry.l * weight + ",
    "carry.l + ",
    "ring",
  ),
  Bug(
    "the accumulator is as narrow as the inputs",
    _TILES,
    "carry.acc * weight[..., None] + acc",
    "(carry.acc * weight[..., None] + acc).astype(v.dtype).astype(acc.dtype)",
    "bfloat16",
  ),
  Bug(
    "products are as narrow as the inputs",
    _TILES,
    "return jnp.einsum(equation, a, b, preferred_element_type="
    "wide_dtype(a.dtype),",
    "return (lambda *x, precision: jnp.einsum(*x)"
    ".astype(wide_dtype(a.dtype)))(equation, a, b,",
    "bfloat16",
  ),
  Bug(
    "rows without a key are NaN",
    _SOFTMAX,
    "return jnp.where(m == -jnp.inf, jnp.zeros_like(m), m)",
    "return m",
    "striped",
  ),
  Bug(
    "tiles are computed without a mask where one of them needs it",
    _TILES,
    "full = jnp.all(full.reshape(grouped), axis + 1)",
    "full = jnp.any(full.reshape(grouped), axis + 1)",
    "long",
  ),
  Bug(
    "tiles beside those that are computed at once are left out",
    _TILES,
    "masked_kinds = (kinds != 0) & ~jnp.repeat(",
    "masked_kinds = (kinds == 1) & ~jnp.repeat(",
    "long",
  ),
  Bug(
    "the scale is missing in the backward pass",
    _TILES,
    "(ds * jnp.asarray(scores.scale, ds.dtype))",
    "ds",
    "ring",
  ),
  Bug(
    "delta is not subtracted",
    _TILES,
    "ds = p * (dp - row(delta))",
    "ds = p * dp",
    "ring",
  ),
  Bug(
    "the log-sum-exp has no gradient",
    _ATTEND,
    "out.astype(dtype), -1) - dlse",
    "out.astype(dtype), -1)",
    "ring",
  ),
  Bug(
    "given positions are ignored",
    _RUN,
    "natural if pos is None else pos",
    "natural",
    "prefill",
  ),
  Bug(
    "a query does not see itself",
    _MASK,
    "return k.pos <= q.pos",
    "return k.pos < q.pos",
    "ring",
  ),
  Bug(
    "the window is a token too wide",
    _MASK,
    "return self.size - 1, self.size - 1 if self.ahead is None else self.ahead",
    "return self.size, self.size - 1 if self.ahead is None else self.ahead",
    "window",
  ),
  Bug(
    "a bound skips a tile that is needed",
    _MASK,
    "return k.first <= q.last, k.last <= q.first",
    "return k.last <= q.last, k.last <= q.first",
    "striped",
  ),
  Bug(
    "a bound takes the mask off a tile that needs it",
    _MASK,
    "return k.first <= q.last, k.last <= q.first",
    "return k.first <= q.last, k.first <= q.first",
    "ring",
  ),
  Bug(
    "documents see each other",
    _MASK,
    "return q.seg == k.seg",
    "return _true(q.seg, k.seg)",
    "striped",
  ),
  Bug(
    "padding is seen",
    _MASK,
    "(q.seg != 0) & (k.seg != 0)",
    "(q.seg != 0)",
    "zigzag",
  ),
  Bug(
    "the keys' lengths are ignored",
    _RUN,
    "real & (natural < valid[:, None])",
    "real",
    "striped",
  ),
  Bug(
    "zigzag's chunks are looked for on other shards",
    _LAYOUT,
    "np.minimum(chunks, 2 * shards - 1 - chunks)",
    "chunks % shards",
    "zigzag_window",
  ),
  Bug(
    "query heads take turns at the key heads",
    _RUN,
    "x.q.reshape(b, t, kv_heads, group, h), (0, 2, 3, 1, 4)",
    "x.q.reshape(b, t, group, kv_heads, h), (0, 3, 2, 1, 4)",
    "ring",
  ),
  Bug(
    "the bias of the wrong shard",
    _KV_BLOCK,
    "args.column + self._source(distance) * length",
    "args.column + self._source(-distance) * length",
    "extras",
  ),
  Bug(
    "the sink counts twice",
    _ATTEND,
    "partial = add_sink(partial, ",
    "partial = add_sink(add_sink(partial, terms.sinks[None, :, :, None]), ",
    "extras",
  ),
  Bug(
    "the sink has no gradient",
    _ATTEND,
    "sinks=-jnp.sum(share * delta, (0, 3))",
    "sinks=jnp.zeros(terms.sinks.shape, dtype) + 0 * jnp.sum(delta, (0, 3))",
    "extras",
  ),
  Bug(
    "the soft cap has no derivative",
    _TILES,
    "ds = ds * (1 - tanh * tanh)",
    "pass",
    "extras",
  ),
  Bug(
    "distances have a sign",
    _MASK,
    "difference = jnp.where(q > k, q - k, k - q)  # Modulo 2**32.",
    "difference = q - k\n  return difference.astype(dtype)",
    "both_sides",
  ),
  Bug(
    "what dropout keeps is not rescaled",
    _SCORES,
    "_const(1 / (1 - rate), dtype)",
    "_const(1.0, dtype)",
    "dropout",
  ),
  Bug(
    "dropout counts inside the tile",
    _SCORES,
    "way.query(self.q_at.pos.astype(jnp.uint32))",
    "way.query((self.q_at.pos - self.q_at.pos[:, :1]).astype(jnp.uint32))",
    "dropout",
  ),
  Bug(
    "dropout is forgotten in the backward pass",
    _TILES,
    "dropped_p, dp = p * weights, dp * weights",
    "dropped_p = p * weights",
    "dropout",
  ),
  Bug(
    "shards keep their own gradients only",
    _GATHER,
    "collectives.scatter_sum(sums, self.axis, dimension)",
    "jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a,"
    "collectives.axis_index(self.axis) * args.context.q.pos.shape[1],"
    "args.context.q.pos.shape[1], dimension), sums)",
    "gather",
  ),
  Bug(
    "all shards take the first shard's heads",
    _ULYSSES,
    "x, collectives.axis_index(axis) * shard_units, shard_units, 0",
    "x, 0 * collectives.axis_index(axis), shard_units, 0",
    "ulysses",
  ),
  Bug(
    "rows that differ are covered by a shared tile",
    _SHARED,
    "cover[shard, at, sharing] = True",
    "cover[shard, at, group] = True",
    "shared",
  ),
  Bug(
    "one of the rows that share a tile is not covered",
    _SHARED,
    "cover[shard, at, sharing] = True",
    "cover[shard, at, sharing[1:]] = True",
    "shared",
  ),
  Bug(
    "a tile that rows share is read by each once more",
    _SHARED,
    "num_shared[shard, sharing] = n + 1",
    "num_shared[shard, sharing] = n",
    "shared",
  ),
  Bug(
    "all of a group have done what some share",
    _SHARED,
    "num_shared[shard, sharing] = n + 1",
    "num_shared[shard, group] = n + 1",
    "shared",
  ),
  Bug(
    "a tile is looked up in the row of another",
    _SHARED,
    "tile_number[shard, at] = sharing[0], n",
    "tile_number[shard, at] = sharing[0] + 1, n",
    "shared",
  ),
  Bug(
    "tiles are alike whose second pages are",
    _SHARED,
    "n * tile_pages : (n + 1) * tile_pages]",
    "n * tile_pages + 1 : n * tile_pages + 2]",
    "shared",
  ),
]
