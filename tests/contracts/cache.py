"""The laws of a cache: each kind of cache inherits them by one line.

A law is called with a `Setup`: a kind of cache, a number of shards, a family
of models and a dtype. It compares with the model's call without a cache.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax import tree
from ringjax.errors import OptionError
from ringjax.kv import kind_text
from ringjax.kv.composed.open_cache import WithOpenCache
from ringjax.kv.state import State
from ringjax.ops.attention.cached.code_format import token_axis
from ringjax.ops.attention.cached.paged import PagedView
from ringjax.ops.attention.cached.views import UnrotatedView
from tests import checkpoints
from tests.helpers import SMALL, make_mesh

# One layer that looks back over all and two that look back 5 tokens.
CONFIG = {
  **SMALL,
  "architectures": ["Qwen2ForCausalLM"],
  "model_type": "qwen2",
  "num_hidden_layers": 3,
  "use_sliding_window": True,
  "sliding_window": 5,
  "max_window_layers": 1,
}
# What a layer may be, and a checkpoint whose layers are that.
FAMILIES = {
  "windows": None,
  "one head of keys each": "llama2",
  "grouped": "llama3",
  "one head of keys": "falcon_7b",
  "latent": "deepseek_v3",
  "sinks": "gpt_oss",
  "alibi": "falcon_rw",
  "chunked": "llama4_text",
  "recurrent": "qwen3_next",
  "selected": "deepseek_v32",
}
# Kinds with a codec for each head, and the kinds whose codecs these are.
PER_HEAD = {
  "per-head": ("int4", "hadamard3", "int8"),
  "per-head-nuq": ("nuq3", "nuq2"),
}
# Of windowed layers: tokens of a call that may be taken back.
SLACK = 6

B, T, CAPACITY = 3, 12, 32
TOLERANCE = 1e-5


@functools.cache
def model(shards, family="windows", dtype="float32"):
  mesh = make_mesh(shards, "auto") if shards > 1 else None
  name = FAMILIES[family]
  config = CONFIG if name is None else checkpoints.config(name)
  # Heads that look at few tokens: a wrong one is seen in the logits. Less in
  # bfloat16, whose rounding makes an expert of another that is near.
  wide = 0.2 if dtype == "float32" else 0.06
  config = config | {"initializer_range": wide}
  return rj.models.create(config, seed=1, mesh=mesh, dtype=jnp.dtype(dtype))


@functools.cache
def kind_of(name, family="windows", dtype="float32"):
  """A kind by its name, calibrated where it has to be; or as it is."""
  if isinstance(name, rj.kv.CacheConfig):
    return name
  if name in PER_HEAD:
    return per_head(name, family, dtype)
  kind = kind_text.parse(name)
  if not isinstance(kind.codec, rj.kv.Calibrated):
    return kind
  draw = np.random.default_rng(1).integers(1, 64, (2, 64)).astype(np.int32)
  found = rj.infer.calibrate(
    model(1, family, dtype),
    draw,
    outliers=kind.codec.values.outliers,
    keys=kind.codec.keys.by,
    rotated=not kind.layout.unrotated,
  )
  return kind.with_options({"calibration": found})


def per_head(name, family, dtype):
  """A codec for each head, in some order that no two layers share."""
  kinds = [kind_of(one, family, dtype) for one in PER_HEAD[name]]
  which, number = {}, itertools.count()
  for shape in model(1, family, dtype).kinds:
    for layer in getattr(shape, "which", ()):
      heads = [next(number) * 2 // 3 for _ in range(shape.heads)]
      which[layer] = tuple(n % len(kinds) for n in heads)
  layers = model(1, family, dtype).config.layers
  codec = rj.kv.PerHead(
    codecs=tuple(kind.codec for kind in kinds),
    which=tuple(which.get(n, ()) for n in range(len(layers))),
  )
  return kinds[0].replace(codec=codec)


@functools.cache
def text(family="windows", dtype="float32", kind="dense"):
  """Tokens [B, 2 T] and their logits, by a call without a cache.

  With a codec, by a call whose keys and values are encoded and decoded.
  """
  tokens = np.random.default_rng(0).integers(1, 64, (B, 2 * T))
  tokens = tokens.astype(np.int32)
  call = model(1, family, dtype)
  kind = kind_of(kind, family, dtype)
  if kind.codec is None:
    return tokens, np.asarray(call(tokens))
  logits, _ = call(tokens, cache=rj.kv.SimulatedCache.create(call, kind))
  return tokens, np.asarray(logits)


@dataclasses.dataclass(frozen=True)
class Setup:
  """What a law is shown for."""

  kind: str | rj.kv.CacheConfig
  shards: int
  family: str = "windows"
  dtype: str = "float32"

  def __str__(self) -> str:
    return f"{self.kind}-{self.shards}-{self.family}-{self.dtype}"

  @property
  def model(self):
    return model(self.shards, self.family, self.dtype)

  def text(self):
    return text(self.family, self.dtype, self.kind)

  def empty(self, batch=B, capacity=CAPACITY):
    attend = None
    if self.shards > 1:
      attend = rj.models.CachedAttention(mesh=self.model.mesh, axis="seq")
    kind = kind_of(self.kind, self.family, self.dtype)
    kind = kind.replace(slack=SLACK)
    return self.model.init_cache(batch, capacity, sharding=attend, kind=kind)

  def ready(self, cache, tokens):
    """Between two calls, as `rj.infer.generate` does it."""
    each = -(-tokens // self.shards)
    return cache.flush().with_room(np.full((cache.batch, self.shards), each))

  def read(self, tokens, cache, **options):
    cache = self.ready(cache, tokens.shape[1])
    logits, cache = self.model(jnp.asarray(tokens), cache=cache, **options)
    return np.asarray(logits), cache

  def close(self, got, want):
    all_, far = self.text()[1], np.abs(got - want)
    rms = lambda x: float(np.sqrt(np.mean(np.square(x))))
    if self.dtype != "float32":
      # A mixture that is near a tie takes another expert: some logits are far.
      assert np.median(far) < 0.08 * rms(all_)
    elif kind_of(self.kind, self.family, self.dtype).codec is not None:
      # So does a number between two codes.
      assert rms(far) < 0.02 * rms(all_)
    else:
      largest = max(1.0, float(np.abs(all_).max()))
      close(got, want, TOLERANCE * largest)

  def refuses_if_recurrent(self, *calls):
    """Whether a state that does not go back is there; then `calls` raise."""
    if self.family != "recurrent":
      return False
    for call in calls:
      with pytest.raises(OptionError, match="recurrent layers"):
        call()
    return True


def close(got, want, tolerance=TOLERANCE):
  np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


def state(cache):
  """What a cache holds: coordinates, and keys and values of real slots.

  Of ring buffers only what a later query may see, by position.
  """
  seg = np.asarray(cache.at.seg)
  found = [np.where(seg > 0, np.asarray(cache.at.pos), 0), seg, cache.free()]
  if isinstance(cache, rj.kv.TieredCache):
    older = np.asarray(cache.held.at.seg) > 0
    for x in (x for x in jax.tree.leaves(cache.blocks) if x.size):
      # By row, shard, block and slot: [B, R, N, P, L, K, D].
      x = np.moveaxis(np.asarray(x), token_axis(x), 3)
      shape = (cache.shards, -1, older.shape[1] // cache.shards // x.shape[3])
      x = np.moveaxis(x.reshape(*shape, *x.shape[1:]), (3, 0, 2, 5), range(4))
      real = older.reshape(*x.shape[:4], *(1,) * (x.ndim - 4))
      found.append(np.where(real, x, 0))
  if isinstance(cache, WithOpenCache):
    cache = cache.open
    seg = np.asarray(cache.at.seg)
  for ring, slots in zip(cache.ring_of, cache.slots, strict=True):
    if isinstance(slots, State):
      found.extend(np.asarray(x) for x in jax.tree.leaves(slots))
      continue
    arrays = jax.tree.leaves(slots)
    if ring is None:
      real = (seg > 0)[None, :, None, :, None]
      found.extend(np.where(real, by_slot(x), 0) for x in arrays)
      continue
    pos, here = (np.asarray(x) for x in cache.rings[ring].at)
    for row, end in enumerate(cache.length.tolist()):
      first = max(0, end - cache.rings[ring].reach)
      seen = np.flatnonzero((here[row] > 0) & (pos[row] >= first))
      seen = seen[np.argsort(pos[row, seen])]
      assert pos[row, seen].tolist() == list(range(first, end))
      found.extend(by_slot(x)[:, row, :, seen] for x in arrays)
  return found


def holds(cache):
  """Of each row the positions that it holds, of each head where it evicts."""
  if not isinstance(cache, rj.kv.EvictingCache):
    return [
      sorted(pos[seg > 0].tolist())
      for pos, seg in zip(*map(np.asarray, cache.at), strict=True)
    ]
  return [
    [
      [head.tolist() for head in layer]
      for layer in cache.positions(row)
      if layer is not None
    ]
    for row in range(cache.batch)
  ]


def by_slot(x):
  """[L, B, K, S, D] of stored numbers or of codes."""
  return np.moveaxis(np.asarray(x), token_axis(x), 3)


def same(a, b, rounding=False):
  """Whether both hold the same; with `rounding` to a float's last digits."""
  for x, y in zip(state(a), state(b), strict=True):
    if not rounding or x.dtype == np.int32:
      np.testing.assert_array_equal(x, y)
    elif x.dtype == np.uint8:
      # A number that is near the middle between two codes.
      assert np.mean(x != y) < 0.02
    else:
      np.testing.assert_allclose(np.float32(x), np.float32(y), atol=1e-5)


