"""Named checkpoints: several names may stand for one file, which is removed with its last name."""

from __future__ import annotations

import json
from collections.abc import Callable


class CheckpointTagger:
    """Keeps which name stands for which path.

    Args:
        remover: Called with a path that no name stands for any more.
    """

    def __init__(self, remover: Callable[[str], None] | None = None) -> None:
        self._remover = remover
        self._paths: dict[str, str] = {}

    def tag(self, name: str, path: str) -> None:
        """Makes a name stand for a path."""
        old = self._paths.get(name)
        self._paths[name] = path
        if old is not None and self._remover is not None and old not in self._paths.values():
            self._remover(old)

    @property
    def tags(self) -> dict[str, str]:
        """The path of each name."""
        return self._paths

    def save_to_json(self) -> str:
        """The names as JSON."""
        return json.dumps(self._paths)

    @classmethod
    def load_from_json(cls, str_json: str, remover: Callable[[str], None] | None = None) -> CheckpointTagger:
        """Reads what `save_to_json` wrote."""
        tagger = cls(remover)
        tagger._paths = json.loads(str_json)
        return tagger
