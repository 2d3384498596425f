"""The sub-command offload of launch.plan: placement in three memory tiers.

It searches the policy of the most tokens a second, or predicts the speed of
--policy; --paper prints the published policies next to ours; --machine=here
measures this machine first.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any, TextIO

from absl import flags

from ringjax.errors import OptionError, RingjaxError
from ringjax.plan import draw
from ringjax.plan.flexgen import offload, offload_costs, offload_tiers
from ringjax.plan.flexgen.offload_costs import (
  KINDS,
  PARTS,
  OffloadPolicy,
  OffloadTask,
)
from ringjax.plan.flexgen.offload_tiers import (
  TIERS,
  OffloadMachine,
  OffloadShape,
)

from ..shared import common, console
from . import aot, strategies

NAME = "plan"
HERE = "here"
_MODEL, _MACHINE = "opt-30b", "t4"
_MEASURING_FLAGS = ("folder", "megabytes", "out", "rounds")
_SEARCH_FLAGS = ("most_rows",)
NOTE = (
  "predicted from the machine's rates; launches, latencies and decoding 4-bit "
  "numbers are left out, and layers with a window count as if they saw all"
)


def offloaded(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Prints the best placement, or the predicted speed of --policy."""
  common.check_plot(values)
  common.check_output(values, "out")
  screen = console.Screen(NAME, stderr)
  if values.paper:
    strategies.refuse(
      values, "offload --paper", ("model", "policy", "plot", *_MEASURING_FLAGS)
    )
    if values.machine == HERE:
      raise OptionError(
        "--machine",
        f"{HERE} with --paper",
        "a stated machine, or the path of a measured one",
        "measure it first, with --out=FILE and no --paper",
      )
    _published(values, screen, stdout)
    return
  names = values.model or [_MODEL]
  if len(names) > 1:
    raise OptionError(
      "--model", ",".join(names), "one model", "pass one name or folder"
    )
  task = OffloadTask(
    prompt=values.prompt,
    new=values.new,
    form=values.form,
    working=values.working,
    weight_bits=int(values.weight_bits),
    cache_bits=int(values.cache_bits),
    host_attention=values.host_attention,
  )
  block = fixed = None
  if values.policy is not None and ":" in values.policy:
    fixed = OffloadPolicy.parse(values.policy)
    strategies.refuse(values, "--policy with a placement", _SEARCH_FLAGS)
  elif values.policy is not None:
    # Only the block is given: add any placement so that the text parses.
    block = OffloadPolicy.parse(f"{values.policy}:0/100,0/100,0/100")
  shape = shape_of(names[0])
  machine = _machine(values, screen, stderr)
  if fixed is not None:
    estimate = offload_costs.estimate(shape, machine, task, fixed)
    plan = offload.OffloadPlan(
      shape=shape,
      machine=machine,
      task=task,
      policy=fixed,
      estimate=estimate,
      tried=0,
      why=tuple(offload.reasons(estimate, fixed, task)),
    )
  else:
    screen.begin("solving linear programs", unit="blocks")
    tried = 0

    def on_block(rows: int, batches: int) -> None:
      nonlocal tried
      del rows, batches
      tried += 1
      screen.at(tried)

    try:
      plan = offload.plan(
        shape,
        machine,
        task,
        rows=None if block is None else block.rows,
        batches=None if block is None else block.batches,
        most_rows=values.most_rows,
        on_block=on_block,
      )
    finally:
      screen.end()
  record = {**plan.record(), "note": NOTE}
  strategies.put(values, stdout, record, list(_lines(plan)))
  if values.plot is not None:
    draw.tiers(
      {tier: dict(x) for tier, x in plan.estimate.final_bytes.items()},
      dict(plan.estimate.peak),
      dict(plan.estimate.limit),
      {"prefill": dict(plan.estimate.prefill),
       "decode": dict(plan.estimate.decode)},
      values.plot,
      _title(plan),
    )  # fmt: skip
    screen.say(f"wrote {values.plot}")


def shape_of(name: str) -> OffloadShape:
  """The sizes of a preset, of an OPT model or of a folder's config.json.

  Raises:
    OptionError: If `name` is not one of these.
    ConfigError: If the config is not supported.
  """
  if name in offload_tiers.OPT:
    return OffloadShape.opt(name)
  # These import the models and flax, which other sub-commands don't need.
  from ringjax.models.checkpoint import abstract
  from ringjax.models.work_profile import offload_shape

  try:
    config = aot.config_of(name)
  except OptionError as error:
    raise OptionError(
      f"{error}; or one of {', '.join(offload_tiers.OPT)}"
    ) from None
  return offload_shape(abstract(config), pathlib.Path(name).name)


