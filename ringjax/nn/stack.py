"""A stack of layers: equal groups of layers are one loop over their weights.

Guarantees: the stack is its layers, one after another, whatever is grouped and
wherever their weights are.
Cost: the program holds one body for each group, not for each layer.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from ringjax.kv.base import CallCache, FetchedCache, NoCache
from ringjax.nn.block import Block, Layer
from ringjax.nn.placed import PlacedLayers, ReadFault
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens
from ringjax.typing import Index

# Longer periods than any model's pattern of layers.
_LONGEST = 12
# Parts of a run, at most, for layers in several memories.
_PARTS = 4


@dataclasses.dataclass(frozen=True)
class Run:
  """`repeats` times the same `layers`, the first of which is number `first`."""

  first: int
  layers: tuple[Layer, ...]
  repeats: int

  def number(self, position: int, repeat: int) -> int:
    """Which layer of the model is at `position` of a repeat."""
    return self.first + repeat * len(self.layers) + position

  def repeats_in(self, within: tuple[int, int] | None) -> range:
    """Which repeats are among some layers, first and end; None: all.

    A repeat is where its first layer is.
    """
    if within is None:
      return range(self.repeats)
    period = len(self.layers)
    up = lambda n: min(max(-((self.first - n) // period), 0), self.repeats)
    return range(up(within[0]), up(within[1]))


def runs(layers: Sequence[Layer], *, scan: bool = True) -> tuple[Run, ...]:
  """Cuts layers into runs: at each place the one that covers the most."""
  found, at = [], 0
  while at < len(layers):
    period, repeats = 1, 1
    for p in range(1, _LONGEST + 1 if scan else 0):
      r = 1
      unit = tuple(layers[at : at + p])
      while tuple(layers[at + r * p : at + (r + 1) * p]) == unit:
        r += 1
      if r > 1 and r * p > period * repeats:
        period, repeats = p, r
    found.append(Run(at, tuple(layers[at : at + period]), repeats))
    at += period * repeats
  return tuple(found)


class _Resident:
  """Layers whose weights are on the devices: a loop cuts `stacked`."""

  # In which memory each layer is, where not all are on the devices.
  tiers: tuple[str, ...] = ()

  def __init__(self, stacked: Block):
    self.stacked = stacked

  def fetch(
    self,
    index: Index,
    x: jax.Array,
    attend: Attend | None,
    within: range | None = None,
  ) -> list[jax.Array] | None:
    del index, x, attend, within
    return None

  def block(self, cut: Any, found: list[jax.Array] | None) -> Block:
    del found
    return cut


class _Placed:
  """Layers of which some are fetched; what was added to them is on the devices.

  Parameters that `placed` does not know, as those of adapters, are of all
  layers of the kind.
  """

  def __init__(self, block: Block, placed: PlacedLayers, hosted: Any):
    leaves, self._tree = jax.tree_util.tree_flatten_with_path(
      block, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    self._params = [p for _, p in leaves]
    known = {path: n for n, path in enumerate(placed.paths)}
    names = [jax.tree_util.keystr(k, simple=True, separator=".")
             for k, _ in leaves]  # fmt: skip
    # What an adapter stands in front of is its `base`.
    self._which = [
      known.get(name, known.get(name.replace(".base.", "."))) for name in names
    ]
    fetched = {
      n: p.get_value()
      for n, p in zip(self._which, self._params, strict=True)
      if n is not None
    }
    self._resident = [fetched[n] for n in range(len(placed.paths))]
    self._placed, self._hosted = placed, hosted
    self.tiers = placed.tiers
    self.stacked = tuple(
      p.get_value()
      for n, p in zip(self._which, self._params, strict=True)
      if n is None
    )

  def fetch(
    self,
    index: Index,
    x: jax.Array,
    attend: Attend | None,
    within: range | None = None,
  ) -> list[jax.Array] | None:
    """A layer's weights, see `PlacedLayers.fetch`; from disk behind `x`."""
    mesh = self._placed.mesh
    near = None if attend is None else attend.mesh
    same = near is not None and mesh is not None
    same = same and near.axis_names == mesh.axis_names
    spec = attend.spec(x) if same and attend is not None else P()
    return self._placed.fetch(
      index, self._resident, self._hosted, x, spec, within
    )

  def block(self, cut: Any, found: list[jax.Array] | None) -> Block:
    assert found is not None
    own = iter(cut)
    return jax.tree.unflatten(
      self._tree,
      [
        p.replace(next(own) if n is None else found[n])
        for n, p in zip(self._which, self._params, strict=True)
      ],
    )


