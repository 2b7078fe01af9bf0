"""The guides become a site without a warning, and what they refer to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from probes import PACKAGE, ROOT, python

pytest.importorskip("myst_parser", reason="the site is made by Sphinx with MyST")


@pytest.mark.slow
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    options = ["-q", "-n", "-W", "--keep-going", "-d", tmp_path / "doctrees"]
    done = python("-m", "sphinx", *options, ROOT / "docs", tmp_path / "site", check=False, cwd=PACKAGE, timeout=250)
    assert done.returncode == 0, done.stderr
    pages = {path.stem for path in (tmp_path / "site").glob("*.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= pages
    assert "exported_program_to_stablehlo" in (tmp_path / "site" / "api.html").read_text()
    result = (tmp_path / "site" / "searchindex.js").read_text()
    assert all(f'"{name}"' in result or f"{name}:" in result for name in ("log_softmax", "cholesky_ex"))
    assert "copybutton.js" in (tmp_path / "site" / "first-program.html").read_text()


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`((?:docs|examples|tests|benchmarks|torch_xla|tools)/[\w/.-]+\.\w+)`", text))
    missing = {name for name in named if not (ROOT / name).exists()}
    assert not missing
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert all((page.parent / name).exists() for name in pictures)
