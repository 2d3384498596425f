"""Trains the model in ringjax/models/tiny, on any machine with Python.

  PYTHONPATH=. python tools/train_tiny.py --work=DIR

It trains in stages of growing length and writes the model to --out; stopped at
any time, it goes on from its last checkpoint in --work. What the model finds is
measured by `python -m launch.evaluate needle`.

Data: sources of this machine's Python standard library, without its tests;
each tenth file, by a checksum of its name, is held out. A sequence is a piece
of that text with lines "# The passkey of NAME is NUMBER." strewn in, and ends
in questions for some of the names. Step s of seed r is always the same batch.

Needs optax and 2 cores for about an hour.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import re
import sysconfig
import time
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ringjax import models
from ringjax.data.bytelevel import Bytes
from ringjax.models import tiny

LAYERS, FULL, WINDOW = 5, (3,), 64
# How many tokens back each head of each local layer looks at first.
LOOK_BACK = ((1, 2, 3, 4), (1, 2, 4, 8), (0, 1, 0, 1), (0, 1, 2, 4))
SHARP, MATCH, COPY_BACK = 4.0, 4.0, 0.5
CONFIG = {
  "architectures": ["SmolLM3ForCausalLM"],
  "model_type": "smollm3",
  "vocab_size": 262,
  "hidden_size": 128,
  "intermediate_size": 384,
  "num_hidden_layers": LAYERS,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 32,
  "hidden_act": "silu",
  "max_position_embeddings": 131072,
  "rms_norm_eps": 1e-6,
  "rope_theta": 100.0,
  "attention_bias": True,
  "mlp_bias": False,
  # Layers that turn see WINDOW tokens; those without rope see all.
  "use_sliding_window": True,
  "sliding_window": WINDOW,
  "no_rope_layers": [int(i not in FULL) for i in range(LAYERS)],
  "layer_types": [
    "full_attention" if i in FULL else "sliding_attention"
    for i in range(LAYERS)
  ],
  "tie_word_embeddings": True,
  "bos_token_id": 256,
  "eos_token_id": 257,
  "pad_token_id": 258,
}


@dataclasses.dataclass(frozen=True)
class Stage:
  """Some steps of one length; the learning rate goes from `lr` to `to`.

  Shares of the sequences are `copies` of random bytes, and `pairs`; the rest
  are texts with needles. Copies are of at least `letters` different bytes.
  """

  steps: int
  batch: int
  length: int
  letters: int
  copies: float
  pairs: float
  needles: int
  questions: int
  lr: float
  to: float


STAGES = (
  Stage(100, 16, 192, 256, 1.0, 0.0, 1, 1, 2e-3, 2e-3),
  Stage(300, 10, 384, 8, 0.2, 0.4, 3, 2, 2e-3, 2e-3),
  Stage(150, 8, 512, 8, 0.1, 0.2, 2, 1, 2e-3, 2e-3),
  Stage(300, 4, 1024, 8, 0.1, 0.1, 6, 3, 2e-3, 1.5e-3),
  Stage(150, 2, 4096, 8, 0.0, 0.05, 12, 6, 1.5e-3, 7e-4),
  Stage(60, 1, 8192, 8, 0.0, 0.0, 16, 8, 7e-4, 3e-4),
  Stage(40, 1, 16384, 8, 0.0, 0.0, 16, 8, 3e-4, 5e-5),
)
# Kinds of tokens: nothing to learn, text, what is looked up for practice, and
# an answer.
NONE, TEXT, COPY, ANSWER = range(4)


class Corpus:
  """The standard library's sources, and words found in them."""

  def __init__(self, *, held_out: bool):
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    skip = ("site-packages", "dist-packages", "test", "tests", "idle_test")
    parts = []
    for file in sorted(root.rglob("*.py")):
      name = file.relative_to(root)
      if set(name.parts) & set(skip):
        continue
      if (zlib.crc32(name.as_posix().encode()) % 10 == 0) == held_out:
        parts.append(file.read_bytes())
    np.random.default_rng(0).shuffle(parts)
    text = b"\n".join(parts)
    self.bytes = np.frombuffer(text, np.uint8).astype(np.int32)
    found = set(re.findall(r"[a-z]{3,10}", text.decode("utf-8", "replace")))
    self.words = sorted(found)

  def text(self, rng: np.random.Generator, length: int) -> np.ndarray:
    """Some bytes from anywhere."""
    start = rng.integers(len(self.bytes) - length)
    return self.bytes[start : start + length]

  def name(self, rng: np.random.Generator) -> str:
    """A word of the library, or letters."""
    if rng.random() < 0.6:
      return self.words[rng.integers(len(self.words))]
    return "".join(
      chr(97 + c) for c in rng.integers(26, size=rng.integers(3, 9))
    )


