"""Benchmark of speculative decoding: speed of drafters by kind of task.

Guarantees: plain decoding and all drafters answer the same prompts after the
same cache, in turn (see `timing`); each answer is compared with the plain one,
token by token. A row is a kind of task of `speculation_tasks`.

  tokens/s    new tokens over the time from the prompt's last token on; the
              start of a drafter counts, such as a draft model's prefill of the
              prompt, which is "begin" too
  x plain     ratio of the median tokens/s to that of plain decoding
  a call      new tokens for each call of the target
  accepted    share of accepted drafted tokens, of those after accepted tokens
  equal       whether every answer equals the plain one
  fresh       share of runs of eight tokens that are new in the answer: where a
              small model loops there are few, and drafts are easy

Drafts have all their tokens (--lengths=full), or as many as pay off (adapt).
The contestant "never" drafts tokens that are always wrong and adapts: the cost
of speculation where it is useless.

--context=T --devices=R is one row, "document": a text of T tokens, sharded over
R devices, that the answer continues to quote. All contestants share its cache.

--compare=transformers times whole calls, prompts included, against
`generate(prompt_lookup_num_tokens=)` and, if --draft is a folder, the assisted
generation of transformers: the same folder, float32, the same cores, and no
more tokens of a draft. As "..._1" PyTorch has one thread, see `serving`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import ringjax as rj
from benchmarks.serving.continuous_batching import import_transformers
from benchmarks.shared import harness
from benchmarks.shared.harness import Report, Row, import_torch, option
from ringjax.bench import speculation_tasks
from ringjax.errors import OptionError
from ringjax.parallel.mesh import make_mesh

if TYPE_CHECKING:
  from ringjax.models.transformer import Transformer

# Names of drafters; their module, which imports flax, is loaded in a run.
DRAFTERS = ("lookup", "suffix", "early", "self", "model", "tree")
# Those that are loaded from a folder, of `head`.
_WITH_FOLDERS = ("eagle3", "longspec")
_KINDS = (*speculation_tasks.KINDS, speculation_tasks.PROSE)
PARTS = (*_KINDS, "document")
_PEERS = ("transformers", "transformers_lookup", "transformers_assisted")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationSettings(harness.BenchmarkSettings):
  """Settings of the benchmark: models, tasks and drafters.

  Attributes:
    model: Folder, or preset with random weights that reads bytes; None for the
      second small model that ships.
    draft: Folder of a draft model; with another tokenizer it drafts through
      text. None for the first small model that ships, if it has the model's
      vocabulary, else the model's first layer.
    head: Folder of the EAGLE-3 head of "eagle3", or of the draft of "longspec".
    dtype: Dtype of the weights; None for the folder's.
    parts: Kinds of tasks.
    contestants: Names of the drafters.
    drafted: Number of tokens of a draft.
    draft_cache: Kind of cache of "self", which is the model with a smaller
      cache.
    lengths: "full" for drafts of all tokens, "adapt" for as many as pay off.
    requests: Number of prompts of a kind.
    prompt_tokens: Lengths of a prompt; all kinds run at each length.
    new_tokens: Tokens of an answer.
    context: Tokens of a document, in place of the kinds; None for the kinds.
    devices: Number of devices over which the sequence is sharded.
    compare: Library to compare with.
    rounds: Timed rounds.
  """

  model: str | None = option(None, ())
  draft: str | None = option(None, ())
  head: str | None = option(None, ())
  dtype: str | None = option(None, ("float32", "bfloat16"))
  parts: tuple[str, ...] = option(speculation_tasks.KINDS, _KINDS)
  contestants: tuple[str, ...] = option(
    DRAFTERS, (*DRAFTERS, "best", "mtp", *_WITH_FOLDERS, "never")
  )
  drafted: int = option(8)
  draft_cache: str = option("int4", ())
  lengths: str = option("full", ("full", "adapt"))
  requests: int = option(4)
  prompt_tokens: tuple[int, ...] = option((1024,))
  new_tokens: int = option(48)
  context: int | None = option(None)
  devices: int = option(1)
  compare: str | None = option(None, ("transformers",))
  rounds: int = option(5)

  def __post_init__(self) -> None:
    super().__post_init__()
    with_folders = [x for x in _WITH_FOLDERS if x in self.contestants]
    if len(with_folders) != (self.head is not None):
      raise OptionError(
        "head",
        f"{self.head} for the contestants {', '.join(self.contestants)}",
        "the folder of an EAGLE-3 head with the contestant eagle3, or of a "
        "draft with longspec, one of them",
        "pass --contestants=eagle3 --head=FOLDER, or leave both out",
      )
    if self.compare and (self.context or self.devices > 1):
      raise OptionError(
        "compare",
        "transformers, with a sharded sequence",
        "one device and the kinds of tasks",
        "leave --context and --devices out",
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationCase:
  """A kind of task at one length of the prompt.

  Attributes:
    kind: Kind of task, of `PARTS`.
    tokens: Tokens of a prompt.
  """

  kind: str
  tokens: int

  def __str__(self) -> str:
    return f"{self.kind} T={self.tokens}"


class SpeculationBenchmark(harness.Benchmark):
  """Benchmark of plain decoding and drafters, by kind of task."""

  name = "speculate"
  options = SpeculationSettings
  quick = SpeculationSettings(
    parts=("chat", "summary", "questions"),
    contestants=("lookup", "suffix", "model"),
    requests=1,
    prompt_tokens=(512,),
    new_tokens=64,
    rounds=3,
  )
  columns = ("kind", "tokens")
  parts = PARTS

  @property
  def cases(self) -> list[SpeculationCase]:
    s = self.settings
    if s.context is not None:
      return [SpeculationCase(kind="document", tokens=s.context)]
    return [
      SpeculationCase(kind=kind, tokens=tokens)
      for tokens in s.prompt_tokens
      for kind in _KINDS
      if kind in s.parts
    ]

  def devices(self, name: str) -> int:
    return 1 if name.startswith("transformers") else self.settings.devices

  def load(self) -> None:
    """Loads the models before the first row."""
    if self.settings.compare is not None:
      import_transformers()
    _ = self.model, self.draft

  @functools.cached_property
  def _mesh(self) -> jax.sharding.Mesh | None:
    count = self.settings.devices
    if count == 1:
      return None
    return make_mesh((count,), ("seq",), devices=jax.devices()[:count])

  @functools.cached_property
  def model(self) -> Transformer:
    """The target model."""
    from ringjax.models import small

    name, mesh = self.settings.model, self._mesh
    dtype, head = self.settings.dtype, self.settings.head
    if name in rj.models.PRESETS:
      model = rj.models.create(name, mesh=mesh, dtype=dtype or "float32")
    else:
      folder = small.path() if name is None else name
      predicts = "mtp" in self.settings.contestants
      model = rj.models.load(
        folder, mesh=mesh, dtype=dtype, predict_layers=predicts
      )
    if head is None or "eagle3" not in self.settings.contestants:
      return model
    return rj.models.eagle3.load(head, model)

  @functools.cached_property
  def draft(self) -> Transformer | None:
    """The draft model; None for the target's first layer."""
    from ringjax.models import tiny

    folder = self.settings.draft
    dtype = self.settings.dtype
    if folder is not None:
      return rj.models.load(folder, mesh=self._mesh, dtype=dtype)
    if self.settings.model in rj.models.PRESETS:
      return None
    draft = rj.models.load(tiny.path(), mesh=self._mesh, dtype=dtype)
    same_vocab = draft.config.vocab == self.model.config.vocab
    return draft if same_vocab else None

  @functools.cached_property
  def tokenizer(self) -> Any:
    from ringjax.models import small

    name = self.settings.model
    if name in rj.models.PRESETS:
      return rj.data.Bytes()
    return rj.data.Tokenizer.load(small.path() if name is None else name)

  @functools.cached_property
  def tokenizers(self) -> tuple[Any, Any] | None:
    """Tokenizers of the draft model and of the target; None for the same."""
    s = self.settings
    if s.draft is None or s.model in rj.models.PRESETS:
      return None
    tokenizer = rj.data.Tokenizer.load(s.draft)
    if rj.data.fingerprint(tokenizer) == rj.data.fingerprint(self.tokenizer):
      return None
    return tokenizer, self.tokenizer

  @functools.cached_property
  def path(self) -> pathlib.Path:
    """Folder to which the target is written for transformers."""
    folder = tempfile.TemporaryDirectory(prefix="ringjax-bench-")
    path, target = pathlib.Path(self.stack.enter_context(folder)), self.model
    if target.stack.taps:
      target = rj.models.eagle3.without_head(target)
    rj.models.save(target, path / "model")
    return path / "model"

  def row(self, case: SpeculationCase, report: Report) -> Row:
    from benchmarks.speculation.speculation_contestants import Never, drafter
    from ringjax.infer.inputs import within_context

    s = self.settings
    within_context(
      self.model.config,
      case.tokens + s.new_tokens,
      f"--prompt_tokens or --context={case.tokens}, "
      f"--new_tokens={s.new_tokens}",
    )
    prompts = [
      speculation_tasks.prompt(case.kind, self.tokenizer, case.tokens, seed)
      for seed in range(1 if case.kind == "document" else s.requests)
    ]
    whole_calls = s.compare is not None
    runner = _PromptRuns(
      self.model, prompts, s.new_tokens, self._mesh, whole_calls
    )
    adapt, runs = s.lengths == "adapt", {}
    for name in s.contestants:
      if name == "never":
        runs[name] = lambda n: Never(answer=runner.plain[n], count=s.drafted)
        continue
      result = drafter(
        name,
        self.model,
        self.draft,
        s.drafted,
        adapt,
        s.draft_cache,
        self.tokenizers if name == "model" else None,
        s.head,
      )
      runs[name] = lambda n, contestant=result: contestant
    runs = {
      "plain": runner.plainly,
      **{name: functools.partial(runner, name, x) for name, x in runs.items()},
    }
    with self._peers(prompts) as peers:
      runs |= peers
      results, _ = self.measure(
        list(runs),
        lambda name: (runs[name], runs[name]()),
        lambda answers: (_difference(answers, runner.plain), False),
        report,
        warmup=1,
      )
    plain = results["plain"]["median_s"]
    for name, result in results.items():
      result |= runner.facts(name)
      median = result["median_s"]
      count = len(prompts) * s.new_tokens
      result["tokens_per_s"] = median and count / median
      result["x_plain"] = median and plain and plain / median
      different = result["max_abs_difference"]
      result["equal"] = None if different is None else different == 0
    return {
      "kind": case.kind,
      "tokens": case.tokens,
      "new_tokens": s.new_tokens,
      "requests": len(prompts),
      "fresh": statistics.mean(map(_fresh, runner.plain)),
      "results": results,
    }

  @contextlib.contextmanager
  def _peers(
    self, prompts: Sequence[np.ndarray]
  ) -> Iterator[dict[str, Callable[[], list[np.ndarray]]]]:
    """Calls of transformers' plain, lookup and assisted generation."""
    s = self.settings
    if s.compare is None:
      yield {}
      return
    names = _PEERS[: 2 if s.draft is None else 3]
    model = _pretrained(self.path)
    helper = None if s.draft is None else _pretrained(s.draft)
    yield {
      name + ("_1" if threads == 1 else ""): functools.partial(
        _peer, name, model, helper, prompts, s.new_tokens, s.drafted, threads
      )
      for name in names
      for threads in sorted({os.cpu_count() or 1, 1})
    }

  def summary(self, rows: Sequence[Row]) -> Row:
    """Best and median figures of each drafter over the kinds."""
    figures: Row = {}
    for name in dict.fromkeys(n for row in rows for n in row["results"]):
      results = [row["results"][name] for row in rows if name in row["results"]]
      values_of = lambda key, results=results: [
        x[key] for x in results if x.get(key)
      ]
      figures[name] = {
        key: {"median": statistics.median(values), "best": max(values)}
        for key in ("x_plain", "tokens_per_call", "acceptance")
        if (values := values_of(key))
      } | {"equal": all(x["equal"] is not False for x in results)}
    return figures

  def table(self, case: SpeculationCase, row: Row) -> str:
    def result_text(result: Row) -> str:
      number = lambda key, form: (
        "-".rjust(6) if result.get(key) is None else format(result[key], form)
      )
      begin = result.get("begin_s")
      return (
        f"{result['tokens_per_s']:8.1f} tokens/s  x plain "
        f"{number('x_plain', '5.2f')}  a call "
        f"{number('tokens_per_call', '5.2f')}  accepted "
        f"{number('acceptance', '6.1%')}  begin "
        f"{'-' if begin is None else f'{1e3 * begin:.0f} ms':>8}  "
        f"cache {number('draft_bytes', '6.1%')}  "
        f"{'equal' if result['equal'] else 'DIFFERENT'}"
      )

    head = (
      f"{case}: {row['requests']} x {row['new_tokens']} new tokens, "
      f"{row['fresh']:.0%} fresh, "
      f"{self.model.config.family} on {self.settings.devices} device(s)"
    )
    return "\n".join([head, *harness.lines(row, result_text)]) + "\n"

  def closing(self, result: Row) -> str:
    lines = ["over all kinds, median (best)"]
    for name, figures in result["summary"].items():
      text = "   ".join(
        f"{key} {figures[key]['median']:.2f} ({figures[key]['best']:.2f})"
        for key in ("x_plain", "tokens_per_call", "acceptance")
        if key in figures
      )
      equal = "all equal" if figures["equal"] else "NOT all equal"
      lines.append(f"  {name:22}{text}   {equal}")
    return "\n".join(lines)

  def draw(self, result: Row, path: str) -> None:
    """Draws acceptance by position and length, and tokens per call by kind."""
    rows = result["rows"]
    lengths = sorted({row["tokens"] for row in rows})
    names = [
      name
      for name in result["summary"]
      if "tokens_per_call" in result["summary"][name]
    ]
    colors = dict(zip(names, _COLORS, strict=False))
    figure = harness.figure(15 if lengths[1:] else 11, 3.6)
    left_axes, right_axes, *other_axes = figure.subplots(
      1, 3 if lengths[1:] else 2
    )
    for name, color in colors.items():
      counts: list[np.ndarray] = [
        np.asarray(row["results"][name]["by_position"])
        for row in rows
        if row["results"].get(name, {}).get("by_position")
      ]
      if not counts:
        continue
      longest = max(map(len, counts))
      total = sum(np.pad(x, ((0, longest - len(x)), (0, 0))) for x in counts)
      offered, stayed = np.asarray(total).T
      has_offers = offered > 0
      x = np.flatnonzero(has_offers) + 1
      y = stayed[has_offers] / offered[has_offers]
      left_axes.plot(x, y, "o-", color=color, label=name, markersize=4)
    left_axes.set_xlabel("place in the draft", fontsize=9)
    left_axes.set_ylim(0, 1.02)
    harness.tidy(left_axes, "acceptance after tokens that stayed")
    height = lambda row, name: (
      row["results"].get(name, {}).get("tokens_per_call") or 0.0
    )
    first = [row for row in rows if row["tokens"] == lengths[0]]
    harness.bars(right_axes, first, colors, height, lambda row: row["kind"])
    right_axes.axhline(1, color="0.5", linewidth=1)
    harness.tidy(right_axes, "tokens for each call of the target")
    right_axes.legend(frameon=False, fontsize=8)
    for axes in other_axes:
      for name, color in colors.items():
        share = [_acceptance(rows, name, length) for length in lengths]
        axes.plot(lengths, share, "o-", color=color, label=name, markersize=4)
      axes.set_xscale("log", base=2)
      axes.set_xticks(lengths, [f"{n:,}" for n in lengths], fontsize=8)
      axes.minorticks_off()
      axes.set_xlabel("tokens of the prompt", fontsize=9)
      axes.set_ylim(0, 1.02)
      harness.tidy(axes, "acceptance, all kinds")
    harness.save(figure, path)