def moved_along(x, order, axis):
  """An array [*, B, ..., S at `axis`, ...] with its slots in order [B, S]."""
  if not x.size:
    return x
  shape = [1] * x.ndim
  # The batch is the first dimension of coordinates and the second of others.
  shape[0 if x.ndim == 2 else 1], shape[axis] = order.shape
  found = np.take_along_axis(np.asarray(x), order.reshape(shape), axis)
  return jax.device_put(found, x.sharding)


def renamed(cache, rng):
  """The same tokens in other slots: nothing but slots and coordinates moves.

  Slots are drawn anew among those in use on their shard. A ring's slots are
  named by its count, which goes on by one on each shard. Pages are drawn anew
  on each device, and their tables follow; of blocks in host memory, which move
  as a whole, the slots inside of each are turned around.
  """
  along = lambda order: (
    lambda x: moved_along(x, order, token_axis(x) if x.ndim > 2 else 1)
  )
  if isinstance(cache, rj.kv.TieredCache):
    held, blocks = cache.held, cache.blocks
    (size,) = {
      x.shape[token_axis(x)] for x in jax.tree.leaves(blocks) if x.size
    }
    turn = np.arange(held.capacity).reshape(-1, size)[:, ::-1].reshape(-1)
    turned = along(np.tile(turn, (cache.batch, 1)))
    inside = along(np.tile(np.arange(size)[::-1], (cache.batch, 1)))
    if isinstance(cache, rj.kv.ChosenTieredCache):
      # Copies of pages that were turned around.
      empty = lambda x: x and dataclasses.replace(x, page=x.page * 0 - 1)
      cache = dataclasses.replace(cache, hot=tuple(map(empty, cache.hot)))
    return dataclasses.replace(
      cache,
      open=renamed(cache.open, rng),
      held=dataclasses.replace(held, at=jax.tree.map(turned, held.at)),
      blocks=jax.tree.map(inside, blocks),
    )
  if isinstance(cache, rj.kv.EvictingCache):
    pages = tuple(None if x is None else redrawn(x, rng) for x in cache.pages)
    opened = renamed(cache.open, rng)
    return dataclasses.replace(cache, open=opened, pages=pages)
  used, local = np.asarray(cache.held.used), cache.held.local
  order = np.tile(np.arange(cache.capacity), (cache.batch, 1))
  for row, shard in np.ndindex(*used.shape):
    mine = shard * local + np.arange(used[row, shard])
    order[row, mine] = rng.permutation(mine)
  orders, rings = [order], []
  for ring in cache.rings:
    slot = np.arange(ring.capacity).reshape(cache.shards, -1)
    turn = np.tile(np.roll(slot, 1, 1).reshape(-1), (cache.batch, 1))
    orders.append(turn)
    rings.append(
      dataclasses.replace(
        ring,
        at=jax.tree.map(along(turn), ring.at),
        count=ring.count + cache.shards,
        before=ring.before + cache.shards,
      )
    )
  slots = [
    x
    if isinstance(x, State)
    else jax.tree.map(along(orders[0 if n is None else n + 1]), x)
    for n, x in zip(cache.ring_of, cache.slots, strict=True)
  ]
  held = dataclasses.replace(
    cache.held, at=jax.tree.map(along(order), cache.at)
  )
  return dataclasses.replace(
    cache, slots=tuple(slots), held=held, rings=tuple(rings)
  )


