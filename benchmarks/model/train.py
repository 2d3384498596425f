"""Times a step of training and its memory: ours and peers.

  plain          dense attention and all logits: arrays of [T, T] and [T, V]
  plain_remat    plain, with each layer computed again for its backward pass
  ringjax        one device: blockwise attention, feedforward and loss; the
                 outputs of attention are kept for the backward pass
  ringjax_least  ringjax, with each layer computed again from its input
  striped        ringjax over several devices
  ringattention  the ring and blockwise feedforward of `ringattention` (PyPI
                 0.1.2, as in Liu et al. 2023, arXiv 2310.01889) with our blocks
                 and loss
  ringattention_one  ringattention on one device

A step is the loss, its gradients and AdamW's update of parameters and moments,
which are donated: the same optimizer for all. Over several devices parameters
and moments are sharded, each over the devices that share the row. On a CPU,
contestants on one device run in a process with one (see `one_device`).

All have the same weights and rows; a loss or gradients that are off are not
timed. Memory is what the compiler reserves for a step: temporaries, arguments
and results, on all its devices together; no step is run for it. Utilisation is
the FLOPs of the model alone, forward and backward, in a bfloat16 computation
over float32 parameters, as a part of the devices' peak: an accelerator's data
sheet, or a measured product. It is for accelerators, and for our contestants,
which are compared with others in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from benchmarks.attention import attention
from benchmarks.shared import harness
from benchmarks.shared.harness import Report, Row, Trial, option
from ringjax.bench import timing
from ringjax.ops.attention.dense import Dense
from ringjax.ops.attention.strategies.gather import Gather
from ringjax.parallel.layout import Contiguous, Striped
from ringjax.parallel.mesh import make_mesh

if TYPE_CHECKING:
  import optax

  from ringjax.models.transformer import Transformer
  from ringjax.train.batch import Batch

CONTESTANTS = (
  "plain",
  "plain_remat",
  "ringjax",
  "ringjax_least",
  "striped",
  "ringattention",
  "ringattention_one",
)
OURS = ("ringjax", "ringjax_least", "striped")
PARTS = ("step", "memory", "scaling", "utilisation")
_SHARDED = ("striped", "ringattention")
TOLERANCE = 2e-4
# Dtype of the computation for utilisation.
_FAST = "bfloat16"
_B1 = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings(harness.BenchmarkSettings):
  """Settings of the benchmark of training.

  Attributes:
    preset: Shapes of the model, a name or the contents of a config.json.
    tokens: Lengths of the timed rows, one row a step.
    rounds: Timed steps.
    devices: Number of devices of the sharded contestants.
    limit_bytes: Memory in which the longest row has to fit.
    longest: Number of tokens up to which memory is computed.
    local: Tokens of a shard in part "scaling".
  """

  parts: tuple[str, ...] = option(PARTS[:3], PARTS)
  preset: str | Mapping[str, Any] = option("llama-100m", ())
  tokens: tuple[int, ...] = option((1024, 4096))
  contestants: tuple[str, ...] = option(CONTESTANTS, CONTESTANTS)
  rounds: int = option(3)
  devices: int = option(8)
  limit_bytes: int = option(8 << 30, flag=None)
  longest: int = option(1 << 20, flag=None)
  local: int = option(1024, flag=None)


# ---------------------------------------------------------------------------
# Contestants
# ---------------------------------------------------------------------------


def _context(name: str, devices: int) -> Any:
  """A contestant's sharding context: layout, attention, feedforward, remat."""
  from ringjax.nn.sharding_context import ContextParallel
  from ringjax.train import remat

  keep_attention = remat.policy("attention")
  if name.startswith("plain"):
    recompute = remat.policy("nothing") if name == "plain_remat" else None
    return ContextParallel(
      strategy=Gather(Dense()), block=1 << 30, remat=recompute
    )
  if name == "ringjax":
    return ContextParallel(remat=keep_attention)
  if name == "ringjax_least":
    return ContextParallel(remat=remat.policy("nothing"))
  if name == "ringattention_one":
    devices = 1
  mesh = make_mesh((devices,), ("seq",), devices=jax.devices()[:devices])
  if name == "striped":
    return ContextParallel(
      mesh=mesh, axis="seq", layout=Striped(), remat=keep_attention
    )
  return _published_context()(
    mesh=mesh, axis="seq", layout=Contiguous(), remat=remat.policy("nothing")
  )


