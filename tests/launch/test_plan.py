"""launch.plan: what it prints, what it stores, what it refuses."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from launch import plan
from launch.planning import elastic, plan_flags, serving_systems
from ringjax.plan.fit import TimedCall
from ringjax.plan.kv_runahead import published
from ringjax.serve.cluster import ROUTING_POLICIES, Goodput, needs_costs
from tests.helpers import script
from tests.launch.conftest import PATIENCE_S, ROOT, Ran, environment

MAIN = (
  "--profile=llama7b-a100",
  "--context=10240",
  "--ranks=4",
  "--bandwidth=300e9",
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def ask(*argv: str) -> Ran:
  return Ran(*script(plan, *argv))


def methods(ran: Ran) -> dict:
  return {one["method"]: one for one in ran.json["methods"]}


@pytest.mark.smoke
def test_the_command_of_the_docs():
  ran = ask("kvr", *MAIN, "--why")
  assert ran.status == 0 and ran.err == ""
  for words in ("TSP", "KVR-E", "KVR-S", "KVR-P", "lower bound", "why"):
    assert words in ran.out
  shares = ran.out.partition("shares of KVR-S:")[2].split("\n")[0].split()
  want = published.SHARES_10K_4
  assert all(
    abs(float(a) - b) < 0.006 for a, b in zip(shares, want, strict=True)
  )


def test_json_is_all_there_is_on_stdout():
  ran = ask("kvr", *MAIN, "--json")
  found = methods(ran)
  assert ran.json["partition"] == found["kvr_s"]["partition"]
  assert sum(ran.json["partition"]) == 10240
  seconds = {name: one["seconds"] for name, one in found.items()}
  assert seconds["kvr_s"] <= seconds["kvr_p"] < 1.015 * seconds["kvr_s"]
  assert seconds["kvr_p"] < seconds["kvr_e"] < seconds["tsp"]
  assert ran.json["lower_bound_s"] < seconds["kvr_s"]
  # Half the bytes of an all-gather when even.
  sent = lambda name: sum(found[name]["bytes_by_link"].values())
  assert sent("kvr_e") * 2 == sent("tsp")


@pytest.mark.long
def test_in_a_process_of_its_own():
  done = subprocess.run(
    [sys.executable, "-m", "launch.plan", "kvr", *MAIN, "--json"],
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout)["ranks"] == 4
  wrong = subprocess.run(
    [sys.executable, "-m", "launch.plan", "kvr", "--ranks=0"],
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
    check=False,
  )
  assert wrong.returncode == 2 and wrong.stdout == ""
  assert wrong.stderr.startswith("plan: ") and "ranks" in wrong.stderr


@pytest.mark.long
def test_tiles_prefixes_windows_links():
  ran = ask("kvr", *MAIN, "--tile=128", "--json")
  assert all(n % 128 == 0 for n in ran.json["partition"])
  plain = methods(ran)["kvr_s"]["seconds"]
  ran = ask("kvr", *MAIN, "--prefix=10240", "--json")
  assert methods(ran)["kvr_s"]["seconds"] > plain
  assert "kvr_p" not in methods(ran)
  ran = ask("kvr", *MAIN, "--window=1024", "--json")
  assert methods(ran)["kvr_s"]["seconds"] < plain
  assert "ring_striped" not in methods(ran)
  slow = ("--latency=1e-3", "--credits=1", "--tile=128")
  ran = ask("kvr", *MAIN, *slow, "--json")
  assert methods(ran)["kvr_s"]["seconds"] > plain
  words = ask("kvr", *MAIN, "--latency=1e-3", "--prefix=7", "--window=9").out
  assert "1000 us" in words and "after 7" in words and "window 9" in words


def test_a_causal_kernel():
  dense = methods(ask("kvr", *MAIN, "--json"))
  causal = methods(ask("kvr", *MAIN, "--kernel=causal", "--json"))
  assert causal["tsp"] == dense["tsp"]
  assert causal["kvr_s"]["seconds"] < dense["kvr_s"]["seconds"]


@pytest.mark.slow
def test_noise():
  calm = methods(ask("kvr", *MAIN, "--json"))
  loud = methods(ask("kvr", *MAIN, "--noise=20", "--json"))
  worse = lambda m: loud[m]["seconds"] / calm[m]["seconds"] - 1
  assert worse("kvr_s") <= worse("tsp") / 5
  assert loud == methods(ask("kvr", *MAIN, "--noise=20", "--json"))
  assert loud != methods(ask("kvr", *MAIN, "--noise=20", "--seed=1", "--json"))


def test_a_search_without_the_noise_says_so():
  flags = ("kvr", "--context=512", "--ranks=2")
  assert "timed with --noise" in ask(*flags, "--noise=20").out
  assert "--noise" not in ask(*flags).out


def test_a_tiny_prompt_drops_ranks_and_says_so():
  ran = ask("kvr", "--context=1024", "--ranks=3")
  assert ran.status == 0 and "uses 1 of 3 ranks" in ran.out
  ran = ask("kvr", "--context=1024", "--ranks=3", "--least_gain=0", "--json")
  assert ran.json["ranks"] == 3
  ran = ask("kvr", "--context=3", "--ranks=8", "--least_gain=0", "--json")
  assert ran.status == 0 and ran.json["ranks"] <= 3
  assert ask("kvr", "--context=1", "--ranks=4").status == 0


@pytest.mark.slow
def test_a_table(tmp_path):
  path = str(tmp_path / "table.json")
  assert ask("kvr", *MAIN, f"--table={path}").status == 2
  ran = ask("kvr", *MAIN, f"--table={path}", "--save_table", "--tile=64")
  assert ran.status == 0 and "4 entries" in ran.err
  again = ask("kvr", *MAIN, f"--table={path}", "--json")
  assert again.err == ""
  seconds = {name: x["seconds"] for name, x in methods(again).items()}
  assert seconds["kvr_p"] < 1.015 * seconds["kvr_s"]
  # Nothing is searched again, but what is missing is added.
  ran = ask(
    "kvr", *MAIN, "--context=20000", f"--table={path}", "--save_table",
    "--tile=64",
  )  # fmt: skip
  assert ran.err.count("searching") == 1 and "5 entries" in ran.err
  for other in ("--ranks=3", "--bandwidth=1e11", "--profile=falcon7b-a100"):
    ran = ask("kvr", *MAIN, other, f"--table={path}", "--least_gain=0")
    assert ran.status == 2 and "table" in ran.err, other


def test_a_picture(tmp_path):
  path = tmp_path / "plan.png"
  ran = ask("kvr", "--context=2048", "--ranks=2", f"--plot={path}")
  assert ran.status == 0 and str(path) in ran.err
  assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_published_rows_beside_ours(monkeypatch):
  rows = published.TABLE["llama7b-a100"]
  long = {tokens: rows[tokens] for tokens in (8192, 16384)}
  monkeypatch.setattr(published, "TABLE", {"llama7b-a100": long})
  monkeypatch.setattr(published, "SLOW", {8192: published.SLOW[8192]})
  ran = ask("kvr", "--paper")
  assert ran.status == 0
  lines = ran.out.splitlines()
  assert sum(line.startswith("300 GB/s") for line in lines) == 4
  assert sum(line.startswith("10 GB/s") for line in lines) == 2
  assert sum(line.startswith("1 GB/s") for line in lines) == 2
  assert "share of rank 3: paper 0.185, ours 0.18" in ran.out
  assert "boundary: paper 9728, ours 97" in ran.out
  found = ask("kvr", "--paper", "--json").json
  assert len(found["rows"]) == 3 * 4 + 5 + 5
  worst = found["worst_4_ranks_8k_to_16k"]
  assert worst["TSP"] < 0.1 and worst["KVR-S"] < 0.1
  assert worst["speed-up apart"] < 0.06


# ---------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------


def test_a_fit_is_stored_and_used(monkeypatch):
  """With planted times, so that the numbers are known."""
  from ringjax.bench import layers

  asked = {}

  def measure(config, tokens, **options):
    asked.update(options, tokens=tuple(tokens), heads=config)
    return [
      TimedCall(
        tokens=n,
        before=p,
        seconds=1e-5 * n + 1e-8 * n * (p + n / 2) + 1e-3,
      )
      for p in (0, 2048)
      for n in tokens
    ]

  monkeypatch.setattr(layers, "measure", measure)
  ran = ask("kvr", "--fit", "--name=mine", "--rounds=3", "--json")
  assert ran.status == 0, ran.err
  assert asked["rounds"] == 3 and asked["layers"] == 2
  assert asked["tokens"] == (256, 512, 1024)
  found = ran.json["profile"]
  # Two of twelve layers were measured.
  assert found["layers"] == 12 and found["kernel"] == "causal"
  assert found["token_s"] == pytest.approx(6e-5)
  assert found["pair_s"] == pytest.approx(6e-8)
  assert found["fixed_s"] == pytest.approx(6e-3)
  assert found["kv_bytes"] == 2 * 4 * 64 * 4
  ran = ask("kvr", "--profile=mine", "--context=4096", "--ranks=2", "--json")
  assert ran.json["profile"] == found
  both = ask("kvr", "--fit", "--name=mine", "--context=4096", "--ranks=2")
  assert both.status == 0 and "KVR-S" in both.out and "wrote" in both.err


def test_calls_are_timed():
  """What a small model takes is noise; that it is measured is not."""
  from ringjax.bench import layers
  from ringjax.models.presets import preset

  small = dict(
    hidden_size=16,
    intermediate_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
  )
  stream = io.StringIO()
  config = {**preset("llama-100m"), **small}
  found = layers.measure(config, (8, 8), layers=1, rounds=1, stream=stream)
  assert [(s.tokens, s.before) for s in found] == [(8, 0), (8, 16)]
  assert all(s.seconds > 0 for s in found)
  assert "tokens after" in stream.getvalue()


# ---------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    ((), "nothing"),
    (("tsp",), "tsp"),
    (("kvr", "more"), "more"),
    (("kvr", "--profile=nobody"), "nobody"),
    (("kvr", "--profile=none.json"), "none.json"),
    (("kvr", "--bandwidth=0"), "bandwidth"),
    (("kvr", "--bandwidth=inf"), "bandwidth"),
    (("kvr", "--bandwidth=nan"), "bandwidth"),
    (("kvr", "--least_gain=2"), "least_gain"),
    (("kvr", "--save_table"), "--table"),
    (("kvr", "--table=x", "--prefix=5"), "--prefix"),
    (("kvr", "--table=none.json"), "none.json"),
    (("kvr", "--fit", "--paper"), "--paper"),
    (("kvr", "--fit", "--profile=x"), "--profile"),
    (("kvr", "--fit", "--preset=nobody"), "nobody"),
    (("kvr", "--fit", "--preset=deepseek-v3"), "deepseek_v3"),
    (("kvr", "--fit", "--name=a/b"), "a/b"),
    (("kvr", "--fit", "--name=llama7b-a100"), "taken"),
    (("kvr", "--fit", "--tokens=a"), "--tokens"),
    (("kvr", "--fit", "--tokens=0"), "tokens"),
    (("kvr", "--preset=llama-2-7b"), "--fit"),
  ],
)
def test_refusals(argv, words):
  ran = ask(*argv)
  assert ran.status == 2 and ran.out == ""
  assert ran.err.startswith("plan: ") and ran.err.count("\n") == 1
  assert words in ran.err and len(ran.err) < 500


def test_a_plot_without_matplotlib(monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
  ran = ask("kvr", "--plot=x.png")
  assert ran.status == 2 and "matplotlib" in ran.err


def test_who_reads_may_have_enough(start):
  """As `| head` does: no traceback, and a shell's status of SIGPIPE."""
  with start(
    "-m", "launch.plan", "explain", "--chip=tpu-v5p", "--shards=8",
    "--tokens=65536",
  ) as one:  # fmt: skip
    one.stdout.close()
    err = one.stderr.read()
    assert one.wait(timeout=PATIENCE_S) == 141
  assert err == ""


