"""The systems of papers: where each is in this package, and what is missing."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
  """A system of a paper.

  Attributes:
    name: Name of the system.
    also: Other names by which it is found.
    paper: arXiv number, or conference and year.
    url: Address of a paper that is not on arXiv.
    does: Part of the paper that is here, in a sentence.
    modules: Files, the first one to read first.
    names: Public names; `rj` is the package ringjax. Those that begin with
      `ringjax` are in a package that has to be imported.
    commands: Shortest commands that show it, in order. Those with
      `ringjax/models/small` or `benchmarks` run in a checkout, the others
      anywhere.
    page: How-to page.
    tests: Test files.
    absent: Parts of the paper that are not here.
  """

  name: str
  also: tuple[str, ...] = ()
  paper: str
  url: str = ""
  does: str
  modules: tuple[str, ...]
  names: tuple[str, ...]
  commands: tuple[str, ...]
  page: str
  tests: tuple[str, ...]
  absent: str

  @property
  def link(self) -> str:
    """Address of the paper."""
    return self.url or f"https://arxiv.org/abs/{self.paper}"


_SMALL = "--model=ringjax/models/small"
_PROMPT = "--prompt='def read('"


def _cost(kind: str) -> tuple[str, ...]:
  """The command that measures the loss and the bytes of a cache kind."""
  return (
    "python -m launch.evaluate caches --lengths=512 --rows=1 --devices=1 "
    f"--cache=dense --cache={kind}",
  )


SYSTEMS: tuple[System, ...] = (
  # Attention and training over devices.
  System(
    name="Blockwise Parallel Transformer",
    also=("BPT", "blockwise transformers", "blockwise attention"),
    paper="2305.19370",
    does="Attention, feedforward and loss are computed a block of tokens at a "
    "time, forward and backward, so that no array has the scores, the hidden "
    "activations or the logits of all tokens.",
    modules=(
      "ringjax/ops/feedforward.py",
      "ringjax/ops/attention/blockwise.py",
      "ringjax/ops/loss.py",
    ),
    names=(
      "rj.blockwise_attention",
      "rj.blockwise_feedforward",
      "rj.blockwise_cross_entropy",
    ),
    commands=(f"python -m benchmarks.blockwise_memory {_SMALL} --tokens=2048",),
    page="docs/attention.md",
    tests=("tests/ops/test_feedforward.py", "tests/ops/test_loss.py"),
    absent="One loop over blocks of queries for both: attention and "
    "feedforward are a loop each, so that a layer has the attention output of "
    "all tokens.",
  ),
  System(
    name="Ring Attention",
    also=("ring", "blockwise ring", "context parallelism"),
    paper="2310.01889",
    does="Exact attention over a sequence that is sharded over devices: "
    "queries stay, blocks of keys and values travel around the ring, forward "
    "and backward.",
    modules=(
      "ringjax/ops/attention/strategies/ring.py",
      "ringjax/ops/attention/strategies/hops.py",
      "ringjax/ops/attention/api.py",
      "ringjax/ops/attention/cost/predict.py",
      "ringjax/plan/kv_runahead/ring_tables.py",
    ),
    names=("rj.ring_attention", "rj.Ring"),
    commands=(
      "python -m launch.generate --prefill=ring --devices=2 --context=512",
    ),
    page="docs/attention.md",
    tests=(
      "tests/ops/attention/test_exact.py",
      "tests/ops/attention/test_strategies.py",
    ),
    absent="The paper's context lengths and utilisation, measured: the TPU "
    "kernels have been compiled and have not run on a chip. Its table of "
    "contexts is reproduced in part (launch.plan ring).",
  ),
  System(
    name="Striped Attention",
    also=("stripe", "zigzag"),
    paper="2311.09431",
    does="Tokens are dealt round-robin to the shards of a ring, which levels "
    "the causal work of each hop; zigzag levels it over the whole ring.",
    modules=(
      "ringjax/parallel/layout.py",
      "ringjax/ops/attention/strategies/ring.py",
      "ringjax/ops/attention/cost/schedule.py",
      "ringjax/data/batches/placement.py",
    ),
    names=("rj.striped_attention", "rj.Striped", "rj.Zigzag"),
    commands=(
      "python -m launch.generate --prefill=striped --devices=2 --context=512",
    ),
    page="docs/attention.md",
    tests=(
      "tests/parallel/test_layout.py",
      "tests/ops/attention/test_schedule.py",
    ),
    absent="Its speed-up on accelerators, measured: here tiles are counted, "
    "and times are those of CPUs.",
  ),
  System(
    name="KV-Runahead",
    also=("KVR", "TSP"),
    paper="2405.05329",
    does="A chain of processes reads a prompt, each an uneven part of it, and "
    "sends keys on before it attends; partitions are balanced, searched or "
    "interpolated, and simulated.",
    modules=(
      "ringjax/infer/kv_runahead/kvr.py",
      "ringjax/ops/attention/strategies/chain.py",
      "ringjax/plan/kv_runahead/partition.py",
      "ringjax/plan/kv_runahead/grid.py",
      "ringjax/plan/cost.py",
      "ringjax/plan/kv_runahead/recurrence.py",
      "ringjax/plan/kv_runahead/published.py",
      "ringjax/infer/kv_runahead/lockstep.py",
      "ringjax/parallel/layout.py",
    ),
    names=("rj.Chain", "rj.plan.plan", "rj.plan.search", "rj.plan.kvr_seconds"),
    commands=(
      "python -m launch.plan kvr --profile=llama7b-a100 --context=10240 "
      "--ranks=4",
      "python -m launch.prefill --method=kvr,ring --devices=2 --context=256 "
      "--rounds=1",
    ),
    page="docs/kv_runahead.md",
    tests=("tests/infer/test_kvr.py", "tests/plan/test_partition.py"),
    absent="Running ahead within one process, whose devices run one program: "
    "only processes of launch.prefill do. Its GPU times are simulated.",
  ),
  # Caches: fewer bits, fewer tokens.
  System(
    name="KIVI",
    paper="2402.02750",
    does="2 or 4 bits by channel for keys and by token for values, with the "
    "newest tokens exact; residual=128 is the paper's own rule.",
    modules=(
      "ringjax/kv/codecs/channel_groups.py",
      "ringjax/kv/codecs/integers.py",
      "ringjax/kv/eviction/kivi_residual.py",
    ),
    names=("rj.kv.ChannelGroups", "rj.kv.Integers", "rj.kv.CacheConfig"),
    commands=_cost("kivi2"),
    page="docs/how/cache.md",
    tests=("tests/kv/test_channel_groups.py",),
    absent="Its fused GPU kernels, and use in an engine's pool of pages "
    "(refused); eviction beside it is refused too.",
  ),
  System(
    name="KVQuant",
    also=("nuq",),
    paper="2401.18079",
    does="2 to 4 bits by levels that fit the model's keys, before their "
    "rotation and by channel, weighted by gradients, with exact outliers and "
    "Q-Norm.",
    modules=(
      "ringjax/infer/calibrate.py",
      "ringjax/kv/codecs/code_book.py",
      "ringjax/kv/codecs/calibration.py",
      "ringjax/kv/codecs/page_outliers.py",
    ),
    names=(
      "rj.infer.calibrate",
      "rj.kv.Calibrated",
      "rj.kv.Calibration",
      "rj.kv.CodeBook",
    ),
    commands=(
      "python -m launch.calibrate --rows=2 --length=256 --out=runs/nuq",
      *_cost("nuq3:calibration=runs/nuq"),
    ),
    page="docs/how/cache.md",
    tests=("tests/infer/test_calibrate.py", "tests/kv/test_codecs.py"),
    absent="Its CUDA kernels and sparse matrices: a vector, or a page with "
    "outliers=1%, has a fixed number of outliers. The first token is coded "
    "from a measured key, and exact only with first=1.",
  ),
  System(
    name="H2O",
    also=("Heavy-Hitter Oracle", "heavy hitters"),
    paper="2306.14048",
    does="Each KV head keeps the tokens with the most attention of all "
    "queries; the paper's form is h2o:score=sum,newest=.5,room=1.",
    modules=(
      "ringjax/kv/policies/heavy_hitters.py",
      "ringjax/kv/eviction/evicting.py",
    ),
    names=("rj.kv.HeavyHitters", "rj.kv.EvictingCache"),
    commands=_cost("h2o:budget=.2"),
    page="docs/how/cache.md",
    tests=("tests/kv/test_paper_forms.py", "tests/kv/test_policy_scores.py"),
    absent="A choice for each query head (KV heads choose), eviction in an "
    "engine, and beside offloaded keys as in the paper's FlexGen: both are "
    "refused.",
  ),
  System(
    name="SnapKV",
    paper="2404.14469",
    does="Each KV head keeps the tokens that the newest queries look at, "
    "pooled over neighbours; the paper's form is "
    "snapkv:pool=max,kernel=7,window=32.",
    modules=(
      "ringjax/kv/policies/scores/snapkv.py",
      "ringjax/kv/eviction/evicting.py",
    ),
    names=("rj.kv.SnapKV", "rj.kv.EvictingCache"),
    commands=_cost("snapkv:budget=.2"),
    page="docs/how/cache.md",
    tests=("tests/kv/test_paper_forms.py", "tests/kv/test_kept_tokens.py"),
    absent="Compression of the prompt alone: an answer's tokens are evicted "
    "too, whenever room (16) of them have come. Refused in an engine.",
  ),
  System(
    name="FastGen",
    also=("Model Tells You What to Discard", "adaptive KV cache compression"),
    paper="2310.01801",
    does="Each KV head profiles the prompt and keeps the fewest kinds of "
    "tokens that recover a share of its attention: special, punctuation, "
    "frequent, local, or all.",
    modules=(
      "ringjax/kv/policies/fastgen.py",
      "ringjax/kv/eviction/evicting.py",
      "ringjax/data/text/punctuation.py",
    ),
    names=(
      "rj.kv.FastGen",
      "rj.kv.EvictingCache",
      "rj.data.punctuation_ids",
    ),
    commands=_cost("fastgen:recovered=.95"),
    page="docs/how/cache.md",
    tests=("tests/kv/test_evicting.py", "tests/kv/test_punctuation.py"),
    absent="Special tokens other than a row's first ones, and punctuation "
    "unless its ids are given. Refused in an engine.",
  ),
  System(
    name="StreamingLLM",
    also=("attention sinks", "sink tokens"),
    paper="2309.17453",
    does="The first tokens and the newest stay; with positions=cache a token's "
    "position is its index in the cache, and the stream has no end.",
    modules=("ringjax/kv/policies/sinks.py", "ringjax/kv/eviction/evicting.py"),
    names=("rj.kv.Sinks", "rj.kv.EvictingCache"),
    commands=_cost("sinks:budget=.2"),
    page="docs/how/cache.md",
    tests=("tests/kv/test_paper_forms.py", "tests/kv/test_evicting.py"),
    absent="Training with a sink token of its own, and streams in an engine "
    "(refused). positions=cache is refused for layers with windows.",
  ),
  # Contexts that are encoded apart.
  System(
    name="APE",
    also=("adaptive parallel encoding", "parallel encoding"),
    paper="2502.05431",
    does="Documents are encoded once, each alone after a shared prefix, and "
    "combined with any question by a temperature and a scale.",
    modules=(
      "ringjax/infer/contexts/combine.py",
      "ringjax/ops/attention/cached/separate_contexts.py",
      "ringjax/infer/contexts/context_library.py",
      "ringjax/infer/contexts/behind_contexts.py",
    ),
    names=(
      "rj.infer.contexts.APE",
      "rj.infer.ContextLibrary",
      "rj.infer.context_session",
    ),
    commands=(
      "mkdir -p runs/texts && echo 'def read(path):' > runs/texts/a.txt",
      f"python -m launch.generate {_SMALL} --devices=1 --contexts=runs/texts "
      f"--combine=ape:temperature=0.9,scale=0.9 {_PROMPT} --max_new_tokens=4",
    ),
    page="docs/how/contexts.md",
    tests=(
      "tests/infer/test_contexts.py",
      "tests/ops/attention/test_apart.py",
    ),
    absent="Contexts in an engine or a server: sessions and generate have "
    "them. Temperature and scale have no defaults that fit a model; "
    "launch.evaluate contexts --search tunes them.",
  ),
  System(
    name="CacheBlend and moved keys",
    also=("CacheBlend", "recompute", "moved keys"),
    paper="2405.16444",
    does="Keys of documents that were encoded apart are moved to consecutive "
    "positions, and the tokens whose keys differ most are computed again.",
    modules=(
      "ringjax/infer/contexts/differing.py",
      "ringjax/infer/contexts/combine.py",
      "ringjax/infer/contexts/behind_contexts.py",
    ),
    names=("rj.infer.contexts.Recompute", "rj.infer.context_session"),
    commands=(
      "mkdir -p runs/texts && echo 'def read(path):' > runs/texts/a.txt",
      f"python -m launch.generate {_SMALL} --devices=1 --contexts=runs/texts "
      f"--combine=recompute:fraction=0.15 {_PROMPT} --max_new_tokens=4",
    ),
    page="docs/how/contexts.md",
    tests=("tests/infer/test_contexts.py",),
    absent="A choice that narrows layer by layer (the second layer chooses, "
    "once), and loading of keys that overlaps with the computation.",
  ),
  System(
    name="KVLink",
    also=("link tokens",),
    paper="2502.16002",
    does="A model is trained with link tokens after documents that do not see "
    "each other; a question computes the links and itself.",
    modules=(
      "ringjax/data/tasks/link_tokens.py",
      "ringjax/infer/contexts/combine.py",
      "ringjax/models/more_tokens.py",
    ),
    names=(
      "rj.data.LinkTokens",
      "rj.data.arranged",
      "rj.SeparateDocuments",
      "rj.infer.contexts.KVLink",
    ),
    commands=(
      "python -m launch.train --config=configs/train/kvlink.py --mesh=seq:1 "
      "--config.stages[0].steps=2 --out=runs/kvlink",
    ),
    page="docs/how/contexts_kvlink.md",
    tests=("tests/data/test_link_tokens.py", "tests/infer/test_contexts.py"),
    absent="Compression of documents, the paper's checkpoints, and contexts in "
    "an engine.",
  ),
  System(
    name="CEPE",
    also=("parallel context encoding", "CEPED"),
    paper="2402.16617",
    does="A small encoder reads contexts in chunks, and cross-attention in "
    "each block of a frozen decoder attends to its states; both are trained "
    "here, with CEPED's loss too.",
    modules=(
      "ringjax/models/cepe.py",
      "ringjax/nn/attention_layers/cross_attention.py",
      "ringjax/train/methods/encoder_training.py",
      "ringjax/kv/encoder_states.py",
    ),
    names=(
      "rj.models.cepe.with_encoder",
      "rj.models.cepe.encode",
      "rj.infer.contexts.Cepe",
      "rj.train.EncoderTraining",
    ),
    commands=(
      "python -m launch.train --config=configs/train/cepe.py --mesh=seq:1 "
      "--config.stages[0].steps=2 --config.stages[1].steps=2 --out=runs/cepe",
    ),
    page="docs/how/contexts_cepe.md",
    tests=("tests/models/test_cepe.py", "tests/train/test_encoder_training.py"),
    absent="The authors' trained encoder, pretraining of an encoder alone, and "
    "an encoder's states in an engine.",
  ),
  System(
    name="Attention entropy",
    also=("Attention Entropy is a Key Factor", "selection of contexts"),
    paper="2412.16545",
    does="The entropy of each layer's and head's attention, tile by tile; a "
    "shared prefix and a selection of contexts lower it.",
    modules=(
      "ringjax/eval/entropy.py",
      "ringjax/ops/attention/statistics.py",
      "ringjax/ops/attention/cached/separate_contexts.py",
    ),
    names=(
      "rj.attention_statistics",
      "ringjax.eval.attention_statistics",
      "ringjax.eval.split_entropy",
      "rj.infer.contexts.Selection",
    ),
    commands=(
      "python -m launch.evaluate entropy --splits=1,4 --context=240 --rows=2 "
      "--devices=1",
    ),
    page="docs/how/contexts_entropy.md",
    tests=(
      "tests/eval/test_entropy.py",
      "tests/ops/attention/test_statistics.py",
    ),
    absent="A selection that all layers make together, and the entropy of an "
    "engine's requests.",
  ),
  # Several tokens a call.
  System(
    name="Speculative decoding",
    also=("speculative sampling", "prompt lookup", "SpecInfer", "drafts"),
    paper="2211.17192",
    does="One call checks several drafted tokens and changes none: drafts from "
    "the text, by a draft model, first layers or a smaller cache; chains and "
    "trees, also in an engine.",
    modules=(
      "ringjax/infer/speculate/verifiers.py",
      "ringjax/infer/speculate/rounds.py",
      "ringjax/infer/speculate/draft_model.py",
      "ringjax/infer/speculate/paces.py",
      "ringjax/infer/speculate/lookup.py",
      "ringjax/nn/draft_layers/eagle_layer.py",
      "ringjax/nn/draft_layers/dflash_layer.py",
      "ringjax/train/methods/eagle_loss.py",
    ),
    names=(
      "rj.infer.speculate.PromptLookup",
      "rj.infer.speculate.DraftModel",
      "rj.infer.speculate.EarlyExit",
      "rj.infer.speculate.PredictDraft",
      "rj.infer.speculate.Eagle3",
      "rj.models.eagle3.with_head",
      "rj.infer.speculate.DFlash",
      "rj.models.dflash.load",
      "rj.infer.speculate.Drafter",
    ),
    commands=(
      "python -m launch.generate --speculate=lookup --devices=1 --context=512",
    ),
    page="docs/how/speculate.md",
    tests=(
      "tests/infer/test_speculate.py",
      "tests/infer/test_predict_draft.py",
      "tests/infer/test_eagle_draft.py",
      "tests/infer/test_dflash_draft.py",
      "tests/infer/test_verifiers.py",
    ),
    absent="Medusa's heads, Jacobi iterations, and a data store of texts.",
  ),
  System(
    name="LongSpec",
    paper="2502.17421",
    does="A draft block that attends to a window of its own and to the last "
    "keys of its target, trained at shifted positions with keys that lag; "
    "chains and trees.",
    modules=(
      "ringjax/models/longspec.py",
      "ringjax/nn/attention_layers/draft_block.py",
      "ringjax/infer/speculate/longspec.py",
      "ringjax/infer/speculate/draft_programs.py",
      "ringjax/train/methods/draft_training.py",
      "ringjax/train/methods/moved_positions.py",
      "ringjax/eval/draft_acceptance.py",
    ),
    names=(
      "rj.models.longspec.with_draft",
      "rj.infer.speculate.LongSpec",
      "rj.train.DraftTraining",
      "rj.train.PredictTraining",
    ),
    commands=(
      "python -m launch.train --config=configs/drafts/longspec.py --mesh=seq:1 "
      "--config.stages[0].steps=2 --out=runs/longspec",
      f"python -m launch.generate {_SMALL} --devices=1 "
      f"--speculate=longspec:model=runs/longspec/draft {_PROMPT} "
      "--max_new_tokens=8",
    ),
    page="docs/how/speculate_longspec.md",
    tests=(
      "tests/infer/test_longspec.py",
      "tests/train/test_draft_training.py",
      "tests/train/test_moved_positions.py",
    ),
    absent="The authors' draft checkpoints (their head has no norm before it) "
    "and their GPU kernel for trees.",
  ),
  # Models larger than the memory, and small machines.
  System(
    name="FlexGen",
    also=("offloading", "zig-zag schedule"),
    paper="2303.06865",
    does="Layers, keys and hidden states on device, host or disk, fetched "
    "while other layers run, once for a block of rows; a linear program "
    "chooses the placement; 4-bit groups.",
    modules=(
      "ringjax/plan/flexgen/offload.py",
      "ringjax/plan/flexgen/offload_costs.py",
      "ringjax/plan/flexgen/offload_tiers.py",
      "ringjax/models/weights/weight_placement.py",
      "ringjax/models/weights/streaming.py",
      "ringjax/kv/offload/layer_offload.py",
      "ringjax/kv/composed/row_groups.py",
      "ringjax/models/weights/coded_weights.py",
      "ringjax/nn/weights/coded.py",
      "ringjax/kv/codecs/integers.py",
    ),
    names=(
      "rj.models.load",
      "rj.infer.PlacementConfig",
      "rj.infer.CallMemory",
      "rj.plan.offload.plan",
      "rj.kv.OffloadedCache",
    ),
    commands=(
      f"python -m launch.generate --placement=disk --devices=1 {_PROMPT} "
      "--max_new_tokens=8",
      "python -m launch.plan offload --model=opt-30b --machine=t4 --prompt=512 "
      "--new=32 --policy=48x3",
    ),
    page="docs/how/offload.md",
    tests=("tests/models/test_placement.py", "tests/plan/test_offload.py"),
    absent="Attention on the CPU where the keys are, a layer's weights in "
    "parts on several tiers (layers are whole), codes on disk, attention to a "
    "tenth of the values, a pipeline of GPUs.",
  ),
  System(
    name="LLM in a Flash",
    also=("flash", "neurons from disk", "FATReLU"),
    paper="2312.11514",
    does="Feedforward neurons of a ReLU model are on disk, and those that a "
    "token needs are read, exactly or by predictors; a window of recent ones "
    "stays in memory.",
    modules=(
      "ringjax/models/weights/neurons.py",
      "ringjax/store/flash/neuron_file.py",
      "ringjax/store/flash/neuron_store.py",
      "ringjax/store/flash/neuron_window.py",
      "ringjax/nn/weights/neuron_feedforward.py",
      "ringjax/models/weights/neuron_predictors.py",
      "ringjax/train/methods/predictor_training.py",
    ),
    names=(
      "rj.models.sparse_model",
      "rj.models.write_neurons",
      "rj.models.neuron_report",
      "rj.train.train_predictors",
    ),
    commands=(
      f"python -m launch.generate {_SMALL} --mesh=seq:1 "
      f"--flash=runs/neurons:threshold=1 {_PROMPT} --max_new_tokens=8",
    ),
    page="docs/how/flash.md",
    tests=("tests/models/test_neurons.py", "tests/store/test_neurons.py"),
    absent="Reads that bypass the page cache, and times on flash. SiLU and "
    "GELU need a threshold, which changes answers; mixtures and several "
    "devices are refused.",
  ),
  System(
    name="TPI-LLM",
    also=("TPI", "tensor window", "sliding window of weights"),
    paper="2410.00531",
    does="Processes with little memory share the heads and columns of each "
    "layer, stream a few blocks of weights from disk, and sum over a star.",
    modules=(
      "ringjax/infer/tpi_llm/tensor_window.py",
      "ringjax/infer/tpi_llm/block_window.py",
      "ringjax/infer/tpi_llm/process_star.py",
      "ringjax/models/partition/window_layout.py",
      "ringjax/models/partition/tensor_shares.py",
      "ringjax/plan/systems/layer_window.py",
      "ringjax/plan/systems/allreduce_hops.py",
    ),
    names=("rj.infer.TensorWindow", "rj.infer.serve_rank", "rj.infer.star"),
    commands=(
      f"python -m launch.generate --processes=2 --window=2 {_PROMPT} "
      "--max_new_tokens=4",
      "python -m launch.plan window --model=llama-2-7b --processes=3 "
      "--window=4",
    ),
    page="docs/how/window.md",
    tests=(
      "tests/infer/test_tensor_window.py",
      "tests/plan/test_layer_window.py",
    ),
    absent="No part of the method. Packed weights, latent and recurrent layers "
    "are refused, and nothing is encrypted.",
  ),
  System(
    name="llm.npu",
    also=("mllm", "W8A8", "shadow outliers", "NPU"),
    paper="2407.05858",
    does="Linear maps by 8-bit integer products with outliers computed beside "
    "them in floats; chunks of a prompt are read by two devices, out of order.",
    modules=(
      "ringjax/infer/llm_npu/integer_model.py",
      "ringjax/ops/integer_product.py",
      "ringjax/nn/weights/integer.py",
      "ringjax/infer/llm_npu/two_processors.py",
      "ringjax/infer/llm_npu/layer_subgraphs.py",
      "ringjax/plan/systems/subgraphs.py",
    ),
    names=(
      "rj.infer.activation_ranges",
      "rj.infer.integer_model",
      "rj.infer.read_on_two",
      "rj.plan.subgraphs.simulated",
    ),
    commands=(
      "python -m launch.calibrate --ranges --rows=2 --length=256 "
      "--out=runs/ranges",
      "python -m launch.generate --integer=runs/ranges:shadow=16,prune=0.85 "
      f"--devices=1 {_PROMPT} --max_new_tokens=8",
    ),
    page="docs/how/integers.md",
    tests=(
      "tests/infer/test_integer_model.py",
      "tests/infer/test_two_processors.py",
    ),
    absent="A phone's NPU (any two JAX devices take its place), energy, and "
    "rows of seldom hot channels from disk: their codes are multiplied.",
  ),
  # Serving.
  System(
    name="ChunkAttention",
    also=("prefix sharing", "two-phase partition"),
    paper="2402.15220",
    does="Pages of common prefixes are found in a tree, stored once, and read "
    "once a step for all rows.",
    modules=(
      "ringjax/serve/prefix/prefix_tree.py",
      "ringjax/serve/prefix/shared_rows.py",
      "ringjax/ops/attention/cached/pooled.py",
      "ringjax/ops/attention/kernels/decode_pool_tpu.py",
    ),
    names=("rj.serve.Engine", "rj.serve.PrefixTree"),
    commands=(
      f"python -m benchmarks.live {_SMALL} --requests=4 --rate=inf "
      "--shared=512 --prompt=8 --new=4 --longest=1024 "
      "--server='--rows=4 --capacity=4096 --shared_reads=always'",
    ),
    page="docs/how/serve.md",
    tests=(
      "tests/serve/test_engine.py",
      "tests/ops/attention/kernels/test_decode_pool_tpu.py",
    ),
    absent="A kernel for GPUs or CPUs: there XLA's loops read the common "
    "pages; on TPUs each row reads pages of codes by itself. Each row reads "
    "what is shorter than a tile of pages, and by default all where reading "
    "together would change a bit.",
  ),
  System(
    name="vAttention",
    also=("contiguous rows", "virtual memory"),
    paper="2405.04437",
    does="A row's keys are contiguous and get memory as it grows, a step "
    "ahead, so that a dense attention function reads them; freed rows keep "
    "their memory for the next.",
    modules=(
      "ringjax/serve/vattention/row_space.py",
      "ringjax/serve/vattention/contiguous_rows.py",
      "ringjax/kv/storage/reserved.py",
      "ringjax/nn/attention_layers/attention_function.py",
    ),
    names=("rj.serve.RowSpace", "rj.serve.DoublingSpace", "rj.serve.Engine"),
    commands=("python -m launch.bench rows --quick",),
    page="docs/serve_memory.md",
    tests=(
      "tests/serve/test_row_space.py",
      "tests/serve/test_attention_function.py",
    ),
    absent="CUDA's virtual memory: on accelerators a row's extent of the pool "
    "doubles. Contiguous rows share no prefixes and are not swapped.",
  ),
  System(
    name="DistServe",
    also=("disaggregation", "disaggregated prefill"),
    paper="2401.09670",
    does="Prefill and decode in separate processes behind a router; a planner "
    "chooses number and shape of instances by simulation; roles change with "
    "the load.",
    modules=(
      "ringjax/serve/cluster/router.py",
      "ringjax/serve/cluster/worker.py",
      "ringjax/serve/cluster/routing.py",
      "ringjax/serve/cluster/simulate/instance_placement.py",
      "ringjax/serve/cluster/simulate/cluster_simulator.py",
      "ringjax/serve/cluster/simulate/goodput.py",
      "ringjax/serve/cluster/times/distserve_times.py",
      "ringjax/serve/cluster/times/fitted_times.py",
      "ringjax/serve/cluster/times/request_times.py",
      "ringjax/serve/cluster/drift.py",
      "ringjax/serve/cluster/role_planner.py",
    ),
    names=(
      "ringjax.serve.cluster.ClusterRouter",
      "ringjax.serve.cluster.ClusterWorker",
      "ringjax.serve.cluster.PlacementSearch",
      "ringjax.serve.cluster.ClusterSimulator",
    ),
    commands=(
      f"python -m benchmarks.live {_SMALL} --instances=prefill,decode "
      "--requests=4 --rate=inf --prompt=40 --new=4 --longest=128 "
      "--server='--rows=2 --capacity=512'",
      "python -m launch.plan serve --model=llama-3.1-8b --cluster=1x4 "
      "--chip=a100 --prompt=2000 --new=200 --slo=ttft=0.5,tpot=0.05 "
      "--requests=50",
    ),
    page="docs/how/cluster.md",
    tests=(
      "tests/serve/test_cluster_live.py",
      "tests/serve/test_placements.py",
    ),
    absent="Decode instances that are pipelines of processes (simulated only), "
    "and a launcher that starts a planned placement.",
  ),
  System(
    name="Mooncake",
    also=("conductor", "chunked pipeline parallelism", "CPP"),
    paper="2407.00079",
    does="A conductor routes by predicted times and by which instance has "
    "which blocks, fetches and copies prefixes, rejects early; a pipeline of "
    "processes reads chunks; pages leave by layers.",
    modules=(
      "ringjax/serve/cluster/conductor.py",
      "ringjax/serve/cluster/block_index.py",
      "ringjax/serve/cluster/pipeline_worker.py",
      "ringjax/infer/mooncake/chunk_pipeline.py",
      "ringjax/plan/systems/pipeline_times.py",
      "ringjax/serve/cluster/simulate/cluster_simulator.py",
      "ringjax/serve/traces.py",
    ),
    names=(
      "ringjax.serve.cluster.Conductor",
      "ringjax.serve.cluster.BlockIndex",
      "ringjax.serve.cluster.PredictiveRejection",
      "rj.infer.ChunkPipeline",
    ),
    commands=(
      f"python -m benchmarks.live {_SMALL} "
      "--instances=prefill,prefill,decode --policy=conductor:threshold=2 "
      "--requests=4 --rate=2 --prefixes=2 --shared=64 --prompt=8 --new=4 "
      "--longest=128 --server='--rows=2 --capacity=1024 --page=16'",
    ),
    page="docs/how/conductor.md",
    tests=(
      "tests/serve/test_conductor.py",
      "tests/serve/test_pipeline_worker.py",
    ),
    absent="A store that all machines share (each instance has its own, whose "
    "blocks the router does not see), RDMA, and several network cards.",
  ),
  System(
    name="KVDirect",
    also=("pull", "page transfer"),
    paper="2501.14743",
    does="The decode side pulls a prompt's pages when it has room, neighbours "
    "in one read, with leases and generations; readers come and go.",
    modules=(
      "ringjax/transfer/protocol.py",
      "ringjax/transfer/client.py",
      "ringjax/transfer/server.py",
      "ringjax/transfer/device_server.py",
      "ringjax/serve/prefix/prefix_transfer.py",
      "ringjax/serve/cluster/worker.py",
      "ringjax/serve/cluster/simulate/cluster_simulator.py",
    ),
    names=(
      "rj.transfer.Publisher",
      "rj.transfer.pull",
      "rj.transfer.DeviceServer",
      "rj.serve.export_prefix",
    ),
    commands=(
      f"python -m benchmarks.ways pull {_SMALL} --tokens=96 --rounds=1",
    ),
    page="docs/how/transfer.md",
    tests=(
      "tests/transfer/test_protocol.py",
      "tests/transfer/test_transfer.py",
    ),
    absent="RDMA: bytes go over TCP from host memory, or as arrays by JAX's "
    "transfer server. Nothing is encrypted.",
  ),
  System(
    name="FastDecode",
    also=("attention workers", "R-workers"),
    paper="2403.11421",
    does="Attention runs in CPU processes that keep the keys, the weights stay "
    "with one device, two mini-batches take turns, and starts keep the number "
    "of cached tokens level.",
    modules=(
      "ringjax/infer/fastdecode/attention_workers.py",
      "ringjax/infer/fastdecode/attention_worker.py",
      "ringjax/serve/cluster/load_control.py",
    ),
    names=(
      "rj.infer.AttentionWorkers",
      "rj.infer.generate_beside",
      "ringjax.serve.cluster.LoadControl",
      "ringjax.serve.cluster.choose_workers",
    ),
    commands=(
      "mkdir -p runs && echo 'def read(path):' > runs/prompts.txt",
      "python -m launch.beside --workers=2 --max_new_tokens=8 runs/prompts.txt",
    ),
    page="docs/how/attention_workers.md",
    tests=(
      "tests/infer/test_attention_workers.py",
      "tests/serve/test_load_control.py",
    ),
    absent="Quantised keys on the workers, recovery of the rows of a lost "
    "worker, and a measurement with an accelerator.",
  ),
  System(
    name="LoongServe",
    also=("elastic sequence parallelism", "ESP", "elastic groups"),
    paper="2404.09526",
    does="Many instances read a prompt and keep its keys where few will "
    "answer; groups change for each batch and no key moves; several masters "
    "decode; processes join, leave and die.",
    modules=(
      "ringjax/infer/loongserve/elastic.py",
      "ringjax/infer/loongserve/elastic_instance.py",
      "ringjax/ops/attention/strategies/retaining.py",
      "ringjax/serve/cluster/loongserve/elastic_scheduler.py",
      "ringjax/serve/cluster/loongserve/elastic_batches.py",
      "ringjax/serve/cluster/loongserve/elastic_manager.py",
      "ringjax/serve/cluster/loongserve/elastic_workers.py",
      "ringjax/serve/cluster/loongserve/elastic_loop.py",
      "ringjax/serve/cluster/loongserve/elastic_runner.py",
      "ringjax/serve/cluster/simulate/elastic_simulator.py",
      "ringjax/serve/cluster/simulate/elastic_workloads.py",
      "ringjax/serve/cluster/times/phase_times.py",
      "ringjax/kv/storage/master_slots.py",
    ),
    names=(
      "rj.infer.ElasticSession",
      "ringjax.serve.cluster.ElasticWorkers",
      "ringjax.serve.cluster.ElasticScheduler",
      "ringjax.serve.cluster.ElasticManager",
    ),
    commands=(
      "mkdir -p runs && echo 'def read(path):' > runs/prompts.txt",
      "python -m launch.instances --workers=2 --slots=64 --max_new_tokens=8 "
      "--check runs/prompts.txt",
    ),
    page="docs/how/elastic.md",
    tests=(
      "tests/infer/test_elastic.py",
      "tests/serve/test_elastic_workers.py",
      "tests/serve/test_elastic_manager.py",
    ),
    absent="Processes on several machines, tensor parallelism within an "
    "instance, and sampling in the live groups (greedy only).",
  ),
  System(
    name="Liger",
    also=("interleaved parallelism",),
    paper="PPoPP 2024",
    url="https://doi.org/10.1145/3627535.3638466",
    does="Two requests in one program under tensor parallelism: products of "
    "one overlap with the sums of the other; kernels of many requests are "
    "simulated.",
    modules=(
      "ringjax/infer/liger/paired.py",
      "ringjax/nn/weights/split_sums.py",
      "ringjax/plan/systems/kernel_window.py",
    ),
    names=("rj.infer.paired_prefill", "rj.infer.prefill_beside"),
    commands=(
      f"python -m benchmarks.ways paired {_SMALL} --devices=2 --tokens=32 "
      "--new=4 --rounds=1",
      "python -m launch.plan liger --product_seconds=3 --send_seconds=2",
    ),
    page="docs/how/paired.md",
    tests=("tests/infer/test_paired.py", "tests/plan/test_kernel_window.py"),
    absent="Scheduling of kernels while they run and of more than two requests "
    "(simulated only); an engine does not use it.",
  ),
  System(
    name="IMPRESS",
    also=("important prefix", "prefix store"),
    paper="FAST 2025",
    url="https://www.usenix.org/conference/fast25/presentation/"
    "chen-weijian-impress",
    does="Of a stored prefix only the tokens that a question looks at are "
    "loaded, as three heads tell; they are packed into common chunks; in "
    "sessions and in a server.",
    modules=(
      "ringjax/store/impress/importance.py",
      "ringjax/infer/contexts/important_prefix.py",
      "ringjax/serve/prefix/important_link.py",
      "ringjax/store/impress/scored_tiers.py",
      "ringjax/store/prefix_store.py",
    ),
    names=(
      "rj.store.Impress",
      "rj.infer.contexts.ImportantPrefixes",
      "rj.serve.ImportantShare",
      "rj.store.ScoredTiers",
    ),
    commands=(
      "mkdir -p runs && echo 'def read(path): return path' > runs/prompts.txt",
      f"python -m launch.generate {_SMALL} --mesh=seq:1 "
      f"--prompt_file=runs/prompts.txt {_PROMPT} --store=runs/kept "
      "--important=0.25 --max_new_tokens=8",
    ),
    page="docs/how/store.md",
    tests=(
      "tests/store/test_importance.py",
      "tests/infer/test_important_prefix.py",
      "tests/serve/test_important_link.py",
    ),
    absent="Tiers by score under a session or an engine (rj.store.ScoredTiers "
    "stands alone), a tier on the device, several devices, codecs and layers "
    "with windows.",
  ),
)
