"""transformers on device xla: Trainer, generate and saving, with models of a few thousand weights."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from probes import python
from transformers import PreTrainedModel, StaticCache, Trainer, TrainingArguments

import torch_xla

VOCABULARY, LENGTH, ROWS = 32, 8, 24
FAMILIES = ["gpt2", "llama"]  # with tied weights
TRAINED = [*FAMILIES, "mixtral"]


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """accelerate keeps its state in class attributes."""
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def model_of(family: str, dropout: float = 0.0) -> PreTrainedModel:
    """Random weights, the same at each call."""
    torch.manual_seed(4)
    ends = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=1, n_head=2,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, **ends,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, **ends,
    }  # fmt: skip
    if family == "mixtral":
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **sizes)
        )
    if family == "qwen2":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=True, **sizes))


class Rows(torch.utils.data.Dataset):
    """Sequences that count upwards, so that there is something to learn."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) * (row % 3 + 1) + row) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def trainer_of(folder: Path, model: PreTrainedModel, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 12, "learning_rate": 1e-2,
        "warmup_steps": 3, "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    arguments = TrainingArguments(output_dir=str(folder), **{**settings, **options})
    return Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows())


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# Runs in a process of its own, where USE_TORCH_XLA=0 must keep everything off xla.
ON_THE_CPU = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, os.environ["TESTS"])
import test_transformers as tests
folder = Path(sys.argv[1])
found = {}
for family in tests.TRAINED:
    trainer = tests.trainer_of(folder / family, tests.model_of(family))
    assert trainer.args.device.type == "cpu", trainer.args.device
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    found[family] = [before, *tests.losses_of(trainer), trainer.evaluate()["eval_loss"]]
import torch_xla
assert not torch_xla._XLAC._xla_runtime_is_initialized()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def cpu_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """By family: losses of an evaluation, each training step and an evaluation of the Trainer on the CPU."""
    folder = tmp_path_factory.mktemp("cpu")
    more = {"USE_TORCH_XLA": "0", "TESTS": str(Path(__file__).parent)}
    done = python("-c", ON_THE_CPU, folder, timeout=240, imported=True, **more)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", TRAINED)
@pytest.mark.costs("whole models are compiled")
def test_trainer_agrees_with_the_cpu(
    family: str, tmp_path: Path, cpu_losses: dict[str, list[float]], compiles: Any
) -> None:
    trainer = trainer_of(tmp_path, model_of(family))
    assert trainer.args.device == torch.device("xla", 0)
    losses = [trainer.evaluate()["eval_loss"]]
    trainer.train()
    losses += losses_of(trainer)
    with compiles(0):
        losses.append(trainer.evaluate()["eval_loss"])
    torch.testing.assert_close(losses, cpu_losses[family], rtol=1e-3, atol=1e-4)


@pytest.mark.costs("whole models are compiled")
def test_trainer_compiles_two_kinds_of_step(tmp_path: Path, compiles: Any) -> None:
    """The first step starts the running loss; all others are one graph although the rate changes each time."""
    trainer = trainer_of(tmp_path, model_of("gpt2"), max_steps=2, warmup_steps=0)
    trainer.train()
    longer = trainer_of(tmp_path, model_of("gpt2"), max_steps=10, warmup_steps=5)
    with compiles(0):
        longer.train()


@pytest.mark.costs("whole models are compiled")
def test_trainer_accumulates_gradients(tmp_path: Path) -> None:
    rows = dict.fromkeys(("whole", "parts"), 0.0)
    for name, size, accumulate in (("whole", 8, 1), ("parts", 4, 2)):
        trainer = trainer_of(
            tmp_path, model_of("llama"), per_device_train_batch_size=size, gradient_accumulation_steps=accumulate,
            max_steps=3,
        )  # fmt: skip
        trainer.train()
        rows[name] = losses_of(trainer)[-1]
    assert rows["parts"] == pytest.approx(rows["whole"], rel=1e-4)