@pytest.mark.parametrize("command", plan._COMMANDS)
def test_each_sub_command_has_a_help_page_of_its_own(command):
  page = plan.help_page(command)
  assert page.split()[:4] == ["python", "-m", "launch.plan", command]
  listed = lambda name: f"\n--{name}:" in page.replace("[no]", "")
  refused = plan_flags.refused(command)
  names = {*plan_flags.defined()}
  assert {name for name in names if listed(name)} == names - {*refused}
  # What the page leaves out is refused.
  foreign = next(x for x in ("cpu_tokens", "slices") if x in refused)
  ran = ask(command, f"--{foreign}=1")
  assert ran.status == 2 and f"--{foreign}" in ran.err


def test_flags_of_plan_name_sub_commands_that_exist():
  named = {x for commands in plan_flags._COMMANDS.values() for x in commands}
  assert named == {*plan._COMMANDS}


@pytest.mark.long
def test_help_of_a_sub_command_of_the_installed_script():
  done = subprocess.run(
    [sys.executable, "-m", "launch.plan", "aot", "--help"],
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("  python -m launch.plan aot ")


def test_bytes_of_caches():
  folder = ROOT / "tests" / "fixtures" / "models" / "gemma3_text"
  ran = ask("cache", f"--model={folder}", "--tokens=4096", "--json")
  assert ran.status == 0, ran.err
  rows = {row["kind"]: row for row in ran.json["rows"]}
  dense, windowed = rows["dense"], rows["windowed"]
  # Three of four layers look back 9 tokens.
  assert windowed["all"] == dense["all"] // 4
  assert 0 < windowed["windowed"] < dense["bytes"] / 16
  ran = ask("cache", "--model=gemma-3-27b")
  assert ran.status == 0 and "11.2 GB" in ran.out and "66.6 GB" in ran.out
  ran = ask(
    "cache",
    f"--model={folder}",
    "--tokens=4096",
    "--cache=nuq3:calibration=DIR",
    "--chip=v5e",
    "--json",
  )
  (row,) = ran.json["rows"]
  assert row["machine"] == "tpu-v5e" and row["nbytes"] == sum(
    row["parts"].values()
  )
  # Bytes of a token fill up to 8 on a TPU, as its caches are stored.
  assert row["parts"]["filling up"] > 0
  ran = ask("cache", f"--model={folder}", "--cache=int4+snapkv", "--chip=h100")
  assert "pages: codes" in ran.out and "binds" in ran.out
  # What is there behind a prompt, on a TPU too, where codes fill up.
  options = (f"--model={folder}", "--tokens=4096", "--json", "--chip=v5e")
  ran = ask("cache", "--cache=int4+snapkv:budget=.2", *options)
  (row,) = ran.json["rows"]
  assert row["share"] < 0.3 and row["bits"] > 4.5
  assert row["reading"] > 2 * row["nbytes"]
  ran = ask("cache", "--cache=allocated:table=DIR")
  assert ran.status == 2 and "no weights are read" in ran.err
  assert ask("cache", "--chip=v5e").status == 2
  assert ask("cache", "--cache=int4", "--chip=v1").status == 2
  assert ask("cache", "--tokens=0").status == 2
  assert ask("cache", "--shards=4").status == 2


def test_a_plan_of_offloading(tmp_path):
  path = tmp_path / "offload.png"
  ran = ask("offload", "--policy=48x3:20/80,0/100,0/100", f"--plot={path}")
  assert ran.status == 0, ran.err
  assert "7.14 tokens/s" in ran.out and "to device + compute" in ran.out
  # What was published needs more than the part of memory that may be filled.
  assert "does not fit: the peak of device" in ran.out
  assert path.read_bytes().startswith(b"\x89PNG")
  ran = ask("offload", "--policy=32x5", "--json")
  assert ran.status == 0 and ran.json["policy"]["rows"] == 32
  found = ran.json
  assert 0.1 < found["policy"]["weights"][0] < 0.25
  again = ask("offload", f"--policy={found['text']}", "--json").json
  rate = lambda one: one["estimate"]["tokens_s"]
  assert rate(again) == pytest.approx(rate(found), rel=1e-2)
  folder = ROOT / "tests" / "fixtures" / "models" / "gemma3_text"
  machine = tmp_path / "machine.json"
  ran = ask(
    "offload", f"--model={folder}", "--policy=4x1", "--device_gb=4",
    "--usable=0.5", "--json",
  )  # fmt: skip
  assert ran.json["machine"]["device_bytes"] == 4e9
  assert ran.json["estimate"]["limit"]["device"] == 2e9
  ran = ask(
    "offload", f"--model={folder}", "--machine=here", f"--folder={tmp_path}",
    "--megabytes=1", "--rounds=1", "--policy=4x1", f"--out={machine}",
  )  # fmt: skip
  assert ran.status == 0, ran.err
  assert "machine: measured" in ran.out and f"wrote {machine}" in ran.err
  ran = ask("offload", f"--machine={machine}", "--policy=1x1", "--json")
  assert ran.json["machine"]["name"] == "here"


@pytest.mark.slow
def test_published_policies_of_offloading():
  found = {
    (row["model"], row["prompt"]): row
    for row in ask("offload", "--paper", "--json").json["rows"]
  }
  assert len(found) == 6
  assert found["opt-30b", 512]["code"] == pytest.approx(7.14, rel=0.01)
  assert found["opt-30b", 256]["code"] == pytest.approx(12.97, rel=0.01)
  assert found["opt-175b", 512]["best"] == pytest.approx(0.169, rel=0.01)


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    (("--model=opt-30b,opt-175b",), "one model"),
    (("--model=nobody",), "nobody"),
    (("--machine=t5",), "t5"),
    (("--policy=3",), "policy"),
    (("--policy=4x1:0/0,0/0,0/0",), "hidden"),
    (("--folder=/tmp",), "--folder"),
    (("--paper", "--policy=4x1"), "--policy"),
    (("--policy=4x1", "--host_gb=1", "--disk_gb=1"), "in all tiers"),
    (("--paper", "--machine=here"), "--out"),
  ],
)
def test_refusals_of_offloading(argv, words):
  ran = ask("offload", *argv)
  assert ran.status == 2 and ran.out == "" and words in ran.err, ran.err


