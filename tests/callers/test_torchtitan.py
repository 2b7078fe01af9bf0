"""torchtitan's own training in jobs of four processes, unmodified but for its device (`make test-callers`)."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest
from probes import ROOT, python

pytest.importorskip("torchtitan", reason="make test-callers installs it: pip would take a newer PyTorch for it")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROGRAM = re.search(r"```py\n(# file: titan\.py\n.*?)```", (ROOT / "docs/examples.md").read_text(), re.DOTALL)
STEP = re.compile(r"step:\s+(\d+)\b[^\n]*?loss:\s+([\d.]+)")  # a process without the last stage says -1
WAYS = {
    "tp": ["--parallelism.tensor_parallel_degree", "2"],
    "pp": ["--parallelism.pipeline_parallel_degree", "2"],
    "cp": ["--parallelism.context_parallel_degree", "2"],
}


def make_assets(folder: Path) -> None:
    """A tokenizer and texts where the configuration of torchtitan's debug model looks for those of its clone."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    choose = random.Random(0)
    words = ["".join(choose.choices("abcdefghij", k=choose.randint(2, 6))) for _ in range(300)]
    texts = [" ".join(choose.choices(words, k=400)) for _ in range(200)]
    for name in ("tokenizer", "c4_test"):
        (folder / "tests" / "assets" / name).mkdir(parents=True)
    data = "\n".join(json.dumps({"text": text}) for text in texts)
    (folder / "tests" / "assets" / "c4_test" / "data.json").write_text(data)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=1000, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer.save(str(folder / "tests" / "assets" / "tokenizer" / "tokenizer.json"))
    names = dict(zip(("bos_token", "eos_token"), special, strict=True))
    (folder / "tests" / "assets" / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))


def train(folder: Path, *options: str, processes: int = 4) -> dict[int, float]:
    """The loss of each step of a job, whose checkpoints are in the folder."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "titan.py"]
    command += ["--module=llama3", "--config=llama3_debugmodel", "--parallelism.spmd_backend=partial_dtensor"]
    command += ["--training.disable_cuda_graphs", "--training.mixed_precision_param=float32", "--training.steps=4"]
    command += ["--training.local_batch_size=2", "--training.seq_len=256", f"--dump_folder={folder}"]
    command += ["--checkpoint.enable", "--checkpoint.interval=2", *options]
    variables = {"XLA_USE_AS_ACCELERATOR": "1", "HF_HUB_OFFLINE": "1"}
    done = python(*command, devices=1, cwd=folder.parent, timeout=800, **variables)
    return {int(step): float(loss) for step, loss in STEP.findall(done.stdout + done.stderr)}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the program, what it reads, and the parameters with which each job begins."""
    assert PROGRAM is not None
    folder = tmp_path_factory.mktemp("torchtitan")
    (folder / "titan.py").write_text(PROGRAM[1])
    make_assets(folder)
    train(folder / "start", "--checkpoint.create_seed_checkpoint", processes=1)
    return folder / "start"


def test_ways_to_split_the_model_and_a_resumed_job(start: Path) -> None:
    """Each way with FSDP over two, so that all take the same batches."""
    results = {}
    for way, options in WAYS.items():
        shutil.copytree(start, start.parent / way)
        results[way] = train(start.parent / way, *options)
    for way, result in results.items():
        assert list(result) == [1, 2, 3, 4] and result[4] < result[1]
        assert result == pytest.approx(results["tp"], rel=1e-4), way
    shutil.rmtree(start.parent / "tp" / "checkpoint" / "step-4")
    resumed = train(start.parent / "tp", *WAYS["tp"])
    assert resumed == pytest.approx({step: results["tp"][step] for step in (3, 4)}, rel=1e-5)
