"""The scripts of docs/clusters, as far as local processes go."""

from __future__ import annotations

import math
import os
import pathlib
import re
import shlex
import socket
import stat
import subprocess
import sys

import pytest
from absl import flags

from launch import serve, train
from launch.serving import flag_modes
from launch.shared import common
from launch.shared.flag_helpers import names_of

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
  sent = tmp_path / "sent"
  env = stand_in(
    tmp_path / "bin",
    "gcloud",
    f'#!/bin/sh\nprintf "%s\\n" "$@" > {shlex.quote(str(sent))}\n',
  )
  env |= {"POD": "pod-1", "ZONE": "zone-2", "REPO": "https://host/ring jax"}
  config = "configs/train/a b.py"
  subprocess.run(
    ["bash", SCRIPTS / "pod.sh", f"--config={config}", "--mesh=seq:64"],
    env=env,
    check=True,
  )
  lines = sent.read_text()
  first = lines.splitlines()[:7]
  assert first[:5] == ["compute", "tpus", "tpu-vm", "ssh", "pod-1"]
  assert first[5:] == ["--zone=zone-2", "--worker=all"]
  command = lines[lines.index("--command=") + len("--command=") :]
  assert "https://host/ring\\ jax" in command
  last = shlex.split(command.strip().splitlines()[-1])
  assert last[1:] == [
    "-m",
    "ringjax.launch.train",
    "--distributed",
    f"--config={config}",
    "--mesh=seq:64",
  ]
  subprocess.run(["bash", "-n", "-c", command], check=True)


def test_a_pod_s_server_is_started_again(tmp_path):
  """Until it ends by a signal, or because of its flags."""
  sent = tmp_path / "sent"
  env = stand_in(
    tmp_path / "bin",
    "gcloud",
    f'#!/bin/sh\nprintf "%s\\n" "$@" > {shlex.quote(str(sent))}\n',
  )
  env |= {"POD": "pod-1", "ZONE": "zone-2", "SCRIPT": "serve"}
  subprocess.run(
    ["bash", SCRIPTS / "pod.sh", "--model=a b"], env=env, check=True
  )
  lines = sent.read_text()
  command = lines[lines.index("--command=") + len("--command=") :]
  assert ".[tpu,gcs,serve]" in command
  last = command.strip().splitlines()[-1]
  assert "-m ringjax.launch.serve --distributed --model=a\\ b;" in last
  for statuses, end in (("3 137 0", 0), ("3 2 0", 2)):
    (tmp_path / "left").write_text(statuses)
    starts = tmp_path / ".venv" / "bin" / "python"
    starts.parent.mkdir(parents=True, exist_ok=True)
    starts.write_text(
      '#!/bin/bash\nread -r first others < left; echo "$others" > left\n'
      "exit $first\n"
    )
    starts.chmod(0o755)
    quick = last.replace("sleep 5", "sleep 0")
    ran = subprocess.run(["bash", "-c", quick], cwd=tmp_path, check=False)
    assert ran.returncode == end


def test_a_server_of_slurm_is_started_again(tmp_path):
  starts = tmp_path / "starts"
  env = stand_in(
    tmp_path / "bin",
    "srun",
    f'#!/bin/bash\necho "$@" >> {shlex.quote(str(starts))}\n'
    "exit ${STATUS:-0}\n",
  )
  env |= {"SLURM_SUBMIT_DIR": str(tmp_path), "RESTARTS": "2", "PAUSE": "0"}
  for status, count in (("0", 1), ("2", 1), ("3", 3)):
    starts.write_text("")
    ran = subprocess.run(
      ["bash", SCRIPTS / "serve.sbatch", "--model=DIR"],
      env=env | {"STATUS": status},
      check=False,
    )
    assert str(ran.returncode) == status
    lines = starts.read_text().splitlines()
    assert len(lines) == count
    assert lines[0].endswith(
      "-m ringjax.launch.serve --distributed --model=DIR"
    )


