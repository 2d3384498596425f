"""Server metrics in the text format of Prometheus.

Ref: https://prometheus.io/docs/instrumenting/exposition_formats
"""

from __future__ import annotations

import bisect
import collections
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ringjax.serve.request import Answer, Handle

if TYPE_CHECKING:
  from ringjax.serve.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# Metrics of each tenant's ended requests.
_OF_TENANTS = {
  "requests_total": "Requests that are over.",
  "requests_cancelled_total": "Requests given up.",
  "requests_failed_total": "Requests that raised an error.",
  "prompt_tokens_total": "Tokens of prompts that were not found.",
  "cached_tokens_total": "Tokens of prompts found.",
  "new_tokens_total": "Tokens of answers.",
}


class Figure(NamedTuple):
  """One metric of a server.

  Fields:
    kind: "counter" or "gauge".
    name: Name of the metric, without the prefix "ringjax_".
    value: Current value.
    text: Help text.
  """

  kind: str
  name: str
  value: int
  text: str


class LatencyHistogram:
  """Histogram of latencies in seconds."""

  def __init__(self, name: str, text: str, bounds: Sequence[int | float]):
    self.name, self.text, self.bounds = name, text, tuple(bounds)
    self.counts = [0] * (len(bounds) + 1)
    self.total = 0.0

  def observe(self, seconds: float) -> None:
    """Adds a latency."""
    self.counts[bisect.bisect_left(self.bounds, seconds)] += 1
    self.total += seconds

  def lines(self) -> Iterator[str]:
    """Lines in the text format of Prometheus."""
    yield f"# HELP {self.name} {self.text}"
    yield f"# TYPE {self.name} histogram"
    sums = list(itertools.accumulate(self.counts))
    bounds = [f"{bound:g}" for bound in self.bounds] + ["+Inf"]
    for bound, count in zip(bounds, sums, strict=True):
      yield f'{self.name}_bucket{{le="{bound}"}} {count}'
    yield f"{self.name}_sum {self.total!r}"
    yield f"{self.name}_count {sums[-1]}"


# Metrics of an engine that reads parts of prefixes.
_OF_PARTS = (
  (
    "important_rows_total",
    "important_rows",
    "Rows with a prefix in part.",
  ),
  (
    "important_prefix_tokens_total",
    "important_prefix",
    "Tokens of prefixes that were read in part.",
  ),
  (
    "important_tokens_total",
    "important_tokens",
    "Tokens of these that were kept.",
  ),
  (
    "important_bytes_total",
    "important_bytes",
    "Bytes of the store that were read for these.",
  ),
  (
    "important_probe_bytes_total",
    "important_probe_bytes",
    "Bytes of these that are keys of probe heads.",
  ),
  (
    "important_bytes_left_total",
    "important_bytes_left",
    "Bytes of keys and values that were not read.",
  ),
  (
    "important_failed_total",
    "important_failed",
    "Prefixes whose part could not be chosen, and that were computed instead.",
  ),
)


class _Counts:
  """Counts and latencies of one tenant, or of all."""

  def __init__(self) -> None:
    self.first = LatencyHistogram(
      "ringjax_first_token_seconds",
      "From a request's arrival to the first token of an answer.",
      _FIRST,
    )
    self.between = LatencyHistogram(
      "ringjax_token_seconds", "Between two tokens of an answer.", _BETWEEN
    )
    self.whole = LatencyHistogram(
      "ringjax_answer_seconds",
      "From a request's arrival to the end of an answer.",
      _WHOLE,
    )
    self.answers: collections.Counter[tuple[str, int]] = collections.Counter()
    self.numbers: collections.Counter[str] = collections.Counter()

  def figures(self) -> list[Figure]:
    """Metrics of a tenant's requests, in place of the engine's."""
    return [
      Figure("counter", name, self.numbers[name], text)
      for name, text in _OF_TENANTS.items()
    ]


