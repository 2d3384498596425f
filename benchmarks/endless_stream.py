"""Loss along a stream of tokens that is longer than the model's context.

Reads files of Python's library as one text, 64 tokens a call, with caches that
evict before each call (StreamingLLM: the first 4 tokens and the newest ones),
and prints a JSON object with the mean loss in nats of each 1,024 tokens:

  sinks:budget=512,positions=cache   a token's position is its index in the
      cache, as in the paper
  sinks:budget=512                   positions of the text
  dense                              all tokens, up to the model's context

  python -m benchmarks.endless_stream --model=smollm2-135m --tokens=12288
"""

from __future__ import annotations

import argparse
import pathlib
import sysconfig
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringjax as rj
from ringjax.data import Tokenizer
from ringjax.errors import RingjaxError
from ringjax.json_text import json_text

_FILES = ("argparse.py", "ast.py", "tarfile.py", "typing.py")
_CALL = 64
_SPAN = 1024
_KINDS = ("sinks:budget=512,positions=cache", "sinks:budget=512", "dense")


@jax.jit
def _read(
  model: rj.models.Transformer, tokens: jax.Array, cache: Any
) -> tuple[jax.Array, Any]:
  """Returns the losses of a call's tokens but the first, and the cache."""
  logits, cache = model(tokens, cache=cache)
  log_probs = jax.nn.log_softmax(logits[0, :-1].astype(jnp.float32))
  losses = -jnp.take_along_axis(log_probs, tokens[0, 1:, None], axis=1)
  return losses[:, 0], cache


def losses_of(
  model: rj.models.Transformer, ids: np.ndarray, kind: str
) -> list[float]:
  """Mean loss of each 1,024 tokens of a text, in nats."""
  if kind == "dense":
    cache = model.init_cache(1, ids.size, kind=kind)
  else:
    cache = model.init_cache(1, 512 + _CALL, kind=kind).limited(ids.size)
  losses = []
  for start in range(0, ids.size, _CALL):
    if kind != "dense":
      cache = cache.evict().with_room(_CALL)
    tokens = jnp.asarray(ids[None, start : start + _CALL])
    call_losses, cache = _read(model, tokens, cache)
    losses.append(float(call_losses.mean()))
  return np.reshape(losses, (-1, _SPAN // _CALL)).mean(1).round(3).tolist()


def main() -> None:
  """Measures and prints losses."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--model", default="smollm2-135m")
  parser.add_argument("--tokens", type=int, default=12 * _SPAN)
  flags = parser.parse_args()
  model = rj.models.load(flags.model, dtype="float32")
  folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
  text = "".join((folder / name).read_text("utf-8") for name in _FILES)
  ids = np.asarray(Tokenizer.load(flags.model).encode(text), np.int32)
  ids = ids[: min(flags.tokens, ids.size) // _SPAN * _SPAN]
  losses: dict[str, list[float] | str] = {}
  for kind in _KINDS:
    count = ids.size
    if kind == "dense":
      longest = model.config.longest or count
      count = min(count, longest // _SPAN * _SPAN)
    try:
      losses[kind] = losses_of(model, ids[:count], kind)
    except RingjaxError as error:
      losses[kind] = str(error)
  print(json_text({"tokens": int(ids.size), "losses": losses}, indent=1))


if __name__ == "__main__":
  main()
