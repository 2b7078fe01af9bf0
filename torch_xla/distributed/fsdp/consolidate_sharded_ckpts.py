"""``python -m`` form of `consolidate_sharded_model_checkpoints`."""

from __future__ import annotations

import argparse

from torch_xla.distributed.fsdp.state_dict_utils import consolidate_sharded_model_checkpoints


def main() -> None:
    """Reads the command line and puts the shards together."""
    parser = argparse.ArgumentParser(description="Put the shards of a model together.")
    parser.add_argument("--ckpt_prefix", required=True, help="first part of the files' paths")
    parser.add_argument("--ckpt_suffix", default="*.pth", help="pattern for the rest")
    parser.add_argument("--save_path", default="", help="where to save; <ckpt_prefix>_consolidated.pth by default")
    options = parser.parse_args()
    consolidate_sharded_model_checkpoints(options.ckpt_prefix, options.ckpt_suffix, options.save_path)


if __name__ == "__main__":
    main()