def redrawn(pages, rng):
  """Pages of heads with other numbers, the same on all devices."""
  places, total = pages.places, pages.k.shape[0]
  devices = 1 if places.mesh is None else places.size(places.axes)
  each = total // devices
  order = rng.permutation(each)
  whole = (np.arange(devices)[:, None] * each + order).reshape(-1)
  put = lambda x, new: jax.device_put(new, x.sharding)
  move = lambda x: put(x, np.asarray(x)[whole])
  table = np.asarray(pages.table)
  names = np.where(table < 0, -1, np.argsort(order)[table]).astype(np.int32)
  # Slots that heads share are in the order of the table.
  whole_rows = dict(pos=pages.pos, seg=pages.seg) if pages.alike else {}
  return dataclasses.replace(
    jax.tree.map(move, tree.with_leaves(pages, table=None)),
    table=put(pages.table, names),
    **whole_rows,
  )


def halves(view):
  """A view as two, by coordinates: each has some of the tokens of all tiles."""
  if isinstance(view, UnrotatedView):
    return [view._replace(stored=one) for one in halves(view.stored)]
  if isinstance(view, PagedView):
    first = view.pos % 3 == 0
    return [
      dataclasses.replace(view, pos=jnp.where(here, view.pos, -1))
      for here in (first, ~first)
    ]
  at = view.at
  put = getattr(type(view), "_replace", dataclasses.replace)
  first = at.pos % 3 == 0
  return [
    put(view, at=at._replace(seg=jnp.where(here, at.seg, 0)))
    for here in (first, ~first)
  ]


