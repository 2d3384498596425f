"""Times a small model's steps, next to the least time that they can take.

The model is of Llama's family with random weights, on the first device of each
process. The floor of a step is the larger of two times: that of its FLOPs at
the rate of a product of large matrices, and that of reading the bytes that it
must read at the memory's rate, both as measured on this device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.bench import step_bytes, timing
from ringjax.bench.doctor.findings import OK, SLOW, WRONG, Findings
from ringjax.bench.doctor.rates import DeviceRates
from ringjax.infer import decode, prefill
from ringjax.infer.sampling import Greedy, traced
from ringjax.kv.base import bytes_each
from ringjax.models import work_profile
from ringjax.models.checkpoint import create
from ringjax.nn.sharding_context import CachedAttention, ContextParallel
from ringjax.train import batch as batches
from ringjax.train import recipe
from ringjax.train import step as training

PART = "model"
# Share of the floor's rate below which a step is slow.
SLOW_SHARE = 0.25
_ROUNDS = 4
# AdamW reads and writes a weight and two moments, and reads a gradient that was
# written: float32 numbers for each parameter.
_UPDATE_NUMBERS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSize:
  """Size of the model and of its calls.

  Attributes:
    embed: Width.
    heads: Query heads; half as many heads of keys.
    layers: Number of layers.
    vocab: Number of token ids.
    tokens: Tokens of the prompt, and of a row in training.
    dtype: Dtype of weights and cache, and of products in training.
  """

  embed: int
  heads: int
  layers: int
  vocab: int
  tokens: int
  dtype: str

  def config(self) -> dict[str, Any]:
    """The model's config.json."""
    return {
      "model_type": "llama",
      "vocab_size": self.vocab,
      "hidden_size": self.embed,
      "intermediate_size": 4 * self.embed,
      "num_hidden_layers": self.layers,
      "num_attention_heads": self.heads,
      "num_key_value_heads": self.heads // 2,
      "hidden_act": "silu",
      "max_position_embeddings": 2 * self.tokens,
      "rms_norm_eps": 1e-5,
      "rope_theta": 10000.0,
      "tie_word_embeddings": False,
    }


# A CPU's is larger than its caches; a chip's steps are longer than a launch.
SIZES = {
  "cpu": ModelSize(
    embed=512, heads=8, layers=4, vocab=8192, tokens=256, dtype="float32"
  )
}
LARGE = ModelSize(
  embed=2048, heads=16, layers=4, vocab=32768, tokens=2048, dtype="bfloat16"
)


def check(
  findings: Findings, rates: DeviceRates, size: ModelSize | None = None
) -> None:
  """Adds a finding for a prefill, a decode step and a training step.

  Args:
    findings: Findings to add to.
    rates: Rates of the first device of this process.
    size: Size of the model; default: by the platform.
  """
  size = size or SIZES.get(rates.device.platform, LARGE)
  with jax.default_device(rates.device):
    with findings.guarded(PART, "answering"):
      _check_answers(findings, rates, size)
    with findings.guarded(PART, "training step"):
      _check_training(findings, rates, size)