@pytest.mark.long
def test_elastic_groups_beside_fixed_ones(monkeypatch):
  # What searches the rate has tests of its own, and takes many simulations.
  given = lambda *_, **__: Goodput(rate=2.0, tried=())
  monkeypatch.setattr(elastic, "goodput", given)
  few = ("--requests=40", "--workloads=zipf:1.2", "--seed=3")
  ran = ask("elastic", *few, "--json")
  assert ran.status == 0, ran.err
  rows = {row["system"]: row for row in ran.json["rows"]}
  assert [row["published"] for row in rows.values()] == [
    2.925, 1.355, 1.478, 1.289, None,
  ]  # fmt: skip
  assert all(row["ttft_p90_s"] > 0 for row in rows.values())
  assert rows["elastic, 4 x TP2"]["shrinks"] > 0
  fixed = [row for name, row in rows.items() if "elastic" not in name]
  assert all(row["moved_tokens"] == row["shrinks"] == 0 for row in fixed)
  words = ask("elastic", *few).out
  assert "| zipf:1.2 | TP8 |" in words and "times what they take alone" in words
  ran = ask("elastic", "--workloads=pareto")
  assert ran.status == 2 and ran.out == "" and "zipf:EXPONENT" in ran.err


@pytest.mark.long
def test_ways_to_serve_the_same_load(monkeypatch):
  given = lambda *_, **__: Goodput(rate=2.0, tried=())
  monkeypatch.setattr(serving_systems, "goodput", given)
  load = ("--requests=30", "--prompt=700", "--new=20", "--seed=3")
  ran = ask("which", *load, "--json")
  assert ran.status == 0, ran.err
  rows = {row["kind"]: row for row in ran.json["rows"]}
  assert set(rows) == {
    "engine", "replicas", "replicas, conductor", "apart", "apart, conductor",
    "elastic",
  }  # fmt: skip
  assert all(row["ttft_p90_s"] > 0 for row in rows.values())
  assert not any(row["cached"] for row in rows.values())
  # What prompts share is found where they are read; groups keep none of it.
  shared = ("--shared=512", "--documents=3")
  ran = ask("which", *load, *shared, "--json")
  rows = {row["kind"]: row for row in ran.json["rows"]}
  assert "elastic" not in rows
  assert 0.2 < rows["engine"]["cached"] < 0.5
  # Where no rate keeps the limits it says so, and what requests alone take.
  monkeypatch.setattr(
    serving_systems, "goodput", lambda *_, **__: Goodput(rate=0.0, tried=())
  )
  ran = ask("which", "--requests=3", "--prompt=9000000", "--spread=0")
  assert "no system keeps the limits" in ran.out and "| 100% |" in ran.out
  ran = ask("which", "--requests=3", "--slo=tpot=1e-9", "--json")
  assert ran.json["limits"]["ttft_s"] is None and "Infinity" not in ran.out
  ran = ask("which", "--requests=3", "--prompt=500", "--slo=ttft=1e-9")
  assert "TPOT of any length for 90 %" in ran.out
  assert " alone |" in ran.out and "| 100% |" not in ran.out
  monkeypatch.setattr(serving_systems, "goodput", given)
  words = ask("which", *load, *shared).out
  assert "512 of 3 documents and 700" in words and "| one engine, TP8" in words
  for flag, word in (
    ("--slo=fast", "ttft=SECONDS"),
    ("--documents=60", "--shared=0"),
  ):
    ran = ask("which", flag)
    assert ran.status == 2 and word in ran.err