@functools.cache
def split_layer(cls):
  """A layer's part of a cache, of which each view is read as two."""

  def views(self, **options):
    return tuple(
      one for view in cls.views(self, **options) for one in halves(view)
    )

  return type(f"Split{cls.__name__}", (cls,), {"views": views})


@functools.cache
def split_cache(cls):
  """A cache whose layers are split; a pytree of another type."""

  def layer(self, *args):
    found = cls.layer(self, *args)
    if not hasattr(found, "views"):
      return found
    return split_layer(type(found))(**vars(found))

  made = type(f"Split{cls.__name__}", (cls,), {"layer": layer})

  def unflatten(_, children):
    x = object.__new__(made)
    vars(x).update(vars(children[0]))
    return x

  def flatten(x):
    base = object.__new__(cls)
    vars(base).update(vars(x))
    return (base,), None

  jax.tree_util.register_pytree_node(made, flatten, unflatten)
  return made


def split(cache):
  """The same cache, of which each view is read as two."""
  made = object.__new__(split_cache(type(cache)))
  vars(made).update(vars(cache))
  return made


def as_without_a_cache(setup):
  """A prompt, then tokens one by one."""
  tokens, want = setup.text()
  first, cache = setup.read(tokens[:, :T], setup.empty())
  got = [first]
  for n in range(T, T + 3):
    logits, cache = setup.read(tokens[:, n : n + 1], cache)
    got.append(logits)
  setup.close(np.concatenate(got, 1), want[:, : T + 3])