_Layers = _Resident | _Placed


class Stack(nnx.Module):
  """The layers of a model, each run's weights stacked on a leading axis.

  Attributes:
    runs: the groups of layers.
    blocks: for each run its layers, [repeats, ...]; of placed layers those on
      the devices.
    placed: where the weights of each run's layers are, or None for those that
      are all on the devices; None for no such layers.
    hosted: of placed layers, the parameters in the host's memory, [n, ...].
    neuron_fault: where the error of a read of neurons is kept, if feedforwards
      have theirs on disk; else None.
    within: which layers a call runs, first and end, where `cuts` are; None for
      all.
  """

  def __init__(
    self, rngs: nnx.Rngs, layers: Sequence[Layer], embed: int, *, scan: bool
  ):
    self.runs = runs(layers, scan=scan)

    def build(run: Run) -> Any:
      def one(layer: Layer) -> Block:
        keys = jax.random.split(rngs.params(), run.repeats)
        return jax.vmap(lambda key: layer.build(nnx.Rngs(key), embed))(keys)

      return nnx.List([one(layer) for layer in run.layers])

    self.blocks = nnx.List([build(run) for run in self.runs])
    self.placed: tuple[tuple[PlacedLayers | None, ...], ...] | None = None
    self.hosted: Any = None
    self.neuron_fault: ReadFault | None = None
    self.within: tuple[int, int] | None = None

  @property
  def cuts(self) -> tuple[int, ...]:
    """Before which layers a call can end, and another one go on.

    Not in a repeat, nor where layers behind read keys of layers before.
    """
    found = [run.number(0, n) for run in self.runs for n in range(run.repeats)]
    owners = [run.first for run in self.runs if _owning(run)]
    last = owners[0] if owners else found[-1]
    return tuple(n for n in found[1:] if n <= last)

  @property
  def faults(self) -> tuple[ReadFault, ...]:
    """Where errors of reads are kept that no program could raise."""
    found = {
      id(part.fault): part.fault
      for run in self.placed or ()
      for placed in run
      if placed is not None
      for part in placed.disk
    }
    more = () if self.neuron_fault is None else (self.neuron_fault,)
    return (*found.values(), *more)

  def _kind(self, run: int, position: int) -> _Layers:
    block = self.blocks[run][position]
    placed = None if self.placed is None else self.placed[run][position]
    if placed is None:
      return _Resident(block)
    return _Placed(block, placed, self.hosted[run][position])

  def layer(self, run: int, position: int, index: Index) -> Block:
    """The weights of one layer, wherever they are.

    Args:
      run: of the layer.
      position: in a repeat of the run.
      index: which repeat.
    """
    kind = self._kind(run, position)
    pick = lambda x: lax.dynamic_index_in_dim(
      x, jnp.asarray(index, jnp.int32), 0, keepdims=False
    )
    cut = jax.tree.map(pick, kind.stacked)
    found = kind.fetch(index, jnp.zeros((1,), jnp.float32), None)
    return kind.block(cut, found)

  def __call__(
    self,
    x: Float[Array, "B T *D"],
    tokens: Tokens,
    cache: CallCache,
    attend: Attend,
  ) -> tuple[jax.Array, Any]:
    """[B, T, D] -> [B, T, D], and the cache with this call's tokens.

    Of several residual streams x is [B, T, A, D].
    """
    ((x, cache),) = self.together([(x, tokens, cache)], attend)
    return x, cache

  def together(
    self,
    calls: Sequence[tuple[Float[Array, "_ _ *D"], Tokens, CallCache]],
    attend: Attend,
    hosted: Sequence[bool] = (),
  ) -> list[tuple[jax.Array, Any]]:
    """What the stack returns of each call; a layer's weights are there once.

    What runs next, another group or layer, has its keys fetched while one runs,
    where they are not on the devices; and so a layer its weights in the host's
    memory, if the calls have caches.

    Args:
      calls: (x, tokens, cache) of groups of rows.
      attend: of all of them.
      hosted: of each whether its x is in the host's memory while others run.
    """
    slots = [iter(cache.slots) for _, _, cache in calls]
    done: list[list[Any]] = [[] for _ in calls]
    hosted = hosted or (False,) * len(calls)
    away = lambda m, x: _moved(x, jax.memory.Space.Host) if hosted[m] else x
    back = lambda m, x: _moved(x, jax.memory.Space.Device) if hosted[m] else x
    xs = tuple(away(m, x) for m, (x, _, _) in enumerate(calls))
    keeping = not any(isinstance(cache, NoCache) for _, _, cache in calls)
    number = itertools.count()
    # By their groups, the caches of layers whose keys later ones read.
    shared: list[dict[str, Any]] = [{} for _ in calls]
    for g, run in enumerate(self.runs):
      mine = tuple(_dealt(held, run.layers) for held in slots)
      layers = [self._kind(g, p) for p in range(len(run.layers))]
      kinds = _dealt(number, run.layers)
      looped = run.repeats > 1
      turns = [(n, m) for n in range(len(layers)) for m in range(len(calls))]
      owner = _owning(run)
      assert not (owner and looped)
      repeats = run.repeats_in(self.within)
      if not repeats:
        for held, same in zip(done, mine, strict=True):
          held.extend(itertools.chain.from_iterable(same))
        continue

      def fetched(
        turn: tuple[int, int], slots: Any, index: Index, after: jax.Array,
        kinds: tuple[tuple[int, ...], ...] = kinds,
      ) -> Any:  # fmt: skip
        """The keys of a turn's layer, on their way; None: they are there."""
        n, m = turn
        cache = calls[m][2]
        if not _fetches(cache):
          return None
        return tuple(
          cache.fetch(kind, held, index, after)
          for kind, held in zip(kinds[n], slots[m][n], strict=True)
        )

      def body(
        carry: tuple,
        layer: tuple,
        kinds: tuple[tuple[int, ...], ...] = kinds,
        layers: list[_Layers] = layers,
        looped: bool = looped,
        turns: list[tuple[int, int]] = turns,
        fetched: Any = fetched,
        run: Run = run,
        within: range | None = None,
      ) -> tuple[tuple, None]:
        (xs, slots, ahead, coming), (index, cuts) = carry, layer
        early = _early(layers, within, keeping)
        xs, slots = list(xs), [list(held) for held in slots]
        block: Any = None
        for t, (n, m) in enumerate(turns):
          x = back(m, xs[m])
          if m == 0:
            found = coming
            if not early[n]:
              found = layers[n].fetch(index, x, attend, within)
            block = layers[n].block(cuts[n], found)
            last = n + 1 == len(layers)
            then, later = (0, index + 1) if last else (n + 1, index)
            if early[then] and (looped or not last):
              # Behind what this layer needs, and not behind what it computes.
              coming = layers[then].fetch(later, x, attend, within)
          _, tokens, cache = calls[m]
          mixer: Any = run.layers[n].attention
          held = zip(kinds[n], slots[m][n], strict=True)
          if not keeps(run.layers[n]):
            parts = (shared[m][mixer.group],)
          elif _fetches(cache):
            parts = tuple(
              cache.layer(kind, slot, index, came)
              for (kind, slot), came in zip(held, ahead, strict=True)
            )
          else:
            parts = tuple(cache.layer(*pair, index) for pair in held)
          if t + 1 < len(turns):
            ahead = fetched(turns[t + 1], slots, index, x)
          elif looped:
            ahead = fetched(turns[0], slots, index + 1, x)
          several = len(parts) > 1
          which = run.number(n, 0) + len(run.layers) * index
          x, part = block(
            x,
            tokens,
            parts if several else parts[0],
            attend,
            cache.states,
            which,
          )
          parts = part if several else (part,)
          if any(ahead or ()) and _fetches(cache):
            # Read before something is written over it, in place.
            parts = tuple(cache.behind(part, ahead) for part in parts)
          xs[m] = away(m, x)
          if keeps(run.layers[n]):
            slots[m][n] = tuple(part.slots for part in parts)
          if _owns(run.layers[n]):
            (shared[m][mixer.group],) = parts
        coming = coming if early[0] else None
        return (tuple(xs), tuple(map(tuple, slots)), ahead, coming), None

      stacked = tuple(one.stacked for one in layers)
      first = back(0, xs[0])
      ahead = fetched(turns[0], mine, jnp.int32(repeats.start), first)
      after = mine
      parts = _parts(layers, repeats)
      for within in parts:
        start, x = jnp.int32(within.start), back(0, xs[0])
        early = _early(layers, within, keeping)
        coming = layers[0].fetch(start, x, attend, within) if early[0] else None
        carry = (xs, after, ahead, coming)
        one = functools.partial(body, within=within)
        # What later layers read of an owner stays, and is not made again.
        one = one if owner else _again(one, attend, layers, looped)
        if not looped:
          cut = jax.tree.map(lambda a: a[0], stacked)
          (xs, after, ahead, _), _ = one(carry, (start, cut))
          continue
        numbers = jnp.arange(within.start, within.stop, dtype=jnp.int32)
        if len(within) == run.repeats:
          (xs, after, ahead, _), _ = lax.scan(one, carry, (numbers, stacked))
          continue

        def picking(
          carry: tuple, index: jax.Array, one: Any = one, stacked: Any = stacked
        ) -> Any:
          # A part of what is stacked would be a copy.
          pick = lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False)
          return one(carry, (index, jax.tree.map(pick, stacked)))

        (xs, after, ahead, _), _ = lax.scan(picking, carry, numbers)
      for held, new in zip(done, after, strict=True):
        held.extend(itertools.chain.from_iterable(new))
    return [
      (back(m, x), calls[m][2].updated(tuple(held)))
      for m, (x, held) in enumerate(zip(xs, done, strict=True))
    ]


