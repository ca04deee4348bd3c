"""Tasks for lm-eval that need no network, known by name beside lm-eval's own.

Three are ours, their data ships with the package (tag `zoo_own`):

| task | items | fields of data/<task>.jsonl, one JSON object a line | guessing gives |
| --- | --- | --- | --- |
| zoo_facts | 232 | topic str, question str, choices list of 4 str, gold int (index of the right choice) | acc 0.25 |
| zoo_common_sense | 160 | premise str, choices list of 2 str (continuations of it), gold int | acc 0.5 |
| zoo_last_word | 129 | text str: a short passage whose last word, without punctuation, is to be predicted | acc under 0.01 |

In the two with choices, every set of choices is asked once for each choice it has (four questions share four answers, two premises
share two continuations), so a model that looks at the choices alone gets exactly what guessing gives.

Three read a folder of the user's (tag `zoo_local`), with the prompts of lm-eval's lambada_openai, arc_easy and piqa:

| task | file | fields |
| --- | --- | --- |
| zoo_lambada | lambada_openai.jsonl | context str, continuation str (one word, no space before it) |
| zoo_arc_easy | arc_easy.jsonl | query str ("Question: ..."), choices list of str, gold int |
| zoo_piqa | piqa.jsonl | query str ("Question: ...", ends with a newline), choices list of 2 str, gold int |

That folder is `task_manager(data_folder=...)`, else the environment variable ZOO_EVAL_DATA. With lm-eval's own command:
`lm_eval --include_path <FOLDER> --tasks zoo_piqa --metadata '{"data_folder": "..."}'`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # both take seconds to import
    from datasets import Dataset
    from lm_eval.tasks import TaskManager

FOLDER = Path(__file__).parent
VARIABLE = "ZOO_EVAL_DATA"


def task_manager(data_folder: str | Path | None = None, *, builtin: bool = True) -> TaskManager:
    """The task manager to give to `lm_eval.simple_evaluate`; it knows the tasks of this folder.

    data_folder: where the `zoo_local` tasks find their files; None: the environment variable ZOO_EVAL_DATA names it.
    builtin: also know lm-eval's own tasks, whose index takes seconds to read.
    """
    from lm_eval.tasks import TaskManager

    # lm-eval hands the metadata to the functions that load data; nothing else reaches them
    metadata: dict[str, dict[str, Any] | str] | None = (
        {"data_folder": str(Path(data_folder).expanduser().resolve())} if data_folder else None
    )
    return TaskManager(include_path=str(FOLDER), include_defaults=builtin, metadata=metadata)


def own_data(file: str, **_: object) -> dict[str, Dataset]:
    """The data of a task of ours, as split `test`. The YAML files name this function; lm-eval adds its metadata, unused."""
    return _read(FOLDER / "data" / file)


def local_data(file: str, data_folder: str | None = None, **_: object) -> dict[str, Dataset]:
    """A file of the user's folder, as split `test`. Raises FileNotFoundError that says which file is missing and what to do."""
    return _read(local_path(file, data_folder))


def local_path(file: str, data_folder: str | None = None) -> Path:
    """Where `file` lies: in data_folder, else in the folder that ZOO_EVAL_DATA names. Raises FileNotFoundError."""
    folder = data_folder or os.environ.get(VARIABLE)
    missing = f"there is no {file} in {folder}" if folder else f"no folder was given that holds {file}"
    if not folder or not (path := Path(folder).expanduser() / file).is_file():
        raise FileNotFoundError(
            f"{missing}. Name the folder that has it: set {VARIABLE}, or pass data_folder to zoo.eval.tasks.task_manager "
            "(its module lists the fields of each file)"
        )
    return path


def _read(path: Path) -> dict[str, Dataset]:
    from datasets import Dataset

    with path.open(encoding="utf-8") as lines:  # not str.splitlines: it also splits at characters that JSON leaves unescaped
        return {"test": Dataset.from_list([json.loads(line) for line in lines])}