def test_a_pod_without_a_name_is_refused():
  env = {k: v for k, v in os.environ.items() if k not in ("POD", "ZONE")}
  ran = subprocess.run(
    ["bash", SCRIPTS / "pod.sh"],
    env=env, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert ran.returncode and "name of the TPU slice" in ran.stderr


@pytest.mark.parametrize("name", ["jobset.yaml", "serve_jobset.yaml"])
def test_a_jobset_names_files_and_hosts_that_agree(name):
  text = (SCRIPTS / name).read_text()
  if name == "jobset.yaml":
    config = re.search(r"--config=(\S+)", text)
    assert config and (ROOT / "launch" / config[1]).is_file()
  else:
    passed = re.findall(r"- (--\S+)$", text, re.M)
    values = common.parse("serve", serve.define, passed)
    flag_modes.check(values, names_of(serve.define))
    assert flag_modes.mode_of(values) == "alone"
    ports = {*re.findall(r"(?:containerPort|port|targetPort): (\d+)", text)}
    assert ports == {str(values.port), "80"}
    grace = re.search(r"terminationGracePeriodSeconds: (\d+)", text)
    assert int(grace[1]) > values.grace
    probed = re.findall(r"path: (\S+)", text)
    assert probed == ["/ready", "/health"]
  # Chips of the topology, of the hosts, and of the mesh.
  x, y = map(int, re.search(r"tpu-topology: (\d+)x(\d+)", text).groups())
  hosts = int(re.search(r"parallelism: (\d+)", text)[1])
  chips = int(re.search(r"google.com/tpu: (\d+)", text)[1])
  assert hosts == int(re.search(r"completions: (\d+)", text)[1])
  mesh = re.search(r"--mesh=(\S+)", text)[1]
  sizes = [int(size) for size in re.findall(r":(\d+)", mesh)]
  assert x * y == hosts * chips == math.prod(sizes)


@pytest.mark.parametrize(
  "name", sorted(file.name for file in SCRIPTS.iterdir() if file.is_file())
)
def test_scripts_and_their_examples_are_valid(name):
  """Shells and YAML can be read; each flag is one of the script it is for."""
  text = (SCRIPTS / name).read_text()
  if name.endswith(".yaml"):
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all(text))
    assert [x["kind"] for x in documents][:1] == ["JobSet"]
    for container in containers(documents[0]):
      check_flags(container["command"])
  else:
    subprocess.run(["bash", "-n", SCRIPTS / name], check=True)
  joined = text.replace("\\\n", " ")
  for line in joined.splitlines():
    example = re.match(r"#   (.*(?:pod\.sh|\.sbatch)) (--.*)", line)
    if example is not None:
      script = "serve" if "serve" in example[1].lower() else "train"
      check_flags(["python", "-m", f"launch.{script}", *example[2].split()])


def containers(jobset):
  """Containers of the pods of a JobSet."""
  (job,) = jobset["spec"]["replicatedJobs"]
  return job["template"]["spec"]["template"]["spec"]["containers"]


def check_flags(command):
  """The flags of a command are those of its script."""
  script = {"serve": serve, "train": train}[command[2].rsplit(".", 1)[-1]]
  values = flags.FlagValues()
  script.define(values)
  for word in command[3:]:
    assert word.startswith("--"), word
    name = word[2:].partition("=")[0]
    assert name in values, word


def test_commands_of_the_page_are_valid():
  text = (ROOT / "docs" / "clusters.md").read_text().replace("\\\n", " ")
  text = re.sub(r" +", " ", text)
  pattern = r"docs/clusters/(pod\.sh|serve\.sbatch|train\.sbatch)((?: --\S+)+)"
  commands = list(re.finditer(pattern, text))
  assert len(commands) >= 4
  for command in commands:
    line_start = text[: command.start()].splitlines()[-1]
    serves = "serve" in command[1] or "SCRIPT=serve" in line_start
    script = "serve" if serves else "train"
    words = [word.strip("`.,;:") for word in command[2].split()]
    check_flags(["python", "-m", f"launch.{script}", *words])