def rejected_tokens_leave_no_trace(setup):
  """Append n, keep fewer: as if the others had never been appended."""
  tokens, want = setup.text()
  kept = np.array([3, 0, 5])
  _, cache = setup.read(tokens[:, :T], setup.empty())
  draft = tokens[:, T : T + 5].copy()
  draft[np.arange(5)[None] >= kept[:, None]] = 1
  _, cache = setup.read(draft, cache)
  stays = np.arange(5)[None] < kept[:, None]
  if setup.refuses_if_recurrent(
    lambda: cache.keep(stays),
    lambda: cache.keep_first(kept, 5),
    lambda: cache.truncate(T),
  ):
    return
  first = cache.keep_first(kept, 5)
  cache = cache.keep(stays)
  same(first, cache)
  assert cache.length.tolist() == (T + kept).tolist()

  _, never = setup.read(tokens[:, :T], setup.empty())
  seg = (np.arange(5)[None] < kept[:, None]).astype(np.int32)
  _, never = setup.read(tokens[:, T : T + 5] * seg, never, segment_ids=seg)
  same(cache, never, rounding=setup.dtype == "float32")
  after = np.stack(
    [row[T + n : T + n + 4] for row, n in zip(tokens, kept, strict=True)]
  )
  logits, _ = setup.read(after, cache)
  for row, n in enumerate(kept):
    setup.close(logits[row], want[row, T + n : T + n + 4])


def siblings_are_kept_by_their_number(setup):
  """Of a tree's tokens some path, whose tokens are not neighbours."""
  if setup.family == "recurrent":
    return
  tokens, _ = setup.text()
  _, cache = setup.read(tokens[:, :T], setup.empty())
  draft = np.ones((B, 6), np.int32)
  path = np.array([0, 2, 5])
  draft[:, path] = tokens[:, T : T + 3]
  pos = np.array([0, 1, 1, 2, 2, 2]) + T
  _, cache = setup.read(draft, cache, positions=np.tile(pos, (B, 1)))
  cache = cache.keep(np.tile(np.isin(np.arange(6), path), (B, 1)))
  assert cache.length.tolist() == [T + 3] * B
  assert (CAPACITY - cache.free().sum(1)).tolist() == [T + 3] * B
  assert sorted(np.asarray(cache.at.pos)[0][np.asarray(cache.at.seg)[0] > 0])[
    -3:
  ] == [T, T + 1, T + 2]


def blocks_are_loaded_bit_for_bit(setup):
  tokens, want = setup.text()
  _, cache = setup.read(tokens[:, :T], setup.empty())
  if setup.refuses_if_recurrent(lambda: cache.export(1, 0, T)):
    return
  blocks = cache.export(1, 0, T)
  into = setup.empty().load(2, blocks)
  again = into.export(2, 0, T)
  for x, y in zip(jax.tree.leaves(blocks), jax.tree.leaves(again), strict=True):
    np.testing.assert_array_equal(x, y)
  assert into.length.tolist() == [0, 0, T]
  after = np.where(np.arange(B)[:, None] == 2, tokens[1, T : T + 3], 0)
  seg = np.tile((np.arange(B) == 2).astype(np.int32)[:, None], (1, 3))
  logits, _ = setup.read(after.astype(np.int32), into, segment_ids=seg)
  setup.close(logits[2], want[1, T : T + 3])


def rows_are_independent(setup):
  """Reset one, insert another: the others stay as they are."""
  tokens, want = setup.text()
  _, cache = setup.read(tokens[:, :T], setup.empty())
  _, other = setup.read(tokens[[0], T:], setup.empty(batch=1))
  cleared = cache.reset([1])
  assert cleared.length.tolist() == [T, 0, T]
  same(cleared.take([0, 2]), cache.take([0, 2]))
  filled = cleared.insert([1], other)
  same(filled.take([0, 2]), cache.take([0, 2]))
  same(filled.take([1]), other)
  logits, _ = setup.read(tokens[:, T : T + 2], filled)
  setup.close(logits[[0, 2]], want[[0, 2], T : T + 2])


def a_snapshot_comes_back(setup):
  tokens, want = setup.text()
  _, cache = setup.read(tokens[:, :T], setup.empty())
  before = cache.snapshot()
  _, cache = setup.read(np.full((B, 4), 5, np.int32), cache)
  cache = cache.restore(before)
  assert cache.length.tolist() == [T] * B
  logits, _ = setup.read(tokens[:, T:], cache)
  setup.close(logits, want[:, T:])


def an_undone_call_leaves_no_trace(setup):
  """Without a copy of keys: as drafts that recurrent layers rejected."""
  tokens, want = setup.text()
  _, cache = setup.read(tokens[:, :T], setup.empty())
  if not isinstance(cache, (rj.kv.KVCache, rj.kv.EvictingCache)):
    return
  before = cache.call_state(4)
  _, cache = setup.read(np.full((B, 4), 5, np.int32), cache)
  cache = cache.undo_call(before)
  assert cache.length.tolist() == [T] * B
  logits, _ = setup.read(tokens[:, T:], cache)
  setup.close(logits, want[:, T:])


