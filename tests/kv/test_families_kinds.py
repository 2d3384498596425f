"""Every family's calls fit every kind of cache: they trace, two in a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.kv import kind_text
from tests import checkpoints

# Those that want to be calibrated on the model first.
CALIBRATED = ("nuq4", "nuq3", "nuq2")
KINDS = [name for name in rj.kv.KINDS if name not in CALIBRATED]
# Families with a rotation that policies do not do outside of a call.
LEARNED_ROTATION = ("mistral_large4",)
# Families that refuse to drop keys, and what the error says of them.
KEEPS_ALL = {
  "deepseek_v4": "compressed keys",
  "glm5_next": "PooledLatent",
  "minimax_m3_vl": "IndexBlockAttention",
  "qwen4_exp": "PooledBlockAttention",
}


def two_calls(model, kind):
  cache = model.init_cache(2, 32, kind=kind)
  _, cache = model(jnp.ones((2, 9), jnp.int32), cache=cache)
  logits, cache = model(jnp.ones((2, 1), jnp.int32), cache=cache)
  return logits, cache.length


def check(name, kinds):
  """No kind is one that a family's layers don't know, whatever they are."""
  model = rj.models.abstract(checkpoints.config(name), dtype=jnp.float32)
  for kind in map(kind_text.parse, kinds):
    if name in KEEPS_ALL and (kind.policy is not None or kind.evicting):
      with pytest.raises(OptionError, match=KEEPS_ALL[name]):
        two_calls(model, kind)
      continue
    if name in LEARNED_ROTATION and kind == kind_text.parse("expected"):
      with pytest.raises(OptionError, match="learned factors"):
        two_calls(model, kind)
      continue
    logits, length = jax.eval_shape(lambda m, k=kind: two_calls(m, k), model)
    assert logits.shape == (2, 1, model.config.vocab), kind
    assert length.shape == (2,), kind


@pytest.mark.long
@pytest.mark.parametrize("name", ["mpt", "nemotron_h"])
def test_some_kinds_are_read_after_a_prompt(name):
  check(name, ["int8", "snapkv"])


@pytest.mark.slow
@pytest.mark.parametrize("name", checkpoints.names())
def test_every_kind_is_read_after_a_prompt(name):
  check(name, KINDS)
