"""Times the layers of a model that reads tokens after a cached context.

Guarantees: each sample is the median of runs that are interleaved with the
others' (`timing.interleave`), compiled beforehand. A model of a few layers and
a small vocabulary represents the whole; the row of logits at the end of a call
counts as the call's fixed cost.
"""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
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
  """Times calls of each of `tokens`, without and with a cached prefix.

  The prefix has twice the largest number of tokens.

  Args:
    config: Config of the model, as in config.json.
    tokens: Numbers of new tokens of a call.
    layers: Number of the model's layers to measure.
    rounds: Timed runs of each call.
    dtype: Dtype of weights and keys.
    stream: Stream for progress; default stderr.

  Returns:
    Samples, in seconds for `layers` layers.

  Raises:
    OptionError: If a count is below 1, or a call fails.
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
  runs: dict[str, Callable[[], Any]] = {}
  points: dict[str, tuple[int, int]] = {}

  def call(before: int, count: int, cache: Any) -> Any:
    ids = rng.integers(0, _VOCAB, (1, count)).astype(np.int32)
    positions = (before + np.arange(count)).astype(np.int32)
    rows = np.array([[count - 1]], np.int32)
    args = jax.device_put((ids, positions, rows))
    return lambda: model(
      args[0], positions=args[1], rows=args[2], cache=cache, attend=attend
    )

  for prefix_tokens in (0, 2 * sizes[-1]):
    for count in sizes:
      cache = model.init_cache(1, prefix_tokens + count, sharding=attend)
      if prefix_tokens:
        _, cache = call(0, prefix_tokens, cache)()
      label = f"{count} tokens after {prefix_tokens}"
      runs[label] = call(prefix_tokens, count, cache)
      points[label] = (count, prefix_tokens)
  timings = timing.timed(runs, rounds, stream)
  seconds = lambda label: statistics.median(timings[label].seconds)
  return [
    fit.Sample(tokens=count, before=prefix_tokens, seconds=seconds(label))
    for label, (count, prefix_tokens) in points.items()
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
    ConfigError: If the cost of the model has another form.
    OptionError: If no cost can be fitted to the samples.
  """
  shape = Shape.of(config)
  model_fit = fit.fit(samples)
  scale = shape.layers / layers
  kind = jax.devices()[0].device_kind
  measured = Profile(
    name=name,
    model=f"{model}-{dtype}",
    hardware=re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-"),
    source=f"measured; largest error of the fit {100 * model_fit.error:.0f} %",
    layers=shape.layers,
    token_s=model_fit.token_s * scale,
    pair_s=model_fit.pair_s * scale,
    fixed_s=model_fit.fixed_s * scale,
    kv_bytes=shape.kv_bytes(jax.numpy.dtype(dtype).itemsize),
    early=shape.early,
    kernel=model_fit.kernel,
  )
  return measured, model_fit
