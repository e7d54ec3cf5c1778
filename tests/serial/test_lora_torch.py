"""Adapters of a frozen model have torch's gradients, and torch's losses over twenty steps of AdamW."""

import shutil
import warnings
from functools import partial

import numpy as np
import pytest
from oracles import torch_with
from safetensors.numpy import save_file
from test_export import export
from test_llamacpp import GPT, LLAMA
from test_lora_files import written
from test_optim import gradients

from zero_mpi import GradAccum, SerialComm, ShardedAdamW, ShardedModule, cross_entropy
from zero_mpi.checkpoint.weights import open_adapter
from zero_mpi.models.lora import FROZEN, LoRA

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch, transformers, peft = torch_with("transformers", "peft")

CASES = {
    "llama": (LLAMA, LoRA(3, 4.5)),
    "gpt2": (GPT, LoRA(4, 4.0, ("blk.1.ffn_*.weight", "blk.*.attn_qkv.weight"))),
}
ROWS, STEPS, RATE, RATIO = 3, 20, 3e-3, 4.0
SETTINGS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Pair:
    def __init__(self, folder, config, lora) -> None:
        self.folder = folder
        self.model, weights, base, adapter = written(folder, config, lora)
        export(base, folder / "hf")
        export(adapter, folder / "peft", "--base", base)
        self.module = ShardedModule(self.model.stages(), SerialComm(), frozen=FROZEN)
        self.module.load_state_dict(weights)
        self.accumulator = GradAccum(self.module, 1)
        there = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
        self.torch = peft.PeftModel.from_pretrained(there, folder / "peft", is_trainable=True).eval()

    def losses(self, step: int) -> tuple[float, float]:
        drawn = np.random.default_rng(step).integers(0, self.model.vocab_size, (ROWS, 17))
        x, targets = drawn[:, :-1], drawn[:, 1:]
        loss = partial(cross_entropy, targets=targets, scale=1 / targets.size)
        for number in self.accumulator:
            self.accumulator.accumulate(x if number is not None else None, loss)
        self.module.sync_gradients()
        self.torch.zero_grad()
        logits = self.torch(torch.tensor(x)).logits
        theirs = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), torch.tensor(targets).reshape(-1)
        )
        theirs.backward()
        return self.accumulator.total_loss(), float(theirs.detach())

    def as_ours(self, tensors) -> dict[str, np.ndarray]:
        """Return torch's adapter tensors by our names, with our order of rows."""
        place = self.folder / "other"
        shutil.copytree(self.folder / "peft", place, dirs_exist_ok=True)
        found = {name.replace(".default", ""): array.detach().numpy() for name, array in tensors.items()}
        save_file(found, place / "adapter_model.safetensors")
        source = open_adapter(place, self.model)
        return {name: source.tensor(name) for name in source.tensors}

    def trained(self) -> dict[str, torch.Tensor]:
        return {name: p for name, p in self.torch.named_parameters() if p.requires_grad}


@pytest.fixture(params=CASES)
def pair(request, tmp_path):
    return Pair(tmp_path, *CASES[request.param])


def assert_close(found, expected, bound):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        scale = abs(array).max()
        assert scale > 0
        np.testing.assert_allclose(found[name], array, rtol=0, atol=bound * scale, err_msg=name)


def test_gradients_are_torch_s(pair):
    ours, theirs = pair.losses(0)
    assert ours == pytest.approx(theirs, abs=1e-5)
    expected = pair.as_ours({name: p.grad for name, p in pair.trained().items()})
    assert_close(gradients(pair.module), expected, 2e-5)


def test_twenty_steps_of_adamw_are_torch_s(pair):
    """The norm is clipped and b has four times the rate of a, in torch by two parameter groups."""
    optimizer = ShardedAdamW(pair.module, lr=RATE, **SETTINGS, lr_scale={"*.lora_b": RATIO})
    named = pair.trained()
    groups = [
        {"params": [p for name, p in named.items() if f"lora_{one}" in name], "lr": rate}
        for one, rate in (("A", RATE), ("B", RATIO * RATE))
    ]
    theirs, losses = torch.optim.AdamW(groups, **SETTINGS), []
    for step in range(STEPS):
        losses.append(pair.losses(step % 4))
        optimizer.step(max_norm=1.0)
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        theirs.step()
    ours, expected = np.transpose(losses)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)
    assert ours[-4:].mean() < ours[:4].mean() - 0.1, "it learns"
    weights = pair.module.state_dict()
    found = pair.as_ours(named)
    assert_close({name: weights[name] for name in found}, found, 1e-4)
