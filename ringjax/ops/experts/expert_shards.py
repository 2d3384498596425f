"""Mixture of experts whose weights are sharded: rows travel, weights stay.

Guarantees: `mix_sharded` equals `mix` up to the order of float32 sums; no
token is dropped whatever the load; no expert's weights nor their gradients
leave their shard. A token's output does not depend on the other tokens.
Cost: f on a token's k rows, on the shards of their experts, and what
`choose_dispatch` states is sent.
Memory: float32 sums of the tokens that a shard sees, or of one chunk's rows;
of the forward pass nothing is kept but its inputs.
Ref:  rows by all-to-all as in Lepikhin et al. 2020, GShard, arXiv 2006.16668,
but without a capacity beyond which tokens are dropped: there are as many
rounds as the largest load needs.

Experts are sharded over some mesh axes, contiguously, the last axis moving
fastest. An axis of these either shards the call's tokens too, or all of its
shards have the same tokens. Over the latter, each shard adds up its own
experts, and a sum over the shards follows. Over the former ones tokens are
gathered and results reduce-scattered, or rows go to their experts and back in
rounds of a fixed capacity. The number of rounds is data, the same on all
shards, so shapes are static and every backend has the collectives.

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
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

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
      5/4 of an even share.

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
  rounds = others * chunks * capacity * (2 * width * itemsize + 8)
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
      arrays, tree = jax.tree.flatten(self.entry(weights, expert))

      def f(floats: list[jax.Array], part: jax.Array) -> jax.Array:
        float_arrays = iter(floats)
        all_ = [next(float_arrays) if _is_float(a) else a for a in arrays]
        return self.f(jax.tree.unflatten(tree, all_), part)

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

  def _plan(
    self, x: PyTree, experts: Int[Array, "T k"]
  ) -> tuple[Any, Int[Array, "n c k"], Int[Array, " n"]]:
    """Arrays of tokens and experts in chunks, and rounds of each chunk."""
    tokens, chunk = experts.shape[0], self.dispatch.chunk
    chunks = -(-tokens // chunk)

    def cut(x: jax.Array, value: int = 0) -> jax.Array:
      padding = [(0, chunks * chunk - tokens)] + [(0, 0)] * (x.ndim - 1)
      x = jnp.pad(x, padding, constant_values=value)
      return x.reshape(chunks, chunk, *x.shape[1:])

    # Padding has no expert.
    experts = cut(experts, self.count)
    peers = self._peer(experts).reshape(chunks, -1)
    number = math.prod(collectives.axis_size(a) for a in self.shards.tokens)
    load = jax.vmap(
      lambda p: jnp.zeros((number,), jnp.int32).at[p].add(1, mode="drop")
    )(peers)
    rounds = -(-jnp.max(load, 1) // self.dispatch.capacity)
    # The same on all devices: none may wait for another in vain.
    axes = {*self.shards.over} | collectives.varying_axes(rounds)
    rounds = collectives.largest(rounds, tuple(sorted(axes)))
    return jax.tree.map(cut, x), experts, rounds

  def _places(
    self, experts: Int[Array, "c k"]
  ) -> Callable[[Array], Int[Array, " n"]]:
    """Function from a round to the row in each place of what is sent.

    Places are [R * capacity], by the shard to which they go; the number of
    rows stands for none.
    """
    peer, capacity = self._peer(experts).reshape(-1), self.dispatch.capacity
    number = math.prod(collectives.axis_size(a) for a in self.shards.tokens)
    order = jnp.argsort(peer, stable=True).astype(jnp.int32)
    load = jnp.zeros((number,), jnp.int32).at[peer].add(1, mode="drop")
    start = jnp.cumsum(load) - load
    nth = jnp.arange(peer.size, dtype=jnp.int32)
    rank = nth - start[jnp.minimum(peer[order], number - 1)]

    def places(n: jax.Array) -> jax.Array:
      at = rank - n * capacity
      inside = (at >= 0) & (at < capacity) & (peer[order] < number)
      place = jnp.where(inside, peer[order] * capacity + at, number * capacity)
      none = jnp.full((number * capacity,), peer.size, jnp.int32)
      return none.at[place].set(order, mode="drop")

    return places

  def _swap(self, x: PyTree) -> Any:
    """Send the n-th part to shard n; so results return, too."""
    return jax.tree.map(
      lambda a: collectives.exchange(a, self.shards.tokens, 0, 0), x
    )

  def _numbers(
    self, row: Int[Array, " n"], experts: Array, mixing: Array
  ) -> tuple[Int[Array, "n 1"], Float[Array, "n 1"]]:
    """Experts on their shard, and mixing weights, of rows sent to it."""
    chosen = experts.reshape(-1).at[row].get(mode="fill", fill_value=0)
    local = jnp.where(
      row < experts.size, chosen % self.local_experts, self.local_experts
    )
    factor = mixing.reshape(-1).at[row].get(mode="fill", fill_value=0)
    bits = lax.bitcast_convert_type(factor, jnp.int32)
    local, bits = self._swap(jnp.stack([local, bits], 1)).T
    factor = lax.bitcast_convert_type(bits, jnp.float32)
    return local[:, None], factor[:, None]

  def _rounds(
    self,
    weights: PyTree,
    x: Float[Array, "T D"],
    experts: Int[Array, "T k"],
    mixing: Float[Array, "T k"],
  ) -> Float[Array, "T D"]:
    tokens, chosen = experts.shape
    scale_input = self.rows.scale_input
    (x, mixing), experts, rounds = self._plan((x, mixing), experts)

    def chunk(_: None, inputs: tuple) -> tuple[None, jax.Array]:
      x, mixing, experts, rounds = inputs
      places = self._places(experts)

      def one_round(n: jax.Array, outputs: jax.Array) -> jax.Array:
        row = places(n)
        local, factor = self._numbers(row, experts, mixing)
        sent = x.at[row // chosen].get(mode="fill", fill_value=0)
        y = self.rows.forward(
          weights,
          self._swap(sent),
          local,
          factor if scale_input else jnp.ones_like(factor),
          self.local_experts,
          self.rows.size(local.size, self.local_experts),
        )
        y = self._swap(y.astype(x.dtype))
        return outputs.at[row].set(y, mode="drop")

      empty = collectives.zeros(
        (experts.size, x.shape[1]), x.dtype, (x, weights)
      )
      outputs = lax.fori_loop(0, rounds, one_round, empty)
      outputs = outputs.reshape(*experts.shape, -1).astype(jnp.float32)
      if not scale_input:
        outputs = outputs * mixing[..., None]
      return None, jnp.sum(outputs, 1)

    _, sums = lax.scan(chunk, None, (x, mixing, experts, rounds))
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
    (x, mixing, g), experts, rounds = self._plan((x, mixing, g), experts)

    def chunk(dw: list[jax.Array], inputs: tuple) -> tuple[Any, Any]:
      x, mixing, g, experts, rounds = inputs
      places = self._places(experts)

      def one_round(n: jax.Array, sums: tuple) -> tuple:
        dw, dx, dmixing = sums
        row = places(n)
        local, factor = self._numbers(row, experts, mixing)
        sent = lambda a: a.at[row // chosen].get(mode="fill", fill_value=0)
        there_x, there_g = self._swap((sent(x), sent(g)))
        dw, there_dx, there_dmixing = self.rows.backward(
          weights,
          there_x,
          local,
          factor,
          there_g,
          self.local_experts,
          self.rows.size(local.size, self.local_experts),
          dw,
        )
        row_dx, row_dmixing = self._swap(
          (there_dx.astype(x.dtype), there_dmixing[:, 0])
        )
        dx = dx.at[row].set(row_dx, mode="drop")
        return dw, dx, dmixing.at[row].set(row_dmixing, mode="drop")

      zeros = lambda shape, dtype: collectives.zeros(shape, dtype, (x, weights))
      start = (
        dw,
        zeros((experts.size, x.shape[1]), x.dtype),
        zeros((experts.size,), jnp.float32),
      )
      dw, dx, dmixing = lax.fori_loop(0, rounds, one_round, start)
      dx = dx.reshape(*experts.shape, -1).astype(jnp.float32)
      return dw, (jnp.sum(dx, 1), dmixing.reshape(experts.shape))

    dw, (dx, dmixing) = lax.scan(chunk, dw, (x, mixing, g, experts, rounds))
    flat = lambda a: a.reshape(-1, a.shape[-1])[:tokens]
    return dw, flat(dx), flat(dmixing)
