"""Upload of a model to the Hugging Face Hub, with a card.

Guarantees: the repository gets one commit, or none; one that was made for it
may stay empty. A card that it has is kept. Uploaded is what `save` writes.
Cost: a copy of the model in the folder for temporary files.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from ringjax import hub
from ringjax.errors import OptionError
from ringjax.json_text import json_text
from ringjax.models.checkpoint import save
from ringjax.models.hf.tensors import parameters
from ringjax.models.transformer import Transformer
from ringjax.parallel import joint_outcome

_CARD = "README.md"
# Largest number of rows of a table in a card.
_ROWS = 100


def push(
  model: Transformer,
  repo: str,
  *,
  revision: str | None = None,
  private: bool | None = None,
  message: str = "Upload a model by ringjax",
  report: str | os.PathLike[str] | Mapping[str, Any] | None = None,
  max_shard_bytes: int = 5_000_000_000,
) -> str:
  """Uploads a model, its tokenizer and a card; returns the commit's address.

  The repository is made if it is not there. All processes of the model call;
  the first one uploads.

  Args:
    model: Model by `load` or `create`, with all layers on the devices.
    repo: "owner/name".
    revision: Branch that gets the commit; default: the repository's own.
    private: Whether a new repository is private; default: the owner's setting.
    message: First line of the commit.
    report: JSON file that `launch.evaluate --out` or `--json` wrote, or its
      contents; the card has its figures.
    max_shard_bytes: Largest size of one file, in bytes.

  Raises:
    OptionError: If it is no name, the report cannot be read, or the token
      may not write there.
    CheckpointWriteError: If there is no room for the copy.
  """
  import huggingface_hub
  from huggingface_hub import constants

  name = hub.hub_name(f"hf://{repo.removeprefix('hf://')}")
  if name is None or name.file is not None or name.revision is not None:
    raise OptionError(
      "repo", repr(repo), "owner/name of a repository", "pass it like that"
    )
  figures = _figures(report)
  api = huggingface_hub.HfApi(
    endpoint=constants.ENDPOINT, library_name="ringjax"
  )
  first, address = jax.process_index() == 0, ""
  count = jax.process_count()
  ranks = tuple(range(count)) if count > 1 else ()
  with tempfile.TemporaryDirectory(prefix="ringjax-push-") as parent:
    # Refused before the model is written, if it is; an error of the first
    # process is one of all.
    with joint_outcome.failing_together(ranks), _hub_errors(name.repo):
      if first:
        api.create_repo(name.repo, private=private, exist_ok=True)
    folder = pathlib.Path(parent) / "model"
    save(model, folder, max_shard_bytes=max_shard_bytes)
    with joint_outcome.failing_together(ranks), _hub_errors(name.repo):
      if first:
        present = api.model_info(name.repo, revision=revision).siblings or ()
        if all(file.rfilename != _CARD for file in present):
          text = card(model, name.repo, figures)
          (folder / _CARD).write_text(text, "utf-8")
        address = api.upload_folder(
          repo_id=name.repo,
          folder_path=folder,
          revision=revision,
          commit_message=message,
          # Weights in another number of files would be a second set.
          delete_patterns=["model*.safetensors", "model*.index.json"],
        ).commit_url
  return address


@contextlib.contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
  """Turn refusals of the hub into errors that say what to do."""
  from huggingface_hub import constants, errors

  try:
    yield
  except errors.RevisionNotFoundError:
    raise OptionError(
      "revision",
      f"a revision that {repo} does not have",
      "a branch of the repository",
      "make the branch first, or leave revision out",
    ) from None
  except errors.HfHubHTTPError as error:
    if getattr(error.response, "status_code", None) not in (401, 403, 404):
      raise
    raise OptionError(
      "repo",
      f"{repo}: {error}".partition("\n")[0],
      f"a repository that your token may write to, {constants.ENDPOINT}/{repo}",
      "set HF_TOKEN to a token with write access, or run hf auth login",
    ) from None


def card(model: Transformer, name: str, figures: Mapping[str, Any]) -> str:
  """Text of a model's card, with the metadata that the hub reads.

  Args:
    model: Model that it describes.
    name: Name of its repository, for the example.
    figures: Contents of a report of `launch.evaluate`.
  """
  count = sum(p.get_value().size for p in parameters(model).values())
  config = model.config
  lines = [
    "---",
    "library_name: ringjax",
    "pipeline_tag: text-generation",
    "tags:",
    "- ringjax",
    f"- {config.family}",
    "---",
    "",
    f"# {name.rpartition('/')[2]}",
    "",
    f"A model of the family `{config.family}` with {count:,} parameters and a "
    f"context of {config.longest:,} tokens."
    if config.longest is not None
    else f"A model of the family `{config.family}` with {count:,} parameters.",
    "",
    "```python",
    "import ringjax as rj",
    "",
    f'model = rj.models.load("{name}")',
    f'tokenizer = rj.data.Tokenizer.load("{name}")',
    "```",
  ]
  sparse = json.loads(model.source).get("sparse_attention")
  if sparse is not None:
    lines += [
      "",
      "Its attention is sparse: `sparse_attention` in config.json is "
      f"`{json_text(sparse)}`. That key is ringjax's own. "
      "transformers ignores it, and would compute dense attention, for which "
      "the weights are not trained.",
    ]
  if figures:
    lines += ["", "## Evaluation", "", *_tables(figures)]
  return "\n".join(lines) + "\n"


def _figures(
  report: str | os.PathLike[str] | Mapping[str, Any] | None,
) -> Mapping[str, Any]:
  """Contents of a report."""
  if report is None or isinstance(report, Mapping):
    return report or {}
  try:
    figures = json.loads(pathlib.Path(report).read_text("utf-8"))
  except (OSError, ValueError) as error:
    raise OptionError(
      "report",
      f"{report}: {error}",
      "a JSON file of launch.evaluate",
      "pass the path that it wrote",
    ) from error
  if not isinstance(figures, dict):
    raise OptionError(
      "report",
      f"{report}, whose JSON is no object",
      "a JSON file of launch.evaluate",
      "pass the path that it wrote",
    )
  return figures


def _tables(figures: Mapping[str, Any]) -> list[str]:
  """Lines of Markdown: a list of single values, and a table of each list."""
  single = [
    f"- {key}: {_cell(value)}"
    for key, value in figures.items()
    if isinstance(value, str | int | float)
  ]
  lines = [*single]
  for key, rows in figures.items():
    if not isinstance(rows, list) or not all(isinstance(x, dict) for x in rows):
      continue
    columns = dict.fromkeys(
      column
      for row in rows
      for column, value in row.items()
      if isinstance(value, str | int | float)
    )
    if not columns:
      continue
    lines += ["", f"### {key}", "", f"| {' | '.join(columns)} |"]
    lines.append("|" + "---|" * len(columns))
    lines += [
      f"| {' | '.join(_cell(row.get(column)) for column in columns)} |"
      for row in rows[:_ROWS]
    ]
    if len(rows) > _ROWS:
      lines.append(f"\n{len(rows) - _ROWS:,} more rows are left out.")
  return lines


def _cell(value: object) -> str:
  """A value in a table, with what would end its cell taken out."""
  if isinstance(value, float):
    return f"{value:.4g}"
  text = "" if isinstance(value, list | dict) or value is None else str(value)
  return " ".join(text.replace("|", "\\|").split())
