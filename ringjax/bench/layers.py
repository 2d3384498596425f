"""Times the layers of a model that reads tokens behind a cached context.

Guarantees: each sample is the median of runs that are interleaved with the
others' (`timing.interleave`), compiled beforehand. A model of a few layers and
a small vocabulary stands for the whole; the row of logits at the end of a call
counts as the call's fixed cost.
"""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import jax
import numpy as np

from ringjax.bench import timing
from ringjax.checks import positive_int
from ringjax.models.checkpoint import create
from ringjax.nn.sharding_context import CachedAttention
from ringjax.plan import fit
from ringjax.plan.cost import Profile, Shape

_VOCAB = 512


def measure(
  config: Mapping[str, Any],
  tokens: Sequence[int],
  *,
  layers: int = 2,
  rounds: int = 5,
  dtype: str = "float32",
  stream: TextIO | io.TextIOBase | None = None,
) -> list[fit.Sample]:
  """Times calls of each of `tokens`, first and behind twice the most tokens.

  Args:
    config: of the model, as in config.json.
    tokens: new tokens of a call.
    layers: how many of the model's layers are measured.
    rounds: timed runs of each.
    dtype: of weights and keys.
    stream: where progress is shown; default stderr.

  Returns:
    Samples, in seconds for `layers` layers.

  Raises:
    OptionError: a count is below 1, or a call fails.
  """
  positive_int("rounds", rounds)
  sizes = sorted({positive_int("tokens", n) for n in tokens})
  small = {
    **config,
    "num_hidden_layers": positive_int("layers", layers),
    "vocab_size": _VOCAB,
  }
  model = create(small, dtype=dtype)
  attend = CachedAttention(replicated=False)
  rng = np.random.default_rng(0)
  runs, points = {}, {}

  def call(before: int, count: int, cache: Any) -> Any:
    ids = rng.integers(0, _VOCAB, (1, count)).astype(np.int32)
    positions = (before + np.arange(count)).astype(np.int32)
    rows = np.array([[count - 1]], np.int32)
    args = jax.device_put((ids, positions, rows))
    return lambda: model(
      args[0], positions=args[1], rows=args[2], cache=cache, attend=attend
    )

  for before in (0, 2 * sizes[-1]):
    for count in sizes:
      cache = model.init_cache(1, before + count, sharding=attend)
      if before:
        _, cache = call(0, before, cache)()
      label = f"{count} tokens behind {before}"
      runs[label] = call(before, count, cache)
      points[label] = (count, before)
  found = timing.timed(runs, rounds, stream)
  seconds = lambda label: statistics.median(found[label].seconds)
  return [
    fit.Sample(tokens=count, before=before, seconds=seconds(label))
    for label, (count, before) in points.items()
  ]


def profile(
  name: str,
  model: str,
  config: Mapping[str, Any],
  samples: Sequence[fit.Sample],
  *,
  layers: int,
  dtype: str,
) -> tuple[Profile, fit.Fit]:
  """The profile of a whole model from samples of `layers` of its layers.

  Raises:
    ConfigError: a model whose cost has another form.
    OptionError: samples from which no cost can be fitted.
  """
  shape = Shape.of(config)
  found = fit.fit(samples)
  whole = shape.layers / layers
  kind = jax.devices()[0].device_kind
  made = Profile(
    name=name,
    model=f"{model}-{dtype}",
    hardware=re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-"),
    source=f"measured; largest error of the fit {100 * found.error:.0f} %",
    layers=shape.layers,
    token_s=found.token_s * whole,
    pair_s=found.pair_s * whole,
    fixed_s=found.fixed_s * whole,
    kv_bytes=shape.kv_bytes(jax.numpy.dtype(dtype).itemsize),
    early=shape.early,
    kernel=found.kernel,
  )
  return made, found
