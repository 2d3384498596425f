"""What the host's processor can do."""

from __future__ import annotations

import pytest

import ringjax as rj
from ringjax import Blockwise, Ring
from ringjax.ops.attention.kernels.auto_kernel import AutoKernel
from ringjax.ops.attention.strategies import nesting
from ringjax.parallel import processor

PROCESSORS = {
  "flags: fpu avx2 fma": False,
  "flags: fpu avx2 avx512f avx512_bf16": True,
  "flags: fpu avx512f": False,
  "Features: fp asimd bf16": True,
  "Features: fp asimd": False,
  # Other lines do not count; nothing is known of this one.
  "model name: bf16": True,
  "": True,
}


@pytest.fixture(params=PROCESSORS)
def host(request, monkeypatch):
  """A processor, and whether it is taken to multiply bfloat16."""
  lines = dict(line.split(": ") for line in request.param.splitlines())
  monkeypatch.setattr(processor, "told", lambda name: lines.get(name, ""))
  return PROCESSORS[request.param]


def test_blockwise_goes_by_the_processor(host):
  assert processor.multiplies_bfloat16() == host
  wide = Blockwise(8, wide=not host)
  for local in (AutoKernel(8), Blockwise(8)):
    assert nesting.on_device(Ring(local), "cpu", "cpu") == Ring(wide)
  # What an accelerator multiplies is no matter of the host.
  assert Blockwise(8).on_device("gpu", "gpu") == Blockwise(8, wide=False)


@pytest.mark.parametrize("wide", [False, True])
def test_what_is_asked_for_stays(host, wide):
  mine = Ring(Blockwise(wide=wide))
  assert nesting.on_device(mine, "cpu", "cpu") == mine


def test_wide_is_yes_or_no():
  with pytest.raises(rj.InputTypeError, match="wide: got 'no'"):
    Blockwise(wide="no")


def test_proc_is_read(tmp_path, monkeypatch):
  path = tmp_path / "cpuinfo"
  path.write_text("processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: a b c\n")
  opened = lambda _: path.open()
  monkeypatch.setattr(processor, "open", opened, raising=False)
  told = processor.told.__wrapped__
  assert told("model name") == "Some CPU"
  assert told("flags") == "a b c" and told("Features") == ""
  path.unlink()
  assert told("flags") == ""
