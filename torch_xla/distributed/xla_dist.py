"""Starts a command on all hosts of a TPU pod: ``python -m torch_xla.distributed.xla_dist --tpu=NAME -- command``.

It is `gcloud compute tpus tpu-vm ssh --worker=all` with the command in the same folder and with the given environment;
the processes find each other from the pod's own metadata. accelerate starts pods through it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from torch_xla._errors import message


def get_args_parser() -> argparse.ArgumentParser:
    """The parser of this program's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_xla.distributed.xla_dist", description="Starts a command on all hosts of a TPU pod."
    )
    parser.add_argument("--tpu", required=True, metavar="NAME", help="the pod")
    parser.add_argument("--zone", help="its zone; by default gcloud's")
    parser.add_argument("--project", help="its project; by default gcloud's")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="an environment variable")
    parser.add_argument("--docker-image", default="", metavar="IMAGE", help="start it in a new container of this image")
    parser.add_argument("--docker-container", default="", metavar="NAME", help="start it in this running container")
    parser.add_argument(
        "--docker-run-flag", action="append", default=[], metavar="FLAG", help="a further option of `docker run`"
    )
    parser.add_argument(
        "--restart-tpuvm-pod-server", action="store_true", help="accepted from older scripts: there is no such server"
    )
    parser.add_argument("positional", nargs="+", metavar="command", help="the command and its arguments, after --")
    return parser


def resolve_and_execute(args: argparse.Namespace) -> None:
    """Starts the command on all hosts and waits for it.

    Args:
        args: What `get_args_parser` found.

    Raises:
        ValueError: An environment variable without a value, or two ways to use Docker.
        RuntimeError: There is no `gcloud`, or the command failed on a host.
    """
    command = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", args.tpu, "--worker=all", f"--command={_remote(args)}"]
    command += [f"--{name}={value}" for name in ("zone", "project") if (value := getattr(args, name, None))]
    if shutil.which("gcloud") is None:
        raise RuntimeError(
            message(
                "xla_dist", "no program gcloud", do="install the Google Cloud CLI, or start the command on each host"
            )
        )
    if code := subprocess.run(command).returncode:
        raise RuntimeError(message("xla_dist", f"{shlex.join(args.positional)} on {args.tpu} failed with code {code}"))


def _remote(args: argparse.Namespace) -> str:
    """The command that each host runs, for a shell."""
    for variable in args.env:
        if "=" not in variable:
            raise ValueError(message("xla_dist", f"--env={variable}", expected="NAME=VALUE"))
    if args.docker_image and args.docker_container:
        raise ValueError(message("xla_dist", "--docker-image and --docker-container", expected="one of them"))
    command = list(args.positional)
    if args.docker_image or args.docker_container:
        options = [part for variable in args.env for part in ("--env", variable)]
        if args.docker_container:
            start = ["docker", "exec", *options, args.docker_container]
        else:
            flags = ["--rm", "--privileged", "--net=host", *args.docker_run_flag]
            start = ["docker", "run", *flags, *options, args.docker_image]
        return shlex.join(["sudo", *start, *command])
    if args.env:
        command = ["env", *args.env, *command]
    folder = os.getcwd()
    return f"cd {shlex.quote(folder)} 2>/dev/null; {shlex.join(command)}"


def main(args: Sequence[str] | None = None) -> None:
    """Runs the program.

    Args:
        args: Its arguments; by default those of this process.
    """
    try:
        resolve_and_execute(get_args_parser().parse_args(args))
    except (ValueError, RuntimeError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