def short_rows_cost_no_slots(setup):
  """Padding takes none, so that rows of unequal turns fit."""
  tokens, want = setup.text()
  lengths = np.array([T, 3, 7])
  seg = (np.arange(T)[None] < lengths[:, None]).astype(np.int32)
  cache = setup.empty()
  _, cache = setup.read(tokens[:, :T] * seg, cache, segment_ids=seg)
  assert (CAPACITY - cache.free().sum(1)).tolist() == lengths.tolist()
  after = np.stack(
    [row[n : n + T] for row, n in zip(tokens, lengths, strict=True)]
  )
  logits, _ = setup.read(after, cache)
  for row, n in enumerate(lengths):
    setup.close(logits[row], want[row, n : n + T])


def a_full_row_is_filled_to_its_last_slot(setup):
  """A call whose padding would reach beyond the last slot."""
  tokens, want = setup.text()
  cache = setup.empty(batch=2, capacity=16)
  _, cache = setup.read(tokens[:2, :8], cache)
  seg = np.array([[1] * 8, [1] * 2 + [0] * 6], np.int32)
  _, cache = setup.read(tokens[:2, 8:16] * seg, cache, segment_ids=seg)
  assert cache.free().sum(1).tolist() == [0, 6]
  more = np.stack([np.zeros(4, np.int32), tokens[1, 10:14]])
  seg = np.array([[0] * 4, [1] * 4], np.int32)
  cache_call = jax.jit(
    lambda cache: setup.model(more, segment_ids=seg, cache=cache)
  )
  logits, cache = cache_call(setup.ready(cache, 4))
  setup.close(np.asarray(logits)[1], want[1, 10:14])
  assert cache.free().sum(1).tolist() == [0, 2]
  assert cache.length.tolist() == [16, 14]