def _check_answers(
  findings: Findings, rates: DeviceRates, size: ModelSize
) -> None:
  model = create(size.config(), dtype=size.dtype)
  attend, around = ContextParallel(), CachedAttention(replicated=False)
  tokens = size.tokens
  ids = _ids(size, tokens)
  # Calls donate their cache: each prefill needs another one.
  caches = [
    model.init_cache(1, tokens + 2 * _ROUNDS + 2, sharding=around)
    for _ in range(_ROUNDS + 1)
  ]
  call = (ids, None, jnp.ones_like(ids))
  last = (jnp.full(1, tokens - 1, jnp.int32), jnp.int32(tokens))
  outputs: list[Any] = []

  def read_prompt() -> jax.Array:
    outputs[:] = [prefill.read(model, attend, *call, caches.pop(), *last)]
    return outputs[0][0]

  (prefill_time,) = timing.timed(
    {"prefill": read_prompt}, _ROUNDS, rates.stream
  ).values()
  logits, cache = outputs[0]
  stops = decode.stop_ids(())
  sampler = traced(Greedy())
  state = decode.first(
    sampler, logits, jnp.full(1, tokens, jnp.int32), None, stops
  )
  carry = [state, cache]

  def take_step() -> jax.Array:
    carry[:] = decode.step(
      model, around, sampler, carry[1], carry[0], stops, jnp.int32(tokens)
    )
    return carry[0].token

  (step_time,) = timing.timed(
    {"decode step": take_step}, 2 * _ROUNDS, rates.stream
  ).values()
  is_finite = bool(jnp.isfinite(logits).all())
  work = work_profile.profile(model, tokens)
  head_flops = 2.0 * size.vocab * size.embed
  weight_bytes = step_bytes.weight_bytes(model, 1)
  cache_bytes = bytes_each(cache)
  pairs = tokens * (tokens + 1) / 2
  judge = _Judge(findings, rates, size, is_finite)
  judge.add(
    f"prefill of {tokens} tokens",
    min(prefill_time.seconds),
    flops=work.token_s * tokens + work.pair_s * pairs + head_flops,
    nbytes=weight_bytes,
  )
  judge.add(
    f"decode step after {tokens} tokens",
    min(step_time.seconds),
    flops=work.token_s + work.pair_s * tokens + head_flops,
    nbytes=weight_bytes + cache_bytes,
  )


def _check_training(
  findings: Findings, rates: DeviceRates, size: ModelSize
) -> None:
  model = create(size.config())
  optimizer = recipe.Optimizer().build(1000)
  attend = ContextParallel()
  objective = training.Objective(dtype=recipe.dtype_of(size.dtype))
  step = training.make_step(optimizer, attend, objective)
  rows = batches.whole_rows(np.asarray(_ids(size, size.tokens + 1)))
  batch = batches.place(rows, attend)
  count = sum(x.size for x in jax.tree.leaves(model))
  flops = recipe.flops(model, size.tokens) * size.tokens
  carry: list[Any] = [training.start(optimizer, model)]

  def take_step() -> Any:
    state, metrics = step(carry[0], None, batch)
    carry[:] = [state, metrics]
    return metrics.loss

  (measured,) = timing.timed(
    {"training step": take_step}, _ROUNDS, rates.stream
  ).values()
  judge = _Judge(findings, rates, size, bool(carry[1].finite == 1))
  judge.add(
    f"training step of {size.tokens} tokens",
    min(measured.seconds),
    flops=flops,
    nbytes=4.0 * _UPDATE_NUMBERS * count,
  )


@dataclasses.dataclass(frozen=True)
class _Judge:
  """Adds findings of steps.

  Attributes:
    findings: Findings to add to.
    rates: Rates of the device.
    size: Size of the model.
    is_finite: Whether the step's results are numbers.
  """

  findings: Findings
  rates: DeviceRates
  size: ModelSize
  is_finite: bool

  def add(
    self, name: str, seconds: float, *, flops: float, nbytes: float
  ) -> None:
    """Adds the finding of a step that takes `seconds`."""
    product_s = flops / self.rates.product(self.size.dtype)
    # Too small a machine's read may be lost in noise.
    rate = self.rates.read
    read_s = nbytes / rate if rate > 0 else 0.0
    floor_s = max(product_s, read_s)
    bound = "products" if product_s >= read_s else "memory"
    share = floor_s / seconds
    text = (
      f"{1e3 * seconds:,.2f} ms; floor {1e3 * floor_s:,.2f} ms ({bound}): "
      f"{100 * share:.0f} %"
    )
    status = SLOW if share < SLOW_SHARE else OK
    if not self.is_finite:
      status, text = WRONG, f"results are not finite; {text}"
    figures = {"seconds": seconds, "floor_s": floor_s, "share": share}
    self.findings.add(PART, name, status, text, figures=figures)


def _ids(size: ModelSize, count: int) -> jax.Array:
  rng = np.random.default_rng(0)
  return jnp.asarray(rng.integers(0, size.vocab, (1, count)), jnp.int32)