@pytest.mark.costs("whole models are compiled")
def test_trainer_resumes_where_it_stopped(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "max_steps": 6}
    model = model_of("gpt2", dropout=0.2)
    trainer = trainer_of(tmp_path, model, **options)
    trainer.train()
    resumed = trainer_of(tmp_path, model_of("gpt2", dropout=0.2), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert losses_of(resumed)[-2:] == pytest.approx(losses_of(trainer)[-2:], rel=1e-4)
    for ours, theirs in zip(resumed.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_weights_are_saved_once(family: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    host = model_of(family)
    host.save_pretrained(tmp_path / "host")
    model = model_of(family).to("xla")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    model.save_pretrained(tmp_path / "xla")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("xla", "host"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    again = type(model).from_pretrained(tmp_path / "xla").to("xla")
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight


def prompt() -> dict[str, torch.Tensor]:
    tokens = torch.arange(5).repeat(2, 1) + 1
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def on_xla(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.to("xla") for key, value in inputs.items()}


@pytest.mark.compiled("it pins the graphs of use, where a small read compiles none", reads=False)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt2", {}),
        ("gpt2", {"cache_implementation": "static"}),
        ("llama", {"cache_implementation": "static"}),
        ("llama", {"num_beams": 2}),
        ("mixtral", {"cache_implementation": "static"}),
    ],
    ids=["greedy", "static cache", "static cache with position ids", "beams", "experts"],
)
@pytest.mark.costs("whole models are compiled")
def test_generate_agrees_with_the_cpu(family: str, options: dict[str, Any], compiles: Any) -> None:
    # An end token makes the loop read a value for every token; this one does not come up.
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": VOCABULARY - 1, **options}
    model = model_of(family).eval()
    expected = model.generate(**prompt(), **settings)
    assert not (expected[:, 5:] == VOCABULARY - 1).any()
    model.to("xla")
    with compiles() as first:
        result = model.generate(**on_xla(prompt()), **settings)
    # Its tensor of tokens grows, so a call with lengths of its own compiles a graph per token; its second call, none.
    print(f"{family}, {options or 'greedy'}: {first.value} compiles for {settings['max_new_tokens']} tokens")
    assert first.value <= settings["max_new_tokens"] + 1
    assert result.device.type == "xla"
    assert result.tolist() == expected.tolist()
    with compiles(0):
        other = {**prompt(), "input_ids": prompt()["input_ids"] + 3}
        model.generate(**on_xla(other), **settings).cpu()


def small_model(family: str) -> PreTrainedModel:
    """With an end token, which makes the loop read a value for every token."""
    if family != "t5":
        model = model_of(family)
        model.generation_config.eos_token_id = VOCABULARY - 1
        return model.eval()
    torch.manual_seed(4)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2, pad_token_id=0,
        eos_token_id=VOCABULARY - 1, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


SAMPLE = {("llama", "static", "greedy"), ("gpt2", "static", "sampling")}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True},
    "beam": {"do_sample": False, "num_beams": 2},
}
TABLE = list(itertools.product(("llama", "qwen2", "gpt2", "t5"), ("static", "dynamic"), MODES))


@pytest.mark.compiled("the host computes what grows from token to token", reads=False)
@pytest.mark.parametrize(
    ("family", "cache", "mode"),
    [pytest.param(*row, marks=[] if row in SAMPLE else [pytest.mark.sweep, pytest.mark.slow]) for row in TABLE],
)
def test_the_graphs_of_generate(family: str, cache: str, mode: str, compiles: Any) -> None:
    tokens = 6
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, **MODES[mode]}
    if cache == "static":
        settings["cache_implementation"] = "static"
    model = small_model(family)
    expected = model.generate(**prompt(), **settings)
    model.to("xla")
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        with compiles() as count:
            results.append((model.generate(**on_xla(prompt()), **settings).tolist(), count))
    (first, compiled), (second, again) = results
    print(f"{family}, {cache} cache, {mode}: {compiled.value} graphs for {tokens} tokens, then {again.value}")
    assert first == second
    assert mode == "sampling" or first == expected.tolist()
    assert again.value == 0
    if cache == "static" and mode != "beam":  # the prompt, a token, and what of a token does not grow
        assert compiled.value == 3


@pytest.mark.parametrize("replays", [False, True], ids=["barriers", "replays"])
@torch.no_grad()
def test_a_token_compiles_nothing_with_a_static_cache(replays: bool, compiles: Any) -> None:
    """The decoding loop of one's own: a graph for the prompt, one for a token."""
    expected = model_of("llama").eval().generate(**prompt(), max_new_tokens=12, do_sample=False)
    model, ids = model_of("llama").eval().to("xla"), torch.zeros(2, 18, dtype=torch.long, device="xla")
    cache = StaticCache(config=model.config, max_cache_len=32)

    def next_token(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return model(tokens, past_key_values=cache, position_ids=positions[None]).logits[:, -1:].argmax(-1)

    def decode() -> None:
        ids.index_copy_(1, position, token)
        token.copy_(next_token(token, position))
        position.add_(1)

    token = next_token(on_xla(prompt())["input_ids"], torch.arange(5, device="xla"))
    position = torch.tensor([5], device="xla")
    graph = torch_xla.Graph()
    if replays:
        with graph:
            decode()
    for step in range(12):
        with compiles(0 if replays or step > 2 else None):
            graph.replay() if replays else decode()
            torch_xla.sync()
    assert ids[:, 5:17].tolist() == expected[:, 5:].tolist()


@pytest.mark.costs("whole models are compiled")
def test_sampling_follows_the_seed_and_the_filters() -> None:
    model = model_of("llama").eval().to("xla")
    draws = {}
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        torch.manual_seed(seed)
        draws[name] = model.generate(**on_xla(prompt()), max_new_tokens=8, do_sample=True, temperature=1.5).tolist()
    assert draws["first"] == draws["again"] != draws["other"]
    greedy = model.generate(**on_xla(prompt()), max_new_tokens=4, do_sample=False).tolist()
    only_one = model.generate(**on_xla(prompt()), max_new_tokens=4, do_sample=True, top_k=1, top_p=0.9).tolist()
    assert only_one == greedy
