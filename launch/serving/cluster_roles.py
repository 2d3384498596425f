"""The roles of launch.serve: a router, its instances, and commands to it."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any, TextIO

import jax
from absl import flags

import ringjax as rj
from ringjax.checks import number
from ringjax.errors import OptionError
from ringjax.json_text import json_text
from ringjax.models.rope_scaling import read_extended
from ringjax.parallel.chips import Link, number_bytes
from ringjax.paths import AnyPath
from ringjax.plan import machines
from ringjax.serve import cluster
from ringjax.serve.cluster.router import PATIENCE_S
from ringjax.serve.cluster.routing import ROLES

from ..planning import aot, offload
from ..planning.serving_plan import limits_of
from ..shared import console
from ..shared.flag_helpers import FlagHelper
from .flag_modes import MODES

# Flags of the times by which a router predicts.
_OF_COSTS = ("bandwidth", "chip", "dtype", "instance_devices", "times")

# Show these flags in the --help of the script that defines them.
flags.disclaim_key_flags()


def define(values: flags.FlagValues) -> None:
  """Defines the flags of clusters."""
  new = FlagHelper(values)
  flags.DEFINE_enum(
    "role",
    "both",
    (*ROLES, "router"),
    "What this process does: answer requests by itself; with --join read "
    "prompts (prefill), answer (decode) or do both for a router; or be one.",
    flag_values=values,
  )
  new.text("join", None, "HOST:PORT where a router takes instances.")
  new.path(
    "cluster_key",
    None,
    "File with the secret of the cluster, 16 bytes at least, the same for all.",
  )
  new.whole(
    "cluster_port", 8001, "Of a router: port for its instances.", 0, 65535
  )
  new.text(
    "policy",
    "shortest",
    f"Of a router: where requests go: {', '.join(cluster.ROUTING_POLICIES)}, "
    "with options as in conductor:threshold=2, and with rejections "
    f"({', '.join(cluster.REJECTIONS)}) in front of it as in "
    "predictive:tpot_s=0.1,decode_s=20/conductor; docs/how/conductor.md. Those "
    "that predict do so by --times, by --chip, or by what instances measure "
    "when they join.",
  )
  new.path(
    "times",
    None,
    "Of a router: csv of measured calls (phase,devices,tokens,cached,seconds), "
    "of which a policy predicts; --log_calls writes one.",
  )
  new.text(
    "chip",
    None,
    "Of a router: machine whose stated figures a policy predicts by, such as "
    "h100; default: --times, or what instances measure.",
  )
  new.local_output(
    "log_calls",
    None,
    "csv to which this process adds how long its calls take, a line each, for "
    "the --times of a router or of launch.plan.",
  )
  new.whole(
    "instance_devices",
    1,
    "Of a router: devices of an instance, for --times or --chip.",
    1,
  )
  new.number(
    "bandwidth",
    None,
    "Of a router: bytes a second between instances; default: moving takes no "
    "time in what a policy predicts.",
    1.0,
  )
  new.whole(
    "stream",
    0,
    "Of a router: tokens of a prompt after which pages of it are published and "
    "pulled while others are read; 0: all at its end.",
    0,
  )
  new.number(
    "replan",
    None,
    "Of a router: seconds of a window after which roles are planned anew, if "
    "the load has drifted; with --slo. Default: only --set_role changes them.",
    1.0,
  )
  new.text(
    "slo",
    None,
    "Of a router, for --replan: what requests are promised, as "
    "ttft=0.5,tpot=0.1,share=0.9.",
  )
  new.number(
    "patience",
    PATIENCE_S,
    "Of a router: seconds that a request waits while no instance could serve "
    "it.",
    0.01,
  )
  new.number(
    "silence",
    10.0,
    "Seconds without a sign after which a process of the cluster is given up.",
    0.5,
  )
  new.number(
    "lease",
    30.0,
    "Seconds that pages stay published when nobody asks for them.",
    0.1,
  )
  new.whole(
    "host_store",
    1 << 30,
    "Of an instance: bytes of the host's memory for pages that come.",
  )
  new.whole(
    "device_pages",
    0,
    "Of an instance: bytes of pages that stay on the devices until others pull "
    "them, in arrays of 16, by JAX's transfer server, in a network that nobody "
    "else reaches and whose ports are all open; 0: all go over sockets.",
    0,
  )
  new.text("name", None, "Name of an instance; default: role, host, process.")
  new.boolean("instances", False, "Show the instances of the router of --join.")
  new.text(
    "set_role", None, "NAME=ROLE: give an instance of --join another role."
  )


def read_key(values: flags.FlagValues) -> bytes:
  """Reads the secret in the file of --cluster_key.

  Raises:
    OptionError: If it is missing or too short.
  """
  if values.cluster_key is None:
    raise OptionError(
      "--cluster_key",
      "nothing",
      "a file with a secret",
      "make one: head -c 32 /dev/urandom > FILE",
    )
  try:
    key = pathlib.Path(values.cluster_key).read_bytes()
  except OSError as error:
    raise OptionError(
      "--cluster_key", error, "a file", "pass its path"
    ) from None
  if len(key) < 16:
    raise OptionError(
      "--cluster_key",
      f"{len(key)} bytes",
      "16 bytes at least",
      "make one: head -c 32 /dev/urandom > FILE",
    )
  return key


def join_address(values: flags.FlagValues) -> tuple[str, int]:
  """Parses host and port of --join.

  Raises:
    OptionError: If it is not of the form HOST:PORT.
  """
  host, _, port = (values.join or "").rpartition(":")
  if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
    raise OptionError(
      "--join",
      repr(values.join),
      "HOST:PORT of a router's --cluster_port",
      "pass --join=10.0.0.1:8001, for instance",
    )
  return host.strip("[]"), int(port)


def check_role(values: flags.FlagValues) -> None:
  """Refuses a role that does not go with --join.

  Raises:
    OptionError: If the two conflict.
  """
  joins = values.join is not None
  asks = values.instances or values.set_role is not None
  if values.role == "router" and joins:
    raise OptionError(
      "--join", values.join, "nothing for a router", "leave it out"
    )
  if (values.role in ("prefill", "decode") or asks) and not joins:
    raise OptionError(
      "--join", "nothing", "HOST:PORT of a router", "pass it, or --role=both"
    )


def check(values: flags.FlagValues) -> None:
  """Refuses values that do not go together, before anything is loaded.

  Which mode of launch.serve has which flags: `flag_modes`.

  Raises:
    OptionError: If two flags conflict or a value is invalid.
  """
  joins = values.join is not None
  if values.role == "router":
    # Check the policy's names and options; its cost model needs the folder.
    any_times = cluster.RoutingCosts(times=cluster.QuadraticTimes())
    cluster.routing_policy(values.policy, any_times)
    for name in ("piece", "pieces"):
      if values[name].present and values.replan is None:
        raise OptionError(
          f"--{name}",
          f"{values[name].value} for a router without --replan",
          "nothing: a router reads no prompts, and simulates engines that do "
          "only to plan roles",
          "pass it to the instances, or pass --replan too",
        )
    if values.chip is not None:
      if values.times is not None:
        raise OptionError(
          "--chip, --times",
          f"{values.chip}, {values.times}",
          "one of the two",
          "leave one out",
        )
      machines.load(values.chip)
    if values["instance_devices"].present and values.times == values.chip:
      raise OptionError(
        "--instance_devices",
        f"{values.instance_devices} without --times or --chip",
        "nothing: instances measure their calls on the devices that they have",
        "leave it out, or pass --times or --chip",
      )
    for name in () if _predicts(values) else _OF_COSTS:
      if values[name].present:
        raise OptionError(
          f"--{name}",
          f"{values[name].value} with --policy={values.policy}",
          "a policy that predicts times, or --replan",
          "leave it out, or pass e.g. --policy=conductor",
        )
    if values.replan is not None and values.slo is None:
      raise OptionError(
        "--slo",
        f"nothing, with --replan={values.replan:g}",
        "what requests are promised",
        "pass --slo=ttft=0.5,tpot=0.1,share=0.9",
      )
    if values.slo is not None:
      limits_of(values.slo)
      if values.replan is None:
        raise OptionError(
          "--slo",
          f"{values.slo} without --replan",
          "seconds after which roles are planned for it",
          "pass --replan=600, or leave it out",
        )
  if joins:
    join_address(values)
  if joins or values.role == "router":
    read_key(values)
  _, equals, role = (values.set_role or "=both").rpartition("=")
  if not equals or role not in ROLES:
    raise OptionError(
      "--set_role",
      repr(values.set_role),
      f"NAME=ROLE, a role of {', '.join(ROLES)}",
      "pass --set_role=NAME=decode, for instance",
    )


def _predicts(values: flags.FlagValues) -> bool:
  """Whether a router needs times of calls."""
  return cluster.needs_costs(values.policy) or values.replan is not None


def router(
  values: flags.FlagValues, folder: AnyPath, tokenizer: rj.data.Tokenizer
) -> cluster.ClusterRouter:
  """Creates the router of the flags for a model, without loading weights."""
  config, _, _ = read_extended(
    _config(folder), values.rope_scaling, strict=values.strict
  )
  longest = values.longest or min(config.longest or 16384, 16384)
  costs = roles = None
  if _predicts(values):
    costs = _costs(values, folder)
    if values.replan is not None:
      roles = _roles(values, costs)
  measured = None
  if costs is not None and isinstance(costs.times, cluster.InstanceTimes):
    measured = costs.times
  return cluster.ClusterRouter(
    key=read_key(values),
    vocab=config.vocab,
    longest=longest,
    tokenizer=tokenizer,
    policy=cluster.routing_policy(values.policy, costs),
    roles=roles,
    times=measured,
    stream_tokens=values.stream,
    host=values.host,
    port=values.cluster_port,
    patience_s=values.patience,
    silence_s=values.silence,
  )


def _config(folder: AnyPath) -> dict[str, Any]:
  """The config of a folder or of a GGUF file.

  Raises:
    ConfigError: If it is missing or not strict JSON.
  """
  # An absolute path is never the name of a preset.
  config = aot.config_of(str(folder.absolute()))
  assert not isinstance(config, str)
  return config


def _costs(values: flags.FlagValues, folder: AnyPath) -> cluster.RoutingCosts:
  """Cost model of the routing policy: times, link and bytes per token."""
  shape = offload.shape_of(str(folder.absolute()))
  config = _config(folder)
  dtype = values.dtype or config.get("dtype") or config.get("torch_dtype")
  link = None
  if values.bandwidth is not None:
    # --latency is of a profile's messages.
    link = Link(bandwidth=number("--bandwidth", values.bandwidth, above=0))
  times: cluster.PhaseTimes = cluster.InstanceTimes()
  if values.times is not None:
    fitted = cluster.TensorTimes.fit(cluster.read_calls(values.times))
    times = fitted.at(values.instance_devices)
  elif values.chip is not None:
    machine = machines.load(values.chip)
    stated = cluster.TensorTimes.on(machine, shape, dtype=dtype or "float32")
    times = stated.at(values.instance_devices)
  # A cache has the dtype of the model.
  return cluster.RoutingCosts(
    times=times,
    kv_token_bytes=shape.layers * shape.kv * number_bytes(dtype or "float32"),
    link=link,
  )


def _roles(
  values: flags.FlagValues, costs: cluster.RoutingCosts
) -> cluster.DriftingRoles:
  """Planner that changes roles by simulating engines with these flags."""
  times = costs.times
  assert isinstance(times, cluster.PhaseTimes)
  return cluster.DriftingRoles(
    instances=cluster.SimulatedInstance(
      name="any",
      times=times,
      share="ahead",
      max_prefill_tokens=values.piece * values.pieces,
      # Free pages of the pool keep prefixes.
      prefix_cache_tokens=2**20,
    ),
    limits=limits_of(values.slo),
    window_s=values.replan,
    policy=cluster.routing_policy(values.policy, costs),
    links=costs.link,
    kv_token_bytes=costs.kv_token_bytes,
  )


def check_processes(values: flags.FlagValues, mode: str) -> None:
  """Refuses what an instance of several processes can't be or have.

  Raises:
    OptionError: If its role needs pages of others, or a flag is of pages.
  """
  if mode != "instance" or values.role != "both":
    raise OptionError(
      "processes",
      f"{jax.process_count()} for {MODES[mode].text}"
      + (f" with --role={values.role}" if mode == "instance" else ""),
      "one process with all devices, or --role=both: an engine of several "
      "processes answers what it reads",
      "pass --nodistributed or --role=both; or --stages, which read prompts",
    )
  for name in ("device_pages", "host_store", "lease"):
    if values[name].present:
      raise OptionError(
        f"--{name}",
        f"{values[name].value} for an instance of several processes",
        "nothing: its pages are in parts, one on each host, and do not move",
        "leave it out",
      )


def work(
  values: flags.FlagValues,
  engine: rj.serve.Engine | rj.serve.EngineGroup,
  screen: console.Screen,
  stops: Callable[[Callable[[], None]], None] = lambda _: None,
  codec: tuple[str, str] = ("", ""),
) -> int:
  """Runs an instance of a router until a signal; returns the exit status.

  Args:
    values: Flags as passed.
    engine: Engine, or the processes of one.
    screen: Where its state is shown.
    stops: Takes the function that ends it gracefully.
    codec: `page_codec` of an engine of several processes.
  """
  if isinstance(engine, rj.serve.EngineGroup):
    worker = cluster.GroupWorker(
      engine,
      codec,
      key=read_key(values),
      router=join_address(values),
      name=values.name,
      host=values.host,
      silence_s=values.silence,
    )
    screen.say(f"instance {worker.name}, of {jax.process_count()} processes")
  else:
    worker = _page_worker(values, engine, screen)
  stopped = threading.Event()
  for signal_number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signal_number, lambda *_: stopped.set())
  stops(stopped.set)
  shown_refusal, was_joined, measured = "", False, False
  worker.start()
  while not stopped.wait(0.1) and not worker.ended.is_set():
    times = getattr(worker, "times", None)
    if times is not None and not measured:
      measured = True
      screen.say(_times_text(times))
    if worker.joined.is_set() != was_joined:
      was_joined = not was_joined
      word = "joined" if was_joined else "lost"
      screen.say(f"{word} the router {values.join}, as {worker.role}")
      if was_joined and worker.notice:
        screen.say(worker.notice)
    elif not was_joined and worker.refused not in ("", shown_refusal):
      shown_refusal = worker.refused
      screen.say(f"not joined: {shown_refusal}")
  failed = worker.ended.is_set() and not stopped.is_set()
  if not failed:
    worker.leave(values.grace)
  engine.close()
  screen.say("the engine failed" if failed else "ended")
  return 1 if failed else 0


def _page_worker(
  values: flags.FlagValues, engine: rj.serve.Engine, screen: console.Screen
) -> cluster.ClusterWorker:
  """Instance of one process, which sends pages to others and pulls theirs."""
  devices = None
  if values.device_pages:
    devices = rj.transfer.DeviceServer(
      _own_address(values), most=values.device_pages
    )
  worker = cluster.ClusterWorker(
    engine,
    key=read_key(values),
    router=join_address(values),
    role=values.role,
    name=values.name,
    host=values.host,
    port=values.port if values["port"].present else 0,
    lease_s=values.lease,
    silence_s=values.silence,
    devices=devices,
    device_bytes=max(1, values.device_pages),
  )
  host, port = worker.publisher.address
  screen.say(f"instance {worker.name}, pages at {host}:{port}")
  if devices is not None:
    screen.say(
      f"up to {values.device_pages:,} bytes of pages stay on the devices, for "
      f"JAX's transfer server at {devices.host}"
    )
  return worker


def _times_text(times: cluster.QuadraticTimes) -> str:
  """Message about the times that an instance measured for the router."""
  prompts = ", ".join(
    f"{n:,} tokens {times.prefill_s([(n, 0)]):.3g} s" for n in (1000, 8000)
  )
  return (
    f"measured for the router: prompts of {prompts}; a token of one row "
    f"{times.decode_s(1, 1000):.3g} s, of eight {times.decode_s(8, 8000):.3g} s"
  )


def logging_calls(
  values: flags.FlagValues, engine: rj.serve.Engine
) -> contextlib.AbstractContextManager[None]:
  """Context manager that logs an engine's calls, with --log_calls."""
  if values.log_calls is None:
    return contextlib.nullcontext()
  return cluster.log_calls(engine, values.log_calls)


def _own_address(values: flags.FlagValues) -> str:
  """Numeric address at which other instances reach this machine.

  Raises:
    OptionError: If no route to the router exists.
  """
  try:
    if values.host not in ("0.0.0.0", "::"):
      return str(socket.getaddrinfo(values.host, None)[0][4][0])
    family, *_, router = socket.getaddrinfo(
      *join_address(values), type=socket.SOCK_DGRAM
    )[0]
    # A UDP connect sends nothing, but the system chooses the interface.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
      probe.connect(router)
      return str(probe.getsockname()[0])
  except OSError as error:
    raise OptionError(
      "--host",
      f"{values.host}: {error}",
      "an address of this machine that other instances reach",
      "pass it in numbers",
    ) from None


def command(values: flags.FlagValues, stdout: TextIO | None) -> int:
  """Lists the instances of a router, or changes the role of one."""
  fields = {"what": "instances"}
  if values.set_role is not None:
    name, _, role = values.set_role.rpartition("=")
    fields = {"what": "set_role", "name": name, "role": role}
  reply = cluster.ask_router(
    join_address(values),
    read_key(values),
    silence_s=values.silence,
    **fields,
  )
  for instance in reply["instances"]:
    print(json_text(instance), file=stdout, flush=True)
  return 0
