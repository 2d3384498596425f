"""A stack of layers: equal groups of layers are one loop over their weights.

Guarantees: the stack is its layers, one after another, however they are grouped
and wherever their weights are.
Cost: the program holds one body for each group, not for each layer.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from ringjax.errors import OptionError
from ringjax.kv.base import CallCache, NoCache
from ringjax.nn.block import Block, Layer, NumberedLayer
from ringjax.nn.call_parts.stages import (
  StageGroups,
  StageSchedule,
  Turn,
  equal_neighbours,
)
from ringjax.nn.call_parts.tiled_layer import over_tiles, where_present
from ringjax.nn.row_tiles import current_row_tiles, token_map
from ringjax.nn.sharding_context import Attend
from ringjax.nn.sums.layer_record import LayerSums
from ringjax.nn.tokens import Tokens
from ringjax.nn.weights.layer_array import (
  LayerArray,
  read_by_index,
  read_by_rows,
  read_in_place,
)
from ringjax.nn.weights.placed_layers import PlacedLayers, ReadFault
from ringjax.parallel.call_sharding import STAGE, on_mesh
from ringjax.typing import Index

# Name of the input of a loop's body, for policies of rematerialisation.
LAYER_INPUT = "ringjax_layer_input"
# More than the period of any model's pattern of layers.
_LONGEST = 12
# Maximum number of parts of a run, for layers in several memories.
_PARTS = 4


@dataclasses.dataclass(frozen=True)
class Run:
  """`repeats` times the same `layers`, the first of which is number `first`."""

  first: int
  layers: tuple[Layer, ...]
  repeats: int

  def number(self, position: int, repeat: int) -> int:
    """Number in the model of the layer at `position` of a repeat."""
    return self.first + repeat * len(self.layers) + position

  def repeats_in(self, within: tuple[int, int] | None) -> range:
    """Repeats that belong to a range of layers (first, end); None: all.

    A repeat belongs where its first layer is.
    """
    if within is None:
      return range(self.repeats)
    period = len(self.layers)
    first_repeat = lambda n: min(
      max(-((self.first - n) // period), 0), self.repeats
    )
    return range(first_repeat(within[0]), first_repeat(within[1]))


def runs(layers: Sequence[Layer], *, scan: bool = True) -> tuple[Run, ...]:
  """Split layers into runs, greedily the run that covers the most layers."""
  run_list, start = [], 0
  while start < len(layers):
    period, repeats = 1, 1
    for p in range(1, _LONGEST + 1 if scan else 0):
      r, unit = 1, tuple(layers[start : start + p])
      if any(map(_owns, unit)):
        # A cache that later layers read would be one of each repeat.
        break
      while tuple(layers[start + r * p : start + (r + 1) * p]) == unit:
        r += 1
      if r > 1 and r * p > period * repeats:
        period, repeats = p, r
    run_list.append(Run(start, tuple(layers[start : start + period]), repeats))
    start += period * repeats
  return tuple(run_list)


class _Resident:
  """Layers whose weights are on the devices: a loop slices `stacked`.

  With `in_part` the arrays of parameters that are read by index, or in place,
  are not among them: a layer gets a `LayerArray`, and reads what it needs.
  """

  # Memory tier of each layer, if not all are on the devices.
  tiers: tuple[str, ...] = ()

  def __init__(self, block: Block, *, in_part: bool = False):
    leaves, self._tree = jax.tree.flatten(
      block, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    reads = [read_by_index, read_in_place]
    if current_row_tiles() is not None:
      reads.append(read_by_rows)
    self._read_in_part = {
      n: leaf
      for n, leaf in enumerate(leaves)
      if in_part and any(is_read(leaf) for is_read in reads)
    }
    self.stacked = tuple(
      leaf for n, leaf in enumerate(leaves) if n not in self._read_in_part
    )

  def fetch(
    self,
    index: Index,
    x: jax.Array,
    attend: Attend | None,
    within: range | None = None,
  ) -> list[jax.Array] | None:
    del index, x, attend, within
    return None

  def block(
    self, cut: Any, weights: list[jax.Array] | None, index: Index
  ) -> Block:
    del weights
    leaves = list(cut)
    for n, leaf in self._read_in_part.items():
      array = LayerArray(stacked=leaf.get_value(), layer=jnp.int32(index))
      leaves.insert(n, leaf.replace(array))
    return jax.tree.unflatten(self._tree, leaves)


class _Placed:
  """Layers of which some are fetched; added parameters are on the devices.

  Parameters unknown to `placed`, such as those of adapters, are there for all
  layers of the kind.
  """

  def __init__(self, block: Block, placed: PlacedLayers, hosted: Any):
    leaves, self._tree = jax.tree_util.tree_flatten_with_path(
      block, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    self._params = [p for _, p in leaves]
    index_of_path = {path: n for n, path in enumerate(placed.paths)}
    names = [jax.tree_util.keystr(k, simple=True, separator=".")
             for k, _ in leaves]  # fmt: skip
    # The map that an adapter wraps is its `base`.
    self._which = [
      index_of_path.get(name, index_of_path.get(name.replace(".base.", ".")))
      for name in names
    ]
    placed_weights = {
      index: parameter.get_value()
      for index, parameter in zip(self._which, self._params, strict=True)
      if index is not None
    }
    self._resident = [placed_weights[n] for n in range(len(placed.paths))]
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
    """Fetch a layer's weights, see `PlacedLayers.fetch`; from disk after x."""
    mesh = self._placed.mesh
    call_mesh = None if attend is None else attend.mesh
    same_axes = call_mesh is not None and mesh is not None
    same_axes = same_axes and call_mesh.axis_names == mesh.axis_names
    spec = attend.spec(x) if same_axes and attend is not None else P()
    return self._placed.fetch(
      index, self._resident, self._hosted, x, spec, within
    )

  def block(
    self, cut: Any, weights: list[jax.Array] | None, index: Index
  ) -> Block:
    del index
    assert weights is not None
    resident = iter(cut)
    return jax.tree.unflatten(
      self._tree,
      [
        p.replace(next(resident) if n is None else weights[n])
        for n, p in zip(self._which, self._params, strict=True)
      ],
    )