@pytest.mark.usefixtures("unchecked")
def test_who_reads_a_prompt_by_each_policy(tmp_path):
  # Four questions about each of ten documents, faster than one can read.
  trace = tmp_path / "trace.jsonl"
  trace.write_text(
    "".join(
      json.dumps(
        {
          "timestamp": 400 * n,
          "input_length": 512 * 16 + 100,
          "output_length": 3,
          "hash_ids": [*range(100 * (n % 10), 100 * (n % 10) + 16), 5000 + n],
        }
      )
      + "\n"
      for n in range(40)
    )
  )
  fast = ("--instances=4x1", "--model=opt-13b", "--tensor=1")
  ran = ask("routes", f"--trace={trace}", *fast, "--json")
  assert ran.status == 0, ran.err
  rows = {row["policy"]: row for row in ran.json["rows"]}
  assert [*rows] == [x for x in ROUTING_POLICIES if needs_costs(x)]
  names = ("random", "load", "local", "conductor")
  random, load, local, global_ = (rows[x]["ttft_mean_s"] for x in names)
  assert random > load > local >= global_ > 0
  # 30 of 40 find their document, but for the tokens behind it.
  found = 30 / 40 * 8192 / (8192 + 100)
  assert ran.json["could_be_found"] == pytest.approx(found)
  assert rows["load"]["cached"] < rows["conductor"]["cached"] <= found + 1e-9
  words = ask(
    "routes", *fast, "--requests=6", "--policies=early:tpot_s=1e-9/load"
  ).out
  assert "| `early:tpot_s=1e-9/load` | - | - | 0.0% | 0 bytes | 6 |" in words
  for flag, word in (
    ("--instances=4", "8x8"),
    ("--instances=0x1", "8x8"),
    ("--policies=best", "conductor"),
    ("--tensor=3 --model=opt-13b", "40 heads"),
    ("--tensor=1 --model=opt-66b", "devices that hold"),
    ("--model=opt-13b,opt-30b", "one model"),
    ("--rate=0", "--rate"),
    (f"--trace={trace} --rate=3", "--rate"),
    ("--slo=ttft=1", "--slo"),
    ("--documents=3", "--shared=0"),
  ):
    ran = ask("routes", *flag.split())
    assert ran.status == 2 and word in ran.err, ran.err


