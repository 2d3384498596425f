"""Figures of flash.md: python docs/how/flash.py COMMAND ...

relu OUT              writes ringjax/models/small with ReLU for SiLU into OUT;
                      train it with configs/train/small_relu.py.
thresholds MODEL OUT  nats a byte of held-out text, read whole, by threshold.
measure MODEL OUT     trains predictors, writes neurons into OUT, reads held-out
                      text a token a call; writes OUT/flash.json and flash.png.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import ringjax as rj
from ringjax.data import Tokenizer, documents
from ringjax.models import small

TEXTS, PROMPT, LENGTH = 8, 96, 256
WINDOWS = (1, 2, 3, 4, 5, 16)
THRESHOLD = 0.5


def relu(out: pathlib.Path) -> None:
  """The second small model with another activation, not trained yet."""
  out.mkdir(parents=True, exist_ok=True)
  for file in pathlib.Path(small.path()).glob("*.*"):
    if file.suffix in (".json", ".safetensors"):
      (out / file.name).write_bytes(file.read_bytes())
  config = json.loads((out / "config.json").read_text())
  config["hidden_act"] = "relu"
  (out / "config.json").write_text(json.dumps(config, indent=2))


def texts(held_out: bool, rows: int, length: int) -> np.ndarray:
  """int32 [rows, length]: the beginnings of files of Python's library."""
  tokenizer = Tokenizer.load(small.path())
  ids = map(tokenizer.encode, documents.library(held_out=held_out)[::3])
  found = [x[:length] for x in ids if len(x) >= length]
  return np.asarray(found[:rows], np.int32)


def thresholds(folder: pathlib.Path, out: pathlib.Path) -> None:
  """Prints what thresholds cost."""
  model, rows = rj.models.load(folder), texts(True, 12, 1024)
  rj.models.write_neurons(model, out)
  for t in (0.0, 0.3, 0.5, 0.8, 1.2):
    # So many tokens read layers whole: nothing is missed.
    cut = rj.models.sparse_model(model, out, threshold=t) if t else model
    chance = jax.nn.log_softmax(cut(rows[:, :-1]))
    each = jnp.take_along_axis(chance, rows[:, 1:, None], -1)
    print(f"threshold {t}: {-float(each.mean()):.4f} nats a byte")


def loss(model: rj.models.Transformer, rows: np.ndarray) -> float:
  """Nats a token of each text behind its prompt, read a token a call."""
  total = count = 0
  sparse = model.stack.neuron_fault is not None
  for n, row in enumerate(rows):
    cache = model.init_cache(1, LENGTH)
    logits, cache = model(row[None, :PROMPT], cache=cache)
    if sparse and n == 0:
      # Prompts are read by whole layers; what they count is not of windows.
      rj.models.neuron_report(model, reset=True)
    for at in range(PROMPT, LENGTH):
      chance = jax.nn.log_softmax(logits[0, -1].astype(jnp.float32))
      total -= float(chance[row[at]])
      count += 1
      logits, cache = model(row[None, at : at + 1], cache=cache)
  return total / count


def measure(folder: pathlib.Path, out: pathlib.Path) -> None:
  """All figures."""
  model = rj.models.load(folder)
  rows, train = texts(True, TEXTS, LENGTH), texts(False, 48, 512)
  for bundled in (True, False):
    rj.models.write_neurons(model, out / str(bundled), bundled=bundled)
  predictors = {
    t: rj.train.train_predictors(model, train, threshold=t)
    for t in (0.0, THRESHOLD)
  }
  found = {
    "resident": loss(model, rows),
    "predictors": {
      str(t): {str(n): dict(x) for n, x in p.measured.items()}
      for t, p in predictors.items()
    },
    "runs": [],
  }
  asked = [
    (window, bundled, t, predicted)
    for t in (0.0, THRESHOLD)
    for predicted in (False, True)
    for window in WINDOWS
    for bundled in ((True, False) if window == 4 else (True,))
  ]
  # What an earlier run that was killed has measured is not measured again.
  known = out / "runs.jsonl"
  if known.exists():
    found["runs"] = list(map(json.loads, known.read_text().splitlines()))
  for window, bundled, t, predicted in asked[len(found["runs"]) :]:
    sparse = rj.models.sparse_model(
      model,
      out / str(bundled),
      predictors=predictors[t] if predicted else None,
      window=window,
      # Room for all, so that nothing is forgotten early.
      memory="16MB",
      threshold=t,
    )
    nll = loss(sparse, rows)
    report = rj.models.neuron_report(sparse)
    tokens = report.calls / report.layers
    one = {
      "window": window,
      "bundled": bundled,
      "threshold": t,
      "predicted": predicted,
      "nll": nll,
      "bytes": report.bytes_read / tokens,
      "reads": report.reads / tokens,
      "fresh": report.fresh / (tokens * report.neurons),
      "active": report.active_share,
      "hits": report.hit_share,
      "resident": report.resident_share,
    }
    found["runs"].append(one)
    with known.open("a") as file:
      file.write(json.dumps(one) + "\n")
  (out / "flash.json").write_text(json.dumps(found, indent=1))
  draw(found, out / "flash.png")


def draw(found: dict, path: pathlib.Path) -> None:
  """Bytes a token and resident neurons by the window."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
  for t in (0.0, THRESHOLD):
    for predicted in (False, True):
      runs = [
        x
        for x in found["runs"]
        if x["threshold"] == t and x["predicted"] == predicted and x["bundled"]
      ]
      label = "predictors" if predicted else "resident gate"
      label += f", threshold {t:g}" if t else ", ReLU"
      windows = [x["window"] for x in runs]
      style = {"marker": "o", "linestyle": "--" if predicted else "-"}
      axes[0].plot(
        windows, [x["bytes"] / 1e3 for x in runs], label=label, **style
      )
      axes[1].plot(windows, [x["resident"] for x in runs], label=label, **style)
  axes[0].set(xlabel="window, tokens", ylabel="kB read a token", ylim=0)
  axes[1].set(xlabel="window, tokens", ylabel="neurons in memory", ylim=(0, 1))
  axes[0].legend()
  figure.savefig(path, dpi=110)


if __name__ == "__main__":
  places = [pathlib.Path(x) for x in sys.argv[2:]]
  commands = {"relu": relu, "thresholds": thresholds, "measure": measure}
  commands[sys.argv[1]](*places)
