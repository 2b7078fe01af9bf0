"""A worker process: jobs come in on standard input, results go out on standard output, one line of JSON each."""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Answers jobs until the input ends."""
    # With XLA_HOST_COMPUTE=new graphs run operator by operator, and are neither verified nor compiled.
    compiled = os.environ.setdefault("XLA_HOST_COMPUTE", "never") == "never"
    os.environ.update(PJRT_DEVICE=os.environ.get("PJRT_DEVICE", "CPU"), XLA_VERIFY_GRAPHS=str(int(compiled)))
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # operators that print must not disturb the replies

    import torch

    from opdb import check, overloads
    from opdb.cases import Job

    torch.set_num_threads(1)
    for line in iter(sys.stdin.readline, ""):
        job = Job(**json.loads(line))
        try:
            result: check.Result | overloads.Result = (
                overloads.check(job.op) if job.kind == overloads.KIND else check.check(job)
            )
        except Exception as error:
            text = f"the sweep itself failed: {type(error).__name__}: {error}"
            result = check.Result(job.op, job.dtype, job.kind, "fail", [text[:400]])
        print(json.dumps(result.as_dict()), file=replies)


if __name__ == "__main__":
    main()
