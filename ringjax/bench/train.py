"""A step of training: its time and its memory, ours and what else one has.

  plain          dense attention and all logits: arrays of [T, T] and [T, V]
  plain_remat    the same, each layer computed again for its backward pass
  ringjax        one device: blockwise attention, feedforward and loss; what
                 attention gave is kept for the backward pass
  ringjax_least  the same, each layer computed again from its input
  striped        the same over several devices
  ringattention  its ring and its blockwise feedforward (PyPI 0.1.2, as in Liu
                 et al. 2023, arXiv 2310.01889) around our blocks and loss
  ringattention_one  the same on one device

A step is the loss, its gradients and AdamW's update of parameters and moments,
which are donated: the same optimizer for all. Over several devices parameters
and moments are sharded, each over the devices that share the row. On a CPU,
who computes on one device has a process in which there is one (see `alone`).

Law: all have the same weights and rows, and whose loss or gradients are off is
not timed. Memory is what the compiler reserves for a step: temporaries,
arguments and results, on all its devices together; no step is run for it.
Utilisation is the FLOPs of the model alone, forward and backward, in a bfloat16
computation over float32 parameters, as a part of the devices' peak: of what is
stated of an accelerator, or of a measured product. It is for accelerators, and
for our contestants, which are compared with others in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.bench import alone, attention, contest, timing
from ringjax.bench.alone import Alone
from ringjax.bench.contest import Made, Row
from ringjax.ops.attention.dense import Dense
from ringjax.ops.attention.gather import Gather
from ringjax.parallel.layout import Contiguous, Striped
from ringjax.parallel.mesh import make_mesh

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
TOLERANCE = {"float32": 2e-4}
# Of the computation where the part of the peak is what is asked for.
_FAST = "bfloat16"
_B1 = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What to measure.

  Attributes:
    parts: of `PARTS`.
    preset: the model's shapes, a name or what a config.json holds.
    tokens: lengths of the timed rows, one row a step.
    contestants: of `CONTESTANTS`.
    rounds: timed steps.
    devices: of the sharded contestants.
    limit_bytes: memory in which the longest row has to fit.
    longest: tokens up to which memory is looked at.
    local: tokens of a shard where the number of shards grows.
  """

  parts: tuple[str, ...] = PARTS[:3]
  preset: Any = "llama-100m"
  tokens: tuple[int, ...] = (1024, 4096)
  contestants: tuple[str, ...] = CONTESTANTS
  rounds: int = 3
  devices: int = 8
  limit_bytes: int = 8 << 30
  longest: int = 1 << 20
  local: int = 1024

  def __post_init__(self) -> None:
    contest.check(
      self,
      choices={"parts": PARTS, "contestants": CONTESTANTS},
      counts=("tokens", "rounds", "devices", "limit_bytes", "longest", "local"),
    )


QUICK = Settings(
  parts=("step", "memory"), tokens=(512,), rounds=2, longest=1 << 13
)


# ---------------------------------------------------------------------------
# Contestants
# ---------------------------------------------------------------------------


def _replicated(name: str, devices: int) -> Any:
  """How a contestant's tokens lie on devices and find their keys."""
  from ringjax.nn.sharding_context import ContextParallel
  from ringjax.train import remat

  kept = remat.policy("attention")
  if name.startswith("plain"):
    again = remat.policy("nothing") if name == "plain_remat" else None
    return ContextParallel(strategy=Gather(Dense()), block=1 << 30, remat=again)
  if name == "ringjax":
    return ContextParallel(remat=kept)
  if name == "ringjax_least":
    return ContextParallel(remat=remat.policy("nothing"))
  if name == "ringattention_one":
    devices = 1
  mesh = make_mesh((devices,), ("seq",), devices=jax.devices()[:devices])
  if name == "striped":
    return ContextParallel(mesh=mesh, axis="seq", layout=Striped(), remat=kept)
  return _published()(
    mesh=mesh, axis="seq", layout=Contiguous(), remat=remat.policy("nothing")
  )


