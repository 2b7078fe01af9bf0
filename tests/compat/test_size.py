"""The budget of lines: what is over it, far below it, or raised without a reason."""

from __future__ import annotations

import pytest

from tools import size


@pytest.mark.parametrize(
    ("lines", "words"), [(900, None), (1000, None), (701, None), (1001, "more than"), (700, "low")]
)
def test_a_part_keeps_to_its_budget(lines: int, words: str | None) -> None:
    result = size.problems({"package": lines, "csrc": 5}, {"package": 1000})
    assert [words in text for text in result if words] == [True] * (words is not None) and len(result) == bool(words)


def test_a_lowered_budget_fits() -> None:
    for count in range(1000, 1200):
        assert not size.problems({"tests": count}, {"tests": size.above(count)})


def test_a_raise_is_noticed() -> None:
    diff = "-package = 40000\n+package = 39900\n-csrc = 15000\n+csrc = 15100\n+tests = 41000\n"
    assert size.raised(diff) == ["csrc"]


def test_every_part_has_a_budget() -> None:
    import tomllib

    assert tomllib.loads(size.BUDGET.read_text()).keys() == size.PARTS.keys()
