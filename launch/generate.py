"""Answers a prompt on a long document, which all devices read together.

  python -m launch.generate
      A small model, which ships with ringjax, reads sources of Python's
      standard library in which a passkey is hidden, on 8 CPU devices, and is
      asked for it.
  python -m launch.generate --model=DIR --prompt_file=F --prompt="Who did it?"
      Any Hugging Face folder, a document and a question.
  python -m launch.generate --context=100000 --mesh=data:1,seq:4 \\
      --prefill=chunked --chunk=4096 --cache=unrotated
      A longer document on four devices, 4096 tokens at a time, into another
      kind of cache.

  python -m launch.generate --model=DIR --contexts=DIR --prompt="Who did it?" \\
      --combine=ape
      The texts of a folder, each encoded separately; with --store they are
      kept, and another question does not read them again.

  python -m launch.generate --model=DIR --memory=6GiB
      A model that is larger than the devices' memory: of its layers as many as
      fit are on the devices, the others in host memory, or on disk
      (--placement=disk), and are fetched when they run. With --disk=FOLDER the
      keys of layers that do not run are in host memory or in that folder too.

  python -m launch.generate --model=DIR --processes=4 --window=4
      Four processes that each have some heads and columns of every layer, and
      four blocks of their weights in memory: see launch/shared/tensor_ranks.py.

The answer goes to stdout as it comes, all else to stderr. Ctrl-C ends an
answer early. With several processes (see launch/shared/common.py) all get the
same flags and the first one prints; only it needs the document.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh

import ringjax as rj
from ringjax.checks import positive_int
from ringjax.data import LinkTokens, Tokenizer
from ringjax.data.tasks.link_tokens import LINKS
from ringjax.errors import OptionError
from ringjax.infer import PrefillConfig, Sample, Stop, contexts, speculate
from ringjax.infer.llm_npu.two_processors import TwoProcessorReading
from ringjax.infer.stopping import Watch
from ringjax.json_text import json_text
from ringjax.kv import KINDS, kind_text
from ringjax.models import tiny
from ringjax.models.gguf.gguf_folder import open_model
from ringjax.models.hf import tensors
from ringjax.models.rope_scaling import read_extended
from ringjax.models.transformer import Transformer
from ringjax.paths import AnyPath
from ringjax.plan.flexgen.offload_costs import OffloadPolicy
from ringjax.plan.flexgen.offload_tiers import TIERS

from .answers import answer_entropy, next_prompt
from .shared import (
  answering,
  common,
  console,
  integer_flags,
  machines,
  model_flags,
  prompts,
  tensor_ranks,
)
from .shared.flag_helpers import FlagHelper, model_folder
from .shared.group import Group

NAME = "generate"
_NEW_TOKENS = 256
# Maximum bytes of --store.
_STORE_BYTES = 1 << 40
# Tokens of a chunk where two devices prefill.
_CHUNK = 256
_MEMORY = (
  "shard the sequence over more devices (--mesh=seq:N), or read less at a "
  "time (--prefill=chunked --chunk=1024)"
)


def define(values: flags.FlagValues) -> None:
  """Defines the flags of this script."""
  new = FlagHelper(values)
  model_flags.define(
    values,
    more=("keep", "combine"),
    says={
      "max_new_tokens": f"Default: {_NEW_TOKENS}, for the passkey "
      f"{prompts.ANSWER_TOKENS}.",
      "seed": "Also of the passkey; refused without either.",
    },
  )
  new.boolean("chat", None, "Use the chat template; default: if there is one.")
  new.boolean("raw", False, "Use no chat template, as --nochat.")
  new.text(
    "prompt", None, "What to continue or, with a file, the question on it."
  )
  new.place("prompt_file", None, "A document, UTF-8; - is stdin.")
  new.place(
    "next_prompt_file",
    None,
    "A second prompt, read in chunks while the first one is answered, in one "
    "program. Both answers are printed at the end. With --mesh=model:N, N of 2 "
    "or more.",
  )
  new.place(
    "contexts", None, "A folder of .txt files that the prompt is about."
  )
  new.place(
    "store",
    None,
    "A folder or an address that keeps what was read of contexts or, with "
    "--important, of the document.",
  )
  new.number(
    "important",
    None,
    "Part of a document's tokens in --store that the question and its answer "
    "see, those that the question looks at (IMPRESS): approximate.",
  )
  new.whole(
    "context",
    None,
    "Tokens of the prompt that is made up if none is given; "
    f"{prompts.CONTEXT:,}.",
    None,
  )
  new.number("depth", 0.4, "Where the passkey hides in it: 0 begin, 1 end.")
  new.text(
    "policy",
    None,
    "A placement of launch.plan offload, of weights, keys and hidden states: "
    "4x1:20/80,0/100,0/100; what is left of 100 is on disk.",
  )
  tensor_ranks.define(FlagHelper(values, "A model in several processes."))
  new.boolean(
    "entropy",
    False,
    "Measure the entropy of the answer's attention, in one more call of the "
    "model on the prompt and its answer.",
  )
  new.boolean("json", False, "One JSON object on stdout, and nothing else.")
  common.define(values)


def run(
  values: flags.FlagValues,
  *,
  stdout: TextIO | None = None,
  stderr: TextIO | None = None,
) -> int:
  """Answers as the flags say; returns the exit status."""
  stdout = sys.stdout if stdout is None else stdout
  if tensor_ranks.asked(values):
    return tensor_ranks.run(
      values, _check, model_flags.sampler, stdout=stdout, stderr=stderr
    )
  screen = console.Screen(NAME, stderr)
  job = console.Job()
  work = _Work(values, stdout, screen, job)
  with console.Run(
    screen,
    _MEMORY,
    doing=lambda: work.doing,
    reports=work.group,
    # The thread that generates ends only with the process.
    leaving=console.leave_at_once,
    pipe_ends=True,
    tidy=work.close,
  ) as run:
    tensor_ranks.refuse(values)
    _check(values)
    common.start(values, single=values.model is not None)
    record = job.run(work.run)
  if run.status:
    return run.status
  work.group.close()
  work.tell(record)
  return console.INTERRUPTED if job.stop else 0


class _Work:
  """One run of the script; `doing` is its current stage, for errors."""

  def __init__(
    self,
    values: flags.FlagValues,
    stdout: TextIO,
    screen: console.Screen,
    job: console.Job,
  ):
    self.doing = "starting"
    self.group = Group(screen, lambda: self.doing)
    self._values = values
    self._out = stdout
    self._screen = screen
    self._job = job
    self._written = ""
    # Arguments of `rj.infer.generate` about contexts.
    self._contexts: dict[str, Any] = {}
    # With --important: a session that has read the important tokens of a
    # document, and the ids of the question.
    self._important_session: tuple[rj.infer.Session, np.ndarray] | None = None
    self._drafter: speculate.Drafter | None = None
    self._chunk = _CHUNK
    # Text of --next_prompt_file.
    self._next_text = ""
    # Stays empty in all processes but the first.
    self._prompt = prompts.Prompt(document="", question="", source="")

  def run(self) -> dict[str, Any]:
    """Reads the prompt and answers; returns all figures."""
    values = self._values
    self._screen.quiet = jax.process_index() > 0
    self.group.meet(values, own=("json",))
    on_two = integer_flags.reading(values)
    if values.important is not None and jax.process_count() > 1:
      raise prompts.clash(
        "--important in several processes",
        "one process: tokens are chosen with the whole model on one device",
      )
    mesh = common.mesh("seq:1" if on_two else values.mesh)
    answer_entropy.refuse_mesh(values, mesh)
    next_prompt.refuse_mesh(values, mesh)
    folder = model_folder(values, tiny.path)
    count, kind = mesh.devices.size, mesh.devices.flat[0].device_kind
    if on_two:
      count = len(on_two["devices"])
    devices_text = _where(count, kind, mesh.shape, jax.process_count())
    self._screen.say(f"devices: {devices_text}")
    if not prompts.made_up(values):
      # Before the model is loaded: the file may be unreadable.
      common.share(self._read_prompt)
    if values.contexts is not None and jax.process_index() == 0:
      prompts.find_contexts(values.contexts)
    encoded = None
    if values.memory is not None and values.contexts is None:
      # The number of tokens determines the memory that is left for weights.
      encoded = self._encoded(folder, _positions(folder, values))
    tokens = None if encoded is None else len(encoded[2])
    model, about = self._load(folder, mesh, tokens)
    tokenizer, chat, ids = encoded or self._encoded(
      folder, model.config.max_positions
    )
    if values.speculate is not None:
      self._drafter = model_flags.drafter(values.speculate, tokenizer)
    if values.contexts is not None:
      ids = self._read_contexts(model, mesh, tokenizer, chat, folder)
    if values.important is not None:
      self._read_important(model, tokenizer, chat)
    strings = tuple(values.stop)
    if not strings and chat is None and prompts.made_up(values):
      # The answer to the passkey task is one line.
      strings = ("\n",)
    eos = tuple(i for i in tokenizer.eos_ids if i < model.config.vocab)
    watch = Stop(ids=eos, strings=strings).watch(tokenizer)
    two = None
    if values.next_prompt_file is not None:
      stop = Stop(ids=eos, strings=strings)
      return about | self._answer_both(model, mesh, ids, stop, tokenizer, chat)
    if on_two:
      two = self._read_on_two(model, ids[:-1], on_two)
    record = about | self._answer(model, mesh, ids, eos, watch, two)
    return (
      record if two is None else record | self._two_device_record(two, record)
    )

  def _read_on_two(
    self, model: Transformer, ids: np.ndarray, options: Mapping[str, Any]
  ) -> TwoProcessorReading:
    """Prefills all but the last token of a prompt on two devices."""
    if not ids.size:
      raise OptionError(
        "--integer",
        "devices=2 for a prompt of one token",
        "two tokens or more",
        "leave devices= out",
      )
    chunk = self._values.chunk
    chunk = min(_CHUNK, ids.size) if chunk is None else chunk
    positive_int("--chunk", chunk)
    self._chunk = chunk
    capacity = -(-ids.size // chunk) * chunk + 1 + self._count()
    self._begin(f"reading {ids.size:,} tokens on two devices", "reading")
    return rj.infer.read_on_two(
      model, ids[None], chunk=chunk, capacity=capacity, **options
    )

  def _read_prompt(self) -> np.ndarray:
    """Reads the prompt of the flags; returns its characters, int32 [1]."""
    self._prompt = prompts.from_flags(self._values)
    path = self._values.next_prompt_file
    if path is not None:
      self._next_text = prompts.read_file(path, "--next_prompt_file")
      prompts.refuse_blank(
        "--next_prompt_file", self._next_text, f"{path!r}, without text"
      )
    size = len(self._prompt.document) + len(self._prompt.question)
    return np.array([size], np.int32)

  def _encoded(
    self, folder: AnyPath, positions: int
  ) -> tuple[Tokenizer, Any, np.ndarray]:
    """Loads the tokenizer and chat template, and encodes the prompt."""
    values = self._values
    self._begin("encoding the prompt", "encoding the prompt")
    tokenizer = Tokenizer.load(folder, untrusted=values.model is not None)
    chat = prompts.chat(values, tokenizer)

    def encode() -> np.ndarray:
      if prompts.made_up(values):
        self._prompt = prompts.make(values, tokenizer, positions)
      return prompts.encode(self._prompt, values, tokenizer, chat)

    ids = common.share(encode)
    self._screen.say(f"prompt: {len(ids):,} tokens, {self._prompt.source}")
    return tokenizer, chat, ids

  def _load(
    self, folder: AnyPath, mesh: Mesh | None, tokens: int | None
  ) -> tuple[Transformer, dict[str, Any]]:
    self._begin(f"loading {folder}", "loading the model")
    start = time.monotonic()
    values, policy = self._values, _policy(self._values)
    model = model_flags.load(
      values,
      folder,
      None if integer_flags.reading(values) else mesh,
      self._screen.say,
      policy=None if policy is None else policy["placement"],
      beside=None if tokens is None else self._memory_needs(tokens),
    )
    jax.block_until_ready(model)
    params = tensors.parameters(model).values()
    placed = model.placement_report()
    resident = sum(p.get_value().size for p in params)
    about = {
      "model": str(folder),
      "family": model.config.family,
      "parameters": resident + placed.streamed_parameters,
      "dtype": jax.numpy.dtype(model.dtype).name,
      "load_s": time.monotonic() - start,
    }
    self._screen.say(
      f"model: {about['family']}, {about['parameters']:,} parameters, "
      f"{about['dtype']}, in {about['load_s']:.1f} s"
    )
    model_flags.tell_placement(model, self._screen.say)
    return model, about

  def _memory_needs(
    self, tokens: int
  ) -> Callable[[Transformer, Any], Mapping[str, Mapping[str, int]]]:
    """Returns a function that counts the bytes that a call needs.

    --memory leaves room for them next to the weights.

    Args:
      tokens: Number of tokens of the prompt.
    """
    values, count = self._values, self._count()

    def needs(
      model: Transformer, mesh: Mesh | None
    ) -> Mapping[str, Mapping[str, int]]:
      call = rj.infer.CallMemory(
        prompt=tokens,
        new=count,
        prefill=values.prefill,
        chunk=values.chunk,
        machine=machines.machine(values),
        cache_kind=kind_text.parse(values.cache, "--cache"),
        **self._offload(model, mesh, tokens + count),
      )
      return call(model, mesh)

    return needs

  def _count(self) -> int:
    """Largest number of tokens to generate."""
    if self._values.max_new_tokens is not None:
      return self._values.max_new_tokens
    made_up = prompts.made_up(self._values)
    return prompts.ANSWER_TOKENS if made_up else _NEW_TOKENS

  def _read_important(
    self, model: Transformer, tokenizer: Tokenizer, chat: Any
  ) -> None:
    """Creates a session with the document's tokens that the question needs."""
    values, screen = self._values, self._screen
    document, question = prompts.around_question(
      self._prompt, values, tokenizer, chat
    )
    self._begin(
      f"choosing of {len(document):,} tokens", "choosing important tokens"
    )
    with answering.store(values.store, _STORE_BYTES) as store:
      work = contexts.ImportantPrefixes(
        model, store, important=values.important
      )
      session = work.session(
        [document], [question], capacity=len(question) + self._count()
      )
    self._important_session = session, question
    counters, source = (
      work.counters,
      "read before" if work.reused else "read now",
    )
    screen.say(
      f"document: {len(document):,} tokens, {source}; "
      f"{counters.chunk_bytes / 1e6:,.1f} MB of chunks loaded, "
      f"{counters.fallbacks} of {counters.layers} layers by all heads"
    )

  def _read_contexts(
    self,
    model: Transformer,
    mesh: Mesh | None,
    tokenizer: Tokenizer,
    chat: Any,
    folder: AnyPath,
  ) -> np.ndarray:
    """Encodes the contexts; returns the ids of the question."""
    values, screen = self._values, self._screen
    combine = contexts.combine_of(values.combine or "parallel", "--combine")

    def encode() -> list[np.ndarray]:
      first, question = prompts.around_contexts(
        self._prompt, values, tokenizer, chat
      )
      return [
        np.asarray(first, np.int32),
        question,
        *prompts.contexts(values.contexts, tokenizer),
      ]

    first, question, *texts = common.share_lists(encode)
    prefix = tuple(int(n) for n in first)
    if isinstance(combine, contexts.Cepe):
      # An encoder reads the contexts: the decoder gets no tokens of them.
      self._contexts = {"contexts": texts, "combine": combine}
      return np.concatenate([np.asarray(prefix, np.int32), question])
    combine = dataclasses.replace(combine, prefix=prefix)
    if isinstance(combine, contexts.KVLink) and (folder / LINKS).exists():
      links = LinkTokens.load(folder, vocab=model.config.vocab)
      combine = dataclasses.replace(combine, links=links)
    elif isinstance(combine, contexts.KVLink):
      screen.say(f"note: no {LINKS} in {folder}: contexts without link tokens")
    self._contexts = {"contexts": texts, "combine": combine}
    if isinstance(combine, contexts.Full):
      self._contexts = {}
      return np.concatenate([np.asarray(prefix, np.int32), *texts, question])
    store = None
    if values.store is not None:
      store = answering.store(values.store, _STORE_BYTES)
    kind = kind_text.parse(values.cache, "--cache")
    if not values["cache"].present:
      kind = KINDS["unrotated" if combine.moves else "dense"]
    library = rj.infer.ContextLibrary(
      model,
      prefix=combine.shared_prefix,
      cache_kind=kind,
      mesh=mesh,
      store=store,
    )
    self._begin(
      f"reading {len(texts):,} contexts", "reading contexts", len(texts),
      "contexts",
    )  # fmt: skip
    self._contexts["contexts"] = library.encode(texts, progress=screen.at)
    self._contexts["library"] = library
    if store is not None:
      store.close()
    counters = library.counters
    screen.say(
      f"contexts: {len(texts):,}, {counters.reused:,} of them read before; "
      f"{counters.tokens:,} tokens computed"
    )
    return question

  def _answer_both(
    self,
    model: Transformer,
    mesh: Any,
    ids: np.ndarray,
    stop: Stop,
    tokenizer: Tokenizer,
    chat: Any,
  ) -> dict[str, Any]:
    """Answers the prompt, and the one of --next_prompt_file."""
    following = prompts.Prompt(
      document="",
      question=self._next_text,
      source=self._values.next_prompt_file,
    )
    next_ids = common.share(
      lambda: prompts.encode(following, self._values, tokenizer, chat)
    )
    self._begin("answering one prompt, reading the next", "answering")
    answers = next_prompt.answer(
      model, mesh, ids, next_ids, values=self._values, count=self._count(),
      stop=stop, tokenizer=tokenizer, write=self._write,
    )  # fmt: skip
    self.close()
    return answers

  def _answer(
    self,
    model: Transformer,
    mesh: Any,
    ids: np.ndarray,
    eos: tuple[int, ...],
    watch: Watch,
    two: TwoProcessorReading | None,
  ) -> dict[str, Any]:
    values, screen = self._values, self._screen
    count, prompt_tokens = self._count(), len(ids)
    config = model_flags.config(values).replace(
      max_new_tokens=count, speculate=self._drafter, stop=eos, cache_kind=None
    )
    options: dict[str, Any]
    if self._important_session is not None:
      session, ids = self._important_session
      options = {"cache": session}
    elif two is None:
      options = {
        **self._where(mesh),
        **self._offload(model, mesh, prompt_tokens + count),
        "machine": machines.machine(values),
      }
    else:
      # All but the last token are in the cache.
      options = {"cache": two.session, "prefill": PrefillConfig()}
      ids = ids[-1:]
    clock, new, reports = _Clock(time.monotonic()), [], []
    self._begin(
      f"reading {len(ids):,} tokens", "reading the prompt", len(ids), "tokens"
    )

    def stream(row: np.ndarray) -> bool:
      clock.token()
      if not new:
        screen.end()
        self.doing = "answering"
        self._job.gentle = jax.process_count() == 1
      new.append(int(row[0]))
      self._write(watch.feed(new[-1]))
      return watch.stopped is not None or self._job.stop

    def progress(done: int) -> None:
      screen.at(done)
      if done >= len(ids):
        clock.read_s = time.monotonic() - clock.start

    with console.Compiling() as compiling:
      rj.infer.generate(
        model,
        [ids],
        config,
        **options,
        stream=stream,
        progress=progress,
        report=reports.append,
      )
    self._write(watch.flush())
    self.close()
    stopped = watch.stopped
    if stopped is None:
      stopped = "Ctrl-C" if self._job.stop else "max_new_tokens"
    (report,) = reports
    compile_seconds = lambda until: compiling.seconds(clock.start + until)
    decode_compile_s = compile_seconds(clock.last_s) - compile_seconds(
      clock.first_s
    )
    passkey, entropy = self._prompt.passkey, None
    if values.entropy and new:
      self._begin("measuring attention", "measuring attention")
      entropy = answer_entropy.measure(model, ids, new, self._contexts, mesh)
      screen.end()
    return {
      "answer": self._written,
      "tokens": new,
      "stopped": stopped,
      "prompt_tokens": prompt_tokens,
      "source": self._prompt.source,
      "depth": self._prompt.depth,
      "passkey": passkey,
      "passkey_found": None if passkey is None else passkey in self._written,
      "platform": jax.default_backend(),
      "devices": int(mesh.devices.size),
      "processes": jax.process_count(),
      "mesh": {name: int(n) for name, n in mesh.shape.items()},
      "prefill": report.prefill.name,
      "prefill_why": report.prefill.why,
      "chunk": report.prefill.chunk,
      "cache": str(report.cache_kind),
      "first_token_s": clock.first_s,
      "compile_s": compile_seconds(clock.first_s),
      "prefill_s": clock.read_s - compile_seconds(clock.read_s),
      "decode_s": clock.last_s - clock.first_s - decode_compile_s,
      "decode_compile_s": decode_compile_s,
      "cache_bytes_per_device": report.cache_bytes,
      "memory": {k: dict(x) for k, x in report.memory.items()},
      "cache_tokens": report.capacity,
      "contexts": _contexts_record(report.contexts),
      "entropy": entropy,
      "speculation": _drafts_record(report.speculation),
      "placement": _placement_record(model),
      "neurons": _neurons_record(model),
      "two_devices": None,
      "tiles": None if report.tiles is None else report.tiles.record(),
      "fetches": None if report.fetches is None else report.fetches.record(),
    }

  def _two_device_record(
    self, two: TwoProcessorReading, record: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Figures that differ when two devices read the prompt."""
    return {
      "devices": 2,
      "prefill": "two devices",
      "prefill_why": "--integer with devices=2",
      "chunk": self._chunk,
      "prefill_s": two.seconds,
      "first_token_s": record["first_token_s"] + two.seconds,
      "two_devices": {
        "waiting": two.waiting,
        "step_s": two.step_seconds,
        "simulated_s": {k: x.seconds for k, x in two.simulated().items()},
      },
    }

  def _where(self, mesh: Mesh | None) -> dict[str, Any]:
    """Arguments of `generate` for the cache and mesh, or for contexts."""
    if "library" in self._contexts:
      return self._contexts
    kind = kind_text.parse(self._values.cache, "--cache")
    return {"cache_kind": kind, "mesh": mesh, **self._contexts}

  def _offload(
    self, model: Transformer, mesh: Mesh | None, tokens: int
  ) -> dict[str, Any]:
    """Arguments of `generate` that place the cache and hidden states.

    Args:
      model: Model of the call.
      mesh: Mesh of the call.
      tokens: Number of tokens of the prompt and its answer.
    """
    values, policy = self._values, _policy(self._values)
    if policy is not None:
      placements = {k: x for k, x in policy.items() if k != "placement"}
      return placements | {"disk": values.disk}
    return model_flags.offload(values, model, tokens)

  def tell(self, done: dict[str, Any]) -> None:
    """Prints the figures, in words or as JSON."""
    if jax.process_index():
      return
    if self._values.json:
      print(json_text(done), file=self._out, flush=True)
    lines = next_prompt.summary(done) if "next" in done else summary(done)
    for line in lines:
      self._screen.say(line)

  def close(self) -> None:
    """Ends the answer's last line."""
    if self._written and not self._written.endswith("\n"):
      self._put("\n")

  def _begin(self, label: str, doing: str, total: int = 0, unit: str = ""):
    self.doing = doing
    self._screen.begin(label, total, unit)

  def _write(self, text: str) -> None:
    self._written += text
    self._put(text)

  def _put(self, text: str) -> None:
    if text and not self._values.json and jax.process_index() == 0:
      self._out.write(text)
      self._out.flush()


def _positions(folder: AnyPath, values: flags.FlagValues) -> int:
  """The longest context that the config of a folder's model allows."""
  config, _, _ = read_extended(
    open_model(folder).config, values.rope_scaling, strict=values.strict
  )
  return config.max_positions


def _policy(values: flags.FlagValues) -> dict[str, Any] | None:
  """Placements of --policy for `load` and `generate`, or None."""
  if values.policy is None:
    return None
  policy = OffloadPolicy.parse(values.policy)
  placement_of = lambda x: rj.models.Placement(
    **dict(zip(TIERS, x, strict=True))
  )
  return {
    "placement": placement_of(policy.weights),
    "rows_at_once": policy.rows,
    "cache_placement": placement_of(policy.cache),
    "hidden_placement": placement_of(policy.hidden),
  }


class _Clock:
  """Seconds from the start to the end of prefill, first and last token."""

  def __init__(self, start: float):
    self.start = start
    self.read_s = self.first_s = self.last_s = 0.0

  def token(self) -> None:
    self.last_s = time.monotonic() - self.start
    self.first_s = self.first_s or self.last_s


def summary(done: dict[str, Any]) -> list[str]:
  """Lines of text that summarize the figures of a run."""
  rate = lambda n, s: console.per_second(n / s) if s > 0 else "-"
  device_fields = (
    done[name] for name in ("devices", "platform", "mesh", "processes")
  )
  chunk = f" of {done['chunk']:,} tokens" if done["chunk"] else ""
  cache = console.nbytes(done["cache_bytes_per_device"])
  compiling = ""
  if done["decode_compile_s"] >= 0.01:
    compiling = f"; {done['decode_compile_s']:.2f} s of compiling beside"
  lines = {
    "prompt": f"{done['prompt_tokens']:,} tokens, {done['source']}",
    "devices": _where(*device_fields),
    "prefill": f"{done['prefill']}{chunk} ({done['prefill_why']}), "
    f"{rate(done['prompt_tokens'], done['prefill_s'])} tokens/s",
    "first token": f"after {done['first_token_s']:.2f} s, "
    f"{done['compile_s']:.2f} s of it compiling",
    "decoding": f"{len(done['tokens'])} tokens, "
    f"{rate(len(done['tokens']) - 1, done['decode_s'])} tokens/s, "
    f"until {done['stopped']!r}{compiling}",
    "cache": f"{done['cache']}, {cache} on each device, "
    f"{done['cache_tokens']:,} tokens in all",
  }
  if done["placement"] is not None:
    lines["memory"] = "; ".join(
      f"{tier}: "
      + ", ".join(f"{console.nbytes(n)} {kind}" for kind, n in parts.items())
      for tier, parts in done["memory"].items()
      if sum(parts.values())
    )
  if done["tiles"] is not None:
    tiles = done["tiles"]
    computed = tiles["computed"]
    lines["tiles"] = (
      ("not counted" if computed is None else f"{computed:.1%} computed")
      + f"; at most {tiles['left_out']:.2%} of a layer's attention left out, "
      f"at {tiles['samples']:,} sampled queries"
    )
    if tiles["balance"] is not None:
      lines["tiles"] += f"; the busiest shard {tiles['balance']:.2f} x the mean"
  if done["fetches"] is not None:
    fetches = done["fetches"]
    lines["pages of host memory"] = (
      f"{fetches['hits'] + fetches['misses']:,} chosen, of which "
      f"{fetches['misses']:,} were copied, {console.nbytes(fetches['bytes'])}"
    )
    if fetches["copied_ahead"]:
      lines["pages of host memory"] += (
        f"; {fetches['early']:,} of these ahead of their layer, with "
        f"{fetches['copied_ahead'] - fetches['early']:,} others"
      )
  if done["contexts"] is not None:
    report = done["contexts"]
    lines["contexts"] = (
      f"{report['contexts']:,} of {report['tokens']:,} tokens, "
      f"{report['computed']:,} computed beside the question, "
      f"{console.nbytes(report['nbytes'])} to the devices"
    )
  if done["entropy"] is not None:
    entropy = done["entropy"]
    lines["entropy"] = (
      f"{entropy['mean']:.4f} nats, mean over {entropy['queries']:,} tokens of "
      f"the answer and all heads"
    )
  if done["two_devices"] is not None:
    reading = done["two_devices"]
    ms = lambda x: f"{1e3 * x:,.1f} ms"
    lines["two devices"] = (
      f"read in {done['prefill_s']:.2f} s with compiling, in which the first "
      f"one waited {reading['waiting']:.0%}; a part takes "
      + ", ".join(f"{k} {ms(x)}" for k, x in reading["step_s"].items())
      + "; by these times "
      + ", ".join(f"{k} {x:.2f} s" for k, x in reading["simulated_s"].items())
    )
  if done["speculation"] is not None:
    drafts = done["speculation"]
    lines["drafts"] = (
      f"{drafts['tokens_per_call']:.2f} tokens a call, {drafts['accepted']:,} "
      f"of {drafts['drafted']:,} accepted; {drafts['rounds']:,} rounds with "
      f"drafts, {drafts['steps']:,} steps without: {drafts['why']}"
    )
  if done["placement"] is not None:
    placement = done["placement"]
    lines["weights"] = (
      f"{console.nbytes(placement['bytes_read'])} read from disk, "
      f"{placement['layer_reads']:,} layers; waited "
      f"{placement['waited_s']:.1f} s for it"
    )
  if done["neurons"] is not None:
    neurons = done["neurons"]
    lines["neurons"] = (
      f"{neurons['active_share']:.0%} active, {neurons['hit_share']:.0%} of "
      f"these in memory; {console.nbytes(neurons['bytes_read'])} in "
      f"{neurons['reads']:,} reads, and "
      f"{console.nbytes(neurons['whole_bytes'])} of whole layers"
    )
  if done["passkey"] is not None:
    verdict = "in" if done["passkey_found"] else "NOT in"
    lines["passkey"] = (
      f"{done['passkey']}, hidden at {done['depth']:.0%}, {verdict} the answer"
    )
  return ["", *(f"{name:12} {text}" for name, text in lines.items())]


def _contexts_record(report: Any) -> dict[str, Any] | None:
  """A report on contexts, as JSON."""
  if report is None:
    return None
  fields = dataclasses.asdict(report)
  return fields | {"combine": repr(report.combine)}


def _placement_record(model: Transformer) -> dict[str, Any] | None:
  """A report on streamed layers, as JSON; None if all are resident."""
  placement = model.placement_report()
  if not placement.streamed_parameters:
    return None
  fields = dataclasses.asdict(placement)
  fields |= {
    "tiers": list(placement.tiers),
    "layer_reads": sum(placement.reads.values()),
  }
  return fields | {"reads": {str(n): k for n, k in placement.reads.items()}}


def _neurons_record(model: Transformer) -> dict[str, Any] | None:
  """A report on neurons on disk, as JSON; None without any."""
  if model.stack.neuron_fault is None:
    return None
  report = rj.models.neuron_report(model)
  shares = ("hit_share", "active_share", "resident_share")
  return {
    **dataclasses.asdict(report),
    **{name: getattr(report, name) for name in shares},
    "max_rows": {str(n): k for n, k in report.max_rows.items()},
  }


def _drafts_record(report: Any) -> dict[str, Any] | None:
  """A report on speculation, as JSON; None without any."""
  if report is None:
    return None
  return report._asdict() | {
    "drafter": repr(report.drafter),
    "tokens_per_call": report.tokens_per_call,
    "by_position": report.by_position.tolist(),
  }


def _where(
  devices: int, kind: str, mesh: Mapping[str, int], processes: int
) -> str:
  """Devices and mesh in words."""
  axes = ", ".join(f"{name}:{n}" for name, n in mesh.items())
  process_text = f" in {processes} processes" if processes > 1 else ""
  return f"{devices} x {kind}{process_text}, mesh {axes}"


# ---------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------


def _check(values: flags.FlagValues) -> None:
  """Refuses flags that do not go together, before anything is loaded."""
  combine = contexts.combine_of(values.combine or "parallel", "--combine")
  apart = values.contexts is not None and not isinstance(combine, contexts.Full)
  model_flags.check(
    values,
    contexts="--contexts" if apart else None,
    cache=None if values.important is None else "--important",
    **dict.fromkeys(
      ("rows_at_once", "cache_placement"),
      None if values.policy is None else "--policy",
    ),
  )
  answer_entropy.refuse(values)
  next_prompt.refuse(values, model_flags.sampler(values))
  samples = isinstance(model_flags.sampler(values), Sample)
  integer_flags.two_asked(values)
  made_up = prompts.made_up(values)
  unchatty = values.raw or values.chat is False
  for refused, got, want in (
    *((values.policy is not None and values[name].value is not None,
       f"--policy and --{name}", "one of them")
      for name in ("placement", "memory", "cache_placement")),
    (values.flash is not None and values.policy is not None,
     "--policy with --flash", "one of them"),
    # The bytes of a call are counted without a drafter's weights and keys.
    (values.memory is not None and values.contexts is None
     and values.speculate is not None,
     "--memory with --speculate", "--placement with --speculate"),
    (values.raw and values.chat, "--raw and --chat", "one of them"),
    (values.system is not None and unchatty,
     "--system without a chat template", "--system with --chat"),
    (values.entropy and isinstance(combine, contexts.Cepe),
     "--entropy and --combine=cepe", "a way that reads contexts as keys"),
    (values.combine is not None and values.contexts is None,
     "--combine without --contexts", "both"),
    (values.store is not None and values.contexts is None
     and values.important is None,
     "--store without --contexts or --important", "one of them"),
    (values.important is not None and (
      values.store is None or values.prompt_file is None
      or values.prompt is None),
     "--important without --store, --prompt_file and --prompt", "all of them"),
    *((values.important is not None and values[name].value is not None,
       f"--important and --{name}", "one of them")
      for name in ("policy", "memory", "placement", "cache_placement",
                   "wire", "integer")),
    *((values.important is not None and values[name].present,
       f"--important and --{name}", "one of them")
      for name in ("cache", "keep", "prefill")),
    (values.store is not None and isinstance(
      combine, contexts.Full | contexts.Cepe),
     f"--store and --combine={combine.name}",
     "a way that reads contexts apart"),
    (values.contexts is not None and values.prompt is None,
     "--contexts without --prompt", "both"),
    (values.contexts is not None and values.prompt_file is not None,
     "--contexts and --prompt_file", "one of them"),
    (values["seed"].present and not made_up and not samples,
     "--seed with a prompt and no sampling", "--seed with --temperature"),
    *((values[name].present and not made_up,
       f"--{name} with a prompt", f"--{name} or a prompt")
      for name in ("context", "depth")),
  ):  # fmt: skip
    if refused:
      raise prompts.clash(got, want)


# ---------------------------------------------------------------------------
# Main
# ---------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
  common.refuse_rest(argv)
  return run(flags.FLAGS, stdout=console.own_stdout())


if __name__ == "__main__":
  define(flags.FLAGS)
  flags.adopt_module_key_flags(common)
  common.launch(NAME, main)