SERVE = ("--cluster=1x2", "--requests=5", "--prompt=200", "--new=4")


def profile_of_distserve(tmp_path):
  rows = {
    "decoding_large_small_bs_threshold": 4,
    "prefill": [9.0, 0.1, 1e-6],
    "decoding_smallbs": [20.0, 1e-3, 2.0],
    "decoding_largebs": [30.0, 2e-3, 9.0],
  }
  profile, capacity = tmp_path / "profile.json", tmp_path / "capacity.csv"
  profile.write_text(json.dumps({"facebook/opt-13b": {"1": rows}}))
  capacity.write_text("model,tp,pp,max_num_tokens\nfacebook/opt-13b,1,1,2\n")
  return f"--times={profile}", f"--capacities={capacity}"


@pytest.mark.long
def test_a_plan_of_a_service(tmp_path):
  profile = profile_of_distserve(tmp_path)
  curves, timeline = tmp_path / "curves.png", tmp_path / "timeline.png"
  ran = ask(
    "serve", "--model=opt-13b", *SERVE, *profile, "--rules=distserve",
    "--slo=ttft=0.1,tpot=0.04", f"--plot={curves}", f"--timeline={timeline}",
  )  # fmt: skip
  assert ran.status == 0, ran.err
  assert "1 prefill of TP 1 + 1 decode of TP 1" in ran.out
  assert "2 both of TP 1" in ran.out
  assert "in no time" in ran.out and "TPOT (ms)" in ran.out
  for path in (curves, timeline):
    assert path.read_bytes().startswith(b"\x89PNG") and f"{path}" in ran.err


