"""Losses and gradients of chats and pairs are those of TRL for the same batch.

Skipped where TRL is not installed. It needs PyTorch, Transformers and TRL:

  python -m venv trl; trl/bin/pip install -e '.[dev]' torch trl==1.16.0 peft
  trl/bin/python -m pytest -n 0 -m slow tests/train/test_trl.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Bytes
from ringjax.data.batches.packing import BestFit, fill
from ringjax.data.chats.chat_documents import ChatEncoding, PairDocuments
from ringjax.data.chats.chat_lines import PreferencePair
from ringjax.models import checkpoint, small
from ringjax.nn.sharding_context import ContextParallel
from ringjax.train import batch as batches
from ringjax.train.posttraining.preferences import Dpo, Ipo, Orpo
from ringjax.train.posttraining.reference_logprobs import (
  ReferenceLogprobs,
  fill_table,
)
from ringjax.train.step import Objective
from tests.train.test_posttraining import ANSWERS, CONFIG, LENGTH

pytestmark = [
  pytest.mark.slow,
  # Those of the libraries that it compares with.
  pytest.mark.filterwarnings("ignore"),
]


def encoded(answers) -> PairDocuments:
  encoding = ChatEncoding(tokenizer=Bytes(chat_template=None), length=LENGTH)
  return PairDocuments(
    [PreferencePair("", *answer) for answer in answers], encoding
  )


def folders(tmp_path):
  """Folders of the model that is trained and of the initial one."""
  models = [checkpoint.create(CONFIG, seed=seed) for seed in (1, 2)]
  paths = [tmp_path / "trained", tmp_path / "initial"]
  for model, path in zip(models, paths, strict=True):
    rj.models.save(model, path)
  return models, paths


def padded(pairs):
  """Ids, attention and completion masks [2 N, T] as TRL pads them."""
  answers = []
  for segment in (1, 2):
    for number in range(len(pairs)):
      ids, weights, segments = pairs.read(number, 0, LENGTH)
      mask = segments == segment
      answers.append((ids[mask], weights[mask]))
  width = max(len(ids) for ids, _ in answers)
  pad = lambda x: np.pad(x, (0, width - len(x))).astype(np.int64)
  ids, completion = (np.stack([pad(x[n]) for x in answers]) for n in (0, 1))
  attention = np.stack([pad(np.ones_like(ids)) for ids, _ in answers])
  return ids, attention, completion


def ours(models, loss, pairs):
  """Loss and the gradient of each parameter by its Hugging Face name."""
  model, initial = models
  plan = BestFit().plan(pairs.lengths, LENGTH)
  rows = fill([*plan], LENGTH, pairs.read)
  table = ReferenceLogprobs("")
  attend = ContextParallel()
  fill_table(
    table,
    initial,
    [(rows, 1)],
    attend,
    placed=lambda rows: rows,
    dtype=None,
    block=16,
  )
  batch = jax.tree.map(jnp.asarray, table.attached(rows))

  def mean(model):
    sums = Objective(posttraining=loss).sums(model, batch, attend)
    return sums.loss / sums.weight

  return jax.jit(jax.value_and_grad(mean))(model)


def check_gradients(grads, torch_model, tmp_path):
  """Compares gradients, exchanged as a folder of weights."""
  path = tmp_path / "gradients"
  for parameter in torch_model.parameters():
    parameter.data = parameter.grad
  torch_model.save_pretrained(path)
  theirs = rj.models.load(path, dtype="float32")
  for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(theirs), strict=True):
    scale = np.abs(b).max()
    np.testing.assert_allclose(a, b, atol=1e-5 * scale)


def trainer_of(cls, config, path, reference, dataset, tmp_path, **options):
  """A trainer of TRL that takes no step."""
  import datasets
  import transformers

  load = transformers.AutoModelForCausalLM.from_pretrained
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_file=str(small.path() / "tokenizer.json"),
    eos_token="<|end|>",
    bos_token="<|begin|>",
    pad_token="<|pad|>",
  )
  references = {} if reference is None else {"ref_model": load(reference)}
  return cls(
    model=load(path),
    args=config(
      output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True, bf16=False,
      **options,
    ),
    train_dataset=datasets.Dataset.from_list(dataset),
    processing_class=tokenizer,
    **references,
  )  # fmt: skip


ROWS = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in ANSWERS]


@pytest.mark.parametrize(
  ("loss", "options"),
  [
    (Dpo(beta=0.3), {"loss_type": ["sigmoid"], "beta": 0.3}),
    (
      Dpo(beta=0.3, label_smoothing=0.1, robust=True),
      {"loss_type": ["robust"], "beta": 0.3, "label_smoothing": 0.1},
    ),
    (Ipo(beta=0.4), {"loss_type": ["ipo"], "beta": 0.4}),
  ],
  ids=["dpo", "robust", "ipo"],
)
def test_dpo_and_ipo(tmp_path, loss, options):
  torch = pytest.importorskip("torch")
  trl = pytest.importorskip("trl")
  models, (trained, initial) = folders(tmp_path)
  trainer = trainer_of(
    trl.DPOTrainer, trl.DPOConfig, trained, initial, ROWS, tmp_path, **options
  )
  pairs = encoded(ANSWERS)
  ids, attention, completion = map(torch.tensor, padded(pairs))
  trainer.model.eval()
  theirs = trainer._compute_loss(
    trainer.model,
    {
      "input_ids": ids,
      "attention_mask": attention,
      "completion_mask": completion,
    },
    False,
  )
  theirs.backward()
  value, grads = ours(models, loss, pairs)
  assert float(value) == pytest.approx(float(theirs), rel=1e-5)
  check_gradients(grads, trainer.model, tmp_path)


def test_orpo(tmp_path, monkeypatch):
  torch = pytest.importorskip("torch")
  pytest.importorskip("trl")
  monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
  orpo = pytest.importorskip("trl.experimental.orpo")
  models, (trained, _) = folders(tmp_path)
  trainer = trainer_of(
    orpo.ORPOTrainer,
    orpo.ORPOConfig,
    trained,
    None,
    ROWS,
    tmp_path,
    beta=0.5,
  )
  # TRL's likelihood is of the prompt, too, and a mean over tokens of all pairs:
  # that of the paper for one pair after the id that begins a text.
  pairs = encoded([("", "preferred text", "another one")])
  ids, attention, completion = map(torch.tensor, padded(pairs))
  labels = torch.where(completion == 1, ids, -100)
  batch = {}
  for number, name in enumerate(("chosen", "rejected")):
    part = slice(number, number + 1)
    batch[f"{name}_input_ids"] = ids[part]
    batch[f"{name}_attention_mask"] = attention[part]
    batch[f"{name}_labels"] = labels[part]
  trainer.model.eval()
  theirs, _ = trainer.get_batch_loss_metrics(trainer.model, batch)
  theirs.backward()
  value, grads = ours(models, Orpo(beta=0.5), pairs)
  assert float(value) == pytest.approx(float(theirs), rel=1e-5)
  check_gradients(grads, trainer.model, tmp_path)


def test_answers_of_chats(tmp_path):
  """SFTTrainer's loss, the mean over the tokens of a batch's answers."""
  torch = pytest.importorskip("torch")
  trl = pytest.importorskip("trl")
  models, (trained, _) = folders(tmp_path)
  rows = [{"prompt": p, "completion": c} for p, c, _ in ANSWERS]
  trainer = trainer_of(
    trl.SFTTrainer, trl.SFTConfig, trained, None, rows, tmp_path
  )
  pairs = encoded(ANSWERS)
  ids, attention, completion = padded(pairs)
  half = slice(0, len(pairs))
  labels = np.where(completion == 1, ids, -100)
  trainer.model.eval()
  theirs = trainer.compute_loss(
    trainer.model,
    {
      "input_ids": torch.tensor(ids[half]),
      "attention_mask": torch.tensor(attention[half]),
      "labels": torch.tensor(labels[half]),
    },
  )
  theirs.backward()
  lengths = attention[half].sum(1)
  cut = lambda rows: [x[:n] for x, n in zip(rows, lengths, strict=True)]
  documents = rj.data.Documents(cut(ids[half]), cut(completion[half]))
  plan = BestFit().plan(documents.lengths, LENGTH)
  packed = fill([*plan], LENGTH, documents.read)
  batch = batches.Batch(*map(jnp.asarray, packed))

  def mean(model):
    sums = Objective().sums(model, batch, ContextParallel())
    return sums.loss / sums.weight

  value, grads = jax.jit(jax.value_and_grad(mean))(models[0])
  assert float(value) == pytest.approx(float(theirs), rel=1e-5)
  check_gradients(grads, trainer.model, tmp_path)
