"""Loss and retrieval beyond a model's context, by the way it is extended.

Reads the pages and sources of this repository as one text, 512 tokens a call,
with five numbers hidden in it, and asks for them at its end. Prints a JSON
object with the mean loss in nats of each 1,024 tokens, and for each number the
mean loss of its digits, by the way in which the model was loaded:

  plain        no scaling: rotations that the model has not been trained for
  linear, ntk, dynamic, yarn, dual_chunk, self_extend   see docs/how/longer.md

  python -m benchmarks.longer_than_trained --model=smollm2-135m \\
      --tokens=16384 --out=longer.json --plot=longer.png

A way that --out has already is not measured again: a run that was stopped goes
on where it was.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

import ringjax as rj
from ringjax.bench import timing
from ringjax.data import Tokenizer
from ringjax.json_text import json_text

_ROOT = pathlib.Path(__file__).parents[1]
_CALL = 512
_SPAN = 1024
_WAYS = ("plain", "linear", "ntk", "dynamic", "yarn", "dual_chunk",
         "self_extend")  # fmt: skip
# Numbers that are hidden, by the part of the text before them.
_NUMBERS = {0.02: 83174, 0.25: 20956, 0.5: 61738, 0.75: 49520, 0.95: 37281}


@functools.partial(jax.jit, donate_argnums=(2,))
def _read(
  model: rj.models.Transformer,
  tokens: jax.Array,
  cache: Any,
  following: jax.Array,
  length: jax.Array,
) -> tuple[jax.Array, Any]:
  """Returns the loss of the token that follows each of a call's tokens."""
  logits, cache = model(tokens, cache=cache, length=length)
  log_probs = jax.nn.log_softmax(logits[0].astype(jnp.float32))
  losses = -jnp.take_along_axis(log_probs, following[:, None], axis=1)
  return losses[:, 0], cache


def text_of(
  tokenizer: Tokenizer, count: int
) -> tuple[Int[np.ndarray, " T"], dict[str, slice]]:
  """The text, with numbers in it and questions at its end.

  Returns:
    Ids [count], and for each number the tokens of its digits in the answer.
  """
  encode = lambda text: np.asarray(tokenizer.encode(text)).tolist()
  files = [*sorted((_ROOT / "docs").glob("*.md"))]
  files += sorted((_ROOT / "ringjax").rglob("*.py"))
  ids: list[int] = []
  for file in files:
    ids += encode(file.read_text("utf-8"))
    if len(ids) >= count:
      break
  parts: list[int] = []
  questions: list[int] = []
  answers: dict[str, tuple[int, int]] = {}
  for depth, number in _NUMBERS.items():
    name = f"{depth:.0%}"
    question = f"\nThe secret number of box {int(100 * depth)} is"
    questions += encode(question)
    digits = encode(f" {number}")
    answers[name] = (len(questions), len(questions) + len(digits))
    questions += digits + encode(".\n")
  body = count - len(questions)
  for depth, number in _NUMBERS.items():
    hidden = encode(
      f"\n\nThe secret number of box {int(100 * depth)} is {number}.\n\n"
    )
    parts += ids[len(parts) : int(depth * body)] + hidden
  parts = (parts + ids[len(parts) :])[:body]
  spans = {k: slice(body + a, body + b) for k, (a, b) in answers.items()}
  return np.asarray(parts + questions, np.int32), spans


def losses_of(
  model: rj.models.Transformer, ids: Int[np.ndarray, " T"]
) -> Float[np.ndarray, " _"]:
  """Loss of each token of a text but the first, in nats."""
  cache = model.init_cache(1, ids.size)
  losses = []
  for start in range(0, ids.size, _CALL):
    tokens = jnp.asarray(ids[None, start : start + _CALL])
    following = np.resize(ids[start + 1 : start + 1 + _CALL], tokens.size)
    call_losses, cache = _read(
      model, tokens, cache, jnp.asarray(following), jnp.int32(ids.size)
    )
    losses.append(np.asarray(call_losses))
  return np.concatenate(losses)[: ids.size - 1]


def measure(
  name: str, way: str, factor: int, ids: np.ndarray, answers: dict[str, slice]
) -> dict[str, Any]:
  """Figures of one way."""
  scaling = None if way == "plain" else f"{way}:factor={factor}"
  model = rj.models.load(name, dtype="float32", rope_scaling=scaling)
  losses = losses_of(model, ids)
  of_text = losses[: min(x.start for x in answers.values()) - 8]
  spans = np.array_split(of_text, max(1, round(of_text.size / _SPAN)))
  return {
    "rope_scaling": scaling,
    "losses": [round(float(x.mean()), 3) for x in spans],
    "numbers": {
      depth: round(float(losses[x.start - 1 : x.stop - 1].mean()), 3)
      for depth, x in answers.items()
    },
  }


def draw(record: dict[str, Any], path: str) -> None:
  """Draws the losses along the text."""
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(figsize=(7, 4))
  for way, figures in record["ways"].items():
    span = record["tokens"] / len(figures["losses"])
    places = span * (np.arange(len(figures["losses"])) + 0.5)
    axes.plot(places, figures["losses"], label=way)
  axes.axvline(record["context"], color="gray", linestyle=":")
  axes.set_xlabel("position")
  axes.set_ylabel("loss, nats per token")
  axes.set_ylim(0, 8)
  axes.legend()
  figure.savefig(path, bbox_inches="tight")


def main() -> None:
  """Measures and prints losses."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--model", default="smollm2-135m")
  parser.add_argument("--tokens", type=int, default=16384)
  parser.add_argument("--ways", default=",".join(_WAYS))
  parser.add_argument("--out", default=None)
  parser.add_argument("--plot", default=None)
  flags = parser.parse_args()
  count = flags.tokens // _CALL * _CALL
  ids, answers = text_of(Tokenizer.load(flags.model), count)
  context = rj.models.load(flags.model).config.longest
  assert context is not None
  record: dict[str, Any] = {
    "model": flags.model, "tokens": count, "context": context, "ways": {},
  }  # fmt: skip
  if flags.out is not None and os.path.exists(flags.out):
    earlier = json.loads(pathlib.Path(flags.out).read_text("utf-8"))
    if all(earlier[k] == record[k] for k in ("model", "tokens", "context")):
      record = earlier
  factor = max(2, -(-count // context))
  for way in flags.ways.split(","):
    if way not in record["ways"]:
      record["ways"][way] = measure(flags.model, way, factor, ids, answers)
      if flags.out is not None:
        timing.write_json(flags.out, record)
  if flags.plot is not None:
    draw(record, flags.plot)
  print(json_text(record, indent=1))


if __name__ == "__main__":
  main()