def _acceptance(rows: Sequence[Row], name: str, tokens: int) -> float:
  """Mean acceptance over the kinds, after prompts of a length."""
  results = [row["results"].get(name, {}) for row in rows
           if row["tokens"] == tokens]  # fmt: skip
  acceptances = [
    x["acceptance"] for x in results if x.get("acceptance") is not None
  ]
  return statistics.mean(acceptances) if acceptances else math.nan


_COLORS = (
  "#08519c", "#6baed6", "#d95f0e", "#31a354", "#756bb1", "#636363", "#fdae6b",
)  # fmt: skip


class _PromptRuns:
  """Prompts that are read once and answered by each contestant.

  Attributes:
    plain: Answers without drafts.
  """

  def __init__(
    self,
    model: Transformer,
    prompts: Sequence[np.ndarray],
    count: int,
    mesh: Any,
    whole: bool,
  ):
    self._model, self._prompts, self._count = model, prompts, count
    self._whole, self._reports = whole, {}
    self._begun: dict[str, list[float]] = {}
    # Bytes of a draft model's cache, as a fraction of the target's.
    self._bytes: dict[str, float] = {}
    self._sessions: list[Any] = []
    self.plain: list[np.ndarray] = []
    for prompt in [] if whole else prompts:
      # Trees take extra slots until they are checked, and the last slots of a
      # shard may stay empty.
      room = prompt.size + count + 64 + 2 * len(jax.devices())
      session = rj.infer.Session(model, room, mesh=mesh)
      rj.infer.read_context(model, [prompt[:-1]], cache=session)
      self._sessions.append((session, session.cache.snapshot()))

  def __call__(
    self, name: str, drafter_of: Callable[[int], Any]
  ) -> list[np.ndarray]:
    """Answers the prompts, with a drafter for each."""
    from benchmarks.speculation.speculation_contestants import ClockedDrafter
    from ringjax.infer.speculate.model_drafting import ModelDrafting

    answers, reports, begun = [], [], 0.0
    for n, prompt in enumerate(self._prompts):
      noted = ClockedDrafter.around(drafter_of(n))
      options = dict(
        max_new_tokens=self._count, speculate=noted, report=reports.append
      )
      answers.append(self._generate(n, prompt, **options))
      begun += noted.seconds[0]
      session = self._sessions[n][0] if self._sessions else None
      if session is not None and isinstance(session.drafting, ModelDrafting):
        share = session.drafting.nbytes() / session.cache.nbytes()
        self._bytes[name] = max(share, self._bytes.get(name, 0.0))
        # The next contestant has another draft cache.
        session.drafting = None
    if name not in self._reports:
      self._reports[name] = [report.speculation for report in reports]
    self._begun.setdefault(name, []).append(begun)
    return answers

  def plainly(self) -> list[np.ndarray]:
    """Answers the prompts without drafts; keeps the first answers."""
    answers = [
      self._generate(n, prompt, max_new_tokens=self._count)
      for n, prompt in enumerate(self._prompts)
    ]
    self.plain = self.plain or answers
    return answers

  def _generate(self, n: int, prompt: np.ndarray, **options: Any) -> np.ndarray:
    if self._whole:
      return rj.infer.generate(self._model, [prompt], **options)[0]
    session, snapshot = self._sessions[n]
    session.cache = session.cache.restore(snapshot)
    return rj.infer.generate(
      self._model, [prompt[-1:]], cache=session, **options
    )[0]

  def facts(self, name: str) -> Row:
    """Figures from the reports of a drafter's first answers."""
    if name not in self._reports:
      return {}
    reports = self._reports[name]
    total = np.sum([report.by_position for report in reports], 0)
    tokens, calls = (
      sum(getattr(report, key) for report in reports)
      for key in ("tokens", "calls")
    )
    return {
      "tokens_per_call": tokens / max(calls, 1),
      "acceptance": float(total[:, 1].sum() / max(total[:, 0].sum(), 1)),
      "drafted": sum(report.drafted for report in reports),
      "calls": calls,
      "by_position": total.tolist(),
      "begin_s": statistics.median(self._begun[name][1:] or [0.0]),
      "draft_bytes": self._bytes.get(name),
    }


