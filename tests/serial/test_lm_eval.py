"""lm-evaluation-harness, on transformers and torch, gives our log-likelihoods and figures.

    pip install "lm_eval[hf]" torch transformers

The harness' own task files are used, with local rows. ZERO_MPI_LM_EVAL_MODEL=FILE.gguf selects another
model than SmolLM2; if it gives no tokenizer.json, transformers reads the tokenizer from the file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import task_rows
from oracles import smollm2, torch_with
from test_export import export

from zero_mpi.commands.evaluate.command import command
from zero_mpi.launch.world import World

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
names = ("transformers", "lm_eval", "lm_eval.tasks", "lm_eval.models.huggingface")
_, transformers, lm_eval, tasks, huggingface = torch_with(*names)
FILES = {"hellaswag": "hellaswag/hellaswag.yaml", "arc_easy": "arc/arc_easy.yaml", "piqa": "piqa/piqa.yaml"}
FILES |= {"openbookqa": "openbookqa/openbookqa.yaml", "boolq": "super_glue/boolq/default.yaml"}
FILES |= {"winogrande": "winogrande/default.yaml", "sciq": "sciq/sciq.yaml"}
FILES |= {"commonsense_qa": "commonsense_qa/default.yaml"}
FILES |= {"mmlu": "mmlu/default/mmlu_high_school_geography.yaml", "lambada": "lambada/lambada_openai.yaml"}
NO_SPLITS = dict.fromkeys(("dataset_name", "validation_split", "training_split", "fewshot_split", "tag"))


@pytest.fixture(scope="module")
def model() -> Path:
    return Path(os.environ.get("ZERO_MPI_LM_EVAL_MODEL") or smollm2())


@pytest.fixture(scope="module")
def theirs(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs") / "folder"
    export(model, folder, "--format", "safetensors")
    more = {}
    if not (folder / "tokenizer.json").exists():
        made = transformers.AutoTokenizer.from_pretrained(str(model.parent), gguf_file=model.name)
        more["tokenizer"] = made
    harness = huggingface.HFLM
    return harness(pretrained=str(folder), dtype="float32", batch_size=1, device="cpu", **more)


def task(folder: Path, name: str) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in task_rows.ROWS[name]))
    value = {"task": f"own_{name}", "dataset_path": "json", "test_split": "test", **NO_SPLITS}
    value["dataset_kwargs"] = {"data_files": {"test": str(path)}}
    if name in FILES:
        value["include"] = str(Path(lm_eval.__file__).parent / "tasks" / FILES[name])
    else:
        value |= {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
        value["metric_list"] = [{"metric": figure} for figure in task_rows.FIGURES[name]]
    (folder / f"own_{name}.yaml").write_text(json.dumps(value))
    return f"own_{name}"


@pytest.mark.timeout_seconds(1200)
@pytest.mark.parametrize("name", task_rows.ROWS)
def test_figures_are_those_of_the_harness(theirs, model, tmp_path, name):
    own = task(tmp_path, name)
    manager = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(
        theirs, tasks=[own], task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    flags = ["--task", str(tmp_path / f"{name}.jsonl"), "--json", str(tmp_path / "x.json")]
    assert command(World(0, 1), [str(model), *flags]) == 0
    figures = json.loads((tmp_path / "x.json").read_text())["models"][0]["choices"]
    samples = sorted(found["samples"][own], key=lambda sample: sample["doc_id"])
    for ours, sample in zip(figures["log_likelihoods"], samples, strict=True):
        got = np.array([np.ravel(np.array(each, dtype=object))[0] for each in sample["resps"]], float)
        np.testing.assert_allclose(sum(ours) if name == "documents" else ours, got, rtol=1e-5, atol=1e-4)
    for figure in task_rows.FIGURES[name]:
        assert figures[figure] == pytest.approx(found["results"][own][f"{figure},none"], rel=1e-4)
