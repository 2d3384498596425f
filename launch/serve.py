"""Serves a model to many clients, by OpenAI's API.

  python -m launch.serve --model=DIR
      Any Hugging Face folder, at http://127.0.0.1:8000/v1: completions, chats,
      models, health, metrics. Without --model a small one that ships.
  python -m launch.serve --model=DIR --mesh=seq:4 --cache=int8 --rows=32 \\
      --capacity=262144 --api_keys=FILE --host=0.0.0.0
      A pool of pages on four devices, for clients that have a key.
  python -m launch.serve --model=DIR --mesh=seq:16 --coordinator=HOST:7788 \\
      --num_processes=2 --process_id=0
      One engine over the devices of several hosts, by the same command on each
      with its --process_id (or --distributed alone on Slurm and TPU slices):
      process 0 serves clients, all answer /health and /ready.
  python -m launch.serve --model=DIR --store=kept --important=0.25
      Of a prefix that is in the folder a quarter is read, what the rest of the
      prompt looks at: approximate answers, sooner. Without --important all.
      --probe_heads=0,5 names the heads that choose it.

  python -m launch.serve --role=router --model=DIR --cluster_key=FILE
  python -m launch.serve --role=prefill --model=DIR --cluster_key=FILE \\
      --join=HOST:8001 --mesh=seq:4
  python -m launch.serve --role=decode --model=DIR --cluster_key=FILE \\
      --join=HOST:8001 --mesh=seq:2
      A cluster: the router serves clients, prefill instances read prompts,
      decode instances pull their pages and answer. They join and leave at any
      time.
  python -m launch.serve --role=prefill --model=DIR --cluster_key=FILE \\
      --join=HOST:8001 --stages=4
      A prefill instance of four processes, which have layers each.
  python -m launch.serve --role=both --model=DIR --cluster_key=FILE \\
      --join=HOST:8001 --mesh=seq:16 --coordinator=HOST:7788 \\
      --num_processes=2 --process_id=0
      An engine over several hosts as an instance, which answers what it reads.
  python -m launch.serve --join=HOST:8001 --cluster_key=FILE --instances
  python -m launch.serve --join=HOST:8001 --cluster_key=FILE \\
      --set_role=NAME=decode
      Shows the instances of a router; gives one another role.

Needs uvicorn, of the extra `serve`. SIGTERM and Ctrl-C end it gracefully: it
takes no more requests, finishes those in progress within --grace seconds, sends
an error to the rest, and exits with 0. Of several processes any may get the
signal: process 0 does so, and all exit with 0. When one of them is lost, all
exit with 3, clients get errors, and what started them has to start them again:
with --restarts=N each command starts its process again, at the same port, up to
N times; with --store=DIR prefixes are then found again.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import socket
import types
from collections.abc import Sequence
from typing import Any, TextIO

import jax
import numpy as np
from absl import flags

import ringjax as rj
from ringjax import fetched_models
from ringjax.checks import number
from ringjax.data import ChatTemplate, Tokenizer
from ringjax.errors import OptionError
from ringjax.models import small
from ringjax.serve import cluster
from ringjax.serve.drafts.row_drafts import RowDrafts
from ringjax.serve.engine_config import EngineConfig

from .serving import (
  cluster_roles,
  flag_modes,
  host_processes,
  http_server,
  peer_flags,
  restarts,
  stage_instance,
)
from .shared import answering, common, console, model_flags
from .shared.flag_helpers import (
  FlagHelper,
  model_folder,
  names_of,
  option_values,
)

NAME = "serve"
_SEND_BYTES = 1 << 17
_MEMORY = (
  "pass a smaller --capacity or --rows, a codec (--cache=int8), or shard the "
  "pages over more devices (--mesh=seq:N)"
)


def define(values: flags.FlagValues) -> None:
  """Defines the flags of this script."""
  new = FlagHelper(values)
  new.checkpoint()
  new.rope_scaling()
  new.text("model_name", None, "Its name in the API; default: the folder's.")
  new.text("host", "127.0.0.1", "Address to listen at; 0.0.0.0 for all.")
  new.whole("port", 8000, "Port; 0 takes a free one.", 0, 65535)
  engine = FlagHelper(values, "What the engine computes at a time, and how.")
  engine.options(EngineConfig, flag_modes.ENGINE_OPTIONS)
  new.texts(
    "adapters",
    [],
    "Low-rank adapters as NAME=DIR,NAME=DIR, folders of PEFT; a request asks "
    "for one by its name as the model.",
  )
  new.text(
    "dtype",
    None,
    "bfloat16, float16 or float32; default: the folder's, on one CPU device "
    "float32 where that fits.",
  )
  new.place(
    "store",
    None,
    "A folder, or an address such as gs://bucket/name, that keeps prefixes: "
    "prompts that begin like an earlier one get "
    "them back, also in a server that is started anew.",
  )
  new.whole("store_bytes", 1 << 36, "Bytes of --store at most.")
  new.path(
    "probe_heads",
    None,
    "KV heads whose keys choose the part of --important: numbers of heads of "
    "every layer, 0,5, or a JSON file with a list for each layer, as "
    "rj.infer.contexts.probe_heads measures them. Default: the first three.",
  )
  new.path("api_keys", None, "File of keys and tenants, KEY TENANT a line.")
  new.text(
    "admin",
    None,
    "Tenant whose key is shown the metrics of all; others see their own.",
  )
  new.path(
    "chat_template", None, "File of a Jinja template, in place of the model's."
  )
  new.text(
    "reasoning_parser",
    "auto",
    "Marks between which answers have their reasoning: gpt_oss, granite, "
    "mistral, seed_oss, think (DeepSeek, Qwen, GLM, MiniMax); auto takes those "
    "of the chat template, none leaves them in the text.",
  )
  new.whole("queue", 256, "Answers that may wait; more are refused with 429.")
  new.whole("body_bytes", 8 << 20, "Bytes of a body at most.")
  new.whole(
    "response_bytes",
    64 << 20,
    "Bytes of stored responses at most, which previous_response_id may name.",
  )
  new.number(
    "stall",
    60.0,
    "Seconds after which a client that does not send or read is given up.",
    0.01,
  )
  new.number(
    "failure_timeout",
    30.0,
    "Seconds within which the failure of one of several processes is noticed.",
    1.0,
  )
  new.whole(
    "restarts",
    0,
    "Times that this command starts its process again after that, or another "
    "one of several, was lost; pass it to all of them.",
    0,
  )
  new.whole("grace", 30, "Seconds to finish in, once it is told to end.")
  cluster_roles.define(values)
  stage_instance.define(new)
  common.define(values)
  peer_flags.define(new)


def run(
  values: flags.FlagValues,
  *,
  stdout: TextIO | None = None,
  stderr: TextIO | None = None,
) -> int:
  """Serves as the flags say until a signal; returns the exit status."""
  screen, listener = console.Screen(NAME, stderr), None
  doing = "starting"
  uvicorn: Any = None
  joined_at = ""
  note: str | None = None
  logs = contextlib.ExitStack()
  hosts = host_processes.HostProcesses(screen, lambda: doing)
  supervised = restarts.SupervisedProcess.from_environment()
  answers = serves = lambda: None
  if supervised is not None:
    answers, serves = supervised.answers, supervised.serves
  try:
    mode = flag_modes.mode_of(values)
    cluster_roles.check_role(values)
    if mode == "stages":
      stage_instance.check_role(values)
    flag_modes.check(values, names_of(define))
    important = _important(values)
    cluster_roles.check(values)
    if mode == "command":
      return cluster_roles.command(values, stdout)
    if mode == "stages":
      stage_instance.check(values)
      return stage_instance.run(values, screen)
    joins, routes = mode == "instance", mode == "router"
    if not joins:
      uvicorn = _uvicorn()
    keys = None
    if values.api_keys is not None:
      keys = rj.serve.read_keys(values.api_keys)
    template = None
    if values.chat_template is not None:
      template = _template(values.chat_template)
    adapters = _adapters(values.adapters)
    kind = common.cache_kind(values.cache)
    if values.speculate is not None:
      drafter = model_flags.checked_drafter(values.speculate)
      RowDrafts(drafter, "--speculate")
    if supervised is not None:
      listener = supervised.listener
    elif not joins:
      listener = _listener(values.host, values.port)
    if values.restarts and supervised is None:
      assert listener is not None
      supervisor = restarts.Supervisor(
        listener,
        screen,
        restarts=values.restarts,
        silence_s=values.failure_timeout,
      )
      with listener:
        return supervisor.run()
    common.start(values, single=True)
    several = jax.process_count() > 1
    if several and (routes or joins):
      cluster_roles.check_processes(values, mode)
      listener = _listener(values.host, values.port)
    if mode == "alone" or several:
      assert listener is not None
      doing = "waiting for the other processes"
      hosts.meet(values, listener, answers)
    elif values["failure_timeout"].present:
      hosts.refuse_alone(values)
    doing = "loading the model"
    mesh = common.mesh(values.mesh)
    folder = model_folder(values, small.path)
    screen.begin(f"loading {folder}")
    tokenizer = Tokenizer.load(folder, untrusted=values.model is not None)
    if routes:
      engine = cluster_roles.router(values, folder, tokenizer)
      joined_at = "{}:{}".format(*engine.address)
    else:
      model, note = answering.load(
        values,
        folder,
        mesh,
        codes=not joins and not model_flags.measured(values),
      )
      options = option_values(values, EngineConfig, flag_modes.ENGINE_OPTIONS)
      options["cache_kind"] = kind
      options["adapters"] = {
        name: rj.train.load_adapter(path, model)
        for name, path in adapters.items()
      }
      if joins and not several:
        options["store"] = rj.store.Store(host=values.host_store)
      elif values.store is not None:
        # Entered before whatever the engine writes to it at its end.
        options["store"] = logs.enter_context(
          answering.store(values.store, values.store_bytes)
        )
        options["important"] = important
      engine = rj.serve.Engine(
        model,
        mesh=mesh,
        tokenizer=tokenizer,
        **options,
      )
      if supervised is not None:
        engine.counters.restarts = supervised.restarts
      doing = "compiling"
      screen.begin("compiling")
      engine.warm_up()
      if joins and not several:
        screen.end()
        with cluster_roles.logging_calls(values, engine):
          return cluster_roles.work(values, engine, screen)
      if hosts.leads:
        logs.enter_context(cluster_roles.logging_calls(values, engine))
      doing = "meeting the other processes' engines"
      codec = cluster.page_codec(engine) if joins else ("", "")
      engine = hosts.engine(engine, probes=joins)
      doing = "serving"
      if not hosts.leads:
        assert isinstance(engine, rj.serve.EngineGroup)
        serves()
        return hosts.follow(engine)
      if joins:
        assert isinstance(engine, rj.serve.EngineGroup)
        screen.end()
        with logs:
          status = cluster_roles.work(
            values, engine, screen, hosts.stops, codec
          )
        hosts.ended()
        return status
    name = values.model_name or fetched_models.name_of(folder)
    app = rj.serve.app(
      engine,
      model_name=name,
      keys=keys,
      queue=values.queue,
      body_bytes=values.body_bytes,
      stall=values.stall,
      admin=values.admin,
      chat_template=template,
      trusted_template=values.model is None and template is None,
      reasoning_parser=values.reasoning_parser,
      response_bytes=values.response_bytes,
    )
    screen.end()
  except Exception as error:
    if listener is not None:
      listener.close()
    logs.close()
    reports = hosts.group if hosts.group.several else screen
    return reports.failed(error, doing, _MEMORY)
  except KeyboardInterrupt as error:
    if listener is not None:
      listener.close()
    logs.close()
    screen.error(f"interrupted while {doing}")
    # The others wait for this process.
    hosts.group.leave(error, console.INTERRUPTED)
    return console.INTERRUPTED
  assert listener is not None
  host, port = listener.getsockname()[:2]
  url_host = f"[{host}]" if ":" in host else host
  screen.say(f"model: {name}, {engine.longest:,} tokens of a request at most")
  if note is not None:
    screen.say(note)
  if keys is None and not host.startswith("127.") and host != "::1":
    screen.say("no --api_keys: whoever reaches this address is served")
  if hosts.group.several:
    screen.say(f"processes: {jax.process_count()}")
  if joined_at:
    screen.say(f"instances join at {joined_at}")
  screen.say(f"serving at http://{url_host}:{port}/v1")
  serves()
  try:
    with logs:
      http_server.serve(
        uvicorn,
        app,
        listener,
        grace=values.grace,
        stall=values.stall,
        stops=hosts.stops,
      )
  except Exception as error:
    if not hosts.group.several:
      raise
    return hosts.group.failed(error, doing, _MEMORY)
  hosts.ended()
  screen.say("ended")
  return 0


def _important(
  values: flags.FlagValues,
) -> rj.serve.ImportantShare | float | None:
  """The part of stored prefixes that is read, by --important; None for all.

  Raises:
    OptionError: If --store_bytes, --important or --probe_heads have no
      meaning.
  """
  if values.store is None and values["store_bytes"].present:
    raise OptionError(
      "--store_bytes",
      f"{values.store_bytes} without --store",
      "a folder with prefixes",
      "pass --store=DIR too",
    )
  if values.important is None:
    if values.probe_heads is not None:
      raise OptionError(
        "--probe_heads",
        f"{values.probe_heads} without --important",
        "the part of a prefix that these heads choose",
        "pass --important=0.25 too",
      )
    return None
  if values.store is None:
    raise OptionError(
      "--important",
      f"{values.important} without --store",
      "a folder with prefixes, of which a part is read",
      "pass --store=DIR too",
    )
  share = number("--important", values.important, above=0, most=1)
  if values.probe_heads is None:
    return share
  probes = _probe_heads(values.probe_heads)
  return rj.serve.ImportantShare(share=share, probes=probes)


def _probe_heads(text: str) -> np.ndarray:
  """Parses --probe_heads: int [P], heads of every layer, or [L, P].

  Raises:
    OptionError: If it is neither numbers of heads nor a file of them.
  """
  try:
    if text.endswith(".json"):
      with open(text, encoding="utf-8") as file:
        heads = np.array(json.load(file))
    else:
      heads = np.array([int(number) for number in text.split(",")])
    right = heads.dtype.kind == "i" and heads.ndim in (1, 2) and heads.size
    fault = "" if right else f"an array {heads.shape} of {heads.dtype}"
  except (OSError, ValueError) as error:
    heads, fault = np.zeros(0, int), str(error)
  if fault:
    raise OptionError(
      "--probe_heads",
      f"{text} ({fault})",
      "numbers of heads, or a JSON file of equally many for each layer",
      "pass --probe_heads=0,1, or a file of "
      "json.dumps(rj.infer.contexts.probe_heads(...).tolist())",
    )
  return heads


def _adapters(entries: Sequence[str]) -> dict[str, str]:
  """Parses --adapters: the folder of each adapter by its name.

  Raises:
    OptionError: If an entry is not NAME=DIR, or a name occurs twice.
  """
  adapters: dict[str, str] = {}
  for entry in entries:
    name, equals, path = entry.partition("=")
    if not name or not equals or not path or name in adapters:
      raise OptionError(
        "--adapters",
        f"{entry!r}",
        "NAME=DIR, each name once",
        "pass --adapters=NAME=DIR,NAME=DIR",
      )
    adapters[name] = os.path.expanduser(path)
  return adapters


def _template(path: str) -> str:
  """Reads a chat template and checks that it renders a message."""
  try:
    source = pathlib.Path(path).read_text("utf-8")
  except (OSError, ValueError) as error:
    raise OptionError(
      "--chat_template", error, "a file of a Jinja template", "pass its path"
    ) from None
  names = {"bos_token": "", "eos_token": ""}
  ChatTemplate(source, names).text([{"role": "user", "content": "Hi"}])
  return source


def _listener(host: str, port: int) -> socket.socket:
  """Opens the listening socket, so that a used port fails before loading."""
  try:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family, backlog=1024)
  except OSError as error:
    raise OptionError(
      "--host, --port",
      f"{host}:{port}: {error.strerror}",
      "a free address of this machine",
      "pass another --port, or --port=0 for any",
    ) from None
  # The send buffer of each connection: by default the system buffers megabytes
  # for a client that does not read, which would hide that it stalls.
  listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
  return listener


def _uvicorn() -> types.ModuleType:
  try:
    return importlib.import_module("uvicorn")
  except ImportError:
    raise OptionError(
      "uvicorn",
      "a Python without it",
      "the extra `serve`",
      "pip install 'ringjax[serve]'",
    ) from None


def main(argv: Sequence[str]) -> int:
  common.refuse_rest(argv)
  return run(flags.FLAGS)


if __name__ == "__main__":
  define(flags.FLAGS)
  flags.adopt_module_key_flags(common)
  common.launch(NAME, main, unknown=peer_flags.hint)
