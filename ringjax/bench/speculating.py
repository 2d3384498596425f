"""Speculation: what drafters are worth, by kind of task.

Guarantees: plain decoding and all drafters answer the same prompts behind the
same cache, in turn (see `timing`); each answer is compared with the plain one,
token by token. A row is a kind of task of `speculation_tasks`.

  tokens/s    new tokens over the time from the prompt's last token on: what a
              drafter does when it begins counts, as a draft model's own reading
              of the prompt, which is "begin" too
  x plain     the ratio of the medians of that
  a call      new tokens for each call of the target
  accepted    drafted tokens that stayed, of those behind tokens that stayed
  equal       whether every answer is the plain one
  fresh       runs of eight tokens that an answer has for the first time: where
              a small model loops there are few, and drafts are easy

Drafts have all their tokens (--lengths=full), or as many as pay (adapt). The
contestant "never" drafts tokens that are always wrong and adapts: what
speculation costs where it is of no use.

--context=T --devices=R is one row, "document": a text of T tokens, sharded over
R devices, that the answer goes on quoting. It is read once for all contestants.

--compare=transformers times whole calls, prompts included, beside
`generate(prompt_lookup_num_tokens=)` and, where --draft is a folder, the
assisted generation of transformers: the same folder, float32, the same cores,
and no more tokens of a draft. As "..._1" PyTorch has one thread, see
`serving`.
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
from ringjax.bench import harness, speculation_tasks
from ringjax.bench.continuous_batching import import_transformers
from ringjax.bench.harness import Report, Row, import_torch, option
from ringjax.errors import OptionError
from ringjax.parallel.mesh import make_mesh

if TYPE_CHECKING:
  from ringjax.models.transformer import Transformer

# Drafters, whose module loads flax when something runs.
DRAFTERS = ("lookup", "suffix", "early", "self", "model", "tree")
PARTS = (*speculation_tasks.KINDS, "document")
_PEERS = ("transformers", "transformers_lookup", "transformers_assisted")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationSettings(harness.BenchmarkSettings):
  """What is drafted for what.

  Attributes:
    model: a folder, or a preset, which has random weights and reads bytes;
      None for the second small model that ships.
    draft: a folder of a model that drafts; None for the first small model that
      ships where its vocabulary is the model's, else the model's first layer.
    parts: kinds of tasks.
    contestants: the drafters.
    drafted: tokens of a draft.
    draft_cache: of "self", which is the model with a smaller cache.
    lengths: whether drafts have all their tokens, or as many as pay.
    requests: prompts of a kind.
    prompt_tokens: of a prompt; with several all kinds at each length.
    new_tokens: of an answer.
    context: of the document, in place of the kinds; None for the kinds.
    devices: over which the sequence is sharded.
    compare: what with.
    rounds: timed rounds.
  """

  model: str | None = option(None, ())
  draft: str | None = option(None, ())
  parts: tuple[str, ...] = option(
    speculation_tasks.KINDS, speculation_tasks.KINDS
  )
  contestants: tuple[str, ...] = option(DRAFTERS, (*DRAFTERS, "best", "never"))
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
    if self.compare and (self.context or self.devices > 1):
      raise OptionError(
        "compare",
        "transformers, with a sharded sequence",
        "one device and the kinds of tasks",
        "leave --context and --devices out",
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationCase:
  """A kind of task.

  Attributes:
    kind: one of `PARTS`.
    tokens: of a prompt.
  """

  kind: str
  tokens: int

  def __str__(self) -> str:
    return f"{self.kind} T={self.tokens}"


class SpeculationBenchmark(harness.Benchmark):
  """Plain decoding and drafters, in turn, by kind of task."""

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
      for kind in speculation_tasks.KINDS
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
  def _mesh(self) -> Any:
    count = self.settings.devices
    if count == 1:
      return None
    return make_mesh((count,), ("seq",), devices=jax.devices()[:count])

  @functools.cached_property
  def model(self) -> Transformer:
    """The target."""
    from ringjax.models import small

    name, mesh = self.settings.model, self._mesh
    if name in rj.models.PRESETS:
      return rj.models.create(name, mesh=mesh)
    return rj.models.load(small.path() if name is None else name, mesh=mesh)

  @functools.cached_property
  def draft(self) -> Transformer | None:
    """The model that drafts; None: the target's first layer."""
    from ringjax.models import tiny

    folder = self.settings.draft
    if folder is not None:
      return rj.models.load(folder, mesh=self._mesh)
    if self.settings.model in rj.models.PRESETS:
      return None
    found = rj.models.load(tiny.path(), mesh=self._mesh)
    same = found.config.vocab == self.model.config.vocab
    return found if same else None

  @functools.cached_property
  def tokenizer(self) -> Any:
    from ringjax.models import small

    name = self.settings.model
    if name in rj.models.PRESETS:
      return rj.data.Bytes()
    return rj.data.Tokenizer.load(small.path() if name is None else name)

  @functools.cached_property
  def path(self) -> pathlib.Path:
    """Where the target is written for transformers."""
    folder = tempfile.TemporaryDirectory(prefix="ringjax-bench-")
    path = pathlib.Path(self.stack.enter_context(folder))
    rj.models.save(self.model, path / "model")
    return path / "model"

  def row(self, case: SpeculationCase, report: Report) -> Row:
    from ringjax.bench.speculation_contestants import Never, drafter
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
    whole = s.compare is not None
    asked = _Asked(self.model, prompts, s.new_tokens, self._mesh, whole)
    adapt, runs = s.lengths == "adapt", {}
    for name in s.contestants:
      if name == "never":
        runs[name] = lambda n: Never(answer=asked.plain[n], count=s.drafted)
        continue
      one = drafter(
        name, self.model, self.draft, s.drafted, adapt, s.draft_cache
      )
      runs[name] = lambda n, one=one: one
    runs = {
      "plain": asked.plainly,
      **{name: functools.partial(asked, name, x) for name, x in runs.items()},
    }
    with self._peers(prompts) as peers:
      runs |= peers
      results, _ = self.measure(
        list(runs),
        lambda name: (runs[name], runs[name]()),
        lambda found: (_differing(found, asked.plain), False),
        report,
        warmup=1,
      )
    plain = results["plain"]["median_s"]
    for name, one in results.items():
      one |= asked.facts(name)
      median = one["median_s"]
      count = len(prompts) * s.new_tokens
      one["tokens_per_s"] = median and count / median
      one["x_plain"] = median and plain and plain / median
      different = one["max_abs_difference"]
      one["equal"] = None if different is None else different == 0
    return {
      "kind": case.kind,
      "tokens": case.tokens,
      "new_tokens": s.new_tokens,
      "requests": len(prompts),
      "fresh": statistics.mean(map(_fresh, asked.plain)),
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
    """Of each drafter its best and median figures over the kinds."""
    found: Row = {}
    for name in dict.fromkeys(n for row in rows for n in row["results"]):
      here = [row["results"][name] for row in rows if name in row["results"]]
      of = lambda key, here=here: [x[key] for x in here if x.get(key)]
      found[name] = {
        key: {"median": statistics.median(values), "best": max(values)}
        for key in ("x_plain", "tokens_per_call", "acceptance")
        if (values := of(key))
      } | {"equal": all(x["equal"] is not False for x in here)}
    return found

  def table(self, case: SpeculationCase, row: Row) -> str:
    def more(one: Row) -> str:
      number = lambda key, form: (
        "-".rjust(6) if one.get(key) is None else format(one[key], form)
      )
      begin = one.get("begin_s")
      return (
        f"{one['tokens_per_s']:8.1f} tokens/s  x plain "
        f"{number('x_plain', '5.2f')}  a call "
        f"{number('tokens_per_call', '5.2f')}  accepted "
        f"{number('acceptance', '6.1%')}  begin "
        f"{'-' if begin is None else f'{1e3 * begin:.0f} ms':>8}  "
        f"cache {number('draft_bytes', '6.1%')}  "
        f"{'equal' if one['equal'] else 'DIFFERENT'}"
      )

    head = (
      f"{case}: {row['requests']} x {row['new_tokens']} new tokens, "
      f"{row['fresh']:.0%} fresh, "
      f"{self.model.config.family} on {self.settings.devices} device(s)"
    )
    return "\n".join([head, *harness.lines(row, more)]) + "\n"

  def closing(self, result: Row) -> str:
    lines = ["over all kinds, median (best)"]
    for name, one in result["summary"].items():
      both = "   ".join(
        f"{key} {one[key]['median']:.2f} ({one[key]['best']:.2f})"
        for key in ("x_plain", "tokens_per_call", "acceptance")
        if key in one
      )
      equal = "all equal" if one["equal"] else "NOT all equal"
      lines.append(f"  {name:22}{both}   {equal}")
    return "\n".join(lines)

  def draw(self, result: Row, path: str) -> None:
    """Acceptance by the place in a draft and by the prompt's length, and tokens
    a call by kind, at the shortest length."""
    rows = result["rows"]
    lengths = sorted({row["tokens"] for row in rows})
    names = [
      name
      for name in result["summary"]
      if "tokens_per_call" in result["summary"][name]
    ]
    colors = dict(zip(names, _COLORS, strict=False))
    figure = harness.figure(15 if lengths[1:] else 11, 3.6)
    left, right, *more = figure.subplots(1, 3 if lengths[1:] else 2)
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
      known = offered > 0
      x = np.flatnonzero(known) + 1
      y = stayed[known] / offered[known]
      left.plot(x, y, "o-", color=color, label=name, markersize=4)
    left.set_xlabel("place in the draft", fontsize=9)
    left.set_ylim(0, 1.02)
    harness.tidy(left, "acceptance behind tokens that stayed")
    height = lambda row, name: (
      row["results"].get(name, {}).get("tokens_per_call") or 0.0
    )
    first = [row for row in rows if row["tokens"] == lengths[0]]
    harness.bars(right, first, colors, height, lambda row: row["kind"])
    right.axhline(1, color="0.5", linewidth=1)
    harness.tidy(right, "tokens for each call of the target")
    right.legend(frameon=False, fontsize=8)
    for axes in more:
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
  """The mean over kinds of what was accepted behind prompts of a length."""
  found = [row["results"].get(name, {}) for row in rows
           if row["tokens"] == tokens]  # fmt: skip
  known = [x["acceptance"] for x in found if x.get("acceptance") is not None]
  return statistics.mean(known) if known else math.nan


_COLORS = (
  "#08519c", "#6baed6", "#d95f0e", "#31a354", "#756bb1", "#636363", "#fdae6b",
)  # fmt: skip


class _Asked:
  """Prompts that are read once, and answered as often as is asked.

  Attributes:
    plain: the answers without drafts.
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
    # Bytes of a draft model's cache, of those of the target's.
    self._bytes: dict[str, float] = {}
    self._sessions: list[Any] = []
    self.plain: list[np.ndarray] = []
    for prompt in [] if whole else prompts:
      # Trees take more slots for a while; a shard's last ones may stay empty.
      room = prompt.size + count + 64 + 2 * len(jax.devices())
      session = rj.infer.Session(model, room, mesh=mesh)
      rj.infer.read_context(model, [prompt[:-1]], cache=session)
      self._sessions.append((session, session.cache.snapshot()))

  def __call__(
    self, name: str, drafter_of: Callable[[int], Any]
  ) -> list[np.ndarray]:
    """The answers with a drafter for each prompt."""
    from ringjax.bench.speculation_contestants import ClockedDrafter
    from ringjax.infer.speculate.model_drafting import ModelDrafting

    found, reports, begun = [], [], 0.0
    for n, prompt in enumerate(self._prompts):
      noted = ClockedDrafter.around(drafter_of(n))
      how = dict(
        max_new_tokens=self._count, speculate=noted, report=reports.append
      )
      found.append(self._generate(n, prompt, **how))
      begun += noted.seconds[0]
      session = self._sessions[n][0] if self._sessions else None
      if session is not None and isinstance(session.drafting, ModelDrafting):
        share = session.drafting.nbytes() / session.cache.nbytes()
        self._bytes[name] = max(share, self._bytes.get(name, 0.0))
        # Others have caches of their own.
        session.drafting = None
    if name not in self._reports:
      self._reports[name] = [one.speculation for one in reports]
    self._begun.setdefault(name, []).append(begun)
    return found

  def plainly(self) -> list[np.ndarray]:
    """The answers without drafts; the first ones are kept."""
    found = [
      self._generate(n, prompt, max_new_tokens=self._count)
      for n, prompt in enumerate(self._prompts)
    ]
    self.plain = self.plain or found
    return found

  def _generate(self, n: int, prompt: np.ndarray, **how: Any) -> np.ndarray:
    if self._whole:
      return rj.infer.generate(self._model, [prompt], **how)[0]
    session, before = self._sessions[n]
    session.cache = session.cache.restore(before)
    return rj.infer.generate(self._model, [prompt[-1:]], cache=session, **how)[
      0
    ]

  def facts(self, name: str) -> Row:
    """What the reports of a drafter's first answers say."""
    if name not in self._reports:
      return {}
    reports = self._reports[name]
    total = np.sum([one.by_position for one in reports], 0)
    tokens, calls = (
      sum(getattr(one, key) for one in reports) for key in ("tokens", "calls")
    )
    return {
      "tokens_per_call": tokens / max(calls, 1),
      "acceptance": float(total[:, 1].sum() / max(total[:, 0].sum(), 1)),
      "drafted": sum(one.drafted for one in reports),
      "calls": calls,
      "by_position": total.tolist(),
      "begin_s": statistics.median(self._begun[name][1:] or [0.0]),
      "draft_bytes": self._bytes.get(name),
    }


def _fresh(answer: np.ndarray) -> float:
  """The share of runs of eight tokens that are not repeated."""
  runs = [tuple(answer[n : n + 8]) for n in range(max(1, len(answer) - 7))]
  return len(set(runs)) / len(runs)


def _differing(
  found: Sequence[np.ndarray], plain: Sequence[np.ndarray]
) -> float:
  """The share of tokens behind the first one that differs, itself included."""
  total = sum(map(len, plain))
  same = sum(_agreed(a, b) for a, b in zip(found, plain, strict=True))
  return 1 - same / total


def _agreed(a: np.ndarray, b: np.ndarray) -> int:
  count = min(len(a), len(b))
  return int(np.argmin(np.append(a[:count] == b[:count], False)))


def _pretrained(folder: str | os.PathLike[str]) -> Any:
  transformers = import_transformers()
  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=import_torch().float32, attn_implementation="sdpa"
  ).eval()
  # No id ends an answer, in ours neither.
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
  """Answers of transformers."""
  torch, how = import_torch(threads), {}
  if name == "transformers_lookup":
    how = dict(prompt_lookup_num_tokens=drafted, max_matching_ngram_size=3)
  elif name == "transformers_assisted":
    helper.generation_config.num_assistant_tokens = drafted
    how = dict(assistant_model=helper)
  found = []
  for prompt in prompts:
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    with torch.inference_mode():
      new = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        **how,
      )
    found.append(new[0, prompt.size :].numpy().astype(np.int32))
  return found