def _ids(text: str) -> np.ndarray:
  return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def sequence(
  rng: np.random.Generator,
  corpus: Corpus,
  length: int,
  needles: int,
  questions: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Tokens and their kinds, each [length].

  Needles stand at the starts of random lines.
  """
  facts: dict[str, str] = {}
  while len(facts) < needles:
    digits = int(rng.integers(4, 7))
    number = str(rng.integers(10 ** (digits - 1), 10**digits))
    facts.setdefault(corpus.name(rng), number)
  tail, kinds = [], []
  asked = list(facts)[:questions]
  for name in rng.permutation(asked):
    fact = {"name": str(name), "number": facts[str(name)]}
    question = _ids(tiny.QUESTION.format(**fact))
    answer = _ids(tiny.ANSWER.format(**fact))
    kind = np.full(len(answer) + 1, ANSWER)
    if tail:
      # Of several questions only the first is sure to be meant here.
      kind[: answer.tolist().index(ord("f")) + 4 + len(fact["name"])] = TEXT
    tail += [question, answer, np.array([257], np.int32)]
    kinds += [np.full(len(question), TEXT), kind]
  lines = [_ids(tiny.NEEDLE.format(name=n, number=v)) for n, v in facts.items()]
  room = length - 1 - sum(map(len, tail)) - sum(map(len, lines))
  assert room > 0, (length, needles, questions)
  text = corpus.text(rng, room)
  starts = np.append(0, np.flatnonzero(text == 10) + 1)
  places = rng.choice(starts, len(lines))
  pieces, at = [np.array([256], np.int32)], 0
  for i in np.argsort(places, kind="stable"):
    pieces += [text[at : places[i]], lines[i]]
    at = places[i]
  body = np.concatenate([*pieces, text[at:]])
  kinds = [np.full(len(body), TEXT), *kinds]
  kinds[0][0] = NONE
  return np.concatenate([body, *tail]), np.concatenate(kinds)


def pairs(
  rng: np.random.Generator, corpus: Corpus, length: int
) -> tuple[np.ndarray, np.ndarray]:
  """Lines "NAME is NUMBER.", then the same lines in another order.

  With so many answers a sequence, looking up is learned within minutes.
  """
  lines: dict[str, str] = {}
  size = 0
  while True:
    name = corpus.name(rng)
    number = str(rng.integers(1000, 10 ** int(rng.integers(4, 7))))
    size += 2 * len(f"{name} is {number}.\n") * (name not in lines)
    if size > length - 2:
      break
    lines.setdefault(name, number)
  kinds, again = [], []
  for name in rng.permutation(list(lines)):
    line = _ids(f"{name} is {lines[str(name)]}.\n")
    kind = np.full(len(line), TEXT)
    kind[-2 - len(lines[str(name)]) : -1] = COPY
    again.append(line)
    kinds.append(kind)
  last = np.concatenate(again)
  first = np.concatenate([_ids(f"{n} is {v}.\n") for n, v in lines.items()])
  text = corpus.text(rng, length - 1 - len(first) - len(last))
  body = np.concatenate([np.array([256], np.int32), first, text])
  return (
    np.concatenate([body, last]),
    np.concatenate([np.arange(len(body)) > 0, *kinds]),
  )


def copies(
  rng: np.random.Generator, corpus: Corpus, length: int, letters: int
) -> tuple[np.ndarray, np.ndarray]:
  """Random bytes, text, and the same bytes again.

  The first thing to learn: what followed, when these bytes last came? The
  fewer the letters, the more bytes decide.
  """
  most = 2 ** rng.uniform(np.log2(letters), 8)
  count = int(length * rng.uniform(0.3, 0.48))
  chosen = rng.choice(rng.permutation(256)[: int(most)], count)
  text = corpus.text(rng, length - 1 - 2 * count)
  tokens = np.concatenate([[256], chosen, text, chosen]).astype(np.int32)
  known = int(np.ceil(np.log(4 * count) / np.log(most)))
  kinds = np.full(length, NONE)
  kinds[count + 1 : -count] = TEXT
  kinds[-count + known :] = COPY
  return tokens, kinds


def batch(
  rng: np.random.Generator, corpus: Corpus, stage: Stage
) -> tuple[np.ndarray, np.ndarray]:
  """A stage's tokens and kinds, [B, T + 1]."""
  rows = []
  for _ in range(stage.batch):
    length, draw = stage.length + 1, rng.random()
    if draw < stage.copies:
      rows.append(copies(rng, corpus, length, stage.letters))
      continue
    if draw < stage.copies + stage.pairs:
      rows.append(pairs(rng, corpus, length))
      continue
    questions = int(rng.integers(1, stage.questions + 1))
    needles = int(rng.integers(questions, stage.needles + 1))
    rows.append(sequence(rng, corpus, length, needles, questions))
  tokens, kinds = (np.stack(x) for x in zip(*rows, strict=True))
  return tokens, kinds.astype(np.int32)


def create(seed: int) -> Any:
  """A random model that begins with the habit of looking up.

  With a bias b of the keys and the same, turned back by `o` tokens, of the
  queries, the logits of a local head are highest o tokens back: features of
  the last few bytes are there from the first step. The last local layer's
  heads come in pairs that share values v and look 0 and 1 tokens back; the
  layer without rope reads the first's output as query and the second's as key:
  q_t . k_s is v_t . v_(s-1), and token s, which it copies, followed what is
  like what t sees. All of this is a start that training changes; it saves the
  hours in which such heads form by themselves.
  """
  model = models.create(CONFIG, seed=seed)
  half = CONFIG["head_dim"] // 2
  turn = CONFIG["rope_theta"] ** -(np.arange(half) / half)
  (local,), (full,), (last,) = model.stack.blocks
  for block, tables in ((local, LOOK_BACK[:-1]), (last, LOOK_BACK[-1:])):
    q = np.zeros(block.attention.q.bias.get_value().shape, np.float32)
    k = np.zeros(block.attention.k.bias.get_value().shape, np.float32)
    for layer, heads in enumerate(tables):
      for head, back in enumerate(heads):
        angle = back * turn
        turned = np.concatenate([np.cos(angle), -np.sin(angle)])
        q[layer, head] = SHARP * turned
    k[..., :half] = SHARP
    block.attention.q.bias[...] = jnp.asarray(q)
    block.attention.k.bias[...] = jnp.asarray(k)
  for block in (local, full, last):
    # Not much larger than embeddings, so that these are still seen.
    block.attention.o.weight[...] = block.attention.o.weight[...] * 0.15
    block.feedforward.down.weight[...] = (
      block.feedforward.down.weight[...] * 0.05
    )
  o = (
    local.attention.o.weight[...] * jnp.asarray([1, 1, 2])[:, None, None, None]
  )
  local.attention.o.weight[...] = o
  reads = MATCH * jnp.swapaxes(o[-1], 1, 2)  # N D H
  reads = jnp.swapaxes(reads, 0, 1)  # D N H
  full.attention.q.weight[...] = reads[None, :, jnp.asarray([0, 0, 2, 2])]
  full.attention.k.weight[...] = reads[None, :, jnp.asarray([1, 3])]
  v = jnp.transpose(full.attention.v.weight[...], (0, 2, 3, 1))  # 1 K H D
  full.attention.o.weight[...] = COPY_BACK * jnp.repeat(v, 2, 1)
  return model


def _loss(
  model: Any, tokens: jax.Array, kinds: jax.Array
) -> tuple[jax.Array, jax.Array]:
  logits = model(tokens[:, :-1])
  labels, kinds = tokens[:, 1:], kinds[:, 1:]
  each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  right = (jnp.argmax(logits, -1) == labels).astype(jnp.float32)
  figures = jnp.stack(
    [
      jnp.stack([jnp.sum(x * where), jnp.sum(where)])
      for x, where in (
        (each, kinds == TEXT),
        (each, kinds >= COPY),
        (right, kinds == COPY),
        (right, kinds == ANSWER),
      )
    ]
  )
  text, sought = figures[:2, 0] / jnp.maximum(figures[:2, 1], 1)
  return sought + 0.5 * text, figures


def _rate(step: jax.Array) -> jax.Array:
  """The learning rate of all stages, after a short start."""
  edges = np.cumsum([0, *(s.steps for s in STAGES)])
  xs, ys = [], []
  for s, start in zip(STAGES, edges, strict=False):
    xs += [start, start + s.steps - 1]
    ys += [s.lr, s.to]
  rate = jnp.interp(step, jnp.asarray(xs), jnp.asarray(ys))
  return rate * jnp.minimum(1.0, (step + 1) / 100)


def _optimizer() -> optax.GradientTransformation:
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(_rate, b2=0.98, weight_decay=0.01),
  )


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _step(
  model: Any, state: Any, tokens: jax.Array, kinds: jax.Array
) -> tuple[Any, Any, jax.Array]:
  grads, figures = jax.grad(_loss, has_aux=True)(model, tokens, kinds)
  updates, state = _optimizer().update(grads, state, model)
  return optax.apply_updates(model, updates), state, figures


