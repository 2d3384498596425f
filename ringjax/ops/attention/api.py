"""The public attention functions: global arrays, or per shard.

Guarantees: the result is that of `reference` on the whole sequence, whatever
the mesh, the layout and the strategy; a batch over `data` and heads over
`model` stay where they are. Each function makes one `AttentionArgs` of its
arguments, which checks them and which `run` takes.
Inside a caller's shard_map (or vmap with an axis name) operands are per shard.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int

from ringjax.checks import boolean, one_of
from ringjax.errors import InputTypeError, OptionError
from ringjax.ops.attention import arguments, nesting
from ringjax.ops.attention.arguments import AttentionArgs
from ringjax.ops.attention.blockwise import Blockwise
from ringjax.ops.attention.gather import Gather
from ringjax.ops.attention.kernels.auto_kernel import AutoKernel
from ringjax.ops.attention.nesting import Strategy
from ringjax.ops.attention.ring import Ring
from ringjax.ops.attention.run import attend_shard, run
from ringjax.ops.attention.scores import Context
from ringjax.ops.attention.select import Auto
from ringjax.ops.attention.statistics import AttentionStatistics, statistics
from ringjax.ops.mask import Coords, Mask
from ringjax.parallel.layout import Layout, Striped
from ringjax.parallel.place import AUTO, locate, shards_of

# The keyword arguments that all functions of this file take alike.
_SHARED = tuple(
  name
  for name, one in inspect.signature(AttentionArgs.of).parameters.items()
  if one.kind == one.KEYWORD_ONLY
  and name not in ("is_causal", "layout", "aligned", "key_shards")
)


def dot_product_attention(
  query: Float[Array, "*B T N H"],
  key: Float[Array, "*B S K H"],
  value: Float[Array, "*B S K J"],
  bias: Float[Array, " ..."] | None = None,
  mask: Bool[Array, " ..."] | Mask | None = None,
  *,
  scale: float | None = None,
  is_causal: bool = False,
  query_seq_lengths: Int[Array, "batch=B"] | None = None,
  key_value_seq_lengths: Int[Array, "batch=B"] | None = None,
  local_window_size: int | tuple[int, int] | None = None,
  implementation: Literal["xla", "cudnn"] | None = None,
  return_residual: bool = False,
  mesh: Mesh | AbstractMesh | None = None,
  axis: str | tuple[str, ...] | None = "auto",
  batch_axis: str | tuple[str, ...] | None = None,
  head_axis: str | tuple[str, ...] | None = None,
  layout: Layout | None = None,
  strategy: str | Strategy | Auto = "auto",
  q_segment_ids: Int[Array, "*B T"] | None = None,
  kv_segment_ids: Int[Array, "*B S"] | None = None,
  q_positions: Int[Array, "*B T"] | None = None,
  kv_positions: Int[Array, "*B S"] | None = None,
  sinks: Float[Array, "heads=N"] | None = None,
  logits_soft_cap: float | None = None,
  alibi_slopes: Float[Array, "heads=N"] | None = None,
  dropout_rate: float = 0.0,
  dropout_seed: int | Int[Array, "*B"] | None = None,
) -> Any:
  """`jax.nn.dot_product_attention` over a sequence that may be sharded.

  Every argument of the JAX function has its name, default and meaning, so a
  model switches by changing the import. Two results are better: a row with no
  allowed key gives 0 (and a residual of -inf), not an average of the values,
  and the residual is float32 and differentiable.

  Args:
    query: [B, T, N, H] or [T, N, H]; bfloat16, float16, float32 or float64.
    key: [B, S, K, H] or [S, K, H]; N is a multiple of K.
    value: [B, S, K, J]; J may differ from H.
    bias: broadcastable to [B, N, T, S], added to the scaled (and capped)
      logits; differentiable. Per shard: [B, N, T of the shard, S of them all].
    mask: bool, broadcastable to [B, N, T, S], True where a query sees a key;
      or a ringjax mask such as `Causal() & Window(4096)`, which costs no array.
    scale: of the logits; default H**-0.5.
    is_causal: a query sees keys at and before its position. Positions count
      from 0 for queries and keys alike unless given, as in JAX.
    query_seq_lengths: int32 [B]; later queries give 0.
    key_value_seq_lengths: int32 [B]; later keys are not seen.
    local_window_size: (left, right) or one int for both: how many tokens a
      query sees on either side of its own position.
    implementation: None or "xla" run ringjax; "cudnn" hands the call to
      `jax.nn` and is for one device and JAX's own arguments only.
    return_residual: also return the log-sum-exp, float32 [B, T, N].
    mesh: the mesh; default: the operands', else the current one.
    axis: the mesh axis that shards T and S, or several, the slowest first.
      "auto": what shards the operands, else the mesh's "seq" axis, else the
      only axis of the mesh that is not "replica", "data", "model", "expert"
      or "stage", if it is a given `mesh` or that of operands in a `jax.jit`,
      where nothing says what they are sharded over; else none. None: each
      device attends alone, to the
      keys that it is given. Inside a shard_map where the axis is manual the
      operands are per shard; there it has to be named, or None, since "auto"
      can't tell which dimension a manual axis shards.
    batch_axis: the mesh axes that shard B; () for none. Default: what explicit
      shardings say, else the compiler finds out. Where this or `head_axis` is
      said, nothing is left to the compiler, which on a mesh with more axes
      than `axis` is what lets TPU and GPU kernels run: XLA cuts none.
    head_axis: the same for N; K is 1 or a multiple of its shards.
    layout: the order in which the sequence dimension of all arrays lies on
      the shards (`layout.permute` brings it there); default `Contiguous()`.
    strategy: what moves between shards. "auto" chooses by a model of costs
      (`Auto`, `explain`). By name: "ring", "bidirectional", "ring_q" (queries
      travel), "gather", "ulysses", "hybrid" (heads between neighbours, a ring
      of their groups), "two_level", "halo" (a window), "chain" (causal) and
      "documents" (hops as far as packed documents reach); "hybrid:4" has
      groups of 4. Or an object such as `Ring(Blockwise(q_block=512))`,
      `Ring(wire="int8")` or `Ulysses(Ring(), inner=4)`.
      `Ring(Dense())` is the way to forward-mode and higher-order derivatives.
    q_segment_ids: int32 [B, T] or [T], the document of each query; 0 is
      padding. Queries see keys of their own document only, unless `mask` says
      which documents see each other, as `SeparateDocuments()` does.
    kv_segment_ids: the same for the keys; default `q_segment_ids`.
    q_positions: int32 [B, T] or [T]; default: from the layout.
    kv_positions: the same for the keys.
    sinks: [N], a score per head that takes part in the softmax without a
      value; differentiable. The residual includes it.
    logits_soft_cap: c in c * tanh(logits / c).
    alibi_slopes: [N]; adds `-slope * |distance|`; differentiable.
    dropout_rate: of the attention weights.
    dropout_seed: int, or an integer array [] or [B]. What is dropped depends
      on (seed, head, position of the query, position of the key) alone: one
      seed for all examples drops the same pairs in each. Inside a shard_map
      that shards the heads each shard counts its own from 0: give each
      another seed.

  Returns:
    [B, T, N, J] in the query's dtype, or that and the residual.

  Raises:
    MeshError: operands that differ between the devices of a shard_map, or may
      differ (check_vma=False), without an axis.
    RingjaxError: in Python, before anything is compiled.
  """
  one_of("implementation", implementation, (None, "xla", "cudnn"))
  x = AttentionArgs.of(
    query,
    key,
    value,
    bias=bias,
    mask=mask,
    scale=scale,
    is_causal=is_causal,
    aligned=True,
    key_shards=shards_of(None if axis == AUTO else axis),
    query_seq_lengths=query_seq_lengths,
    key_value_seq_lengths=key_value_seq_lengths,
    local_window_size=local_window_size,
    layout=layout,
    q_segment_ids=q_segment_ids,
    kv_segment_ids=kv_segment_ids,
    q_positions=q_positions,
    kv_positions=kv_positions,
    sinks=sinks,
    logits_soft_cap=logits_soft_cap,
    alibi_slopes=alibi_slopes,
    dropout_rate=dropout_rate,
    dropout_seed=dropout_seed,
  )
  place = locate(
    x.operands,
    mesh,
    axis,
    required=False,
    batch_axis=batch_axis,
    head_axis=head_axis,
    by_name=False,
  )
  if implementation == "cudnn":
    ours = (layout, q_segment_ids, kv_segment_ids, q_positions, kv_positions,
            sinks, logits_soft_cap, alibi_slopes)  # fmt: skip
    plain = all(x is None for x in ours) and not dropout_rate
    if place.size > 1 or not plain or isinstance(mask, Mask):
      raise OptionError(
        "implementation",
        "'cudnn' with a sharded sequence or an argument of ringjax",
        "one device and the arguments of jax.nn",
        "leave implementation out",
      )
    theirs: Any = jax.nn.dot_product_attention
    return theirs(
        query, key, value, bias, mask, scale=scale, is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size, implementation="cudnn",
        return_residual=return_residual,
    )  # fmt: skip
  return run(x, place, _strategy(strategy), return_residual)


def ring_attention(
  query: Float[Array, "*B T N H"],
  key: Float[Array, "*B S K H"],
  value: Float[Array, "*B S K J"],
  *,
  mesh: Mesh | AbstractMesh | None = None,
  axis: str | tuple[str, ...] | None = None,
  batch_axis: str | tuple[str, ...] | None = None,
  head_axis: str | tuple[str, ...] | None = None,
  layout: Layout | None = None,
  is_causal: bool = False,
  return_residual: bool = False,
  local: Any = None,
  **options: Any,
) -> Any:
  """Ring attention (Liu et al. 2023, arXiv 2310.01889) over a mesh axis.

  As `dot_product_attention(..., strategy="ring")`, with two differences: an
  axis has to be found, and causal attention between unequal lengths needs
  positions that say how they align.

  Args:
    query: [B, T, N, H], T over `axis`, in the order of `layout`.
    key: [B, S, K, H].
    value: [B, S, K, J].
    mesh: the mesh; default: the operands', else the current one.
    axis: the mesh axis; default: what "auto" finds for
      `dot_product_attention`, and inside a shard_map over "seq" that axis.
    batch_axis: the mesh axes that shard B, as there.
    head_axis: the mesh axes that shard N, as there.
    layout: default `Contiguous()`.
    is_causal: a query sees keys at and before its position.
    return_residual: also return the log-sum-exp, float32 [B, T, N].
    local: the algorithm of one hop; default `AutoKernel()`, the platform's
      fastest.
    **options: the other keyword arguments of `dot_product_attention`, but for
      `strategy` and `implementation`.

  Returns:
    [B, T, N, J] in the query's dtype, or that and the residual.

  Raises:
    RingjaxError: in Python, before anything is compiled.
  """
  axis = AUTO if axis is None else axis
  x = AttentionArgs.of(
    query,
    key,
    value,
    is_causal=is_causal,
    layout=layout,
    key_shards=shards_of(axis),
    **_known(options),
  )
  place = locate(
    x.operands,
    mesh,
    axis,
    required=True,
    batch_axis=batch_axis,
    head_axis=head_axis,
  )
  strategy = _strategy(Ring(local or AutoKernel()))
  return run(x, place, strategy, return_residual)


def striped_attention(
  query: Float[Array, "*B T N H"],
  key: Float[Array, "*B S K H"],
  value: Float[Array, "*B S K J"],
  **options: Any,
) -> Any:
  """Striped attention (Brandon et al. 2023, arXiv 2311.09431).

  `ring_attention` whose arrays lie in the striped layout: permute once, at the
  loader or the embedding, with `Striped().permute(x, shards=R, axis=1)`.

  Args:
    query: [B, T, N, H], in striped order.
    key: [B, S, K, H].
    value: [B, S, K, J].
    **options: the keyword arguments of `ring_attention`. `layout` may be a
      `Striped(block)` with longer stripes.

  Returns:
    [B, T, N, J], in striped order.
  """
  layout = options.pop("layout", None) or Striped()
  if not isinstance(layout, Striped):
    raise OptionError(
      "layout",
      repr(layout),
      "a Striped(block) layout",
      "use ring_attention for other layouts",
    )
  return ring_attention(query, key, value, layout=layout, **options)


def blockwise_attention(
  query: Float[Array, "*B T N H"],
  key: Float[Array, "*B S K H"],
  value: Float[Array, "*B S K J"],
  *,
  is_causal: bool = False,
  q_block: int | None = None,
  kv_block: int | None = None,
  return_residual: bool = False,
  **options: Any,
) -> Any:
  """Exact attention on one device in blocks, without a T x S array.

  Args:
    query: [B, T, N, H].
    key: [B, S, K, H].
    value: [B, S, K, J].
    is_causal: a query sees keys at and before its position.
    q_block: queries of a tile; default: chosen by the length.
    kv_block: keys of a tile.
    return_residual: also return the log-sum-exp, float32 [B, T, N].
    **options: the other keyword arguments of `dot_product_attention`, but for
      `mesh`, `layout`, `strategy`, `implementation` and the axes.

  Returns:
    [B, T, N, J] in the query's dtype, or that and the residual.

  Raises:
    RingjaxError: in Python, before anything is compiled.
  """
  x = AttentionArgs.of(
    query, key, value, is_causal=is_causal, **_known(options)
  )
  strategy = Gather(Blockwise(q_block, kv_block))
  # Explicitly sharded operands need a shard_map, whose sequence is whole.
  place = locate(x.operands, None, None, required=False)
  return run(x, place, strategy, return_residual)


def attention_statistics(
  query: Float[Array, "*B T N H"],
  key: Float[Array, "*B S K H"],
  *,
  keep: Bool[Array, " ..."] | None = None,
  columns: bool = False,
  is_causal: bool = False,
  mesh: Mesh | AbstractMesh | None = None,
  axis: str | tuple[str, ...] | None = "auto",
  batch_axis: str | tuple[str, ...] | None = None,
  head_axis: str | tuple[str, ...] | None = None,
  layout: Layout | None = None,
  **options: Any,
) -> AttentionStatistics:
  """Entropy, log-sum-exp and masses of the weights of attention.

  Computed tile by tile as attention is, over a sequence that may be sharded;
  no array is T x S. A learned sink (`sinks`) counts as a key: it has a share
  of the entropy and of the log-sum-exp, and its weight is in no mass.

  Args:
    query: [B, T, N, H] or [T, N, H].
    key: [B, S, K, H] or [S, K, H]; N is a multiple of K.
    keep: bool [B, S], or [B, S, K] where heads differ: keys whose mass is
      found. Without B where `query` has none.
    columns: whether to find what each key gets of all queries.
    is_causal: a query sees keys at and before its position.
    mesh: the mesh, as in `dot_product_attention`.
    axis: the mesh axis that shards T and S, as there.
    batch_axis: the mesh axes that shard B, as there.
    head_axis: the mesh axes that shard N, as there.
    layout: default `Contiguous()`.
    **options: the other keyword arguments of `dot_product_attention`, but for
      those of dropout, `strategy` and `implementation`.

  Returns:
    `AttentionStatistics` in float32, or float64 for float64 operands. They have
    no derivative.

  Raises:
    RingjaxError: in Python, before anything is compiled.
  """
  columns = boolean("columns", columns)
  x = AttentionArgs.of(
    query,
    key,
    # In place of values, which no statistic depends on.
    key,
    is_causal=is_causal,
    layout=layout,
    aligned=True,
    key_shards=shards_of(None if axis == AUTO else axis),
    **_known(options),
  )
  if x.scores.dropout_rate:
    raise OptionError(
      "dropout_rate",
      x.scores.dropout_rate,
      "0: statistics are of weights before dropout",
      "leave it out",
    )
  place = locate(
    x.operands,
    mesh,
    axis,
    required=False,
    batch_axis=batch_axis,
    head_axis=head_axis,
    by_name=False,
  )
  if keep is not None:
    keep = arguments.kept_keys(keep, x)
  return statistics(x, place, keep, columns)


def attention(
  q: Float[Array, "B T N H"],
  k: Float[Array, "B S K H"],
  v: Float[Array, "B S K J"],
  q_at: Coords,
  k_at: Coords,
  mask: Mask,
  strategy: Strategy,
  *,
  scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Per shard: attention between tokens whose coordinates are given.

  The piece under the other functions, for those who build. `strategy` comes
  with its axis, e.g. `Ring(Blockwise(), axis="seq")`; `Gather()` is local.

  Args:
    q: [B, T, N, H].
    k: [B, S, K, H].
    v: [B, S, K, J].
    q_at: coordinates [B or 1, T].
    k_at: coordinates [B or 1, S].
    mask: predicate over coordinates.
    strategy: which keys arrive when.
    scale: of the logits; default H**-0.5.

  Returns:
    (out [B, T, N, J] in q's dtype, log-sum-exp [B, T, N] in float32), both
    differentiable; `Partial.of(out, lse)` merges with other partials.
  """
  x = AttentionArgs.of(q, k, v, mask=mask, scale=scale)
  if not isinstance(mask, Mask):
    raise InputTypeError(
      "mask",
      type(mask).__name__,
      "a ringjax mask such as Causal()",
      "pass Everything() for none, and an array to dot_product_attention",
    )
  if isinstance(strategy, type) or not hasattr(strategy, "attend"):
    raise OptionError(
      "strategy",
      repr(strategy),
      "an object, with the axis that it moves keys over",
      "pass e.g. Ring(Blockwise(), axis='seq')",
    )
  if nesting.is_strategy(strategy):
    nesting.check(strategy)
  b = x.q.shape[0]
  context = Context(
    arguments.coords("q_at", q_at, b, x.q.shape[1]),
    arguments.coords("k_at", k_at, b, x.k.shape[1]),
    x.mask,
  )
  return attend_shard(x, context, strategy)


def _known(options: dict[str, Any]) -> dict[str, Any]:
  """Options that all functions take, or an error that names another one."""
  for name in options:
    if name not in _SHARED:
      raise OptionError(
        name,
        "an unknown argument",
        f"one of {', '.join(_SHARED)}",
        "see dot_product_attention",
      )
  return options


def _strategy(strategy: Any) -> Strategy | Auto:
  if isinstance(strategy, Auto):
    return strategy
  if nesting.is_strategy(strategy):
    nesting.check(strategy)
    return strategy
  return Auto() if strategy == "auto" else nesting.named(strategy)
