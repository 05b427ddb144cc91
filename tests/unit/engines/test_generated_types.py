"""All generated Python files agree with the types of what they call: one run of mypy over every golden file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from engine_plans import REPOSITORY

GOLDEN = REPOSITORY / "tests/golden/engines"


#: Train files that run a script unchanged replace functions of torch by their own, which is what these codes object to.
REPLACES = "disable_error_code = method-assign, assignment"
#: torchtitan's own sources are not read: whether it takes its file is tested by its reader, and most of it would be analysed for one file.
SETTINGS = "[mypy]\nignore_missing_imports = true\npython_version = 3.11\n[mypy-torchtitan.*]\nfollow_imports = skip\n"


def packages(target: Path) -> list[str]:
    """Each folder of golden files as a package, so that files of one name stand side by side and import their neighbours; those that replace."""
    seen: set[tuple[str, ...]] = set()
    replacing = []
    for folder in sorted({file.parent for file in GOLDEN.rglob("*.py")}):
        texts = {file.stem: file.read_text() for file in sorted(folder.glob("*.py"))}
        if tuple(texts.values()) in seen:
            continue
        seen.add(tuple(texts.values()))
        package = target / f"{folder.relative_to(GOLDEN).as_posix().replace('-', '_').replace('/', '_in_')}"
        package.mkdir()
        (package / "__init__.py").touch()
        for name, text in texts.items():
            (package / f"{name}.py").write_text(re.sub(rf"^from ({'|'.join(texts)}) import", r"from .\1 import", text, flags=re.M))
            if "runpy.run_path(str(SCRIPT)" in text:
                replacing.append(f"{package.name}.{name}")
    return replacing


def test_generated_files_have_no_type_errors(tmp_path: Path) -> None:
    sections = [f"[mypy-{name}]\n{REPLACES}\n" for name in packages(tmp_path)]
    (tmp_path / "mypy.ini").write_text(SETTINGS + "".join(sections))
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(REPOSITORY / ".mypy_cache" / "generated"), "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
