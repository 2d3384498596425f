"""The sub-commands fastdecode and liger of launch.plan: stages in turns.

fastdecode: rows and CPUs where attention runs next to host caches, and starts
that keep both stages busy. liger: requests whose kernels run side by side.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TextIO

from absl import flags

from ringjax.plan.systems import kernel_window
from ringjax.plan.systems.kernel_window import KernelQueue, WindowRules

from . import strategies

_STEPS, _EVERY = 256, 16
# Simulated time, as a multiple of an answer's steps.
_TURNS = 3


def fastdecode(
  values: flags.FlagValues, stdout: TextIO, stderr: TextIO
) -> None:
  """Prints rows, CPUs and both stages with joint and with staggered starts."""
  # This imports the engine and flax, which other sub-commands don't need.
  from ringjax.serve import cluster

  del stderr
  steps = values.new if values["new"].present else _STEPS
  every = _EVERY if values.every is None else values.every
  prompt = values.prompt if values["prompt"].present else 0
  layers = values.layers if values["layers"].present else 32
  times = cluster.StageTimes(
    fixed_s=values.fixed_seconds,
    row_s=values.row_seconds,
    token_s=values.token_seconds,
    layers=layers,
  )
  plan = cluster.choose_workers(
    times,
    steps,
    answer_s=values.answer_seconds,
    cpu_tokens=values.cpu_tokens,
    every=every,
    prompt=prompt,
  )
  # Round so that all groups are equal.
  rows = max(1, plan.rows * every // steps) * steps // every
  layer_times = dataclasses.replace(times, layers=1)
  joint = cluster.joint_starts(rows, steps, _TURNS, prompt=prompt)
  level = cluster.staggered_starts(
    rows, steps, every, _TURNS * steps // every, prompt=prompt
  )
  results = {
    "together": cluster.simulate_stages(layer_times, plan.cpus, (joint, joint)),
    "staggered": cluster.simulate_stages(
      layer_times, plan.cpus, (level, level), first_step=steps - every
    ),
  }
  record: dict[str, Any] = {
    "steps": steps,
    "every": every,
    "prompt": prompt,
    "plan": dataclasses.asdict(plan),
    "simulated_rows": rows,
    "starts": {
      name: {
        "peak_tokens": x.peak_tokens,
        "weights_busy": x.weights_busy,
        "workers_busy": x.workers_busy,
        "tokens_s": x.tokens_s / layers,
      }
      for name, x in results.items()
    },
  }
  lines = [
    f"answers of {steps:,} tokens to prompts of {prompt:,} on {layers} layers, "
    f"a start each {every} steps",
    f"  rows of a mini-batch  {plan.rows:,} (bound by {plan.bound})",
    f"  CPUs                  {plan.cpus:,} ((S / 2 + p) R E(B) = "
    f"{plan.balanced_cpus:.2f})",
    f"  an answer takes       {plan.answer_s:.3g} s",
    f"  tokens cached         {plan.tokens:,} at most, in both mini-batches",
    "",
    f"{'starts':<12}{'tokens at most':>16}{'weights busy':>14}"
    f"{'workers busy':>14}{'tokens/s':>12}",
  ]
  for name, one_row in record["starts"].items():
    lines.append(
      f"{name:<12}{one_row['peak_tokens']:>16,}"
      f"{100 * one_row['weights_busy']:>12.1f} %"
      f"{100 * one_row['workers_busy']:>12.1f} %{one_row['tokens_s']:>12,.0f}"
    )
  lines += ["", f"simulated with {rows:,} rows a mini-batch"]
  strategies.put(values, stdout, record, lines)


def liger(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Prints how long requests take in turn, alternating and in windows."""
  del stderr
  layers = values.layers if values["layers"].present else 10
  count = values.at_once
  queues = [
    KernelQueue.of_layers(layers, values.product_seconds, values.send_seconds)
  ] * count
  rules = WindowRules(
    factor=values.factor,
    pieces=values.pieces,
    product_slowdown=values.product_slowdown,
    send_slowdown=values.send_slowdown,
  )
  schedules = {
    "in turn": kernel_window.in_turn(queues),
    "windows": kernel_window.windows(queues, rules),
  }
  if count == 2:
    schedules["alternating"] = kernel_window.alternating(*queues)
  record = {
    "requests": count,
    "layers": layers,
    "ways": {
      name: {
        "makespan_s": x.makespan_s,
        "first_s": x.latency_s[0],
        "mean_s": sum(x.latency_s) / count,
      }
      for name, x in schedules.items()
    },
  }
  lines = [
    f"{count} requests of {layers} layers, products "
    f"{values.product_seconds:g} s and collectives {values.send_seconds:g} s",
    f"{'way':<14}{'all done':>10}{'first':>10}{'mean':>10}",
  ]
  for name, row in record["ways"].items():
    lines.append(
      f"{name:<14}{row['makespan_s']:>10.4g}{row['first_s']:>10.4g}"
      f"{row['mean_s']:>10.4g}"
    )
  strategies.put(values, stdout, record, lines)
