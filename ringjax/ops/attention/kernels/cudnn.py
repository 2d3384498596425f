"""cuDNN's fused attention as the local algorithm of a hop, on NVIDIA GPUs.

Guarantees: equals `Blockwise` wherever it serves (`decline` says where it does
not), values and gradients; the kind of a hop's mask is found at run time
(`hop_kinds`), and hops of other kinds are computed by `Blockwise`.
Cost: 4 T S H FLOPs a head forward, 10 backward; half of them where causal.
Memory: cuDNN's workspace; outputs and gradients of a hop in the operands'
dtype, which is what cuDNN writes, and float32 only from there on.
Ref: NVIDIA cuDNN, Attention Forward and Backward; JAX calls it in
jax/_src/cudnn/fused_attention_stablehlo.py.

The functions called there are private, because the public ones differentiate
themselves: they lose the cotangent of the log-sum-exp, and only use a hop's own
output, where a ring needs the output over all keys. Their arguments are filled
in by name; an argument without a value here is a reason to decline.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float

from ringjax.ops.attention.blockwise import (
  Blockwise,
  Gradients,
  Local,
  LocalAlgorithm,
  QGradients,
  Residuals,
  check_positive,
)
from ringjax.ops.attention.kernels import hop_kinds
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.kernel_choice import check_serves
from ringjax.ops.mask import Mask
from ringjax.ops.softmax import Partial
from ringjax.parallel import chips

_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
_FORWARD, _BACKWARD = (
  "_dot_product_attention_fwd",
  "_dot_product_attention_bwd_rule",
)

_DTYPES = (jnp.bfloat16, jnp.float16)
# Fewer queries or keys than this are decoding, for which there are others.
_LEAST = 128
# The largest head dim, that of Hopper.
_WIDEST = 256
# cuDNN version numbers. JAX since 0.10 is built against a 9.
_OLDEST = 90000
_OLDEST_103 = 91100


@dataclasses.dataclass(frozen=True)
class CuDNN(LocalAlgorithm):
  """cuDNN's attention as local algorithm.

  Attributes:
    q_block: None: cuDNN chooses its tiles.
    kv_block: None: cuDNN chooses its tiles.
    chip: Machine of `chips.MACHINES`, where there is no GPU to ask.
    version: cuDNN version, e.g. 91002 for 9.10.2; None: the installed one.
      With it and `chip` programs can be made without a GPU.
  """

  q_block: int | None = None
  kv_block: int | None = None
  chip: str | None = None
  version: int | None = None

  def __post_init__(self) -> None:
    check_positive(self, "q_block", "kv_block", "version")

  def blocks(self, q_length: int, k_length: int) -> tuple[int, int]:
    """Tile of the fallback where cuDNN does not serve, (q_block, kv_block)."""
    return self._fallback().blocks(q_length, k_length)

  @staticmethod
  def knows(mask: Mask) -> bool:
    """Whether cuDNN computes hops under this mask itself."""
    return hop_kinds.has_known_kinds(mask)

  def decline(
    self, scores: Scores, x: Local, terms: Terms, context: Context
  ) -> str | None:
    """Return the reason not to serve this call, or None."""
    return (
      self.foreseen(scores, x, terms, context)
      or self._decline_machine(x.q.shape[4])
      or _unknown()
    )

  def foreseen(
    self, scores: Scores, x: Local, terms: Terms, context: Context
  ) -> str | None:
    """Return the reason to serve no such call on any machine, or None."""
    if self.q_block is not None or self.kv_block is not None:
      return "tiles of a given size: cuDNN chooses its own"
    if len({a.dtype for a in x}) > 1 or x.q.dtype not in _DTYPES:
      return f"{x.q.dtype}: bfloat16 or float16, the same for q, k and v"
    h, j = x.q.shape[4], x.v.shape[3]
    if h != j:
      return f"head dims of {h} and {j}: equal ones"
    if h % 8 or h > _WIDEST:
      return f"heads of {h}: multiples of 8, at most {_WIDEST}"
    for name, used in (
      ("a soft cap", scores.soft_cap is not None),
      ("dropout", scores.dropout_rate != 0),
      ("ALiBi slopes", terms.slopes is not None),
      ("a bias or mask array", (terms.bias, context.allow) != (None, None)),
    ):
      if used:
        return name
    if not self.knows(context.mask):
      return f"the mask {context.mask}: Causal, SameSegment or none"
    for tokens, length in (("queries", x.q.shape[3]), ("keys", x.k.shape[2])):
      if length < _LEAST:
        return f"{length} {tokens}: at least {_LEAST}"
    return None

  def _decline_machine(self, head_dim: int) -> str | None:
    gpu_capability = _capability_here()
    capability = gpu_capability or chips.CAPABILITIES.get(self.chip or "")
    if capability is None:
      return "no CUDA GPU, and no chip named that has one"
    version = self.version or _version_here()
    if version is None:
      return "no cuDNN here"
    if version < _OLDEST:
      return f"cuDNN {version}: {_OLDEST} or newer"
    if capability < (8, 0):
      return f"compute capability {capability[0]}.{capability[1]}: 8.0 or newer"
    if capability == (10, 3) and version < _OLDEST_103:
      return f"cuDNN {version}: {_OLDEST_103} or newer for this GPU"
    # JAX asks the GPU, and without one assumes the smaller limit.
    max_head_dim = (
      _WIDEST if gpu_capability is not None and gpu_capability[0] == 9 else 128
    )
    if head_dim > max_head_dim:
      return f"heads of {head_dim}: at most {max_head_dim}"
    return None

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Fold these keys into `carry` ([B, K, G, T, ...])."""
    check_serves(self, args.scores, x, args.terms, args.context)
    return hop_kinds.forward(self, self._fallback(), x, args, carry)

  def backward(
    self, x: Local, args: ScoreArgs, residuals: Residuals, carry: QGradients
  ) -> Gradients:
    """Add these keys' gradients to `carry`, the (dq, dterms) so far."""
    check_serves(self, args.scores, x, args.terms, args.context)
    return hop_kinds.backward(self, self._fallback(), x, args, residuals, carry)

  def outputs(
    self, x: Local, scale: float, causal: bool
  ) -> tuple[Float[Array, "B K G T J"], Float[Array, "B K G T"]]:
    """Output and log-sum-exp, see `hop_kinds.VendorKernel`."""

    def call(
      q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
      arguments = self._given(scale, causal, query=q, key=k, value=v)
      return tuple(_call_with(_FORWARD, arguments))

    b, kv, g, t, h = x.q.shape
    out, lse = _with_batching(call)(_join_heads(x.q), x.k, x.v)
    return out.reshape(b, kv, g, t, h), lse.reshape(b, kv, g, t)

  def gradients(
    self, x: Local, rows: hop_kinds.Rows, scale: float, causal: bool
  ) -> tuple[
    Float[Array, "B K G T H"], Float[Array, "B K S H"], Float[Array, "B K S J"]
  ]:
    """Gradients of a hop, see `hop_kinds.VendorKernel`."""

    def call(*arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
      q, k, v, out, lse, do = arrays
      arguments = self._given(scale, causal, query=q, key=k, value=v)
      # Residuals of the forward rule: its arrays, in order, and its results.
      names = list(_parameters(_FORWARD))
      saved_arrays = [arguments[name] for name in names[: names.index("scale")]]
      arguments |= {"res": (*saved_arrays, lse, out), "grad_output": do}
      arguments |= {"return_residual": False}  # no pair of cotangents
      return tuple(_call_with(_BACKWARD, arguments)[:3])

    q, do, out, lse = map(_join_heads, (x.q, *rows))
    dq, dk, dv = _with_batching(call)(q, x.k, x.v, out, lse, do)
    return dq.reshape(x.q.shape), dk, dv

  def _given(self, scale: float, causal: bool, **arrays: Any) -> dict[str, Any]:
    """Values for all arguments that JAX's functions may have."""
    module = importlib.import_module(_MODULE)
    masks = module.MaskType
    empty = jnp.zeros(0, arrays["query"].dtype)
    return {
      **dict.fromkeys(_ABSENT, empty),
      **arrays,
      "score_mod_args": (),
      "score_mod": None,
      "scale": float(scale),
      "seed": 0,
      "dropout_rate": 0.0,
      "variadic_args": (False, False),  # neither a bias nor its gradient
      "mask_type": masks.CAUSAL if causal else masks.NO_MASK,
      # The layout of the operands here: nothing is transposed.
      "layout": module.AttentionLayout.BNTH.value,
      "sliding_window_length": None,
      "cudnn_version": self.version or _version_here(),
      "is_training": True,
      "return_residual": True,
    }

  def _fallback(self) -> Blockwise:
    return Blockwise(self.q_block, self.kv_block)


# Array arguments that are empty here.
_ABSENT = (
  *("bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets"),
  *("page_table_k", "page_table_v"),
)
# The other arguments that `CuDNN` has a value for.
_GIVEN = (
  *("query", "key", "value", "score_mod_args", "score_mod", "scale", "seed"),
  *("dropout_rate", "variadic_args", "mask_type", "layout", "res"),
  *("sliding_window_length", "cudnn_version", "is_training", "grad_output"),
  "return_residual",
)


def _parameters(name: str) -> tuple[str, ...]:
  """Names of the parameters of a JAX function."""
  function = getattr(importlib.import_module(_MODULE), name)
  return tuple(inspect.signature(function).parameters)


def _call_with(name: str, arguments: dict[str, Any]) -> Any:
  """Call a JAX function with those of `arguments` that it takes."""
  function = getattr(importlib.import_module(_MODULE), name)
  return function(**{name: arguments[name] for name in _parameters(name)})


@functools.cache
def _unknown() -> str | None:
  """Reason why JAX's functions differ from those expected, or None."""
  try:
    parameters = {*_parameters(_FORWARD), *_parameters(_BACKWARD)}
    missing = {"query", "key", "value", "scale"} - {*_parameters(_FORWARD)}
    missing |= {"res", "grad_output"} - {*_parameters(_BACKWARD)}
  except (ImportError, AttributeError) as e:
    return f"JAX {jax.__version__} without cuDNN's functions ({e})"
  differing = sorted((parameters - {*_ABSENT, *_GIVEN}) | missing)
  if differing:
    return (
      f"JAX {jax.__version__}, whose functions differ by {', '.join(differing)}"
    )
  return None


@functools.cache
def _capability_here() -> tuple[int, int] | None:
  """Compute capability of this process's first CUDA GPU."""
  try:
    device = jax.local_devices(backend="cuda")[0]
  except RuntimeError:
    return None
  major, minor = str(device.compute_capability).split(".")
  return int(major), int(minor)


@functools.cache
def _version_here() -> int | None:
  try:
    return int(importlib.import_module(_MODULE).check_cudnn_version())
  except (ImportError, AttributeError, RuntimeError):
    return None


def _join_heads(a: jax.Array) -> jax.Array:
  """Reshape [B, K, G, ...] to [B, N, ...]."""
  return a.reshape(a.shape[0], -1, *a.shape[3:])


def _with_batching(call: Callable[..., Any]) -> Callable[..., Any]:
  """Wrap a function of arrays [B, ...] so that vmap enlarges the batch.

  JAX's own rule for these calls needs the axes of vmap in front.
  """
  call = custom_vmap(call)

  @call.def_vmap
  def _(
    size: int, batched: Sequence[bool], *arrays: jax.Array
  ) -> tuple[Any, Any]:
    batch_arrays = [
      a if is_batched else jnp.broadcast_to(a, (size, *a.shape))
      for a, is_batched in zip(arrays, batched, strict=True)
    ]
    results = call(*(a.reshape(-1, *a.shape[2:]) for a in batch_arrays))
    split = lambda a: a.reshape(size, -1, *a.shape[1:])
    return jax.tree.map(split, results), jax.tree.map(lambda _: True, results)

  return call