def _machine(
  values: flags.FlagValues, screen: console.Screen, stderr: TextIO
) -> OffloadMachine:
  """The machine of the flags; --machine=here measures this one."""
  name = values.machine or _MACHINE
  if name == HERE:
    # This starts JAX's devices, which stated machines don't need.
    from ringjax.bench import storage_rates

    common.quiet_logging()
    machine = storage_rates.measure(
      values.folder or ".",
      nbytes=values.megabytes << 20,
      rounds=values.rounds,
      stream=stderr,
    )
  else:
    strategies.refuse(values, f"--machine={name}", _MEASURING_FLAGS)
    machine = offload_tiers.load(name)
  changed: dict[str, Any] = {}
  for tier in TIERS:
    gigabytes = values[f"{tier}_gb"].value
    if gigabytes is not None:
      changed[f"{tier}_bytes"] = 1e9 * float(gigabytes)
  if values.usable is not None:
    changed["usable"] = values.usable
  if changed:
    machine = dataclasses.replace(machine, **changed)
  if values.out is not None:
    offload_tiers.write(values.out, machine)
    screen.say(f"wrote {values.out}; use it with --machine={values.out}")
  return machine


# ---------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------


def _title(plan: offload.OffloadPlan) -> str:
  task = plan.task
  bits = "".join(
    f", {name} in 4 bits"
    for name, n in (("weights", task.weight_bits), ("cache", task.cache_bits))
    if n == 4
  )
  return (
    f"{plan.shape.name} on {plan.machine.name}: {task.new} tokens after "
    f"prompts of {task.prompt:,}{bits}, form {task.form!r}"
  )


def _lines(plan: offload.OffloadPlan) -> Iterator[str]:
  estimate, policy = plan.estimate, plan.policy
  yield _title(plan)
  yield f"machine: {plan.machine.source}"
  yield ""
  yield (
    f"block {policy.rows} rows x {policy.batches} batches: "
    f"{estimate.tokens_s:.3g} tokens/s; prompts {estimate.prefill_s:.4g} s, "
    f"tokens {estimate.decode_s:.4g} s"
  )
  yield f"--policy={policy}"
  yield ""
  rows = []
  for i, tier in enumerate(TIERS):
    shares = (f"{100 * getattr(policy, kind)[i]:.1f} %" for kind in KINDS)
    rows.append((tier, *shares,
                 console.nbytes(sum(estimate.final_bytes[tier].values())),
                 console.nbytes(estimate.peak[tier]),
                 console.nbytes(estimate.limit[tier])))  # fmt: skip
  yield from strategies.markdown(
    ("tier",), (*KINDS, "kept", "peak", "may be filled"), rows
  )
  yield ""
  yield from strategies.markdown(
    ("ms of a layer",),
    (*(part.replace("_", " ") for part in PARTS), "binds"),
    [
      (phase, *(f"{1e3 * times[part]:.3g}" for part in PARTS),
       estimate.binds[phase].replace("_", " "))
      for phase, times in (("prefill", estimate.prefill),
                           ("decode", estimate.decode))
    ],
  )  # fmt: skip
  if not estimate.fits:
    full = [t for t in TIERS if estimate.peak[t] > estimate.limit[t]]
    yield ""
    yield f"it does not fit: the peak of {', '.join(full)} is too large"
  yield ""
  yield "why"
  yield from (f"  {text}" for text in plan.why)
  if plan.tried:
    yield f"  the best of {plan.tried} blocks that were tried"
  yield ""
  yield NOTE


# ---------------------------------------------------------------------------
# Published policies
# ---------------------------------------------------------------------------


def _published(
  values: flags.FlagValues, screen: console.Screen, stdout: TextIO
) -> None:
  machine = offload_tiers.load(values.machine or _MACHINE)
  rows = []
  screen.begin("searching", len(offload_tiers.PUBLISHED), "rows")
  for number, published in enumerate(offload_tiers.PUBLISHED):
    shape = OffloadShape.opt(published["model"])
    row: dict[str, Any] = dict(published)
    for form in offload_costs.FORMS:
      task = OffloadTask(prompt=published["prompt"], form=form)
      policy = OffloadPolicy.parse(published["policy"])
      estimate = offload_costs.estimate(shape, machine, task, policy)
      row[form] = estimate.tokens_s
    row["best"] = _best(
      shape, machine, OffloadTask(prompt=published["prompt"], form="code")
    )
    rows.append(row)
    screen.at(number + 1)
  screen.end()
  forms = offload_costs.FORMS
  lines = [
    f"tokens/s of {machine.name}: as published, of the published policy by "
    "each form, and of the best that the form code finds",
    "",
    *strategies.markdown(
      ("model", "policy"),
      ("prompt", "published", *forms, "code: best"),
      [
        (row["model"], row["policy"], f"{row['prompt']}",
         f"{row['tokens_s']:.4g}",
         *(f"{row[form]:.4g}" for form in forms),
         _rate(row["best"]))
        for row in rows
      ],
    ),
    "",
    NOTE,
  ]  # fmt: skip
  record = {"machine": machine.record(), "rows": rows, "note": NOTE}
  strategies.put(values, stdout, record, lines)


def _best(
  shape: OffloadShape, machine: OffloadMachine, task: OffloadTask
) -> float | None:
  try:
    return offload.plan(shape, machine, task, near=0.0).estimate.tokens_s
  except RingjaxError:
    return None


def _rate(rate: float | None) -> str:
  return "none fits" if rate is None else f"{rate:.4g}"