_Layers = _Resident | _Placed


class Stack(nnx.Module):
  """The layers of a model, each run's weights stacked on a leading axis.

  Attributes:
    runs: Groups of layers.
    blocks: Layers of each run, [repeats, ...]; of placed layers those on the
      devices.
    placed: Placement of the weights of each run's layers, or None for layers
      that are all on the devices; None if there are no placed layers.
    hosted: Parameters of placed layers in the host's memory, [n, ...].
    neuron_fault: Holder of the error of a read of neurons, if feedforwards
      have theirs on disk; else None.
    within: Layers that a call runs, (first, end), at `cuts`; None for all.
    taps: Layers before which the residual stream is kept for a later layer,
      see `Tokens.tapped`.
  """

  def __init__(
    self, rngs: nnx.Rngs, layers: Sequence[Layer], embed: int, *, scan: bool
  ):
    self.runs = runs(layers, scan=scan)

    def build(run: Run) -> Any:
      def build_stacked(layer: Layer) -> Block:
        keys = jax.random.split(rngs.params(), run.repeats)
        return jax.vmap(lambda key: layer.build(nnx.Rngs(key), embed))(keys)

      return nnx.List([build_stacked(layer) for layer in run.layers])

    self.blocks = nnx.List([build(run) for run in self.runs])
    for run, blocks in zip(self.runs, self.blocks, strict=True):
      for position, block in enumerate(blocks):
        if isinstance(block.attention, NumberedLayer):
          block.attention.number_layers(
            [run.number(position, n) for n in range(run.repeats)]
          )
    self.placed: tuple[tuple[PlacedLayers | None, ...], ...] | None = None
    self.hosted: Any = None
    self.neuron_fault: ReadFault | None = None
    self.within: tuple[int, int] | None = None
    self.taps: tuple[int, ...] = tuple(
      sorted({n for layer in layers for n in getattr(layer, "taps", ())})
    )

  @property
  def cuts(self) -> tuple[int, ...]:
    """Layers before which a call can end, and another call continue.

    Not within a repeat, nor where later layers read keys of earlier layers.
    """
    starts = [run.number(0, n) for run in self.runs for n in range(run.repeats)]
    owners = [run.first for run in self.runs if _owning(run)]
    last = owners[0] if owners else starts[-1]
    return tuple(n for n in starts[1:] if n <= last)

  @property
  def faults(self) -> tuple[ReadFault, ...]:
    """Holders of errors of reads that no program could raise."""
    disk_faults = {
      id(part.fault): part.fault
      for run in self.placed or ()
      for placed in run
      if placed is not None
      for part in placed.disk
    }
    neuron_faults = () if self.neuron_fault is None else (self.neuron_fault,)
    return (*disk_faults.values(), *neuron_faults)

  def _kind(self, run: int, position: int, *, in_part: bool = False) -> _Layers:
    block = self.blocks[run][position]
    placed = None if self.placed is None else self.placed[run][position]
    if placed is None:
      return _Resident(block, in_part=in_part)
    return _Placed(block, placed, self.hosted[run][position])

  def layer(self, run: int, position: int, index: Index) -> Block:
    """Fetch the weights of one layer, wherever they are.

    Args:
      run: Number of the layer's run.
      position: Position in a repeat of the run.
      index: Number of the repeat.
    """
    kind = self._kind(run, position)
    pick = lambda x: lax.dynamic_index_in_dim(
      x, jnp.asarray(index, jnp.int32), 0, keepdims=False
    )
    weights = jax.tree.map(pick, kind.stacked)
    fetched = kind.fetch(index, jnp.zeros((1,), jnp.float32), None)
    return kind.block(weights, fetched, index)

  def _guessed_queries(
    self,
    run: int,
    position: int,
    index: Index,
    x: Float[Array, "B T *D"],
    tokens: Tokens,
  ) -> Float[Array, "B T N H"] | None:
    """Queries of a layer, from another layer's input; see `Block.queries`.

    None if its weights are not all on the devices: they would be fetched twice.
    """
    if self.placed is not None and self.placed[run][position] is not None:
      return None
    return self.layer(run, position, index).queries(x, tokens)

  def __call__(
    self,
    x: Float[Array, "B T *D"],
    tokens: Tokens,
    cache: CallCache,
    attend: Attend,
  ) -> tuple[Float[Array, "B T *Y"], Any]:
    """[B, T, D] -> [B, T, D], and the cache with this call's tokens.

    With several residual streams x is [B, T, A, D]. The output of a
    `PredictLayer` that returns its own, too, is [B, T, D + D'].
    """
    ((x, cache),) = self.together([(x, tokens, cache)], attend)
    return x, cache

  def together(
    self,
    calls: Sequence[tuple[Float[Array, "_ _ *D"], Tokens, CallCache]],
    attend: Attend,
    hosted: Sequence[bool] = (),
    layers_before: Index = 0,
  ) -> list[tuple[Float[Array, "_ _ ..."], Any]]:
    """Run several calls through the stack; each layer's weights are read once.

    A call whose cache borrows has its keys in the arrays of the call before it,
    and passes each layer after that call.

    While a group or layer runs, the keys of the next one are fetched if they
    are not on the devices; likewise a layer's weights in the host's memory, if
    the calls have caches.

    Args:
      calls: (x, tokens, cache) of groups of rows.
      attend: Sharding and attention of all calls.
      hosted: Whether each call's x is in the host's memory while others run.
      layers_before: Number that is added to the layers' numbers.
    """
    with (
      on_mesh(getattr(attend, "mesh", None), getattr(attend, "spec", None)),
      token_map(getattr(attend, "token_map", None)),
    ):
      if getattr(attend, "stages", 1) > 1:
        return [self._in_stages(calls, attend)]
      return self._together(calls, attend, hosted, layers_before)

  def _in_stages(
    self,
    calls: Sequence[tuple[Float[Array, "_ _ *D"], Tokens, CallCache]],
    attend: Any,
  ) -> tuple[Float[Array, "_ _ ..."], CallCache]:
    """Run a call without a cache through stages of layers.

    See `nn.call_parts.stages`. Runs whose layers the stages don't divide are
    run as on a mesh without them, each stage for the rows that it has.

    Raises:
      OptionError: If layers need what stages do not pass on.
    """
    self._check_stages(calls)
    ((x, tokens, cache),) = calls
    recorded: list[Any] = []
    repeated = [(run.layers, run.repeats) for run in self.runs]
    for numbers in equal_neighbours(repeated):
      if self.runs[numbers.start].repeats % attend.stages:
        for part in [self._part([n]) for n in numbers]:
          empty = NoCache(sum(map(_num_slots, part.runs)))
          ((x, _),) = part._together([(x, tokens, empty)], attend)
          recorded.extend(tokens.recorded)
      else:
        x, sums = self._part(numbers)._pass_stages(x, tokens, attend)
        recorded.extend(sums)
    if tokens.recorder is not None:
      tokens.recorded = tuple(recorded)
    return x, cache

  def check_stages(self) -> None:
    """Refuse layers that stages can't pass rows through.

    Raises:
      OptionError: If a layer reads what another stage computes.
    """
    faults = {
      "a draft head, which reads streams between layers": self.taps,
      "layers that read keys of earlier ones": any(map(_owning, self.runs)),
      "layers that are not all on the devices": self.placed is not None,
      "a part of the layers": self.within is not None,
    }
    for name, is_there in faults.items():
      if is_there:
        raise stages_error(name)

  def _check_stages(
    self, calls: Sequence[tuple[jax.Array, Tokens, CallCache]]
  ) -> None:
    """Refuse a call that stages can't pass on.

    Raises:
      OptionError: See `_in_stages`.
    """
    if any(type(cache) is not NoCache for _, _, cache in calls):
      raise stages_error("a call with a cache")
    if any(tokens.inputs is not None for _, tokens, _ in calls):
      raise stages_error("layers that read tokens' ids or share weights")
    self.check_stages()

  def _part(self, numbers: Sequence[int]) -> Stack:
    """The stack of some of the runs."""
    part = jax.tree.map(lambda x: x, self)
    part.runs = tuple(self.runs[n] for n in numbers)
    part.blocks = nnx.List([self.blocks[n] for n in numbers])
    return part

  def _pass_stages(
    self, x: Float[Array, "B T *D"], tokens: Tokens, attend: Any
  ) -> tuple[Float[Array, "B T *Y"], list[Any]]:
    """Pass rows through equal runs, each a round of the stages.

    Returns:
      The output, and the sums that each run's layers record.
    """
    batch, stages, run = x.shape[0], attend.stages, self.runs[0]
    rows, rounds = StageGroups.of(batch, attend.stage_rows, attend), self.runs
    schedule = StageSchedule(
      stages=stages, groups=rows.groups, rounds=len(rounds)
    )
    context = dataclasses.replace(attend, in_stage=True)
    per_stage = run.repeats // stages
    arrays = jax.tree.map(rows.split, tokens.by_row(batch))
    by_stage = lambda a: a.reshape(stages, per_stage, *a.shape[1:])
    # Layers of a stage in all rounds, [S, V, repeats / S, ...].
    layers = jax.tree.map(
      lambda *a: jnp.stack(list(map(by_stage, a)), 1), *self.blocks
    )

    def compute_stage(
      layers: Any, x: jax.Array, turn: Turn
    ) -> tuple[jax.Array, Any]:
      pick = lambda n: (
        lambda a: lax.dynamic_index_in_dim(a, n, 0, keepdims=False)
      )
      part = jax.tree.map(lambda x: x, self)
      repeats_before = turn.round * run.repeats + turn.stage * per_stage
      part.runs = (dataclasses.replace(run, repeats=per_stage),)
      part.blocks = nnx.List([jax.tree.map(pick(turn.round), layers)])
      group = tokens.of_rows(jax.tree.map(pick(turn.group), arrays))
      empty = NoCache(_num_slots(run))
      ((y, _),) = part.together(
        [(x, group, empty)],
        context,
        layers_before=repeats_before * len(run.layers),
      )
      return y, group.recorded

    compute = jax.vmap(compute_stage, spmd_axis_name=STAGE)
    y, sums = schedule.run(functools.partial(compute, layers), rows.store(x))
    by_layer = lambda n: (
      lambda a: jnp.swapaxes(a[:, n], 1, 2).reshape(
        run.repeats, *a.shape[2:3], *a.shape[4:]
      )
    )
    of_round = lambda n: jax.tree.map(
      lambda sums: sums.joined(rows.joined),
      jax.tree.map(by_layer(n), tuple(sums)),
      is_leaf=lambda x: isinstance(x, LayerSums),
    )
    recorded = itertools.chain.from_iterable(map(of_round, range(len(rounds))))
    return rows.restore(y), list(recorded)

  def _together(
    self,
    calls: Sequence[tuple[Float[Array, "_ _ *D"], Tokens, CallCache]],
    attend: Attend,
    hosted: Sequence[bool] = (),
    layers_before: Index = 0,
  ) -> list[tuple[Float[Array, "_ _ ..."], Any]]:
    slots = [iter(cache.slots) for _, _, cache in calls]
    outputs: list[list[Any]] = [[] for _ in calls]
    hosted = hosted or (False,) * len(calls)
    to_host = lambda call, x: (
      _moved(x, jax.memory.Space.Host) if hosted[call] else x
    )
    to_device = lambda call, x: (
      _moved(x, jax.memory.Space.Device) if hosted[call] else x
    )
    xs = tuple(to_host(call, x) for call, (x, _, _) in enumerate(calls))
    has_caches = all(cache.stores for _, _, cache in calls)
    number = itertools.count()
    # Caches of layers whose keys later layers read, by group.
    shared: list[dict[str, Any]] = [{} for _ in calls]
    # Routing of each run's layers, by call.
    recorded: list[list[Any]] = [[] for _ in calls]
    for g, run in enumerate(self.runs):
      run_slots = tuple(
        _split_by_layer(call_slots, run.layers) for call_slots in slots
      )
      looped = run.repeats > 1
      # A gradient is that of the slices of a loop, so calls that may have one,
      # which have no caches, slice all arrays.
      layers = [
        self._kind(g, p, in_part=looped and has_caches)
        for p in range(len(run.layers))
      ]
      kinds = _split_by_layer(number, run.layers)
      schedule = [(n, m) for n in range(len(layers)) for m in range(len(calls))]
      owner = _owning(run)
      assert not (owner and looped)
      repeats = run.repeats_in(self.within)
      if not repeats:
        for output_slots, call_slots in zip(outputs, run_slots, strict=True):
          output_slots.extend(itertools.chain.from_iterable(call_slots))
        continue

      def fetch_keys(
        turn: tuple[int, int], slots: Any, index: Index, after: jax.Array,
        kinds: tuple[tuple[int, ...], ...] = kinds, g: int = g,
      ) -> Any:  # fmt: skip
        """Start to fetch the keys of a turn's layer, if they are elsewhere."""
        position, call = turn
        queries = functools.partial(
          self._guessed_queries, g, position, index, after, calls[call][1]
        )
        return tuple(
          calls[call][2].fetch(kind, layer_slots, index, after, queries)
          for kind, layer_slots in zip(
            kinds[position], slots[call][position], strict=True
          )
        )

      def body(
        carry: tuple,
        layer: tuple,
        kinds: tuple[tuple[int, ...], ...] = kinds,
        layers: list[_Layers] = layers,
        looped: bool = looped,
        schedule: list[tuple[int, int]] = schedule,
        fetch_keys: Any = fetch_keys,
        run: Run = run,
        within: range | None = None,
        taps: tuple[int, ...] = (),
      ) -> tuple[tuple, tuple]:
        (xs, slots, next_keys, next_weights), (index, cuts) = carry, layer
        fetched_early = _early(layers, within, has_caches)
        xs, slots = list(xs), [list(layer_slots) for layer_slots in slots]
        block: Any = None
        records: list[list[Any]] = [[] for _ in calls]
        tapped: list[list[jax.Array]] = [[] for _ in calls]
        for turn_index, (position, call) in enumerate(schedule):
          x = to_device(call, xs[call])
          if position in taps:
            tapped[call].append(x)
          if position == 0:
            # What the backward pass of the body begins with.
            x = checkpoint_name(x, LAYER_INPUT)
          if call == 0:
            weights = next_weights
            if not fetched_early[position]:
              weights = layers[position].fetch(index, x, attend, within)
            block = layers[position].block(cuts[position], weights, index)
            last = position + 1 == len(layers)
            next_position, next_index = (
              (0, index + 1) if last else (position + 1, index)
            )
            if fetched_early[next_position] and (looped or not last):
              # After this layer's input is computed, not after its output.
              next_weights = layers[next_position].fetch(
                next_index, x, attend, within
              )
          _, call_tokens, cache = calls[call]
          tokens = call_tokens.of_layer()
          mixer: Any = run.layers[position].attention
          layer_slots = zip(
            kinds[position],
            _joint_slots(slots, call, position, cache.borrows),
            strict=True,
          )
          if not keeps(run.layers[position]):
            parts = (shared[call][mixer.group],)
          else:
            parts = tuple(
              cache.fetched_layer(kind, slot, index, fetched_keys)
              for (kind, slot), fetched_keys in zip(
                layer_slots, next_keys, strict=True
              )
            )
          if turn_index + 1 < len(schedule):
            next_keys = fetch_keys(schedule[turn_index + 1], slots, index, x)
          elif looped:
            next_keys = fetch_keys(schedule[0], slots, index + 1, x)
          layer_number = run.number(position, 0) + len(run.layers) * index
          layer_number = layer_number + layers_before

          def run_layer(
            x: jax.Array,
            tokens: Tokens,
            parts: tuple[Any, ...],
            block: Any = block,
            states: Any = cache.states,
            layer_number: Index = layer_number,
          ) -> tuple[jax.Array, tuple[Any, ...]]:
            has_several = len(parts) > 1
            part = parts if has_several else parts[0]
            x, new_part = block(x, tokens, part, attend, states, layer_number)
            return x, new_part if has_several else (new_part,)

          if cache.tiles:
            x, parts = over_tiles(run_layer, x, tokens, parts, cache)
          elif cache.present is not None:
            x, parts = where_present(run_layer, x, tokens, parts, cache.present)
          else:
            x, parts = run_layer(x, tokens, parts)
          if any(next_keys):
            # Order the read before the in-place write to the same memory.
            parts = tuple(cache.behind(part, next_keys) for part in parts)
          if tokens.record is not None:
            records[call].append(tokens.record.sums)
          xs[call] = to_host(call, x)
          if keeps(run.layers[position]):
            new_layer_slots = tuple(part.slots for part in parts)
            _put_slots(slots, call, position, cache.borrows, new_layer_slots)
          if _owns(run.layers[position]):
            (shared[call][mixer.group],) = parts
        next_weights = next_weights if fetched_early[0] else None
        return (
          tuple(xs),
          tuple(map(tuple, slots)),
          next_keys,
          next_weights,
        ), (tuple(map(tuple, records)), tuple(map(tuple, tapped)))

      stacked = tuple(kind.stacked for kind in layers)
      first_x = to_device(0, xs[0])
      next_keys = fetch_keys(
        schedule[0], run_slots, jnp.int32(repeats.start), first_x
      )
      new_slots = run_slots
      period = len(run.layers)
      inner = {
        divmod(n - run.first, period)
        for n in self.taps
        if n - run.first in range(period * run.repeats)
      }
      parts = _parts(layers, repeats, inner)
      part_sums = []
      for within in parts:
        start, x = jnp.int32(within.start), to_device(0, xs[0])
        taps = sorted(p for n, p in inner if n == within.start)
        keep = lambda position, streams, at=within.start, run=run: _tap(
          calls, run.number(position, at), streams
        )
        if 0 in taps:
          keep(0, [to_device(call, x) for call, x in enumerate(xs)])
          taps.remove(0)
        fetched_early = _early(layers, within, has_caches)
        next_weights = (
          layers[0].fetch(start, x, attend, within)
          if fetched_early[0]
          else None
        )
        carry = (xs, new_slots, next_keys, next_weights)
        step = functools.partial(body, within=within, taps=tuple(taps))
        # An owner's cache is used by later layers, so it is not recomputed.
        step = step if owner else _rematerialised(step, attend, layers, looped)
        if not looped:
          weights = jax.tree.map(lambda a: a[0], stacked)
          (xs, new_slots, next_keys, _), (records, _) = step(
            carry, (start, weights)
          )
          part_sums.append(jax.tree.map(lambda a: a[None], records))
          continue
        numbers = jnp.arange(within.start, within.stop, dtype=jnp.int32)
        if len(within) == run.repeats:
          (xs, new_slots, next_keys, _), (records, _) = lax.scan(
            step, carry, (numbers, stacked)
          )
          part_sums.append(records)
          continue

        def pick_and_step(
          carry: tuple,
          index: jax.Array,
          step: Any = step,
          stacked: Any = stacked,
        ) -> Any:
          # Slicing a part of `stacked` beforehand would be a copy.
          pick = lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False)
          return step(carry, (index, jax.tree.map(pick, stacked)))

        (xs, new_slots, next_keys, _), (records, tapped) = lax.scan(
          pick_and_step, carry, numbers
        )
        for n, position in enumerate(taps):
          # Such a part has one repeat.
          keep(position, [streams[n][0] for streams in tapped])
        part_sums.append(records)
      run_sums = jax.tree.map(lambda *a: jnp.concatenate(a), *part_sums)
      for call_sums, sums in zip(recorded, run_sums, strict=True):
        call_sums.append(sums)
      for output_slots, run_slots_after in zip(outputs, new_slots, strict=True):
        output_slots.extend(itertools.chain.from_iterable(run_slots_after))
    for (_, tokens, _), call_sums in zip(calls, recorded, strict=True):
      if tokens.recorder is not None:
        tokens.recorded = tuple(call_sums)
    results: list[tuple[jax.Array, Any]] = []
    for m, (x, output_slots) in enumerate(zip(xs, outputs, strict=True)):
      cache = calls[m][2]
      if cache.borrows:
        cache = cache.onto(results[-1][1])
      results.append((to_device(m, x), cache.updated(tuple(output_slots))))
    return results