@pytest.mark.long
def test_a_service_of_a_trace_at_a_rate(tmp_path):
  trace, calls = tmp_path / "trace.csv", tmp_path / "calls.csv"
  trace.write_text(
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    + "".join(
      f"2023-11-16 18:17:{n:02}.5,{200 + n},{2 + n % 2}\n" for n in range(20)
    )
  )
  rows = [
    f"{phase},{t},{n},{c},{1e-3 * (3 + (n + c / 9) / t / 20)}\n"
    for phase in ("prefill", "decode")
    for t, n, c in ((1, 8, 0), (2, 64, 0), (1, 256, 90), (4, 9, 7000))
  ]
  calls.write_text("phase,devices,tokens,cached,seconds\n" + "".join(rows))
  ran = ask(
    "serve", "--model=opt-6.7b", "--cluster=1x1", "--rate=2",
    f"--trace={trace}", "--requests=9", f"--times={calls}",
    "--slo=ttft=0.02,tpot=0.006,share=0.8", "--replan=4", "--json",
  )  # fmt: skip
  assert ran.status == 0, ran.err
  found = ran.json
  assert "fitted to 8 calls" in found["source"]
  kinds = {one["kind"]: one for one in found["placements"]}
  # The one device has no room for both phases side by side; two would do.
  assert kinds["colocated"]["goodput"] >= 2 and found["requests"] == 9
  assert kinds["high affinity"]["devices"] >= 2
  assert set(found["percentiles"]) == {"ttft_s", "tpot_s"}
  # Twice as fast as in the file nine requests are a window, and one more.
  (window,) = found["replanned"]
  assert (window["time_s"], window["why"]) == (4.0, "the first window")
  roles = found["roles"]
  assert {one["role"] for one in roles["groups"]} == {"prefill", "decode"}
  assert roles["rate"] == pytest.approx(2) and roles["changes"] == []
  assert roles["share_as_placed"] == roles["share_with_changes"] >= 0.8