def any_split_is_read_the_same(setup):
  """Calls of unequal lengths, the last one of more tokens than the slack."""
  tokens, want = setup.text()
  cache, got = setup.empty(), []
  for start, end in ((0, 4), (4, 8), (8, 9), (9, 9 + SLACK + 1)):
    seg = np.ones((B, -(-(end - start) // 4) * 4), np.int32)
    seg[:, end - start :] = 0
    part = np.pad(
      tokens[:, start:end], ((0, 0), (0, seg.shape[1] - end + start))
    )
    logits, cache = setup.read(part, cache, segment_ids=seg)
    got.append(logits[:, : end - start])
  setup.close(np.concatenate(got, 1), want[:, : 9 + SLACK + 1])


def bytes_are_stated_before(setup):
  """What is made has the bytes of its spec, whatever happens to it."""
  tokens, _ = setup.text()
  cache = setup.empty()
  stated = jax.eval_shape(setup.empty)
  count = lambda x: sum(
    leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(x)
  )
  assert cache.nbytes() == count(stated)
  _, read = setup.read(tokens[:, :T], cache)
  read = read.evict()
  for other in (read, read.reset([1]), read.take([2, 0, 0])):
    assert other.nbytes() == cache.nbytes()
  one, two, three = (setup.empty(batch=n).nbytes() for n in (1, 2, 3))
  assert three - two == two - one


def programs_do_not_grow_with_use(setup):
  """Any workload of two sizes of calls compiles two programs."""
  tokens, _ = setup.text()
  call = jax.jit(lambda t, seg, c: setup.model(t, segment_ids=seg, cache=c))
  cache, rng = setup.empty(capacity=64), np.random.default_rng(3)
  for _ in range(12):
    size = int(rng.choice([1, 4]))
    seg = np.arange(size)[None] < rng.integers(0, size + 1, (B, 1))
    seg = seg.astype(np.int32)
    cache = setup.ready(cache, size)
    _, cache = call(tokens[:, :size] * seg, seg, cache)
    if rng.random() < 0.3:
      cache = cache.reset([int(rng.integers(B))])
    if rng.random() < 0.3:
      cache = cache.take(rng.integers(0, B, B))
  assert call._cache_size() <= 2


def renaming_slots_changes_nothing(setup):
  """Only coordinates say which token is where."""
  tokens, _ = setup.text()
  _, cache = setup.read(tokens[:, :T], setup.empty())
  cache = setup.ready(cache, 3)
  other = renamed(cache, np.random.default_rng(2))
  assert np.any(np.asarray(other.at.pos) != np.asarray(cache.at.pos))
  for start, end in ((T, T + 3), (T + 3, T + 4)):
    want, cache = setup.read(tokens[:, start:end], cache)
    got, other = setup.read(tokens[:, start:end], other)
    setup.close(got, want)


def any_views_merge_to_the_same(setup):
  """Each view of each layer is read as two, by one token or by several."""
  tokens, _ = setup.text()
  _, cache = setup.read(tokens[:, :T], setup.empty())
  cache = setup.ready(cache, 3)
  for count in (3, 1):
    more = jnp.asarray(tokens[:, T : T + count])
    want, _ = setup.model(more, cache=cache)
    got, _ = setup.model(more, cache=split(cache))
    setup.close(np.asarray(got), np.asarray(want))


def evicting_twice_is_evicting_once(setup):
  """What has nothing new stays as it is."""
  tokens, _ = text(setup.family, setup.dtype)
  _, cache = setup.read(tokens[:, :T], setup.empty())
  ask = lambda cache: np.asarray(
    setup.model(tokens[:, T : T + 2], cache=cache.with_room(2))[0]
  )
  once = cache.flush()
  before, want = holds(once), ask(once)
  # What repeats a context evicts when it has been repeated.
  twice = once.flush() if cache.kind.repeats else once.evict().flush()
  assert holds(twice) == before
  close(ask(twice), want, TOLERANCE * max(1.0, np.abs(want).max()))


def rows_without_new_tokens_stay(setup):
  """A call that has none of a row, or a flush of others, changes nothing."""
  tokens, _ = text(setup.family, setup.dtype)
  _, cache = setup.read(tokens[:, :T], setup.empty())
  cache = cache.flush()
  before = holds(cache)
  seg = np.array([[1, 1, 1], [0, 0, 0], [1, 1, 0]], np.int32)
  _, cache = setup.read(tokens[:, T : T + 3] * seg, cache, segment_ids=seg)
  between, other = holds(cache), cache.take([0, 1, 2])
  assert between[1] == before[1]
  one = cache.flush(np.array([True, False, False]))
  assert holds(one)[1:] == between[1:]
  # The last row is evicted once, whenever that is.
  both = holds(other.flush())
  assert both[1] == before[1] and holds(one.flush()) == both


LAWS = (
  as_without_a_cache,
  rejected_tokens_leave_no_trace,
  siblings_are_kept_by_their_number,
  blocks_are_loaded_bit_for_bit,
  rows_are_independent,
  a_snapshot_comes_back,
  an_undone_call_leaves_no_trace,
  short_rows_cost_no_slots,
  a_full_row_is_filled_to_its_last_slot,
  any_split_is_read_the_same,
  bytes_are_stated_before,
  programs_do_not_grow_with_use,
  renaming_slots_changes_nothing,
  any_views_merge_to_the_same,
  evicting_twice_is_evicting_once,
  rows_without_new_tokens_stay,
)


def answers_as_one_device(kind):
  """Meshes of three axes and of one, which also gathers its cache."""
  config = {**SMALL, "model_type": "qwen3", "head_dim": 16}
  config |= {"num_attention_heads": 8, "num_key_value_heads": 4}
  config |= {"initializer_range": 0.2}
  draw = np.random.default_rng(5)
  prompts = [draw.integers(1, 64, n).astype(np.int32) for n in (45, 17, 60, 33)]
  ask = lambda model, **options: rj.infer.generate(
    model, prompts, max_new_tokens=20, cache_kind=kind, **options
  ).tokens.tolist()
  want = ask(rj.models.create(config, seed=1))
  cube = rj.make_mesh((2, 2, 2), ("data", "seq", "model"))
  assert ask(rj.models.create(config, seed=1, mesh=cube)) == want
  line = rj.make_mesh((4,), ("seq",))
  sharded = rj.models.create(config, seed=1, mesh=line)
  assert ask(sharded) == want
  assert ask(sharded, keep="last") == want