@functools.cache
def _published() -> Any:
  """`ContextParallel` with the attention and feedforward of `ringattention`."""
  from ringjax.nn.sharding_context import ContextParallel

  peer = attention.import_ringattention()

  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Published(ContextParallel):
    """Keys of all heads travel around the peer's ring."""

    chunk: int = 256

    def __call__(
      self, q: Any, tokens: Any, cache: Any, mask: Any, extras: Any
    ) -> Any:
      k, v, _ = cache.fresh
      repeats = q.shape[2] // k.shape[1]
      heads = lambda x: jnp.repeat(jnp.swapaxes(x, 1, 2), repeats, 2)
      chunk = min(self.chunk, q.shape[1] // self.size)
      options = attention.ring_options(chunk, q.dtype)
      local = lambda q, k, v: peer.ringattention(
        q, k, v, None, None, None, self.axis, False, options
      )
      part = P(None, self.axis)
      return jax.shard_map(
        local,
        mesh=self.mesh,
        in_specs=(part, part, part),
        out_specs=part,
        check_vma=False,
      )(q, heads(k), heads(v))

    def rowwise(self, f: Any, x: Any) -> Any:
      # Partitioned by the compiler, as its users have it. What it calls the
      # size of chunks is their number.
      chunks = max(1, x.shape[1] // self.size // self.chunk)
      return _in_linen(f, lambda f: peer.blockwise_feedforward(f, x, chunks))

  return Published


def _in_linen(f: Any, use: Any) -> Any:
  """What `use` makes of f as a Linen module, which the peer asks for."""
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
  name: str, attend: Any, model: Any, batch: Any, dtype: Any = None
) -> Any:
  from ringjax.train.objective import sums

  one = jax.tree.map(lambda x: x[0], batch)
  if not name.startswith("plain"):
    found = sums(model, one, attend, dtype=dtype)
    return found.loss / found.weight
  logits = model(one.tokens, attend=attend)
  lse = jax.nn.logsumexp(logits, -1)
  picked = jnp.take_along_axis(logits, one.labels[..., None], -1)[..., 0]
  return jnp.sum((lse - picked) * one.weights) / jnp.sum(one.weights)


@functools.cache
def _optimizer() -> Any:
  import optax

  return optax.adamw(3e-4, b1=_B1, b2=0.95, weight_decay=0.1)


def _program(name: str, attend: Any, shardings: Any, dtype: Any = None) -> Any:
  """(parameters, moments, loss) of parameters, moments and a batch."""
  import optax

  def step(params: Any, moments: Any, batch: Any) -> Any:
    loss = functools.partial(_loss, name, attend, batch=batch, dtype=dtype)
    loss, grads = jax.value_and_grad(loss)(params)
    # Optimizers mix dtypes, which whoever is strict does not allow elsewhere.
    with jax.numpy_dtype_promotion("standard"):
      updates, moments = _optimizer().update(grads, moments, params)
      params = optax.apply_updates(params, updates)
    return params, moments, loss

  # As they came, or they could not be donated.
  out = {} if shardings is None else {"out_shardings": shardings}
  return jax.jit(step, donate_argnums=(0, 1), **out)


def _placed(model: Any, attend: Any) -> Any:
  """A copy of the parameters, where a contestant has them."""
  from ringjax.models import Rules, checkpoint

  model = jax.tree.map(jnp.copy, model)
  if attend.mesh is None:
    return model
  return checkpoint.place(model, attend.mesh, Rules(embed=attend.axis))


def _shardings(params: Any, attend: Any) -> Any:
  """Of what a step gives; None on one device."""
  from ringjax.train import step

  if attend.mesh is None:
    return None
  state = step.shardings(_optimizer(), params, attend.mesh)
  return state.params, state.optimizer, NamedSharding(attend.mesh, P())


def _ready(
  name: str, model: Any, tokens: int, devices: int, dtype: Any = None
) -> Made:
  """A contestant's step, and what came out of the first one."""
  from ringjax.train import step

  attend = _replicated(name, devices)
  params = _placed(model, attend)
  state = step.start(_optimizer(), params, attend.mesh)
  held = [state.params, state.optimizer]
  batch = _rows(tokens, model.config.vocab, attend)
  program = _program(name, attend, _shardings(params, attend), dtype)

  def work() -> Any:
    *held[:], loss = jax.block_until_ready(program(*held, batch))
    return loss

  loss = work()
  # Behind the first step, a part of the gradients.
  grads = jax.tree.map(lambda x: x / (1 - _B1), held[1][0].mu)
  return work, _outputs(loss, grads)


def _created(name: str, preset: Any, tokens: int, dtype: Any) -> Made:
  """The step of a contestant on one device that has no model yet."""
  from ringjax.models import checkpoint

  model = checkpoint.create(preset, seed=0)
  return _ready(name, model, tokens, 1, dtype)


@dataclasses.dataclass(frozen=True)
class _Bench:
  """Where contestants of the timed parts run.

  Attributes:
    settings: of the run.
    process: for those on one device.
    stream: where progress goes.
  """

  settings: Settings
  process: Alone
  stream: Any

  @functools.cached_property
  def model(self) -> Any:
    """What those in this process begin with."""
    from ringjax.models import checkpoint

    return jax.block_until_ready(
      checkpoint.create(self.settings.preset, seed=0)
    )

  def made(
    self, name: str, tokens: int, devices: int, dtype: Any = None
  ) -> Made:
    if name not in _SHARDED and alone.serves():
      make = f"{__name__}:{_created.__name__}"
      return self.process.make(make, name, self.settings.preset, tokens, dtype)
    return _ready(name, self.model, tokens, devices, dtype)


def _rows(tokens: int, vocab: int, attend: Any) -> Any:
  from ringjax.train.batch import place, whole_rows

  draw = np.random.default_rng(0)
  ids = draw.integers(0, vocab, (1, tokens + 1))
  return place(whole_rows(ids), attend)


def _bytes(name: str, preset: Any, tokens: int, devices: int) -> int:
  """What a compiled step takes on all its devices, without running it."""
  from flax import nnx

  from ringjax.models import Rules, checkpoint
  from ringjax.train.batch import Batch

  attend = _replicated(name, devices)
  params = checkpoint.abstract(preset, dtype="float32")
  put: Any = lambda x, sharding: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=sharding
  )
  if attend.mesh is not None:
    rules = Rules(embed=attend.axis)
    params = jax.tree.map(
      lambda p: p.replace(put(p.get_value(), rules.sharding(p, attend.mesh))),
      params,
      is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
  moments = jax.eval_shape(_optimizer().init, params)
  shardings = _shardings(params, attend)
  row = None
  if attend.mesh is not None:
    moments = jax.tree.map(put, moments, shardings[1])
    row = NamedSharding(attend.mesh, P(None, None, attend.axis))
  field = lambda dtype: jax.ShapeDtypeStruct(
    (1, 1, tokens), dtype, sharding=row
  )
  batch = Batch(field(jnp.int32), field(jnp.int32), field(jnp.float32))
  program = _program(name, attend, shardings)
  found = program.lower(params, moments, batch).compile()
  a = found.memory_analysis()
  each = (
    a.temp_size_in_bytes
    + a.argument_size_in_bytes
    + a.output_size_in_bytes
    - a.alias_size_in_bytes
  )
  return each * attend.size


# ---------------------------------------------------------------------------
# Parts
# ---------------------------------------------------------------------------


def run(
  settings: Settings,
  *,
  command: str = "",
  json: str | None = None,
  append: bool = False,
  stream: Any = None,
  say: Callable[[str], Any] = print,
) -> dict[str, Any]:
  """Measures, prints a table and keeps the record.

  Args:
    settings: what to measure.
    command: the command line, for the record.
    json: file for the complete result, written after every row.
    append: keeps the rows that `json` holds already.
    stream: where progress goes; default stderr.
    say: prints a line.

  Raises:
    OptionError: as `contest.Record`.
  """
  record = contest.Record(
    "train",
    settings,
    order=lambda row: (PARTS.index(row["part"]), row["name"], row["tokens"]),
    summary=_summary,
    command=command,
    json=json,
    append=append,
  )
  stream = sys.stderr if stream is None else stream
  does = {
    "step": _steps,
    "memory": _memory,
    "scaling": _scaling,
    "utilisation": _utilisation,
  }
  with Alone() as process:
    bench = _Bench(settings, process, stream)
    for part in PARTS:
      if part in settings.parts:
        for row in does[part](bench):
          process.clear()
          record.add(row, last=False)
          for line in _words(row):
            say(line)
  rows = record.result["rows"]
  if rows:
    record.add(rows[-1], last=True)
  for line in _closing(record.result["summary"]):
    say(line)
  return record.result


def _steps(bench: _Bench) -> Any:
  """Times of steps, one row a length."""
  settings = bench.settings
  names = settings.contestants
  for tokens in settings.tokens:
    progress = timing.Progress(
      contest.steps(names, settings.rounds), bench.stream
    )
    report = lambda n, text, tokens=tokens, progress=progress: progress.at(
      n, f"step T={tokens}: {text}"
    )
    report(0, "reference")
    reference = bench.made("ringjax", tokens, 1)[1]
    # It held weights and moments; whoever competes brings its own.
    bench.process.clear()
    make = lambda name, tokens=tokens: bench.made(
      name, tokens, settings.devices
    )
    compare = lambda found, want=reference: contest.compare(
      found, want, TOLERANCE["float32"]
    )
    timings, differences = contest.run(
      names,
      make,
      compare,
      settings.rounds,
      report,
      {"machine": timing.gemm("float32")},
    )
    yield {
      "part": "step",
      "name": "",
      "tokens": tokens,
      "results": {
        name: {"devices": settings.devices if name in _SHARDED else 1}
        | _result(timings[name], differences.get(name))
        for name in names
      },
    }


def _result(one: timing.Timing, difference: float | None) -> dict[str, Any]:
  return {
    "median_s": None if one.reason else one.median_s,
    "seconds": one.seconds,
    "reason": one.reason,
    "max_abs_difference": difference,
  }


def _outputs(loss: Any, grads: Any) -> list[np.ndarray]:
  """The loss, and gradients that every layer takes part in."""
  block = grads.stack.blocks[0][0]
  picked = (loss, grads.embed.weight[...], block.attention.q.weight[...])
  return [np.asarray(x) for x in picked]


def _memory(bench: _Bench) -> Any:
  """The longest row that fits, by doubling; one row a contestant."""
  settings = bench.settings
  for name in settings.contestants:
    sizes: dict[int, int] = {}
    reason, tokens = None, 1024
    while tokens <= settings.longest:
      print(f"memory: {name}, {tokens} tokens", file=bench.stream, flush=True)
      try:
        sizes[tokens] = _bytes(name, settings.preset, tokens, settings.devices)
      except Exception as error:
        reason = timing.reason(error)
        break
      if sizes[tokens] > settings.limit_bytes:
        break
      tokens *= 2
    fit = [n for n, size in sizes.items() if size <= settings.limit_bytes]
    capped = reason is None and len(fit) == len(sizes) > 0
    yield {
      "part": "memory",
      "name": name,
      "tokens": 0,
      "bytes_by_tokens": sizes,
      "longest": max(fit, default=0),
      # It may be that longer ones fit: nobody looked.
      "capped": capped,
      "limit_bytes": settings.limit_bytes,
      "reason": reason,
    }


def _scaling(bench: _Bench) -> Any:
  """Time, and memory of a device, as devices and tokens grow together."""
  settings = bench.settings
  shards = 1
  while shards <= settings.devices:
    tokens = shards * settings.local
    print(f"scaling: {shards} devices", file=bench.stream, flush=True)
    name = "striped" if shards > 1 else "ringjax"
    each, one, difference = None, timing.Timing(), None
    try:
      each = _bytes(name, settings.preset, tokens, shards) // shards
      work, found = bench.made(name, tokens, shards)
      reference = found
      if shards > 1:
        reference = bench.made("ringjax", tokens, 1)[1]
        bench.process.clear()
      difference, wrong = contest.compare(
        found, reference, TOLERANCE["float32"]
      )
      one = timing.Timing(reason=f"WRONG: off by {difference:.1e}")
      if not wrong:
        runs = {name: work}
        one = timing.interleave(runs, settings.rounds, warmup=0)[name]
    except Exception as error:
      one = timing.Timing(reason=timing.reason(error))
    yield {
      "part": "scaling",
      "name": f"{shards:03}",
      "tokens": tokens,
      "devices": shards,
      "bytes_each": each,
    } | _result(one, difference)
    shards *= 2


def _utilisation(bench: _Bench) -> Any:
  """Part of the peak that our steps reach; one row a length and contestant."""
  from ringjax.models import checkpoint
  from ringjax.train import recipe

  settings = bench.settings
  model = checkpoint.abstract(settings.preset, dtype="float32")
  device = jax.devices()[0]
  peak = timing.peak(_FAST, device)
  for tokens in settings.tokens:
    work = recipe.flops(model, tokens) * tokens
    for name in (x for x in settings.contestants if x in OURS):
      print(
        f"utilisation: {name}, {tokens} tokens", file=bench.stream, flush=True
      )
      devices = settings.devices if name in _SHARDED else 1
      try:
        step, _ = bench.made(name, tokens, settings.devices, _FAST)
        runs = {name: step}
        one = timing.interleave(runs, settings.rounds, warmup=0)[name]
      except Exception as error:
        one = timing.Timing(reason=timing.reason(error))
      # The devices of a CPU share its cores.
      whole = peak * (1 if device.platform == "cpu" else devices)
      yield {
        "part": "utilisation",
        "name": name,
        "tokens": tokens,
        "devices": devices,
        "dtype": _FAST,
        "peak_flops": whole,
        "step_flops": work,
        "utilisation": None
        if one.reason or one.median_s is None
        else work / one.median_s / whole,
      } | _result(one, None)


# ---------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------


def _words(row: Row) -> list[str]:
  if row["part"] == "step":
    lines = [f"step, one row of {row['tokens']} tokens"]
    for name, one in row["results"].items():
      if one["reason"]:
        lines.append(f"  {name:<14}{one['reason']}")
      else:
        rate = row["tokens"] / one["median_s"]
        lines.append(
          f"  {name:<14}{one['devices']} devices {one['median_s']:9.3f} s"
          f"{rate:10,.0f} tokens/s"
        )
    return lines
  if row["part"] == "memory":
    shown = ", ".join(
      f"{int(n):,}: {size / 2**30:.2f}"
      for n, size in row["bytes_by_tokens"].items()
    )
    more = " and more" if row["capped"] else ""
    text = f"{row['longest']:,} tokens{more} fit; GiB by tokens {shown}"
    if row["reason"]:
      text = f"{text}; then {row['reason']}" if shown else row["reason"]
    return [f"memory, {row['name']:<14}{text}"]
  text = row["reason"]
  if not text:
    rate = row["tokens"] / row["median_s"]
    text = f"{row['median_s']:.3f} s a step, {rate:,.0f} tokens/s"
  if row["part"] == "utilisation":
    if row["utilisation"] is not None:
      text += (
        f", {100 * row['utilisation']:.1f} % of "
        f"{row['peak_flops'] / 1e12:,.1f} TFLOP/s"
      )
    where = f"{row['name']}, {row['devices']} devices"
    return [f"utilisation, {where}, {row['tokens']:,} tokens: {text}"]
  if row["bytes_each"] is not None:
    text = f"{row['bytes_each'] / 2**20:,.0f} MiB each; {text}"
  return [
    f"scaling, {row['devices']} devices, {row['tokens']:,} tokens: {text}"
  ]


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
  found: dict[str, Any] = {"speed": {}, "longest": {}, "capped": []}
  for row in rows:
    if row["part"] == "step":
      ours = contest.best(row, OURS)
      for name, one in row["results"].items():
        if name not in OURS and ours and not one["reason"]:
          ratio = one["median_s"] / ours[1]
          found["speed"].setdefault(name, {})[str(row["tokens"])] = ratio
    if row["part"] == "memory" and row["longest"]:
      found["longest"][row["name"]] = row["longest"]
      if row.get("capped"):
        found["capped"].append(row["name"])
    if row["part"] == "utilisation" and row["utilisation"] is not None:
      mine = found.setdefault("utilisation", {}).setdefault(row["name"], {})
      mine[str(row["tokens"])] = row["utilisation"]
  return found


def _closing(summary: dict[str, Any]) -> list[str]:
  lines = []
  for name, by_tokens in summary["speed"].items():
    shown = ", ".join(f"{n}: {x:.2f}x" for n, x in by_tokens.items())
    lines.append(f"our best over {name}: {shown}")
  longest, capped = summary["longest"], summary["capped"]
  mine = {name: tokens for name, tokens in longest.items() if name in OURS}
  if not mine:
    return lines
  best = max(mine.values())
  # Whose end was not reached may go further.
  more = any(name in capped for name, n in mine.items() if n == best)
  for name, tokens in longest.items():
    if name in OURS:
      continue
    text = f"longest row, ours over {name}: "
    if name not in capped:
      text += f"{'at least ' if more else ''}{best / tokens:.3g}x"
    elif more:
      text += f"unknown, both fit {tokens:,} tokens and more"
    else:
      text += f"at most {best / tokens:.3g}x"
    lines.append(text)
  return lines
