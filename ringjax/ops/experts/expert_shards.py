"""Mixture of experts whose weights are sharded: rows travel, weights stay.

Guarantees: `mix_sharded` equals `mix` up to the order of float32 sums; no
token is dropped whatever the load; no expert's weights nor their gradients
leave their shard. A token's output does not depend on the other tokens.
Cost: f on a token's k rows, on the shards of their experts, and what
`choose_dispatch` states is sent.
Memory: float32 sums of the tokens that a shard sees; in rounds also the rows of
a chunk, and what three rounds send and return. Of the forward pass nothing is
kept but its inputs.
Ref:  rows by all-to-all as in Lepikhin et al. 2020, GShard, arXiv 2006.16668,
but without a capacity beyond which tokens are dropped: there are as many
rounds as the largest load needs.

Experts are sharded over some mesh axes, contiguously, the last axis moving
fastest. An axis of these either shards the call's tokens too, or all of its
shards have the same tokens. Over the latter, each shard adds up its own
experts, and a sum over the shards follows. Over the former ones tokens are
gathered and results reduce-scattered, or rows go to their experts and back in
rounds of a fixed capacity. The number of rounds is data, the same on all
shards, so shapes are static and every backend has the collectives. Products of
a round overlap with the sends of the next one and the results of the last one;
a call's first send and its last results overlap with nothing. TPUs need the
option of `mesh.compiler_options` for it.

Order of sums: float32, per token in the order of its experts' numbers on a
shard, then over shards; in rounds in the order of its choices, on the token's
own shard.

Equal bits: on one mesh and for one shape of the call, a token's output is the
same whatever the other tokens are, their number of rows per expert and rounds
included: a row is computed in a block of a fixed size, and the order above
does not depend on the load. Between meshes, ways of dispatch or shapes of a
call the last bits differ, as blocks have other sizes and sums another order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.ops.experts import row_blocks
from ringjax.ops.experts.grouped_product import GroupedExperts
from ringjax.ops.experts.row_blocks import RowBlocks, blocks_by_expert
from ringjax.parallel import collectives

# Maximum rows of a chunk of tokens whose rows are sent in rounds.
_CHUNK_ROWS = 8192
# Maximum bytes of gathered tokens and their sums on a shard.
_GATHERED_BYTES = 256 << 20

Kind = Literal["own", "gather", "rounds"]
Index = int | Int[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertShards:
  """Mesh axes that shard experts, in a shard_map over at least these.

  Attributes:
    over: Axes that shard the experts, the last one moving fastest.
    tokens: Axes of these that shard the call's tokens as well.
  """

  over: tuple[str, ...]
  tokens: tuple[str, ...]

  @property
  def replicas(self) -> tuple[str, ...]:
    """Axes whose shards have the same tokens."""
    return tuple(a for a in self.over if a not in self.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatch:
  """Way to bring rows and experts together, with its reason.

  Attributes:
    kind: "own": each shard runs its experts on the tokens that it has;
      "gather": on the tokens of all shards; "rounds": rows are sent to their
      experts by all-to-all.
    reason: Bytes that were compared.
    chunk: Tokens of a shard whose rows are sent at a time, "rounds" only.
    capacity: Rows that a shard sends to each other one in a round.
  """

  kind: Kind
  reason: str
  chunk: int = 0
  capacity: int = 0

  def __str__(self) -> str:
    return f"{self.kind}: {self.reason}"


def choose_dispatch(
  tokens: int, width: int, chosen: int, itemsize: int, shards: int
) -> Dispatch:
  """Choose by the bytes that a shard sends in a layer's forward pass.

  With T tokens on each of R shards, of D numbers of b bytes, k experts each:

    gather: (R - 1) T D (b + 4), tokens and their float32 sums;
    rounds: (R - 1) n C (2 D b + 8), for n chunks of rows in one round each,
      rows, results and their experts: about 5/2 k T D b (R - 1) / R, as C is
      5/4 of an even share. Several chunks send an empty round more, which
      overlaps with the last products, and return one before the first.

  Rounds also where gathered tokens and sums would take more than 256 MiB.

  Args:
    tokens: T, tokens of a shard.
    width: D, width of a token.
    chosen: k, experts per token.
    itemsize: b, bytes of a number.
    shards: R, shards over which tokens and experts are both sharded.
  """
  if shards == 1:
    return Dispatch(
      kind="own", reason="all shards of the experts have the same tokens"
    )
  chunks = -(-tokens // max(1, _CHUNK_ROWS // chosen))
  chunk = -(-tokens // chunks)
  share = -(-5 * chunk * chosen // (4 * shards))
  capacity = min(-(-share // 8) * 8, chunk * chosen)
  others = shards - 1
  gather = others * tokens * width * (itemsize + 4)
  sent = chunks + (chunks > 1)
  rounds = others * sent * capacity * (2 * width * itemsize + 8)
  gathered_bytes = shards * tokens * width * (itemsize + 4)
  compared = f"{gather:,} bytes gathered, {rounds:,} in rounds"
  rounds_kind = Dispatch(
    kind="rounds", reason=compared, chunk=chunk, capacity=capacity
  )
  if gathered_bytes > _GATHERED_BYTES:
    reason = f"{compared}, but gathered tokens take {gathered_bytes:,}"
    return dataclasses.replace(rounds_kind, reason=reason)
  if rounds < gather:
    return rounds_kind
  return Dispatch(kind="gather", reason=compared)


def mix_sharded(
  f: Callable[[Any, Array], Array],
  weights: PyTree,
  x: Float[Array, "T D"],
  experts: Int[Array, "T k"],
  mixing: Float[Array, "T k"],
  count: int,
  shards: ExpertShards,
  *,
  scale_input: bool = False,
  entry: Callable[[Any, Array], Any] | None = None,
  dispatch: Dispatch | None = None,
  grouped: GroupedExperts | None = None,
) -> Float[Array, "T D"]:
  """Per shard: sum the weighted outputs of each token's experts.

  Args:
    f: Function (weights of one expert, rows [n, D]) -> [n, D], row by row. It
      closes over no arrays.
    weights: Weights of the shard's experts, [E / R, ...] each.
    x: Tokens of the shard, [T, D].
    experts: Experts of each token, int32 [T, k], different ones, or E for
      none.
    mixing: Weights of the experts' outputs, float32 [T, k].
    count: Number of all experts, E.
    shards: Axes of experts and tokens.
    scale_input: Whether `mixing` multiplies the inputs of f, not its outputs.
    entry: Function (weights, expert int32 []) -> weights of one expert;
      default: all arrays are indexed along their first axis.
    dispatch: Way to bring rows and experts together; default: that of
      `choose_dispatch`.
    grouped: The same experts for the rows of all blocks at once, by a kernel,
      which then runs instead of f, on `weights` instead of those it has.

  Returns:
    Outputs [T, D] in x's dtype; sums are float32.
  """
  tokens, chosen = experts.shape
  sizes = {a: collectives.axis_size(a) for a in shards.over}
  peers = math.prod(sizes[a] for a in shards.tokens)
  if dispatch is None:
    dispatch = choose_dispatch(
      tokens, x.shape[1], chosen, x.dtype.itemsize, peers
    )
  exchange = _Exchange(
    shards=shards,
    local_experts=count // math.prod(sizes.values()),
    count=count,
    rows=_ExpertRows(f, entry or _entry, scale_input, grouped),
    dispatch=dispatch,
  )
  axes = collectives.varying_axes(x, weights) | {*shards.over}
  # Gradients of what is the same on several shards are summed here, once, and
  # not in loops.
  args = collectives.vary((weights, x, experts, mixing), axes)
  with_sizes = collectives.sizes(tuple(sorted(axes)))

  @jax.custom_vjp
  def run(weights: Any, x: Any, experts: Any, mixing: Any) -> jax.Array:
    return exchange.forward(weights, x, experts, mixing)

  def backward(kept: Any, g: jax.Array) -> Any:
    weights, x, experts, mixing = kept
    with collectives.bound(with_sizes):
      dw, dx, dmixing = exchange.backward(weights, x, experts, mixing, g)
    return dw, dx, None, dmixing

  run.defvjp(lambda *args: (run(*args), args), backward)
  sums = run(*args)
  if shards.replicas:
    sums = collectives.total(sums, shards.replicas)
  return sums.astype(x.dtype)


def _entry(weights: PyTree, expert: Int[Array, ""]) -> Any:
  return jax.tree.map(lambda a: a[expert], weights)


@dataclasses.dataclass(frozen=True)
class _ExpertRows:
  """f on the rows of tokens, block by block, each block of one expert.

  Attributes:
    f: Function (weights of one expert, rows).
    entry: Function (weights, expert).
    scale_input: Whether mixing weights multiply inputs.
    grouped: Experts for all blocks at once instead of f, or None.
  """

  f: Callable[[Any, Array], Array]
  entry: Callable[[Any, Array], Any]
  scale_input: bool
  grouped: GroupedExperts | None = None

  def size(self, rows: int, experts: int) -> int:
    """Number of rows of a block."""
    return (self.grouped or row_blocks).block_rows(rows, experts)

  def forward(
    self,
    weights: PyTree,
    x: Float[Array, "T D"],
    experts: Int[Array, "T k"],
    mixing: Float[Array, "T k"],
    local_experts: int,
    size: int,
  ) -> Float[Array, "T D"]:
    """Sum over each token's experts on this shard, float32."""
    tokens, chosen = experts.shape
    blocks = blocks_by_expert(experts.reshape(-1), local_experts, size)
    if self.grouped is not None:
      return self._grouped(weights, x, mixing, blocks)
    flat = mixing.reshape(-1)

    def body(n: jax.Array, sums: jax.Array) -> jax.Array:
      row = blocks.row[n]
      safe = _without_padding(row, tokens * chosen)
      part = x[safe // chosen]
      factor = flat[safe][:, None]
      if self.scale_input:
        part = part * factor.astype(x.dtype)
      y = self.f(self.entry(weights, blocks.expert[n]), part)
      y = y.astype(jnp.float32)
      if not self.scale_input:
        y = y * factor
      # A token has one row at most in a block: its experts differ.
      return sums.at[row // chosen].add(y, mode="drop")

    start = collectives.zeros(x.shape, jnp.float32, (x, weights))
    return lax.fori_loop(0, blocks.used, body, start)

  def backward(
    self,
    weights: PyTree,
    x: Float[Array, "T D"],
    experts: Int[Array, "T k"],
    mixing: Float[Array, "T k"],
    g: Float[Array, "T D"],
    local_experts: int,
    size: int,
    dw: list[jax.Array],
  ) -> tuple[list[jax.Array], Float[Array, "T D"], Float[Array, "T k"]]:
    """Add to gradients of float weights; those of x and mixing, float32."""
    tokens, chosen = experts.shape
    rows = tokens * chosen
    blocks = blocks_by_expert(experts.reshape(-1), local_experts, size)
    if self.grouped is not None:
      return self._grouped_backward(weights, x, mixing, g, blocks, dw)
    flat = mixing.reshape(-1)

    def body(n: jax.Array, sums: Any) -> Any:
      dw, dx, dmixing = sums
      row = blocks.row[n]
      safe = _without_padding(row, rows)
      part, factor = x[safe // chosen], flat[safe][:, None]
      dy = jnp.where((row < rows)[:, None], g[safe // chosen], 0)
      dy = dy.astype(jnp.float32)
      expert = blocks.expert[n]
      arrays, structure = jax.tree.flatten(self.entry(weights, expert))

      def f(floats: list[jax.Array], part: jax.Array) -> jax.Array:
        float_arrays = iter(floats)
        all_ = [next(float_arrays) if _is_float(a) else a for a in arrays]
        return self.f(jax.tree.unflatten(structure, all_), part)

      inputs = part * factor.astype(x.dtype) if self.scale_input else part
      y, pull = jax.vjp(f, [a for a in arrays if _is_float(a)], inputs)
      scaled = dy if self.scale_input else dy * factor
      dentry, dinputs = pull(scaled.astype(y.dtype))
      dinputs = dinputs.astype(jnp.float32)
      if self.scale_input:
        dfactor = jnp.sum(dinputs * part.astype(jnp.float32), -1)
        dinputs = dinputs * factor
      else:
        dfactor = jnp.sum(y.astype(jnp.float32) * dy, -1)
      dw = [
        total.at[expert].add(d.astype(jnp.float32))
        for total, d in zip(dw, dentry, strict=True)
      ]
      dx = dx.at[row // chosen].add(dinputs, mode="drop")
      return dw, dx, dmixing.at[row].set(dfactor, mode="drop")

    zeros = lambda shape: collectives.zeros(shape, jnp.float32, (x, weights))
    start = dw, zeros(x.shape), zeros((rows,))
    dw, dx, dmixing = lax.fori_loop(0, blocks.used, body, start)
    return dw, dx, dmixing.reshape(tokens, chosen)

  def _grouped(
    self,
    weights: PyTree,
    x: Float[Array, "T D"],
    mixing: Float[Array, "T k"],
    blocks: RowBlocks,
  ) -> Float[Array, "T D"]:
    assert self.grouped is not None
    grouped = dataclasses.replace(self.grouped, weights=weights)
    return grouped.weighted(x, mixing, blocks, scale_input=self.scale_input)

  def _grouped_backward(
    self,
    weights: PyTree,
    x: Float[Array, "T D"],
    mixing: Float[Array, "T k"],
    g: Float[Array, "T D"],
    blocks: RowBlocks,
    dw: list[jax.Array],
  ) -> tuple[list[jax.Array], Float[Array, "T D"], Float[Array, "T k"]]:
    sums = lambda w, x, mixing: self._grouped(w, x, mixing, blocks)
    _, pull = jax.vjp(sums, weights, x, mixing)
    dweights, dx, dmixing = pull(g.astype(jnp.float32))
    floats = [
      d
      for d, a in zip(
        jax.tree.leaves(dweights), jax.tree.leaves(weights), strict=True
      )
      if _is_float(a)
    ]
    dw = [
      total + d.astype(jnp.float32) for total, d in zip(dw, floats, strict=True)
    ]
    return dw, dx.astype(jnp.float32), dmixing


def _without_padding(
  row: Int[Array, " size"], rows: int
) -> Int[Array, " size"]:
  """Rows of a block, with its first row in place of padding.

  The first row is never padding: f sees rows of its expert alone, and may
  record their magnitude.
  """
  return jnp.where(row < rows, row, row[0])


def _is_float(x: Array) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating)


class _Received(NamedTuple):
  """Rows that a shard's experts compute in a round.

  Fields:
    rows: Arrays [n, D] of what was sent of each row.
    experts: Numbers of the rows' experts on this shard, int32 [n, 1]; their
      count for none.
    factor: Mixing weights of the rows, float32 [n, 1].
  """

  rows: tuple[Float[Array, "n D"], ...]
  experts: Int[Array, "n 1"]
  factor: Float[Array, "n 1"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RoundPlan:
  """Rows that are sent in each round, of the rows of all chunks.

  Round r of a chunk sends to each shard the rows r C to (r + 1) C - 1 of those
  that go there. Rounds are numbered through all chunks; of a number before the
  first or after the last round, no row is sent and none is collected.

  Attributes:
    chosen: Rows of a token, k.
    capacity: Rows that go to each shard in a round, C.
    peers: Number of shards that rows go to, R.
    none: Number that stands for no expert of a shard.
    mixing: Mixing weights of each chunk's tokens, float32 [n, c, k].
    order: Rows of each chunk, sorted by the shard they go to, int32 [n, c k].
    experts: Numbers on their shards of the sorted rows' experts.
    factor: Mixing weights of the sorted rows, float32 [n, c k].
    load: Number of rows that go to each shard, int32 [n, R].
    peer: Shard that each row goes to, int32 [n, c k]; R for none.
    rank: Number of each row among those of its shard, int32 [n, c k].
    ends: Number of rounds of the chunks up to each one, int32 [n].
  """

  chosen: int
  capacity: int
  peers: int
  none: int
  mixing: Float[Array, "n c k"]
  order: Int[Array, "n rows"]
  experts: Int[Array, "n rows"]
  factor: Float[Array, "n rows"]
  load: Int[Array, "n R"]
  peer: Int[Array, "n rows"]
  rank: Int[Array, "n rows"]
  ends: Int[Array, " n"]

  def chunk(self, n: Index) -> Int[Array, ""]:
    """Chunk of a round; the nearest one for none."""
    finished = jnp.sum(self.ends <= n, dtype=jnp.int32)
    return jnp.minimum(finished, self.ends.shape[0] - 1)

  def _round(self, n: Index) -> Int[Array, ""]:
    """Number of a round in its chunk."""
    chunk = self.chunk(n)
    return n - jnp.where(chunk > 0, self.ends[chunk - 1], 0)

  def _exists(self, n: Index) -> Bool[Array, ""]:
    return (n >= 0) & (n < self.ends[-1])

  def sent(
    self, n: Index
  ) -> tuple[Int[Array, " p"], Int[Array, " p"], Float[Array, " p"]]:
    """Rows that a round sends, in order of shards, with experts and weights.

    The number of rows stands for none.
    """
    chunk, number = self.chunk(n), self._round(n)
    load = self.load[chunk]
    begin = jnp.cumsum(load) - load + number * self.capacity
    place = jnp.arange(self.capacity, dtype=jnp.int32)
    is_row = place[None] < load[:, None] - number * self.capacity
    is_row = is_row & self._exists(n)
    num_rows = self.order.shape[1]
    begin = jnp.clip(begin, 0, num_rows)

    def sorted_part(a: jax.Array, empty: int) -> jax.Array:
      a = row_blocks.windows(a[chunk], begin, self.capacity)
      return jnp.where(is_row, a, empty).reshape(-1)

    return (
      sorted_part(self.order, num_rows),
      sorted_part(self.experts, self.none),
      sorted_part(self.factor, 0),
    )

  def token(self, n: Index, row: Int[Array, " p"]) -> Int[Array, " p"]:
    """Tokens of a round's rows among all tokens; the largest int32 for none."""
    num_rows = self.order.shape[1]
    first = self.chunk(n) * (num_rows // self.chosen)
    none = jnp.iinfo(jnp.int32).max
    return jnp.where(row < num_rows, first + row // self.chosen, none)

  def collected(
    self, n: Index, results: Shaped[Array, "p ..."], outputs: Array
  ) -> Shaped[Array, "rows ..."]:
    """Outputs of a chunk's rows, with the results that a round returned.

    Args:
      n: Number of the round.
      results: Results in the places of `sent`.
      outputs: Outputs of the chunk's earlier rounds; of another chunk if there
        were none.
    """
    chunk, number = self.chunk(n), self._round(n)
    peer, place = self.peer[chunk], self.rank[chunk] - number * self.capacity
    is_here = (place >= 0) & (place < self.capacity) & (peer < self.peers)
    is_here = is_here & self._exists(n)
    slot = jnp.where(is_here, peer * self.capacity + place, results.shape[0])
    column = lambda a: a.reshape(-1, *[1] * (results.ndim - 1))
    earlier = jnp.where(number > 0, outputs, 0)
    returned = results.at[slot].get(mode="fill", fill_value=0)
    return jnp.where(column(is_here), returned, earlier)


tree.register(
  _RoundPlan,
  ("mixing", "order", "experts", "factor", "load", "peer", "rank", "ends"),
  ("chosen", "capacity", "peers", "none"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Exchange:
  """A call's dispatch on one shard, forward and backward.

  Attributes:
    shards: Axes of experts and tokens.
    count: Number of all experts.
    local_experts: Number of a shard's experts.
    rows: f on rows.
    dispatch: Way to bring rows and experts together.
  """

  shards: ExpertShards
  count: int
  local_experts: int
  rows: _ExpertRows
  dispatch: Dispatch

  def forward(
    self,
    weights: PyTree,
    x: Float[Array, "T D"],
    experts: Int[Array, "T k"],
    mixing: Float[Array, "T k"],
  ) -> Float[Array, "T D"]:
    """Sums of the tokens' rows, float32; over replicas they are parts."""
    if self.dispatch.kind == "rounds":
      return self._rounds(weights, x, experts, mixing)
    x, experts, mixing = self._brought((x, experts, mixing))
    sums = self.rows.forward(
      weights,
      x,
      self._local(experts),
      mixing,
      self.local_experts,
      self._size(experts),
    )
    return self._returned(sums)

  def backward(
    self,
    weights: PyTree,
    x: Float[Array, "T D"],
    experts: Int[Array, "T k"],
    mixing: Float[Array, "T k"],
    g: Float[Array, "T D"],
  ) -> tuple[PyTree, Float[Array, "T D"], Float[Array, "T k"]]:
    """Gradients of weights, x and mixing, from that of `forward`."""
    dtype = x.dtype
    shapes = [a.shape for a in jax.tree.leaves(weights)]
    entry = jax.eval_shape(self.rows.entry, weights, jnp.int32(0))
    one_layer = [(self.local_experts, *a.shape) for a in jax.tree.leaves(entry)]
    if shapes != one_layer:
      # Arrays of all layers, of which `entry` takes one.
      raise OptionError(
        "weights",
        f"arrays {shapes}, for a gradient",
        f"arrays {one_layer} of one layer",
        "take the gradient of a call without a cache",
      )
    dw = [
      collectives.zeros(a.shape, jnp.float32, (a, x))
      for a in jax.tree.leaves(weights)
      if _is_float(a)
    ]
    g = g.astype(dtype)
    if self.dispatch.kind == "rounds":
      dw, dx, dmixing = self._rounds_backward(
        weights, x, experts, mixing, g, dw
      )
    else:
      x, experts, mixing, g = self._brought((x, experts, mixing, g))
      dw, dx, dmixing = self.rows.backward(
        weights,
        x,
        self._local(experts),
        mixing,
        g,
        self.local_experts,
        self._size(experts),
        dw,
      )
      dx, dmixing = self._returned((dx, dmixing))
    gradients = iter(dw)
    dweights = jax.tree.map(
      lambda a: (
        next(gradients).astype(a.dtype)
        if _is_float(a)
        else np.zeros(a.shape, jax.dtypes.float0)
      ),
      weights,
    )
    return dweights, dx.astype(dtype), dmixing

  def _brought(self, tokens: PyTree) -> Any:
    """Arrays of the tokens that the shard's experts read."""
    if self.dispatch.kind != "gather":
      return tokens
    return collectives.gather(tokens, self.shards.tokens, 0)

  def _returned(self, sums: PyTree) -> Any:
    """Sums of the shard's own tokens, over all shards that they went to."""
    if self.dispatch.kind != "gather":
      return sums
    return collectives.scatter_sum(sums, self.shards.tokens, 0)

  def _size(self, experts: Int[Array, "T k"]) -> int:
    return self.rows.size(experts.size, self.count)

  def _local(self, experts: Int[Array, "T k"]) -> Int[Array, "T k"]:
    """Numbers on this shard; `local_experts` for experts of other shards."""
    count = self.local_experts
    number = experts - collectives.axis_index(self.shards.over) * count
    return jnp.where((number >= 0) & (number < count), number, count)

  def _peer(self, experts: Int[Array, "*n k"]) -> Int[Array, "*n k"]:
    """Shard along `tokens` to which rows go; their number for none.

    Of several shards with the same tokens each sends rows to those experts
    that agree with it along the axes of replicas.
    """
    owner, peer = experts // self.local_experts, jnp.zeros_like(experts)
    sends = experts < self.count
    stride, peer_stride = 1, 1
    for axis in reversed(self.shards.over):
      size = collectives.axis_size(axis)
      at = owner // stride % size
      stride *= size
      if axis in self.shards.tokens:
        peer = peer + at * peer_stride
        peer_stride *= size
      else:
        sends = sends & (at == collectives.axis_index(axis))
    return jnp.where(sends, peer, peer_stride)

  def _rounds(
    self,
    weights: PyTree,
    x: Float[Array, "T D"],
    experts: Int[Array, "T k"],
    mixing: Float[Array, "T k"],
  ) -> Float[Array, "T D"]:
    tokens, chosen = experts.shape
    scale_input = self.rows.scale_input
    plan = self._plan(x, experts, mixing)

    def compute(_: None, received: _Received) -> tuple[None, jax.Array]:
      (rows,) = received.rows
      factor = received.factor
      y = self.rows.forward(
        weights,
        rows,
        received.experts,
        factor if scale_input else jnp.ones_like(factor),
        self.local_experts,
        self.rows.size(rows.shape[0], self.local_experts),
      )
      return None, y.astype(x.dtype)

    def add_up(outputs: jax.Array, chunk: Int[Array, ""]) -> jax.Array:
      outputs = outputs.reshape(-1, chosen, x.shape[1]).astype(jnp.float32)
      if not scale_input:
        outputs = outputs * plan.mixing[chunk][..., None]
      return jnp.sum(outputs, 1)

    _, sums = self._in_rounds(plan, (x,), compute, add_up, None, weights)
    return sums.reshape(-1, sums.shape[-1])[:tokens]

  def _rounds_backward(
    self,
    weights: PyTree,
    x: Float[Array, "T D"],
    experts: Int[Array, "T k"],
    mixing: Float[Array, "T k"],
    g: Float[Array, "T D"],
    dw: list[jax.Array],
  ) -> tuple[list[jax.Array], Float[Array, "T D"], Float[Array, "T k"]]:
    tokens, chosen = experts.shape
    plan = self._plan(x, experts, mixing)

    def compute(
      dw: list[jax.Array], received: _Received
    ) -> tuple[list[jax.Array], tuple[jax.Array, jax.Array]]:
      rows, g = received.rows
      dw, dx, dmixing = self.rows.backward(
        weights,
        rows,
        received.experts,
        received.factor,
        g,
        self.local_experts,
        self.rows.size(rows.shape[0], self.local_experts),
        dw,
      )
      return dw, (dx.astype(x.dtype), dmixing)

    def add_up(
      outputs: tuple[jax.Array, jax.Array], chunk: Int[Array, ""]
    ) -> tuple[jax.Array, jax.Array]:
      dx, dmixing = outputs
      dx = dx.reshape(-1, chosen, x.shape[1]).astype(jnp.float32)
      return jnp.sum(dx, 1), dmixing.reshape(-1, chosen)

    dw, (dx, dmixing) = self._in_rounds(
      plan, (x, g), compute, add_up, dw, weights
    )
    flat = lambda a: a.reshape(-1, a.shape[-1])[:tokens]
    return dw, flat(dx), flat(dmixing)

  def _plan(
    self,
    x: Float[Array, "T D"],
    experts: Int[Array, "T k"],
    mixing: Float[Array, "T k"],
  ) -> _RoundPlan:
    """Rounds of all chunks, and the rows of each chunk by shard."""
    (tokens, chosen), chunk = experts.shape, self.dispatch.chunk
    chunks = -(-tokens // chunk)
    number = math.prod(collectives.axis_size(a) for a in self.shards.tokens)

    def cut(a: jax.Array, value: int = 0) -> jax.Array:
      padding = [(0, chunks * chunk - tokens), (0, 0)]
      a = jnp.pad(a, padding, constant_values=value)
      return a.reshape(chunks, chunk, chosen)

    # Padding has no expert.
    experts, mixing = cut(experts, self.count), cut(mixing)
    peer = self._peer(experts).reshape(chunks, -1)
    row = lax.broadcasted_iota(jnp.int32, peer.shape, 1)
    sorted_peer, order, local, factor = lax.sort(
      (
        peer,
        row,
        experts.reshape(chunks, -1) % self.local_experts,
        mixing.reshape(chunks, -1),
      ),
      num_keys=1,
      is_stable=True,
    )
    shard = jnp.arange(number, dtype=jnp.int32)
    load = jnp.sum(peer[..., None] == shard[None, None], 1, dtype=jnp.int32)
    # Rows of one shard follow each other: each counts from the first of them.
    is_first = jnp.diff(sorted_peer, axis=1, prepend=-1) != 0
    rank = row - lax.cummax(jnp.where(is_first, row, 0), axis=1)
    rounds = -(-jnp.max(load, 1) // self.dispatch.capacity)
    # The same on all devices: none may wait for another in vain.
    axes = {*self.shards.over} | collectives.varying_axes(rounds)
    rounds = collectives.largest(rounds, tuple(sorted(axes)))
    return _RoundPlan(
      chosen=chosen,
      capacity=self.dispatch.capacity,
      peers=number,
      none=self.local_experts,
      mixing=mixing,
      order=order,
      experts=local,
      factor=factor,
      load=load,
      peer=peer,
      rank=row_blocks.unsorted(order, rank),
      ends=jnp.cumsum(rounds),
    )

  def _in_rounds(
    self,
    plan: _RoundPlan,
    tokens: tuple[Float[Array, "T D"], ...],
    compute: Callable[[Any, _Received], tuple[Any, PyTree]],
    add_up: Callable[[PyTree, Int[Array, ""]], PyTree],
    carry: PyTree,
    weights: PyTree,
  ) -> tuple[PyTree, PyTree]:
    """Send rows to their experts and results back, round by round.

    With several chunks the sends of a round run next to the products of its
    neighbours: the rows of the next round and the results of the last one are
    in flight, which no product of this round reads.

    Args:
      plan: Rows of each round.
      tokens: Arrays whose rows are sent.
      compute: Function (carry, received) -> carry, results [rows, ...].
      add_up: Function of a chunk's results in the order of its rows, and of the
        chunk's number, to what is kept of it; a chunk of several rounds is
        added up after each, and the last one counts.
      carry: State of `compute` before the first round.
      weights: Weights of the experts, for their varying axes.

    Returns:
      The last carry, and what `add_up` returned for each chunk, stacked.
    """
    like = (plan, tokens, weights)

    def send(n: Index) -> _Received:
      row, local, factor = plan.sent(n)
      bits = lax.bitcast_convert_type(factor, jnp.int32)
      local, bits = self._swap(jnp.stack([local, bits], 1)).T
      token = plan.token(n, row)
      rows = self._swap(
        tuple(a.at[token].get(mode="fill", fill_value=0) for a in tokens)
      )
      factor = lax.bitcast_convert_type(bits, jnp.float32)
      return _Received(rows, local[:, None], factor[:, None])

    def collect(n: Index, results: PyTree, chunk_state: Any) -> Any:
      outputs, sums = chunk_state
      chunk = plan.chunk(n)
      outputs = jax.tree.map(
        functools.partial(plan.collected, n), results, outputs
      )
      sums = jax.tree.map(
        lambda all_, a: lax.dynamic_update_index_in_dim(all_, a, chunk, 0),
        sums,
        add_up(outputs, chunk),
      )
      return outputs, sums

    num_chunks, num_rows = plan.peer.shape
    zeros = lambda a: collectives.zeros(a.shape, a.dtype, like)
    received = jax.eval_shape(send, 0)
    results = jax.eval_shape(lambda *a: compute(*a)[1], carry, received)
    with_rows = lambda a: jax.ShapeDtypeStruct(
      (num_rows, *a.shape[1:]), a.dtype
    )
    outputs = jax.tree.map(with_rows, results)
    sums = jax.eval_shape(add_up, outputs, jnp.int32(0))
    chunk_state = (
      jax.tree.map(zeros, outputs),
      jax.tree.map(
        lambda a: collectives.zeros((num_chunks, *a.shape), a.dtype, like), sums
      ),
    )

    def alone(n: jax.Array, state: Any) -> Any:
      carry, chunk_state = state
      carry, results = compute(carry, send(n))
      return carry, collect(n, self._swap(results), chunk_state)

    def overlapped(n: jax.Array, state: Any) -> Any:
      carry, received, results, chunk_state = state
      next_received = send(n + 1)
      chunk_state = collect(n - 1, self._swap(results), chunk_state)
      carry, results = compute(carry, received)
      return carry, next_received, results, chunk_state

    # Loads decide how often the loop runs: once a chunk, if they are even.
    rounds = plan.ends[-1]
    with jax.named_scope(f"expected_trips_{num_chunks}"):
      if num_chunks == 1:
        # Most often one round, which has no neighbours.
        carry, (_, sums) = lax.fori_loop(0, rounds, alone, (carry, chunk_state))
        return carry, sums
      state = carry, send(0), jax.tree.map(zeros, results), chunk_state
      carry, _, results, chunk_state = lax.fori_loop(
        0, rounds, overlapped, state
      )
    _, sums = collect(rounds - 1, self._swap(results), chunk_state)
    return carry, sums

  def _swap(self, x: PyTree) -> Any:
    """Send the n-th part to shard n; so results return, too."""
    return jax.tree.map(
      lambda a: collectives.exchange(a, self.shards.tokens, 0, 0), x
    )
