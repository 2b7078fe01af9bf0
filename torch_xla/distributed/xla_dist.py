"""Old launcher of jobs over the hosts of a TPU pod."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch_xla._errors import message


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Would start a command on all hosts.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        message("xla_dist", "starting a job over several hosts is not supported", do="start the command on each host")
    )


# A launcher asks for the parser first, and must learn there that it cannot go on.
resolve_and_execute = get_args_parser = main
