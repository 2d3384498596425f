"""A small model in a folder, and ways to run the scripts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import jax
import pytest

import ringjax as rj
from launch import convert, generate
from ringjax.data import Bytes
from tests.helpers import script

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = {
  "architectures": ["SmolLM3ForCausalLM"],
  "model_type": "smollm3",
  "vocab_size": 262,
  "hidden_size": 32,
  "intermediate_size": 64,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "hidden_act": "silu",
  "max_position_embeddings": 4096,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10000.0,
  "no_rope_layers": [1, 0],
  "tie_word_embeddings": True,
  "bos_token_id": 256,
  "eos_token_id": 257,
  "pad_token_id": 258,
}
# Commands are waited for on machines that do other things too.
PATIENCE_S = int(os.environ.get("RINGJAX_PATIENCE_S", "240"))


@dataclasses.dataclass(frozen=True)
class Ran:
  """What a script did."""

  status: int
  out: str
  err: str

  @property
  def json(self):
    return json.loads(self.out)


def _script(module) -> Callable[..., Ran]:
  return lambda *argv, **options: Ran(*script(module, *argv, **options))


@pytest.fixture(scope="package", autouse=True)
def _all_devices_are_there() -> None:
  """Before a script, run in this process, asks for as many as its mesh has."""
  jax.devices()


@pytest.fixture(scope="session")
def ask() -> Callable[..., Ran]:
  """launch.generate in this process."""
  return _script(generate)


@pytest.fixture(scope="session")
def turn() -> Callable[..., Ran]:
  """launch.convert in this process."""
  return _script(convert)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> str:
  """A model of bytes that knows no chats."""
  path = tmp_path_factory.mktemp("models") / "plain"
  rj.models.save(rj.models.create(CONFIG, seed=3), path)
  Bytes(chat_template=None).save(path)
  return str(path)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory) -> str:
  """The same model with a chat template."""
  path = tmp_path_factory.mktemp("models") / "chat"
  rj.models.save(rj.models.create(CONFIG, seed=3), path)
  Bytes().save(path)
  return str(path)


def environment() -> dict[str, str]:
  """Of a subprocess that finds this checkout."""
  paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
  mine = {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}
  return {**os.environ, "PYTHONUNBUFFERED": "1", **mine}


@contextlib.contextmanager
def command(
  *argv: str, prefix: tuple[str, ...] = (), **options
) -> Iterator[subprocess.Popen]:
  """`python argv...`, which does not outlive the block.

  Args:
    *argv: Arguments of python.
    prefix: Command that becomes python, with its arguments.
    **options: Of `subprocess.Popen`.
  """
  process = subprocess.Popen(
    [*prefix, sys.executable, *argv],
    cwd=ROOT,
    env=environment(),
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    **options,
  )
  try:
    yield process
  finally:
    process.kill()
    process.communicate()


@contextlib.contextmanager
def started(
  *argv: str, processes: int, first: tuple[str, ...] = ()
) -> Iterator[list[subprocess.Popen]]:
  """The same command in several processes that know of each other.

  Args:
    *argv: Arguments of python.
    processes: Number of processes.
    first: Further flags of process 0.
  """
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  with contextlib.ExitStack() as stack:
    yield [
      stack.enter_context(
        command(
          *argv,
          f"--coordinator=localhost:{port}",
          f"--num_processes={processes}",
          f"--process_id={i}",
          *(() if i else first),
        )
      )
      for i in range(processes)
    ]


def together(
  *argv: str, processes: int, first: tuple[str, ...] = ()
) -> list[Ran]:
  """As `started`; what they did when all have ended."""
  with started(*argv, processes=processes, first=first) as running:
    done = []
    for process in running:
      out, err = process.communicate(timeout=PATIENCE_S)
      done.append(Ran(process.returncode, out, err))
  return done


@pytest.fixture(scope="session")
def run_together() -> Callable[..., list[Ran]]:
  return together


@pytest.fixture(scope="session")
def start_together() -> Callable[..., contextlib.AbstractContextManager]:
  return started


@pytest.fixture(scope="session")
def start() -> Callable[..., contextlib.AbstractContextManager]:
  return command
