"""What is said when memory runs out."""

from __future__ import annotations

import jax
import pytest

from ringjax.errors import MemoryEstimateError, OutOfMemoryError
from ringjax.parallel import memory

SAID = {
  "RESOURCE_EXHAUSTED: Out of memory allocating 123456789 bytes.": 123456789,
  "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
  "memory space hbm. Used 17.5G of 16.0G hbm.": int(17.5 * 2**30),
  "RESOURCE_EXHAUSTED: Attempting to allocate 1.5GiB.": int(1.5 * 2**30),
  "RESOURCE_EXHAUSTED: out of memory": None,
}


@pytest.mark.parametrize("text", SAID)
def test_what_a_runtime_says_is_read(text):
  with (
    pytest.raises(OutOfMemoryError, match="while resting") as caught,
    memory.watched("resting", "sleep less, or more"),
  ):
    raise jax.errors.JaxRuntimeError(text)
  assert caught.value.nbytes == SAID[text]
  much = "more" if SAID[text] is None else f"{SAID[text]:,} bytes"
  assert f"asked for {much}: sleep less, or more" in str(caught.value)
  assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
  assert isinstance(caught.value, MemoryError)


def test_the_host_s_too():
  with pytest.raises(OutOfMemoryError), memory.watched("resting", "sleep"):
    raise MemoryError


@pytest.mark.parametrize(
  "error",
  [
    jax.errors.JaxRuntimeError("INTERNAL: no"),
    ZeroDivisionError(),
    MemoryEstimateError("an estimate"),
    OutOfMemoryError("inside", nbytes=3),
  ],
)
def test_other_errors_pass(error):
  with pytest.raises(type(error)) as caught, memory.watched("resting", "x"):
    raise error
  assert caught.value is error


# ---------------------------------------------------------------------------
# How much is left
# ---------------------------------------------------------------------------


def system(root, groups, files):
  """Files of a system with 1 GB free, as Linux writes them."""
  written = {
    "proc/meminfo": "MemTotal: 2000000 kB\nMemAvailable:  1000000 kB\n",
    "proc/self/cgroup": groups,
    **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
  }
  for name, text in written.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  return str(root)


def test_a_machine_without_limits(tmp_path):
  files = {"memory.max": "max\n", "memory.current": "5\n"}
  root = system(tmp_path, "0::/\n", files)
  assert memory.host_free_bytes(root) == 1_024_000_000
  assert memory.host_total_bytes(root) == 2_048_000_000
  none = str(tmp_path / "none")
  assert memory.host_free_bytes(none) is memory.host_total_bytes(none) is None


def test_a_system_without_a_table_of_memory_has_its_pages(monkeypatch):
  """As macOS: the total is known, and what is free is not."""
  monkeypatch.setattr(memory, "_read", lambda path: "")
  pages = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
  monkeypatch.setattr(memory.os, "sysconf", pages.__getitem__)
  assert memory.host_total_bytes() == 4_096_000
  assert memory.host_free_bytes() is None


@pytest.mark.parametrize("inner", [True, False])
def test_a_limit_of_a_group_or_of_one_around_it(tmp_path, inner):
  limited, other = ("a/b", "a") if inner else ("a", "a/b")
  files = {
    f"{limited}/memory.max": "1000000\n",
    f"{limited}/memory.current": "700000\n",
    # Cached files make room.
    f"{limited}/memory.stat": "anon 5\ninactive_file 50000\nslab 7\n",
    f"{other}/memory.max": "max\n",
    f"{other}/memory.current": "3\n",
  }
  root = system(tmp_path, "0::/a/b\n", files)
  assert memory.host_free_bytes(root) == 350_000
  assert memory.host_total_bytes(root) == 1_000_000


def test_a_limit_of_the_older_interface(tmp_path):
  """As a container sees it: under a name that is not there."""
  files = {
    "memory/memory.limit_in_bytes": "4096\n",
    "memory/memory.usage_in_bytes": "5000\n",
    "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 10\n",
  }
  groups = "11:cpu,cpuacct:/x\n9:memory:/docker/12ab\n0::/\nodd\n"
  assert memory.host_free_bytes(system(tmp_path, groups, files)) == 0
  files["memory/memory.limit_in_bytes"] = f"{2**63 - 4096}\n"
  root = system(tmp_path, groups, files)
  assert memory.host_free_bytes(root) == 1_024_000_000


# ---------------------------------------------------------------------------
# Devices
# ---------------------------------------------------------------------------


class ReportingDevice:
  """A device that reports given figures, or raises as a plug-in may."""

  def __init__(self, stats, platform="gpu"):
    self.stats, self.platform = stats, platform

  def memory_stats(self):
    if isinstance(self.stats, Exception):
      raise self.stats
    return self.stats


@pytest.mark.parametrize(
  ("stats", "memory_bytes", "free"),
  [
    ({"bytes_limit": 100, "bytes_in_use": 30, "peak_bytes_in_use": 60},
     (100, 30, 60), 70),
    ({"bytes_limit": 100}, (100, 0, None), 100),
    ({"peak_bytes_in_use": 60}, (None, None, 60), None),
    (None, (None, None, None), None),
    (NotImplementedError("no figures"), (None, None, None), None),
    (jax.errors.JaxRuntimeError("UNIMPLEMENTED"), (None, None, None), None),
  ],
)  # fmt: skip
def test_a_device_has_the_memory_that_it_reports(stats, memory_bytes, free):
  device = ReportingDevice(stats)
  assert memory.device_memory(device) == memory_bytes
  assert memory.device_free_bytes(device, 2) == free


def test_cpu_devices_share_the_memory_of_the_host(monkeypatch):
  monkeypatch.setattr(memory, "host_total_bytes", lambda: 1000)
  monkeypatch.setattr(memory, "host_free_bytes", lambda: 600)
  device = ReportingDevice(None, "cpu")
  assert memory.device_memory(device, 4).total == 250
  assert memory.device_free_bytes(device, 4) == 150
