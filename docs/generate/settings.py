"""docs/settings.md and docs/job.schema.json: every setting of a job, from the schema that reads job files.

`python -m docs.generate.settings` rewrites them, in the directory of the repository. Free of torch.
"""

import itertools
import json
from pathlib import Path

from docs.generate.markdown import rewrite, table
from flowfleet.job.reference import Setting, settings
from flowfleet.job.spec import JobSpec

PAGE = Path("docs/settings.md")
SCHEMA = Path("docs/job.schema.json")


def parts() -> dict[str, str]:
    """Name to content of each generated part of the page."""
    sections = []
    for part, found in itertools.groupby(settings(JobSpec), lambda one: one.name.rpartition(".")[0].partition(".")[0]):
        rows = [(f"`{one.name}`", one.values, f"`{one.default}`", _described(one)) for one in found]
        sections.append(f"## {part or 'The job'}\n\n" + table(["setting", "values", "default", "what"], rows))
    return {"settings": "\n\n".join(sections)}


def _described(one: Setting) -> str:
    """The description, and which losses read the setting where others do not."""
    return f"{one.description} Read by: {', '.join(one.losses)}." if one.losses else one.description


def schema() -> str:
    """The JSON Schema of a job file, for editors and other programs."""
    return json.dumps(JobSpec.model_json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    rewrite(PAGE, parts())
    SCHEMA.write_text(schema(), encoding="utf-8")