def _keep(path: pathlib.Path, step: int, tree: Any) -> None:
  leaves = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(tree))}
  new = path.with_suffix(".new.npz")
  np.savez(new, step=step, **leaves)
  os.replace(new, path)


def _resume(path: pathlib.Path, tree: Any) -> tuple[int, Any]:
  if not path.exists():
    return 0, tree
  with np.load(path) as file:
    leaves, form = jax.tree.flatten(tree)
    read = [jnp.asarray(file[str(i)]) for i in range(len(leaves))]
    return int(file["step"]), jax.tree.unflatten(form, read)


def _write(model: Any, out: pathlib.Path) -> None:
  """The three parts of the folder; what else lies there stays."""
  new = out.parent / f".{out.name}.new"
  models.save(model, new, overwrite=True)
  Bytes(chat_template=None).save(new)
  out.mkdir(parents=True, exist_ok=True)
  for file in new.iterdir():
    os.replace(file, out / file.name)
  new.rmdir()


def train(work: pathlib.Path, out: pathlib.Path, seed: int) -> None:
  """Goes through the stages from where the last call stopped."""
  work.mkdir(parents=True, exist_ok=True)
  corpus = Corpus(held_out=False)
  model = create(seed)
  saved = work / "checkpoint.npz"
  step, (model, state) = _resume(saved, (model, _optimizer().init(model)))
  total = sum(s.steps for s in STAGES)
  edges = np.cumsum([s.steps for s in STAGES])
  print(f"{len(corpus.bytes):,} bytes of text; step {step} of {total}")
  rates: dict[Stage, float] = {}
  log = (work / "log.jsonl").open("a")
  while step < total:
    number = int(np.searchsorted(edges, step, side="right"))
    stage = STAGES[number]
    until = min(step + 10, int(edges[number]))
    start, figures, count = time.monotonic(), jnp.zeros((4, 2)), until - step
    while step < until:
      rng = np.random.default_rng([seed, step])
      tokens, kinds = batch(rng, corpus, stage)
      model, state, each = _step(model, state, tokens, kinds)
      figures, step = figures + each, step + 1
    mean = figures[:, 0] / jnp.maximum(figures[:, 1], 1)
    text, sought, copied, right = (float(x) for x in mean)
    spent = (time.monotonic() - start) / count
    rates[stage] = min(spent, rates.get(stage, spent))
    left = sum(
      max(0, min(s.steps, int(edge) - step))
      * (
        rates.get(s) or spent * s.batch * s.length / stage.batch / stage.length
      )
      for s, edge in zip(STAGES, edges, strict=True)
    )
    print(
      f"step {step}/{total}  T={stage.length}  text {text:.3f}  "
      f"sought {sought:.3f}  copied {100 * copied:.1f} %  "
      f"answers {100 * right:.1f} %  {spent:.2f} s/step  "
      f"ETA {left / 60:.0f} min",
      flush=True,
    )
    line = [step, stage.length, text, sought, copied, right, spent]
    log.write(json.dumps([round(x, 4) for x in line]) + "\n")
    log.flush()
    _keep(saved, step, (model, state))
  _write(model, out)
  print(f"wrote {out}")


def main() -> None:
  flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  flags.add_argument("--work", type=pathlib.Path, default="/tmp/ringjax-tiny")
  flags.add_argument("--out", type=pathlib.Path, default=tiny.path())
  flags.add_argument("--seed", type=int, default=0)
  args = flags.parse_args()
  train(args.work, args.out, args.seed)


if __name__ == "__main__":
  main()
