"""The notebook of examples/ runs from start to end against a stack of this machine, and is stored without output."""

import json
from pathlib import Path

import pytest

from flowfleet.local.plan import StackOptions
from flowfleet.local.pools import Pool
from flowfleet.local.session import local_stack

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "job.ipynb"


def test_it_is_stored_without_output() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert [cell for cell in cells if cell["outputs"] or cell["execution_count"]] == []


@pytest.mark.long
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    pytest.importorskip("pandas", reason="pip install pandas")
    monkeypatch.chdir(ROOT)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    options = StackOptions(state_dir=tmp_path / "stack", port=0, pools=(Pool(model=str(ROOT / "recipes/tiny/model")),))
    with local_stack(options) as stack:
        monkeypatch.setenv("FLOWFLEET_URL", stack.url)
        nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()

    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    data = [output.data for output in shown if "data" in output]
    assert any("succeeded" in one.get("text/html", "") for one in data)
    assert any("critic/rewards/mean" in one.get("text/html", "") for one in data)
    assert sum("image/png" in one for one in data) == 4