class ServerMetrics:
  """Counts of HTTP answers and of tenants' requests, and times of tokens."""

  def __init__(self) -> None:
    self._all = _Counts()
    self._tenants: dict[str, _Counts] = {}
    self._lock = threading.Lock()

  def _of(self, tenant: str) -> tuple[_Counts, ...]:
    """Counts to update for a tenant; "" stands for an unknown one."""
    if not tenant:
      return (self._all,)
    return self._all, self._tenants.setdefault(tenant, _Counts())

  def answered(self, path: str, status: int, tenant: str = "") -> None:
    """Counts an HTTP answer."""
    with self._lock:
      for counts in self._of(tenant):
        counts.answers[path, status] += 1

  def ended(self, handles: Sequence[Handle], tenant: str = "") -> None:
    """Counts requests that have ended or were cancelled."""
    numbers = {
      "requests_total": len(handles),
      "requests_cancelled_total": sum(
        any(a.finish in (None, "cancelled") for a in h.answers) for h in handles
      ),
      "requests_failed_total": sum(
        any(a.error is not None for a in h.answers) for h in handles
      ),
      "prompt_tokens_total": sum(
        max(0, len(h.request.prompt) - h.cached_tokens) for h in handles
      ),
      "cached_tokens_total": sum(h.cached_tokens for h in handles),
      "new_tokens_total": sum(
        len(a.tokens) for h in handles for a in h.answers
      ),
    }
    with self._lock:
      for counts in self._of(tenant):
        counts.numbers.update(numbers)

  def watch(
    self, then: Callable[[Answer], None], tenant: str = ""
  ) -> Callable[[Answer], None]:
    """Callback that measures one request's answers and then calls `then`."""
    start = time.monotonic()
    last: dict[int, tuple[int, float]] = {}

    def changed(answer: Answer) -> None:
      current_time, count = time.monotonic(), len(answer.tokens)
      count_before, at = last.get(id(answer), (0, start))
      with self._lock:
        for counts in self._of(tenant):
          if count > count_before:
            (counts.between if count_before else counts.first).observe(
              current_time - at
            )
          if answer.finish is not None:
            counts.whole.observe(current_time - start)
        if count > count_before:
          last[id(answer)] = count, current_time
      then(answer)

    return changed

  def text(self, figures: Sequence[Figure], tenant: str | None = None) -> str:
    """All metrics in the text format of Prometheus.

    Args:
      figures: Metrics of the engine.
      tenant: Tenant whose own numbers are shown, without the engine's; None for
        all numbers, with those of each tenant.
    """
    with self._lock:
      counts = self._all
      if tenant is not None:
        counts = self._tenants.get(tenant) or _Counts()
        figures = counts.figures()
      lines: list[str] = []
      for kind, name, value, text in figures:
        lines.append(f"# HELP ringjax_{name} {text}")
        lines.append(f"# TYPE ringjax_{name} {kind}")
        lines.append(f"ringjax_{name} {int(value)}")
      lines.append("# HELP ringjax_http_answers_total Answers by path, status.")
      lines.append("# TYPE ringjax_http_answers_total counter")
      for (path, status), count in sorted(counts.answers.items()):
        lines.append(
          f'ringjax_http_answers_total{{path="{path}",status="{status}"}} '
          f"{count}"
        )
      for histogram in (counts.first, counts.between, counts.whole):
        lines.extend(histogram.lines())
      if tenant is None:
        lines.extend(self._of_tenants())
    return "\n".join(lines) + "\n"

  def _of_tenants(self) -> Iterator[str]:
    if not self._tenants:
      return
    for name, text in _OF_TENANTS.items():
      yield f"# HELP ringjax_tenant_{name} By tenant: {text}"
      yield f"# TYPE ringjax_tenant_{name} counter"
      for tenant, counts in sorted(self._tenants.items()):
        label = _quoted(tenant)
        yield f"ringjax_tenant_{name}{{tenant={label}}} {counts.numbers[name]}"


def _quoted(text: str) -> str:
  """Escaped and quoted value of a label."""
  for old, new in (("\\", r"\\"), ('"', r"\""), ("\n", r"\n")):
    text = text.replace(old, new)
  return f'"{text}"'


def engine_figures(engine: Engine) -> list[Figure]:
  """Metrics of an engine: its counters and current gauges."""
  counters, scheduler = engine.counters, engine.scheduler
  figures: list[Figure] = []
  put = lambda *one: figures.append(Figure(*one))
  for name, field, text in (
    ("requests_total", "requests", "Requests to the engine."),
    ("requests_finished_total", "finished", "Requests that ended."),
    ("requests_cancelled_total", "cancelled", "Requests given up."),
    ("requests_failed_total", "failed", "Requests that raised an error."),
    (
      "requests_not_finite_total",
      "not_finite",
      "Requests whose logits were NaN or infinite.",
    ),
    ("steps_total", "steps", "Steps of the engine."),
    ("prompt_tokens_total", "prompt_tokens", "Tokens of prompts computed."),
    ("cached_tokens_total", "cached_tokens", "Tokens of prompts found."),
    ("new_tokens_total", "new_tokens", "Tokens of answers."),
    ("drafted_tokens_total", "drafted", "Drafted tokens that were checked."),
    ("accepted_tokens_total", "accepted", "Drafted tokens that were right."),
    ("drafted_steps_total", "drafted_steps", "Steps that checked drafts."),
    (
      "plain_steps_total",
      "plain_steps",
      "Steps for answers that checked no drafts.",
    ),
    (
      "drafts_paused_timing_total",
      "paused_timing",
      "Steps without drafts, which were to be timed.",
    ),
    (
      "drafts_paused_slower_total",
      "paused_slower",
      "Steps without drafts, since these took more time than they saved.",
    ),
    (
      "drafts_paused_costly_total",
      "paused_costly",
      "Steps without drafts, which could have cost more than 5 %.",
    ),
    (
      "undrafted_rows_total",
      "undrafted",
      "Rows without drafts, whose logits were NaN or infinite.",
    ),
    ("preemptions_total", "preemptions", "Rows that had to make room."),
    ("stored_tokens_total", "stored_tokens", "Tokens of prompts from a store."),
    ("restarts_total", "restarts", "Starts of the server after a loss."),
    (
      "keys_read_total",
      "keys_read",
      "Keys that answers read, shared ones once.",
    ),
    (
      "keys_referenced_total",
      "keys_seen",
      "Keys that rows of answers refer to.",
    ),
  ):
    figures.append(Figure("counter", name, getattr(counters, field), text))
  if engine.important is not None:
    for name, field, text in _OF_PARTS:
      put("counter", name, getattr(counters, field), text)
  tree, rows = scheduler.tree, list(scheduler.running)
  put("gauge", "rows_waiting", len(scheduler.waiting), "Answers in queue.")
  running = sum(row is not None for row in rows)
  put("gauge", "rows_running", running, "Answers that are being made.")
  put("gauge", "engine_up", engine.open, "Whether requests are taken.")
  together = not engine.reads_apart
  put("gauge", "shared_reads", together, "Whether common pages are read once.")
  pages = tree.groups[0].pages * tree.shards
  room = sum(tree.available(shard) for shard in range(tree.shards))
  put("gauge", "pages", pages, "Pages of the pool.")
  put("gauge", "pages_free", tree.free(), "Pages that hold nothing.")
  put("gauge", "pages_used", pages - room, "Pages that answers use.")
  put("gauge", "pages_cached", room - tree.free(), "Pages of idle prefixes.")
  return figures
