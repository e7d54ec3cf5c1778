"""PEFT on transformers gives our logits with our adapter, and we give its logits with its adapter."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from oracles import torch_with
from test_export import export
from test_llamacpp import GPT, LLAMA, PROMPT, QWEN2, random_weights, training_forward, write_model
from test_lora_files import written

from zero_mpi.checkpoint.weights import open_merged
from zero_mpi.models.lora import LoRA
from zero_mpi.train.text_model import TextModel

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch, transformers, peft = torch_with("transformers", "peft")

SOME = LoRA(2, 8.0, ("blk.1.ffn_*.weight", "blk.0.attn_*.weight"))
CASES = {"llama": (LLAMA, LoRA(3, 4.5)), "qwen2": (QWEN2, SOME), "gpt2": (GPT, SOME)}
LAYERS = {"gpt2": ["c_attn", "mlp.c_proj"]}
IDS = list(PROMPT)


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.tensor([IDS])).logits[0].numpy()


def opened(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_peft_loads_our_adapter(name, tmp_path):
    model, weights, base, adapter = written(tmp_path, *CASES[name])
    export(base, tmp_path / "hf")
    export(adapter, tmp_path / "peft", "--base", base)
    theirs = peft.PeftModel.from_pretrained(opened(tmp_path / "hf"), tmp_path / "peft")
    np.testing.assert_allclose(training_forward(model, weights, IDS), logits(theirs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_we_load_one_of_peft_s(name, rslora, tmp_path):
    config = CASES[name][0]
    base = write_model(tmp_path / "base.gguf", config, random_weights(replace(config, lora=None)))
    export(base, tmp_path / "hf")
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=LAYERS.get(config.arch, ["q_proj", "k_proj", "v_proj", "down_proj"]),
        task_type="CAUSAL_LM",
        use_rslora=rslora,
        init_lora_weights=False,  # random b too, so that products are not 0
    )
    torch.manual_seed(1)
    theirs = peft.get_peft_model(opened(tmp_path / "hf"), settings)
    theirs.save_pretrained(tmp_path / "peft")
    ours = TextModel(open_merged(base, tmp_path / "peft")).logits(IDS)
    np.testing.assert_allclose(ours, logits(theirs), rtol=0, atol=1e-4)
    assert abs(ours - TextModel(base).logits(IDS)).max() > 0.1, "the adapter changes little"
