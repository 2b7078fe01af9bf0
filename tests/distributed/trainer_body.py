"""transformers' Trainer, in the processes of a job or, where torch_xla is not found, on the host."""

from __future__ import annotations

import torch


def trainer(index: int, folder: str, on_host: bool, batch: int) -> None:
    """transformers' Trainer on a small language model; saves what it has learned."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    tokens = torch.randint(0, 50, (16, 8), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    module = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=on_host,
        per_device_train_batch_size=batch,
        max_steps=3,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    assert (arguments.world_size, arguments.device.type) == ((1, "cpu") if on_host else (2, "xla"))
    result = Trainer(module, arguments, train_dataset=rows)
    result.train()
    if not on_host:
        import torch_xla.core.xla_model as xm

        gathered = xm.mesh_reduce("weights", next(module.parameters()).detach().cpu(), list)
        assert all(torch.equal(gathered[0], other) for other in gathered)
    result.save_model(folder)
    if not on_host:
        xm.rendezvous("over")