@pytest.mark.long
def test_what_a_plan_can_not_serve_is_said(tmp_path):
  trace, calls = tmp_path / "trace.csv", tmp_path / "calls.csv"
  tokens = [200, 210, 3000, 9000000, 220, 230, 240, 250]
  trace.write_text(
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    + "".join(
      f"2023-11-16 18:17:{n:02}.5,{k},1\n" for n, k in enumerate(tokens)
    )
  )
  rows = [
    f"{phase},1,{n},{c},{seconds}\n"
    for n, c in ((100, 0), (400, 0), (1000, 0), (900, 90))
    for phase, seconds in (("prefill", 1e-3 * n), ("decode", 0.01))
  ]
  calls.write_text("phase,devices,tokens,cached,seconds\n" + "".join(rows))
  ran = ask(
    "serve", "--model=opt-13b", "--cluster=1x1", f"--trace={trace}",
    f"--times={calls}", "--slo=ttft=1,tpot=0.1,share=0.7", "--rate=4",
  )  # fmt: skip
  assert ran.status == 0, ran.err
  assert "TTFT 1 s and TPOT 0.1 s for 70 %" in ran.out
  assert "2 requests are longer than the model's context of 2,048" in ran.out
  assert "1 of 8 requests are refused and count as late: 9000000" in ran.out
  assert "the cluster has 1, on which no placement serves" in ran.out
  assert "all together are good for" not in ran.out


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    (("--model=opt-13b,opt-30b",), "one model"),
    (("--model=nobody",), "nobody"),
    (("--cluster=4",), "NODESxDEVICES"),
    (("--slo=ttft=fast",), "ttft=0.2"),
    (("--slo=ttft=0",), "above 0"),
    (("--slo=ttft=1,ttft=2",), "ttft=1,ttft=2"),
    (("--rate=0",), "--rate"),
    (("--replan=0", *SERVE), "--replan"),
    (("--requests=1",), "two at least"),
    (("--slo=share=2",), "share"),
    (("--rules=distserve",), "--capacities"),
    (("--times=profile.json",), "--capacities"),
    (("--trace=requests.txt",), "requests.txt"),
    (("--trace=none.csv", "--prompt=5"), "--prompt"),
    (("--chip=t5",), "t5"),
    (("--tokens=4",), "--tokens"),
    (("--model=opt-175b", "--cluster=1x1"), "room for opt-175b"),
    (("--slo=ttft=1e-6,tpot=1e-6", *SERVE), "no shape meets"),
  ],
)
def test_refusals_of_services(argv, words):
  ran = ask("serve", *argv)
  assert ran.status == 2 and ran.out == "" and words in ran.err, ran.err


