"""The scripts of docs/clusters, as far as local processes go."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import socket
import stat
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = ROOT / "docs" / "clusters"

# What srun does for us: N tasks at once, told who they are as SLURM tells them.
SRUN = """#!{python}
import os, subprocess, sys
args = [a for a in sys.argv[1:] if not a.startswith("--kill")]
tasks = []
for rank in range(2):
  env = os.environ | {{
    "SLURM_JOB_ID": "{job}", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2",
    "SLURM_STEP_NODELIST": "localhost", "SLURM_PROCID": str(rank),
    "SLURM_LOCALID": "0",
  }}
  tasks.append(subprocess.Popen(args, env=env))
sys.exit(max(t.wait() for t in tasks))
"""

RECIPE = """
from launch.train import default_config

def get_config():
  config = default_config()
  config.model = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 262,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 160,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
  }
  config.stages = ({"steps": 2, "length": 160, "batch": 2},)
  config.sources = ({"kind": "passkey", "length": 150},)
  return config
"""


def stand_in(folder: pathlib.Path, name: str, text: str) -> dict[str, str]:
  """Puts a program of that name first into the PATH."""
  folder.mkdir(exist_ok=True)
  file = folder / name
  file.write_text(text)
  file.chmod(file.stat().st_mode | stat.S_IXUSR)
  return os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def free_job() -> int:
  """A job's number whose port, which JAX derives from it, is free."""
  for job in range(7, 4000):
    with socket.socket() as probe:
      try:
        probe.bind(("localhost", job % 2**12 + (65535 - 2**12 + 1)))
        return job
      except OSError:
        continue
  raise AssertionError("no free port")


@pytest.mark.long
def test_two_tasks_of_slurm_train_as_one_job(tmp_path):
  config = tmp_path / "recipe.py"
  config.write_text(RECIPE)
  env = stand_in(
    tmp_path / "bin", "srun", SRUN.format(python=sys.executable, job=free_job())
  )
  env |= {
    "PYTHON": sys.executable,
    "PYTHONPATH": str(ROOT),
    "JAX_NUM_CPU_DEVICES": "1",
    "SLURM_SUBMIT_DIR": str(tmp_path),
  }
  out = tmp_path / "out"
  ran = subprocess.run(
    ["bash", SCRIPTS / "train.sbatch", f"--config={config}", f"--out={out}",
     "--mesh=seq:2"],
    env=env, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert ran.returncode == 0, ran.stdout + ran.stderr
  assert (out / "model" / "config.json").is_file(), ran.stdout


def test_a_pod_s_hosts_get_the_command(tmp_path):
  said = tmp_path / "said"
  env = stand_in(
    tmp_path / "bin",
    "gcloud",
    f'#!/bin/sh\nprintf "%s\\n" "$@" > {shlex.quote(str(said))}\n',
  )
  env |= {"POD": "pod-1", "ZONE": "zone-2", "REPO": "https://host/ring jax"}
  config = "configs/train/a b.py"
  subprocess.run(
    ["bash", SCRIPTS / "pod.sh", f"--config={config}", "--mesh=seq:64"],
    env=env,
    check=True,
  )
  lines = said.read_text()
  first = lines.splitlines()[:7]
  assert first[:5] == ["compute", "tpus", "tpu-vm", "ssh", "pod-1"]
  assert first[5:] == ["--zone=zone-2", "--worker=all"]
  command = lines[lines.index("--command=") + len("--command=") :]
  assert "https://host/ring\\ jax" in command
  last = shlex.split(command.strip().splitlines()[-1])
  assert last[1:] == [
    "-m",
    "launch.train",
    "--distributed",
    f"--config={config}",
    "--mesh=seq:64",
  ]
  subprocess.run(["bash", "-n", "-c", command], check=True)


def test_a_pod_without_a_name_is_refused():
  env = {k: v for k, v in os.environ.items() if k not in ("POD", "ZONE")}
  ran = subprocess.run(
    ["bash", SCRIPTS / "pod.sh"],
    env=env, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert ran.returncode and "name of the TPU slice" in ran.stderr


def test_a_jobset_names_files_and_hosts_that_agree():
  text = (SCRIPTS / "jobset.yaml").read_text()
  config = re.search(r"--config=(\S+)", text)
  assert config and (ROOT / "launch" / config[1]).is_file()
  # Chips of the topology, of the hosts, and of the mesh.
  x, y = map(int, re.search(r"tpu-topology: (\d+)x(\d+)", text).groups())
  hosts = int(re.search(r"parallelism: (\d+)", text)[1])
  chips = int(re.search(r"google.com/tpu: (\d+)", text)[1])
  assert hosts == int(re.search(r"completions: (\d+)", text)[1])
  assert x * y == hosts * chips == int(re.search(r"seq:(\d+)", text)[1])
