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
from ringjax.ops.attention import arguments
from ringjax.ops.attention.arguments import AttentionArgs
from ringjax.ops.attention.blockwise import Blockwise
from ringjax.ops.attention.cost.select import Auto
from ringjax.ops.attention.execution import attend_shard, run
from ringjax.ops.attention.kernels.auto_kernel import AutoKernel
from ringjax.ops.attention.score_maxima import score_maxima
from ringjax.ops.attention.scores import Context
from ringjax.ops.attention.statistics import AttentionStatistics, statistics
from ringjax.ops.attention.strategies import nesting
from ringjax.ops.attention.strategies.gather import Gather
from ringjax.ops.attention.strategies.nesting import Strategy
from ringjax.ops.attention.strategies.ring import Ring
from ringjax.ops.mask import Coords, Mask
from ringjax.parallel.call_sharding import AUTO, locate, shards_of
from ringjax.parallel.layout import Layout, Striped

# The keyword arguments that all functions of this file share.
_SHARED = tuple(
  name
  for name, parameter in inspect.signature(AttentionArgs.of).parameters.items()
  if parameter.kind == parameter.KEYWORD_ONLY
  and name not in ("is_causal", "layout", "aligned", "key_shards", "up")
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
    query: Queries, [B, T, N, H] or [T, N, H]; bfloat16, float16, float32 or
      float64.
    key: Keys, [B, S, K, H] or [S, K, H]; N is a multiple of K.
    value: Values, [B, S, K, J]; J may differ from H.
    bias: Bias, broadcastable to [B, N, T, S], added to the scaled (and capped)
      logits; differentiable. Per shard: [B, N, T of the shard, S of them all].
    mask: Boolean mask, broadcastable to [B, N, T, S], True where a query sees a
      key; or a ringjax mask such as `Causal() & Window(4096)`, which costs no
      array.
    scale: Scale of the logits; default H**-0.5.
    is_causal: Whether a query only sees keys at and before its position.
      Positions count from 0 for queries and keys alike unless given, as in JAX.
    query_seq_lengths: Query lengths, int32 [B]; later queries give 0.
    key_value_seq_lengths: Key lengths, int32 [B]; later keys are not seen.
    local_window_size: Numbers of tokens that a query sees on either side of its
      position, (left, right) or one int for both.
    implementation: None or "xla" run ringjax; "cudnn" passes the call to
      `jax.nn` and is for one device and JAX's own arguments only.
    return_residual: Whether to return the log-sum-exp, too, float32 [B, T, N].
    mesh: Device mesh; default: the operands', else the current one.
    axis: Mesh axis that shards T and S, or several, the slowest first.
      "auto": the axis of the operands' shardings, else the mesh's "seq" axis,
      else the only axis of the mesh that is not "replica", "data", "model",
      "expert" or "stage", if it is a given `mesh` or that of operands in a
      `jax.jit`, whose types do not tell their shardings; else none. None: each
      device attends alone, to the keys that it is given. Inside a shard_map
      where the axis is manual the operands are per shard; there it has to be
      named, or None, since "auto" cannot know which dimension a manual axis
      shards.
    batch_axis: Mesh axes that shard B; () for none. Default: those of explicit
      shardings, else the compiler decides. With this or `head_axis` the
      compiler has nothing left to partition, which on a mesh with more axes
      than `axis`
      is what lets TPU and GPU kernels run: XLA cannot partition them.
    head_axis: Mesh axes that shard N, likewise; K is 1 or a multiple of its
      shards.
    layout: Order of the sequence dimension of all arrays on the shards
      (`layout.permute` brings it there); default `Contiguous()`.
    strategy: Strategy that decides what moves between shards. "auto" chooses by
      a cost model (`Auto`, `explain`). By name: "ring", "bidirectional",
      "ring_q" (queries travel), "gather", "ulysses", "hybrid" (heads between
      neighbours, a ring of their groups), "two_level", "halo" (a window),
      "chain" (causal) and "documents" (hops as far as packed documents reach);
      "hybrid:4" has groups of 4. Or an object such as
      `Ring(Blockwise(q_block=512))`, `Ring(wire="int8")` or
      `Ulysses(Ring(), inner=4)`. `Ring(Dense())` supports forward-mode and
      higher-order derivatives.
    q_segment_ids: Document of each query, int32 [B, T] or [T]; 0 is padding.
      Queries only see keys of the same document, unless `mask` decides which
      documents see each other, as `SeparateDocuments()` does.
    kv_segment_ids: Document of each key; default `q_segment_ids`.
    q_positions: Positions of the queries, int32 [B, T] or [T]; default: from
      the layout.
    kv_positions: Positions of the keys; default: from the layout.
    sinks: A score per head, [N], that takes part in the softmax without a
      value; differentiable. The residual includes it.
    logits_soft_cap: Soft cap c in c * tanh(logits / c).
    alibi_slopes: ALiBi slopes, [N]; adds `-slope * |distance|`; differentiable.
    dropout_rate: Dropout rate of the attention weights.
    dropout_seed: Dropout seed, an int, or an integer array [] or [B]. Dropout
      depends on (seed, head, position of the query, position of the key) alone:
      one seed for all examples drops the same pairs in each. Inside a shard_map
      that shards the heads each shard counts its heads from 0: give each
      another seed.

  Returns:
    [B, T, N, J] in the query's dtype, or that and the residual.

  Raises:
    MeshError: If operands differ between the devices of a shard_map, or may
      differ (check_vma=False), without an axis.
    RingjaxError: If arguments do not fit, before anything is compiled.
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
    extra = (layout, q_segment_ids, kv_segment_ids, q_positions, kv_positions,
             sinks, logits_soft_cap, alibi_slopes)  # fmt: skip
    only_jax_arguments = all(x is None for x in extra) and not dropout_rate
    if place.size > 1 or not only_jax_arguments or isinstance(mask, Mask):
      raise OptionError(
        "implementation",
        "'cudnn' with a sharded sequence or an argument of ringjax",
        "one device and the arguments of jax.nn",
        "leave implementation out",
      )
    jax_function: Any = jax.nn.dot_product_attention
    return jax_function(
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
    query: Queries, [B, T, N, H], T over `axis`, in the order of `layout`.
    key: Keys, [B, S, K, H].
    value: Values, [B, S, K, J].
    mesh: Device mesh; default: the operands', else the current one.
    axis: Mesh axis of the sequence; default: what "auto" finds for
      `dot_product_attention`, and inside a shard_map over "seq" that axis.
    batch_axis: Mesh axes that shard B, as in `dot_product_attention`.
    head_axis: Mesh axes that shard N, as in `dot_product_attention`.
    layout: Order of the tokens on the shards; default `Contiguous()`.
    is_causal: Whether a query only sees keys at and before its position.
    return_residual: Whether to return the log-sum-exp, too, float32 [B, T, N].
    local: Algorithm of one hop; default `AutoKernel()`, the platform's fastest.
    **options: The other keyword arguments of `dot_product_attention`, except
      `strategy` and `implementation`.

  Returns:
    [B, T, N, J] in the query's dtype, or that and the residual.

  Raises:
    RingjaxError: If arguments do not fit, before anything is compiled.
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

  `ring_attention` on arrays in the striped layout: permute once, at the loader
  or the embedding, with `Striped().permute(x, shards=R, axis=1)`.

  Args:
    query: Queries, [B, T, N, H], in striped order.
    key: Keys, [B, S, K, H].
    value: Values, [B, S, K, J].
    **options: The keyword arguments of `ring_attention`. `layout` may be a
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
    query: Queries, [B, T, N, H].
    key: Keys, [B, S, K, H].
    value: Values, [B, S, K, J].
    is_causal: Whether a query only sees keys at and before its position.
    q_block: Queries of a tile; default: chosen by the length.
    kv_block: Keys of a tile; default: chosen by the length.
    return_residual: Whether to return the log-sum-exp, too, float32 [B, T, N].
    **options: The other keyword arguments of `dot_product_attention`, except
      `mesh`, `layout`, `strategy`, `implementation` and the axes.

  Returns:
    [B, T, N, J] in the query's dtype, or that and the residual.

  Raises:
    RingjaxError: If arguments do not fit, before anything is compiled.
  """
  x = AttentionArgs.of(
    query, key, value, is_causal=is_causal, **_known(options)
  )
  strategy = Gather(Blockwise(q_block, kv_block))
  # Explicitly sharded operands need a shard_map, with the sequence unsharded.
  place = locate(x.operands, None, None, required=False)
  return run(x, place, strategy, return_residual)


def latent_attention(
  query: Float[Array, "*B T N H"],
  rows: Float[Array, "*B S X"],
  up: Float[Array, "C N Y"],
  *,
  is_causal: bool = False,
  mesh: Mesh | AbstractMesh | None = None,
  axis: str | tuple[str, ...] | None = "auto",
  batch_axis: str | tuple[str, ...] | None = None,
  head_axis: str | tuple[str, ...] | None = None,
  layout: Layout | None = None,
  strategy: str | Strategy | Auto = "auto",
  return_residual: bool = False,
  **options: Any,
) -> Any:
  """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), sharded.

  As `dot_product_attention` of the keys and values that rows are projected to:
  of a row [c, r] head n has the key [c . up[:, n, :P], r] and the value
  c . up[:, n, P:]. Strategies that send keys may send the rows instead, as the
  cost model decides: C + R numbers of a token, not N (H + J).

  Args:
    query: Queries, [B, T, N, H] or [T, N, H], whose last R dims meet r.
    rows: Latents c and then the key dims r that the heads share, rotated.
    up: Up-projection to the other P = H - R key dims and to the values.
    is_causal: Whether a query only sees keys at and before its position.
    mesh: Device mesh, as in `dot_product_attention`.
    axis: Mesh axis that shards T and S, as in `dot_product_attention`.
    batch_axis: Mesh axes that shard B, as in `dot_product_attention`.
    head_axis: Mesh axes that shard N; rows are whole on each of its shards.
    layout: Order of the tokens on the shards; default `Contiguous()`.
    strategy: Strategy, as in `dot_product_attention`.
    return_residual: Whether to return the log-sum-exp, too, float32 [B, T, N].
    **options: The other keyword arguments of `dot_product_attention`, except
      `implementation`.

  Returns:
    [B, T, N, J] in the query's dtype, or that and the residual.

  Raises:
    RingjaxError: If arguments do not fit, before anything is compiled.
  """
  x = AttentionArgs.of(
    query,
    rows,
    rows,
    is_causal=is_causal,
    layout=layout,
    aligned=True,
    key_shards=shards_of(None if axis == AUTO else axis),
    up=up,
    **_known(options),
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
  return run(x, place, _strategy(strategy), return_residual)


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
  """Entropy, log-sum-exp and masses of attention weights.

  Computed tile by tile like attention, over a sequence that may be sharded; no
  array is T x S. A learned sink (`sinks`) counts as a key: it has a share of
  the entropy and of the log-sum-exp, and its weight is in no mass.

  Args:
    query: Queries, [B, T, N, H] or [T, N, H].
    key: Keys, [B, S, K, H] or [S, K, H]; N is a multiple of K.
    keep: Set of keys whose mass is computed, bool [B, S], or [B, S, K] where
      heads differ. Without B where `query` has none.
    columns: Whether to compute the mass that each key gets of all queries.
    is_causal: Whether a query only sees keys at and before its position.
    mesh: Device mesh, as in `dot_product_attention`.
    axis: Mesh axis that shards T and S, as in `dot_product_attention`.
    batch_axis: Mesh axes that shard B, as in `dot_product_attention`.
    head_axis: Mesh axes that shard N, as in `dot_product_attention`.
    layout: Order of the tokens on the shards; default `Contiguous()`.
    **options: The other keyword arguments of `dot_product_attention`, except
      those of dropout, `strategy` and `implementation`.

  Returns:
    `AttentionStatistics` in float32, or float64 for float64 operands. They have
    no derivative.

  Raises:
    RingjaxError: If arguments do not fit, before anything is compiled.
  """
  columns = boolean("columns", columns)
  x = AttentionArgs.of(
    query,
    key,
    # Instead of values, on which no statistic depends.
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


def attention_score_maxima(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S _ _"],
  *,
  up: Float[Array, "C N Y"] | None = None,
  mesh: Mesh | AbstractMesh | None = None,
  axis: str | tuple[str, ...] | None = "auto",
  batch_axis: str | tuple[str, ...] | None = None,
  head_axis: str | tuple[str, ...] | None = None,
  layout: Layout | None = None,
  **options: Any,
) -> Float[Array, "B T N"]:
  """Largest score of each query over the keys that it sees, per head.

  Computed tile by tile like attention, over a sequence that may be sharded; no
  array is T x S.

  Args:
    query: Queries, [B, T, N, H].
    key: Keys, [B, S, K, H], or with `up` rows of latents, [B, S, 1, X].
    up: Up-projection of the rows, as in `latent_attention`, or None.
    mesh: Device mesh, as in `dot_product_attention`.
    axis: Mesh axis that shards T and S, as in `dot_product_attention`.
    batch_axis: Mesh axes that shard B, as in `dot_product_attention`.
    head_axis: Mesh axes that shard N, as in `dot_product_attention`.
    layout: Order of the tokens on the shards; default `Contiguous()`.
    **options: Masks, coordinates and scale of `dot_product_attention`.

  Returns:
    Maxima in float32, or float64 for float64 operands; -inf where a query sees
    no key. They have no derivative.

  Raises:
    RingjaxError: If arguments do not fit, before anything is compiled.
  """
  keys = key if up is None else key[:, :, 0]
  x = AttentionArgs.of(
    query,
    keys,
    # Instead of values, which are not read.
    keys,
    layout=layout,
    aligned=True,
    key_shards=shards_of(None if axis == AUTO else axis),
    up=up,
    **_known(options),
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
  return score_maxima(x, place)


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
) -> tuple[Float[Array, "B T N J"], Float[Array, "B T N"]]:
  """Attend per shard, between tokens whose coordinates are given.

  The building block of the other functions, for custom ones. `strategy` comes
  with its axis, e.g. `Ring(Blockwise(), axis="seq")`; `Gather()` is local.

  Args:
    q: Queries, [B, T, N, H].
    k: Keys, [B, S, K, H].
    v: Values, [B, S, K, J].
    q_at: Coordinates of the queries, [B or 1, T].
    k_at: Coordinates of the keys, [B or 1, S].
    mask: Mask over coordinates.
    strategy: Strategy that brings keys and queries together.
    scale: Scale of the logits; default H**-0.5.

  Returns:
    (out, lse): outputs [B, T, N, J] in q's dtype, and the log-sum-exp
    [B, T, N] in float32. Both are differentiable; `Partial.of(out, lse)` merges
    with other partials.
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
  """Return options that all functions share, or raise for any other."""
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