def _rematerialised(
  body: Any, attend: Attend, layers: Sequence[_Layers], looped: bool
) -> Any:
  """Wrap a body so that its backward pass keeps only what it should."""
  placed = any(isinstance(kind, _Placed) for kind in layers)
  if placed and getattr(attend, "remat", None) is None:
    # The backward pass fetches layers again: otherwise all of them would stay.
    return jax.checkpoint(body, prevent_cse=not looped)
  return attend.keeping(body, looped=looped)


def _tap(
  calls: Sequence[tuple[Any, Tokens, CallCache]],
  number: int,
  streams: Sequence[Float[Array, "_ _ D"]],
) -> None:
  """Keep the residual stream of each call before a layer for a later one."""
  for (_, tokens, _), x in zip(calls, streams, strict=True):
    tokens.tapped[number] = x


def _parts(
  layers: Sequence[_Layers],
  repeats: range,
  taps: Collection[tuple[int, int]] = (),
) -> list[range]:
  """Split repeats of a run where the memory tier of a layer changes.

  If there are too many such parts, none: each part is a separate program. A
  part begins at the repeat of each of the `taps` (repeat, position), and has
  no other repeat if its position is not the first one.
  """
  tiers = [kind.tiers for kind in layers if kind.tiers]
  cuts = [
    n for n in repeats[1:] if any(tier[n] != tier[n - 1] for tier in tiers)
  ]
  cuts = cuts if len(cuts) < _PARTS else []
  cuts += [n for n, _ in taps] + [n + 1 for n, position in taps if position]
  cuts = sorted({n for n in cuts if n in repeats[1:]})
  ends = [repeats.start, *cuts, repeats.stop]
  return [range(*pair) for pair in itertools.pairwise(ends)]