def _fresh(answer: np.ndarray) -> float:
  """The share of runs of eight tokens that are not repeated."""
  runs = [tuple(answer[n : n + 8]) for n in range(max(1, len(answer) - 7))]
  return len(set(runs)) / len(runs)


def _difference(
  answers: Sequence[np.ndarray], plain: Sequence[np.ndarray]
) -> float:
  """Share of tokens from the first one that differs on."""
  total = sum(map(len, plain))
  agreed_tokens = sum(
    _common_prefix(a, b) for a, b in zip(answers, plain, strict=True)
  )
  return 1 - agreed_tokens / total


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
  count = min(len(a), len(b))
  return int(np.argmin(np.append(a[:count] == b[:count], False)))


def _pretrained(folder: str | os.PathLike[str]) -> Any:
  transformers = import_transformers()
  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=import_torch().float32, attn_implementation="sdpa"
  ).eval()
  # Answers have a fixed length, as ours have: no id ends them.
  model.generation_config.eos_token_id = None
  return model


def _peer(
  name: str,
  model: Any,
  helper: Any,
  prompts: Sequence[np.ndarray],
  count: int,
  drafted: int,
  threads: int,
) -> list[np.ndarray]:
  """Answers the prompts with transformers."""
  torch, options = import_torch(threads), {}
  if name == "transformers_lookup":
    options = dict(prompt_lookup_num_tokens=drafted, max_matching_ngram_size=3)
  elif name == "transformers_assisted":
    helper.generation_config.num_assistant_tokens = drafted
    options = dict(assistant_model=helper)
  answers = []
  for prompt in prompts:
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    with torch.inference_mode():
      new = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        **options,
      )
    answers.append(new[0, prompt.size :].numpy().astype(np.int32))
  return answers