def _again(
  body: Any, attend: Attend, layers: Sequence[_Layers], looped: bool
) -> Any:
  """A body of which a backward pass keeps what it should."""
  placed = any(isinstance(one, _Placed) for one in layers)
  if placed and getattr(attend, "remat", None) is None:
    # The backward pass fetches layers again: else all of them stay.
    return jax.checkpoint(body, prevent_cse=not looped)
  return attend.keeping(body, looped=looped)


def _parts(layers: Sequence[_Layers], repeats: range) -> list[range]:
  """Repeats of a run, cut where layers are in another memory than before.

  Where these are many, in one piece: each is a program of its own.
  """
  tiers = [one.tiers for one in layers if one.tiers]
  cuts = [n for n in repeats[1:] if any(x[n] != x[n - 1] for x in tiers)]
  cuts = cuts if len(cuts) < _PARTS else []
  ends = [repeats.start, *cuts, repeats.stop]
  return [range(*pair) for pair in itertools.pairwise(ends)]


def _early(
  layers: Sequence[_Layers], within: range | None, keeping: bool
) -> list[bool]:
  """Of which layers of a part the weights come while the one before runs.

  A backward pass would keep what is handed on: it fetches layers again.
  """
  part = slice(None) if within is None else slice(within.start, within.stop)
  return [keeping and set(one.tiers[part]) == {"host"} for one in layers]


def _dealt(items: Iterator[Any], layers: Sequence[Layer]) -> tuple[Any, ...]:
  """The next of the items, one for each mixer of each layer."""
  return tuple(tuple(next(items) for _ in one.mixers) for one in layers)


def keeps(layer: Layer) -> bool:
  """Whether a layer keeps something of its tokens, and reads no other's."""
  return bool(layer.mixers)


def _owns(layer: Layer) -> bool:
  """Whether later layers read what this one keeps."""
  return keeps(layer) and getattr(layer.attention, "group", None) is not None


def _owning(run: Run) -> bool:
  """Whether a run has such a layer."""
  return any(_owns(layer) for layer in run.layers)


def _fetches(cache: CallCache) -> TypeGuard[FetchedCache]:
  """Whether its layers come to the devices when they run."""
  # Not by isinstance, which would compute its properties.
  return hasattr(cache, "fetch")


def _moved(x: jax.Array, space: jax.memory.Space) -> jax.Array:
  return jax.device_put(x, space)