def _early(
  layers: Sequence[_Layers], within: range | None, keeping: bool
) -> list[bool]:
  """Whether each layer's weights are fetched while the layer before runs.

  Not for a backward pass, which would keep them: it fetches layers again.
  """
  part = slice(None) if within is None else slice(within.start, within.stop)
  return [keeping and set(kind.tiers[part]) == {"host"} for kind in layers]


def _split_by_layer(
  items: Iterator[Any], layers: Sequence[Layer]
) -> tuple[Any, ...]:
  """Take the next items, one for each mixer of each layer."""
  return tuple(tuple(next(items) for _ in layer.mixers) for layer in layers)


def _joint_slots(
  slots: Sequence[Sequence[Any]], call: int, position: int, borrows: bool
) -> tuple[Any, ...]:
  """A layer's arrays of a call, with those that it borrows."""
  call_slots = slots[call][position]
  if not borrows:
    return call_slots
  lent = slots[call - 1][position]
  return tuple(
    b if a is None else a for a, b in zip(call_slots, lent, strict=True)
  )


def _put_slots(
  slots: Sequence[list[Any]],
  call: int,
  position: int,
  borrows: bool,
  new: tuple[Any, ...],
) -> None:
  """Replace a layer's arrays of a call, and those that it borrows."""
  if not borrows:
    slots[call][position] = new
    return
  is_borrowed = [a is None for a in slots[call][position]]
  choose = lambda old, lent: tuple(
    n if b == lent else o for o, n, b in zip(old, new, is_borrowed, strict=True)
  )
  slots[call - 1][position] = choose(slots[call - 1][position], True)
  slots[call][position] = choose(slots[call][position], False)


def keeps(layer: Layer) -> bool:
  """Whether a layer has a cache, rather than reading another layer's."""
  return bool(layer.mixers)


def _owns(layer: Layer) -> bool:
  """Whether later layers read this layer's cache."""
  return keeps(layer) and getattr(layer.attention, "group", None) is not None


def stages_error(what: str) -> OptionError:
  """Error of what rows in stages can't be computed with."""
  return OptionError(
    "mesh",
    f"one with an axis {STAGE!r}, for {what}",
    "a training without it; no stage has what another one computes",
    f"pass a mesh without {STAGE!r}",
  )


def _owning(run: Run) -> bool:
  """Whether a run has a layer whose cache later layers read."""
  return any(_owns(layer) for layer in run.layers)


def _num_slots(run: Run) -> int:
  """Number of slots of a run's layers."""
  return sum(len(layer.mixers) for layer in run.layers)


def _moved(x: jax.Array, space: jax.memory.Space) -> jax.Array:
  return jax.device_put(x, space)