@functools.cache
def _published_context() -> Any:
  """`ContextParallel` with the attention and feedforward of `ringattention`."""
  from ringjax.nn.sharding_context import ContextParallel

  peer = attention.import_ringattention()

  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Published(ContextParallel):
    """Sharding context with the attention and feedforward of the peer."""

    chunk: int = 256

    def __call__(
      self, q: Any, tokens: Any, cache: Any, mask: Any, extras: Any
    ) -> Any:
      k, v, _ = cache.fresh
      repeats = q.shape[2] // k.shape[1]
      heads = lambda x: jnp.repeat(jnp.swapaxes(x, 1, 2), repeats, 2)
      chunk = min(self.chunk, q.shape[1] // self.size)
      mesh, axis = self.mesh, self.axis
      assert isinstance(mesh, Mesh) and axis is not None
      attend = attention.published_attention(mesh, axis, chunk, q.dtype)
      return attend(q, heads(k), heads(v))

    def rowwise(self, f: Any, x: Any) -> Any:
      # Partitioned by the compiler, as its users run it. The peer's argument
      # `chunk_size` is the number of chunks.
      chunks = max(1, x.shape[1] // self.size // self.chunk)
      return _in_linen(f, lambda f: peer.blockwise_feedforward(f, x, chunks))

  return Published


def _in_linen(f: Any, use: Any) -> Any:
  """Calls `use` with f as a Linen module, which the peer's API takes."""
  from flax import linen

  class Inner(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
      return jax.checkpoint(f)(x)

  class Outer(linen.Module):
    @linen.compact
    def __call__(self) -> Any:
      return use(Inner())

  return Outer().apply({})


def _loss(
  name: str,
  attend: Any,
  model: PyTree,
  batch: PyTree,
  dtype: DTypeLike | None = None,
) -> Float[Array, ""]:
  from ringjax.train.objective import sums

  micro_batch = jax.tree.map(lambda x: x[0], batch)
  if not name.startswith("plain"):
    totals = sums(model, micro_batch, attend, dtype=dtype)
    return totals.loss / totals.weight
  logits = model(micro_batch.tokens, attend=attend)
  lse = jax.nn.logsumexp(logits, -1)
  picked = jnp.take_along_axis(logits, micro_batch.labels[..., None], -1)[
    ..., 0
  ]
  return jnp.sum((lse - picked) * micro_batch.weights) / jnp.sum(
    micro_batch.weights
  )


@functools.cache
def _optimizer() -> optax.GradientTransformation:
  import optax

  return optax.adamw(3e-4, b1=_B1, b2=0.95, weight_decay=0.1)


def _program(
  name: str, attend: Any, shardings: Any, dtype: DTypeLike | None = None
) -> Any:
  """Compiles a step: (parameters, moments, batch) to new ones and the loss."""
  import optax

  def step(
    params: PyTree, moments: PyTree, batch: PyTree
  ) -> tuple[PyTree, PyTree, Float[Array, ""]]:
    loss = functools.partial(_loss, name, attend, batch=batch, dtype=dtype)
    loss, grads = jax.value_and_grad(loss)(params)
    # Optimizers mix dtypes, which a strict JAX refuses.
    with jax.numpy_dtype_promotion("standard"):
      updates, moments = _optimizer().update(grads, moments, params)
      params = optax.apply_updates(params, updates)
    return params, moments, loss

  # Outputs are sharded as the inputs, else these could not be donated.
  out = {} if shardings is None else {"out_shardings": shardings}
  return jax.jit(step, donate_argnums=(0, 1), **out)


def _placed(model: Any, attend: Any) -> Any:
  """Copies the parameters to a contestant's devices."""
  from ringjax.models import Rules, checkpoint

  model = jax.tree.map(jnp.copy, model)
  if attend.mesh is None:
    return model
  return checkpoint.place(model, attend.mesh, Rules(embed=attend.axis))


def _shardings(params: PyTree, attend: Any) -> PyTree:
  """Shardings of a step's outputs; None on one device."""
  from ringjax.train import step

  if attend.mesh is None:
    return None
  state = step.shardings(_optimizer(), params, attend.mesh)
  return state.params, state.optimizer, NamedSharding(attend.mesh, P())


def _trial(
  name: str,
  model: Any,
  tokens: int,
  devices: int,
  dtype: DTypeLike | None = None,
) -> Trial:
  """Builds a contestant's step; runs one for its loss and gradients."""
  from ringjax.train import step

  attend = _context(name, devices)
  params = _placed(model, attend)
  state = step.start(_optimizer(), params, attend.mesh)
  buffers = [state.params, state.optimizer]
  batch = _rows(tokens, model.config.vocab, attend)
  program = _program(name, attend, _shardings(params, attend), dtype)

  def work() -> Float[Array, ""]:
    *buffers[:], loss = jax.block_until_ready(program(*buffers, batch))
    return loss

  loss = work()
  # After one step AdamW's first moment is (1 - b1) times the gradients.
  grads = jax.tree.map(lambda x: x / (1 - _B1), buffers[1][0].mu)
  return work, _outputs(loss, grads)


def _one_device_trial(
  name: str, preset: Any, tokens: int, dtype: DTypeLike | None
) -> Trial:
  """Creates the model and builds a contestant's step, on one device."""
  from ringjax.models import checkpoint

  return _trial(name, checkpoint.create(preset, seed=0), tokens, 1, dtype)


def _rows(tokens: int, vocab: int, attend: Any) -> Batch:
  from ringjax.train.batch import place, whole_rows

  draw = np.random.default_rng(0)
  ids = draw.integers(0, vocab, (1, tokens + 1))
  return place(whole_rows(ids), attend)


def _bytes(name: str, preset: Any, tokens: int, devices: int) -> int:
  """Bytes of a compiled step on all its devices, without running it."""
  from ringjax.models import Rules, checkpoint
  from ringjax.train import step
  from ringjax.train.batch import Batch

  attend, row, rules = _context(name, devices), None, None
  if attend.mesh is not None:
    row = NamedSharding(attend.mesh, P(None, None, attend.axis))
    rules = Rules(embed=attend.axis)
  params = checkpoint.abstract(
    preset, dtype="float32", mesh=attend.mesh, rules=rules
  )
  if attend.mesh is None:
    moments = jax.eval_shape(_optimizer().init, params)
  else:
    moments = step.form(_optimizer(), params, attend.mesh).optimizer
  field: Any = lambda dtype: jax.ShapeDtypeStruct(
    (1, 1, tokens), dtype, sharding=row
  )
  batch = Batch(field(jnp.int32), field(jnp.int32), field(jnp.float32))
  program = _program(name, attend, _shardings(params, attend))
  compiled = program.lower(params, moments, batch).compile()
  memory = compiled.memory_analysis()
  device_bytes = (
    memory.temp_size_in_bytes
    + memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
  )
  return device_bytes * attend.size


def _outputs(loss: Float[Array, ""], grads: PyTree) -> list[np.ndarray]:
  """The loss, and gradients that depend on every layer."""
  block = grads.stack.blocks[0][0]
  picked = (loss, grads.embed.weight[...], block.attention.q.weight[...])
  return [np.asarray(x) for x in picked]


# ---------------------------------------------------------------------------
# The benchmark
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TrainCase:
  """One row of the benchmark.

  Attributes:
    part: Part of the benchmark, of `PARTS`.
    tokens: Tokens of a row; 0 in part "memory", which tries several.
    name: Name of the contestant, if a row has only one.
    devices: Number of devices of that contestant.
  """

  part: str
  tokens: int = 0
  name: str = ""
  devices: int = 1

  def __str__(self) -> str:
    words = (self.part, self.name, f"T={self.tokens}" if self.tokens else "")
    return " ".join(word for word in words if word)


class TrainBenchmark(harness.Benchmark):
  """Benchmark of training steps: time, memory, scaling and utilisation."""

  name = "train"
  options = TrainSettings
  quick = TrainSettings(
    parts=("step", "memory"), tokens=(512,), rounds=2, longest=1 << 13
  )
  columns = ("part", "name", "tokens")
  parts = PARTS
  files = ("json", "append")

  @functools.cached_property
  def model(self) -> Any:
    """Initial model of the contestants in this process."""
    from ringjax.models import checkpoint

    model = checkpoint.create(self.settings.preset, seed=0)
    return jax.block_until_ready(model)

  @property
  def cases(self) -> list[TrainCase]:
    s = self.settings
    doubled = [1 << n for n in range(s.devices.bit_length())]
    by_part = {
      "step": [TrainCase("step", n) for n in s.tokens],
      "memory": [
        TrainCase("memory", name=name, devices=s.devices)
        for name in s.contestants
      ],
      "scaling": [
        TrainCase("scaling", n * s.local, "striped" if n > 1 else "ringjax", n)
        for n in doubled
      ],
      "utilisation": [
        TrainCase("utilisation", n, name, s.devices if name in _SHARDED else 1)
        for n in s.tokens
        for name in s.contestants
        if name in OURS
      ],
    }
    return [case for part in PARTS if part in s.parts for case in by_part[part]]

  def build(
    self, name: str, tokens: int, devices: int, dtype: DTypeLike | None = None
  ) -> Trial:
    """Builds a contestant's step; on one device in a process with one."""
    if name in _SHARDED:
      return _trial(name, self.model, tokens, devices, dtype)
    preset = self.settings.preset
    return self.placed(True, _one_device_trial, name, preset, tokens, dtype)

  def reference(self, tokens: int) -> Any:
    """Loss and gradients of ringjax on one device."""
    outputs = self.build("ringjax", tokens, 1)[1]
    # Free its weights and moments: each contestant has a copy.
    self.process.clear()
    return outputs

  def row(self, case: TrainCase, report: Report) -> Row:
    row = {"part": case.part, "name": case.name, "tokens": case.tokens}
    return row | getattr(self, f"_{case.part}")(case, report)

  def devices(self, name: str) -> int:
    return self.settings.devices if name in _SHARDED else 1

  def _step(self, case: TrainCase, report: Report) -> Row:
    """Times the contestants' steps at one length."""
    reference = self.reference(case.tokens)
    results, _ = self.measure(
      self.settings.contestants,
      lambda name: self.build(name, case.tokens, self.settings.devices),
      lambda outputs: harness.compare(outputs, reference, TOLERANCE),
      report,
    )
    return {"results": results}

  def _memory(self, case: TrainCase, report: Report) -> Row:
    """Finds the longest row of a contestant that fits, by doubling."""
    s = self.settings
    sizes: dict[int, int] = {}
    reason, tokens = None, 1024
    while tokens <= s.longest:
      report(tokens / s.longest / 2, f"{tokens} tokens")
      try:
        sizes[tokens] = _bytes(case.name, s.preset, tokens, s.devices)
      except Exception as error:
        reason = timing.reason(error)
        break
      if sizes[tokens] > s.limit_bytes:
        break
      tokens *= 2
    fitting = [n for n, size in sizes.items() if size <= s.limit_bytes]
    return {
      "bytes_by_tokens": sizes,
      "longest": max(fitting, default=0),
      # All tried rows fit: longer ones may fit, too.
      "capped": reason is None and len(fitting) == len(sizes) > 0,
      "limit_bytes": s.limit_bytes,
      "reason": reason,
    }

  def _single(
    self,
    case: TrainCase,
    report: Report,
    build: Callable[[str], Trial],
    compare: Callable[[Any], tuple[float | None, bool]],
  ) -> Row:
    """Measures the only contestant of a case."""
    results, _ = self.measure([case.name], build, compare, report)
    return results[case.name] | {"devices": case.devices}

  def _scaling(self, case: TrainCase, report: Report) -> Row:
    """Measures time and memory as devices and tokens grow together."""
    facts: Row = {"name": f"{case.devices:03}", "bytes_each": None}

    def build(name: str) -> Trial:
      size = _bytes(name, self.settings.preset, case.tokens, case.devices)
      facts["bytes_each"] = size // case.devices
      return self.build(name, case.tokens, case.devices)

    def compare(outputs: Any) -> tuple[float, bool]:
      single_device = case.devices == 1
      reference = outputs if single_device else self.reference(case.tokens)
      return harness.compare(outputs, reference, TOLERANCE)

    return self._single(case, report, build, compare) | facts

  def _utilisation(self, case: TrainCase, report: Report) -> Row:
    """Measures the fraction of the peak that one of our steps reaches."""
    from ringjax.train import recipe

    s = self.settings
    devices = s.devices
    result = self._single(
      case,
      report,
      lambda name: self.build(name, case.tokens, devices, _FAST),
      lambda outputs: (None, False),
    )
    step_flops = recipe.flops(self._abstract, case.tokens) * case.tokens
    # The devices of a CPU share its cores.
    shared = jax.devices()[0].platform == "cpu"
    peak_flops = self._peak * (1 if shared else case.devices)
    share = harness.percent(step_flops, result, {"flops_per_s": peak_flops})
    return {
      **result,
      "dtype": _FAST,
      "peak_flops": peak_flops,
      "step_flops": step_flops,
      "utilisation": None if share is None else share / 100,
    }

  @functools.cached_property
  def _abstract(self) -> Transformer:
    from ringjax.models import checkpoint

    return checkpoint.abstract(self.settings.preset, dtype="float32")

  @functools.cached_property
  def _peak(self) -> float:
    return timing.peak(_FAST, jax.devices()[0])

  def table(self, case: TrainCase, row: Row) -> str:
    if row["part"] == "step":
      rate = lambda result: (
        f"{row['tokens'] / result['median_s']:10,.0f} tokens/s"
      )
      head = f"step, one row of {row['tokens']} tokens"
      return "\n".join([head, *harness.lines(row, rate)])
    if row["part"] == "memory":
      shown = ", ".join(
        f"{int(n):,}: {size / 2**30:.2f}"
        for n, size in row["bytes_by_tokens"].items()
      )
      suffix = " and more" if row["capped"] else ""
      text = f"{row['longest']:,} tokens{suffix} fit; GiB by tokens {shown}"
      if row["reason"]:
        text = f"{text}; then {row['reason']}" if shown else row["reason"]
      return f"memory, {row['name']:<14}{text}"
    text = row["reason"]
    if not text:
      rate = row["tokens"] / row["median_s"]
      text = f"{row['median_s']:.3f} s a step, {rate:,.0f} tokens/s"
    setup = f"{row['devices']} devices, {row['tokens']:,} tokens"
    if row["part"] == "utilisation":
      if row["utilisation"] is not None:
        text += (
          f", {100 * row['utilisation']:.1f} % of "
          f"{row['peak_flops'] / 1e12:,.1f} TFLOP/s"
        )
      return f"utilisation, {row['name']}, {setup}: {text}"
    if row["bytes_each"] is not None:
      text = f"{row['bytes_each'] / 2**20:,.0f} MiB each; {text}"
    return f"scaling, {setup}: {text}"

  def summary(self, rows: Sequence[Row]) -> Row:
    """Summary: times over our best, longest rows, utilisation by tokens."""
    summary: Row = {"speed": {}, "longest": {}, "capped": []}
    for row in rows:
      if row["part"] == "step":
        for name in row["results"]:
          over = harness.ratio(row, [name], OURS)
          if name not in OURS and over is not None:
            by_tokens = summary["speed"].setdefault(name, {})
            by_tokens[str(row["tokens"])] = over
      if row["part"] == "memory" and row["longest"]:
        summary["longest"][row["name"]] = row["longest"]
        if row.get("capped"):
          summary["capped"].append(row["name"])
      if row["part"] == "utilisation" and row["utilisation"] is not None:
        by_tokens = summary.setdefault("utilisation", {}).setdefault(
          row["name"], {}
        )
        by_tokens[str(row["tokens"])] = row["utilisation"]
    return summary

  def closing(self, result: Row) -> str:
    summary, lines = result["summary"], []
    for name, by_tokens in summary["speed"].items():
      shown = ", ".join(f"{n}: {x:.2f}x" for n, x in by_tokens.items())
      lines.append(f"our best over {name}: {shown}")
    longest, capped = summary["longest"], summary["capped"]
    our_lengths = {
      name: tokens for name, tokens in longest.items() if name in OURS
    }
    if not our_lengths:
      return "\n".join(lines)
    best = max(our_lengths.values())
    # A longer row than the longest one tried may fit.
    may_be_longer = any(
      name in capped for name, n in our_lengths.items() if n == best
    )
    for name, tokens in longest.items():
      if name in OURS:
        continue
      text = f"longest row, ours over {name}: "
      if name not in capped:
        text += f"{'at least ' if may_be_longer else ''}{best / tokens:.3g}x"
      elif may_be_longer:
        text += f"unknown, both fit {tokens:,} tokens and more"
      else:
        text += f"at most {best / tokens:.3g}x"
      lines.append(text)
    return "\n".join(lines)
