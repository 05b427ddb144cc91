"""The notebook is committed without outputs, holds no logic, and runs."""

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "explore.ipynb"
LOGIC = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.While, ast.If, ast.IfExp, ast.comprehension, ast.Try, ast.With)


@pytest.fixture(scope="module")
def committed() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def executed(committed: nbformat.NotebookNode) -> dict[str, nbformat.NotebookNode]:
    """Code cells by their source, after a run."""
    book = nbformat.from_dict(committed)
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    return {cell.source: cell for cell in book.cells if cell.cell_type == "code"}


def shown(executed: dict[str, nbformat.NotebookNode], start: str) -> dict[str, str]:
    """What the cell that starts with these words shows, by MIME type."""
    cell = next(cell for source, cell in executed.items() if source.startswith(start))
    return {kind: str(text) for out in cell.outputs for kind, text in out.get("data", {}).items()}


def test_no_outputs_are_committed(committed: nbformat.NotebookNode) -> None:
    nbformat.validate(committed)
    for cell in committed.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_no_logic_in_cells(committed: nbformat.NotebookNode) -> None:
    for cell in committed.cells:
        if cell.cell_type == "code":
            assert not any(isinstance(node, LOGIC) for node in ast.walk(ast.parse(cell.source))), cell.source


def test_only_public_names_are_used(committed: nbformat.NotebookNode) -> None:
    for cell in committed.cells:
        if cell.cell_type == "code":
            for node in ast.walk(ast.parse(cell.source)):
                names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
                names += [node.attr] if isinstance(node, ast.Attribute) else []
                assert not any(part.startswith("_") for name in names for part in name.split("."))


def test_every_cell_but_the_imports_shows_something(executed: dict[str, nbformat.NotebookNode]) -> None:
    for source, cell in executed.items():
        assert source.startswith("import") or any("data" in out for out in cell.outputs), source
        assert not any(out.output_type == "error" for out in cell.outputs)


def test_it_shows_the_model_and_a_recommendation(executed: dict[str, nbformat.NotebookNode]) -> None:
    assert "124" in shown(executed, "profile =")["text/plain"]
    assert "Use this" in shown(executed, "advice =")["text/html"]


def test_it_shows_hotspots_plans_and_what_if(executed: dict[str, nbformat.NotebookNode]) -> None:
    assert "matmul" in shown(executed, "advice.hotspots_frame")["text/html"]
    assert "step_time_s" in shown(executed, "advice.plans_frame")["text/html"]
    compared = shown(executed, "what_if")["text/html"]
    for case in ("8 x A100", "8 x H100", "4 x 8 A100 over InfiniBand", "8 x A100, global batch 512"):
        assert case in compared


@pytest.mark.parametrize("figure", ["time_by_class", "roofline", "memory_against_speed", "time_by_plan", "memory_by_plan", "scaling"])
def test_it_draws(executed: dict[str, nbformat.NotebookNode], figure: str) -> None:
    assert any("plotly" in kind for kind in shown(executed, f"figures.{figure}"))