def test_weights_through_a_window(tmp_path):
  fast = ("--disk_rate=1e12", "--window=2", "--new=3", "--json")
  ran = ask("window", "--model=llama-100m", "--processes=4", *fast)
  assert ran.status == 0, ran.err
  found = ran.json
  assert found["steady"] and not found["waits"] and found["first_s"] > 0
  assert [row["share"] for row in found["devices"]] == [0.25] * 4
  assert all(row["tight"] and row["blocks"] <= 2 for row in found["devices"])
  master, worker = found["devices"][:2]
  assert master["all_bytes"] > worker["all_bytes"] > worker["weight_bytes"]
  assert found["allreduce"]["star"]["chain_s"] == pytest.approx(8e-3)
  assert found["allreduce"]["tree"]["chain_s"] == pytest.approx(16e-3)
  # Slow disks: a token takes as long as the slowest device loads its part.
  ran = ask(
    "window", "--model=llama-100m", "--shares=0.5,0.3,0.2", "--new=3",
    "--disk_rate=1e8,1e6,1e8", "--json",
  )  # fmt: skip
  slow = ran.json["devices"][1]
  assert not slow["loose"] and slow["least_window"] is None
  loads = (slow["all_bytes"] - slow["cache_bytes"]) / 1e6
  assert ran.json["token_s"] == pytest.approx(loads, rel=0.1)
  assert ran.json["waits"] and not ran.json["steady"]
  path = tmp_path / "graph.json"
  path.write_text(
    json.dumps({
      "format": "ringjax.topology", "version": 1, "devices": ["a", "b"],
      "links": [["a", "s", 0.25], ["s", "b", 0.5]],
    })
  )  # fmt: skip
  ran = ask("window", "--model=llama-100m", "--processes=2", f"--graph={path}")
  assert ran.status == 0 and "1500 ms" in ran.out and "| b |" in ran.out


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    (("--shares=0,0",), "the sum"),
    (("--shares=a,b",), "--shares"),
    (("--shares=0.5,0.5", "--processes=3"), "3 numbers"),
    (("--ranks=2",), "--ranks"),
    (("--cache=snapkv",), "without a policy"),
    (("--measured=none.json",), "none.json"),
    (("--disk_rate=1,2,3",), "disk_rate"),
    (("--disk_rate=0",), "disk_rate"),
    (("--model=deepseek-v3",), "deepseek_v3"),
    (("--model=llama-100m,llama-2-7b",), "one model"),
    (("--graph=none.json",), "none.json"),
  ],
)
def test_refusals_of_windows(argv, words):
  ran = ask("window", *argv)
  assert ran.status == 2 and ran.out == "" and words in ran.err, ran.err


def test_the_tables_of_ring_attention(monkeypatch):
  ran = ask("ring")
  assert ran.status == 0 and ran.err == ""
  assert "24,960" in ran.out and "+0.2 %" in ran.out and "4,096" in ran.out
  assert "within a factor of two" in ran.out and "Not reproduced" in ran.out
  found = ask("ring", "--json").json
  assert len(found["hides"]) == 5 and len(found["contexts"]) == 13
  assert all(row["compiled"] is None for row in found["contexts"])
  assert ask("ring", "--timeout=5").status == 2

  # What the compiler is asked, in place of minutes of its work.
  from launch.planning import capacity
  from ringjax.plan.compiler import aot

  asked = []

  def find(cell, topology, timeout_s, say):
    asked.append((cell["model"], topology, timeout_s))
    return {**cell, "tokens": 5_000_000}

  monkeypatch.setattr(aot, "require", lambda: None)
  monkeypatch.setattr(capacity, "find", find)
  ran = ask("ring", "--compile", "--timeout=7")
  assert ran.status == 0 and f"{5_000_000 / 1024:,.0f}" in ran.out
  assert asked == [
    ("llama-2-7b", "v4:8x8x8", 7.0),
    ("llama-2-7b", "v5e:16x16", 7.0),
  ]


def test_rows_and_cpus_beside_host_caches():
  ran = ask("fastdecode", "--new=64", "--every=4", "--layers=4", "--json")
  assert ran.status == 0, ran.err
  found = ran.json
  assert found["plan"]["cpus"] == -(-found["plan"]["balanced_cpus"] // 1)
  joint, level = (found["starts"][x] for x in ("together", "staggered"))
  assert joint["peak_tokens"] == 2 * found["simulated_rows"] * 64
  assert level["peak_tokens"] == found["simulated_rows"] * 68
  assert level["tokens_s"] > 1.1 * joint["tokens_s"]
  # Prompts are cached as long as their answers are generated.
  long = ask("fastdecode", "--new=64", "--every=4", "--layers=4", "--json",
             "--prompt=100").json  # fmt: skip
  assert long["plan"]["cpus"] > 3 * found["plan"]["cpus"]
  rows = long["simulated_rows"]
  peaks = {k: x["peak_tokens"] for k, x in long["starts"].items()}
  assert peaks == {"together": 2 * rows * 164, "staggered": rows * (68 + 200)}
  assert "bound by" in ask("fastdecode", "--new=64", "--every=4").out
  ran = ask("fastdecode", "--answer_seconds=1e-9")
  assert ran.status == 2 and "answer_s" in ran.err


def test_requests_side_by_side():
  found = ask("liger", "--json").json["ways"]
  assert found["in turn"]["makespan_s"] == 100
  assert found["alternating"]["makespan_s"] == 62
  assert found["windows"]["first_s"] == 50
  assert found["windows"]["makespan_s"] < 100
  words = ask("liger", "--at_once=4", "--layers=3").out
  assert "4 requests of 3 layers" in words and "alternating" not in words
